// The epilogue of a product: out = activation(alpha * 2^-(row + column exponent) * product + beta * c + bias), or with
// float32 factors of rows and columns.
//
// Macros: PRODUCT, RESULT, element types of elements.cuh; ADDEND and BIAS, those of c and bias, where there are any;
// SCALED, whether exponents (1) or factors (2) are given; ROW_FACTORS and COL_FACTORS, the sets of factors: 0 for none, 1
// for one that all matrices share, 2 for one each; ACTIVATED, the activation of x as an expression, if there is one;
// VECTOR, whether rows of product and result are contiguous and aligned.
//
// The arithmetic is that of the product's type, or float with factors, in the order in which the CPU's is done, and is
// rounded once to the result's type. A scaled product is multiplied by alpha and its power of two or factors in double,
// where neither can overflow or underflow, and is rounded once to the type of the arithmetic.

typedef PRODUCT Product;
typedef RESULT Result;
#if SCALED == 2
typedef float Number;
typedef float ByRow;
#else
typedef Product Number;
typedef int ByRow;
#endif

static constexpr int smaller = sizeof(Product) < sizeof(Result) ? sizeof(Product) : sizeof(Result);
// Elements of a row per thread and iteration.
static constexpr int taken = VECTOR && smaller < 16 ? 16 / smaller : 1;

// -- arithmetic, by the same names for real and complex numbers ------------------------------------

template <class T> __device__ inline T factor(double re, double, T) { return (T)re; }
template <class T> __device__ inline Complex<T> factor(double re, double im, Complex<T>) { return {(T)re, (T)im}; }

template <class T> __device__ inline T times(T x, T by) { return x * by; }

// A factor without imaginary part multiplies both parts: Inf * (2 + 0i) has no NaN in it.
template <class T> __device__ inline Complex<T> times(Complex<T> x, Complex<T> by)
{
    if (by.im == 0) return {x.re * by.re, x.im * by.re};
    return {x.re * by.re - x.im * by.im, x.re * by.im + x.im * by.re};
}

template <class T> __device__ inline T plus(T x, T y) { return x + y; }

// Integers saturate.
__device__ inline int plus(int x, int y)
{
    long long sum = (long long)x + y, highest = 0x7fffffff, lowest = -highest - 1;
    return (int)(sum > highest ? highest : sum < lowest ? lowest : sum);
}

template <class T> __device__ inline Complex<T> plus(Complex<T> x, Complex<T> y) { return {x.re + y.re, x.im + y.im}; }

template <class T> __device__ inline bool is_one(T x) { return x == 1; }
template <class T> __device__ inline bool is_one(Complex<T> x) { return x.re == 1 && x.im == 0; }
template <class T> __device__ inline bool is_zero(T x) { return x == 0; }
template <class T> __device__ inline bool is_zero(Complex<T> x) { return x.re == 0 && x.im == 0; }

#if SCALED
__device__ inline float scaled(float x, float alpha, int exponent)
{
    return (float)((double)x * alpha * power_of_two_double(exponent));
}

__device__ inline Complex<float> scaled(Complex<float> x, Complex<float> alpha, int exponent)
{
    Complex<double> wide = {x.re, x.im}, by = {alpha.re, alpha.im}, product = times(wide, by);
    double power = power_of_two_double(exponent);
    return {(float)(product.re * power), (float)(product.im * power)};
}
#endif

// -- activations -----------------------------------------------------------------------------------

__device__ inline float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ inline double hyperbolic_tangent(double x) { return tanh(x); }

// Times a gate in [0, 1], given as 2 gate - 1. Zero times -Inf is NaN, but the limit is zero.
template <class T> __device__ inline T gated(T x, T number)
{
    T gate = (number + (T)1) * (T)0.5;
    return gate == 0 ? -gate : x * gate;
}

#ifdef ACTIVATED
template <class T> __device__ inline T activated(T x) { return ACTIVATED; }
#else
template <class T> __device__ inline T activated(T x) { return x; }
#endif

// -- the kernel ----------------------------------------------------------------------------------

extern "C" __global__ void epilogue(
    const Product* product, Result* out,
#ifdef ADDEND
    const ADDEND* c,
#endif
#ifdef BIAS
    const BIAS* bias,
#endif
#if SCALED
    const ByRow* of_rows, const ByRow* of_cols,
#endif
    double alpha_re, double alpha_im, double beta_re, double beta_im,
    long long rows, long long cols, long long product_row_stride, long long product_batch_stride,
    long long out_row_stride, long long out_col_stride, long long count, long long extent1, long long extent2,
    long long out_stride0, long long out_stride1, long long out_stride2
#ifdef ADDEND
    , long long c_row_stride, long long c_col_stride, long long c_stride0, long long c_stride1, long long c_stride2,
    long long c_aligned
#endif
#ifdef BIAS
    , long long bias_stride
#endif
    )
{
    Number alpha = factor(alpha_re, alpha_im, Number());
#ifdef ADDEND
    Number beta = factor(beta_re, beta_im, Number());
#endif
    long long groups = (cols + taken - 1) / taken, total = count * rows * groups;
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        long long matrix = 0, row = 0, group = i;
        if (total != groups) {
            Split line(i, groups), stack(line.quotient, rows);
            matrix = stack.quotient, row = stack.remainder, group = line.remainder;
        }
        long long first = group * taken;
        bool whole = VECTOR && first + taken <= cols;

        Group<Product, taken> value;
        const Product* from = product + matrix * product_batch_stride + row * product_row_stride;
        if (whole)
            value.load(from + first);
        else
            value.load(from, first, cols, 1);

#ifdef ADDEND
        Group<ADDEND, taken> addend;
        bool adds = !is_zero(beta);
        if (adds) {
            const ADDEND* line = c + row * c_row_stride;
            if (count > 1) line += batch_offset(matrix, extent1, extent2, c_stride0, c_stride1, c_stride2);
            if (whole && c_aligned)
                addend.load(line + first);
            else
                addend.load(line, first, cols, c_col_stride);
        }
#endif
        Group<Result, taken> result;
#pragma unroll
        for (int j = 0; j < taken; ++j) {
            Number x = value.items[j];
#if defined(BIAS) || SCALED
            long long col = first + j < cols ? first + j : cols - 1;
#endif
#if SCALED == 2
            double scale = alpha;
            if (ROW_FACTORS) scale *= of_rows[(ROW_FACTORS == 2 ? matrix * rows : 0) + row];
            if (COL_FACTORS) scale *= of_cols[(COL_FACTORS == 2 ? matrix * cols : 0) + col];
            x = (float)(value.items[j] * scale);
#elif SCALED
            int exponent = of_rows[matrix * rows + row] + of_cols[matrix * cols + col];
            x = scaled(x, alpha, -exponent);
#else
            if (!is_one(alpha)) x = times(x, alpha);
#endif
#ifdef ADDEND
            if (adds) {
                Number y = Convert<ADDEND, Number>::of(addend.items[j]);
                x = plus(x, is_one(beta) ? y : times(y, beta));
            }
#endif
#ifdef BIAS
            x = plus(x, Convert<BIAS, Number>::of(bias[col * bias_stride]));
#endif
            result.items[j] = Convert<Number, Result>::of(activated(x));
        }

        Result* to = out + row * out_row_stride;
        if (count > 1) to += batch_offset(matrix, extent1, extent2, out_stride0, out_stride1, out_stride2);
        if (whole)
            result.store(to + first);
        else
            result.store(to, first, cols, out_col_stride);
    }
}
