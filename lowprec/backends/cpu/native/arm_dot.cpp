// bfloat16 and int8 with NEON: BFDOT and SDOT multiply a broadcast dword of a.
#if defined(__aarch64__)
#include "kernel.hpp"
#if defined(__clang__)
TARGET_BEGIN("dotprod,bf16")
#else
TARGET_BEGIN("arch=armv8.2-a+dotprod+bf16")
#endif
namespace {
#include "arm_lanes4.hpp"
#include "templates.hpp"

struct Bf16 : Lanes4 {
    typedef f32v Acc;
    static constexpr int ELEMENT = E_BF16;
    INLINE f32v dot(f32v acc, u32v a, u32v b) {
        return (f32v)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
    }
};
struct Int8 : Lanes4 {
    typedef i32v Acc;
    static constexpr int ELEMENT = E_I8, OFFSET = 0;
    static constexpr bool BLOCKS = true;
    INLINE i32v dot(i32v acc, u32v a, u32v b) { return (i32v)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b); }
    template <int> INLINE i32v sum16(i32v sum, const u32v* b, const uint32_t* a) {
        UNROLLED(i, 4) sum = dot(sum, b[i], all(a[i]));
        return sum;
    }
};
}  // namespace
namespace lp {
Unit bf16_neon() { return unit<Bf16>(); }
Unit int8_neon() { return unit<Int8>(); }
}  // namespace lp
TARGET_END
#endif
