// Rewriting a strided stack of matrices as contiguous lines: other element type, padding, scaled rows, complex as real.
//
// Macros: SOURCE and TARGET, element types of elements.cuh; PAIRS, whether a source element becomes two target elements
// (real and imaginary part); ROTATED, whether each row becomes two, (re, -im) and (im, re); SCALED, whether rows are
// multiplied by 2^exponent; PARTS, the number of parts of each number, and PART_FACTOR, the factor of each remainder;
// SUMMED, whether the last part is the sum of the two before; TF32, whether float32 numbers are rounded to TF32;
// KERNEL_<name>.
//
// Extents (out_rows, out_cols) and strides (line_stride, batch_stride, part_step) of the target count source elements,
// with padding, which is zero. `out` is the address of the first part; the others may be before it.

typedef SOURCE Source;
typedef TARGET Target;
typedef Arithmetic<Source>::type Real;

#if PAIRS
typedef Complex<Target> Out;
#else
typedef Target Out;
#endif

static constexpr int lines_per_row = ROTATED ? 2 : 1;
static constexpr int smaller = sizeof(Source) < sizeof(Out) ? sizeof(Source) : sizeof(Out);
static constexpr int vector_length = smaller < 16 ? 16 / smaller : 1;
static constexpr int threads = 256;

// A power of two that scales, as two factors: 2^163 is beyond the numbers of the type, 2^81 and 2^82 are not. Products
// that become subnormal after the first factor are rounded twice, and are far below the smallest number of float16.
struct Scale {
    float first, second;

    __device__ inline explicit Scale(int exponent)
        : first(power_of_two(exponent / 2)), second(power_of_two(exponent - exponent / 2)) {}
};

#if SCALED || PARTS > 1 || TF32
// A number rounded as a part is.
__device__ inline float rounded(float x)
{
#if TF32
    unsigned int bits = same_bits<unsigned int>(x);
    if ((bits & 0x7fffffffu) >= 0x7f800000u) return x;
    return same_bits<float>((bits + 0x1000u) & 0xffffe000u);  // ties away from zero, as cvt.rna.tf32.f32
#else
    Target result;
    round_to(result, x);
    return widen(result);
#endif
}

// A part of a number before rounding: the exact remainder of the parts before. If the number, or its first part, is not
// finite, the second part is NaN or the opposite infinity, so that sums with both parts are NaN.
__device__ inline float part_of(float x, int part)
{
#if SUMMED
    if (part == PARTS - 1) {
        float high = rounded(x);
        return high + rounded((x - high) * PART_FACTOR);
    }
#endif
#pragma unroll
    for (int before = 0; before < part; ++before) x = (x - rounded(x)) * PART_FACTOR;
    return TF32 ? rounded(x) : x;
}

template <class T> struct FromParts {
    static __device__ inline T of(Complex<float> x) { return Convert<float, T>::of(x.re); }
};

template <class T> struct FromParts<Complex<T> > {
    static __device__ inline Complex<T> of(Complex<float> x) { return Convert<Complex<float>, Complex<T> >::of(x); }
};
#endif

__device__ inline Out converted(Source x, Scale scale, int part)
{
#if SCALED || PARTS > 1 || TF32
    Complex<float> value;
    value.re = part_of((float)real(x) * scale.first * scale.second, part);
    value.im = part_of((float)imaginary(x) * scale.first * scale.second, part);
    return FromParts<Out>::of(value);
#else
    return Convert<Source, Out>::of(x);
#endif
}

#if ROTATED
// A zero stays as it is: the padding, and the imaginary parts of real numbers, are positive.
__device__ inline Target negative(Target x)
{
    if (x.bits & 0x7fffu) x.bits ^= 0x8000u;
    return x;
}
#endif

// What the lines of one row hold at one place; the second line exists only where rows become two.
__device__ inline Out on_line(Out x, int line)
{
#if ROTATED
    Out rotated;
    rotated.re = line ? x.im : x.re;
    rotated.im = line ? x.re : negative(x.im);
    return rotated;
#else
    return x;
#endif
}

template <int N> __device__ inline void store_row(
    const Group<Out, N>& values, Out* row, long long first, long long out_cols, long long line_stride, bool aligned)
{
#pragma unroll
    for (int line = 0; line < lines_per_row; ++line) {
        Group<Out, N> shown;
#pragma unroll
        for (int i = 0; i < N; ++i) shown.items[i] = on_line(values.items[i], line);
        if (aligned && first + N <= out_cols)
            shown.store(row + line * line_stride + first);
        else
            shown.store(row + line * line_stride, first, out_cols, 1);
    }
}

template <int N> __device__ inline Group<Source, N> loaded_group(
    const Source* row, long long first, long long cols, long long col_stride, bool aligned)
{
    Group<Source, N> loaded;
    if (aligned && first + N <= cols)
        loaded.load(row + first);
    else
        loaded.load(row, first, cols, col_stride);
    return loaded;
}

// All parts of a group of numbers.
template <int N> __device__ inline void store_parts(
    const Group<Source, N>& loaded, Scale scale, Out* row, long long first, long long out_cols, long long line_stride,
    long long part_step, bool aligned)
{
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        Group<Out, N> values;
#pragma unroll
        for (int i = 0; i < N; ++i) values.items[i] = converted(loaded.items[i], scale, part);
        store_row(values, row + part * part_step, first, out_cols, line_stride, aligned);
    }
}

// -- a thread per group of columns ---------------------------------------------------------------

#if defined(KERNEL_pack_groups) || defined(KERNEL_pack_elements)
template <int N, bool ALIGNED> __device__ inline void pack_groups_of(
    const Source* source, Out* out, long long rows, long long cols, long long row_stride, long long col_stride,
    long long out_rows, long long out_cols, long long line_stride, long long batch_stride, long long part_step,
    long long count, long long extent1, long long extent2, long long stride0, long long stride1, long long stride2)
{
    long long groups = (out_cols + N - 1) / N, total = count * out_rows * groups;
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        // One long line, the usual case, takes no division at all.
        Split group(i, total == groups ? total : groups), line(group.quotient, out_rows);
        if (total == groups) group.quotient = 0, group.remainder = i, line.quotient = line.remainder = 0;
        long long row = line.remainder, first = group.remainder * N;
        const Source* from = source + row * row_stride;
        if (count > 1) from += batch_offset(line.quotient, extent1, extent2, stride0, stride1, stride2);
        long long length = row < rows ? cols : 0;
        Group<Source, N> loaded = loaded_group<N>(from, first, length, ALIGNED ? 1 : col_stride, ALIGNED);
        Out* to = out + line.quotient * batch_stride + row * lines_per_row * line_stride;
        store_parts(loaded, Scale(0), to, first, out_cols, line_stride, part_step, ALIGNED);
    }
}
#endif

#ifdef KERNEL_pack_groups
// Columns contiguous on both sides, every row aligned to 16 bytes.
extern "C" __global__ void pack_groups(
    const Source* source, Out* out, long long rows, long long cols, long long row_stride, long long col_stride,
    long long out_rows, long long out_cols, long long line_stride, long long batch_stride, long long part_step,
    long long count, long long extent1, long long extent2, long long stride0, long long stride1, long long stride2)
{
    pack_groups_of<vector_length, true>(source, out, rows, cols, row_stride, col_stride, out_rows, out_cols,
                                        line_stride, batch_stride, part_step, count, extent1, extent2, stride0, stride1, stride2);
}
#endif

#ifdef KERNEL_pack_elements
// Any strides.
extern "C" __global__ void pack_elements(
    const Source* source, Out* out, long long rows, long long cols, long long row_stride, long long col_stride,
    long long out_rows, long long out_cols, long long line_stride, long long batch_stride, long long part_step,
    long long count, long long extent1, long long extent2, long long stride0, long long stride1, long long stride2)
{
    pack_groups_of<1, false>(source, out, rows, cols, row_stride, col_stride, out_rows, out_cols, line_stride,
                             batch_stride, part_step, count, extent1, extent2, stride0, stride1, stride2);
}
#endif

// -- scaled rows ---------------------------------------------------------------------------------

#if SCALED
// The bits of |x|, in the order of the magnitudes; 0 for non-finite numbers.
__device__ inline unsigned int finite_magnitude(Source x)
{
    unsigned int re = same_bits<unsigned int>((float)real(x)) & 0x7fffffffu;
    unsigned int im = same_bits<unsigned int>((float)imaginary(x)) & 0x7fffffffu;
    if (re >= 0x7f800000u) re = 0;
    if (im >= 0x7f800000u) im = 0;
    return re > im ? re : im;
}

// floor(log2) of a number that is not zero, from its bits.
__device__ inline int binary_exponent(unsigned int magnitude)
{
    if (magnitude >= 0x00800000u) return (int)(magnitude >> 23) - 127;
    return (int)(same_bits<unsigned int>((float)magnitude) >> 23) - 127 - 149;  // a multiple of 2^-149
}

// The power of two that brings the largest |x| of a row into [2^14, 2^15).
__device__ inline int row_exponent(unsigned int magnitude) { return magnitude ? 14 - binary_exponent(magnitude) : 0; }
#endif

#ifdef KERNEL_pack_rows
// Several threads (blockDim.x) per row, several rows per block (blockDim.y): the largest magnitude first, then the
// conversion, which finds the row in the cache.
extern "C" __global__ void pack_rows(
    const Source* source, Out* out, int* exponents, long long rows, long long cols, long long row_stride,
    long long col_stride, long long out_rows, long long out_cols, long long line_stride, long long batch_stride,
    long long part_step, long long count, long long extent1,
    long long extent2, long long stride0, long long stride1, long long stride2, long long aligned)
{
    constexpr int N = vector_length;
    __shared__ unsigned int largest[threads];
    int thread = threadIdx.y * blockDim.x + threadIdx.x;
    long long lines = count * out_rows;
    for (long long top = (long long)blockIdx.x * blockDim.y; top < lines; top += (long long)gridDim.x * blockDim.y) {
        long long number = top + threadIdx.y;
        Split line(number < lines ? number : 0, out_rows);
        long long row = line.remainder, length = number < lines && row < rows ? cols : 0;
        const Source* from = source + row * row_stride;
        if (count > 1) from += batch_offset(line.quotient, extent1, extent2, stride0, stride1, stride2);

        unsigned int found = 0;
        for (long long first = (long long)threadIdx.x * N; first < length; first += (long long)blockDim.x * N) {
            Group<Source, N> loaded;
            if (aligned && first + N <= length)
                loaded.load(from + first);
            else
                loaded.load(from, first, length, col_stride);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                unsigned int magnitude = finite_magnitude(loaded.items[i]);
                if (magnitude > found) found = magnitude;
            }
        }
        largest[thread] = found;
        __syncthreads();
        for (int half = blockDim.x / 2; half > 0; half /= 2) {
            if ((int)threadIdx.x < half && largest[thread + half] > largest[thread])
                largest[thread] = largest[thread + half];
            __syncthreads();
        }
        int exponent = row_exponent(largest[threadIdx.y * blockDim.x]);
        __syncthreads();  // the next rows overwrite it
        if (number >= lines) continue;
        if (threadIdx.x == 0 && row < rows) exponents[line.quotient * rows + row] = exponent;
        Scale scale(exponent);
        Out* to = out + line.quotient * batch_stride + row * lines_per_row * line_stride;
        for (long long first = (long long)threadIdx.x * N; first < out_cols; first += (long long)blockDim.x * N)
            store_parts(loaded_group<N>(from, first, length, col_stride, aligned), scale, to, first, out_cols,
                        line_stride, part_step, aligned);
    }
}
#endif

#if SCALED
// An exponent that other blocks may still raise is marked by the bits 01 in front, which no number from -2^30 to
// 2^30 - 1 has, and is stored so that the largest magnitude wins; 0 stands for a row without numbers.
static constexpr unsigned int open_mark = 0x40000000u;
static constexpr int open_offset = 150;

__device__ inline int settled(unsigned int stored)
{
    return stored >> 30 == 1u ? 14 - ((int)(stored ^ open_mark) - open_offset) : (int)stored;
}
#endif

#ifdef KERNEL_pack_maxima
// The exponents of rows where columns are contiguous. Each block reads 32 rows and `span` columns; the exponents are
// initialised to zero.
extern "C" __global__ void pack_maxima(
    const Source* source, unsigned int* exponents, long long rows, long long cols, long long row_stride,
    long long col_stride, long long count, long long extent1, long long extent2, long long stride0, long long stride1,
    long long stride2, long long span)
{
    __shared__ unsigned int largest[8][32];
    long long strips = (rows + 31) / 32, spans = (cols + span - 1) / span, total = count * strips * spans;
    for (long long i = blockIdx.x; i < total; i += gridDim.x) {
        Split strip(i, strips), place(strip.quotient, spans);
        long long row = strip.remainder * 32 + threadIdx.x, start = place.remainder * span;
        long long end = start + span < cols ? start + span : cols;
        const Source* from = source + row * row_stride;
        if (count > 1) from += batch_offset(place.quotient, extent1, extent2, stride0, stride1, stride2);
        unsigned int found = 0;
        if (row < rows) {
#pragma unroll 8
            for (long long col = start + threadIdx.y; col < end; col += 8) {
                unsigned int magnitude = finite_magnitude(from[col * col_stride]);
                if (magnitude > found) found = magnitude;
            }
        }
        largest[threadIdx.y][threadIdx.x] = found;
        __syncthreads();
        if (threadIdx.y == 0) {
#pragma unroll
            for (int y = 1; y < 8; ++y)
                if (largest[y][threadIdx.x] > found) found = largest[y][threadIdx.x];
            if (found)
                atomicMax(exponents + place.quotient * rows + row,
                          open_mark | (unsigned int)(binary_exponent(found) + open_offset));
        }
        __syncthreads();
    }
}
#endif

// -- tiles: rows contiguous in the source, columns in what is written ------------------------------

#ifdef KERNEL_pack_tiles
// A thread reads words of consecutive rows, and writes words of consecutive columns, by way of shared memory.
static constexpr int wide = sizeof(Source) == 2 || sizeof(Out) == 16 ? 2 : 4;
static constexpr int rows_per_word = sizeof(Source) < 4 ? wide : 1;
static constexpr int cols_per_word = sizeof(Out) < 4 ? 4 / sizeof(Out) : 1;
static constexpr int tile_rows = 32 * rows_per_word, tile_cols = 32 * cols_per_word;

extern "C" __global__ void pack_tiles(
    const Source* source, Out* out, unsigned int* exponents, long long rows, long long cols, long long row_stride,
    long long col_stride, long long out_rows, long long out_cols, long long line_stride, long long batch_stride,
    long long part_step, long long count, long long extent1,
    long long extent2, long long stride0, long long stride1, long long stride2, long long aligned)
{
    // One word more per row: the words of a column are in different banks.
    __shared__ Group<Out, cols_per_word> tile[tile_rows][33];
    static_assert(sizeof(tile) <= 48 << 10, "the shared memory of a block");
    long long strips = (out_rows + tile_rows - 1) / tile_rows, spans = (out_cols + tile_cols - 1) / tile_cols;
    long long total = count * strips * spans;
    for (long long number = blockIdx.x; number < total; number += gridDim.x) {
        Split span(number, spans), strip(span.quotient, strips);
        long long top = strip.remainder * tile_rows, left = span.remainder * tile_cols;
        long long row = top + threadIdx.x * rows_per_word, matrix = strip.quotient;
        const Source* from = source;
        if (count > 1) from += batch_offset(matrix, extent1, extent2, stride0, stride1, stride2);
        int exponent[rows_per_word];
#pragma unroll
        for (int i = 0; i < rows_per_word; ++i) {
            exponent[i] = 0;
#if SCALED
            if (row + i < rows) {
                volatile unsigned int* stored = exponents + matrix * rows + row + i;
                exponent[i] = settled(*stored);
                // Other blocks may still read it, and take both forms.
                if (span.remainder == 0 && threadIdx.y == 0) *stored = (unsigned int)exponent[i];
            }
#endif
        }
        // Part after part through the same tile; what is read again is in the cache.
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int pass = 0; pass < 4; ++pass) {
                int word = pass * 8 + threadIdx.y;
                Group<Source, rows_per_word> loaded[cols_per_word];
#pragma unroll
                for (int j = 0; j < cols_per_word; ++j) {
                    long long col = left + word * cols_per_word + j;
                    if (aligned && col < cols && row + rows_per_word <= rows)
                        loaded[j].load(from + col * col_stride + row);
                    else
                        loaded[j].load(from + col * col_stride, row, col < cols ? rows : 0, row_stride);
                }
#pragma unroll
                for (int i = 0; i < rows_per_word; ++i) {
                    Group<Out, cols_per_word> shown;
#pragma unroll
                    for (int j = 0; j < cols_per_word; ++j)
                        shown.items[j] = converted(loaded[j].items[i], Scale(exponent[i]), part);
                    tile[threadIdx.x * rows_per_word + i][word] = shown;
                }
            }
            __syncthreads();
            Out* to = out + matrix * batch_stride + top * lines_per_row * line_stride + part * part_step;
            long long height = out_rows - top < tile_rows ? out_rows - top : tile_rows;
            for (int i = threadIdx.y; i < height; i += 8)
                store_row(tile[i][threadIdx.x], to + (long long)i * lines_per_row * line_stride,
                          left + threadIdx.x * cols_per_word, out_cols, line_stride, aligned);
            __syncthreads();
        }
    }
}
#endif
