// Vectors of W 32-bit lanes: loads of every element type as float32, roundings, and the transposition of W x W dwords.
//
// Written in the compilers' portable vector types. A file of an instruction set includes it once, inside its namespace,
// after it has defined W, load_f16_as (W float16 as float32), narrowed_f16 (W float32 as float16, to nearest even) and
// any. Inf and NaN pass through every rounding, and NaN becomes quiet.

typedef float f32v __attribute__((vector_size(4 * W)));
typedef uint32_t u32v __attribute__((vector_size(4 * W)));
typedef int32_t i32v __attribute__((vector_size(4 * W)));
typedef uint16_t u16v __attribute__((vector_size(2 * W)));
typedef int16_t i16v __attribute__((vector_size(2 * W)));
typedef uint8_t u8v __attribute__((vector_size(W)));
typedef int8_t i8v __attribute__((vector_size(W)));

template <class V> static inline V bf16_of_e4m3(V codes);  // if W is 16
template <bool IS_E4M3, class V> static inline V scaled_bf16(V codes, V scales, V significands);  // if W is 16
template <class V> static inline void narrow_u8(void* to, V x);  // if W is 8 or 16
template <class F, class V> static inline F e2m1(V codes);  // if W is 8 or 16
static inline void halves_of_e4m3(const void* codes, uint16_t* to);  // 4 * W codes, if W is 8 or 16

using lp::bits_of;
using lp::block_of;
using lp::has_float_scales;
using lp::has_scales;
using lp::is_coded;

template <int I> using Int = std::integral_constant<int, I>;

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER
// Loops over constants.
#define UNROLLED(i, end) _Pragma("GCC unroll 64") for (int i = 0; i < (end); i++)
#define UNROLLED_BY(i, end, step) _Pragma("GCC unroll 64") for (int i = 0; i < (end); i += step)

template <class V> INLINE V get(const void* at) {
    V v;
    __builtin_memcpy(&v, at, sizeof v);
    return v;
}
template <class V> INLINE void put(void* at, V v) { __builtin_memcpy(at, &v, sizeof v); }
// The low bytes of lanes.
INLINE void put_u8(void* to, u32v x) {
    if constexpr (W > 4) narrow_u8(to, x);
    else put(to, __builtin_convertvector(__builtin_convertvector(x, u16v), u8v));
}
INLINE u32v bits(f32v x) { return (u32v)x; }
INLINE f32v floats(u32v x) { return (f32v)x; }
INLINE u32v all(uint32_t x) { return x - (u32v){}; }
// Sums of numbers; those of int8 products wrap around, where units multiply b + 128.
INLINE f32v plus(f32v a, f32v b) { return a + b; }
INLINE i32v plus(i32v a, i32v b) { return (i32v)((u32v)a + (u32v)b); }
INLINE f32v all_floats(float x) { return floats(all(__builtin_bit_cast(uint32_t, x))); }
INLINE u32v choose(u32v condition, u32v yes, u32v no) { return (condition & yes) | (~condition & no); }
INLINE i32v larger(i32v x, i32v y) { return x > y ? x : y; }
// All lanes joined by an operation, in every lane.
template <class V, class F, int... I> INLINE V over_lanes(V x, F join, std::integer_sequence<int, I...>) {
    x = join(x, __builtin_shufflevector(x, x, (I ^ 1)...));
    x = join(x, __builtin_shufflevector(x, x, (I ^ 2)...));
    if constexpr (W > 4) x = join(x, __builtin_shufflevector(x, x, (I ^ 4) % W...));
    if constexpr (W > 8) x = join(x, __builtin_shufflevector(x, x, (I ^ 8) % W...));
    return x;
}
INLINE u32v is_special(u32v x) { return (u32v)((x & 0x7fffffffu) >= 0x7f800000u); }  // Inf or NaN

// GCC 12 converts 8 to 32 bits one element at a time unless it goes by 16 bits, and halves of vectors: where it matters
// there is widen_u8, widen_i8 or widen_u16, W unsigned numbers as 32 bits.
INLINE u16v wide_u8(const void* at) { return __builtin_convertvector(get<u8v>(at), u16v); }
// W dwords of int8 numbers along k: four each, or two as int16.
template <int P> INLINE u32v int8_along_k(const char* at) {
    if constexpr (P == 4) return get<u32v>(at);
    typedef int8_t run __attribute__((vector_size(2 * W)));
    typedef int16_t words __attribute__((vector_size(4 * W)));
    return (u32v) __builtin_convertvector(get<run>(at), words);
}

// Rounds to nearest, dropping low bits. The carry may reach the exponent, which is right.
template <int DROPPED, bool TIES_AWAY> INLINE u32v nearest(u32v x) {
    u32v half = all((1u << (DROPPED - 1)) - !TIES_AWAY);
    if (!TIES_AWAY) half += (x >> DROPPED) & 1;
    return (floats(x) != floats(x) ? x | 0x00400000u : x + half) & all(~0u << DROPPED);
}

template <int FORMAT> INLINE f32v rounded(f32v x) {
    if constexpr (FORMAT == LP_TO_TF32) return floats(nearest<13, true>(bits(x)));
    if constexpr (FORMAT == LP_TO_BF16) return floats(nearest<16, false>(bits(x)));
    if constexpr (FORMAT == LP_TO_F16) return round_f16(x);
    return x;
}

// The E2M1 numbers of codes in the low bits of dwords, whose other bits are arbitrary.
INLINE f32v e2m1_of(u32v codes) {
    if constexpr (W > 4) return e2m1<f32v>(codes);
    const u16v halves =
        __builtin_convertvector((codes & 8u) << 12 | (codes & 7u) << 9, u16v);  // float16 with another bias
    return load_f16_as<f32v>(&halves) * 0x1p14f;
}

// W stored numbers as float32.
template <int TYPE> INLINE f32v widened(const void* at) {
    if constexpr (TYPE == LP_BF16) return floats(widen_u16<u32v>(at) << 16);
    else if constexpr (TYPE == LP_F16) return load_f16_as<f32v>(at);
    else if constexpr (TYPE == LP_E5M2) {
        const u16v halves = wide_u8(at) << 8;
        return load_f16_as<f32v>(&halves);
    } else if constexpr (TYPE == LP_E4M3) {
        const f32v x = small_e4m3<f32v>(at) * 0x1p8f;
        return floats(bits(x) | ((u32v)((bits(x) & 0x7fffffffu) == 0x43f00000u) & 0x7fc00000u));  // 480: NaN of E4M3
    } else return get<f32v>(at);
}

// Dwords as numbers, or their low halves, or the high ones.
template <int TYPE> INLINE f32v number(u32v x, bool high) {
    if (TYPE == LP_BF16) return floats(high ? x & 0xffff0000u : x << 16);
    const u16v halves = __builtin_convertvector(high ? x >> 16 : x, u16v);
    return TYPE == LP_F16 ? load_f16_as<f32v>(&halves) : floats(x);
}

// The scales of W blocks.
template <int TYPE> INLINE f32v block_scales(u32v code) {
    const u32v magnitude = code & 0x7fu, power = choose((u32v)(code == 0), all(1u << 22), code << 23);
    if (TYPE != LP_NVFP4) return floats(choose((u32v)(code == 255), all(0x7fc00000u), power));
    const u32v e4m3 = bits(floats(magnitude << 20) * 0x1p120f);
    return floats(choose((u32v)(magnitude == 0x7f), all(0x7fc00000u), e4m3 | (code & 0x80u) << 24));
}

// 2^e as float32, from the smallest subnormal number to 2^127.
INLINE f32v powers(i32v e) {
    u32v normal = (u32v)(e + 127) << 23, subnormal = all(1) << (u32v)((e + 149) & 31);
    return floats(choose((u32v)(e > -127), normal, subnormal));
}

// Transposes a square of W x W dwords: interleaves dwords, then pairs, in blocks of 16 bytes, and collects blocks.
typedef uint64_t u64v __attribute__((vector_size(4 * W)));
constexpr int source_of(int stage, int odd, int i) {
    if (stage == 1) return i / 4 * 4 + i % 4 / 2 + i % 2 * W + 2 * odd;
    if (stage == 2) return i / 2 * 2 + i % 2 * (W / 2) + odd;
    return i / (W / 2) * W + i % (W / 2) / 4 * 8 + i % 4 + 4 * odd;
}
template <int STAGE, class V, int... I> INLINE void exchange(u32v* rows, std::integer_sequence<int, I...>) {
    UNROLLED(i, W)
        if (!(i & STAGE)) {
            V a = (V)rows[i], b = (V)rows[i + STAGE];
            rows[i] = (u32v)__builtin_shufflevector(a, b, source_of(STAGE, 0, I)...);
            rows[i + STAGE] = (u32v)__builtin_shufflevector(a, b, source_of(STAGE, 1, I)...);
        }
}
INLINE void transpose_blocks(u32v* rows) {  // 4 x 4 dwords each
    exchange<1, u32v>(rows, std::make_integer_sequence<int, W>());
    exchange<2, u64v>(rows, std::make_integer_sequence<int, W / 2>());
    UNROLLED_BY(i, W, 4) std::swap(rows[i + 1], rows[i + 2]);
}
INLINE void transpose(u32v* rows) {
    std::make_integer_sequence<int, W> lanes;
    transpose_blocks(rows);
    if constexpr (W > 4) exchange<4, u32v>(rows, lanes);
    if constexpr (W > 8) exchange<8, u32v>(rows, lanes);
}

// The real and imaginary parts of W complex numbers in two vectors.
template <int... I> INLINE void deinterleave(u32v a, u32v b, u32v* parts, std::integer_sequence<int, I...>) {
    parts[0] = __builtin_shufflevector(a, b, (2 * I)...);
    parts[1] = __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// The dwords of 4 * W lanes from four rows of int8: bytes, then pairs of bytes, are interleaved within blocks of 16
// bytes, and the blocks put in order.
typedef uint8_t bytes __attribute__((vector_size(4 * W)));
template <int UNIT, bool HIGH, int... I> INLINE bytes interleaved(bytes a, bytes b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(
        a, b, (I / 16 * 16 + (HIGH ? 8 : 0) + I % 16 / UNIT / 2 * UNIT + I % UNIT + (I / UNIT % 2 ? 4 * W : 0))...);
}
template <int V, int... I> INLINE u32v ordered(const u32v* q, std::integer_sequence<int, I...>) {
    if constexpr (W == 4) return q[V];
    if constexpr (W == 8)
        return __builtin_shufflevector(q[V % 2 * 2], q[V % 2 * 2 + 1], (I / 4 * W + V / 2 * 4 + I % 4)...);
    u32v first = __builtin_shufflevector(q[0], q[1], (I / 4 % 2 * W + V % 4 * 4 % W + I % 4)...);
    u32v second = __builtin_shufflevector(q[2], q[3], (I / 4 % 2 * W + V % 4 * 4 % W + I % 4)...);
    return __builtin_shufflevector(first, second, (I < W / 2 ? I : W + I)...);
}
INLINE void int8_dwords(const char* const* at, u32v* out) {
    std::make_integer_sequence<int, 4 * W> all_bytes;
    std::make_integer_sequence<int, W> lanes;
    bytes row[4], low[2], high[2];
    UNROLLED(i, 4) row[i] = get<bytes>(at[i]);
    UNROLLED(i, 2) {
        low[i] = interleaved<1, false>(row[2 * i], row[2 * i + 1], all_bytes);
        high[i] = interleaved<1, true>(row[2 * i], row[2 * i + 1], all_bytes);
    }
    u32v q[4] = {(u32v)interleaved<2, false>(low[0], low[1], all_bytes),
                 (u32v)interleaved<2, true>(low[0], low[1], all_bytes),
                 (u32v)interleaved<2, false>(high[0], high[1], all_bytes),
                 (u32v)interleaved<2, true>(high[0], high[1], all_bytes)};
    out[0] = ordered<0>(q, lanes);
    out[1] = ordered<1>(q, lanes);
    out[2] = ordered<2>(q, lanes);
    out[3] = ordered<3>(q, lanes);
}
