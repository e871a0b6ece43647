// Preloaded by avx2.sh: CPUID and /proc/cpuinfo show no instruction set above AVX2, in a program and its children.
//
// The kernel lets CPUID fault (arch_prctl, Linux 4.12); the handler executes it and clears bits. Every library asks so,
// NumPy's BLAS and oneDNN included, and chooses its kernels as on such a processor.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static int let_fault(int faults) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, (unsigned long)!faults) == 0; }

static uint32_t bits(const int* positions) {
    uint32_t found = 0;
    for (; *positions >= 0; positions++) found |= 1u << *positions;
    return found;
}

// Of leaf 7: AVX-512 and its extensions in EBX, ECX and EDX, AMX in EDX.
static const int EBX[] = {16, 17, 21, 26, 27, 28, 30, 31, -1}, ECX[] = {1, 6, 11, 12, 14, -1};
static const int EDX[] = {2, 3, 8, 22, 23, 24, 25, -1};
// Of its subleaf 1: AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA.
static const int EAX_1[] = {4, 5, 21, 23, -1};

typedef void Handler(int);
typedef int Sigaction(int, const struct sigaction*, struct sigaction*);
static int set_action(int number, const struct sigaction* action, struct sigaction* before) {
    return ((Sigaction*)dlsym(RTLD_NEXT, "sigaction"))(number, action, before);
}

static void on_fault(int number, siginfo_t* info, void* context) {
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    const uint8_t* code = (const uint8_t*)registers[REG_RIP];
    if (info->si_code != SI_KERNEL || code[0] != 0x0f || code[1] != 0xa2) {
        const struct sigaction none = {.sa_handler = SIG_DFL};
        set_action(number, &none, NULL);  // a fault of the program, which happens again, or a signal
        if (info->si_code != SI_KERNEL && info->si_code <= 0) raise(number);
        return;
    }
    const uint32_t leaf = (uint32_t)registers[REG_RAX], sub = (uint32_t)registers[REG_RCX];
    uint32_t a, b, c, d;
    let_fault(0);
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(sub));
    let_fault(1);
    if (leaf == 7 && sub == 0) b &= ~bits(EBX), c &= ~bits(ECX), d &= ~bits(EDX);
    if (leaf == 7 && sub == 1) a &= ~bits(EAX_1), d = 0;
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

// Python's faulthandler and compilers would replace the handler.
int sigaction(int number, const struct sigaction* action, struct sigaction* before) {
    return set_action(number, number == SIGSEGV ? NULL : action, before);
}
Handler* signal(int number, Handler* handler) {
    return number == SIGSEGV ? SIG_DFL : ((Handler * (*)(int, Handler*)) dlsym(RTLD_NEXT, "signal"))(number, handler);
}

static const char* shown(const char* path) { return strcmp(path, "/proc/cpuinfo") ? path : CPUINFO; }

#define OPEN(name)                                                     \
    int name(const char* path, int flags, ...) {                       \
        int (*real)(const char*, int, ...) = dlsym(RTLD_NEXT, #name);  \
        va_list more;                                                  \
        va_start(more, flags);                                         \
        const mode_t mode = va_arg(more, mode_t);                      \
        va_end(more);                                                  \
        return real(shown(path), flags, mode);                         \
    }
#define FOPEN(name)                                                        \
    FILE* name(const char* path, const char* mode) {                       \
        FILE* (*real)(const char*, const char*) = dlsym(RTLD_NEXT, #name); \
        return real(shown(path), mode);                                    \
    }
OPEN(open)
OPEN(open64)
FOPEN(fopen)
FOPEN(fopen64)

static __attribute__((constructor)) void begin(void) {
    const struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    set_action(SIGSEGV, &action, NULL);
    if (!let_fault(1)) fprintf(stderr, "avx2_only: this processor or kernel does not let CPUID fault\n"), _exit(3);
}
