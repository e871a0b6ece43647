// The routines of the BLAS, computed by lp_gemm in the mode of a scope, on Linux.
//
// A Product describes a call of any routine. The BLAS computes products inside LAPACK and those of vectors, unless a
// rule names them, those of types on which the mode does not act, and calls with nothing to multiply or with illegal
// arguments, which it reports. blas_words.cpp replaces the addresses of the routines in the libraries of a process.
#include "blas.hpp"
#if defined(__linux__)

namespace lp::blas {
namespace {

struct Complex32 {
    float re, im;
};
struct Complex64 {
    double re, im;
};

template <class Value, int NUMBERS, int NUMBER, char OF_BLAS> struct TypeOf {
    using Real = Value;
    static constexpr int PLANES = NUMBERS;
    static constexpr int TYPE = NUMBER;  // lp_type of its operands
    static constexpr char LETTER = OF_BLAS;
    static constexpr bool IS_WIDE = sizeof(Real) == sizeof(double);
};
template <class T> struct Type;
template <> struct Type<uint16_t> : TypeOf<uint16_t, 1, LP_F16, 'e'> {};
template <> struct Type<float> : TypeOf<float, 1, LP_F32, 's'> {};
template <> struct Type<double> : TypeOf<double, 1, LP_F32, 'd'> {};
template <> struct Type<Complex32> : TypeOf<float, 2, LP_C64, 'c'> {};
template <> struct Type<Complex64> : TypeOf<double, 2, LP_C64, 'z'> {};

enum Op { PLAIN,
          TRANSPOSED,
          ADJOINT,
          NO_OP };

// The part of a square matrix that is stored, or written.
enum Part { WHOLE,
            UPPER,
            LOWER,
            NO_PART };

// The other part: as it is stored, that of the transpose, of the adjoint, or zero.
enum Shape { GENERAL,
             SYMMETRIC,
             HERMITIAN,
             TRIANGULAR,
             UNIT_TRIANGULAR };

// An operand of m x k or k x n; strides are in elements.
struct Operand {
    const void* at;
    int64_t row, col;
    bool is_conjugate;
    Part stored;
    Shape shape;
    bool is_overwritten;  // by the result
};

// out = alpha * a @ b + beta * out.
struct Product {
    int routine;
    int64_t m, n, k;
    Operand a, b;
    void* out;
    int64_t row, col;  // strides of out
    Part written;
    double alpha[2], beta[2];
    const lp_blas_mode* mode;
    int threads;
};

// float32 by rounding to odd: a later rounding to fewer bits is the only one (S. Boldo and G. Melquiond, 2008).
float to_odd(double x) {
    const float y = (float)x;
    if ((double)y == x || !(__builtin_fabsf(y) < __builtin_inff())) return y;
    const int32_t bits = __builtin_bit_cast(int32_t, y) - (__builtin_fabs((double)y) > __builtin_fabs(x));
    return __builtin_bit_cast(float, bits | 1);
}
float narrowed(float x, bool) { return x; }
float narrowed(double x, bool rounds_later) { return rounds_later ? to_odd(x) : (float)x; }

// Copies rows x cols elements of PLANES numbers as float32, row by row, with the part that is not stored.
template <class Real, int PLANES>
void copy(const Operand& x, int64_t rows, int64_t cols, bool rounds_later, float* to) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++, to += PLANES) {
            const bool is_mirrored = (x.stored == UPPER && i > j) || (x.stored == LOWER && i < j);
            const int64_t row = is_mirrored ? j : i;
            const int64_t col = is_mirrored ? i : j;
            if (x.shape >= TRIANGULAR && (is_mirrored || (x.shape == UNIT_TRIANGULAR && i == j))) {
                to[PLANES - 1] = 0;
                to[0] = !is_mirrored;
                continue;
            }
            const Real* from = (const Real*)x.at + (row * x.row + col * x.col) * PLANES;
            to[0] = narrowed(from[0], rounds_later);
            if (PLANES == 1) continue;
            const bool is_real = x.shape == HERMITIAN && i == j;
            const bool is_negated = x.is_conjugate != (x.shape == HERMITIAN && is_mirrored);
            const Real imaginary = is_real ? 0 : from[PLANES - 1];
            to[PLANES - 1] = narrowed(is_negated ? -imaginary : imaginary, rounds_later);
        }
}

// out = alpha * sums + beta * out, in the part that is written.
template <class Real, int PLANES> void combine(const Product& p, const float* sums) {
    const bool adds = p.beta[0] != 0 || p.beta[1] != 0;
    for (int64_t i = 0; i < p.m; i++)
        for (int64_t j = 0; j < p.n; j++, sums += PLANES) {
            if ((p.written == UPPER && i > j) || (p.written == LOWER && i < j)) continue;
            Real* to = (Real*)p.out + (i * p.row + j * p.col) * PLANES;
            const double re = sums[0];
            const double im = PLANES == 2 ? sums[PLANES - 1] : 0;
            const double before_re = adds ? to[0] : 0;
            const double before_im = adds && PLANES == 2 ? to[PLANES - 1] : 0;
            double real = p.alpha[0] * re;
            if (PLANES == 2) real -= p.alpha[1] * im;
            if (adds) real += p.beta[0] * before_re;
            if (adds && PLANES == 2) real -= p.beta[1] * before_im;
            to[0] = (Real)real;
            if (PLANES == 1) continue;
            double imaginary = p.alpha[0] * im + p.alpha[1] * re;
            if (adds) imaginary += p.beta[0] * before_im + p.beta[1] * before_re;
            to[PLANES - 1] = p.routine == HERK && i == j ? 0 : (Real)imaginary;
        }
}

lp_matrix described(int64_t row, int64_t col, int type) {
    lp_matrix x = {};
    x.row = row;
    x.col = col;
    x.type = type;
    return x;
}

// An operand as codes of integers in blocks, in whole blocks along k, with a scale for each.
lp_matrix coded(lp_quantizer& q, bool is_b) {
    const bool is_integer = q.elements == LP_NARROW_I8;
    const int64_t blocks = (q.k + q.block_k - 1) / q.block_k;
    q.to_vector = blocks * q.block_k;
    q.to_inner = 1;
    q.scale_batch = q.vectors * blocks;
    q.scale_vector = blocks;
    q.scale_inner = 1;
    const int64_t bytes = is_integer ? q.to_vector : q.to_vector / 2;
    const int of_halves = q.scaling == LP_E4M3_SCALES ? LP_NVFP4 : LP_MXFP4;
    lp_matrix x = described(is_b ? 0 : bytes, is_b ? bytes : 0, is_integer ? LP_CODES_I8 : of_halves);
    x.block = q.block_k;
    x.scale_col = is_b ? blocks * (q.scaling == LP_F32_SCALES ? 4 : 1) : 0;
    return x;
}

// Describes the rounding of the vectors of a (rows) or b (columns) along k, and the operand as it is after it.
void describe_rounding(lp_product& product, const Product& p, int of_source, bool is_b) {
    const Operand& from = is_b ? p.b : p.a;
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
    if (q.codes) {
        rounded = coded(q, is_b);
        return;
    }
    const bool is_along_k = q.inner == 1 || q.vector != 1;
    q.to_vector = is_along_k ? q.k : 1;
    q.to_inner = is_along_k ? 1 : vectors;
    const bool has_blocks = q.scaling == LP_F32_SCALES;
    q.scale_inner = has_blocks ? (vectors + q.block_vectors - 1) / q.block_vectors : 0;
    q.scale_batch = has_blocks ? (q.k + q.block_k - 1) / q.block_k * q.scale_inner : vectors;
    q.scale_vector = 1;
    const int type = q.elements == LP_NARROW_I8 ? LP_I8 : LP_BF16;
    rounded = is_b ? described(q.to_inner, q.to_vector, type) : described(q.to_vector, q.to_inner, type);
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
    const bool adds = p.beta[0] != 0 || p.beta[1] != 0;
    lp_product product = {};
    product.m = p.m;
    product.n = p.n;
    product.k = p.k;
    product.batches = 1;
    product.a = described(p.a.row, p.a.col, type);
    product.b = described(p.b.row, p.b.col, type);
    product.out = described(p.row, p.col, type);
    product.c = described(p.row, p.col, adds ? type : -1);
    product.bias = described(0, 0, -1);
    if (!is_exact) product.scheme = p.mode->scheme[is_complex];
    const bool is_few = is_exact || (has_few(p) && !p.mode->quantises);
    product.unit = is_few ? p.mode->unit_of_few : p.mode->unit[is_complex];
    lp_call call = {};
    call.a = p.a.at;
    call.b = p.b.at;
    call.out = p.out;
    call.c = adds ? p.out : nullptr;
    memcpy(call.alpha, p.alpha, sizeof call.alpha);
    memcpy(call.beta, p.beta, sizeof call.beta);
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

bool needs_copy(const Operand& x) { return x.is_conjugate || x.stored != WHOLE || x.is_overwritten; }

template <class T> Reason compute(const Product& p) {
    using Real = typename Type<T>::Real;
    constexpr int PLANES = Type<T>::PLANES;
    const bool is_wide = Type<T>::IS_WIDE;
    const lp_scheme& scheme = p.mode->scheme[PLANES - 1];
    const bool rounds_later = scheme.format != LP_EXACT && scheme.parts_a < 2;
    lp::Memory memory[3];
    Product copied = p;
    struct {
        Operand* x;
        int64_t rows, cols;
    } operands[] = {{&copied.a, p.m, p.k}, {&copied.b, p.k, p.n}};
    for (int i = 0; i < 2; i++) {
        auto [x, rows, cols] = operands[i];
        if (!is_wide && !needs_copy(*x)) continue;
        float* to = (float*)memory[i].of(rows * cols * PLANES * (int64_t)sizeof(float));
        if (!to) return NO_MEMORY;
        copy<Real, PLANES>(*x, rows, cols, rounds_later, to);
        *x = Operand{to, cols, 1, false, WHOLE, GENERAL, false};
    }
    const bool is_direct = !is_wide && p.written == WHOLE;
    if (!is_direct) {
        copied.out = memory[2].of(p.m * p.n * PLANES * (int64_t)sizeof(float));
        if (!copied.out) return NO_MEMORY;
        copied.row = p.n;
        copied.col = 1;
        copied.alpha[0] = 1;
        copied.alpha[1] = copied.beta[0] = copied.beta[1] = 0;
    }
    if (multiply(copied, Type<T>::TYPE)) return NO_MEMORY;
    if (!is_direct) combine<Real, PLANES>(p, (const float*)copied.out);
    return TAKEN;
}

template <> Reason compute<uint16_t>(const Product& p) { return multiply(p, LP_F16) ? NO_MEMORY : TAKEN; }

template <class T> void set(double (&to)[2], const void* from) {
    using Real = typename Type<T>::Real;
    if (!from) return;
    to[0] = ((const Real*)from)[0];
    if (Type<T>::PLANES == 2) to[1] = ((const Real*)from)[Type<T>::PLANES - 1];
}

thread_local bool has_arrived;  // a call of the BLAS, since it was set to false

// Computes and counts a product; false if the BLAS is to compute it.
template <class T> bool takes(Product& p, const void* caller) {
    const int planes = Type<T>::PLANES;
    const bool is_half = Type<T>::TYPE == LP_F16;
    has_arrived = true;
    if (p.m < 1 || p.n < 1 || p.k < 1 || (p.alpha[0] == 0 && p.alpha[1] == 0) || passes_all()) return false;
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
    const int number = rules.rules[rule];
    Reason reason = TAKEN;
    bool is_computed = false;
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
    count(scope, call, reason, is_of_fp32 ? -1 : number);
    return is_computed;
}

// -- arguments of the routines -----------------------------------------------------------------------

// The options of CBLAS, with their values, and the letters of Fortran in the same order.
enum Order : int { ROW_MAJOR = 101,
                   COLUMN_MAJOR };
enum Transpose : int { FIRST_TRANSPOSE = 111 };
enum Triangle : int { FIRST_TRIANGLE = 121 };
enum Diagonal : int { NO_UNIT = 131,
                      HAS_UNIT };
enum Side : int { LEFT = 141,
                  RIGHT };
template <class Option> const int FIRST_OF = 0;
template <class Option> const char* const LETTERS_OF = nullptr;
template <> const int FIRST_OF<Transpose> = FIRST_TRANSPOSE;
template <> const char* const LETTERS_OF<Transpose> = "NTC";
template <> const int FIRST_OF<Triangle> = FIRST_TRIANGLE;
template <> const char* const LETTERS_OF<Triangle> = "UL";
template <> const int FIRST_OF<Diagonal> = NO_UNIT;
template <> const char* const LETTERS_OF<Diagonal> = "NU";
template <> const int FIRST_OF<Side> = LEFT;
template <> const char* const LETTERS_OF<Side> = "LR";

Op op_of(Transpose x) { return x >= 111 && x <= 113 ? (Op)(x - FIRST_TRANSPOSE) : NO_OP; }
Part part_of(Triangle x) { return x == 121 || x == 122 ? (Part)(x - FIRST_TRIANGLE + UPPER) : NO_PART; }
template <class T> const T ONE = {1};
// The address of a factor.
template <class T> const void* place(const T& factor) { return &factor; }
const void* place(const void* const& factor) { return factor; }

// The arguments of a routine, with the names of the BLAS; order, side and letters are those of CBLAS.
struct Arguments {
    Order order;
    Side side;
    Op op_a, op_b;
    Part part;
    int64_t m, n, k;
    const void *alpha, *a, *b, *beta;
    int64_t lda, ldb, ldc;
    void* c;
};

Operand matrix(const Arguments& x, const void* at, int64_t ld, Op op) {
    const bool by_rows = (x.order == ROW_MAJOR) != (op != PLAIN);
    return Operand{at, by_rows ? ld : 1, by_rows ? 1 : ld, op == ADJOINT, WHOLE, GENERAL, false};
}

// Whether ld holds a matrix of these extents, stored as it is.
bool holds(const Arguments& x, int64_t ld, int64_t rows, int64_t cols) {
    return ld >= (x.order == ROW_MAJOR ? cols : rows);
}

bool has_order(const Arguments& x) { return x.order == ROW_MAJOR || x.order == COLUMN_MAJOR; }

// A vector, given by its first element in memory and its increment.
template <class T> Operand vector(const void* at, int64_t size, int64_t increment) {
    const T* first = (const T*)at + (increment < 0 ? (1 - size) * increment : 0);
    return Operand{first, increment, 1, false, WHOLE, GENERAL, false};
}

template <class T> Product product(int routine, const Arguments& x, int64_t m, int64_t n, int64_t k) {
    Product p = {};
    p.routine = routine;
    p.m = m;
    p.n = n;
    p.k = k;
    p.a = matrix(x, x.a, x.lda, x.op_a);
    p.b = matrix(x, x.b, x.ldb, x.op_b);
    if (Type<T>::PLANES == 1) p.a.is_conjugate = p.b.is_conjugate = false;
    p.out = x.c;
    p.row = x.order == ROW_MAJOR ? x.ldc : 1;
    p.col = x.order == ROW_MAJOR ? 1 : x.ldc;
    set<T>(p.alpha, x.alpha);
    set<T>(p.beta, x.beta);
    return p;
}

// The same for a routine of a matrix and a vector.
template <class T> Product vector_product(int routine, const Arguments& x, int64_t m, int64_t k) {
    Product p = product<T>(routine, x, m, 1, k);
    p.b = vector<T>(x.b, k, x.ldb);
    p.out = (void*)vector<T>(x.c, m, x.ldc).at;
    p.row = x.ldc;
    p.col = 1;
    return p;
}

template <class T> bool gemm(const Arguments& x, const void* caller, int routine) {
    if (x.op_a == NO_OP || x.op_b == NO_OP || x.part == NO_PART || !has_order(x)) return false;
    const bool fits_a = x.op_a == PLAIN ? holds(x, x.lda, x.m, x.k) : holds(x, x.lda, x.k, x.m);
    const bool fits_b = x.op_b == PLAIN ? holds(x, x.ldb, x.k, x.n) : holds(x, x.ldb, x.n, x.k);
    if (!fits_a || !fits_b || !holds(x, x.ldc, x.m, x.n)) return false;
    Product p = product<T>(routine, x, x.m, x.n, x.k);
    p.written = x.part;
    return takes<T>(p, caller);
}

// b is x and c is y, with the increments ldb and ldc.
template <class T> bool gemv(const Arguments& x, const void* caller) {
    if (x.op_a == NO_OP || !has_order(x) || !x.ldb || !x.ldc || !holds(x, x.lda, x.m, x.n)) return false;
    Product p = vector_product<T>(GEMV, x, x.op_a == PLAIN ? x.m : x.n, x.op_a == PLAIN ? x.n : x.m);
    return takes<T>(p, caller);
}

// A symmetric, Hermitian or triangular matrix by a matrix, or the other way round.
template <class T> bool symm(const Arguments& x, const void* caller, int routine, Shape shape) {
    if (x.part == NO_PART || x.side < LEFT || x.side > RIGHT || x.op_a == NO_OP || !has_order(x)) return false;
    const int64_t extent = x.side == LEFT ? x.m : x.n;
    if (x.lda < extent || !holds(x, x.ldb, x.m, x.n) || !holds(x, x.ldc, x.m, x.n)) return false;
    Product p = product<T>(routine, x, x.m, x.n, extent);
    p.a.shape = shape;
    p.a.stored = x.op_a == PLAIN ? x.part : (Part)(UPPER + LOWER - x.part);
    p.b.is_overwritten = x.b == x.c;
    if (x.side == RIGHT) std::swap(p.a, p.b);
    return takes<T>(p, caller);
}

template <class T> bool symv(const Arguments& x, const void* caller, int routine, Shape shape) {
    if (x.part == NO_PART || !has_order(x) || x.lda < x.n || !x.ldb || !x.ldc) return false;
    Product p = vector_product<T>(routine, x, x.n, x.n);
    p.a.stored = x.part;
    p.a.shape = shape;
    return takes<T>(p, caller);
}

// A matrix by its transpose (HERK: adjoint); `Scalar` is the type of alpha and beta.
template <class T, class Scalar> bool syrk(Arguments x, const void* caller, int routine) {
    const Op other = routine == HERK ? ADJOINT : TRANSPOSED;
    const bool is_legal = x.op_a == PLAIN || x.op_a == other || Type<T>::PLANES == 1;
    if (!is_legal || x.op_a == NO_OP || x.part == NO_PART || !has_order(x)) return false;
    const bool fits_a = x.op_a == PLAIN ? holds(x, x.lda, x.n, x.k) : holds(x, x.lda, x.k, x.n);
    if (!fits_a || x.ldc < x.n) return false;
    x.b = x.a;
    x.ldb = x.lda;
    x.op_b = x.op_a == PLAIN ? other : PLAIN;
    const void* const alpha = std::exchange(x.alpha, nullptr);
    const void* const beta = std::exchange(x.beta, nullptr);
    Product p = product<T>(routine, x, x.n, x.n, x.k);
    p.written = x.part;
    set<Scalar>(p.alpha, alpha);
    set<Scalar>(p.beta, beta);
    return takes<T>(p, caller);
}

// x . y as a product of a row and a column, and x y^T as one of a column and a row.
template <class T> bool dot(const Arguments& x, const void* caller) {
    Product p = product<T>(DOT, x, 1, 1, x.n);
    const Operand row = vector<T>(x.a, x.n, x.lda);
    p.a = Operand{row.at, 1, row.row, false, WHOLE, GENERAL, false};
    p.b = vector<T>(x.b, x.n, x.ldb);
    return takes<T>(p, caller);
}
template <class T> bool ger(const Arguments& x, const void* caller) {
    if (!has_order(x) || !holds(x, x.ldc, x.m, x.n)) return false;
    Product p = product<T>(GER, x, x.m, x.n, 1);
    p.a = vector<T>(x.a, x.m, x.lda);
    const Operand column = vector<T>(x.b, x.n, x.ldb);
    p.b = Operand{column.at, 1, column.row, false, WHOLE, GENERAL, false};
    return takes<T>(p, caller);
}

// A routine whose calls are counted alone.
template <class T> bool counted(int routine, int64_t multiplications, const void* caller) {
    has_arrived = true;
    if (multiplications > 0 && !passes_all() && !is_inside_lapack())
        count(scope_of_thread(), {Type<T>::LETTER, routine, 0, 0, 0, multiplications, caller}, NOT_TAKEN, -1);
    return false;
}

// -- entry points ------------------------------------------------------------------------------------
//
// A function of the BLAS is `call` of an Entry. The function before it returns true if it has computed the result.

// The place of a result.
template <class T> struct Returned {
    T* at;
};

template <auto COMPUTES, int LIBRARY, class F = decltype(COMPUTES)> struct Entry;
template <auto COMPUTES, int LIBRARY, class... A> struct Entry<COMPUTES, LIBRARY, bool (*)(const void*, A...)> {
    static inline std::atomic<void*> original;
    static void call(A... a) {
        if (COMPUTES(__builtin_return_address(0), a...)) return;
        ((void (*)(A...))original.load(std::memory_order_relaxed))(a...);
    }
};
template <auto COMPUTES, int LIBRARY, class T, class... A>
struct Entry<COMPUTES, LIBRARY, bool (*)(const void*, Returned<T>, A...)> {
    static inline std::atomic<void*> original;
    static T call(A... a) {
        T result;
        if (COMPUTES(__builtin_return_address(0), Returned<T>{&result}, a...)) return result;
        return ((T (*)(A...))original.load(std::memory_order_relaxed))(a...);
    }
};

// In C sizes are values, and so are real factors.
template <class T, class I> struct Cblas {
    static constexpr bool IS_COMPLEX = Type<T>::PLANES == 2;
    typedef std::conditional_t<IS_COMPLEX, const void*, T> Factor;
    typedef const T* In;

    static bool gemm(const void* at, Order order, Transpose op_a, Transpose op_b, I m, I n, I k, Factor alpha, In a,
                     I lda, In b,
                     I ldb, Factor beta, T* c, I ldc) {
        return blas::gemm<T>({order, LEFT, op_of(op_a), op_of(op_b), WHOLE, m, n, k, place(alpha), a, b, place(beta),
                              lda, ldb, ldc, c},
                             at, GEMM);
    }
    static bool gemmt(const void* at, Order order, Triangle part, Transpose op_a, Transpose op_b, I n, I k,
                      Factor alpha, In a, I lda, In b,
                      I ldb, Factor beta, T* c, I ldc) {
        return blas::gemm<T>({order, LEFT, op_of(op_a), op_of(op_b), part_of(part), n, n, k, place(alpha), a, b,
                              place(beta), lda, ldb, ldc, c},
                             at, GEMMT);
    }
    static bool gemv(const void* at, Order order, Transpose op, I m, I n, Factor alpha, In a, I lda, In b, I ldb,
                     Factor beta,
                     T* c, I ldc) {
        return blas::gemv<T>({order, LEFT, op_of(op), PLAIN, WHOLE, m, n, 1, place(alpha), a, b, place(beta), lda, ldb,
                              ldc, c},
                             at);
    }
    template <int ROUTINE, Shape SHAPE>
    static bool symm(const void* at, Order order, Side side, Triangle part, I m, I n, Factor alpha, In a, I lda, In b,
                     I ldb,
                     Factor beta, T* c, I ldc) {
        return blas::symm<T>({order, side, PLAIN, PLAIN, part_of(part), m, n, 0, place(alpha), a, b, place(beta), lda,
                              ldb, ldc, c},
                             at, ROUTINE, SHAPE);
    }
    static bool trmm(const void* at, Order order, Side side, Triangle part, Transpose op, Diagonal unit, I m, I n,
                     Factor alpha, In a,
                     I lda, T* b, I ldb) {
        return blas::symm<T>({order, side, op_of(op), PLAIN, part_of(part), m, n, 0, place(alpha), a, b, nullptr, lda,
                              ldb, ldb, b},
                             at, TRMM, unit == HAS_UNIT ? UNIT_TRIANGULAR : TRIANGULAR);
    }
    template <class Scalar, int ROUTINE>
    static bool syrk(const void* at, Order order, Triangle part, Transpose op, I n, I k, Scalar alpha, In a, I lda,
                     Scalar beta, T* c,
                     I ldc) {
        return blas::syrk<T, std::conditional_t<std::is_pointer_v<Scalar>, T, Scalar>>(
            {order, LEFT, op_of(op), PLAIN, part_of(part), n, n, k, place(alpha), a, nullptr, place(beta), lda, 0, ldc,
             c},
            at, ROUTINE);
    }
    template <int ROUTINE, Shape SHAPE>
    static bool symv(const void* at, Order order, Triangle part, I n, Factor alpha, In a, I lda, In b, I ldb,
                     Factor beta, T* c,
                     I ldc) {
        return blas::symv<T>({order, LEFT, PLAIN, PLAIN, part_of(part), 0, n, 0, place(alpha), a, b, place(beta), lda,
                              ldb, ldc, c},
                             at, ROUTINE, SHAPE);
    }
    static bool dot(const void* at, Returned<T> result, I n, In a, I lda, In b, I ldb) {
        return blas::dot<T>({COLUMN_MAJOR, LEFT, PLAIN, PLAIN, WHOLE, 1, n, n, &ONE<T>, a, b, nullptr, lda, ldb, 1,
                             result.at},
                            at);
    }
    static bool ger(const void* at, Order order, I m, I n, T alpha, In a, I lda, In b, I ldb, T* c, I ldc) {
        return blas::ger<T>({order, LEFT, PLAIN, PLAIN, WHOLE, m, n, 1, &alpha, a, b, &ONE<T>, lda, ldb, ldc, c}, at);
    }
    // Counted alone.
    template <int ROUTINE> static bool dot_sub(const void* at, I n, In, I, In, I, T*) {
        return counted<T>(ROUTINE, n, at);
    }
    template <class Scalar, int ROUTINE>
    static bool syr2k(const void* at, int, int, int, I n, I k, Factor, In, I, In, I, Scalar, T*, I) {
        return counted<T>(ROUTINE, (int64_t)n * n * k, at);
    }
    static bool trmv(const void* at, int, int, int, int, I n, In, I, T*, I) {
        return counted<T>(TRMV, (int64_t)n * n / 2, at);
    }
};

// The same functions in Fortran: all arguments are addresses, options are letters, and there is no order.
template <class P> struct InFortran {
    typedef const P* Type;
    static P value(const P* x) { return *x; }
};
template <class P> struct InFortran<P*> {
    typedef P* Type;
    static P* value(P* x) { return x; }
};
template <class Option> struct Letter {
    typedef const char* Type;
    static Option value(const char* letter) {
        const char* found = *letter ? strchr(LETTERS_OF<Option>, *letter & ~32) : nullptr;
        // 0 for a letter that the BLAS refuses.
        // NOLINTNEXTLINE(clang-analyzer-optin.core.EnumCastOutOfRange)
        return (Option)(found ? FIRST_OF<Option> + (found - LETTERS_OF<Option>) : 0);
    }
};
template <> struct InFortran<Side> : Letter<Side> {};
template <> struct InFortran<Transpose> : Letter<Transpose> {};
template <> struct InFortran<Triangle> : Letter<Triangle> {};
template <> struct InFortran<Diagonal> : Letter<Diagonal> {};

template <auto OF_C, class F = decltype(OF_C)> struct Fortran;
template <auto OF_C, class... A> struct Fortran<OF_C, bool (*)(const void*, Order, A...)> {
    static bool computes(const void* at, typename InFortran<A>::Type... a) {
        return OF_C(at, COLUMN_MAJOR, InFortran<A>::value(a)...);
    }
};
template <auto OF_C, class T, class... A> struct Fortran<OF_C, bool (*)(const void*, Returned<T>, A...)> {
    static bool computes(const void* at, Returned<T> result, typename InFortran<A>::Type... a) {
        return OF_C(at, result, InFortran<A>::value(a)...);
    }
};

struct Row {
    char letter;
    int routine;
    bool is_cblas, is_64;
    Functions functions;
};
Row rows[512];
int row_count;

template <auto COMPUTES, int LIBRARY> void set(Functions& functions) {
    functions.ours[LIBRARY] = (void*)Entry<COMPUTES, LIBRARY>::call;
    functions.originals[LIBRARY] = &Entry<COMPUTES, LIBRARY>::original;
}

template <auto COMPUTES> void add(char letter, int routine, bool is_cblas, bool is_64) {
    Row& row = rows[row_count++];
    row = {letter, routine, is_cblas, is_64, {}};
    set<COMPUTES, 0>(row.functions);
    set<COMPUTES, 1>(row.functions);
    set<COMPUTES, 2>(row.functions);
}

template <auto COMPUTES> void add_both(char letter, int routine, bool is_64) {
    add<COMPUTES>(letter, routine, true, is_64);
    add<Fortran<COMPUTES>::computes>(letter, routine, false, is_64);
}

template <class T, class I> void add_type() {
    typedef typename Type<T>::Real Real;
    typedef Cblas<T, I> C;
    typedef typename C::Factor Factor;
    const char letter = Type<T>::LETTER;
    const bool is_64 = sizeof(I) == 8;
    add_both<C::gemm>(letter, GEMM, is_64);
    add_both<C::gemmt>(letter, GEMMT, is_64);
    add_both<C::gemv>(letter, GEMV, is_64);
    add_both<C::trmm>(letter, TRMM, is_64);
    add_both<C::template symm<SYMM, SYMMETRIC>>(letter, SYMM, is_64);
    add_both<C::template syrk<Factor, SYRK>>(letter, SYRK, is_64);
    add<C::template syr2k<Factor, SYR2K>>(letter, SYR2K, true, is_64);
    add<C::trmv>(letter, TRMV, true, is_64);
    if constexpr (C::IS_COMPLEX) {
        add_both<C::template symm<HEMM, HERMITIAN>>(letter, HEMM, is_64);
        add_both<C::template syrk<Real, HERK>>(letter, HERK, is_64);
        add_both<C::template symv<HEMV, HERMITIAN>>(letter, HEMV, is_64);
        add<C::template syr2k<Real, HER2K>>(letter, HER2K, true, is_64);
        add<C::template dot_sub<DOTU_SUB>>(letter, DOTU_SUB, true, is_64);
        add<C::template dot_sub<DOTC_SUB>>(letter, DOTC_SUB, true, is_64);
    } else {
        add_both<C::template symv<SYMV, SYMMETRIC>>(letter, SYMV, is_64);
        add_both<C::dot>(letter, DOT, is_64);
        add_both<C::ger>(letter, GER, is_64);
    }
}

template <class I> void add_types() {
    add_type<float, I>();
    add_type<double, I>();
    add_type<Complex32, I>();
    add_type<Complex64, I>();
}

// -- loops of NumPy ----------------------------------------------------------------------------------
//
// Products of float16 are computed. Calls of loops that do not reach the BLAS are counted.

typedef void Loop(char** arrays, const intptr_t* sizes, const intptr_t* steps, void* data);
struct Replaced {
    Loop* original;
    int routine;
    char letter;
};
const int LOOPS = 96;
Replaced loops[LOOPS];

bool multiplies_half(char* const* arrays, const intptr_t* sizes, const intptr_t* steps, const void* caller) {
    const auto in_elements = [&](int i) { return (int64_t)(steps[i] / (intptr_t)sizeof(uint16_t)); };
    Product p = {};
    p.m = sizes[1];
    p.k = sizes[2];
    p.n = sizes[3];
    p.a = {arrays[0], in_elements(3), in_elements(4), false, WHOLE, GENERAL, false};
    p.b = {arrays[1], in_elements(5), in_elements(6), false, WHOLE, GENERAL, false};
    p.out = arrays[2];
    p.row = in_elements(7);
    p.col = in_elements(8);
    p.alpha[0] = 1;
    return takes<uint16_t>(p, caller);
}

template <int SLOT> void loop(char** arrays, const intptr_t* sizes, const intptr_t* steps, void* data) {
    const Replaced& x = loops[SLOT];
    const void* const caller = __builtin_return_address(0);
    if (x.letter == Type<uint16_t>::LETTER && x.routine == MATMUL) {
        char* each[] = {arrays[0], arrays[1], arrays[2]};
        const intptr_t one[] = {1, sizes[1], sizes[2], sizes[3]};
        for (intptr_t i = 0; i < sizes[0]; i++) {
            if (!multiplies_half(each, one, steps, caller)) x.original(each, one, steps, data);
            for (int array = 0; array < 3; array++) each[array] += steps[array];
        }
        return;
    }
    has_arrived = false;
    x.original(arrays, sizes, steps, data);
    if (has_arrived || passes_all()) return;
    int64_t multiplications = sizes[0] * sizes[1];
    if (x.routine != VECDOT) multiplications *= sizes[2];
    if (x.routine == MATMUL) multiplications *= sizes[3];
    if (multiplications) count(scope_of_thread(), {x.letter, x.routine, 0, 0, 0, multiplications, caller}, OWN_LOOP, -1);
}
template <int... SLOT> Loop* loop_of(int slot, std::integer_sequence<int, SLOT...>) {
    static Loop* const all[] = {loop<SLOT>...};
    return all[slot];
}

}  // namespace

Functions* functions_of(char letter, int routine, bool is_cblas, bool is_64) {
    if (!row_count) {
        add_types<int32_t>();
        add_types<int64_t>();
    }
    for (int i = 0; i < row_count; i++) {
        Row& row = rows[i];
        if (row.letter == letter && row.routine == routine && row.is_cblas == is_cblas && row.is_64 == is_64)
            return &row.functions;
    }
    return nullptr;
}

}  // namespace lp::blas

using namespace lp::blas;

LP_API void* lp_blas_loop(int32_t slot, const char* name, char letter, void** original) {
    for (int routine = MATMUL; slot < LOOPS && routine < FIRST_OF_LAPACK; routine++) {
        if (strcmp(name, name_of(routine))) continue;
        loops[slot].routine = routine;
        loops[slot].letter = letter;
        *original = (void*)&loops[slot].original;
        return (void*)loop_of(slot, std::make_integer_sequence<int, LOOPS>());
    }
    return nullptr;
}
#endif
