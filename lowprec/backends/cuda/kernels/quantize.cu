// Rounding of operands to codes with scales, written as contiguous lines along k like those of pack.cu; the definition is
// arrays/block_codes.py, which gives the same bits.
//
// Macros: SOURCE and TARGET, element types of elements.cuh; STORED, LEAST_EXPONENT and LARGEST, of an element: bits of the
// significand, exponent of the smallest normal number (codes of int8 are subnormal), largest number; SCALING: 0 one scale
// of the tensor, 1 of vectors, 2 powers of two of blocks, 3 those rounded up, 4 E4M3 numbers of blocks and one scale of
// the tensor, 5 float32 of blocks, 6 powers of two by the rounded peak; POWERS, whether float32 scales are rounded up to
// powers of two; SCALES, those that are stored: 0 none, 1 float32 of vectors, or as cuBLASLt's modes
// have them 2 VEC128_32F, 3 BLK128x128_32F, 4 VEC32_UE8M0, 5 VEC16_UE4M3, behind 1, with two codes of E2M1 in a byte;
// others are multiplied in; HIGH and WIDE, vectors and numbers along k of a block; ALONE, whether a number that is not
// finite becomes NaN alone; INTEGER; STOCHASTIC; HADAMARD; SEEKS, whether the largest magnitudes are sought; LOADS:
// 2 if the source is contiguous along k and aligned to 16 bytes, otherwise through shared memory, 1 if adjacent threads
// load adjacent vectors, 0 if numbers that are adjacent along k.
//
// A block of threads has tiles of 32 vectors and 128 numbers along k; a thread has 16 of these numbers, which have one
// scale, in registers, and stores their codes 16 bytes at a time. Adjacent threads are adjacent along k.

typedef SOURCE Source;
typedef TARGET Target;

static constexpr int tall = 32, width = 128, segment = 16, parts = width / segment;
static constexpr bool is_vector = SCALING == 1, has_powers = SCALING == 2 || SCALING == 3 || SCALING == 6;
static constexpr bool to_e2m1 = SCALES == 5;
static constexpr bool to_e4m3 = sizeof(Target) == 1 && STORED == 3, to_e5m2 = sizeof(Target) == 1 && STORED == 2;
// The peaks of the tensor, of vectors, and of blocks higher than a tile are sought before the numbers are rounded.
static constexpr bool seeks_tensor = SCALING == 0 || SCALING == 4, peaks_in_tile = SCALING >= 2 && HIGH <= tall;

__device__ inline void philox(unsigned int* c, unsigned long long seed)
{
    unsigned int key0 = (unsigned int)seed, key1 = (unsigned int)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round, key0 += 0x9e3779b9u, key1 += 0xbb67ae85u) {
        unsigned long long x = 0xd2511f53ull * c[0], y = 0xcd9e8d57ull * c[2];
        c[0] = (unsigned int)(y >> 32) ^ c[1] ^ key0, c[1] = (unsigned int)y;
        c[2] = (unsigned int)(x >> 32) ^ c[3] ^ key1, c[3] = (unsigned int)x;
    }
}

// The nearest number of a format to q >= 0, ties to even: a sum with a power of two drops the bits. NaN becomes `largest`.
template <int DIGITS, int EXPONENT> __device__ inline float to_nearest(float q, float largest)
{
    unsigned int exponent = same_bits<unsigned int>(q) & 0x7f800000u, least = (unsigned int)(EXPONENT + 127) << 23;
    float power = same_bits<float>((exponent > least ? exponent : least) + ((unsigned int)(23 - DIGITS) << 23));
    return fminf((q + power) - power, largest);
}

// One of the two numbers around q >= 0, the upper one with the probability of the distance from the lower one.
__device__ inline float to_random(float q, unsigned int random)
{
    unsigned int bits = same_bits<unsigned int>(q);
    int found = (int)(bits >> 23), exponent = found > LEAST_EXPONENT + 127 ? found : LEAST_EXPONENT + 127;
    unsigned int dropped = (unsigned int)(exponent - found) + 23u - STORED, used = dropped < 30u ? dropped : 30u;
    unsigned int beyond = dropped - used < 31u ? dropped - used : 31u;
    unsigned int significand = ((bits & 0x7fffffu) | (found ? 0x800000u : 0u)) >> beyond;
    unsigned int rounded = (significand + (random >> (32u - used))) >> used;
    float result = (float)(int)rounded * same_bits<float>((unsigned int)(exponent - STORED) << 23);
    return result < LARGEST ? result : LARGEST;
}

__device__ inline float float_scale(unsigned int peak, float largest)
{
    float scale = same_bits<float>(peak) / largest;
    scale = peak == 0 ? 1.0f : scale < 1.17549435e-38f ? 1.17549435e-38f : scale;
    return POWERS ? same_bits<float>((same_bits<unsigned int>(scale) + 0x7fffffu) & 0x7f800000u) : scale;
}

// `up`, `divisor` and `inverse` are of `factor`, see `quotient`.
struct Scale { float factor, multiplier; bool keeps; int code; float up, divisor, inverse; };

// The scale of numbers with a largest magnitude, in a tensor with a scale.
__device__ inline Scale scale_of(unsigned int peak, float whole)
{
    Scale scale = {whole, 1.0f, true, 0, 1.0f, 1.0f, 1.0f};
    float nan = same_bits<float>(0x7fc00000u);
    if (SCALING == 0) return scale;
    bool finite = scale.keeps = peak < 0x7f800000u;
    if (has_powers) {
        int code = (int)(peak >> 23) - ((int)(same_bits<unsigned int>(LARGEST) >> 23) - 127);
        if (SCALING == 3) code += (peak & 0x7fffffu) > (same_bits<unsigned int>(LARGEST) & 0x7fffffu);
        if (SCALING == 6) code += (peak & 0x7fffffu) > 0x7fffffu - (0x400000u >> STORED);
        if (code < 0) code = 0;
        scale.code = finite ? code : 255;
        if (!finite) code = 127;
        scale.factor = same_bits<float>((unsigned int)(254 - code) << 23);
        scale.multiplier = same_bits<float>(code ? (unsigned int)code << 23 : 1u << 22);  // 2^-127 is subnormal
    } else if (SCALING == 4) {
        scale.multiplier = to_nearest<3, -6>(same_bits<float>(peak) / LARGEST / whole, 448.0f);
        scale.keeps = finite && scale.multiplier > 0;
        scale.factor = scale.keeps ? scale.multiplier * whole : 1.0f;
    } else {
        scale.factor = finite ? float_scale(peak, LARGEST) : nan;
        if (SCALING == 5) scale.multiplier = scale.factor;
    }
    if (!finite && !is_vector) scale.multiplier = nan;
    return scale;
}

// Prepares the division by a scale. Small scales are multiplied by 2^64, as the remainders would underflow.
__device__ inline void prepare_division(Scale& scale)
{
    if (has_powers || STOCHASTIC) return;
    scale.up = scale.factor < 9.09494702e-13f ? 18446744073709551616.0f : 1.0f;
    scale.divisor = scale.factor * scale.up;
    scale.inverse = 1.0f / scale.divisor;
}

// x / scale. An approximation of 1 ulp and an exact remainder give the rounded quotient (Markstein 1990); quotients below
// 2^-40, whose remainders underflow, round to 0.
__device__ inline float quotient(float x, const Scale& scale)
{
    if (has_powers) return x * scale.factor;
    if (STOCHASTIC) return x / scale.factor;
    x *= scale.up;
    float q = x * scale.inverse;
    q = __fmaf_rn(__fmaf_rn(-q, scale.divisor, x), scale.inverse, q);
    return __fmaf_rn(__fmaf_rn(-q, scale.divisor, x), scale.inverse, q);
}

__device__ inline bool is_finite(float magnitude) { return magnitude < same_bits<float>(0x7f800000u); }

__device__ inline float rounded(float x, const Scale& scale, unsigned int random)
{
    unsigned int bits = same_bits<unsigned int>(x), sign = bits & (scale.keeps ? 0x80000000u : 0u);
    float magnitude = same_bits<float>(bits & 0x7fffffffu), q = quotient(magnitude, scale);
    float value = STOCHASTIC ? to_random(q, random) : to_nearest<STORED, LEAST_EXPONENT>(q, LARGEST);
    if (INTEGER) return !scale.keeps ? 0.0f : sign ? 0.0f - value : value;
    if (SCALES < 2) value *= scale.multiplier;
    if (SCALING != 5 && sizeof(Target) > 2) {
        Brain nearest;
        round_to(nearest, value);
        value = widen(nearest);
    }
    value = same_bits<float>(same_bits<unsigned int>(value) | sign);
    return ALONE && !is_finite(magnitude) ? same_bits<float>(0x7fc00000u) : value;
}

template <class T> __device__ inline T written(float x) { return Convert<float, T>::of(x); }
template <> __device__ inline Byte written<Byte>(float x) { return (Byte)(signed char)(int)x; }

template <class T> __device__ inline T pair(unsigned int, unsigned int) { return T(); }
template <> __device__ inline Byte pair<Byte>(unsigned int low, unsigned int high) { return (Byte)(low | high << 4); }

// The code of E2M1 for a number that is divided by the scale.
__device__ inline unsigned int code_of_e2m1(float x, const Scale& scale, unsigned int random)
{
    unsigned int bits = same_bits<unsigned int>(x);
    float q = quotient(same_bits<float>(bits & 0x7fffffffu), scale);
    unsigned int code = rounded_magnitude<STORED, LEAST_EXPONENT>(same_bits<unsigned int>(STOCHASTIC ? to_random(q, random) : q));
    return (code < 7u ? code : 7u) | (bits >> 28 & 8u);
}

typedef Group<Target, to_e2m1 ? segment / 2 : segment> Codes;

#if __CUDA_ARCH__ >= 890
// Four codes of FP8, of numbers that are divided by the scale; what is not finite becomes NaN if ALONE.
__device__ inline unsigned int four_codes(const float* x, const Scale& scale)
{
    float q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float magnitude = same_bits<float>(same_bits<unsigned int>(x[i]) & 0x7fffffffu);
        q[i] = quotient(x[i], scale);
        if (ALONE && !is_finite(magnitude)) q[i] = same_bits<float>(0x7fc00000u);
    }
    unsigned short low, high;
    if (to_e4m3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(q[1]), "f"(q[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(q[3]), "f"(q[2]));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(q[1]), "f"(q[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(q[3]), "f"(q[2]));
    }
    unsigned int codes = (unsigned int)high << 16 | low;
    if (to_e5m2 && ALONE)  // NaN, the only codes from 0x7c on, becomes that of elements.cuh
        codes &= ~(((codes & 0x7f7f7f7fu) + 0x04040404u) >> 7 & 0x01010101u);
    return scale.keeps ? codes : to_e4m3 ? 0x7e7e7e7eu : 0x7b7b7b7bu;
}
#endif

// The codes of a thread's numbers; `counter` is that of the first random numbers.
__device__ inline Codes codes_of(float* x, const Scale& scale, const unsigned int* counter, unsigned long long seed)
{
    Codes codes;
#if __CUDA_ARCH__ >= 890
    if ((to_e4m3 || to_e5m2) && !STOCHASTIC) {
#pragma unroll
        for (int i = 0; i < segment / 4; ++i) codes.whole[0].words[i] = four_codes(x + 4 * i, scale);
        return codes;
    }
#endif
    unsigned int words[4] = {0u, 0u, 0u, 0u}, low = 0;
#pragma unroll
    for (int i = 0; i < segment; ++i) {
        if (STOCHASTIC && i % 4 == 0) {
            words[0] = counter[0] + i / 4, words[1] = counter[1], words[2] = counter[2], words[3] = counter[3];
            philox(words, seed);
        }
        if (!to_e2m1)
            codes.items[i] = written<Target>(rounded(x[i], scale, words[i % 4]));
        else if (i % 2)
            codes.items[i / 2] = pair<Target>(low, code_of_e2m1(x[i], scale, words[i % 4]));
        else
            low = code_of_e2m1(x[i], scale, words[i % 4]);
    }
    if (to_e2m1 && !scale.keeps) codes = Codes();
    return codes;
}

// Random signs, then the Hadamard matrix, times 1/4, of 16 numbers.
__device__ inline void transform(float* x, unsigned long long seed)
{
    unsigned int words[4] = {~0u, ~0u, 0u, 0u};
    philox(words, seed);
#pragma unroll
    for (int i = 0; i < segment; ++i)
        x[i] = same_bits<float>(same_bits<unsigned int>(x[i]) ^ (words[0] >> i << 31)) * 0.25f;
#pragma unroll
    for (int half = 1; half < segment; half *= 2)
#pragma unroll
        for (int i = 0; i < segment; ++i)
            if (!(i & half)) {
                float low = x[i], high = x[i + half];
                x[i] = low + high, x[i + half] = low - high;
            }
}

// The largest magnitude of a thread's numbers.
__device__ inline unsigned int largest_magnitude(const float* x, bool finite)
{
    unsigned int peak = 0;
#pragma unroll
    for (int i = 0; i < segment; ++i) {
        unsigned int magnitude = same_bits<unsigned int>(x[i]) & 0x7fffffffu;
        if (magnitude > peak && !(finite && magnitude >= 0x7f800000u)) peak = magnitude;
    }
    return peak;
}

// A matrix of the source from the first number of a tile on, and the numbers of the tile that are in it.
struct Tile { const Source* from; int rows, cols; long long row_stride, col_stride; };

#if LOADS == 2
__device__ inline void load(float* x, const Tile& tile, int r, int part)
{
    const Source* line = tile.from + r * tile.row_stride + part * segment;
    int inside = r < tile.rows ? tile.cols - part * segment : 0;
    Group<Source, segment> loaded;
    if (inside >= segment)
        loaded.load(line);
    else
#pragma unroll
        for (int i = 0; i < segment; ++i) loaded.items[i] = i < inside ? line[i] : Source();
#pragma unroll
    for (int i = 0; i < segment; ++i) x[i] = widen(loaded.items[i]);
}
#else
// In shared memory a line has a word more for each segment: threads that read or write at once use all banks.
__device__ inline void load(float* x, const Tile& tile, int r, int part)
{
    constexpr int across = LOADS ? tall : width, step = 256 / across, padded = parts * (segment + 1);
    __shared__ float shared[tall * padded];
    int thread = threadIdx.y * 32 + threadIdx.x, first = thread % across, second = thread / across;
    const Source* from = tile.from + (LOADS ? first : second) * tile.row_stride + (LOADS ? second : first) * tile.col_stride;
    long long stride = step * (LOADS ? tile.col_stride : tile.row_stride);
    int left = (first < (LOADS ? tile.rows : tile.cols) ? LOADS ? tile.cols : tile.rows : 0) - second;
    float* to = shared + (LOADS ? first * padded + second : second * padded + first + first / segment);
#pragma unroll
    for (int i = 0; i < segment; ++i, from += stride)
        to[LOADS ? i * step + i * step / segment : i * step * padded] = i * step < left ? widen(*from) : 0.0f;
    __syncthreads();
    const float* own = shared + r * padded + part * (segment + 1);
#pragma unroll
    for (int i = 0; i < segment; ++i) x[i] = own[i];
}
#endif

__device__ inline unsigned int blocks_of(long long extent, int size) { return (unsigned int)((extent + size - 1) / size); }

// Where the peak is, that is sought first, of a vector or of its block.
__device__ inline long long peak_index(unsigned int matrix, long long row, long long first, long long rows, long long cols)
{
    if (seeks_tensor) return 0;
    if (is_vector) return matrix * rows + row;
    return (matrix * (long long)blocks_of(rows, HIGH) + row / HIGH) * blocks_of(cols, WIDE) + first / WIDE;
}

// Where a matrix begins; the number of tiles has 32 bits.
__device__ inline long long matrix_offset(
    unsigned int number, unsigned int extent1, unsigned int extent2, long long stride0, long long stride1, long long stride2)
{
    unsigned int outer = number / extent2;
    return outer / extent1 * stride0 + outer % extent1 * stride1 + number % extent2 * stride2;
}

// Stores the scale of a thread's numbers if it is the first thread of their vector or block.
__device__ inline void store_scale(
    float* scales, const Scale& scale, float whole, unsigned int matrix, long long row, unsigned int span, int part,
    long long rows, long long cols, long long out_rows, long long out_cols)
{
    if ((SCALES == 1 || SCALES == 5) && span == 0 && part == 0)
        scales[matrix * rows + row] = is_vector ? scale.factor : whole;
    if (SCALES == 2 && part == 0) scales[span * out_rows + row] = scale.factor;
    if (SCALES == 3 && part == 0 && row % 128 == 0) {
        unsigned int spans = blocks_of(out_cols, width);
        scales[row / 128 * (spans + (-spans & 3)) + span] = scale.factor;
    }
    constexpr int step = SCALES == 5 ? 16 : 32;
    if (SCALES >= 4 && part * segment % step == 0 && span * width + part * segment < cols) {
        unsigned int column = (span * width + part * segment) / step, line = (unsigned int)row;
        long long tile = line / 128 * blocks_of(out_cols, 4 * step) + column / 4;
        Byte* to = reinterpret_cast<Byte*>(scales + (SCALES == 5 ? out_rows : 0));
        to[tile * 512 + line % 32 * 16 + line % 128 / 32 * 4 + column % 4] =
            SCALES == 5 ? written<E4M3>(scale.multiplier).bits : (Byte)scale.code;
    }
}

// With SEEKS the largest magnitudes alone are written. Lines are padded with zeros. `number` and its strides count the
// distinct matrices, to which the random numbers belong. `aligned`: lines of the target are, to 16 bytes.
extern "C" __global__ void quantize(
    const Source* source, Target* out, float* scales, unsigned int* peaks, unsigned long long stream,
    unsigned long long seed, long long rows, long long cols, long long row_stride, long long col_stride,
    long long count, long long extent1, long long extent2, long long stride0, long long stride1, long long stride2,
    long long aligned, long long out_rows, long long out_cols, long long number, long long number0,
    long long number1, long long number2)
{
    __shared__ unsigned int largest[tall * parts];
    int thread = threadIdx.y * 32 + threadIdx.x, r = thread / parts, part = thread % parts;
    float whole = seeks_tensor && !SEEKS ? float_scale(peaks[0], SCALING == 4 ? LARGEST * 448.0f : LARGEST) : 1.0f;
    unsigned int strips = blocks_of(out_rows, tall), spans = blocks_of(out_cols, width);
    unsigned int total = (unsigned int)count * strips * spans;
    for (unsigned int i = blockIdx.x; i < total; i += gridDim.x) {
        unsigned int span = i % spans, matrix = i / spans / strips;
        long long top = i / spans % strips * (long long)tall, left = span * (long long)width;
        long long row = top + r, first = left + part * segment;
        Tile tile = {source, 0, 0, row_stride, col_stride};
        tile.rows = (int)(rows - top < tall ? rows - top : tall);
        tile.cols = (int)(cols - left < width ? cols - left : width);
        tile.from += top * row_stride + left * col_stride;
        if (count > 1) tile.from += matrix_offset(matrix, extent1, extent2, stride0, stride1, stride2);
        if (SEEKS || peaks_in_tile) largest[thread] = 0;
        float x[segment];
        load(x, tile, r, part);
        if (HADAMARD && r < tile.rows && first + segment <= cols) transform(x, seed);
        unsigned int peak = 0;
        if (SEEKS || peaks_in_tile) peak = largest_magnitude(x, ALONE || (SEEKS && seeks_tensor));
        if (LOADS == 2 && (SEEKS || peaks_in_tile)) __syncthreads();
        if (SEEKS) {  // a tile is in one block of 128 vectors
            atomicMax(largest + (is_vector ? r : 0), peak);
            __syncthreads();
            if (thread < (is_vector ? tall : 1) && top + thread < rows && left < cols)
                atomicMax(peaks + peak_index(matrix, top + thread, left, rows, cols), largest[thread]);
            __syncthreads();
            continue;
        }
        if (peaks_in_tile) {
            int block = r / HIGH * parts + part * segment / WIDE;
            atomicMax(largest + block, peak);
            __syncthreads();
            peak = largest[block];
        } else if (SCALING != 0 && r < tile.rows && first < cols) {
            peak = peaks[peak_index(matrix, row, first, rows, cols)];
        }
        Scale scale = scale_of(peak, whole);
        prepare_division(scale);
        if (r < tile.rows) store_scale(scales, scale, whole, matrix, row, span, part, rows, cols, out_rows, out_cols);
        unsigned int counter[4] = {0u, 0u, 0u, 0u};
        if (STOCHASTIC) {
            long long distinct = number;
            if (count > 1) distinct += matrix_offset(matrix, extent1, extent2, number0, number1, number2);
            counter[0] = (unsigned int)(first / 4), counter[1] = (unsigned int)(distinct * rows + row);
            counter[2] = (unsigned int)stream, counter[3] = (unsigned int)(stream >> 32);
        }
        Codes codes = codes_of(x, scale, counter, seed);
        constexpr int count_of = sizeof(codes.items) / sizeof(Target), share = segment / count_of;
        int inside = r < tile.rows ? tile.cols - part * segment : 0;
        if (!ALONE && !INTEGER && !to_e2m1 && inside < segment && !scale.keeps)  // numbers beyond the matrix are zero whatever the scale
#pragma unroll
            for (int k = 0; k < count_of; ++k)
                if (k * share >= inside) codes.items[k] = Target();
        long long line = (long long)matrix * out_rows + row;
        Target* to = out + (line * out_cols + first) / share;
        int left_over = row < out_rows ? (int)(out_cols - left < width ? out_cols - left : width) - part * segment : 0;
        if (aligned && left_over >= segment)
            codes.store(to);
        else
#pragma unroll
            for (int k = 0; k < count_of; ++k)
                if (k * share < left_over) to[k] = codes.items[k];
        if (peaks_in_tile || LOADS != 2) __syncthreads();
    }
}
