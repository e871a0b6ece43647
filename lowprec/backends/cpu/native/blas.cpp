// Products of the BLAS, computed by lp_gemm in the mode of a scope, on Linux.
//
// The BLAS computes products inside LAPACK and those of vectors, unless a rule names them, those of types on which the
// mode does not act, and calls with nothing to multiply or with illegal arguments, which it reports.
#include "blas_product.hpp"
#include "lanewise.hpp"
#if defined(__linux__)

namespace lp::blas {
namespace {

// float32 by rounding to odd: a later rounding to fewer bits is the only one (S. Boldo and G. Melquiond, 2008).
float to_odd(double x) {
    const float y = (float)x;
    if ((double)y == x || !(__builtin_fabsf(y) < __builtin_inff())) return y;
    const int32_t bits = __builtin_bit_cast(int32_t, y) - (__builtin_fabs((double)y) > __builtin_fabs(x));
    return __builtin_bit_cast(float, bits | 1);
}
float narrowed(float x, bool) { return x; }
float narrowed(double x, bool rounds_later) { return rounds_later ? to_odd(x) : (float)x; }

bool is_in_other_part(const Matrix& x, int64_t i, int64_t j) {
    return (x.part == UPPER && i > j) || (x.part == LOWER && i < j);
}

// Copies rows x cols elements of PLANES numbers as float32, row by row, with the part that is not stored.
template <class Real, int PLANES>
void copy(const Matrix& x, int64_t rows, int64_t cols, bool rounds_later, float* to) {
    const lp::Arithmetic standard;  // no comparison with NaN is reported to the caller
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++, to += PLANES) {
            const bool is_mirrored = is_in_other_part(x, i, j);
            const int64_t row = is_mirrored ? j : i;
            const int64_t col = is_mirrored ? i : j;
            const Real* from = (const Real*)x.at + (row * x.row + col * x.col) * PLANES;
            Real number[] = {from[0], PLANES == 2 ? from[PLANES - 1] : 0};
            if (x.is_conjugate != (x.shape == HERMITIAN && is_mirrored)) number[1] = -number[1];
            const bool is_one = x.shape == UNIT_TRIANGULAR && i == j;
            const bool is_known = is_one || (x.shape >= TRIANGULAR && is_mirrored);
            if (is_known) number[0] = is_one;
            if (is_known || (x.shape == HERMITIAN && i == j)) number[1] = 0;
            for (int plane = 0; plane < PLANES; plane++) to[plane] = narrowed(number[plane], rounds_later);
        }
}

// out = alpha * sums + beta * out, in the part that is written.
template <class Real, int PLANES> void combine(const Product& p, const float* sums) {
    const auto& alpha = p.alpha.part;
    const auto& beta = p.beta.part;
    for (int64_t i = 0; i < p.m; i++)
        for (int64_t j = 0; j < p.n; j++, sums += PLANES) {
            if (is_in_other_part(p.out, i, j)) continue;
            Real* to = (Real*)p.out.at + (i * p.out.row + j * p.out.col) * PLANES;
            const double sum[] = {sums[0], PLANES == 2 ? sums[PLANES - 1] : 0};
            double value[] = {alpha[0] * sum[0] - alpha[1] * sum[1], alpha[0] * sum[1] + alpha[1] * sum[0]};
            if (!is_zero(p.beta)) {
                const double before[] = {to[0], PLANES == 2 ? to[PLANES - 1] : 0};
                value[0] += beta[0] * before[0] - beta[1] * before[1];
                value[1] += beta[0] * before[1] + beta[1] * before[0];
            }
            if (p.routine == HERK && i == j) value[1] = 0;
            for (int plane = 0; plane < PLANES; plane++) to[plane] = (Real)value[plane];
        }
}

void describe(lp_matrix& x, int64_t row, int64_t col, int type) {
    x.row = row;
    x.col = col;
    x.row_offsets = x.inner_offsets = x.batch_offsets = nullptr;
    x.scale_col = x.block = 0;
    x.type = type;
    x.packed = 0;
}

// An operand as codes of integers in blocks, in whole blocks along k, with a scale for each.
void describe_codes(lp_matrix& x, lp_quantizer& q, bool is_b) {
    const bool is_integer = q.elements == LP_NARROW_I8;
    const int64_t blocks = (q.k + q.block_k - 1) / q.block_k;
    q.to_vector = blocks * q.block_k;
    q.to_inner = 1;
    q.scale_batch = q.vectors * blocks;
    q.scale_vector = blocks;
    q.scale_inner = 1;
    const int64_t bytes = is_integer ? q.to_vector : q.to_vector / 2;
    const int of_halves = q.scaling == LP_E4M3_SCALES ? LP_NVFP4 : LP_MXFP4;
    describe(x, is_b ? 0 : bytes, is_b ? bytes : 0, is_integer ? LP_CODES_I8 : of_halves);
    x.block = q.block_k;
    x.scale_col = is_b ? blocks * (q.scaling == LP_F32_SCALES ? 4 : 1) : 0;
}

// Describes the rounding of the vectors of a (rows) or b (columns) along k, and the operand as it is after it.
void describe_rounding(lp_product& product, const Product& p, int of_source, bool is_b) {
    const Matrix& from = is_b ? p.b : p.a;
    const int64_t vectors = is_b ? p.n : p.m;
    lp_matrix& rounded = is_b ? product.b : product.a;
    lp_quantizer& q = product.rounding[is_b];
    q = p.mode->rounding[is_b];
    q.type = of_source;
    q.batches = 1;
    q.vectors = vectors;
    q.k = product.k;
    q.vector = is_b ? from.col : from.row;
    q.inner = is_b ? from.row : from.col;
    if (q.codes) return describe_codes(rounded, q, is_b);
    const bool is_along_k = q.inner == 1 || q.vector != 1;
    q.to_vector = is_along_k ? q.k : 1;
    q.to_inner = is_along_k ? 1 : vectors;
    const bool has_blocks = q.scaling == LP_F32_SCALES;
    q.scale_inner = has_blocks ? (vectors + q.block_vectors - 1) / q.block_vectors : 0;
    q.scale_batch = has_blocks ? (q.k + q.block_k - 1) / q.block_k * q.scale_inner : vectors;
    q.scale_vector = 1;
    const int type = q.elements == LP_NARROW_I8 ? LP_I8 : LP_BF16;
    describe(rounded, is_b ? q.to_inner : q.to_vector, is_b ? q.to_vector : q.to_inner, type);
}

bool has_few(const Product& p) {
    const int64_t FEW = 1 << 14;
    return p.m == 1 || p.n == 1 || p.m * p.n * p.k <= FEW;
}

// A product whose operands are float16, float32 or complex64 in memory; -> lp_status.
int32_t multiply(const Product& p, int type) {
    const bool is_complex = type == LP_C64;
    const bool quantises = p.mode->quantises && !is_complex;
    const bool is_exact = type == LP_F16 && !quantises;  // modes round float32
    const bool adds = !is_zero(p.beta);
    lp_product product;  // written member by member, as `call`: a tenth of the time of a small product less
    product.m = p.m;
    product.n = p.n;
    product.k = p.k;
    product.batches = 1;
    describe(product.a, p.a.row, p.a.col, type);
    describe(product.b, p.b.row, p.b.col, type);
    describe(product.out, p.out.row, p.out.col, type);
    describe(product.c, p.out.row, p.out.col, adds ? type : -1);
    describe(product.bias, 0, 0, -1);
    if (is_exact) product.scheme = {};
    else product.scheme = p.mode->scheme[is_complex];
    product.activation = 0;
    product.rounding[0].batches = product.rounding[1].batches = 0;
    product.scale_order[0] = product.scale_order[1] = nullptr;
    product.piece = 0;
    product.last_unit = 0;
    const bool is_few = is_exact || (has_few(p) && !p.mode->quantises);
    product.unit = is_few ? p.mode->unit_of_few : p.mode->unit[is_complex];
    const bool is_of_8_lanes = is_few && p.n <= 8 && lp_units() >> LP_FP32_AVX2 & 1;  // of the same bits
    if (is_of_8_lanes) product.unit = LP_FP32_AVX2;
    lp_call call;
    call.a = p.a.at;
    call.b = p.b.at;
    call.out = (void*)p.out.at;
    call.c = adds ? p.out.at : nullptr;
    call.a_scales = call.b_scales = call.b_zeros = call.bias = nullptr;
    call.row_scales = call.col_scales = nullptr;
    call.draw = 0;
    memcpy(call.alpha, p.alpha.part, sizeof call.alpha);
    memcpy(call.beta, p.beta.part, sizeof call.beta);
    const int64_t ALONE = 1 << 18;  // multiplications up to which the calling thread multiplies alone
    call.threads = p.m * p.n * p.k <= ALONE ? 1 : p.threads;
    if (quantises) {
        product.piece = p.mode->piece;
        product.last_unit = p.mode->last_unit;
        describe_rounding(product, p, type, false);
        describe_rounding(product, p, type, true);
    }
    return lp_gemm(&product, &call);
}

bool needs_copy(const Matrix& x) { return x.is_conjugate || x.part != WHOLE || x.is_overwritten; }

// Computes a product of a matrix and a vector in the pass that reads the matrix; false if others are to compute it.
template <class T> bool multiplies_vector(const Product& p) {
    typedef typename Type<T>::Real Real;
    const lp_scheme& scheme = p.mode->scheme[0];
    const bool is_rounded_once = !p.mode->quantises && scheme.format <= LP_TO_BF16 && scheme.parts_a < 2;
    const bool by_column = p.n != 1;
    const Matrix& matrix = by_column ? p.b : p.a;
    const Matrix& vector = by_column ? p.a : p.b;
    const int64_t sums = by_column ? p.n : p.m;
    const int64_t of_sum = by_column ? matrix.col : matrix.row;
    const int64_t along_k = by_column ? matrix.row : matrix.col;
    const int64_t step = by_column ? vector.col : vector.row;
    if (by_column && p.m != 1) return false;
    if (!is_rounded_once || needs_copy(p.a) || needs_copy(p.b) || p.out.part != WHOLE) return false;
    if (along_k != 1 && of_sum != 1) return false;
    lp::Memory memory;
    const int64_t numbers = p.k + sums + 2 * lp::ENDS;
    Real* const gathered = (Real*)memory.of(numbers * (int64_t)sizeof(float) + p.k * (int64_t)sizeof(Real));
    if (!gathered) return false;
    float* const x = (float*)(gathered + p.k);
    float* const y = x + p.k + lp::ENDS;
    const bool is_wide = Type<T>::IS_WIDE;
    for (int64_t i = 0; step != 1 && i < p.k; i++) gathered[i] = ((const Real*)vector.at)[i * step];
    const void* const from = step == 1 ? vector.at : gathered;
    if (!lp::round_rows(from, is_wide, x, 1, p.k, p.k, scheme.format, 1)) return false;
    memset(x + p.k, 0, lp::ENDS * sizeof(float));
    const bool sums_rows = along_k == 1;
    lp::MatrixVector product = {(const char*)matrix.at, x, y, p.k, sums, along_k, is_wide, sums_rows, scheme.format};
    if (sums_rows) {
        std::swap(product.rows, product.columns);
        product.ld = of_sum;
    }
    lp::multiply_vector(product, p.threads);
    combine<Real, 1>(p, y);
    return true;
}

// Copies an operand as float32; false if there is no memory.
template <class T> bool copy_operand(Matrix& x, int64_t rows, int64_t cols, const Product& p, lp::Memory& memory) {
    typedef typename Type<T>::Real Real;
    constexpr int PLANES = Type<T>::PLANES;
    const lp_scheme& scheme = p.mode->scheme[PLANES - 1];
    const bool rounds_later = scheme.format != LP_EXACT && scheme.parts_a < 2;
    float* const to = (float*)memory.of(rows * cols * PLANES * (int64_t)sizeof(float));
    if (!to) return false;
    const bool by_rows = x.col == 1;
    const bool has_runs = !x.is_conjugate && x.part == WHOLE && (by_rows || x.row == 1);
    const int64_t count = by_rows ? rows : cols;  // of runs, and their numbers
    const int64_t size = by_rows ? cols : rows;
    const int64_t ld = (by_rows ? x.row : x.col) * PLANES;
    const bool is_known = !rounds_later || scheme.format <= LP_TO_BF16;
    const int format = rounds_later ? scheme.format : LP_EXACT;
    if (has_runs && is_known &&
        lp::round_rows(x.at, Type<T>::IS_WIDE, to, count, size * PLANES, ld, format, p.threads)) {
        x = Matrix{to, by_rows ? size : 1, by_rows ? 1 : size, false, false, WHOLE, GENERAL};
        return true;
    }
    copy<Real, PLANES>(x, rows, cols, rounds_later, to);
    x = Matrix{to, cols, 1, false, false, WHOLE, GENERAL};
    return true;
}

template <class T> Reason compute(const Product& p) {
    using Real = typename Type<T>::Real;
    constexpr int PLANES = Type<T>::PLANES;
    const bool is_wide = Type<T>::IS_WIDE;
    const bool is_direct = !is_wide && p.out.part == WHOLE;
    if constexpr (PLANES == 1)
        if (multiplies_vector<T>(p)) return TAKEN;
    if (is_direct && !needs_copy(p.a) && !needs_copy(p.b)) return multiply(p, Type<T>::TYPE) ? NO_MEMORY : TAKEN;
    lp::Memory memory[3];
    Product copied = p;
    for (const bool is_b : {false, true}) {
        Matrix& x = is_b ? copied.b : copied.a;
        if (!is_wide && !needs_copy(x)) continue;
        if (!copy_operand<T>(x, is_b ? p.k : p.m, is_b ? p.n : p.k, p, memory[is_b])) return NO_MEMORY;
    }
    if (!is_direct) {
        copied.out =
            Matrix{memory[2].of(p.m * p.n * PLANES * (int64_t)sizeof(float)), p.n, 1, false, false, WHOLE, GENERAL};
        if (!copied.out.at) return NO_MEMORY;
        copied.alpha = {{1, 0}};
        copied.beta = {{0, 0}};
    }
    if (multiply(copied, Type<T>::TYPE)) return NO_MEMORY;
    if (!is_direct) combine<Real, PLANES>(p, (const float*)copied.out.at);
    return TAKEN;
}

template <> Reason compute<uint16_t>(const Product& p) { return multiply(p, LP_F16) ? NO_MEMORY : TAKEN; }

}  // namespace

thread_local bool has_arrived;

template <class T> bool takes(Product& p, const void* caller) {
    const int planes = Type<T>::PLANES;
    const bool is_half = Type<T>::TYPE == LP_F16;
    has_arrived = true;
    if (p.m < 1 || p.n < 1 || p.k < 1 || is_zero(p.alpha) || passes_all()) return false;
    const Call call = {Type<T>::LETTER, p.routine, p.m, p.n, p.k, p.m * p.n * p.k, caller};
    Scope* scope = scope_of_thread();
    if (!scope) {
        count(nullptr, call, OTHER_THREAD, -1);
        return false;
    }
    const lp_blas& rules = rules_of(scope);
    const bool is_wide = Type<T>::IS_WIDE;
    const bool is_of_vector = p.routine == GEMM && (p.m == 1 || p.n == 1);
    const bool is_inside = is_inside_lapack() || is_of_solver(caller);
    int rule = is_of_vector ? GEMV : p.routine;
    if (is_inside) rule = INSIDE_SOLVERS;
    int number = rules.rules[rule];
    if (const Observer* observer = observer_of(scope)) number = mode_of(*observer, number, p.routine, caller);
    Reason reason = TAKEN;
    bool is_computed = false;
    p.reason = SOLVER;
    if (number < 0) {
        if (is_inside_lapack()) return false;
        reason = p.routine >= DOT ? VECTORS : NOT_TAKEN;
        if (is_inside) reason = SOLVER;
    } else {
        p.mode = &rules.modes[number];
        p.threads = rules.threads;
        const bool is_exact = !p.mode->quantises && p.mode->scheme[0].format == LP_EXACT;
        const bool is_blas_own = is_exact && !is_wide && !is_half && has_few(p);  // in FP32, and in less time
        if (p.mode->is_native) reason = is_wide ? TAKEN : ELEMENT_TYPE;
        else if ((is_wide && !rules.casts) || p.mode->unit[planes - 1] < 0) reason = ELEMENT_TYPE;
        else if (planes == 1 && p.k > p.mode->most_k) reason = LONG;
        else if (!is_blas_own) reason = compute<T>(p);
        is_computed = reason == TAKEN && !p.mode->is_native && !is_blas_own;
    }
    const bool is_of_fp32 = is_half && reason == TAKEN && !p.mode->quantises;
    p.reason = reason;
    p.number = is_of_fp32 ? -1 : number;
    count(scope, call, reason, p.number);
    return is_computed;
}

template bool takes<uint16_t>(Product&, const void*);
template bool takes<float>(Product&, const void*);
template bool takes<double>(Product&, const void*);
template bool takes<Complex32>(Product&, const void*);
template bool takes<Complex64>(Product&, const void*);

}  // namespace lp::blas
#endif
