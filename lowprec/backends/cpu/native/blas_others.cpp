// Functions of other libraries that blas_words.cpp replaces next to the routines of the BLAS, on Linux: entries of
// LAPACK, which are counted, functions that start threads, which get the scope of the calling one, and dlsym, at which
// libraries that were loaded meanwhile are searched.
#include "blas.hpp"
#if defined(__linux__)
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>

namespace lp::blas {

// -- LAPACK ------------------------------------------------------------------------------------------

namespace {

const char* const NAMES[] = {"gemm", "gemv",     "symm",     "hemm",   "syrk",   "herk",   "gemmt", "trmm",
                             "symv", "hemv",     "dot",      "ger",    "syr2k",  "her2k",  "trmv",  "dotu",
                             "dotc", "dotu_sub", "dotc_sub", "matmul", "matvec", "vecmat", "vecdot"};

// Routines that are counted at their entry: `factor` times the product of three arguments, given by their numbers; NONE
// is 1, LEAST the least of the first two. For square matrices, with all vectors (G. H. Golub and C. F. Van Loan,
// "Matrix Computations", 4th edition, 2013). A call with -1 as the size of its workspace only asks for it; COMPLEX: one
// argument earlier in complex routines.
const int NONE = -1, LEAST = -2, COMPLEX = 100;
struct Formula {
    const char* name;
    int first, second, third;
    double factor;
    int workspace;
};
// clang-format off
const Formula FORMULAS[] = {
    {"syr2k", 2, 2, 3, 1, NONE},         {"her2k", 2, 2, 3, 1, NONE},         {"trmv", 3, 3, NONE, 0.5, NONE},
    {"dotu", NONE, NONE, NONE, 0, NONE}, {"dotc", NONE, NONE, NONE, 0, NONE}, {"trsv", 3, 3, NONE, 0.5, NONE},
    {"syr", 1, 1, NONE, 0.5, NONE},      {"her", 1, 1, NONE, 0.5, NONE},      {"syr2", 1, 1, NONE, 1, NONE},
    {"her2", 1, 1, NONE, 1, NONE},       {"geru", 0, 1, NONE, 1, NONE},       {"gerc", 0, 1, NONE, 1, NONE},
    {"trsm", 4, 5, LEAST, 0.5, NONE},
    {"getrf", 0, 1, LEAST, 1 / 3., NONE}, {"getrs", 1, 1, 2, 1, NONE},        {"getri", 0, 0, 0, 2 / 3., 5},
    {"gesv", 0, 0, 0, 1 / 3., NONE},     {"potrf", 1, 1, 1, 1 / 6., NONE},    {"potrs", 1, 1, 2, 1, NONE},
    {"potri", 1, 1, 1, 1 / 3., NONE},    {"posv", 1, 1, 1, 1 / 6., NONE},     {"sytrf", 1, 1, 1, 1 / 6., 6},
    {"hetrf", 1, 1, 1, 1 / 6., 6},       {"sysv", 1, 1, 1, 1 / 6., 9},        {"hesv", 1, 1, 1, 1 / 6., 9},
    {"trtrs", 3, 3, 4, 0.5, NONE},       {"trtri", 2, 2, 2, 1 / 6., NONE},    {"geqrf", 0, 1, LEAST, 2 / 3., 6},
    {"geqp3", 0, 1, LEAST, 2 / 3., 7},   {"orgqr", 0, 1, LEAST, 2 / 3., 7},   {"ungqr", 0, 1, LEAST, 2 / 3., 7},
    {"ormqr", 2, 3, 4, 2, 11},           {"unmqr", 2, 3, 4, 2, 11},           {"gels", 1, 2, LEAST, 2 / 3., 9},
    {"gelsd", 0, 1, LEAST, 2, 11},       {"gelss", 0, 1, LEAST, 2, 11},       {"gelsy", 0, 1, LEAST, 2 / 3., 11},
    {"gesdd", 1, 2, LEAST, 11, 11},      {"gesvd", 2, 3, LEAST, 11, 12},      {"gehrd", 0, 0, 0, 5 / 3., 7},
    {"geev", 2, 2, 2, 12.5, COMPLEX + 12}, {"gees", 3, 3, 3, 12.5, COMPLEX + 12}, {"syev", 2, 2, 2, 4.5, 7},
    {"heev", 2, 2, 2, 4.5, 7},           {"syevd", 2, 2, 2, 4.5, 7},          {"heevd", 2, 2, 2, 4.5, 7},
    {"syevr", 3, 3, 3, 4.5, 17},         {"heevr", 3, 3, 3, 4.5, 17},         {"sygvd", 3, 3, 3, 7, 10},
    {"hegvd", 3, 3, 3, 7, 10},           {"gges", 4, 4, 4, 33, COMPLEX + 18}, {"ggev", 2, 2, 2, 33, COMPLEX + 15},
};
// clang-format on
const int FORMULA_COUNT = sizeof FORMULAS / sizeof *FORMULAS;

}  // namespace

// -- threads -----------------------------------------------------------------------------------------

namespace {

// Functions of other libraries that are replaced. Each has as many versions as Functions, by the original.
const int LIBRARIES = Functions::LIBRARIES;
enum Other { DLSYM, PTHREAD_CREATE, KMPC_FORK_CALL, GOMP_PARALLEL, OTHERS = GOMP_PARALLEL + 8 };
const char* const OTHER_NAMES[OTHERS] = {
    "dlsym",
    "pthread_create",
    "__kmpc_fork_call",
    "GOMP_parallel",
    "GOMP_parallel_sections",
    "GOMP_parallel_loop_static",
    "GOMP_parallel_loop_dynamic",
    "GOMP_parallel_loop_guided",
    "GOMP_parallel_loop_runtime",
    "GOMP_parallel_loop_nonmonotonic_dynamic",
    "GOMP_parallel_loop_nonmonotonic_guided",
};
std::atomic<void*> others[OTHERS][LIBRARIES];

template <int LIBRARY> void* our_dlsym(void* library, const char* name) {
    if (library != RTLD_DEFAULT && library != RTLD_NEXT) search_new_libraries();
    // A jump, so that the original finds the library of the caller.
    return ((void* (*)(void*, const char*))others[DLSYM][LIBRARY].load())(library, name);
}

struct Start {
    void* (*function)(void*);
    void* argument;
    Scope* scope;
};
void* started(void* at) {
    const Start start = *(Start*)at;
    free(at);
    set_scope(start.scope);
    release(start.scope);
    return start.function(start.argument);
}
template <int LIBRARY>
int our_pthread_create(pthread_t* thread, const pthread_attr_t* options, void* (*function)(void*), void* argument) {
    const auto original = (decltype(&pthread_create))others[PTHREAD_CREATE][LIBRARY].load();
    Scope* scope = innermost();
    Start* start = scope ? (Start*)malloc(sizeof(Start)) : nullptr;
    if (!start) return original(thread, options, function, argument);
    *start = {function, argument, held(scope)};
    const int status = original(thread, options, started, start);
    if (status) {
        release(scope);
        free(start);
    }
    return status;
}

// A parallel region of GNU's OpenMP, and the scope of the thread that starts it.
struct Region {
    void (*function)(void*);
    void* argument;
    Scope* scope;
};
void run_region(void* at) {
    const Region& region = *(Region*)at;
    Scope* before = held(innermost());
    set_scope(region.scope);
    region.function(region.argument);
    set_scope(before);
    release(before);
}
template <int NAME, int LIBRARY>
void our_gomp(void (*function)(void*), void* argument, long a, long b, long c, long d, long e, long f) {
    const auto original = (decltype(&our_gomp<NAME, LIBRARY>))others[NAME][LIBRARY].load();
    Region region = {function, argument, held(innermost())};
    if (region.scope) original(run_region, &region, a, b, c, d, e, f);
    else original(function, argument, a, b, c, d, e, f);
    release(region.scope);
}

// A parallel region of LLVM's and Intel's OpenMP. Its function gets addresses, and ignores those beyond its own.
const int MOST_ADDRESSES = 256;
typedef void Microtask(int32_t* thread, int32_t* in_team, ...);
struct Fork {
    Microtask* function;
    Scope* scope;
    void* addresses[MOST_ADDRESSES];
};
template <size_t... NUMBER>
void call_with(Fork& fork, int32_t* thread, int32_t* in_team, std::index_sequence<NUMBER...>) {
    fork.function(thread, in_team, fork.addresses[NUMBER]...);
}
void run_fork(int32_t* thread, int32_t* in_team, Fork* fork, int32_t size) {
    Scope* before = held(innermost());
    set_scope(fork->scope);
    if (size <= 16) call_with(*fork, thread, in_team, std::make_index_sequence<16>());
    else call_with(*fork, thread, in_team, std::make_index_sequence<MOST_ADDRESSES>());
    set_scope(before);
    release(before);
}
template <int LIBRARY> void our_fork(void* location, int32_t size, Microtask* function, ...) {
    const auto original = (decltype(&our_fork<LIBRARY>))others[KMPC_FORK_CALL][LIBRARY].load();
    Fork fork = {function, held(innermost()), {}};
    va_list addresses;
    va_start(addresses, function);
    for (int i = 0; i < size && i < MOST_ADDRESSES; i++) fork.addresses[i] = va_arg(addresses, void*);
    va_end(addresses);
    original(location, 2, (Microtask*)run_fork, &fork, (intptr_t)size);
    release(fork.scope);
}

template <int NAME, int LIBRARY> void* our_other() {
    if (NAME == KMPC_FORK_CALL) return (void*)our_fork<LIBRARY>;
    if (NAME == DLSYM) return (void*)our_dlsym<LIBRARY>;
    if (NAME == PTHREAD_CREATE) return (void*)our_pthread_create<LIBRARY>;
    return (void*)our_gomp<NAME, LIBRARY>;
}
template <int... NAME> void fill(Functions* table, std::integer_sequence<int, NAME...>) {
    ((table[NAME] = {{our_other<NAME, 0>(), our_other<NAME, 1>(), our_other<NAME, 2>()},
                     {&others[NAME][0], &others[NAME][1], &others[NAME][2]}}),
     ...);
}
}  // namespace

Functions* other_functions(const char* name) {
    static Functions table[OTHERS];
    if (!table[0].ours[0]) fill(table, std::make_integer_sequence<int, OTHERS>());
    for (int i = 0; i < OTHERS; i++)
        if (!strcmp(name, OTHER_NAMES[i])) return &table[i];
    return nullptr;
}

namespace {

// -- routines that are counted at their entry --------------------------------------------------------

// What any of them returns: nothing, or a complex number in two registers.
struct Pair {
    double re, im;
};
typedef void* Word;
typedef Pair Routine24(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                       Word, Word, Word, Word, Word, Word, Word, Word);
struct Counted {
    std::atomic<void*> original;
    int formula;
    char letter;
    bool is_64;
};
const int COUNTED = 384;
Counted counted[COUNTED];
int counted_size;

double argument(const Counted& x, const Word* words, int number, double least) {
    if (number == LEAST) return least;
    if (number == NONE) return 1;
    return x.is_64 ? (double)*(const int64_t*)words[number] : (double)*(const int32_t*)words[number];
}
void count_entry(const Counted& x, const Word* words, const void* caller) {
    const Formula& f = FORMULAS[x.formula];
    const double first = argument(x, words, f.first, 1);
    const double second = argument(x, words, f.second, 1);
    const double third = argument(x, words, f.third, first < second ? first : second);
    int workspace = f.workspace;
    if (workspace >= COMPLEX) workspace -= COMPLEX + (x.letter == 'c' || x.letter == 'z');
    if (!(first > 0 && second > 0 && third > 0) || argument(x, words, workspace, 1) == -1) return;
    const int of_blas = 12;  // the first rows
    const Reason reason = x.formula < of_blas ? NOT_TAKEN : SOLVER;
    const int64_t multiplications = (int64_t)(f.factor * first * second * third);
    count(scope_of_thread(), {x.letter, FIRST_OF_LAPACK + x.formula, 0, 0, 0, multiplications, caller}, reason, -1);
}
// Arguments are addresses; those beyond the routine's are whatever is in their registers and on the stack.
template <int SLOT>
__attribute__((no_sanitize("address"))) Pair entry(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h,
                                                   Word i, Word j, Word k, Word l, Word m, Word n, Word o, Word p,
                                                   Word q, Word r, Word s, Word t, Word u, Word v, Word w, Word x) {
    const Counted& routine = counted[SLOT];
    const Word words[] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s};
    if (!is_inside_lapack() && !passes_all()) count_entry(routine, words, __builtin_return_address(0));
    enter_lapack(1);
    const Pair result = ((Routine24*)routine.original.load(std::memory_order_relaxed))(
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x);
    enter_lapack(-1);
    return result;
}
template <int... SLOT> Routine24* entry_of(int slot, std::integer_sequence<int, SLOT...>) {
    static Routine24* const entries[] = {entry<SLOT>...};
    return entries[slot];
}

// A symbol of a routine: [scipy_][cblas_] letter routine, and in Fortran _ or [_]64_, in C nothing or [_]64[_].
struct Symbol {
    char letter;
    int routine, formula;  // -1: none
    bool is_cblas, is_64;
};
bool is_end(const char* at, Symbol& symbol) {
    symbol.is_64 = strstr(at, "64") != nullptr;
    const char* const ends[] = {"_", "_64_", "64_", "", "_64", "64_"};
    for (int i = 0; i < 3; i++)
        if (!strcmp(at, ends[i + 3 * symbol.is_cblas])) return true;
    return false;
}
bool parsed(const char* name, Symbol& symbol) {
    if (!*name || !strchr("sdcz", *name)) return false;
    if (!strncmp(name, "scipy_", 6)) name += 6;
    symbol.is_cblas = !strncmp(name, "cblas_", 6);
    if (symbol.is_cblas) name += 6;
    symbol.letter = *name;
    if (!*name || !strchr("sdcz", *name)) return false;
    name++;
    symbol.routine = symbol.formula = -1;
    for (int i = 0; i < FIRST_OF_LAPACK; i++) {
        const size_t size = strlen(NAMES[i]);
        if (!strncmp(name, NAMES[i], size) && is_end(name + size, symbol)) symbol.routine = i;
    }
    for (int i = 0; i < FORMULA_COUNT && !symbol.is_cblas; i++) {
        const size_t size = strlen(FORMULAS[i].name);
        if (!strncmp(name, FORMULAS[i].name, size) && is_end(name + size, symbol)) symbol.formula = i;
    }
    return symbol.routine >= 0 || symbol.formula >= 0;
}

}  // namespace

void* exchanged(const char* name, void* now, bool back) {
    Symbol symbol;
    Functions* known = nullptr;
    const bool is_routine = parsed(name, symbol);
    if (!is_routine) known = other_functions(name);
    else if (symbol.routine >= 0) known = functions_of(symbol.letter, symbol.routine, symbol.is_cblas, symbol.is_64);
    for (int i = 0; known && i < LIBRARIES; i++) {
        if (back && known->ours[i] == now) return *known->originals[i];
        if (back) continue;
        if (known->ours[i] == now) return nullptr;
        if (!*known->originals[i]) *known->originals[i] = now;
        if (*known->originals[i] == now) return known->ours[i];
    }
    if (known || !is_routine || symbol.formula < 0) return nullptr;
    for (int i = 0; i < COUNTED; i++) {
        Counted& slot = counted[i];
        void* ours = (void*)entry_of(i, std::make_integer_sequence<int, COUNTED>());
        if (back ? ours == now : slot.original == now && i < counted_size) return back ? slot.original.load() : ours;
        if (ours == now) return nullptr;
        if (back || i < counted_size) continue;
        counted_size++;
        slot.formula = symbol.formula;
        slot.letter = symbol.letter;
        slot.is_64 = symbol.is_64;
        slot.original = now;
        return ours;
    }
    return nullptr;
}

bool is_replaced(const char* name) {
    Symbol symbol;
    return other_functions(name) || parsed(name, symbol);
}

const char* name_of(int routine) {
    if (routine < FIRST_OF_LAPACK) return NAMES[routine];
    return routine < FIRST_OF_LAPACK + FORMULA_COUNT ? FORMULAS[routine - FIRST_OF_LAPACK].name : nullptr;
}

}  // namespace lp::blas
#endif
