// Rounding of operands to codes with scales, written as contiguous lines along k like those of pack.cu; the definition is
// arrays/block_codes.py, which gives the same bits.
//
// Macros: SOURCE and TARGET, element types of elements.cuh; STORED, LEAST_EXPONENT and LARGEST, of an element: bits of the
// significand, exponent of the smallest normal number (codes of int8 are subnormal), largest number; SCALING: 0 one scale
// of the tensor, 1 of vectors, 2 powers of two of blocks, 3 those rounded up, 4 E4M3 numbers of blocks and one scale of
// the tensor, 5 float32 of blocks; SCALES, those that are stored: 0 none, 1 float32 of vectors, or as cuBLASLt's modes
// have them 2 VEC128_32F, 3 BLK128x128_32F, 4 VEC32_UE8M0, 5 VEC16_UE4M3, behind 1, with two codes of E2M1 in a byte;
// others are multiplied in; HIGH and WIDE, vectors and numbers along k of a block; ALONE, whether a number that is not
// finite becomes NaN alone; INTEGER; STOCHASTIC; HADAMARD; SEEKS, whether the largest magnitudes are sought.
//
// A block of threads has tiles of 32 vectors and 128 numbers along k; a thread has 16 of these numbers, which have one scale.

typedef SOURCE Source;
typedef TARGET Target;

static constexpr int tall = 32, width = 128, segment = 16;
static constexpr bool is_vector = SCALING == 1, has_powers = SCALING == 2 || SCALING == 3;
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

// The nearest number of a format to q >= 0, ties to even: a sum with a power of two drops the bits.
template <int DIGITS, int EXPONENT> __device__ inline float to_nearest(float q, float largest)
{
    unsigned int exponent = same_bits<unsigned int>(q) & 0x7f800000u, least = (unsigned int)(EXPONENT + 127) << 23;
    float power = same_bits<float>((exponent > least ? exponent : least) + ((unsigned int)(23 - DIGITS) << 23));
    float nearest = (q + power) - power;
    return nearest < largest ? nearest : largest;
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
    return peak == 0 ? 1.0f : scale < 1.17549435e-38f ? 1.17549435e-38f : scale;
}

struct Scale { float factor, multiplier; bool keeps; int code; };

// The scale of numbers with a largest magnitude, in a tensor with a scale.
__device__ inline Scale scale_of(unsigned int peak, float whole)
{
    Scale scale = {whole, 1.0f, true, 0};
    float nan = same_bits<float>(0x7fc00000u);
    if (SCALING == 0) return scale;
    bool finite = scale.keeps = peak < 0x7f800000u;
    if (has_powers) {
        int code = (int)(peak >> 23) - ((int)(same_bits<unsigned int>(LARGEST) >> 23) - 127);
        if (SCALING == 3) code += (peak & 0x7fffffu) > (same_bits<unsigned int>(LARGEST) & 0x7fffffu);
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

__device__ inline float rounded(float x, Scale scale, unsigned int random)
{
    unsigned int bits = same_bits<unsigned int>(x), sign = bits & 0x80000000u;
    float magnitude = same_bits<float>(bits & 0x7fffffffu);
    float quotient = has_powers ? magnitude * scale.factor : magnitude / scale.factor;
    float value = STOCHASTIC ? to_random(quotient, random) : to_nearest<STORED, LEAST_EXPONENT>(quotient, LARGEST);
    if (INTEGER) return !scale.keeps ? 0.0f : sign ? 0.0f - value : value;
    if (SCALES == 5) return !scale.keeps ? 0.0f : sign ? -value : value;
    if (ALONE && !(magnitude < same_bits<float>(0x7f800000u))) return same_bits<float>(0x7fc00000u);
    if (SCALES < 2) value *= scale.multiplier;
    if (SCALING != 5) {
        Brain nearest;
        round_to(nearest, value);
        value = widen(nearest);
    }
    return scale.keeps && sign ? -value : value;
}

template <class T> __device__ inline T written(float x) { return Convert<float, T>::of(x); }
template <> __device__ inline Byte written<Byte>(float x) { return (Byte)(signed char)(int)x; }

__device__ inline unsigned int code_of_e2m1(float x)
{
    unsigned int bits = same_bits<unsigned int>(x);
    return rounded_magnitude<1, 0>(bits & 0x7fffffffu) | (bits >> 28 & 8u);
}

// Reads a tile, by rows if these are contiguous in the source; beyond the matrix it is zero.
__device__ inline void load_tile(
    float (*tile)[width + 1], const Source* from, long long top, long long left, long long rows, long long cols,
    long long row_stride, long long col_stride, long long by_rows)
{
#pragma unroll 4
    for (int i = 0; i < tall * width / 256; ++i) {
        int r = by_rows ? (int)threadIdx.x : i % 4 * 8 + (int)threadIdx.y;
        int c = by_rows ? i * 8 + (int)threadIdx.y : i / 4 * 32 + (int)threadIdx.x;
        bool inside = top + r < rows && left + c < cols;
        tile[r][c] = inside ? widen(from[(top + r) * row_stride + (left + c) * col_stride]) : 0.0f;
    }
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

// The calling thread's numbers, transformed, and their largest magnitude.
__device__ inline unsigned int take_segment(
    const float (*tile)[width + 1], float* x, int r, int part, bool is_whole, bool finite, unsigned long long seed)
{
    unsigned int peak = 0;
#pragma unroll
    for (int i = 0; i < segment; ++i) x[i] = tile[r][part * segment + i];
    if (HADAMARD && is_whole) transform(x, seed);
#pragma unroll
    for (int i = 0; i < segment; ++i) {
        unsigned int magnitude = same_bits<unsigned int>(x[i]) & 0x7fffffffu;
        if (magnitude > peak && !(finite && magnitude >= 0x7f800000u)) peak = magnitude;
    }
    return peak;
}

__device__ inline long long blocks_of(long long extent, int size) { return (extent + size - 1) / size; }

// Where the peak is, that is sought first, of a vector or of its block.
__device__ inline long long peak_index(long long matrix, long long row, long long first, long long rows, long long cols)
{
    if (seeks_tensor) return 0;
    if (is_vector) return matrix * rows + row;
    return (matrix * blocks_of(rows, HIGH) + row / HIGH) * blocks_of(cols, WIDE) + first / WIDE;
}

// With SEEKS the largest magnitudes alone are written. Lines are padded with zeros. `number` and its strides count the distinct matrices, to which the random numbers belong.
extern "C" __global__ void quantize(
    const Source* source, Target* out, float* scales, unsigned int* peaks, unsigned long long seed,
    unsigned long long stream, long long rows, long long cols, long long row_stride, long long col_stride,
    long long count, long long extent1, long long extent2, long long stride0, long long stride1, long long stride2,
    long long by_rows, long long out_rows, long long out_cols, long long number, long long number0, long long number1,
    long long number2)
{
    __shared__ float tile[tall][width + 1];
    __shared__ unsigned int largest[tall * width / segment];
    int thread = threadIdx.y * 32 + threadIdx.x, r = threadIdx.x, part = threadIdx.y;
    float whole = seeks_tensor && !SEEKS ? float_scale(peaks[0], SCALING == 4 ? LARGEST * 448.0f : LARGEST) : 1.0f;
    long long strips = blocks_of(out_rows, tall), spans = blocks_of(out_cols, width), total = count * strips * spans;
    for (long long i = blockIdx.x; i < total; i += gridDim.x) {
        Split span(i, spans), strip(span.quotient, strips);
        long long top = strip.remainder * tall, left = span.remainder * width, matrix = strip.quotient;
        long long distinct = number;
        const Source* from = source;
        if (count > 1) {
            from += batch_offset(matrix, extent1, extent2, stride0, stride1, stride2);
            distinct += batch_offset(matrix, extent1, extent2, number0, number1, number2);
        }
        largest[thread] = 0;
        load_tile(tile, from, top, left, rows, cols, row_stride, col_stride, by_rows);
        __syncthreads();
        float x[segment];
        long long row = top + r, first = left + part * segment;
        bool finite = ALONE || (SEEKS && seeks_tensor);
        unsigned int peak = take_segment(tile, x, r, part, first + segment <= cols, finite, seed);
        if (SEEKS) {  // a tile is in one block of 128 vectors
            atomicMax(largest + (is_vector ? r : 0), peak);
            __syncthreads();
            if (thread < (is_vector ? tall : 1) && top + thread < rows && left < cols)
                atomicMax(peaks + peak_index(matrix, top + thread, left, rows, cols), largest[thread]);
            __syncthreads();
            continue;
        }
        if (peaks_in_tile) {
            int block = r / HIGH * (width / segment) + part * segment / WIDE;
            atomicMax(largest + block, peak);
            __syncthreads();
            peak = largest[block];
        } else if (row < rows && first < cols && SCALING != 0) {
            peak = peaks[peak_index(matrix, row, first, rows, cols)];
        }
        Scale scale = scale_of(peak, whole);
        if (row < rows) {
            if ((SCALES == 1 || SCALES == 5) && span.remainder == 0 && part == 0)
                scales[matrix * rows + row] = is_vector ? scale.factor : whole;
            if (SCALES == 2 && part == 0) scales[span.remainder * out_rows + row] = scale.factor;
            if (SCALES == 3 && part == 0 && row % 128 == 0)
                scales[row / 128 * (spans + (-spans & 3)) + span.remainder] = scale.factor;
            constexpr int step = SCALES == 5 ? 16 : 32;
            if (SCALES >= 4 && first % step == 0 && first < cols) {
                long long column = first / step, tiles = blocks_of(out_cols, 4 * step);
                Byte* to = reinterpret_cast<Byte*>(scales + (SCALES == 5 ? out_rows : 0));
                to[(row / 128 * tiles + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4] =
                    SCALES == 5 ? written<E4M3>(scale.multiplier).bits : (Byte)scale.code;
            }
        }
        unsigned int words[4] = {0u, 0u, 0u, 0u};
#pragma unroll
        for (int k = 0; k < segment; ++k) {
            if (STOCHASTIC && k % 4 == 0) {
                words[0] = (unsigned int)((first + k) / 4), words[1] = (unsigned int)(distinct * rows + row);
                words[2] = (unsigned int)stream, words[3] = (unsigned int)(stream >> 32);
                philox(words, seed);
            }
            bool inside = row < rows && first + k < cols;
            tile[r][part * segment + k] = inside ? rounded(x[k], scale, words[k % 4]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < tall * width / 256; ++k) {
            int line = k % 4 * 8 + (int)threadIdx.y, c = k / 4 * 32 + (int)threadIdx.x;
            long long at = (matrix * out_rows + top + line) * out_cols + left + c;
            if (top + line >= out_rows || left + c >= out_cols) continue;
            if (SCALES != 5)
                out[at] = written<Target>(tile[line][c]);
            else if (c % 2 == 0)
                reinterpret_cast<Byte*>(out)[at / 2] =
                    (Byte)(code_of_e2m1(tile[line][c]) | code_of_e2m1(tile[line][c + 1]) << 4);
        }
        __syncthreads();
    }
}
