// The scopes of a process and their counters, on Linux.
//
// A thread has a pointer to its innermost scope, which it gives to the threads that it starts and to OpenMP's
// (blas_words.cpp). Preloaded into a program that is no Python, this library opens a scope for all threads, with the
// rules of LOWPREC_BLAS, and shows the counters at the end.
#include "blas.hpp"
#if defined(__linux__)
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

namespace lp::blas {

// -- scopes ------------------------------------------------------------------------------------------

namespace {

thread_local int own_depth;     // lowprec computes
thread_local int lapack_depth;  // in a routine that is counted at its entry

struct Slot {
    std::atomic<uint64_t> key;  // 0: free
    std::atomic<int64_t> calls, multiplications;
    lp_blas_count kind;
};
const int SHAPES = 512, PROBES = 8, KINDS = 128;

}  // namespace

struct Scope {
    std::atomic<int> uses;  // by threads, by inner scopes and by the caller of lp_blas_enter
    std::atomic<bool> is_open;
    Scope* outer;
    lp_blas blas;
    Slot slots[SHAPES + KINDS];  // of shapes, and of products of further shapes by type, routine and reason
};

namespace {

Scope outside;  // the counters of threads without a scope
std::atomic<Scope*> of_all_threads;
std::atomic<int> open_scopes;
pthread_key_t key;  // of a thread's scope

}  // namespace

void release(void* at) {
    Scope* scope = (Scope*)at;
    while (scope && scope->uses.fetch_sub(1) == 1) {
        Scope* outer = scope->outer;
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
        rows[found] = slot.kind;
        rows[found].calls = slot.calls.exchange(0);
        rows[found++].multiplications = slot.multiplications.exchange(0);
    }
    return found;
}

// Python's functions that name its current function; null in another process.
struct Python {
    int (*has_lock)();
    void* (*thread)();
    int (*lock)();
    void (*unlock)(int);
    int (*stop_collections)();
    int (*start_collections)();
    void* (*frame)();
    void* (*outer)(void*);
    void* (*attribute)(void*, const char*);
    void* (*item)(void*, const char*);
    const char* (*text)(void*);
    void (*release)(void*);
    void (*save_error)(void**, void**, void**);
    void (*restore_error)(void*, void*, void*);
};
const Python* python() {
    static const char* const names[] = {
        "PyGILState_Check",
        "PyGILState_GetThisThreadState",
        "PyGILState_Ensure",
        "PyGILState_Release",
        "PyGC_Disable",
        "PyGC_Enable",
        "PyEval_GetFrame",
        "PyFrame_GetBack",
        "PyObject_GetAttrString",
        "PyDict_GetItemString",
        "PyUnicode_AsUTF8",
        "Py_DecRef",
        "PyErr_Fetch",
        "PyErr_Restore",
    };
    static void* found[sizeof names / sizeof *names];
    static std::atomic<int> state;  // 1: found, 2: there is none
    if (!state) {
        bool has_all = true;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            found[i] = dlsym(RTLD_DEFAULT, names[i]);
            has_all = has_all && found[i];
        }
        state = has_all ? 1 : 2;
    }
    return state == 1 ? (const Python*)found : nullptr;
}

// Writes the name of the Python function, outside of NumPy, that calls. NumPy, which has no locks of its own while it
// multiplies, has released the interpreter's lock; of other callers the name is known if they hold it.
void name_function(const void* caller, char* to, size_t size) {
    const Python* py = python();
    Dl_info info;
    if (!py || !py->thread() || !dladdr(caller, &info) || !info.dli_fname) return;
    const bool holds = py->has_lock();
    if (!holds && !strstr(info.dli_fname, "_multiarray_umath")) return;
    const int state = py->lock();
    const int collects = py->stop_collections();  // so that no finalizer runs
    void* error[3];
    py->save_error(&error[0], &error[1], &error[2]);
    void* frame = py->frame();  // borrowed
    for (void* held = nullptr; frame;) {
        void* globals = py->attribute(frame, "f_globals");
        void* code = py->attribute(frame, "f_code");
        void* name = code ? py->attribute(code, "co_name") : nullptr;
        void* module = globals ? py->item(globals, "__name__") : nullptr;
        const char* of_module = module ? py->text(module) : "";
        const bool is_numpy = of_module && !strncmp(of_module, "numpy", 5) && (!of_module[5] || of_module[5] == '.');
        if (!is_numpy && name) snprintf(to, size, "%s.%s", of_module ? of_module : "", py->text(name));
        void* outer = is_numpy ? py->outer(frame) : nullptr;
        for (void* each : {name, code, globals, held})
            if (each) py->release(each);
        frame = held = outer;
    }
    py->restore_error(error[0], error[1], error[2]);
    if (collects) py->start_collections();
    py->unlock(state);
}

// The name stays if other functions call, too, and "..." follows it.
void name_slot(Slot& slot, const void* caller) {
    char name[sizeof slot.kind.caller - 4] = "";
    name_function(caller, name, sizeof name);
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
    if (reason <= NO_MEMORY) slot = slot_of(mixed(mixed(mixed(hash, call.m), call.n), call.k) | 1, scope->slots, SHAPES);
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
    slot->multiplications.fetch_add(call.multiplications, std::memory_order_relaxed);
}

namespace {

// Libraries that factorise, solve and iterate: their products keep their precision.
const char* const SOLVERS[] = {
    "lapack",
    "openblas",
    "mkl_",
    "flexiblas",
    "atlas",
    "arpack",
    "propack",
    "superlu",
    "umfpack",
    "cholmod",
    "lbfgsb",
    "odepack",
    "_vode",
    "_slsqplib",
    "odrpack",
    "_batched_linalg",
    "_trlib",
};

}  // namespace

bool is_of_solver(const void* caller) {
    // By address: the address of a call times 2, plus the answer.
    static std::atomic<uint64_t> known[256];
    std::atomic<uint64_t>& slot = known[mixed(0, (int64_t)(uintptr_t)caller) % 256];
    const uint64_t word = slot.load(std::memory_order_relaxed);
    if (word >> 1 == (uint64_t)(uintptr_t)caller) return word & 1;
    Dl_info info;
    bool found = false;
    if (dladdr(caller, &info) && info.dli_fname) {
        const char* slash = strrchr(info.dli_fname, '/');
        const char* file = slash ? slash + 1 : info.dli_fname;
        for (const char* name : SOLVERS) found |= strstr(file, name) != nullptr;
    }
    slot.store((uint64_t)(uintptr_t)caller << 1 | found, std::memory_order_relaxed);
    return found;
}

namespace {

// -- programs that are no Python ---------------------------------------------------------------------

const char* const REASON_TEXTS[REASONS] = {
    nullptr,
    "the mode does not act on this element type",
    "the inner dimension is too long for one sum of the mode",
    "no memory for the operands of the product",
    "a solver or a factorisation, not a product",
    "vectors are not rounded",
    "another thread",
    "a routine that is not taken",
    "a loop of NumPy, which calls no BLAS",
};

const char* type_name(char letter) {
    if (letter == 's') return "float32";
    if (letter == 'd') return "float64";
    return letter == 'c' ? "complex64" : "complex128";
}

struct Text {
    char at[8192];
    size_t size;
};

__attribute__((format(printf, 2, 3))) void add(Text& text, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int size = vsnprintf(text.at + text.size, sizeof text.at - text.size, format, arguments);
    va_end(arguments);
    if (size > 0) text.size += (size_t)size;
    if (text.size >= sizeof text.at) text.size = sizeof text.at - 1;
}

void add_rows(Text& text, const lp_blas_count* rows, int size, bool is_taken, const lp_blas& blas, double total) {
    const int SHOWN = 20;
    int shown = 0;
    for (int i = 0; i < size; i++) {
        const lp_blas_count& row = rows[i];
        if ((row.reason == TAKEN) != is_taken) continue;
        if (!shown) {
            add(text, "%s\n", is_taken ? "taken" : "passed by");
            add(text, "  routine  operands                 dtype        calls   share  %s\n",
                is_taken ? "mode" : "why");
        }
        if (shown++ == SHOWN) add(text, "  (further rows are omitted)\n");
        if (shown > SHOWN) continue;
        char shape[64] = "(any shape)";
        const long long m = row.m, n = row.n, k = row.k, calls = row.calls;
        if (m) snprintf(shape, sizeof shape, "%lldx%lld @ %lldx%lld", m, k, k, n);
        const double share = total ? 100 * (double)row.multiplications / total : 0;
        add(text, "  %c%-7s %-24s %-10s ", row.letter, name_of(row.routine), shape, type_name(row.letter));
        const char* why = is_taken ? blas.modes[row.mode].name : REASON_TEXTS[row.reason];
        add(text, "%7lld  %5.1f%%  %s\n", calls, share, why);
    }
}

Scope of_program;
int report_to = 2;  // a copy of standard error, which some programs close at their end

int digit_of(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool parsed(const char* text, lp_blas& to) {
    if (strlen(text) != 2 * sizeof to) return false;
    for (size_t i = 0; i < sizeof to; i++) {
        const int high = digit_of(text[2 * i]);
        const int low = digit_of(text[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        ((unsigned char*)&to)[i] = (unsigned char)(high << 4 | low);
    }
    return to.version == lp_version();
}

void show(const Text& text) {
    for (size_t done = 0; done < text.size;) {
        const ssize_t written = write(report_to, text.at + done, text.size - done);
        if (written < 0 && errno != EINTR) return;
        if (written > 0) done += (size_t)written;
    }
}

// A forked child has products of its own.
void forget_counts() {
    for (Slot& slot : of_program.slots) slot.calls = slot.multiplications = 0;
}

__attribute__((constructor)) void open_scope() {
    pthread_key_create(&key, release);
    const char* text = getenv("LOWPREC_BLAS");
    const bool is_python = dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr;  // lowprec.numpy's
    if (!text || is_python) return;
    if (parsed(text, of_program.blas)) {
        lp_use_units(of_program.blas.units);
        pthread_atfork(nullptr, nullptr, forget_counts);
        const int copy = fcntl(2, F_DUPFD_CLOEXEC, 100);
        if (copy >= 0) report_to = copy;
        of_program.is_open = true;
        of_all_threads = &of_program;
        lp_blas_install(true);
        return;
    }
    Text message = {};
    const char* const words = "lowprec: LOWPREC_BLAS is not of this version, so the products of %s are its own\n";
    add(message, words, program_invocation_short_name);
    show(message);
}

// Whether this is the program that the command started, whose report is shown even if it multiplied nothing.
bool is_of_command() {
    const char* process = getenv("LOWPREC_RUN_PROGRAM");
    return process && strtol(process, nullptr, 10) == (long)getpid();
}

int by_multiplications(const void* a, const void* b) {
    const int64_t x = ((const lp_blas_count*)a)->multiplications;
    const int64_t y = ((const lp_blas_count*)b)->multiplications;
    return (x < y) - (x > y);
}

__attribute__((destructor)) void show_counts() {
    static lp_blas_count rows[SHAPES + KINDS];
    static Text text;
    if (!of_program.is_open) return;
    const int size = take_counts(of_program, rows);
    if (!size && !is_of_command()) return;
    qsort(rows, (size_t)size, sizeof *rows, by_multiplications);
    long long taken = 0;
    long long passed = 0;
    double total = 0;
    for (int i = 0; i < size; i++) {
        (rows[i].reason == TAKEN ? taken : passed) += rows[i].calls;
        total += (double)rows[i].multiplications;
    }
    add(text, "lowprec: products of %s (process %d): ", program_invocation_short_name, (int)getpid());
    add(text, "%lld taken, %lld passed by\n", taken, passed);
    add_rows(text, rows, size, true, of_program.blas, total);
    add_rows(text, rows, size, false, of_program.blas, total);
    show(text);
}

}  // namespace
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

LP_API const char* lp_blas_name(int32_t routine) { return name_of(routine); }

LP_API int32_t lp_blas_pass(int32_t depth) {
    const int32_t before = own_depth;
    own_depth = depth;
    return before;
}
#endif
