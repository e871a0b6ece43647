// The units of this processor: CPUID on x86-64, capabilities from the operating system on AArch64.
//
// Read here and not by `__builtin_cpu_supports`, which finds nothing where a program is not started by the compiler's
// own runtime. A unit is present if the processor has its instructions and the operating system saves its registers;
// AMX tiles also need a permission, which is requested here, when the units are first asked for.
#include "common.hpp"
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#ifndef LP_VERSION
#define LP_VERSION 0
#endif

namespace {

int64_t bit(int unit) { return (int64_t)1 << unit; }

#if defined(__x86_64__)
struct Leaf {
    unsigned a, b, c, d;
    Leaf(unsigned leaf, unsigned sub) { __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(sub)); }
};
bool has(unsigned word, int position) { return word >> position & 1; }

bool tiles_permitted() {
#if defined(__linux__)
    const int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return false;
#endif
}

int64_t found_units() {
    const Leaf one(1, 0);
    if (Leaf(0, 0).a < 7 || !has(one.c, 27)) return 0;  // OSXSAVE
    unsigned saved, high;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    const Leaf seven(7, 0);
    const unsigned more = seven.a ? Leaf(7, 1).a : 0;
    const bool fma = has(one.c, 12), f16c = has(one.c, 29), avx2 = has(seven.b, 5);
    if ((saved & 0x6) != 0x6 || !fma || !f16c || !avx2) return 0;
    int64_t found = bit(LP_FP32_AVX2) | bit(LP_INT8_AVX2);
    if (has(more, 4)) found |= bit(LP_INT8_AVXVNNI);
    const bool f = has(seven.b, 16), dq = has(seven.b, 17), bw = has(seven.b, 30), vl = has(seven.b, 31);
    if ((saved & 0xe6) != 0xe6 || !f || !dq || !bw || !vl) return found;
    found |= bit(LP_FP32_AVX512);
    const bool bf16 = has(more, 5), vnni = has(seven.c, 11);
    if (bf16) found |= bit(LP_BF16_AVX512);
    if (vnni) found |= bit(LP_INT8_AVX512);
#if defined(LP_AMX_IN_SOFTWARE)
    return found | bit(LP_BF16_AMX) | bit(LP_INT8_AMX);
#endif
    const bool tile_bf16 = has(seven.d, 22), tile = has(seven.d, 24), tile_int8 = has(seven.d, 25);
    if (!tile || !bf16 || !vnni || (saved & 0x60000) != 0x60000 || !tiles_permitted()) return found;
    return found | (tile_bf16 ? bit(LP_BF16_AMX) : 0) | (tile_int8 ? bit(LP_INT8_AMX) : 0);
}
#else
int64_t found_units() {
    bool dot = false, bf16 = false;
#if defined(__linux__)
    dot = getauxval(AT_HWCAP) >> 20 & 1;
    bf16 = getauxval(AT_HWCAP2) >> 14 & 1;
#elif defined(__APPLE__)
    int value = 0;
    size_t size = sizeof value;
    dot = sysctlbyname("hw.optional.arm.FEAT_DotProd", &value, &size, nullptr, 0) == 0 && value;
    value = 0;
    size = sizeof value;
    bf16 = sysctlbyname("hw.optional.arm.FEAT_BF16", &value, &size, nullptr, 0) == 0 && value;
#endif
    return bit(LP_FP32_NEON) | (bf16 ? bit(LP_BF16_NEON) : 0) | (dot ? bit(LP_INT8_NEON) : 0);
}
#endif

std::atomic<int64_t> units{-1}, usable{-1}, l2{0};

// The build finds the version and the units of a library by these bytes.
#define LP_TEXT_OF(x) #x
#define LP_TEXT(x) LP_TEXT_OF(x)
__attribute__((used)) const char stamp[] = "lowprec " LP_TEXT(LP_VERSION) " units " LP_TEXT(LP_BUILT);

}  // namespace

namespace lp {
int64_t l2_bytes() {
    int64_t found = l2.load(std::memory_order_relaxed);
    if (found) return found;
#if defined(__x86_64__)
    if (Leaf(0x80000000, 0).a >= 0x80000006) found = (int64_t)(Leaf(0x80000006, 0).c >> 16) << 10;
#endif
    return l2 = found ? found : 1 << 20;
}
}  // namespace lp

LP_API uint64_t lp_version(void) { return LP_VERSION; }
LP_API int64_t lp_units(void) {
    int64_t found = units.load();
    if (found < 0) units = found = found_units() & LP_BUILT;
    return found & usable.load();
}
LP_API void lp_use_units(int64_t bits) { usable = bits; }
