// lp_emulate, lp_quantize and lp_unscale: the choice of the instruction set, and the work of each thread.
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

const int64_t MOST_STRIPE = 8192, PART = 1 << 15, QUANTIZED_TO_SHARE = 1 << 16;  // elements

int64_t ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The matrices of a call with the contiguous axis along columns, and the shape of a stripe.
lp::Quantization describe(const lp_quantizer& q, const void* x, void* to, void* scales) {
    const bool along_k = q.codes ? q.inner == 1 || q.vector != 1 : q.to_inner == 1, has_blocks = q.scaling != LP_TENSOR && q.scaling != LP_VECTORS;
    lp::Quantization j = {q, (const char*)x, (char*)to, (char*)scales, 1, along_k, q.vectors, q.k, q.vector, q.inner, q.to_vector, q.scale_vector, q.scale_inner, q.block_vectors, q.block_k, 0};
    if (!has_blocks) j.block_rows = 1, j.block_columns = 0;
    if (!along_k) {
        std::swap(j.rows, j.columns), std::swap(j.row, j.column), std::swap(j.scale_row, j.scale_column), std::swap(j.block_rows, j.block_columns);
        j.to_row = q.to_inner;
        if (!has_blocks) j.block_rows = 16, j.block_columns = q.scaling == LP_VECTORS;
    }
    j.chunk = least(lp::STRIPE_COLUMNS, MOST_STRIPE / j.block_rows);
    if (j.chunk < j.block_columns) j.chunk = j.block_columns;
    if (q.scaling == LP_VECTORS && !along_k) j.chunk = 64;
    return j;
}

// Calls each(part, memory) for the parts of all matrices, of about PART elements, by threads; false without memory.
template <class Each> bool by_parts(const lp::Quantization& j, bool whole_vectors, int threads, const Each& each) {
    const bool whole_rows = whole_vectors && j.along_k, whole_columns = whole_vectors && !j.along_k;
    const int64_t chunks = ceil(PART / j.block_rows, j.chunk), columns = whole_rows ? j.columns : whole_columns ? j.chunk
                                                                                                                : chunks * j.chunk;
    const int64_t height = whole_columns ? j.rows : ceil(PART, least(columns, j.columns) * j.block_rows) * j.block_rows;
    const int64_t down = ceil(j.rows, height), across = ceil(j.columns, columns), count = j.q.batches * down * across;
    std::atomic<bool> done{true};
    auto part = [&](int64_t i) {
        lp::Memory memory;
        const int64_t row = i / across % down * height, column = i % across * columns;
        if (void* at = memory.of(lp::STRIPE_BYTES)) each(lp::Part{i / (across * down), row, least(row + height, j.rows), column, least(column + columns, j.columns)}, at);
        else done = false;
    };
    lp::share(count, j.q.batches * j.rows * j.columns < QUANTIZED_TO_SHARE ? 1 : threads, part);
    return done;
}

}  // namespace

LP_API int32_t lp_quantize(const lp_quantizer* q, const void* x, void* to, void* scales, float* scale, int32_t threads) {
    const lp::Lanewise* functions = found();
    if (!functions) return LP_UNSUPPORTED;
    const lp::Arithmetic standard;  // the caller's thread may flush subnormal numbers
    lp::Quantization j = describe(*q, x, to, scales);
    bool done = true;
    if (q->scaling == LP_TENSOR || q->scaling == LP_E4M3_SCALES) {
        std::atomic<uint32_t> peak{0};
        done = by_parts(j, false, threads, [&](const lp::Part& part, void* memory) {
            const uint32_t found = functions->peak(j, part, memory);
            for (uint32_t before = peak; found > before && !peak.compare_exchange_weak(before, found);) continue;
        });
        const float largest[] = {448, 57344, 6 * 448}, scaled = __builtin_bit_cast(float, peak.load()) / largest[q->elements];
        j.scale = !peak ? 1 : scaled < 0x1p-126f ? 0x1p-126f
                                                 : scaled;
    }
    *scale = j.scale;
    done = done && by_parts(j, q->scaling == LP_VECTORS, threads, [&](const lp::Part& part, void* memory) { functions->quantize(j, part, memory); });
    return done ? LP_OK : LP_NO_MEMORY;
}

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
    int64_t elements = 0, pieces = 0;
    for (int64_t i = 0; i < count; i++) elements += arrays[i].size, pieces += ceil(arrays[i].size, PIECE);
    std::atomic<bool> special{false};
    // A thread's pieces ascend: it continues from the array of its last one, whose first piece is `start`.
    auto unscale = [&, x = arrays, start = (int64_t)0](int64_t piece) mutable {
        for (int64_t end; piece >= (end = start + ceil(x->size, PIECE)); start = end) x++;
        const int64_t first = (piece - start) * PIECE;
        if (functions->unscale(*x, first, least(x->size - first, PIECE), inverse)) special = true;
    };
    lp::share(pieces, elements < ELEMENTS_TO_SHARE ? 1 : threads, unscale);
    return special;
}
