// lp_site: sums of observed products, and lp_jax_observe, by which compiled functions of JAX add to them.
#include "observing.hpp"

#include <stdlib.h>

namespace lp {
namespace {

const int TABLE = 8192;

#include "measuring.hpp"

uint64_t hashed(uint64_t x) {
    x = (x + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// Random signs; those of a row of SUMS numbers begin at a random one.
float signs[TABLE + LP_SUMS];
std::atomic<bool> has_signs;

void make_signs() {
    if (has_signs.load(std::memory_order_acquire)) return;
    for (int i = 0; i < TABLE + LP_SUMS; i++) signs[i] = hashed(i / 64) >> i % 64 & 1 ? 1.0f : -1.0f;
    has_signs.store(true, std::memory_order_release);
}

}  // namespace

lp_observed* begin_product(Site& site, int64_t index, bool& begins) {
    make_signs();
    site.products++;
    begins = !site.last || !(site.products & (site.products - 1));
    if (begins) {
        lp_observed* next = (lp_observed*)calloc(1, sizeof(lp_observed));
        if (!next) return nullptr;
        (site.last ? site.last->next : site.first) = next;
        site.last = next;
        site.position = 0;
        next->begin = index < 0 ? site.products - 1 : index;
        next->fault_at = -1;
    }
    site.last->calls++;
    site.last->end = index < 0 ? site.products : index + 1;
    return site.last;
}

void add_run(Site& site, lp_observed& to, Run x) {
    double sums[3] = {};
    const Lanewise* functions = lanewise();
    const auto measure = functions ? functions->measure : measure_run;
    const int64_t size = x.is_wide ? 8 : 4;
    while (x.count > 0) {
        const int64_t slot = site.position % LP_SUMS;
        const uint64_t row = hashed(~(uint64_t)(site.position / LP_SUMS));
        Run part = x;
        if (part.count > LP_SUMS - slot) part.count = LP_SUMS - slot;
        measure(part, signs + row % TABLE + slot, row >> 63 ? 1.0f : -1.0f, to.sketch + slot, sums);
        site.position += part.count;
        x.count -= part.count;
        x.numbers = (const char*)x.numbers + part.count * size;
        if (x.again) x.again = (const char*)x.again + part.count * size;
    }
    to.square += sums[0];
    to.error += sums[1];
    to.reference += sums[2];
}

bool may_be_faulty(const lp_observed& x) { return x.fault_at < 0 && !(x.square < __builtin_inf()); }

}  // namespace lp

LP_API void* lp_site_create(void) { return calloc(1, sizeof(lp::Site)); }

LP_API void lp_site_free(void* at) {
    if (!at) return;
    lp_free_observed(lp_site_take(at));
    free(at);
}

LP_API int32_t lp_site_add(void* at, const void* numbers, const void* again, int64_t count, int32_t is_wide,
                           int64_t multiplications, int64_t index) {
    lp::Site& site = *(lp::Site*)at;
    const lp::SiteLock lock(site);
    bool begins;
    lp_observed* to = lp::begin_product(site, index, begins);
    if (!to) return 0;
    to->is_compared |= again != nullptr;
    to->multiplications += multiplications;
    lp::add_run(site, *to, {numbers, again, count, is_wide != 0});
    if (!lp::may_be_faulty(*to)) return begins;
    to->fault_at = to->end - 1;
    return begins | 2;
}

LP_API lp_observed* lp_site_take(void* at) {
    lp::Site& site = *(lp::Site*)at;
    const lp::SiteLock lock(site);
    lp_observed* first = site.first;
    site.first = site.last = nullptr;
    return first;
}

LP_API void lp_free_observed(lp_observed* first) {
    while (first) {
        lp_observed* next = first->next;
        free(first->sampled);
        free(first);
        first = next;
    }
}

namespace {

int fault_of(const lp_numbers& x) {
    if (x.is_wide) return lp::fault_of((const double*)x.at, x.count, 1);
    return lp::fault_of((const float*)x.at, x.count, 1);
}

// Extents and strides of some axes of an operand.
struct Axes {
    int64_t count;
    const int64_t* pairs;
    int64_t offset(int64_t number) const {
        int64_t found = 0;
        for (int64_t i = count - 1; i >= 0; i--) {
            found += number % pairs[2 * i] * pairs[2 * i + 1];
            number /= pairs[2 * i];
        }
        return found;
    }
};

// Vectors along k of an operand: their number and length, and the axes.
struct Vectors {
    int64_t count, length;
    Axes across, along;
    explicit Vectors(const int64_t* words)
        : count(words[0]), length(words[1]), across{words[2], words + 4}, along{words[3], words + 4 + 2 * words[2]} {}
    const int64_t* end() const { return along.pairs + 2 * along.count; }
    float* copy(const lp_numbers& x, float* to) const {
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < length; j++) {
                const int64_t offset = across.offset(i) + along.offset(j);
                *to++ = x.is_wide ? (float)((const double*)x.at)[offset] : ((const float*)x.at)[offset];
            }
        return to;
    }
};

void sample(lp_observed& to, const lp_numbers* factors, const int64_t* words) {
    const Vectors a(words);
    const Vectors b(a.end());
    float* at = to.sampled = (float*)malloc((size_t)(a.count * a.length + b.count * b.length) * sizeof(float));
    if (!at) return;
    b.copy(factors[1], a.copy(factors[0], at));
    for (const bool is_b : {false, true}) {
        to.vectors[is_b] = (int32_t)(is_b ? b : a).count;
        to.length[is_b] = (int32_t)(is_b ? b : a).length;
    }
}

}  // namespace

LP_API void lp_site_observe(void* at, const lp_numbers* x, int64_t multiplications, int32_t is_compared,
                            const int64_t* words) {
    lp::Site& site = *(lp::Site*)at;
    const lp::SiteLock lock(site);
    bool begins;
    lp_observed* to = lp::begin_product(site, -1, begins);
    if (!to) return;
    to->multiplications += multiplications;
    to->is_compared |= is_compared;
    lp::add_run(site, *to, {x[0].at, is_compared ? x[1].at : nullptr, x[0].count, x[0].is_wide != 0});
    if (begins && words) sample(*to, x + 2, words);
    if (!lp::may_be_faulty(*to) || !(to->fault = fault_of(x[0]))) return;
    to->fault_at = to->end - 1;
    to->fault_again = fault_of(x[1]);
    to->fault_of_a = fault_of(x[2]);
    to->fault_of_b = fault_of(x[3]);
}

// -- JAX -------------------------------------------------------------------------------------------------------------

namespace {

// The arguments of a handler in XLA's interface for foreign functions, version 0.3, as far as they are read.
struct Versioned {
    size_t size;
    struct Extension {
        size_t size;
        int type;  // 1: metadata
        Extension* next;
        struct Metadata {
            size_t size;
            size_t version_size;
            void* version_extension;
            int major, minor;
        }* metadata;
    }* extension;
};
struct Buffer : Versioned {
    int type;
    const void* data;
    int64_t rank;
    const int64_t* extents;
};
struct Arguments : Versioned {
    int64_t size;
    int* types;
    void** at;
};
struct Attributes : Versioned {
    int64_t size;
    int* types;
    void* names;
    void** at;
};
struct Frame : Versioned {
    const void* api;
    void* context;
    int stage;
    Arguments arguments, results;
    Attributes attributes;
};
struct Words {
    int type;
    size_t size;
    const int64_t* at;
};
const int F64 = 12, C64 = 15, C128 = 18;  // types of XLA

lp_numbers numbers_of(const Buffer& x) {
    int64_t count = x.type == C64 || x.type == C128 ? 2 : 1;
    for (int64_t i = 0; i < x.rank; i++) count *= x.extents[i];
    return {x.data, count, x.type == F64 || x.type == C128, 0};
}

}  // namespace

// Operands: the result, that of the reference, and both factors. Attribute: the site, the multiplications, whether the
// reference is another product, and the words of lp_site_observe, if any.
LP_API void* lp_jax_observe(void* at) {
    Frame& frame = *(Frame*)at;
    if (frame.extension && frame.extension->type == 1) {
        frame.extension->metadata->major = 0;
        frame.extension->metadata->minor = 3;
        return nullptr;
    }
    lp_numbers operands[4];
    for (int i = 0; i < 4; i++) operands[i] = numbers_of(*(const Buffer*)frame.arguments.at[i]);
    const Words& words = *(const Words*)frame.attributes.at[0];
    const int64_t* const of_factors = words.size > 3 ? words.at + 3 : nullptr;
    lp_site_observe((void*)words.at[0], operands, words.at[1], (int32_t)words.at[2], of_factors);
    return nullptr;
}
