// What the files of the instruction sets share: memory, threads, the floating-point mode, regions of an instruction
// set.
//
// Include it first in a file, before TARGET_BEGIN: it includes every system header that kernels need, so that nothing
// of a system header is compiled for an instruction set that the processor may lack. The library has no C++ runtime: no
// exceptions, no operator new, no static object with a constructor or destructor, no thread_local object.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "kernels exist for x86-64 and AArch64"
#endif
#include "lowprec.h"

// Functions between TARGET_BEGIN("avx2,fma") and TARGET_END are compiled for this instruction set, whatever the
// compiler's options.
#define LP_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define TARGET_BEGIN(set) LP_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define TARGET_END _Pragma("clang attribute pop")
#else
#define TARGET_BEGIN(set) _Pragma("GCC push_options") LP_PRAGMA(GCC target(set))
#define TARGET_END _Pragma("GCC pop_options")
#endif

// The bits of the units of a library: those of one processor, or all.
#ifndef LP_BUILT
#define LP_BUILT 0x7ff
#endif

namespace lp {

constexpr bool is_built(int unit) { return (int64_t)LP_BUILT >> unit & 1; }

constexpr int bits_of(int type) {
    if (type == LP_C64) return 64;
    if (type == LP_F32 || type == LP_I32) return 32;
    if (type == LP_BF16 || type == LP_F16 || type >= LP_CODES_BF16) return 16;
    return type == LP_MXFP4 || type == LP_NVFP4 || type == LP_CODES_I4 || type == LP_CODES_U4 ? 4 : 8;
}
constexpr bool is_coded(int type) { return type >= LP_MXFP8; }
constexpr bool has_scales(int type) { return type < LP_CODES_BF16; }  // of coded types
constexpr bool has_float_scales(int type) { return type >= LP_CODES_E4M3; }
constexpr int block_of(int type) { return type == LP_NVFP4 ? 16 : 32; }  // elements with a common scale of 8 bits

// Uninitialised memory, 4096-byte aligned, until the next call of `of` or the end of this object; blocks are kept for
// later products. A copy has no memory. With LP_EXACT_MEMORY nothing is kept and sanitizers see accesses beyond
// `bytes`.
struct Memory {
    Memory() {}
    Memory(const Memory&) {}
    ~Memory();
    void* of(int64_t bytes);  // null if there is no memory

private:
    void* at = nullptr;
    int size_class = 0;
};

// Calls work(argument, thread) in up to `threads` threads, the calling one included, and waits for all. `thread` is
// below `threads` and unique; 0 is not always the caller. Other threads may begin late or never: a single call must be
// able to complete the work. Other threads run in the default floating-point mode, as the caller does (Arithmetic).
void run(void (*work)(void*, int), void* argument, int threads);

// Calls each(i) for i from 0 to count - 1 in up to `threads` threads, which have a copy of `each` each and claim some i
// at a time: an atomic operation for each i would wait for all stores before it.
template <class Each> void share(int64_t count, int threads, const Each& each) {
    struct Shared {
        const Each& each;
        int64_t count, some;
        std::atomic<int64_t> next;
        static void work(void* at, int) {
            Shared& s = *(Shared*)at;
            Each each = s.each;
            for (int64_t first; (first = s.next.fetch_add(s.some)) < s.count;)
                for (int64_t i = first; i < s.count && i < first + s.some; i++) each(i);
        }
    } shared{each, count, 1 + count / (threads * 16), {0}};
    run(Shared::work, &shared, threads);
}

// The processor's default rounding and subnormal numbers, for the lifetime of this object, whatever the thread's mode.
struct Arithmetic {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    Arithmetic() { _mm_setcsr(0x1f80); }
    ~Arithmetic() { _mm_setcsr(before); }
#else
    uint64_t before;
    Arithmetic() { __asm__ __volatile__("mrs %0, fpcr\n\tmsr fpcr, xzr" : "=&r"(before)); }
    ~Arithmetic() { __asm__ __volatile__("msr fpcr, %0" : : "r"(before)); }
#endif
    Arithmetic(const Arithmetic&) = delete;
};

// The size of a core's L2 cache; 1 MiB where it is unknown.
int64_t l2_bytes();

// Waits until the counter has reached the value, which other threads of the same product will do: polls, then yields.
void wait_for(const std::atomic<int64_t>& counter, int64_t value);

}  // namespace lp
