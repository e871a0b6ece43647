// Products of numbers as they are stored: from the description of a product to the work of a unit.
//
// Decided here: the unit's functions, the terms (products of parts and of real and imaginary parts), whether the
// transposed product is computed, how a batch is shared among threads, and the recomputation in FP32 of sums that are
// Inf or NaN only because operands were split.
#include "kernel.hpp"

namespace lp {
#if defined(__x86_64__)
Unit fp32_avx2(), int8_avx2(), int8_avxvnni(), fp32_avx512(), bf16_avx512(), int8_avx512(), bf16_amx(), pair_amx(),
    int8_amx();
#else
Unit fp32_neon(), bf16_neon(), int8_neon();
#endif
}  // namespace lp

namespace {
using namespace lp;

// In the order of lp_unit.
#if defined(__x86_64__)
constexpr Unit (*const UNITS[LP_UNITS])() = {
    is_built(LP_FP32_AVX2) ? lp::fp32_avx2 : nullptr,       is_built(LP_INT8_AVX2) ? lp::int8_avx2 : nullptr,
    is_built(LP_INT8_AVXVNNI) ? lp::int8_avxvnni : nullptr, is_built(LP_FP32_AVX512) ? lp::fp32_avx512 : nullptr,
    is_built(LP_BF16_AVX512) ? lp::bf16_avx512 : nullptr,   is_built(LP_INT8_AVX512) ? lp::int8_avx512 : nullptr,
    is_built(LP_BF16_AMX) ? lp::bf16_amx : nullptr,         is_built(LP_INT8_AMX) ? lp::int8_amx : nullptr,
};
#else
Unit (*const UNITS[LP_UNITS])() = {nullptr, nullptr, nullptr,       nullptr,       nullptr,      nullptr,
                                   nullptr, nullptr, lp::fp32_neon, lp::bf16_neon, lp::int8_neon};
#endif

bool find(int unit, bool pairs, Unit& to) {
    if (unit < 0 || unit >= LP_UNITS || !UNITS[unit] || !(lp_units() >> unit & 1)) return false;
#if defined(__x86_64__)
    if constexpr (is_built(LP_BF16_AMX))
        if (pairs) {
            to = lp::pair_amx();
            return true;
        }
#endif
    to = UNITS[unit]();
    return true;
}

int fp32_unit_of(int unit) {
    if (unit == LP_BF16_NEON) return LP_FP32_NEON;
    return unit == LP_BF16_AVX512 || unit == LP_BF16_AMX ? LP_FP32_AVX512 : unit;
}

const char* moved(const void* data, const lp_matrix& x, int64_t product) {
    if (!data || !x.batch_offsets) return (const char*)data;
    return (const char*)data + x.batch_offsets[product] * (is_coded(x.type) ? 1 : bits_of(x.type) / 8);
}

lp::Source source(const lp_matrix& x, int64_t lanes, int64_t steps, bool by_column, const lp_scheme& s, int parts) {
    lp::Source to = {};
    to.lanes = lanes;
    to.steps = steps;
    to.type = x.type;
    to.lane = by_column ? x.col : x.row;
    to.k = by_column ? x.row : x.col;
    to.block = x.block;
    if (is_coded(x.type)) {
        to.k = 1;
        to.is_stored = x.packed;
    }
    to.lane_offsets = x.row_offsets;
    to.k_offsets = x.inner_offsets;
    to.format = parts ? s.format : LP_EXACT;
    to.parts = parts;
    to.part_exponent = s.part_exponent;
    to.sums_parts = s.sums_parts;
    return to;
}

Target target(const lp_matrix& x, const void* at) {
    return Target{(char*)at, x.row, x.col, x.row_offsets, x.type < 0 ? LP_F32 : x.type};
}

// The products of parts in their order; each as four of bfloat16 pairs, each as four (or two) of real numbers.
void make_terms(Work& w, const lp_scheme& s, bool pairs) {
    const int complex_a = w.a.type == LP_C64, complex_b = w.b.type == LP_C64, each = pairs ? 2 : 1;
    w.planes = complex_a || complex_b ? 2 : 1;
    w.term_count = 0;
    bool begun[2] = {false, false};
    for (int i = 0; i < (s.pair_count ? s.pair_count : 1); i++)
        for (int sub = each * each - 1; sub >= 0; sub--)  // the smallest products first
            for (int re_im = 0; re_im < 4; re_im++) {
                const int ca = re_im & 1, cb = re_im >> 1, plane = ca ^ cb;
                if (ca > complex_a || cb > complex_b) continue;
                lp::Term& term = w.terms[w.term_count++];
                const int pair_a = s.pair_count ? s.pair_a[i] : 0, pair_b = s.pair_count ? s.pair_b[i] : 0;
                term.a = (int16_t)((ca * w.a.all_parts() + pair_a) * each + (sub & pairs));
                term.b = (int16_t)((cb * w.b.all_parts() + pair_b) * each + (sub >> pairs));
                term.factor = (s.pair_count ? s.factor[i] : 1) * (ca && cb ? -1.0f : 1.0f);
                term.plane = (int8_t)plane;
                term.adds = begun[plane];
                begun[plane] = true;
            }
}

// out^T = b^T a^T: if the columns of out are contiguous, or the product is narrow.
void orient(Work& w, bool is_packed) {
    const bool by_column = w.out.row == 1 && w.out.col != 1, narrow = w.n <= 16 && w.n < w.m;
    if (is_packed || w.out.row_offsets || w.c.row_offsets || is_coded(w.b.type) || !(by_column || narrow)) return;
    std::swap(w.m, w.n);
    std::swap(w.a, w.b);
    std::swap(w.scales_a, w.scales_b);
    for (Target* x : {&w.out, &w.c, &w.bias}) std::swap(x->row, x->col);
    for (int i = 0; i < w.term_count; i++) std::swap(w.terms[i].a, w.terms[i].b);
    w.is_transposed = true;
}

bool is_split(const lp_scheme& s) { return s.parts_a > 1 || s.parts_b > 1; }

bool uses_pairs(const lp_product& p) {
    return p.unit == LP_BF16_AMX && (p.scheme.format == LP_TO_TF32 || p.scheme.format == LP_TO_F16);
}

const int64_t LARGE_RESULT = 1 << 20;  // bytes from which a result is written past the caches

// All but the addresses of a product.
void describe(Work& w, const lp_product& p, const lp_call& c) {
    w.m = p.m;
    w.n = p.n;
    w.k = p.k;
    w.threads = c.threads;
    w.activation = p.activation;
    w.a = source(p.a, p.m, p.k, false, p.scheme, p.scheme.parts_a);
    w.b = source(p.b, p.n, p.k, true, p.scheme, p.scheme.parts_b);
    w.out = target(p.out, nullptr);
    w.c = target(p.c, nullptr);
    w.bias = target(p.bias, c.bias);
    w.bias.row = 0;
    for (int i = 0; i < 2; i++) {
        w.alpha[i] = (float)c.alpha[i];
        w.beta[i] = (float)c.beta[i];
    }
    w.scales_a = p.scheme.scaled && p.scheme.parts_a;
    w.scales_b = p.scheme.scaled && p.scheme.parts_b;
    w.checks = is_split(p.scheme) || uses_pairs(p);
    w.streams = p.batches * p.m * p.n * bits_of(p.out.type) / 8 > LARGE_RESULT;
    make_terms(w, p.scheme, uses_pairs(p));
    w.packed_b = nullptr;
    w.is_transposed = false;
    w.row_scales = w.col_scales = nullptr;
    w.pieces = {};
}

// A packed b of 16 bits is kept as it is by FP32 units, in the order of codes.
void keep_16_bits(Work& w, const lp_product& p) {
    const bool is_fp32 = p.unit == LP_FP32_AVX2 || p.unit == LP_FP32_AVX512 || p.unit == LP_FP32_NEON;
    const bool is_16_bits = p.b.type == LP_BF16 || p.b.type == LP_F16;
    if (!is_fp32 || !is_16_bits || p.scheme.parts_b || p.a.type == LP_C64) return;
    w.b.type = p.b.type == LP_BF16 ? LP_CODES_BF16 : LP_CODES_F16;
    w.b.block = w.k;
    if (!p.b.packed) return;
    w.b.is_stored = true;
    w.b.k = 1;
    w.b.lane_offsets = w.b.k_offsets = nullptr;
}

const int64_t PREFETCHED = 1 << 18;  // bytes of a matrix of a batch

// The addresses of a product.
void place(Work& w, const lp_product& p, const lp_call& c, int64_t product, int64_t packed_bytes) {
    auto place_operand = [&](lp::Source& s, const lp_matrix& x, const void* data) {
        s.at = moved(data, x, product);
        const bool precedes = s.lanes * s.steps * bits_of(s.type) <= 8 * PREFETCHED && product + 1 < p.batches;
        s.next = precedes ? moved(data, x, product + 1) - s.at : 0;
    };
    place_operand(w.is_transposed ? w.b : w.a, p.a, c.a);
    place_operand(w.is_transposed ? w.a : w.b, p.b, c.b);
    if (p.b.packed) {
        const char* const packed = (const char*)c.b + (p.b.batch_offsets ? product * packed_bytes : 0);
        if (is_coded(w.b.type)) w.b.at = packed;
        else w.packed_b = (const uint32_t*)packed;
    } else if (is_coded(p.b.type)) {
        const int64_t offset = p.b.batch_offsets ? p.b.batch_offsets[product] : 0,
                      blocks = offset * 8 / bits_of(p.b.type) / p.b.block;
        if (c.b_scales) w.b.scales = (const uint8_t*)c.b_scales + blocks * (has_float_scales(p.b.type) ? 4 : 1);
        w.b.scale_lane = p.b.scale_col;
        w.b.zeros = (const uint8_t*)c.b_zeros + blocks;
    }
    if (is_coded(p.a.type) && c.a_scales) {
        const int64_t offset = p.a.batch_offsets ? p.a.batch_offsets[product] : 0,
                      blocks = offset * 8 / bits_of(p.a.type) / p.a.block;
        w.a.scales = (const uint8_t*)c.a_scales + blocks * (has_float_scales(p.a.type) ? 4 : 1);
    }
    const float* rows = c.row_scales ? c.row_scales + (p.a.batch_offsets ? product * p.m : 0) : nullptr;
    const float* cols = c.col_scales ? c.col_scales + (p.b.batch_offsets ? product * p.n : 0) : nullptr;
    w.row_scales = w.is_transposed ? cols : rows;
    w.col_scales = w.is_transposed ? rows : cols;
    if (w.pieces.length) {
        const int64_t row_step = (p.a.batch_offsets ? p.batches : 1) * p.m,
                      column_step = (p.b.batch_offsets ? p.batches : 1) * p.n;
        w.pieces.rows = w.row_scales;
        w.pieces.columns = w.col_scales;
        w.pieces.row_step = w.is_transposed ? column_step : row_step;
        w.pieces.column_step = w.is_transposed ? row_step : column_step;
        w.row_scales = w.col_scales = nullptr;
    }
    w.out.at = (char*)moved(c.out, p.out, product);
    if (c.c && (c.beta[0] != 0 || c.beta[1] != 0)) w.c.at = (char*)moved(c.c, p.c, product);
}

// A product whose sums are kept in memory until they have been checked: non-finite sums of split operands are computed
// again in FP32 from the operands as they are stored, and those of pairs from the rounded operands. The epilogue makes
// them NaN; finite sums that overflow where they are unscaled stay infinite.
__attribute__((noinline)) int32_t in_memory(const lp_product& p, const Work& w, const Unit& unit) {
    const int64_t each = w.planes, size = w.m * w.n * each;
    lp::Memory sums;
    float* first = (float*)sums.of(8 * size + 640);
    if (!first) return LP_NO_MEMORY;
    float* second = first + (size + 15) / 16 * 16;
    Work plain = w;
    plain.alpha[0] = 1;
    plain.alpha[1] = 0;
    plain.c.at = plain.bias.at = nullptr;
    plain.activation = 0;
    plain.streams = false;
    plain.row_scales = plain.col_scales = nullptr;
    plain.out = Target{(char*)first, w.n, 1, nullptr, each == 2 ? LP_C64 : LP_F32};
    int32_t status = unit.gemm(plain);
    if (status == lp::NOT_FINITE) {
        if (w.packed_b) return LP_NOT_FINITE;
        Unit fp32;
        lp_product exact = p;
        if (!find(fp32_unit_of(p.unit), false, fp32)) return LP_UNSUPPORTED;
        exact.scheme.pair_count = 0;
        if (is_split(p.scheme)) {
            plain.a.parts = plain.b.parts = 0;
            plain.a.format = plain.b.format = LP_EXACT;
            plain.scales_a = plain.scales_b = false;
            plain.a.factors = plain.b.factors = nullptr;
        }
        plain.out.at = (char*)second;
        plain.checks = false;
        make_terms(plain, exact.scheme, false);
        status = fp32.gemm(plain);
        for (int64_t i = 0; i < size; i += each) {
            const bool is_nan = first[i] != first[i] || first[i + each - 1] != first[i + each - 1];
            if (is_nan) {
                first[i] = second[i];
                first[i + each - 1] = second[i + each - 1];
            }
        }
    }
    if (status == LP_OK) unit.epilogue(w, first);
    return status;
}

int32_t one(const lp_product& p, Work& w, const Unit& unit) {
    // c may be the result, which a recomputation would need again.
    if (w.checks && w.c.at) return in_memory(p, w, unit);
    const int32_t status = unit.gemm(w);
    if (status != lp::NOT_FINITE) return status;
    return w.packed_b ? LP_NOT_FINITE : in_memory(p, w, unit);
}

const int64_t SHARED_PRODUCT = 1 << 25;  // multiplications from which all threads share each product of a batch

__attribute__((noinline)) int64_t bytes_of_packed(const lp_product& p, const Unit& unit) {
    lp_call none = {};
    Work w;
    describe(w, p, none);
    keep_16_bits(w, p);
    return unit.pack(w, nullptr);
}

// Not inline: its frame has copies of `w`, and the threads that multiply small matrices may have little stack.
__attribute__((noinline)) int32_t batch(const lp_product& p, const lp_call& c, Work& w, const Unit& unit,
                                        int64_t packed_bytes) {
    const bool shared = p.m * p.n * p.k >= SHARED_PRODUCT || p.batches < c.threads;
    const int threads = shared || p.batches * p.m * p.n * p.k < 1 << 19 ? 1 : c.threads;
    std::atomic<int> status{LP_OK};
    w.threads = shared ? c.threads : 1;
    auto multiply = [&, w](int64_t i) mutable {
        place(w, p, c, i, packed_bytes);
        if (const int32_t found = one(p, w, unit)) status = found;
    };
    lp::share(p.batches, threads, multiply);
    return status;
}

}  // namespace

int32_t lp::gemm(const lp_product& p, const lp_call& c, int64_t piece, double alpha_of_pieces) {
    const Arithmetic standard;  // the caller's thread may flush subnormal numbers
    Unit unit;
    if (!find(p.unit, uses_pairs(p), unit) || p.m < 0 || p.n < 0 || p.k < 1) return LP_UNSUPPORTED;
    if (is_coded(p.a.type) && !is_coded(p.b.type)) return LP_UNSUPPORTED;
    if (!p.m || !p.n || !p.batches) return LP_OK;
    const int64_t packed_bytes = p.b.packed && p.batches > 1 ? bytes_of_packed(p, unit) : 0;
    Work w;
    describe(w, p, c);
    w.pieces.length = piece;
    w.pieces.alpha = (float)alpha_of_pieces;
    if (p.b.packed) keep_16_bits(w, p);
    orient(w, p.b.packed);
    if (p.batches > 1) return batch(p, c, w, unit, packed_bytes);
    place(w, p, c, 0, 0);
    return one(p, w, unit);
}

int64_t lp::pack(const lp_product& p, const lp_call& call, void* to) {
    const Arithmetic standard;
    Unit unit;
    if (!find(p.unit, uses_pairs(p), unit) || p.k < 1) return -1;
    const int64_t each = bytes_of_packed(p, unit), count = p.b.batch_offsets ? p.batches : 1;
    for (int64_t i = 0; to && each > 0 && i < count; i++) {
        Work w;
        describe(w, p, call);
        keep_16_bits(w, p);
        place(w, p, call, i, 0);
        unit.pack(w, (char*)to + i * each);
    }
    return each < 0 ? -1 : each * count;
}

int32_t lp::apply_epilogue(const lp_product& p, const lp_call& c, const float* sums) {
    const Arithmetic standard;
    Unit unit;
    if (!find(p.unit, false, unit)) return LP_UNSUPPORTED;
    share(p.batches, c.threads, [&](int64_t i) {
        Work w;
        describe(w, p, c);
        place(w, p, c, i, 0);
        unit.epilogue(w, sums + i * p.m * p.n);
    });
    return LP_OK;
}
