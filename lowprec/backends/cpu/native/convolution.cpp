// lp_sum_lines and lp_dot_lines: the lines of each thread.
#include "lanewise.hpp"

namespace {
const int64_t PRODUCTS_TO_SHARE = 1 << 17;  // from which several threads are faster

}  // namespace

LP_API int32_t lp_sum_lines(const lp_lines* l, const float* x, const float* w, const float* bias, float* out,
                            int32_t threads) {
    const lp::Arithmetic standard;
    const lp::Lanewise* functions = lp::lanewise();
    if (!functions) return LP_UNSUPPORTED;
    auto sum = [&](int64_t i) {
        const float* const of_line = bias && !l->across ? bias + l->bias_lines[i] : bias;
        functions->sum_line(*l, {x + l->x_lines[i], w + l->w_lines[i], of_line, out + l->out_lines[i]});
    };
    lp::share(l->lines, l->lines * l->width * l->terms < PRODUCTS_TO_SHARE ? 1 : threads, sum);
    return LP_OK;
}

LP_API int32_t lp_dot_lines(const lp_lines* l, const float* x, const float* y, float* out, int32_t threads) {
    const lp::Arithmetic standard;
    const lp::Lanewise* functions = lp::lanewise();
    if (!functions) return LP_UNSUPPORTED;
    auto dot = [&](int64_t i) { functions->dot_rows(*l, y + l->w_lines[i], x + l->bias_lines[i], out + i * l->terms); };
    lp::share(l->dots, l->dots * l->lines * l->width * l->terms < PRODUCTS_TO_SHARE ? 1 : threads, dot);
    return LP_OK;
}
