// Rounding to narrow formats with scales; the definition is arrays/block_codes.py, which gives the same bits.
//
// Work is done by stripes: `block_rows` rows, and columns of the source's contiguous axis, which is that of k or that
// of the vectors. A stripe is read as float32, transformed, its scales are found and its numbers rounded, all in the
// cache. A magnitude is divided by its factor (or multiplied, if that is a power of two), rounded, and multiplied by
// the scale of its block. Included after unscale.hpp.

struct Stripe {
    float* x;          // rows x width
    const float* in;   // the numbers, in x or in the source; `step` is the distance of rows
    uint32_t* random;  // rows x width
    uint8_t* codes;    // rows x width
    uint32_t* peaks;   // of the columns, then of the blocks; each of these has STRIPE_COLUMNS numbers
    float *factors, *multipliers;
    uint32_t *keeps, *stored;  // masks of signs and codes; codes or float32 bits of the scales
    int64_t rows, width, step;
    explicit Stripe(void* memory)
        : x((float*)memory),
          random((uint32_t*)x + lp::STRIPE),
          codes((uint8_t*)(random + lp::STRIPE)),
          peaks((uint32_t*)(codes + lp::STRIPE)),
          factors((float*)peaks + lp::STRIPE_COLUMNS),
          multipliers(factors + lp::STRIPE_COLUMNS),
          keeps((uint32_t*)multipliers + lp::STRIPE_COLUMNS),
          stored(keeps + lp::STRIPE_COLUMNS) {}
};

// Elements by lp_elements: stored bits of the significand, exponent of the smallest normal number, largest number.
// Codes of integers are subnormal numbers.
struct Narrow {
    int stored, emin;
    float largest;
    int emax() const { return (int)(__builtin_bit_cast(uint32_t, largest) >> 23) - 127; }
};
static constexpr Narrow NARROW[] = {{3, -6, 448}, {2, -14, 57344}, {1, 0, 6}, {7, 7, 127}, {3, 3, 8}};
// What the largest number of a block becomes before it is rounded.
INLINE constexpr float reach(int elements) { return elements == LP_NARROW_I4 ? 7.5f : NARROW[elements].largest; }
INLINE constexpr bool is_integer(int elements) { return elements >= LP_NARROW_I8; }

// Of numbers that are not negative; of a NaN and a number, the number.
INLINE f32v smaller(f32v x, f32v y) { return floats((u32v)((i32v)x < (i32v)y ? (i32v)x : (i32v)y)); }

// The nearest number to q >= 0, ties to even: a sum with a power of two drops the bits.
INLINE f32v to_nearest(f32v q, Narrow to) {
    const i32v exponent = larger((i32v)q & 0x7f800000, (i32v)all((uint32_t)(to.emin + 127) << 23));
    const f32v power = floats((u32v)exponent + ((uint32_t)(23 - to.stored) << 23));  // of Inf and NaN: any number
    return smaller((q + power) - power, all_floats(to.largest));
}

// One of the two numbers around q >= 0, the upper one with the probability of the distance from the lower one: at most
// 30 random bits are added to the dropped bits.
INLINE f32v to_random(f32v q, Narrow to, u32v random) {
    const i32v found = (i32v)q >> 23, exponent = larger(found, (i32v)all((uint32_t)(to.emin + 127)));
    const u32v hidden = (u32v)(found > 0) & 0x800000u, dropped = (u32v)(exponent - found) + (uint32_t)(23 - to.stored);
    const u32v used = dropped < 30 ? dropped : all(30), beyond = dropped - used < 31 ? dropped - used : all(31);
    const u32v significand = ((bits(q) & 0x7fffffu) | hidden) >> beyond;
    const u32v rounded = (significand + (random >> (32 - used))) >> used;
    const f32v power = floats((u32v)(exponent - to.stored) << 23);
    return smaller(__builtin_convertvector((i32v)rounded, f32v) * power, all_floats(to.largest));
}

// The code of the nearest number to q >= 0, ties to even: a sum with a power of two ends with its significand.
INLINE u32v code_of(f32v q, Narrow to) {
    const int dropped = 23 - to.stored;
    const i32v exponent = larger((i32v)q & 0x7f800000, (i32v)all((uint32_t)(to.emin + 127) << 23));
    const i32v power = exponent + (dropped << 23);
    const i32v significand = (i32v)(q + (f32v)power) - power;
    const i32v code = (exponent >> dropped) - ((to.emin + 127) << to.stored) + significand;
    const int largest = (__builtin_bit_cast(int, to.largest) >> dropped) - ((to.emin + 126) << to.stored);
    return (u32v)(code < largest ? code : (i32v)all((uint32_t)largest));
}

// Philox4x32-10 of Salmon and others, "Parallel random numbers: as easy as 1, 2, 3" (2011): four words a counter.
INLINE void philox(u32v* c, uint64_t seed) {
    const auto multiply = [](u32v x, uint32_t factor, u32v& high, u32v& low) __attribute__((always_inline)) {
        const u64v even = (u64v)mul_even(x, all(factor)), odd = (u64v)mul_even((u32v)((u64v)x >> 32), all(factor));
        high = (u32v)(even >> 32 | (odd & ~(uint64_t)UINT32_MAX));
        low = (u32v)((even & UINT32_MAX) | odd << 32);
    };
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++, key[0] += 0x9e3779b9u, key[1] += 0xbb67ae85u) {
        u32v high[2], low[2];
        multiply(c[0], 0xd2511f53u, high[0], low[0]);
        multiply(c[2], 0xcd9e8d57u, high[1], low[1]);
        c[0] = high[1] ^ c[1] ^ key[0];
        c[1] = low[1];
        c[2] = high[0] ^ c[3] ^ key[1];
        c[3] = low[0];
    }
}

// Words w of counter i become lane 4 i + w, in four vectors.
template <int... I> INLINE void in_order(u32v* c, std::integer_sequence<int, I...>) {
    auto low = [](u32v a, u32v b) { return __builtin_shufflevector(a, b, (I % 2 * W + I / 2)...); };
    auto high = [](u32v a, u32v b) { return __builtin_shufflevector(a, b, (I % 2 * W + W / 2 + I / 2)...); };
    const u32v even[2] = {low(c[0], c[2]), high(c[0], c[2])}, odd[2] = {low(c[1], c[3]), high(c[1], c[3])};
    c[0] = low(even[0], odd[0]);
    c[1] = high(even[0], odd[0]);
    c[2] = low(even[1], odd[1]);
    c[3] = high(even[1], odd[1]);
}

// Random numbers of a stripe. The counter of an element: its k / 4, its vector in the batch, the stream; word: k % 4.
static void draw(const lp::Quantization& j, const lp::Part& p, const Stripe& s) {
    const u32v lane = get<u32v>(LANE_NUMBERS), low = all((uint32_t)j.q.stream),
               high = all((uint32_t)(j.q.stream >> 32));
    const uint32_t first = (uint32_t)(p.batch * j.q.vectors), row = (uint32_t)p.row, column = (uint32_t)p.column;
    for (int64_t r = 0; r < s.rows; r += j.along_k ? 1 : 4)
        for (int64_t c = 0; c < s.width; c += j.along_k ? 4 * W : W) {
            u32v words[4] = {all((row + (uint32_t)r) / 4), lane + (first + column + (uint32_t)c), low, high};
            if (j.along_k) {
                words[0] = lane + (column + (uint32_t)c) / 4;
                words[1] = all(first + row + (uint32_t)r);
            }
            philox(words, j.q.seed);
            if (j.along_k) in_order(words, std::make_integer_sequence<int, W>());
            for (int w = 0; w < 4; w++)
                put(s.random + (j.along_k ? r * s.width + c + w * W : (r + w) * s.width + c), words[w]);
        }
}

template <int N> INLINE void butterflies(f32v* x) {
    for (int half = 1; half < N; half *= 2)
        for (int i = 0; i < N; i++)
            if (!(i & half)) {
                const f32v a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
}
template <int HALF, int... I> INLINE f32v butterfly(f32v x, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, x, (I ^ HALF)...) + floats(bits(x) ^ (u32v{(I & HALF ? 0x80000000u : 0)...}));
}

// Transforms whole groups of 16 along k: random signs, then the Hadamard matrix, times 1/4. A rest of k is unchanged.
static void transform(const lp::Quantization& j, const lp::Part& p, const Stripe& s) {
    u32v words[4] = {~u32v{}, ~u32v{}, u32v{}, u32v{}};
    philox(words, j.q.seed);
    const uint32_t signs = words[0][0];
    const std::make_integer_sequence<int, W> lanes;
    constexpr int VECTORS = 16 / W;
    if (j.along_k) {
        for (int64_t r = 0; r < s.rows; r++)
            for (int64_t c = 0; c < s.width && p.column + c + 16 <= j.q.k; c += 16) {
                float* at = s.x + r * s.width + c;
                f32v x[VECTORS];
                for (int v = 0; v < VECTORS; v++) {
                    const u32v flips = (all(signs) >> (get<u32v>(LANE_NUMBERS) + (uint32_t)(v * W))) << 31;
                    x[v] = floats(get<u32v>(at + v * W) ^ flips) * 0.25f;
                    x[v] = butterfly<2>(butterfly<1>(x[v], lanes), lanes);
                    if constexpr (W > 4) x[v] = butterfly<4>(x[v], lanes);
                    if constexpr (W > 8) x[v] = butterfly<8>(x[v], lanes);
                }
                butterflies<VECTORS>(x);
                for (int v = 0; v < VECTORS; v++) put(at + v * W, x[v]);
            }
        return;
    }
    for (int64_t r = 0; r < s.rows && p.row + r + 16 <= j.q.k; r += 16)
        for (int64_t c = 0; c < s.width; c += W) {
            f32v x[16];
            for (int i = 0; i < 16; i++)
                x[i] = floats(get<u32v>(s.x + (r + i) * s.width + c) ^ (signs >> i << 31)) * 0.25f;
            butterflies<16>(x);
            for (int i = 0; i < 16; i++) put(s.x + (r + i) * s.width + c, x[i]);
        }
}

template <int TYPE> static void read_rows(const lp::Quantization& j, const char* at, int64_t rows, int64_t count,
                                          const Stripe& s) {
    constexpr int SIZE = bits_of(TYPE) / 8;
    for (int64_t r = 0; r < rows; r++, at += j.row * SIZE) {
        float* to = s.x + r * s.width;
        int64_t c = 0;
        for (; j.column == 1 && c + W <= count; c += W) put(to + c, widened<TYPE>(at + c * SIZE));
        for (; c < count; c += W) {
            alignas(64) char some[4 * W] = {};
            const int64_t end = count < c + W ? count : c + W;
            if (j.column == 1) __builtin_memcpy(some, at + c * SIZE, (size_t)((end - c) * SIZE));
            for (int64_t i = c; j.column != 1 && i < end; i++)
                __builtin_memcpy(some + (i - c) * SIZE, at + i * j.column * SIZE, SIZE);
            put(to + c, widened<TYPE>(some));
        }
        for (; c < s.width; c += W) put(to + c, u32v{});
    }
}

// Reads a part, which is one stripe, with columns of zeros up to a width; rows of zeros only for codes along k.
static void read_stripe(const lp::Quantization& j, const lp::Part& p, Stripe& s) {
    const int64_t count = p.column_end - p.column, rows = p.row_end - p.row, size = bits_of(j.q.type) / 8,
                  unit = j.block_columns > 64 ? j.block_columns : 64;
    s.rows = j.q.codes && !j.along_k ? j.block_rows : rows;
    s.width = (count + unit - 1) / unit * unit;
    const char* at = j.x + ((j.q.offsets ? j.q.offsets[p.batch] : 0) + p.row * j.row + p.column * j.column) * size;
    s.in = s.x;
    s.step = s.width;
    if (j.q.type == LP_F32 && j.column == 1 && rows == s.rows && count == s.width && !j.q.hadamard) {
        s.in = (const float*)at;
        s.step = j.row;
        return;
    }
    if (j.q.type == LP_BF16) read_rows<LP_BF16>(j, at, rows, count, s);
    else if (j.q.type == LP_F16) read_rows<LP_F16>(j, at, rows, count, s);
    else read_rows<LP_F32>(j, at, rows, count, s);
    __builtin_memset(s.x + rows * s.width, 0, (size_t)((s.rows - rows) * s.width) * 4);
    if (j.q.hadamard) transform(j, p, s);
}

// Whether a number that is not finite becomes NaN alone, without effect on its scale.
static bool is_alone(const lp_quantizer& q) {
    return !is_integer(q.elements) && (q.scaling == LP_TENSOR || q.scaling == LP_VECTORS || q.scaling == LP_F32_SCALES);
}

static bool has_powers(const lp_quantizer& q) {
    return q.scaling == LP_FLOOR || q.scaling == LP_RCEIL || q.scaling == LP_EVEN;
}

// Raises the largest magnitudes of columns by those of a stripe; of finite numbers alone, or of all. `merges`: columns
// may raise those of other columns.
template <bool FINITE> static void raise_peaks(Stripe s, bool merges) {
    if (merges && s.rows == 1) {
        s.rows = s.width / 64;
        s.width = s.step = 64;
    }
    for (int64_t c = 0; c < s.width; c += 4 * W) {
        i32v peaks[4];
        UNROLLED(v, 4) peaks[v] = get<i32v>(s.peaks + c + v * W);
        const float* in = s.in + c;
        for (int64_t r = 0; r < s.rows; r++, in += s.step)
            UNROLLED(v, 4) {
                i32v x = get<i32v>(in + v * W) & 0x7fffffff;
                if (FINITE) x &= x < 0x7f800000;
                peaks[v] = larger(peaks[v], x);
            }
        UNROLLED(v, 4) put(s.peaks + c + v * W, peaks[v]);
    }
}

// The largest magnitudes of groups of `size` columns, a multiple of 16, from numbers of columns.
static void group_peaks(const Stripe s, const void* columns, int64_t size) {
    for (int64_t group = 0; group * size < s.width; group += W) {
        u32v rows[W];
        for (int i = 0; i < W; i++) {
            i32v peak = {};
            for (int64_t c = 0; c < size && (group + i) * size < s.width; c += W)
                peak = larger(peak, get<i32v>((const uint32_t*)columns + (group + i) * size + c) & 0x7fffffff);
            rows[i] = (u32v)peak;
        }
        transpose(rows);
        for (int i = 1; i < W; i++) rows[0] = (u32v)larger((i32v)rows[0], (i32v)rows[i]);
        put(s.peaks + group, rows[0]);
    }
}

// `powers`: rounded up to a power of two.
INLINE f32v float_scale(u32v peak, float largest, bool powers) {
    const f32v scale = floats(peak) / largest;
    u32v found = choose((u32v)(scale < 0x1p-126f), all(0x00800000u), bits(scale));
    if (powers) found = (found + 0x7fffffu) & 0x7f800000u;
    return floats(choose((u32v)(peak == 0), bits(all_floats(1)), found));
}

// The scales of `count` blocks or vectors from their largest magnitudes.
static void make_scales(const lp::Quantization& j, const Stripe& s, int64_t count) {
    const Narrow to = NARROW[j.q.elements];
    const bool is_even = j.q.scaling == LP_EVEN;
    // The fraction of a peak above which a power of two doubles.
    const uint32_t fraction =
        is_even ? 0x7fffffu - (0x400000u >> to.stored) : __builtin_bit_cast(uint32_t, to.largest) & 0x7fffffu;
    for (int64_t i = 0; i < count; i += W) {
        const u32v peak = get<u32v>(s.peaks + i), special = is_special(peak);
        u32v stored, keep = ~special;
        f32v factor, multiplier = all_floats(1);
        if (has_powers(j.q)) {
            i32v code = (i32v)(peak >> 23) - to.emax();
            if (j.q.scaling != LP_FLOOR) code -= (i32v)((peak & 0x7fffffu) > fraction);
            stored = choose(special, all(255), (u32v)larger(code, i32v{}));
            factor = floats(choose(special, all(0x3f800000u), (254 - stored) << 23));
            multiplier = floats(choose((u32v)(stored == 0), all(1u << 22), stored << 23));
        } else if (j.q.scaling == LP_E4M3_SCALES) {
            multiplier = to_nearest(floats(peak) / to.largest / j.scale, NARROW[LP_NARROW_E4M3]);
            stored = choose(special, all(0x7f), code_of(multiplier, NARROW[LP_NARROW_E4M3]));
            keep &= (u32v)(multiplier > 0.0f);
            factor = floats(choose(keep, bits(multiplier * j.scale), all(0x7f800000u)));
        } else {
            factor =
                j.q.scaling == LP_TENSOR ? all_floats(j.scale) : float_scale(peak, reach(j.q.elements), j.q.powers);
            if (j.q.scaling == LP_TENSOR) keep = ~u32v{};
            factor = floats(choose(keep, bits(factor), all(0x7fc00000u)));
            stored = bits(factor);
        }
        put(s.stored + i, stored);
        put(s.keeps + i, keep);
        put(s.factors + i, factor);
        put(s.multipliers + i, choose(special, all(0x7fc00000u), bits(multiplier)));
    }
}

static void write_scales(const lp::Quantization& j, const lp::Part& p, const Stripe& s, int64_t count) {
    const int64_t rows = j.q.scaling == LP_VECTORS ? 1 : j.block_rows,
                  columns = j.q.scaling == LP_VECTORS ? 1 : j.block_columns;
    const int64_t at = p.batch * j.q.scale_batch + p.row / rows * j.scale_row + p.column / columns * j.scale_column;
    for (int64_t i = 0; i < count; i++)
        if (j.q.scaling == LP_VECTORS || j.q.scaling == LP_F32_SCALES)
            ((uint32_t*)j.scales)[at + i * j.scale_column] = s.stored[i];
        else ((uint8_t*)j.scales)[at + i * j.scale_column] = (uint8_t)s.stored[i];
}

// Writes W vectors of 4 * W codes each from rows of their codes.
static void transpose_codes(const uint8_t* from, int64_t step, char* to, int64_t to_step) {
    u32v rows[W];
    for (int i = 0; i < W; i++, from += 4 * step) {
        const u32v low = widen_u8<u32v>(from) | widen_u8<u32v>(from + step) << 8;
        rows[i] = low | widen_u8<u32v>(from + 2 * step) << 16 | widen_u8<u32v>(from + 3 * step) << 24;
    }
    transpose(rows);
    for (int i = 0; i < W; i++) put(to + i * to_step, rows[i]);
}

// Eight codes of four bits, from a byte each.
INLINE uint32_t in_halves(const uint8_t* codes) {
    uint64_t x;
    __builtin_memcpy(&x, codes, 8);
    x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
    x = (x | x >> 8) & 0x0000ffff0000ffffu;
    return (uint32_t)(x | x >> 16);
}

// Writes the codes of a stripe, with their padding, contiguous along k; two codes of four bits in a byte.
static void write_codes(const lp::Quantization& j, const lp::Part& p, const Stripe& s) {
    const bool is_half = j.q.elements == LP_NARROW_E2M1 || j.q.elements == LP_NARROW_I4;
    const int64_t block = j.q.block_k > 1 ? j.q.block_k : 1, end = (j.q.k + block - 1) / block * block;
    const int64_t k = j.along_k ? p.column : p.row,
                  count = (j.along_k ? s.width : s.rows) < end - k ? (j.along_k ? s.width : s.rows) : end - k;
    const int64_t vector = j.along_k ? p.row : p.column,
                  vectors = j.along_k ? p.row_end - p.row : p.column_end - p.column;
    const int64_t step_v = j.along_k ? s.width : 1, step_k = j.along_k ? 1 : s.width;
    const int64_t in_squares = step_k > 1 && !is_half && count % (4 * W) == 0 ? vectors / W * W : 0;
    for (int64_t v = 0; v < in_squares; v += W) {
        char* const first = j.to + (j.q.to_offsets ? j.q.to_offsets[p.batch] : 0) + (vector + v) * j.q.to_vector + k;
        for (int64_t i = 0; i < count; i += 4 * W)
            transpose_codes(s.codes + i * step_k + v, step_k, first + i, j.q.to_vector);
    }
    for (int64_t v = in_squares; v < vectors; v++) {
        const uint8_t* from = s.codes + v * step_v;
        char* to = j.to +
            ((j.q.to_offsets ? j.q.to_offsets[p.batch] : 0) + (vector + v) * j.q.to_vector + k) / (is_half ? 2 : 1);
        if (is_half && step_k == 1) {
            for (int64_t i = 0; i < count; i += 8) {
                const uint32_t eight = in_halves(from + i);
                __builtin_memcpy(to + i / 2, &eight, 4);
            }
        } else if (is_half) {
            for (int64_t i = 0; i < count; i += 2) to[i / 2] = (char)(from[i * step_k] | from[(i + 1) * step_k] << 4);
        } else if (step_k == 1) {
            __builtin_memcpy(to, from, (size_t)count);
        } else {
            for (int64_t i = 0; i < count; i++) to[i] = (char)from[i * step_k];
        }
    }
}

// How scales act: powers of two, by which magnitudes are multiplied; E4M3 numbers, and float32 numbers, by which they
// are divided.
enum Scales { POWERS, E4M3_SCALES, F32_SCALES };

// Rounds rows of a stripe, of which `count` numbers each are written to `to`.
template <int ELEMENTS, int SCALES, bool RANDOM, bool CODES>
static void round_rows(const lp::Quantization& j, const Stripe s, int64_t rows, int64_t count, char* to) {
    constexpr Narrow NUMBERS = NARROW[ELEMENTS];
    constexpr bool IS_INTEGER = is_integer(ELEMENTS), ALONE = SCALES == F32_SCALES && !IS_INTEGER;
    const bool each = j.block_columns == 1;
    const int64_t unit = j.along_k && j.block_columns > 2 * W ? j.block_columns : 2 * W;
    const int64_t end = CODES ? (count + unit - 1) / unit * unit : count;  // whole blocks of codes
    const int shift = j.block_columns ? __builtin_ctzll((uint64_t)j.block_columns) : 63;
    const float* from = s.in;
    const uint32_t* random = s.random;
    uint8_t* codes = s.codes;
    const auto round = [&](int64_t c, char* target) __attribute__((always_inline)) {
        const int64_t i = c >> shift;  // of the scale
        const f32v factor = each ? get<f32v>(s.factors + c) : all_floats(s.factors[i]);
        const f32v multiplier = each ? get<f32v>(s.multipliers + c) : all_floats(s.multipliers[i]);
        const u32v keep = each ? get<u32v>(s.keeps + c) : all(s.keeps[i]);
        const u32v x = get<u32v>(from + c), sign = x & 0x80000000u & keep;
        const f32v magnitude = floats(x & 0x7fffffffu), q = SCALES == POWERS ? magnitude * factor : magnitude / factor;
        const auto put_integer = [&](u32v v) __attribute__((always_inline)) {
            put_u8(CODES ? (char*)codes + c : target, v & keep & (ELEMENTS == LP_NARROW_I4 ? 15u : ~0u));
        };
        if constexpr (IS_INTEGER && !RANDOM) {
            f32v v = floats(bits(q) | sign);
            if (ELEMENTS == LP_NARROW_I4) v = floats(choose((u32v)(v > 7.0f), bits(all_floats(7)), bits(v)));
            return put_integer(bits(v + 0x1.8p23f));
        }
        f32v r = q;
        if constexpr (RANDOM) r = to_random(q, NUMBERS, get<u32v>(random + c));
        else if constexpr (!CODES) r = to_nearest(q, NUMBERS);
        if constexpr (IS_INTEGER) {
            put_integer((u32v) __builtin_convertvector(floats(bits(r) | sign), i32v));
        } else if constexpr (CODES) {
            const u32v code = (code_of(r, NUMBERS) & keep) | sign >> (ELEMENTS == LP_NARROW_E2M1 ? 28 : 24);
            put_u8(codes + c, ALONE ? choose(is_special(x), sign >> 24 | 0x7f, code) : code);
        } else {
            u32v v = SCALES == F32_SCALES ? choose(is_special(x), all(0x7fc00000u), bits(r)) : bits(r * multiplier);
            if (SCALES == POWERS) v += 0x7fffu + ((v >> 16) & 1);  // products with 2^-127
            put(target, __builtin_convertvector((v | sign) >> 16, u16v));
        }
    };
    constexpr int SIZE = IS_INTEGER ? 1 : 2;
    const int64_t to_row = j.to_row * SIZE;
    for (int64_t r = 0; r < rows; r++, from += s.step, random += s.width, codes += s.width, to += to_row) {
        int64_t c = 0;
        for (; c + W <= end; c += W) round(c, to + c * SIZE);
        if (c == end) continue;
        char some[2 * W];
        round(c, some);
        __builtin_memcpy(to + c * SIZE, some, (size_t)((end - c) * SIZE));
    }
}

typedef void (*RoundRows)(const lp::Quantization&, const Stripe, int64_t rows, int64_t count, char* to);
// By codes, randomness, elements and scales.
template <int I> constexpr RoundRows rounding_of() {
    constexpr int ELEMENTS = I / 4 % 5;
    return round_rows < ELEMENTS, is_integer(ELEMENTS) ? F32_SCALES : I / 20, I / 2 % 2 != 0, I % 2 != 0 > ;
}
template <int... I> static RoundRows rounding(const lp_quantizer& q, std::integer_sequence<int, I...>) {
    static const RoundRows of[] = {rounding_of<I>()...};
    int scales = F32_SCALES;
    if (has_powers(q)) scales = POWERS;
    if (q.scaling == LP_E4M3_SCALES) scales = E4M3_SCALES;
    return of[scales * 20 + q.elements * 4 + (q.stochastic ? 2 : 0) + (q.codes ? 1 : 0)];
}

// Calls each(part) for the stripes of a part.
template <class Each> INLINE void by_stripes(const lp::Quantization& j, const lp::Part& p, const Each& each) {
    for (int64_t r = p.row; r < p.row_end; r += j.block_rows)
        for (int64_t c = p.column; c < p.column_end; c += j.chunk)
            each(lp::Part{p.batch, r, r + j.block_rows < p.row_end ? r + j.block_rows : p.row_end, c,
                          c + j.chunk < p.column_end ? c + j.chunk : p.column_end});
}

static uint32_t largest_peak(const Stripe s, int columns) {
    i32v peaks = {};
    for (int c = 0; c < columns; c += W) peaks = larger(peaks, get<i32v>(s.peaks + c));
    return (uint32_t)over_lanes(peaks, larger, std::make_integer_sequence<int, W>())[0];
}

static uint32_t largest_magnitude(const lp::Quantization& j, const lp::Part& p, void* memory) {
    Stripe s(memory);
    const int64_t columns =
        p.column_end - p.column < j.chunk ? (p.column_end - p.column + 63) / 64 * 64 : lp::STRIPE_COLUMNS;
    __builtin_memset(s.peaks, 0, 4 * (size_t)columns);
    by_stripes(j, p, [&](const lp::Part& stripe) {
        read_stripe(j, stripe, s);
        raise_peaks<true>(s, true);
    });
    return largest_peak(s, (int)columns);
}

// Raises the peaks of vectors across rows by those of a part, which has the columns of one stripe.
static void raise_vector_peaks(const lp::Quantization& j, const lp::Part& p, void* memory) {
    Stripe s(memory);
    __builtin_memset(s.peaks, 0, 4 * lp::STRIPE_COLUMNS);
    by_stripes(j, p, [&](const lp::Part& stripe) {
        read_stripe(j, stripe, s);
        is_alone(j.q) ? raise_peaks<true>(s, false) : raise_peaks<false>(s, false);
    });
    for (int64_t c = p.column; c < p.column_end; c++) {
        uint32_t* const to = j.peaks + p.batch * j.columns + c;
        const uint32_t found = s.peaks[c - p.column];
        uint32_t before = __atomic_load_n(to, __ATOMIC_RELAXED);
        while (found > before)
            if (__atomic_compare_exchange_n(to, &before, found, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) break;
    }
}

// Of scales of vectors along k, a part has all of their numbers.
static void quantize_part(const lp::Quantization& j, const lp::Part& p, void* memory) {
    Stripe s(memory);
    if (j.q.scaling == LP_VECTORS && j.along_k && p.row_end - p.row > 1) {
        for (int64_t r = p.row; r < p.row_end; r++)
            quantize_part(j, {p.batch, r, r + 1, p.column, p.column_end}, memory);
        return;
    }
    const bool of_vectors = j.q.scaling == LP_VECTORS, of_all = j.q.scaling == LP_TENSOR;
    const bool of_rows = of_vectors && j.along_k, is_read = of_rows && p.column_end - p.column <= j.chunk;
    const int64_t groups = j.block_columns;
    const RoundRows round = rounding(j.q, std::make_integer_sequence<int, 60>());
    __builtin_memset(s.peaks, 0, 4 * 64);
    if (of_rows) {
        by_stripes(j, p, [&](const lp::Part& stripe) {
            read_stripe(j, stripe, s);
            is_alone(j.q) ? raise_peaks<true>(s, true) : raise_peaks<false>(s, true);
        });
        s.peaks[0] = largest_peak(s, 64);
    }
    if (of_rows || of_all) make_scales(j, s, 1);
    if (of_rows) write_scales(j, p, s, 1);
    by_stripes(j, p, [&](const lp::Part& stripe) {
        if (!is_read) read_stripe(j, stripe, s);
        const int64_t columns = stripe.column_end - stripe.column;
        if (of_vectors && !of_rows) {
            __builtin_memcpy(s.peaks, j.peaks + p.batch * j.columns + stripe.column, 4 * (size_t)columns);
            make_scales(j, s, columns);
            if (!stripe.row) write_scales(j, stripe, s, columns);
        } else if (!of_vectors && !of_all) {
            const bool at_once = groups > 1 && s.rows == 1 && !is_alone(j.q);
            if (!at_once) {
                __builtin_memset(s.peaks, 0, 4 * (size_t)s.width);
                is_alone(j.q) ? raise_peaks<true>(s, false) : raise_peaks<false>(s, false);
            }
            if (groups > 1) group_peaks(s, at_once ? (const void*)s.in : s.peaks, groups);
            const int64_t count = (columns + groups - 1) / groups;
            make_scales(j, s, count);
            if (j.scales) write_scales(j, stripe, s, count);
        }
        if (j.q.stochastic) draw(j, stripe, s);
        const int64_t rows = j.q.codes ? s.rows : stripe.row_end - stripe.row,
                      start = j.q.to_offsets ? j.q.to_offsets[p.batch] : 0;
        const int size = is_integer(j.q.elements) ? 1 : 2;
        round(j, s, rows, columns, j.to + (start + stripe.row * j.to_row + stripe.column) * size);
        if (j.q.codes) write_codes(j, stripe, s);
    });
}
