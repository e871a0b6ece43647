// lp_sum_lines and lp_dot_lines: the choice of the instruction set, and the lines of each thread.
#include "common.hpp"

// The addresses of a line; bias is null if there is none.
struct lp_line {
    const float *x, *w, *bias;
    float* out;
};

namespace {
#if defined(__x86_64__)
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,avx2")
namespace avx512 {
#include "convolution.hpp"
}
TARGET_END
TARGET_BEGIN("avx2,fma")
namespace avx2 {
#include "convolution.hpp"
}
TARGET_END
#else
namespace neon {
#include "convolution.hpp"
}
#endif

struct Functions {
    void (*sum_line)(const lp_lines&, const lp_line&);
    void (*dot_rows)(const lp_lines&, const float*, const float*, float*);
};

bool find(Functions& to) {
    const int64_t units = lp_units();
#if defined(__x86_64__)
    if (units >> LP_FP32_AVX512 & 1) to = {avx512::sum_line, avx512::dot_rows};
    else if (units >> LP_FP32_AVX2 & 1) to = {avx2::sum_line, avx2::dot_rows};
    else return false;
    return true;
#else
    to = {neon::sum_line, neon::dot_rows};
    return units >> LP_FP32_NEON & 1;
#endif
}

const int64_t PRODUCTS_TO_SHARE = 1 << 17;  // from which several threads are faster

}  // namespace

LP_API int32_t lp_sum_lines(const lp_lines* l, const float* x, const float* w, const float* bias, float* out,
                            int32_t threads) {
    const lp::Arithmetic standard;
    Functions functions;
    if (!find(functions)) return LP_UNSUPPORTED;
    auto sum = [&](int64_t i) {
        const float* const of_line = bias && !l->across ? bias + l->bias_lines[i] : bias;
        functions.sum_line(*l, {x + l->x_lines[i], w + l->w_lines[i], of_line, out + l->out_lines[i]});
    };
    lp::share(l->lines, l->lines * l->width * l->terms < PRODUCTS_TO_SHARE ? 1 : threads, sum);
    return LP_OK;
}

LP_API int32_t lp_dot_lines(const lp_lines* l, const float* x, const float* y, float* out, int32_t threads) {
    const lp::Arithmetic standard;
    Functions functions;
    if (!find(functions)) return LP_UNSUPPORTED;
    auto dot = [&](int64_t i) { functions.dot_rows(*l, y + l->w_lines[i], x + l->bias_lines[i], out + i * l->terms); };
    lp::share(l->dots, l->dots * l->lines * l->width * l->terms < PRODUCTS_TO_SHARE ? 1 : threads, dot);
    return LP_OK;
}
