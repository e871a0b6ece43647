// What the units with 512-bit vectors share: conversions of float16, stores past the caches, the shape of a tile.
const int W = 16;
// Four blocks of 16 bytes, `step` bytes apart.
template <class V> static inline V blocks_at(const char* at, int64_t step) {
    const __m256i low = _mm256_loadu2_m128i((const __m128i*)(at + step), (const __m128i*)at);
    return (V)_mm512_inserti64x4(_mm512_castsi256_si512(low),
                                 _mm256_loadu2_m128i((const __m128i*)(at + 3 * step), (const __m128i*)(at + 2 * step)),
                                 1);
}
template <class V> static inline V widen_u8(const void* at) {
    return (V)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
}
template <class V> static inline V widen_i8(const void* at) {
    return (V)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
}
template <class V> static inline V widen_u16(const void* at) {
    return (V)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
}
template <class V> static inline V load_f16_as(const void* at) {
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
}
template <class V> static inline void narrow_u8(void* to, V x) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
}
// E4M3 numbers times 2^-8; 480 is NaN. E4M3 is float16 with another bias and 4 bits of its exponent.
template <class V> static inline V small_e4m3(const void* at) {
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at)), 7);
    return (V)_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16((short)0xbfff)));
}
// Those of 64 codes, as float16.
static inline void halves_of_e4m3(const void* at, uint16_t* to) {
    for (int i = 0; i < 2; i++) {
        const __m512i x = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)at + i)), 7);
        _mm512_store_si512((__m512i*)to + i, _mm512_and_si512(x, _mm512_set1_epi16((short)0xbfff)));
    }
}
template <class H, class V> static inline H narrowed_f16(V x) {
    return (H)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
}
template <class V> static inline V round_f16(V x) {
    return (V)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
template <class V> static inline void stream(void* to, V x) { _mm512_stream_ps((float*)to, (__m512)x); }
// Copies `bytes` bytes of a vector; `to` gets zeros in the others, of a vector in memory nothing is written there.
static inline __mmask64 some(int bytes) { return bytes < 64 ? (1ull << bytes) - 1 : ~0ull; }
static inline void copy_some(void* to, const void* from, int bytes) {
    _mm512_store_si512(to, _mm512_maskz_loadu_epi8(some(bytes), from));
}
template <class V> static inline void put_some(void* to, V x, int bytes) {
    if constexpr (sizeof x == 64) _mm512_mask_storeu_epi8(to, some(bytes), (__m512i)x);
    else _mm256_mask_storeu_epi8(to, (__mmask32)some(bytes), (__m256i)x);
}
template <class V> static inline bool any(V x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0; }
// The 64-bit products of the even lanes.
template <class V> static inline V mul_even(V x, V y) { return (V)_mm512_mul_epu32((__m512i)x, (__m512i)y); }

// bfloat16 in the place of E4M3 codes of 16 bits, by a table of magnitudes.
struct Magnitudes {
    alignas(64) uint16_t at[128] = {};
    constexpr Magnitudes() {
        for (int i = 1; i < 127; i++)
            at[i] =
                (uint16_t)(__builtin_bit_cast(uint32_t, (float)(i < 8 ? 2 * i : (8 + i % 8) << i / 8) / 1024) >> 16);
        at[127] = 0x7fc0;
    }
};
static constexpr Magnitudes E4M3;
template <class V> static inline V bf16_of_e4m3(V codes) {
    const __m512i* t = (const __m512i*)E4M3.at;
    const __m512i x = (__m512i)codes, low = _mm512_permutex2var_epi16(t[0], x, t[1]),
                  high = _mm512_permutex2var_epi16(t[2], x, t[3]);
    const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(x, _mm512_set1_epi16(64)), low, high);
    return (V)_mm512_or_si512(magnitude, _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(128)), 8));
}
// Codes in the low bits of words, whose other bits are arbitrary, times scales, as bfloat16: the exponent bits of a
// scale are subtracted, with their sign changed, from a number with the bias 0x4000 (E4M3: 0x8000), so that zero
// remains zero. Of a 4-bit code and three bits of the scale's significand there is a table, of subnormal E4M3 another.
struct Biased {
    alignas(64) uint16_t products[64] = {}, subnormal[32] = {};
    constexpr Biased() {
        const float magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        for (int i = 0; i < 64; i++)
            if (i % 8)
                products[i] =
                    (uint16_t)((__builtin_bit_cast(uint32_t, magnitudes[i % 8] * (float)(8 | i >> 3) / 8) >> 16) +
                               0x4000);
        for (int i = 1; i < 8; i++)
            subnormal[i] = (uint16_t)((__builtin_bit_cast(uint32_t, (float)i / 4) >> 16) + 0x4080);
    }
};
static constexpr Biased BIASED;
template <bool IS_E4M3, class V> static inline V scaled_bf16(V codes, V scales, V significands) {
    const __m512i x = (__m512i)codes, high = _mm512_slli_epi16(x, IS_E4M3 ? 8 : 12),
                  sign = _mm512_set1_epi16((short)0x8000);
    __m512i y =
        _mm512_ternarylogic_epi32(x, _mm512_set1_epi16(7), (__m512i)significands, 0xea);  // x & 7 | significands
    if constexpr (IS_E4M3) {
        y = _mm512_ternarylogic_epi32(_mm512_srli_epi16(high, 4), _mm512_set1_epi16(0x07f0), sign, 0xea);
        y = _mm512_mask_permutexvar_epi16(y, _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78)), x,
                                          _mm512_load_si512(BIASED.subnormal));
    } else {
        y = _mm512_permutex2var_epi16(_mm512_load_si512(BIASED.products), y, _mm512_load_si512(BIASED.products + 32));
    }
    return (V)_mm512_ternarylogic_epi32(_mm512_subs_epu16(y, (__m512i)scales), high, sign, 0xf8);  // y | high & sign
}

// The E2M1 numbers of codes in the low bits of dwords, whose other bits are arbitrary.
alignas(64) static const float E2M1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
template <class F, class V> static inline __attribute__((always_inline)) F e2m1(V codes) {
    return (F)_mm512_permutexvar_ps((__m512i)codes, _mm512_load_ps(E2M1));
}
// The bytes of 16 bytes of a table, by indices below 16 in the same 16 bytes; x * y + z, rounded once.
template <class V> static inline V shuffled(V table, V at) {
    return (V)_mm512_shuffle_epi8((__m512i)table, (__m512i)at);
}
template <class V> static inline V fused(V x, V y, V z) { return (V)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z); }

struct Lanes16 : lp::Vectors {
    static constexpr int ROWS = 14, COLUMNS = 2, FEW = 8;
};
