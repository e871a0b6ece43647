// int8 with AVX-VNNI, on processors without AVX-512: four int8 a dword, unsigned by signed.
#if defined(__x86_64__)
#include "kernel.hpp"
TARGET_BEGIN("avx2,fma,f16c,avxvnni")
namespace {
#include "x86_lanes8.hpp"
#include "templates.hpp"

struct Int8 : Lanes8 {
    typedef i32v Acc;
    static constexpr int ELEMENT = E_U8, OFFSET = 128;
    static constexpr bool BLOCKS = true;
    INLINE i32v dot(i32v acc, u32v a, u32v b) {
        return (i32v)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
    }
    template <int> INLINE i32v sum16(i32v sum, const u32v* b, const uint32_t* a) {
        UNROLLED(i, 4) sum = dot(sum, b[i], all(a[i]));
        return sum;
    }
};
}  // namespace
namespace lp {
Unit int8_avxvnni() { return unit<Int8>(); }
}  // namespace lp
TARGET_END
#endif
