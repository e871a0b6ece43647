// A call of any routine of the BLAS as a product: blas_entries.cpp describes it, blas.cpp computes it.
#pragma once
#include "blas.hpp"

namespace lp::blas {

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

// The part of a square matrix that is stored, or written.
enum Part { WHOLE, UPPER, LOWER };
// The other part: as it is stored, that of the transpose, of the adjoint, or zero.
enum Shape { GENERAL, SYMMETRIC, HERMITIAN, TRIANGULAR, UNIT_TRIANGULAR };

// An operand of m x k or k x n, or the result; strides are in elements.
struct Matrix {
    const void* at;
    int64_t row, col;
    bool is_conjugate, is_overwritten;  // by the result
    Part part;
    Shape shape;
};

struct Factor {
    double part[2];
};
inline bool is_zero(const Factor& x) { return x.part[0] == 0 && x.part[1] == 0; }

// out = alpha * a @ b + beta * out.
struct Product {
    int routine;
    int64_t m, n, k;
    Matrix a, b, out;
    Factor alpha, beta;
    const lp_blas_mode* mode;
    int threads;
    Reason reason = SOLVER;  // as it was counted, and the number of the mode
    int number = -1;
};

// Computes and counts a product of a type; false if the BLAS is to compute it.
template <class T> bool takes(Product& p, const void* caller);

extern thread_local bool has_arrived;  // a call of the BLAS, since it was set to false

}  // namespace lp::blas
