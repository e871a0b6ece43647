// FP32 with NEON, for every AArch64 processor; tensor-core arithmetic and unscaling.
#if defined(__aarch64__)
#include "kernel.hpp"
#include "lanewise.hpp"
namespace {
#include "arm_lanes4.hpp"
#include "templates.hpp"
#include "emulate.hpp"
#include "unscale.hpp"
#include "quantize.hpp"
#include "matrix_vector.hpp"
#include "convolution.hpp"
#include "attention.hpp"
#include "measuring.hpp"

struct Fp32 : Lanes4 {
    typedef f32v Acc;
    static constexpr int ELEMENT = E_F32;
    INLINE f32v dot(f32v acc, u32v a, u32v b) {
        return (f32v)vfmaq_f32((float32x4_t)acc, (float32x4_t)a, (float32x4_t)b);
    }
};
}  // namespace
namespace lp {
extern const Lanewise lanewise_neon = {W,
                                       emulate_block,
                                       unscale_some,
                                       largest_magnitude,
                                       raise_vector_peaks,
                                       quantize_part,
                                       multiply_part,
                                       round_numbers,
                                       sum_line,
                                       dot_rows,
                                       weigh,
                                       differentiate,
                                       measure_run};
Unit fp32_neon() { return unit<Fp32>(); }
}  // namespace lp
#endif
