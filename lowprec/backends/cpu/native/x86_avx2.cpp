// FP32 and int8 with AVX2. int8 is widened to int16, which is exact: the unsigned by signed multiplication saturates.
// Also tensor-core arithmetic and unscaling.
#if defined(__x86_64__)
#include "kernel.hpp"
#include "lanewise.hpp"
TARGET_BEGIN("avx2,fma,f16c")
namespace {
#include "x86_lanes8.hpp"
#include "templates.hpp"
#include "emulate.hpp"
#include "unscale.hpp"
#include "quantize.hpp"
#include "matrix_vector.hpp"
#include "convolution.hpp"
#include "attention.hpp"
#include "measuring.hpp"

struct Fp32 : Lanes8 {
    typedef f32v Acc;
    static constexpr int ELEMENT = E_F32;
    INLINE f32v dot(f32v acc, u32v a, u32v b) { return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)acc); }
};
struct Int8 : Lanes8 {
    typedef i32v Acc;
    static constexpr int ELEMENT = E_I16;
    static constexpr bool BLOCKS = true;
    INLINE i32v dot(i32v acc, u32v a, u32v b) { return acc + (i32v)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
};
}  // namespace
namespace lp {
extern const Lanewise lanewise_avx2 = {W,
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
Unit fp32_avx2() { return unit<Fp32>(); }
Unit int8_avx2() { return unit<Int8>(); }
}  // namespace lp
TARGET_END
#endif
