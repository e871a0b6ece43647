// The scopes of a process and their counters, on Linux.
//
// A thread has a pointer to its innermost scope, which it gives to the threads that it starts and to OpenMP's
// (blas_others.cpp).
#include "blas.hpp"
#if defined(__linux__)
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

namespace lp::blas {

// -- scopes ------------------------------------------------------------------------------------------

namespace {

thread_local int own_depth;     // lowprec computes
thread_local int lapack_depth;  // in a routine that is counted at its entry

struct Slot {
    std::atomic<uint64_t> key;  // 0: free
    std::atomic<int64_t> calls, multiplications;  // the latter of products of any shape
    lp_blas_count kind;
};
const int SHAPES = 512, PROBES = 8, KINDS = MOST_COUNTS - SHAPES;

}  // namespace

struct Scope {
    std::atomic<int> uses;  // by threads, by inner scopes and by the caller of lp_blas_enter
    std::atomic<bool> is_open;
    Scope* outer;
    lp_blas blas;
    Observer* observer;
    Slot slots[SHAPES + KINDS];  // of shapes, and of products of further shapes by type, routine and reason
};

namespace {

Scope outside;  // the counters of threads without a scope
std::atomic<Scope*> of_all_threads;
std::atomic<int> open_scopes;
pthread_key_t key;  // of a thread's scope

}  // namespace

__attribute__((constructor(101))) void create_key() { pthread_key_create(&key, release); }
void release(void* at) {
    Scope* scope = (Scope*)at;
    while (scope && scope->uses.fetch_sub(1) == 1) {
        Scope* outer = scope->outer;
        free_observer(scope->observer);
        free(scope);
        scope = outer;
    }
}
Scope* held(Scope* scope) {
    if (scope) scope->uses++;
    return scope;
}
Scope* innermost() {
    Scope* scope = (Scope*)pthread_getspecific(key);
    while (scope && !scope->is_open) scope = scope->outer;
    return scope;
}
// Sets the scope of this thread, which holds it; false if there is no memory.
bool set_scope(Scope* scope) {
    void* before = pthread_getspecific(key);
    if (pthread_setspecific(key, held(scope))) {
        release(scope);
        return false;
    }
    release(before);
    return true;
}

namespace {

// The slot of a key, which is new if its kind has no letter; null if those that it may have, have other keys.
Slot* slot_of(uint64_t key, Slot* table, int size) {
    for (int probe = 0; probe < PROBES; probe++) {
        Slot& slot = table[(key + (uint64_t)probe) % (uint64_t)size];
        uint64_t found = slot.key.load(std::memory_order_relaxed);
        if (!found && slot.key.compare_exchange_strong(found, key)) return &slot;
        if (found == key) return &slot;
    }
    return nullptr;
}

// Moves the counters with calls to rows; returns their number.
int take_counts(Scope& scope, lp_blas_count* rows) {
    int found = 0;
    for (Slot& slot : scope.slots) {
        if (!slot.calls) continue;
        lp_blas_count& row = rows[found++];
        row = slot.kind;
        row.calls = slot.calls.exchange(0);
        row.multiplications = row.m ? row.calls * row.m * row.n * row.k : slot.multiplications.exchange(0);
    }
    return found;
}

}  // namespace

// -- callers -----------------------------------------------------------------------------------------

}  // namespace lp::blas

// Python's functions, which are null in another process.
extern "C" {
[[gnu::weak]] int PyGILState_Check();
[[gnu::weak]] void* PyGILState_GetThisThreadState();
[[gnu::weak]] int PyGILState_Ensure();
[[gnu::weak]] void PyGILState_Release(int);
[[gnu::weak]] int PyGC_Disable();
[[gnu::weak]] int PyGC_Enable();
[[gnu::weak]] void* PyEval_GetFrame();
[[gnu::weak]] void* PyFrame_GetBack(void*);
[[gnu::weak]] int PyFrame_GetLineNumber(void*);
[[gnu::weak]] void* PyObject_GetAttrString(void*, const char*);
[[gnu::weak]] void* PyDict_GetItemString(void*, const char*);
[[gnu::weak]] const char* PyUnicode_AsUTF8(void*);
[[gnu::weak]] void Py_DecRef(void*);
[[gnu::weak]] void PyErr_Fetch(void**, void**, void**);
[[gnu::weak]] void PyErr_Restore(void*, void*, void*);
}

namespace lp::blas {

namespace {

// Libraries that factorise, solve and iterate: their products keep their precision.
const char* const SOLVERS[] = {
    "lapack",  "openblas", "mkl_",    "flexiblas", "atlas",     "arpack",  "propack",         "superlu", "umfpack",
    "cholmod", "lbfgsb",   "odepack", "_vode",     "_slsqplib", "odrpack", "_batched_linalg", "_trlib",
};

enum { IS_SOLVER = 1, IS_NUMPY = 2 };

// The kind of the library of a return address. A library has many symbols, of which dladdr reads all.
int library_of(const void* caller) {
    static std::atomic<uint64_t> known[256];  // the address times 4, plus its kind
    std::atomic<uint64_t>& slot = known[mixed(0, (int64_t)(uintptr_t)caller) % 256];
    const uint64_t word = slot.load(std::memory_order_relaxed);
    if (word >> 2 == (uint64_t)(uintptr_t)caller) return word & 3;
    Dl_info info;
    int found = 0;
    if (dladdr(caller, &info) && info.dli_fname) {
        const char* slash = strrchr(info.dli_fname, '/');
        const char* file = slash ? slash + 1 : info.dli_fname;
        for (const char* name : SOLVERS)
            if (strstr(file, name)) found |= IS_SOLVER;
        if (strstr(file, "_multiarray_umath")) found |= IS_NUMPY;
    }
    slot.store((uint64_t)(uintptr_t)caller << 2 | (uint64_t)found, std::memory_order_relaxed);
    return found;
}

}  // namespace

bool is_of_solver(const void* caller) { return library_of(caller) & IS_SOLVER; }

// Writes the name of the Python function, outside of NumPy, that calls. NumPy, which has no locks of its own while it
// multiplies, has released the interpreter's lock; of other callers the name is known if they hold it.
void name_function(const void* caller, char* to, size_t size, bool has_line) {
    if (!PyGILState_Check || !PyGILState_GetThisThreadState()) return;
    if (!PyGILState_Check() && !(library_of(caller) & IS_NUMPY)) return;
    const int state = PyGILState_Ensure();
    const int collects = PyGC_Disable();  // so that no finalizer runs
    void* error[3];
    PyErr_Fetch(&error[0], &error[1], &error[2]);
    void* frame = PyEval_GetFrame();  // borrowed
    for (void* held = nullptr; frame;) {
        void* globals = PyObject_GetAttrString(frame, "f_globals");
        void* code = PyObject_GetAttrString(frame, "f_code");
        void* name = code ? PyObject_GetAttrString(code, "co_name") : nullptr;
        void* module = globals ? PyDict_GetItemString(globals, "__name__") : nullptr;
        const char* of_module = module ? PyUnicode_AsUTF8(module) : "";
        const bool is_numpy = of_module && !strncmp(of_module, "numpy", 5) && (!of_module[5] || of_module[5] == '.');
        if (!is_numpy && name) snprintf(to, size, "%s.%s", of_module ? of_module : "", PyUnicode_AsUTF8(name));
        const size_t length = strlen(to);
        if (length && has_line) snprintf(to + length, size - length, ":%d", PyFrame_GetLineNumber(frame));
        void* outer = is_numpy ? PyFrame_GetBack(frame) : nullptr;
        for (void* each : {name, code, globals, held})
            if (each) Py_DecRef(each);
        frame = held = outer;
    }
    PyErr_Restore(error[0], error[1], error[2]);
    if (collects) PyGC_Enable();
    PyGILState_Release(state);
}

namespace {

// The name stays if other functions call, too, and "..." follows it.
void name_slot(Slot& slot, const void* caller) {
    char name[sizeof slot.kind.caller - 4] = "";
    name_function(caller, name, sizeof name, false);
    char* known = slot.kind.caller;
    if (!*known) {
        memcpy(known, name, sizeof name);
        return;
    }
    if (!*name || !strncmp(known, name, strlen(name))) return;
    char* end = strstr(known, "...");
    memcpy(end ? end : strchr(known, 0), "...", 4);
}

}  // namespace

Scope* scope_of_thread() {
    Scope* scope = innermost();
    if (scope) return scope;
    scope = of_all_threads.load(std::memory_order_relaxed);
    return scope && scope->is_open ? scope : nullptr;
}
const lp_blas& rules_of(const Scope* scope) { return scope->blas; }
Observer* observer_of(const Scope* scope) { return scope->observer; }
bool passes_all() { return own_depth > 0; }
bool is_inside_lapack() { return lapack_depth > 0; }
void enter_lapack(int step) { lapack_depth += step; }

void count(Scope* scope, const Call& call, Reason reason, int mode) {
    if (!scope) {
        if (!open_scopes) return;
        scope = &outside;
        reason = OTHER_THREAD;
    }
    const uint64_t hash = mixed(mixed(mixed(call.letter, call.routine), reason), mode);
    Slot* slot = nullptr;
    if (reason <= NO_MEMORY)
        slot = slot_of(mixed(mixed(mixed(hash, call.m), call.n), call.k) | 1, scope->slots, SHAPES);
    const bool is_of_shape = slot;
    if (!slot) slot = slot_of(hash | 1, scope->slots + SHAPES, KINDS);
    if (!slot) return;
    if (!slot->kind.letter) {
        slot->kind.routine = call.routine;
        slot->kind.reason = reason;
        slot->kind.mode = mode;
        slot->kind.m = is_of_shape ? call.m : 0;
        slot->kind.n = is_of_shape ? call.n : 0;
        slot->kind.k = is_of_shape ? call.k : 0;
        slot->kind.letter = call.letter;
    }
    const int64_t SAMPLED = 256;  // calls of which the first one's function is looked up
    if (slot->calls.fetch_add(1, std::memory_order_relaxed) % SAMPLED == 0) name_slot(*slot, call.caller);
    if (!is_of_shape) slot->multiplications.fetch_add(call.multiplications, std::memory_order_relaxed);
}

}  // namespace lp::blas

using namespace lp::blas;

LP_API void* lp_blas_create(const lp_blas* blas) {
    Scope* scope = (Scope*)calloc(1, sizeof(Scope));
    if (!scope) return nullptr;
    scope->blas = *blas;
    scope->uses = 1;
    return scope;
}

LP_API int32_t lp_blas_enter(void* at, int32_t all_threads) {
    Scope* scope = (Scope*)at;
    own_depth = lapack_depth = 0;  // an exception may have left them
    if (all_threads) {
        of_all_threads = held(scope);
    } else {
        scope->outer = held(innermost());
        if (!set_scope(scope)) return LP_NO_MEMORY;
    }
    scope->is_open = true;
    open_scopes++;
    return LP_OK;
}

LP_API void lp_blas_leave(void* at) {
    if (((Scope*)at)->is_open.exchange(false)) open_scopes--;
    set_scope(innermost());
}

LP_API void lp_blas_free(void* scope) { release(scope); }
LP_API void* lp_blas_scope(void) { return scope_of_thread(); }

LP_API int64_t lp_blas_counts(void* scope, lp_blas_count* rows) {
    return take_counts(scope ? *(Scope*)scope : outside, rows);
}

LP_API int32_t lp_blas_observe(void* scope, const lp_blas_observation* observation) {
    ((Scope*)scope)->observer = new_observer(*observation);
    return ((Scope*)scope)->observer ? LP_OK : LP_NO_MEMORY;
}

LP_API int64_t lp_blas_sites(void* scope, lp_blas_site* to) {
    Observer* observer = ((Scope*)scope)->observer;
    return observer ? take_sites(*observer, to) : 0;
}

LP_API int64_t lp_blas_order(void* scope, lp_blas_step* to, int64_t most) {
    Observer* observer = ((Scope*)scope)->observer;
    return observer ? take_order(*observer, to, most) : 0;
}

LP_API const char* lp_blas_name(int32_t routine) { return name_of(routine); }

LP_API int32_t lp_blas_pass(int32_t depth) {
    const int32_t before = own_depth;
    own_depth = depth;
    return before;
}
#endif
