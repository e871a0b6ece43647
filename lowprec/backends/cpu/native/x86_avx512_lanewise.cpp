// Tensor-core arithmetic and unscaling with AVX-512.
#if defined(__x86_64__)
#include "lanewise.hpp"
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2")
namespace {
#include "x86_lanes16.hpp"
#include "vec.hpp"
#include "emulate.hpp"
#include "unscale.hpp"
}  // namespace
namespace lp {
extern const Lanewise lanewise_avx512 = {W, emulate_block, unscale_some};
}  // namespace lp
TARGET_END
#endif
