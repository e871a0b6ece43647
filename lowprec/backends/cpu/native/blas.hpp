// What the routines of the BLAS (blas.cpp) share with the scopes and counters of a process (blas_process.cpp).
#pragma once
#include "common.hpp"

namespace lp::blas {

// clang-format off
// Routines that are computed; routines whose calls are counted alone, those of LAPACK the last. The order of the first
// is that of rules.
enum Routine {
    GEMM, GEMV, SYMM, HEMM, SYRK, HERK, GEMMT, TRMM, SYMV, HEMV, DOT, GER, COMPUTED,
    SYR2K = COMPUTED, HER2K, TRMV, DOTU, DOTC, DOTU_SUB, DOTC_SUB, MATMUL, MATVEC, VECMAT, VECDOT, FIRST_OF_LAPACK
};
// Rules that are no routine's: of the products inside LAPACK and other solvers.
enum { INSIDE_SOLVERS = COMPUTED };

// Products are counted by shape up to NO_MEMORY.
enum Reason { TAKEN, ELEMENT_TYPE, LONG, NO_MEMORY, SOLVER, VECTORS, OTHER_THREAD, NOT_TAKEN, OWN_LOOP, REASONS };
// clang-format on

const int MOST_COUNTS = 640;  // of a scope

struct Scope;
struct Observer;

// A call, for the counters.
struct Call {
    char letter;  // of the type: s, d, c or z; in loops of NumPy its letter
    int routine;
    int64_t m, n, k;
    int64_t multiplications;
    const void* caller;  // return address
};

// The innermost open scope of this thread, or null; it may be held beyond its end.
Scope* innermost();
Scope* held(Scope*);
void release(void* scope);
bool set_scope(Scope*);  // of this thread; false if there is no memory

// The innermost open scope of this thread, or that of all threads, or null.
Scope* scope_of_thread();
const lp_blas& rules_of(const Scope*);
void count(Scope*, const Call&, Reason, int mode);  // a scope of null: that of threads outside

bool passes_all();                       // this thread computes for lowprec
bool is_inside_lapack();                 // this thread is in a routine of LAPACK, whose entry has counted it
void enter_lapack(int step);             // 1, or -1 at its end
bool is_of_solver(const void* caller);   // a return address
const char* name_of(int routine);        // null: there is none of this number
// Writes the name of the Python function, outside of NumPy, that calls, and its line; leaves it empty if it is unknown.
void name_function(const void* caller, char* to, size_t size, bool has_line);

extern std::atomic<int> observers;  // number of those that record
Observer* observer_of(const Scope*);  // null: its products are not observed
Observer* new_observer(const lp_blas_observation&);
void free_observer(Observer*);
int64_t take_sites(Observer&, lp_blas_site* to);
int64_t take_order(Observer&, lp_blas_step* to, int64_t most);
int mode_of(const Observer&, int mode, int routine, const void* caller);  // of a product with this mode by the rules

inline uint64_t mixed(uint64_t hash, int64_t value) {
    hash = (hash ^ (uint64_t)value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
}

// The functions for a symbol of a BLAS, by the libraries that define it.
struct Functions {
    static const int LIBRARIES = 3;
    void* ours[LIBRARIES];
    std::atomic<void*>* originals[LIBRARIES];
};
// Our function in place of an original one; null if there is none left. With `back` the original of our function.
void* exchanged(const char* name, void* now, bool back);
bool is_replaced(const char* name);
void search_new_libraries();
// The functions of a routine of COMPUTED or the next ones; null if there are none.
Functions* functions_of(char letter, int routine, bool is_cblas, bool is_64);

}  // namespace lp::blas
