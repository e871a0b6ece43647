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

// Sets the rules of a mode that rounds operands to one lp_format, by its name.
bool named(const char* name) {
    const char* const names[LP_FORMATS] = {"fp32", "tf32", "bf16", "fp16"};
    const int64_t units = lp_units();
    int unit = LP_FP32_AVX2;
    for (const int other : {LP_FP32_AVX512, LP_FP32_NEON})
        if (units >> other & 1) unit = other;
    for (int format = 0; format < LP_FORMATS; format++) {
        if (strcmp(name, names[format]) || !(units >> unit & 1)) continue;
        rules = {};
        rules.casts = 1;
        rules.threads = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
        rules.units = units;
        for (int routine = 0; routine < LP_BLAS_RULES; routine++) rules.rules[routine] = routine < DOT ? 0 : -1;
        lp_blas_mode& mode = rules.modes[0];
        memcpy(mode.name, name, strlen(name));
        mode.unit[0] = mode.unit[1] = mode.unit_of_few = unit;
        mode.most_k = INT64_MAX;
        lp_scheme scheme = {};
        scheme.format = format;
        scheme.parts_a = scheme.parts_b = format != LP_EXACT;
        scheme.scaled = format == LP_TO_F16;
        scheme.pair_count = 1;
        scheme.factor[0] = 1;
        mode.scheme[0] = mode.scheme[1] = scheme;
        return true;
    }
    return false;
}

// A forked child has products of its own.
void forget_counts() { lp_blas_counts(scope, rows); }

__attribute__((constructor)) void open_scope() {
    const char* text = getenv("LOWPREC_BLAS");
    const bool is_python = dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr;  // lowprec.numpy's
    if (!text || is_python) return;
    if (!named(text) && !parsed(text)) {
        dprintf(report_to,
                "lowprec: LOWPREC_BLAS is none of fp32, tf32, bf16 and fp16, and not the text of this version; ");
        dprintf(report_to, "the products of %s are its own\n", program_invocation_short_name);
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
