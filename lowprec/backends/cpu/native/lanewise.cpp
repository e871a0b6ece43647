// lp_emulate and lp_unscale: the choice of the instruction set, and the work of each thread.
//
// Threads claim blocks of the result, or pieces of the arrays, one after the other.
#include "lanewise.hpp"

namespace lp {
#if defined(__x86_64__)
extern const Lanewise lanewise_avx2, lanewise_avx512;
#else
extern const Lanewise lanewise_neon;
#endif
}  // namespace lp

namespace {

const int MOST_FRACTION_BITS = 25;
const int64_t PIECE = 1 << 18;                                           // elements of an array
const int64_t ELEMENTS_TO_SHARE = 1 << 20, PRODUCTS_TO_SHARE = 1 << 18;  // from which several threads are faster

// Of this processor; null if there is none.
const lp::Lanewise* found() {
    const int64_t units = lp_units();
#if defined(__x86_64__)
    if (units >> LP_FP32_AVX512 & 1) return &lp::lanewise_avx512;
    return units >> LP_FP32_AVX2 & 1 ? &lp::lanewise_avx2 : nullptr;
#else
    return units >> LP_FP32_NEON & 1 ? &lp::lanewise_neon : nullptr;
#endif
}

struct Unscaled {
    const lp::Lanewise* functions;
    const lp_flat* arrays;
    int64_t count;
    double inverse;
    std::atomic<int64_t> next;  // piece
    std::atomic<bool> special;
};
void unscale(void* at, int) {
    Unscaled& job = *(Unscaled*)at;
    int64_t piece = job.next.fetch_add(1), start = 0;  // start: the array's first piece
    for (int64_t i = 0; i < job.count; i++) {
        const lp_flat& x = job.arrays[i];
        const int64_t end = start + (x.size + PIECE - 1) / PIECE;
        for (; piece < end; piece = job.next.fetch_add(1)) {
            const int64_t first = (piece - start) * PIECE, rest = x.size - first;
            if (job.functions->unscale(x, first, rest < PIECE ? rest : PIECE, job.inverse)) job.special = true;
        }
        start = end;
    }
}

}  // namespace

LP_API int32_t lp_emulate(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                          const lp_tensor_core* core, int32_t threads) {
    const lp::Arithmetic standard;
    const lp::Lanewise* functions = found();
    const bool is_exact = core->fraction_bits <= MOST_FRACTION_BITS && core->group <= lp::EMULATED_K;
    if (!functions || !is_exact) return LP_UNSUPPORTED;
    const lp::Emulation job = {a, b, c, m, n, k, *core};
    const int64_t rows = (m + lp::EMULATED_ROWS - 1) / lp::EMULATED_ROWS, columns = (n + functions->lanes - 1) / functions->lanes;
    auto emulate = [&](int64_t i) { functions->emulate(job, i % rows * lp::EMULATED_ROWS, i / rows * functions->lanes); };
    lp::share(rows * columns, m * n * k < PRODUCTS_TO_SHARE ? 1 : threads, emulate);
    return LP_OK;
}

LP_API int32_t lp_unscale(const lp_flat* arrays, int64_t count, double inverse, int32_t threads) {
    const lp::Arithmetic standard;
    const lp::Lanewise* functions = found();
    if (!functions) return -1;
    int64_t elements = 0;
    for (int64_t i = 0; i < count; i++) elements += arrays[i].size;
    Unscaled job = {functions, arrays, count, inverse, {0}, {false}};
    lp::run(unscale, &job, elements < ELEMENTS_TO_SHARE ? 1 : threads);
    return job.special;
}
