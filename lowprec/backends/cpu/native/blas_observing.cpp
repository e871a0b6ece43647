// Observed products of the BLAS, on Linux: their order, and the sums of those of a function and routine.
#include "blas_observing.hpp"
#if defined(__linux__)
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

namespace lp::blas {

// A function and routine.
struct Place {
    Place* next;
    int32_t number;
    lp_blas_site kind;
    Site site;
};

struct Observer {
    pid_t process;  // forked ones record nothing
    lp_blas_observation options;
    pthread_mutex_t lock;
    Place* places;
    lp_blas_step* order;  // of products since the last call of lp_blas_order
    int64_t steps, space, products;
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
    while (Place* place = observer->places) {
        observer->places = place->next;
        lp_free_observed(place->site.first);
        free(place);
    }
    pthread_mutex_destroy(&observer->lock);
    free(observer->order);
    free(observer);
}

namespace {

const int MOST_NUMBERS = 1 << 12, GATHERED = 512;
const int64_t MOST_STEPS = 1 << 20;
const int32_t MOST_PLACES = 1024;

// Calls `visit` with the first element and the number of elements of each line of the part of a matrix that is stored.
template <class Visit> void for_lines(const Matrix& x, int64_t rows, int64_t cols, Visit visit) {
    const bool by_rows = x.col <= x.row;
    const bool has_end = x.part == (by_rows ? UPPER : LOWER);
    const int64_t lines = by_rows ? rows : cols;
    const int64_t length = by_rows ? cols : rows;
    const int64_t across = by_rows ? x.row : x.col;
    const int64_t along = by_rows ? x.col : x.row;
    if (x.part == WHOLE && along == 1 && across == length) return visit(0, 1, lines * length);
    for (int64_t line = 0; line < lines; line++) {
        const int64_t first = x.part != WHOLE && has_end ? line : 0;
        const int64_t end = x.part == WHOLE || has_end ? length : std::min(length, line + 1);
        if (first < end) visit(line * across + first * along, along, end - first);
    }
}

// Adds numbers that are not contiguous.
template <class Real, int PLANES>
void add_gathered(Site& site, lp_observed& to, const Real* x, const Real* again, int64_t step, int64_t count) {
    Real numbers[GATHERED], others[GATHERED];
    for (int64_t first = 0; first < count; first += GATHERED / PLANES) {
        const int64_t some = std::min<int64_t>(count - first, GATHERED / PLANES);
        for (int64_t i = 0; i < some * PLANES; i++) {
            const int64_t at = (first + i / PLANES) * step * PLANES + i % PLANES;
            numbers[i] = x[at];
            if (again) others[i] = again[at];
        }
        add_run(site, to, {numbers, again ? others : nullptr, some * PLANES, sizeof(Real) == 8});
    }
}

template <class Real, int PLANES>
void measure(Site& site, lp_observed& to, const Product& p, const void* result, const void* again) {
    for_lines(p.out, p.m, p.n, [&](int64_t at, int64_t step, int64_t count) {
        const Real* const x = (const Real*)result + at * PLANES;
        const Real* const other = again ? (const Real*)again + at * PLANES : nullptr;
        if (step == 1) add_run(site, to, {x, other, count * PLANES, sizeof(Real) == 8});
        else add_gathered<Real, PLANES>(site, to, x, other, step, count);
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

// Copies the first vectors of real factors.
template <class Real> void sample(lp_observed& to, const Product& p) {
    for (const bool is_b : {false, true}) {
        to.length[is_b] = (int32_t)std::min<int64_t>(p.k, MOST_NUMBERS);
        to.vectors[is_b] = (int32_t)std::min<int64_t>(is_b ? p.n : p.m, MOST_NUMBERS / to.length[is_b]);
    }
    const int64_t numbers = (int64_t)to.vectors[0] * to.length[0] + (int64_t)to.vectors[1] * to.length[1];
    float* at = to.sampled = (float*)malloc((size_t)numbers * sizeof(float));
    if (!at) return;
    for (const bool is_b : {false, true})
        at = copy<Real>(is_b ? p.b : p.a, is_b, to.vectors[is_b], to.length[is_b], at);
}

template <class Real, int PLANES> int fault_of_matrix(const Matrix& x, const void* from, int64_t rows, int64_t cols) {
    int found = 0;
    for_lines(x, rows, cols, [&](int64_t at, int64_t step, int64_t count) {
        for (int plane = 0; plane < PLANES; plane++)
            found |= fault_of((const Real*)from + at * PLANES + plane, count, step * PLANES);
    });
    return found;
}

Place* place_of(Observer& observer, const lp_blas_site& kind) {
    for (Place* place = observer.places; place; place = place->next) {
        const lp_blas_site& known = place->kind;
        const bool is_same = known.routine == kind.routine && known.letter == kind.letter && known.mode == kind.mode &&
            known.reason == kind.reason && !strcmp(known.caller, kind.caller);
        if (is_same) return place;
    }
    const int32_t number = observer.places ? observer.places->number + 1 : 0;
    Place* place = number < MOST_PLACES ? (Place*)calloc(1, sizeof(Place)) : nullptr;
    if (!place) return nullptr;
    place->kind = kind;
    place->number = number;
    place->next = observer.places;
    return observer.places = place;
}

void add_step(Observer& observer, const lp_blas_step& step) {
    if (observer.products++ >= MOST_STEPS) return;
    if (observer.steps == observer.space) {
        const int64_t space = observer.space ? 2 * observer.space : 1024;
        void* larger = realloc(observer.order, (size_t)space * sizeof step);
        if (!larger) return;
        observer.order = (lp_blas_step*)larger;
        observer.space = space;
    }
    observer.order[observer.steps++] = step;
}

}  // namespace

int mode_of(const Observer& observer, int mode, int routine, const void* caller) {
    const char* const alone = observer.options.alone;
    if (mode < 0 || !*alone) return mode;
    char name[sizeof observer.options.alone] = "";
    name_function(caller, name, sizeof lp_blas_site::caller, true);
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
    lp_blas_site kind = {};
    kind.routine = p.routine;
    kind.reason = p.reason;
    kind.mode = p.number;
    kind.letter = Type<T>::LETTER;
    name_function(caller, kind.caller, sizeof kind.caller, true);
    pthread_mutex_lock(&observer->lock);
    Place* place = place_of(*observer, kind);
    const int64_t index = observer->products;
    if (place) add_step(*observer, {place->number, (int32_t)p.m, (int32_t)p.n});
    pthread_mutex_unlock(&observer->lock);
    if (!place) return;
    const SiteLock lock(place->site);
    bool begins;
    lp_observed* to = begin_product(place->site, index, begins);
    if (!to) return;
    to->multiplications += p.m * p.n * p.k;
    to->is_compared |= again != nullptr;
    const void* const other_result = again ? other(p.out.at) : nullptr;
    measure<Real, PLANES>(place->site, *to, p, p.out.at, other_result);
    const bool is_kept = !p.a.is_overwritten && !p.b.is_overwritten;
    if constexpr (PLANES == 1)
        if (begins && again && is_kept && p.a.part == WHOLE && p.b.part == WHOLE) sample<Real>(*to, p);
    if (!may_be_faulty(*to)) return;
    to->fault = fault_of_matrix<Real, PLANES>(p.out, p.out.at, p.m, p.n);
    if (to->fault) {
        to->fault_at = index;
        if (!p.a.is_overwritten) to->fault_of_a = fault_of_matrix<Real, PLANES>(p.a, p.a.at, p.m, p.k);
        if (!p.b.is_overwritten) to->fault_of_b = fault_of_matrix<Real, PLANES>(p.b, p.b.at, p.k, p.n);
        if (again) to->fault_again = fault_of_matrix<Real, PLANES>(p.out, other_result, p.m, p.n);
    }
}

template void Observation::record<float>(const Product&, const void*);
template void Observation::record<double>(const Product&, const void*);
template void Observation::record<Complex32>(const Product&, const void*);
template void Observation::record<Complex64>(const Product&, const void*);

int64_t take_sites(Observer& observer, lp_blas_site* to) {
    pthread_mutex_lock(&observer.lock);
    int64_t count = 0;
    for (Place* place = observer.places; place; place = place->next) {
        count = std::max<int64_t>(count, place->number + 1);
        place->kind.first = (lp_observed*)lp_site_take(&place->site);
        to[place->number] = place->kind;
    }
    pthread_mutex_unlock(&observer.lock);
    return count;
}

int64_t take_order(Observer& observer, lp_blas_step* to, int64_t most) {
    pthread_mutex_lock(&observer.lock);
    const int64_t count = std::min(most, observer.steps);
    if (count) memcpy(to, observer.order, (size_t)count * sizeof *to);
    observer.steps -= count;
    if (observer.steps) memmove(observer.order, observer.order + count, (size_t)observer.steps * sizeof *to);
    pthread_mutex_unlock(&observer.lock);
    return count;
}

}  // namespace lp::blas
#endif
