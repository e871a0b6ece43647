// Records of observed products, on Linux: each has the sums of squares of its result and of its error, and a sketch.
//
// A sketch has 1,021 sums of the elements with random signs, as in core/recording.py; that of fewer elements has the
// elements. After MOST_SKETCHES products, those of a function and routine are summed.
#include "blas_observing.hpp"
#if defined(__linux__)
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

namespace lp::blas {

typedef lp_blas_observed Record;

// A function and routine.
struct Site {
    Site* next;
    int64_t count;
    Record* total;  // of further products
    Record kind;
};

struct Observer {
    pid_t process;  // forked ones record nothing
    lp_blas_observation options;
    pthread_mutex_t lock;
    Site* sites;
    int64_t size;  // of records
    Record *first, *last;
};

std::atomic<int> observers;

Observer* new_observer(const lp_blas_observation& options) {
    Observer* observer = (Observer*)calloc(1, sizeof(Observer));
    if (!observer) return nullptr;
    observer->process = getpid();
    observer->options = options;
    pthread_mutex_init(&observer->lock, nullptr);
    observers += options.records != 0;
    return observer;
}

void free_observer(Observer* observer) {
    if (!observer) return;
    observers -= observer->options.records != 0;
    lp_blas_free_observed(observer->first);
    while (Site* site = observer->sites) {
        observer->sites = site->next;
        free(site);
    }
    pthread_mutex_destroy(&observer->lock);
    free(observer);
}

namespace {

const int SUMS = 1021, WORD = 64, MOST_NUMBERS = 1 << 13;
const int64_t MOST_SKETCHES = 8192, MOST_SITES = 1024;
enum Fault { HAS_NAN = 1, HAS_INF = 2 };

struct Sums {
    double square, error, reference;
    int64_t position;  // of the next number
    double* sketch;    // null: none
};

// Adds numbers of the result, and of the reference if there is one.
template <class Real> void add(Sums& sums, const Real* x, const Real* again, int64_t step, int64_t count) {
    while (count > 0) {
        const int64_t in_word = sums.position % WORD;
        const int64_t slot = sums.position % SUMS;
        const int64_t run = std::min(count, std::min(WORD - in_word, SUMS - slot));
        const uint64_t signs = mixed(mixed(1, sums.position / WORD), 1) >> in_word;
        for (int64_t i = 0; i < run; i++) {
            const double value = x[i * step];
            sums.square += value * value;
            if (sums.sketch) sums.sketch[slot + i] += signs >> i & 1 ? value : -value;
            if (!again) continue;
            const double other = again[i * step];
            sums.reference += other * other;
            sums.error += (value - other) * (value - other);
        }
        sums.position += run;
        count -= run;
        x += run * step;
        if (again) again += run * step;
    }
}

// Calls `visit` with the first element and the number of elements of each line of the part of a matrix that is stored.
template <class Visit> void for_lines(const Matrix& x, int64_t rows, int64_t cols, Visit visit) {
    const bool by_rows = x.col <= x.row;
    const bool has_end = x.part == (by_rows ? UPPER : LOWER);
    const int64_t lines = by_rows ? rows : cols;
    const int64_t length = by_rows ? cols : rows;
    const int64_t across = by_rows ? x.row : x.col;
    const int64_t along = by_rows ? x.col : x.row;
    for (int64_t line = 0; line < lines; line++) {
        const int64_t first = x.part != WHOLE && has_end ? line : 0;
        const int64_t end = x.part == WHOLE || has_end ? length : std::min(length, line + 1);
        if (first < end) visit(line * across + first * along, along, end - first);
    }
}

template <class Real, int PLANES>
void measure(Sums& sums, const Product& p, const void* result, const void* again) {
    for_lines(p.out, p.m, p.n, [&](int64_t at, int64_t step, int64_t count) {
        for (int plane = 0; plane < PLANES; plane++) {
            const int64_t first = at * PLANES + plane;
            add(sums, (const Real*)result + first, again ? (const Real*)again + first : nullptr, step * PLANES, count);
        }
    });
}

// Copies vectors along k; returns the end of the copy.
template <class Real> float* copy(const Matrix& x, bool is_b, int vectors, int length, float* to) {
    const int64_t across = is_b ? x.col : x.row;
    const int64_t along = is_b ? x.row : x.col;
    for (int i = 0; i < vectors; i++)
        for (int j = 0; j < length; j++) *to++ = (float)((const Real*)x.at)[i * across + j * along];
    return to;
}

template <class Real, int PLANES> int fault_of(const Matrix& x, const void* from, int64_t rows, int64_t cols) {
    int found = 0;
    for_lines(x, rows, cols, [&](int64_t at, int64_t step, int64_t count) {
        for (int64_t i = 0; i < count * PLANES; i++) {
            const Real value = ((const Real*)from)[(at + i / PLANES * step) * PLANES + i % PLANES];
            if (value != value) found |= HAS_NAN;
            else if (__builtin_isinf(value)) found |= HAS_INF;
        }
    });
    return found;
}

Site* site_of(Observer& observer, const Record& kind) {
    int64_t size = 0;
    for (Site* site = observer.sites; site; site = site->next, size++) {
        const Record& known = site->kind;
        const bool is_same = known.routine == kind.routine && known.letter == kind.letter && known.mode == kind.mode &&
            known.reason == kind.reason && !strcmp(known.caller, kind.caller);
        if (is_same) return site;
    }
    Site* site = size < MOST_SITES ? (Site*)calloc(1, sizeof(Site)) : nullptr;
    if (!site) return nullptr;
    site->kind = kind;
    site->next = observer.sites;
    return observer.sites = site;
}

void add_record(Observer& observer, Record* record) {
    record->next = nullptr;
    (observer.last ? observer.last->next : observer.first) = record;
    observer.last = record;
    observer.size++;
}

// Counts a product; true if its number at its site is a power of 2.
bool is_next_sampled(Observer& observer, const Record& kind) {
    pthread_mutex_lock(&observer.lock);
    Site* site = site_of(observer, kind);
    const int64_t count = site ? ++site->count : 3;
    pthread_mutex_unlock(&observer.lock);
    return !(count & (count - 1));
}

// Adds to the record of all further products of a function and routine.
void add_to_total(Observer& observer, const Record& kind) {
    Site* site = site_of(observer, kind);
    if (!site) return;
    if (!site->total) {
        site->total = (Record*)calloc(1, sizeof(Record));
        if (!site->total) return;
        *site->total = kind;
        site->total->m = site->total->n = site->total->k = 0;
        add_record(observer, site->total);
        return;
    }
    Record& total = *site->total;
    total.calls++;
    total.multiplications += kind.multiplications;
    total.square += kind.square;
    total.error += kind.error;
    total.reference += kind.reference;
    if (!total.fault) total.fault = kind.fault;
}

}  // namespace

int mode_of(const Observer& observer, int mode, int routine, const void* caller) {
    const char* const alone = observer.options.alone;
    if (mode < 0 || !*alone) return mode;
    char name[sizeof observer.options.alone] = "";
    name_function(caller, name, sizeof Record::caller, true);
    const size_t length = strlen(name);
    snprintf(name + length, sizeof name - length, "%s(%s)", length ? " " : "", name_of(routine));
    return strcmp(name, alone) ? observer.options.reference : mode;
}

bool Observation::begins(const Product& p, int64_t element_size, const void* caller) {
    if (passes_all() || p.m < 1 || p.n < 1 || p.k < 1 || is_zero(p.alpha)) return false;
    Scope* scope = scope_of_thread();
    if (!scope) return false;
    const bool is_inside = is_inside_lapack() || is_of_solver(caller);
    if (is_inside && rules_of(scope).rules[INSIDE_SOLVERS] < 0) return false;
    observer = observer_of(scope);
    if (!observer || !observer->options.records || observer->process != getpid()) return false;
    if (!observer->options.compares) return true;
    const int64_t rows = (p.m - 1) * p.out.row;
    const int64_t cols = (p.n - 1) * p.out.col;
    const int64_t before = std::min<int64_t>(rows, 0) + std::min<int64_t>(cols, 0);
    const int64_t after = std::max<int64_t>(rows, 0) + std::max<int64_t>(cols, 0);
    lowest = (const char*)p.out.at + before * element_size;
    bytes = (after - before + 1) * element_size;
    if (is_zero(p.beta) && p.routine != TRMM) return true;
    again = (char*)memory.of(bytes);
    if (again) memcpy(again, lowest, (size_t)bytes);
    return true;
}

bool Observation::is_compared(const Product& p) {
    const lp_blas_observation& options = observer->options;
    if (!options.compares || p.number == options.reference) return false;
    if (!again && is_zero(p.beta) && p.routine != TRMM) again = (char*)memory.of(bytes);
    bytes = 0;  // compared, so that the copy of a former result is not
    return again;
}

template <class T> void Observation::record(const Product& p, const void* caller) {
    if (bytes) again = nullptr;
    using Real = typename Type<T>::Real;
    constexpr int PLANES = Type<T>::PLANES;
    const int64_t numbers = p.m * p.n * PLANES;
    const bool has_sketch = observer->size < MOST_SKETCHES;
    const int64_t sums = has_sketch ? std::min<int64_t>(numbers, SUMS) : 0;
    Record kind = {};
    kind.routine = p.routine;
    kind.reason = p.reason;
    kind.mode = p.number;
    kind.letter = Type<T>::LETTER;
    name_function(caller, kind.caller, sizeof kind.caller, true);
    // Those of real operands that are stored as they are: of the products of a site whose number is a power of 2.
    const bool is_plain = PLANES == 1 && p.a.part == WHOLE && p.b.part == WHOLE && !p.a.is_overwritten;
    const bool is_sampled = again && has_sketch && is_plain && !p.b.is_overwritten && is_next_sampled(*observer, kind);
    if (is_sampled)
        for (const bool is_b : {false, true}) {
            kind.length[is_b] = (int32_t)std::min<int64_t>(p.k, MOST_NUMBERS);
            kind.vectors[is_b] = (int32_t)std::min<int64_t>(is_b ? p.n : p.m, MOST_NUMBERS / kind.length[is_b]);
        }
    const int64_t sampled = (int64_t)kind.vectors[0] * kind.length[0] + (int64_t)kind.vectors[1] * kind.length[1];
    const int64_t bytes = sums * (int64_t)sizeof(double) + sampled * (int64_t)sizeof(float);
    Record* record = (Record*)calloc(1, sizeof(Record) + (size_t)bytes);
    if (!record) return;
    *record = kind;
    float* to = (float*)(record->sketch + sums);
    if constexpr (PLANES == 1)
        for (const bool is_b : {false, true})
            to = copy<Real>(is_b ? p.b : p.a, is_b, kind.vectors[is_b], kind.length[is_b], to);
    record->calls = 1;
    record->multiplications = p.m * p.n * p.k;
    record->m = p.m;
    record->n = p.n;
    record->k = p.k;
    record->is_compared = again != nullptr;
    Sums found = {0, 0, 0, 0, sums ? record->sketch : nullptr};
    const void* const other_result = again ? other(p.out.at) : nullptr;
    measure<Real, PLANES>(found, p, p.out.at, other_result);
    record->square = found.square;
    record->error = found.error;
    record->reference = found.reference;
    record->sums = sums;
    if (!(found.square < __builtin_inf())) {
        record->fault = fault_of<Real, PLANES>(p.out, p.out.at, p.m, p.n);
        if (!p.a.is_overwritten) record->fault_of_a = fault_of<Real, PLANES>(p.a, p.a.at, p.m, p.k);
        if (!p.b.is_overwritten) record->fault_of_b = fault_of<Real, PLANES>(p.b, p.b.at, p.k, p.n);
        if (again) record->fault_again = fault_of<Real, PLANES>(p.out, other_result, p.m, p.n);
    }
    pthread_mutex_lock(&observer->lock);
    if (has_sketch) {
        add_record(*observer, record);
    } else {
        add_to_total(*observer, *record);
        free(record);
    }
    pthread_mutex_unlock(&observer->lock);
}

template void Observation::record<float>(const Product&, const void*);
template void Observation::record<double>(const Product&, const void*);
template void Observation::record<Complex32>(const Product&, const void*);
template void Observation::record<Complex64>(const Product&, const void*);

Record* take_observed(Observer& observer) {
    pthread_mutex_lock(&observer.lock);
    Record* first = observer.first;
    observer.first = observer.last = nullptr;
    for (Site* site = observer.sites; site; site = site->next) site->total = nullptr;
    pthread_mutex_unlock(&observer.lock);
    return first;
}

}  // namespace lp::blas

LP_API void lp_blas_free_observed(lp_blas_observed* first) {
    while (first) {
        lp_blas_observed* next = first->next;
        free(first);
        first = next;
    }
}
#endif
