// lp_emulate, lp_quantize and lp_unscale: the choice of the instruction set, and the work of each thread.
//
// Threads claim blocks of the result, or pieces of the arrays, one after the other.
#include "lanewise.hpp"

namespace lp {
#if defined(__x86_64__)
extern const Lanewise lanewise_avx2, lanewise_avx512;
void multiply_part_bf16(const MatrixVector&, int64_t first, int64_t end);
#else
extern const Lanewise lanewise_neon;
#endif
}  // namespace lp

namespace {

const int MOST_FRACTION_BITS = 25;
const int64_t VECTOR_TO_SHARE = 1 << 17;  // numbers of a matrix
const int64_t PIECE = 1 << 18;                                           // elements of an array
const int64_t ELEMENTS_TO_SHARE = 1 << 20, PRODUCTS_TO_SHARE = 1 << 18;  // from which several threads are faster

const int64_t MOST_STRIPE = 8192, PART = 1 << 15, QUANTIZED_TO_SHARE = 1 << 16;  // elements

int64_t ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The matrices of a call with the contiguous axis along columns, and the shape of a stripe.
lp::Quantization describe(const lp_quantizer& q, const void* x, void* to, void* scales) {
    lp::Quantization j = {};
    j.q = q;
    j.x = (const char*)x;
    j.to = (char*)to;
    j.scales = (char*)scales;
    j.scale = 1;
    j.along_k = q.codes ? q.inner == 1 || q.vector != 1 : q.to_inner == 1;
    j.rows = q.vectors;
    j.columns = q.k;
    j.row = q.vector;
    j.column = q.inner;
    j.to_row = q.to_vector;
    j.scale_row = q.scale_vector;
    j.scale_column = q.scale_inner;
    j.block_rows = q.block_vectors;
    j.block_columns = q.block_k;
    if (!j.along_k) {
        std::swap(j.rows, j.columns);
        std::swap(j.row, j.column);
        std::swap(j.scale_row, j.scale_column);
        std::swap(j.block_rows, j.block_columns);
        j.to_row = q.to_inner;
    }
    const bool of_vectors = q.scaling == LP_VECTORS, of_all = q.scaling == LP_TENSOR;
    if (of_all || of_vectors) {
        j.block_rows = j.along_k && (of_vectors || q.codes) ? 1 : 16;
        if (q.codes && !j.along_k) j.block_rows = 64;  // runs of codes along k are whole cache lines
        j.block_columns = of_vectors && !j.along_k;
    }
    const bool in_order = j.column == 1 && j.row == j.columns && j.to_row == j.columns;
    if (of_all && in_order && !q.codes && !q.stochastic && !q.hadamard) {  // as one row
        j.columns *= j.rows;
        j.rows = j.block_rows = 1;
    }
    j.chunk = least(lp::STRIPE_COLUMNS, (of_vectors || of_all ? lp::STRIPE : MOST_STRIPE) / j.block_rows);
    if (j.chunk < j.block_columns) j.chunk = j.block_columns;
    return j;
}

// The extents of the parts of a matrix: whole stripes, of about PART elements.
struct Extents {
    int64_t rows, columns;
};
Extents parts_of(const lp::Quantization& j) {
    const bool whole_rows = j.q.scaling == LP_VECTORS && j.along_k;
    const int64_t columns = whole_rows ? j.columns : ceil(PART / j.block_rows, j.chunk) * j.chunk;
    return {ceil(PART, least(columns, j.columns) * j.block_rows) * j.block_rows, columns};
}
// Stripes one below the other, as long as all threads have some.
Extents tall_parts_of(const lp::Quantization& j, int threads) {
    return {ceil(j.rows, (threads > 1 ? 4 * threads : 1) * j.block_rows) * j.block_rows, j.chunk};
}

// Calls each(part, memory) for the parts of all matrices by threads; false without memory.
template <class Each> bool by_parts(const lp::Quantization& j, Extents each_part, int threads, const Each& each) {
    const int64_t down = ceil(j.rows, each_part.rows), across = ceil(j.columns, each_part.columns);
    std::atomic<bool> done{true};
    auto part = [&](int64_t i) {
        lp::Memory memory;
        void* const at = memory.of(lp::STRIPE_BYTES);
        if (!at) {
            done = false;
            return;
        }
        const int64_t row = i / across % down * each_part.rows, column = i % across * each_part.columns;
        const int64_t row_end = least(row + each_part.rows, j.rows);
        each(lp::Part{i / (across * down), row, row_end, column, least(column + each_part.columns, j.columns)}, at);
    };
    lp::share(j.q.batches * down * across, j.q.batches * j.rows * j.columns < QUANTIZED_TO_SHARE ? 1 : threads, part);
    return done;
}

}  // namespace

const lp::Lanewise* lp::lanewise() {
    const int64_t units = lp_units();
#if defined(__x86_64__)
    if constexpr (lp::is_built(LP_FP32_AVX512))
        if (units >> LP_FP32_AVX512 & 1) return &lp::lanewise_avx512;
    if constexpr (lp::is_built(LP_FP32_AVX2))
        if (units >> LP_FP32_AVX2 & 1) return &lp::lanewise_avx2;
    return nullptr;
#else
    return units >> LP_FP32_NEON & 1 ? &lp::lanewise_neon : nullptr;
#endif
}

const float LARGEST[] = {448, 57344, 6 * 448};  // by `elements`, for one scale of all; of E2M1 with scales of E4M3

LP_API int32_t lp_quantize(const lp_quantizer* q, const void* x, void* to, void* scales, float* scale,
                           int32_t threads) {
    const lp::Lanewise* functions = lp::lanewise();
    if (!functions) return LP_UNSUPPORTED;
    const lp::Arithmetic standard;  // the caller's thread may flush subnormal numbers
    lp::Quantization j = describe(*q, x, to, scales);
    bool done = true;
    if (q->scaling == LP_TENSOR || q->scaling == LP_E4M3_SCALES) {
        std::atomic<uint32_t> peak{0};
        done = by_parts(j, parts_of(j), threads, [&](const lp::Part& part, void* memory) {
            const uint32_t found = functions->peak(j, part, memory);
            for (uint32_t before = peak; found > before && !peak.compare_exchange_weak(before, found);) continue;
        });
        if (q->elements < 0 || q->elements >= (int32_t)(sizeof LARGEST / sizeof *LARGEST)) return LP_UNSUPPORTED;
        const float scaled = __builtin_bit_cast(float, peak.load()) / LARGEST[q->elements];
        j.scale = scaled < 0x1p-126f ? 0x1p-126f : scaled;
        if (!peak) j.scale = 1;
        if (q->powers)
            j.scale = __builtin_bit_cast(float, (__builtin_bit_cast(uint32_t, j.scale) + 0x7fffffu) & 0x7f800000u);
    }
    *scale = j.scale;
    lp::Memory peaks;
    if (q->scaling == LP_VECTORS && !j.along_k) {
        const int64_t bytes = 4 * q->batches * j.columns;
        j.peaks = (uint32_t*)peaks.of(bytes);
        if (!j.peaks) return LP_NO_MEMORY;
        memset(j.peaks, 0, (size_t)bytes);
        auto raise = [&](const lp::Part& part, void* memory) { functions->vector_peaks(j, part, memory); };
        done = by_parts(j, tall_parts_of(j, threads), threads, raise);
    }
    auto round = [&](const lp::Part& part, void* memory) { functions->quantize(j, part, memory); };
    done = done && by_parts(j, parts_of(j), threads, round);
    return done ? LP_OK : LP_NO_MEMORY;
}

LP_API int32_t lp_emulate(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                          const int32_t* scales_a, const int32_t* scales_b, const lp_tensor_core_model* core,
                          int32_t threads) {
    const lp::Arithmetic standard;
    const lp::Lanewise* functions = lp::lanewise();
    const bool is_exact = core->fraction_bits <= MOST_FRACTION_BITS && core->group <= lp::EMULATED_K;
    if (!functions || !is_exact) return LP_UNSUPPORTED;
    const lp::Emulation job = {a, b, c, m, n, k, scales_a, scales_b, *core};
    const int64_t rows = (m + lp::EMULATED_ROWS - 1) / lp::EMULATED_ROWS,
                  columns = (n + functions->lanes - 1) / functions->lanes;
    auto emulate = [&](int64_t i) {
        functions->emulate(job, i % rows * lp::EMULATED_ROWS, i / rows * functions->lanes);
    };
    lp::share(rows * columns, m * n * k < PRODUCTS_TO_SHARE ? 1 : threads, emulate);
    return LP_OK;
}

LP_API int32_t lp_unscale(const lp_flat* arrays, int64_t count, double inverse, int32_t threads) {
    const lp::Arithmetic standard;
    const lp::Lanewise* functions = lp::lanewise();
    if (!functions) return -1;
    int64_t elements = 0, pieces = 0;
    for (int64_t i = 0; i < count; i++) {
        elements += arrays[i].size;
        pieces += ceil(arrays[i].size, PIECE);
    }
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

bool lp::multiply_vector(const MatrixVector& p, int threads) {
    const Arithmetic standard;
    const Lanewise* functions = lp::lanewise();
    if (!functions) return false;
    auto multiply_part = functions->multiply;
#if defined(__x86_64__)
    if constexpr (is_built(LP_BF16_AVX512))
        if (p.format == LP_TO_BF16 && !p.is_wide && lp_units() >> LP_BF16_AVX512 & 1)
            multiply_part = multiply_part_bf16;
#endif
    const int64_t sums = p.sums_rows ? p.rows : p.columns;
    if (threads < 2 || p.rows * p.columns < VECTOR_TO_SHARE) {
        multiply_part(p, 0, sums);
        return true;
    }
    const int64_t each = ceil(ceil(sums, threads), 64) * 64;
    auto multiply = [&](int64_t i) { multiply_part(p, i * each, least(sums, (i + 1) * each)); };
    share(ceil(sums, each), threads, multiply);
    return true;
}

bool lp::round_rows(const void* from, bool is_wide, float* to, int64_t rows, int64_t columns, int64_t ld, int format,
                    int threads) {
    const Arithmetic standard;
    const Lanewise* functions = lp::lanewise();
    if (!functions) return false;
    const int64_t bytes = is_wide ? sizeof(double) : sizeof(float);
    const bool is_shared = threads > 1 && rows * columns >= ELEMENTS_TO_SHARE;
    if (!is_shared && ld == columns) {
        functions->round(from, is_wide, to, rows * columns, format);
        return true;
    }
    auto round = [&](int64_t i) {
        functions->round((const char*)from + i * ld * bytes, is_wide, to + i * columns, columns, format);
    };
    if (is_shared) share(rows, threads, round);
    else
        for (int64_t i = 0; i < rows; i++) round(i);
    return true;
}
