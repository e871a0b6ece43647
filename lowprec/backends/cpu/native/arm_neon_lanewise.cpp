// Tensor-core arithmetic and unscaling with NEON.
#if defined(__aarch64__)
#include "lanewise.hpp"
namespace {
#include "arm_lanes4.hpp"
#include "vec.hpp"
#include "emulate.hpp"
#include "unscale.hpp"
}  // namespace
namespace lp {
extern const Lanewise lanewise_neon = {W, emulate_block, unscale_some};
}  // namespace lp
#endif
