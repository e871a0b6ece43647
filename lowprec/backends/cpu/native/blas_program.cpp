// Preloaded into a program that is no Python, this library opens a scope for all threads, with the rules of
// LOWPREC_BLAS, and shows the counters at the end, on Linux.
#include "blas.hpp"
#if defined(__linux__)
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

namespace lp::blas {
namespace {

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

void* scope;  // of all threads; null in Python
lp_blas rules;
lp_blas_count rows[MOST_COUNTS];
int report_to = 2;  // a copy of standard error, which some programs close at their end

const char* type_name(char letter) {
    if (letter == 's') return "float32";
    if (letter == 'd') return "float64";
    return letter == 'c' ? "complex64" : "complex128";
}

void show_rows(FILE* to, int size, bool is_taken, double total) {
    const int SHOWN = 20;
    int shown = 0;
    for (int i = 0; i < size; i++) {
        const lp_blas_count& row = rows[i];
        if ((row.reason == TAKEN) != is_taken) continue;
        if (!shown) {
            fprintf(to, "%s\n", is_taken ? "taken" : "passed by");
            fprintf(to, "  routine  operands                 dtype        calls   share  ");
            fprintf(to, "%s\n", is_taken ? "mode" : "why");
        }
        if (shown++ == SHOWN) fprintf(to, "  (further rows are omitted)\n");
        if (shown > SHOWN) continue;
        char shape[64] = "(any shape)";
        const long long m = row.m, n = row.n, k = row.k, calls = row.calls;
        if (m) snprintf(shape, sizeof shape, "%lldx%lld @ %lldx%lld", m, k, k, n);
        const double share = total ? 100 * (double)row.multiplications / total : 0;
        const char* why = is_taken ? rules.modes[row.mode].name : REASON_TEXTS[row.reason];
        fprintf(to, "  %c%-7s %-24s %-10s ", row.letter, name_of(row.routine), shape, type_name(row.letter));
        fprintf(to, "%7lld  %5.1f%%  %s\n", calls, share, why);
    }
}

// Whether the text has the bytes of the rules, in hexadecimal digits, for this build.
bool parsed(const char* text) {
    if (strlen(text) != 2 * sizeof rules) return false;
    for (size_t i = 0; i < sizeof rules; i++) {
        const char digits[] = {text[2 * i], text[2 * i + 1], 0};
        char* end;
        ((unsigned char*)&rules)[i] = (unsigned char)strtoul(digits, &end, 16);
        if (*end) return false;
    }
    return rules.version == lp_version();
}

// A forked child has products of its own.
void forget_counts() { lp_blas_counts(scope, rows); }

__attribute__((constructor)) void open_scope() {
    const char* text = getenv("LOWPREC_BLAS");
    const bool is_python = dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr;  // lowprec.numpy's
    if (!text || is_python) return;
    if (!parsed(text)) {
        const char* const words = "lowprec: LOWPREC_BLAS is not of this version, so the products of %s are its own\n";
        dprintf(report_to, words, program_invocation_short_name);
        return;
    }
    lp_use_units(rules.units);
    scope = lp_blas_create(&rules);
    if (!scope) return;
    pthread_atfork(nullptr, nullptr, forget_counts);
    const int copy = fcntl(2, F_DUPFD_CLOEXEC, 100);
    if (copy >= 0) report_to = copy;
    lp_blas_enter(scope, true);
    lp_blas_install(true);
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
    static char buffer[8192];  // written at once
    const int size = scope ? (int)lp_blas_counts(scope, rows) : 0;
    if (!scope || (!size && !is_of_command())) return;
    qsort(rows, (size_t)size, sizeof *rows, by_multiplications);
    long long taken = 0, passed = 0;
    double total = 0;
    for (int i = 0; i < size; i++) {
        (rows[i].reason == TAKEN ? taken : passed) += rows[i].calls;
        total += (double)rows[i].multiplications;
    }
    FILE* const to = fdopen(report_to, "w");
    if (!to) return;
    setvbuf(to, buffer, _IOFBF, sizeof buffer);
    fprintf(to, "lowprec: products of %s (process %d): ", program_invocation_short_name, (int)getpid());
    fprintf(to, "%lld taken, %lld passed by\n", taken, passed);
    show_rows(to, size, true, total);
    show_rows(to, size, false, total);
    fclose(to);
}

}  // namespace
}  // namespace lp::blas
#endif
