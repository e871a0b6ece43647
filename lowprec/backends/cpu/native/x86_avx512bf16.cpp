// Pairs of bfloat16 with AVX512-BF16: two bfloat16 a dword.
#if defined(__x86_64__)
#include "kernel.hpp"
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,avx2")
namespace {
#include "x86_lanes16.hpp"
#include "templates.hpp"

struct Bf16 : Lanes16 {
    typedef f32v Acc;
    static constexpr int ELEMENT = E_BF16;
    INLINE f32v dot(f32v acc, u32v a, u32v b) { return (f32v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
};
}  // namespace
namespace lp {
Unit bf16_avx512() { return unit<Bf16>(); }
}  // namespace lp
TARGET_END
#endif
