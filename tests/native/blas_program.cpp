// A program that calls the BLAS by every routine, type, layout and option that lowprec takes, and compares each result
// with a sum in double. It knows nothing of lowprec. usage: blas_program UNIT: unit roundoff of the operands.
//
// BLAS_PREFIX and BLAS_END are of the names in the library that it is linked to, BLAS_INT is its type of integers.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <complex>
#include <type_traits>
#include <vector>

#define JOINED(a, b, c) a##b##c
#define NAME(prefix, name, end) JOINED(prefix, name, end)
#define CBLAS(name) NAME(BLAS_PREFIX, cblas_##name, BLAS_END)
#define CONFIGURATION NAME(BLAS_PREFIX, openblas_get_config, BLAS_END)
#if defined(BLAS_64)
#define FORTRAN(name) NAME(BLAS_PREFIX, name, _64_)
#else
#define FORTRAN(name) NAME(BLAS_PREFIX, name, _)
#endif

typedef BLAS_INT Int;
typedef std::complex<double> Value;
enum {
    ROWS = 101,
    COLUMNS = 102,
    PLAIN = 111,
    TRANSPOSED = 112,
    ADJOINT = 113,
    UPPER = 121,
    LOWER = 122,
    LEFT = 141,
    RIGHT = 142
};

template <class T> struct Is {
    static const bool COMPLEX = !std::is_floating_point<T>::value;
};

static uint64_t state = 1;
static double number() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(state >> 11) / 4503599627370496.0 - 1;
}
static Int below(Int limit) { return (Int)((number() + 1) / 2 * (double)limit); }
template <class T> T element() {
    if constexpr (Is<T>::COMPLEX) return T((typename T::value_type)number(), (typename T::value_type)number());
    else return (T)number();
}

// A stored matrix, with numbers around each line that no routine may change.
template <class T> struct Matrix {
    int order;
    Int rows, cols, ld;
    std::vector<T> data;
    Matrix(int order, Int rows, Int cols) : order(order), rows(rows), cols(cols) {
        ld = (order == ROWS ? cols : rows) + below(4);
        for (Int i = 0; i < ld * (order == ROWS ? rows : cols); i++) data.push_back(element<T>());
    }
    T& at(Int i, Int j) { return data[(size_t)(order == ROWS ? i * ld + j : i + j * ld)]; }
};

template <class T> Value value(T x) { return Value(x); }
static Value part(Value x, int op) { return op == ADJOINT ? std::conj(x) : x; }

static double unit;
static int checks, failures;
template <class T> void compare(const char* name, Value found, Value expected, double size, Int k) {
    const double wide = std::is_same<T, double>::value || std::is_same<T, std::complex<double>>::value;
    // Both operands are rounded, k products are summed in float32 and the result is rounded; twice for complex numbers.
    const double sums = (double)(k + 8) * ldexp(1, -24);
    const double bound = 2 * (2 * unit + unit * unit + sums) * size;
    checks++;
    if (std::abs(found - expected) <= bound) return;
    if (failures++ < 10)
        printf("%s of %d bytes%s: %g%+gi instead of %g%+gi\n", name, (int)sizeof(T), wide ? ", wide" : "", found.real(),
               found.imag(), expected.real(), expected.imag());
}

// Compares out with alpha * a @ b + beta * before; `written` is the part of it, 0 for all.
template <class T, class A, class B> void compare_all(const char* name, Matrix<T>& out, Matrix<T>& before, Int k,
                                                      Value alpha, Value beta, int written, A a, B b) {
    for (Int i = 0; i < out.rows; i++)
        for (Int j = 0; j < out.cols; j++) {
            const bool kept = (written == UPPER && i > j) || (written == LOWER && i < j);
            Value sum = 0;
            double size = 0;
            for (Int l = 0; l < k && !kept; l++) {
                sum += a(i, l) * b(l, j);
                size += std::abs(a(i, l)) * std::abs(b(l, j));
            }
            const Value old = value(before.at(i, j));
            const Value expected = kept ? old : alpha * sum + (beta == 0.0 ? 0.0 : beta * old);
            compare<T>(name, value(out.at(i, j)), expected, kept ? 0 : std::abs(alpha) * size + std::abs(beta * old),
                       k);
        }
    // Elements between lines.
    for (Int i = 0; i < out.rows; i++)
        for (Int j = 0; j < out.cols; j++) before.at(i, j) = out.at(i, j);
    checks++;
    if (before.data != out.data && failures++ < 10) printf("%s wrote beyond its result\n", name);
}

// The functions of a type: real factors of CBLAS are values, complex ones addresses.
template <class T> struct Blas;
#define FACTOR(T) typename std::conditional<Is<T>::COMPLEX, const void*, T>::type
#define DECLARE(x, T)                                                                                                 \
    extern "C" {                                                                                                      \
    void CBLAS(x##gemm)(int, int, int, Int, Int, Int, FACTOR(T), const T*, Int, const T*, Int, FACTOR(T), T*, Int);   \
    void CBLAS(x##gemv)(int, int, Int, Int, FACTOR(T), const T*, Int, const T*, Int, FACTOR(T), T*, Int);             \
    void CBLAS(x##symm)(int, int, int, Int, Int, FACTOR(T), const T*, Int, const T*, Int, FACTOR(T), T*, Int);        \
    void CBLAS(x##gemmt)(int, int, int, int, Int, Int, FACTOR(T), const T*, Int, const T*, Int, FACTOR(T), T*, Int);  \
    void CBLAS(x##trmm)(int, int, int, int, int, Int, Int, FACTOR(T), const T*, Int, T*, Int);                        \
    void CBLAS(x##syrk)(int, int, int, Int, Int, FACTOR(T), const T*, Int, FACTOR(T), T*, Int);                       \
    void FORTRAN(x##gemm)(const char*, const char*, const Int*, const Int*, const Int*, const T*, const T*,           \
                          const Int*, const T*, const Int*, const T*, T*, const Int*);                                \
    void FORTRAN(x##gemv)(const char*, const Int*, const Int*, const T*, const T*, const Int*, const T*, const Int*,  \
                          const T*, T*, const Int*);                                                                  \
    void FORTRAN(x##symm)(const char*, const char*, const Int*, const Int*, const T*, const T*, const Int*, const T*, \
                          const Int*, const T*, T*, const Int*);                                                      \
    void FORTRAN(x##gemmt)(const char*, const char*, const char*, const Int*, const Int*, const T*, const T*,         \
                           const Int*, const T*, const Int*, const T*, T*, const Int*);                               \
    void FORTRAN(x##trmm)(const char*, const char*, const char*, const char*, const Int*, const Int*, const T*,       \
                          const T*, const Int*, T*, const Int*);                                                      \
    void FORTRAN(x##syrk)(const char*, const char*, const Int*, const Int*, const T*, const T*, const Int*, const T*, \
                          T*, const Int*);                                                                            \
    }                                                                                                                 \
    template <> struct Blas<T> {                                                                                      \
        static constexpr auto gemm = CBLAS(x##gemm);                                                                  \
        static constexpr auto gemv = CBLAS(x##gemv);                                                                  \
        static constexpr auto symm = CBLAS(x##symm);                                                                  \
        static constexpr auto syrk = CBLAS(x##syrk);                                                                  \
        static constexpr auto gemmt = CBLAS(x##gemmt);                                                                \
        static constexpr auto trmm = CBLAS(x##trmm);                                                                  \
        static constexpr auto fgemmt = FORTRAN(x##gemmt);                                                             \
        static constexpr auto ftrmm = FORTRAN(x##trmm);                                                               \
        static constexpr auto fgemm = FORTRAN(x##gemm);                                                               \
        static constexpr auto fgemv = FORTRAN(x##gemv);                                                               \
        static constexpr auto fsymm = FORTRAN(x##symm);                                                               \
        static constexpr auto fsyrk = FORTRAN(x##syrk);                                                               \
    };
#define DECLARE_COMPLEX(x, T, Real)                                                                                \
    extern "C" {                                                                                                   \
    void CBLAS(x##hemm)(int, int, int, Int, Int, const void*, const T*, Int, const T*, Int, const void*, T*, Int); \
    void CBLAS(x##herk)(int, int, int, Int, Int, Real, const T*, Int, Real, T*, Int);                              \
    void CBLAS(x##hemv)(int, int, Int, const void*, const T*, Int, const T*, Int, const void*, T*, Int);           \
    }                                                                                                              \
    template <> struct Hermitian<T> {                                                                              \
        static constexpr auto symm = CBLAS(x##hemm);                                                               \
        static constexpr auto syrk = CBLAS(x##herk);                                                               \
        static constexpr auto symv = CBLAS(x##hemv);                                                               \
    };
template <class T> struct Hermitian;
DECLARE(s, float)
DECLARE(d, double)
DECLARE(c, std::complex<float>)
DECLARE(z, std::complex<double>)
DECLARE_COMPLEX(c, std::complex<float>, float)
DECLARE_COMPLEX(z, std::complex<double>, double)
extern "C" {
float CBLAS(sdot)(Int, const float*, Int, const float*, Int);
void CBLAS(ssymv)(int, int, Int, float, const float*, Int, const float*, Int, float, float*, Int);
}

template <class T> FACTOR(T) factor(const T& x) {
    if constexpr (Is<T>::COMPLEX) return &x;
    else return x;
}
static const char* letter(int word) {
    const char* const LETTERS[] = {"N", "T", "C"};
    if (word >= LEFT) return word == LEFT ? "L" : "R";
    if (word >= UPPER) return word == UPPER ? "U" : "L";
    return LETTERS[word - PLAIN];
}

template <class T> void check_gemm(int order, int op_a, int op_b, bool by_fortran) {
    const Int m = 1 + below(40), n = 1 + below(40), k = 1 + below(60);
    Matrix<T> a(order, op_a == PLAIN ? m : k, op_a == PLAIN ? k : m),
        b(order, op_b == PLAIN ? k : n, op_b == PLAIN ? n : k);
    Matrix<T> c(order, m, n), before = c;
    const T alpha = element<T>(), beta = below(2) ? element<T>() : T(0);
    if (beta == T(0)) c.at(0, 0) = T(NAN);
    if (by_fortran)
        Blas<T>::fgemm(letter(op_a), letter(op_b), &m, &n, &k, &alpha, a.data.data(), &a.ld, b.data.data(), &b.ld,
                       &beta, c.data.data(), &c.ld);
    else
        Blas<T>::gemm(order, op_a, op_b, m, n, k, factor(alpha), a.data.data(), a.ld, b.data.data(), b.ld, factor(beta),
                      c.data.data(), c.ld);
    compare_all(
        "gemm", c, before, k, value(alpha), value(beta), 0,
        [&](Int i, Int l) { return part(value(op_a == PLAIN ? a.at(i, l) : a.at(l, i)), op_a); },
        [&](Int l, Int j) { return part(value(op_b == PLAIN ? b.at(l, j) : b.at(j, l)), op_b); });
}

template <class T> void check_gemv(int order, int op, bool by_fortran) {
    const Int m = 1 + below(40), n = 1 + below(40), rows = op == PLAIN ? m : n, k = op == PLAIN ? n : m;
    const Int of_x = below(2) ? -1 - below(3) : 1 + below(3), of_y = below(2) ? -1 - below(3) : 1 + below(3);
    // Vectors are columns of a matrix whose lines are as long as the increment.
    Matrix<T> a(order, m, n), x(ROWS, k, (Int)labs((long)of_x)), y(ROWS, rows, (Int)labs((long)of_y)), before = y;
    x.ld = (Int)labs((long)of_x), y.ld = before.ld = (Int)labs((long)of_y);
    const T alpha = element<T>(), beta = element<T>();
    if (by_fortran)
        Blas<T>::fgemv(letter(op), &m, &n, &alpha, a.data.data(), &a.ld, x.data.data(), &of_x, &beta, y.data.data(),
                       &of_y);
    else
        Blas<T>::gemv(order, op, m, n, factor(alpha), a.data.data(), a.ld, x.data.data(), of_x, factor(beta),
                      y.data.data(), of_y);
    for (Int i = 0; i < rows; i++) {
        Value sum = 0;
        double size = 0;
        for (Int l = 0; l < k; l++) {
            const Value left = part(value(op == PLAIN ? a.at(i, l) : a.at(l, i)), op),
                        right = value(x.at(of_x < 0 ? k - 1 - l : l, 0));
            sum += left * right, size += std::abs(left) * std::abs(right);
        }
        const Int at = of_y < 0 ? rows - 1 - i : i;
        const Value old = value(before.at(at, 0));
        compare<T>("gemv", value(y.at(at, 0)), value(alpha) * sum + value(beta) * old,
                   std::abs(alpha) * size + std::abs(value(beta) * old), k);
    }
}

// The element of a symmetric or Hermitian matrix of which one part is stored.
template <class T> Value stored(Matrix<T>& a, int uplo, bool is_hermitian, Int i, Int j) {
    const bool is_mirrored = uplo == UPPER ? i > j : i < j;
    const Value found = value(is_mirrored ? a.at(j, i) : a.at(i, j));
    if (!is_hermitian) return found;
    if (i == j) return found.real();
    return is_mirrored ? std::conj(found) : found;
}

template <class T> void check_symm(int order, int side, int uplo, bool is_hermitian, bool by_fortran) {
    const Int m = 1 + below(40), n = 1 + below(40), k = side == LEFT ? m : n;
    Matrix<T> a(order, k, k), b(order, m, n), c(order, m, n), before = c;
    const T alpha = element<T>(), beta = element<T>();
    if (by_fortran)
        Blas<T>::fsymm(letter(side), letter(uplo), &m, &n, &alpha, a.data.data(), &a.ld, b.data.data(), &b.ld, &beta,
                       c.data.data(), &c.ld);
    else {
        auto function = Blas<T>::symm;
        if constexpr (Is<T>::COMPLEX)
            if (is_hermitian) function = Hermitian<T>::symm;
        function(order, side, uplo, m, n, factor(alpha), a.data.data(), a.ld, b.data.data(), b.ld, factor(beta),
                 c.data.data(), c.ld);
    }
    auto symmetric = [&](Int i, Int j) { return stored(a, uplo, is_hermitian, i, j); };
    auto other = [&](Int i, Int j) { return value(b.at(i, j)); };
    if (side == LEFT) compare_all("symm", c, before, k, value(alpha), value(beta), 0, symmetric, other);
    else compare_all("symm", c, before, k, value(alpha), value(beta), 0, other, symmetric);
}

template <class T> void check_syrk(int order, int uplo, int op, bool is_hermitian, bool by_fortran) {
    const Int n = 1 + below(40), k = 1 + below(40);
    Matrix<T> a(order, op == PLAIN ? n : k, op == PLAIN ? k : n), c(order, n, n);
    if (is_hermitian)
        for (Int i = 0; i < n; i++) c.at(i, i) = T(std::real(c.at(i, i)));
    Matrix<T> before = c;
    T alpha = element<T>(), beta = element<T>();
    if (is_hermitian) alpha = T(std::real(alpha)), beta = T(std::real(beta));
    if (by_fortran)
        Blas<T>::fsyrk(letter(uplo), letter(op), &n, &k, &alpha, a.data.data(), &a.ld, &beta, c.data.data(), &c.ld);
    else if (!is_hermitian)
        Blas<T>::syrk(order, uplo, op, n, k, factor(alpha), a.data.data(), a.ld, factor(beta), c.data.data(), c.ld);
    else if constexpr (Is<T>::COMPLEX)
        Hermitian<T>::syrk(order, uplo, op, n, k, std::real(alpha), a.data.data(), a.ld, std::real(beta), c.data.data(),
                           c.ld);
    auto left = [&](Int i, Int l) {
        return op == PLAIN ? value(a.at(i, l)) : is_hermitian ? std::conj(value(a.at(l, i))) : value(a.at(l, i));
    };
    auto right = [&](Int l, Int j) { return is_hermitian ? std::conj(left(j, l)) : left(j, l); };
    compare_all("syrk", c, before, k, value(alpha), value(beta), uplo, left, right);
}

extern "C" const char* CONFIGURATION(void);

// Results of gemmt in OpenBLAS 0.3.27 to 0.3.29 are wrong.
static bool is_gemmt_faulty() {
    int patch = 0;
    return sscanf(CONFIGURATION(), "OpenBLAS 0.3.%d", &patch) == 1 && patch < 30;
}

template <class T> void check_gemmt(int order, int uplo, int op_a, int op_b, bool by_fortran) {
    const Int n = 1 + below(40), k = 1 + below(40);
    Matrix<T> a(order, op_a == PLAIN ? n : k, op_a == PLAIN ? k : n),
        b(order, op_b == PLAIN ? k : n, op_b == PLAIN ? n : k);
    Matrix<T> c(order, n, n), before = c;
    const T alpha = element<T>(), beta = element<T>();
    if (by_fortran)
        Blas<T>::fgemmt(letter(uplo), letter(op_a), letter(op_b), &n, &k, &alpha, a.data.data(), &a.ld, b.data.data(),
                        &b.ld, &beta, c.data.data(), &c.ld);
    else
        Blas<T>::gemmt(order, uplo, op_a, op_b, n, k, factor(alpha), a.data.data(), a.ld, b.data.data(), b.ld,
                       factor(beta), c.data.data(), c.ld);
    if (unit == 0 && is_gemmt_faulty()) return;
    compare_all(
        "gemmt", c, before, k, value(alpha), value(beta), uplo,
        [&](Int i, Int l) { return part(value(op_a == PLAIN ? a.at(i, l) : a.at(l, i)), op_a); },
        [&](Int l, Int j) { return part(value(op_b == PLAIN ? b.at(l, j) : b.at(j, l)), op_b); });
}

template <class T> void check_trmm(int order, int side, int uplo, int op, bool is_unit, bool by_fortran) {
    const Int m = 1 + below(40), n = 1 + below(40), k = side == LEFT ? m : n;
    Matrix<T> a(order, k, k), b(order, m, n), before = b;
    for (Int i = 0; i < k; i++)
        for (Int j = 0; j < k; j++)
            if ((uplo == UPPER ? i > j : i < j) || (is_unit && i == j)) a.at(i, j) = T(NAN);  // is not read
    const T alpha = element<T>();
    const int unit = is_unit ? 132 : 131;
    if (by_fortran)
        Blas<T>::ftrmm(letter(side), letter(uplo), letter(op), is_unit ? "U" : "N", &m, &n, &alpha, a.data.data(),
                       &a.ld, b.data.data(), &b.ld);
    else Blas<T>::trmm(order, side, uplo, op, unit, m, n, factor(alpha), a.data.data(), a.ld, b.data.data(), b.ld);
    auto triangle = [&](Int i, Int j) {
        const Int row = op == PLAIN ? i : j, col = op == PLAIN ? j : i;
        if (is_unit && i == j) return Value(1);
        return (uplo == UPPER ? row > col : row < col) ? Value(0) : part(value(a.at(row, col)), op);
    };
    Matrix<T> other = before;
    auto right = [&](Int i, Int j) { return value(other.at(i, j)); };
    if (side == LEFT) compare_all("trmm", b, before, k, value(alpha), 0, 0, triangle, right);
    else compare_all("trmm", b, before, k, value(alpha), 0, 0, right, triangle);
}

template <class T> void check_hemv(int order, int uplo) {
    const Int n = 1 + below(40), one = 1;
    Matrix<T> a(order, n, n), x(COLUMNS, n, 1), y(COLUMNS, n, 1), before = y;
    const T alpha = element<T>(), beta = element<T>();
    const bool is_hermitian = Is<T>::COMPLEX;
    if constexpr (Is<T>::COMPLEX)
        Hermitian<T>::symv(order, uplo, n, &alpha, a.data.data(), a.ld, x.data.data(), one, &beta, y.data.data(), one);
    else if constexpr (sizeof(T) == 4)
        CBLAS(ssymv)(order, uplo, n, alpha, a.data.data(), a.ld, x.data.data(), one, beta, y.data.data(), one);
    else return;
    compare_all(
        "symv", y, before, n, value(alpha), value(beta), 0,
        [&](Int i, Int j) { return stored(a, uplo, is_hermitian, i, j); },
        [&](Int i, Int j) { return value(x.at(i, j)); });
}

template <class T> void check_type() {
    for (int round = 0; round < 3; round++)
        for (int order : {ROWS, COLUMNS})
            for (int fortran = 0; fortran <= (order == COLUMNS); fortran++) {
                for (int op_a : {PLAIN, TRANSPOSED, ADJOINT}) {
                    for (int op_b : {PLAIN, TRANSPOSED, ADJOINT}) check_gemm<T>(order, op_a, op_b, fortran);
                    check_gemv<T>(order, op_a, fortran);
                }
                for (int uplo : {UPPER, LOWER}) {
                    for (int side : {LEFT, RIGHT}) {
                        check_symm<T>(order, side, uplo, false, fortran);
                        if (Is<T>::COMPLEX && !fortran) check_symm<T>(order, side, uplo, true, false);
                    }
                    for (int op : {PLAIN, TRANSPOSED}) check_syrk<T>(order, uplo, op, false, fortran);
                    if (Is<T>::COMPLEX && !fortran)
                        for (int op : {PLAIN, ADJOINT}) check_syrk<T>(order, uplo, op, true, false);
                    check_hemv<T>(order, uplo);
                    for (int op_a : {PLAIN, TRANSPOSED, ADJOINT}) {
                        check_gemmt<T>(order, uplo, op_a, PLAIN + ADJOINT - op_a, fortran);
                        for (int side : {LEFT, RIGHT})
                            for (int is_unit : {0, 1}) check_trmm<T>(order, side, uplo, op_a, is_unit, fortran);
                    }
                }
            }
}

int main(int, char** words) {
    unit = atof(words[1]);
    check_type<float>();
    check_type<double>();
    check_type<std::complex<float>>();
    check_type<std::complex<double>>();
    const float x[] = {1 + ldexpf(1, -20), 2}, y[] = {1, 0};
    printf("dot %d\n", CBLAS(sdot)(2, x, 1, y, 1) == x[0]);
    printf("%d checks, %d failures\n", checks, failures);
    return failures != 0;
}
