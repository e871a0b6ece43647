// int8 with AVX512-VNNI: four int8 a dword, unsigned by signed.
#if defined(__x86_64__)
#include "kernel.hpp"
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,avx2")
namespace {
#include "x86_lanes16.hpp"
#include "templates.hpp"

struct Int8 : Lanes16 {
    typedef i32v Acc;
    static constexpr int ELEMENT = E_U8, OFFSET = 128;
    static constexpr bool BLOCKS = true;
    INLINE i32v dot(i32v acc, u32v a, u32v b) {
        return (i32v)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
    }
    template <int> INLINE i32v sum16(i32v sum, const u32v* b, const uint32_t* a) {
        UNROLLED(i, 4) sum = dot(sum, b[i], all(a[i]));
        return sum;
    }
};
}  // namespace
namespace lp {
Unit int8_avx512() { return unit<Int8>(); }
}  // namespace lp
TARGET_END
#endif
