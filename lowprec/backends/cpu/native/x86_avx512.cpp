// FP32 with AVX-512: a float32 a dword; tensor-core arithmetic and unscaling.
#if defined(__x86_64__)
#include "kernel.hpp"
#include "lanewise.hpp"
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2")
namespace {
#include "x86_lanes16.hpp"
#include "templates.hpp"
#include "emulate.hpp"
#include "unscale.hpp"
#include "quantize.hpp"
#include "matrix_vector.hpp"
#include "convolution.hpp"
#include "attention.hpp"
#include "measuring.hpp"

struct Fp32 : Lanes16 {
    typedef f32v Acc;
    static constexpr int ELEMENT = E_F32;
    INLINE f32v dot(f32v acc, u32v a, u32v b) { return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)acc); }
};
}  // namespace
namespace lp {
extern const Lanewise lanewise_avx512 = {W,
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
Unit fp32_avx512() { return unit<Fp32>(); }
}  // namespace lp
TARGET_END
#endif
