// Tensor-core arithmetic and unscaling with AVX2.
#if defined(__x86_64__)
#include "lanewise.hpp"
TARGET_BEGIN("avx2,fma,f16c")
namespace {
#include "x86_lanes8.hpp"
#include "vec.hpp"
#include "emulate.hpp"
#include "unscale.hpp"
}  // namespace
namespace lp {
extern const Lanewise lanewise_avx2 = {W, emulate_block, unscale_some};
}  // namespace lp
TARGET_END
#endif
