// Recomputes the non-finite elements of a sum of products, in the product's type, from the caller's operands.
//
// Macros: PRODUCT, A and B, element types of elements.cuh.
//
// Such elements are few: one thread sums each of them, and stops at NaN.

typedef PRODUCT Product;

template <class T> __device__ inline bool is_finite(T x) { return x - x == 0; }
template <class T> __device__ inline bool is_finite(Complex<T> x) { return is_finite(x.re) && is_finite(x.im); }
template <class T> __device__ inline bool is_nan(T x) { return x != x; }
template <class T> __device__ inline bool is_nan(Complex<T> x) { return is_nan(x.re) && is_nan(x.im); }

template <class T> __device__ inline void add_product(T& sum, T x, T y) { sum += x * y; }
template <class T> __device__ inline void add_product(Complex<T>& sum, Complex<T> x, Complex<T> y)
{
    sum.re += x.re * y.re - x.im * y.im;
    sum.im += x.re * y.im + x.im * y.re;
}

extern "C" __global__ void recompute(
    Product* product, const A* a, const B* b, long long rows, long long cols, long long k, long long product_row_stride,
    long long a_row_stride, long long a_col_stride, long long b_row_stride, long long b_col_stride, long long count,
    long long extent1, long long extent2, long long product_stride0, long long product_stride1,
    long long product_stride2, long long a_stride0, long long a_stride1, long long a_stride2, long long b_stride0,
    long long b_stride1, long long b_stride2)
{
    long long total = count * rows * cols, step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        Split line(i, cols), stack(line.quotient, rows);
        long long matrix = stack.quotient, row = stack.remainder, col = line.remainder;
        Product* element = product + row * product_row_stride + col;
        if (count > 1)
            element += batch_offset(matrix, extent1, extent2, product_stride0, product_stride1, product_stride2);
        if (is_finite(*element)) continue;
        const A* x = a + row * a_row_stride;
        const B* y = b + col * b_col_stride;
        if (count > 1) {
            x += batch_offset(matrix, extent1, extent2, a_stride0, a_stride1, a_stride2);
            y += batch_offset(matrix, extent1, extent2, b_stride0, b_stride1, b_stride2);
        }
        Product sum = Product();
        for (long long j = 0; j < k && !is_nan(sum); ++j)
            add_product(sum, Convert<A, Product>::of(x[j * a_col_stride]), Convert<B, Product>::of(y[j * b_row_stride]));
        *element = sum;
    }
}
