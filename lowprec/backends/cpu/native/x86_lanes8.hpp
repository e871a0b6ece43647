// What the units with 256-bit vectors share: conversions of float16, stores past the caches, the shape of a tile.
const int W = 8;
// Two blocks of 16 bytes, `step` bytes apart.
template <class V> static inline V blocks_at(const char* at, int64_t step) {
    return (V)_mm256_loadu2_m128i((const __m128i*)(at + step), (const __m128i*)at);
}
template <class V> static inline V widen_u8(const void* at) {
    return (V)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
}
template <class V> static inline V widen_i8(const void* at) {
    return (V)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at));
}
template <class V> static inline V widen_u16(const void* at) {
    return (V)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
}
template <class V> static inline void narrow_u8(void* to, V x) {
    const __m256i blocks = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
    const __m128i low = _mm256_castsi256_si128(blocks), high = _mm256_extracti128_si256(blocks, 1);
    _mm_storel_epi64((__m128i*)to, _mm_unpacklo_epi32(low, high));
}
template <class V> static inline V load_f16_as(const void* at) {
    return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
}
// E4M3 numbers times 2^-8; 480 is NaN. E4M3 is float16 with another bias and 4 bits of its exponent.
template <class V> static inline V small_e4m3(const void* at) {
    const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)at)), 7);
    return (V)_mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16((short)0xbfff)));
}
// Those of 32 codes, as float16.
static inline void halves_of_e4m3(const void* at, uint16_t* to) {
    for (int i = 0; i < 2; i++) {
        const __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at + i)), 7);
        _mm256_store_si256((__m256i*)to + i, _mm256_and_si256(x, _mm256_set1_epi16((short)0xbfff)));
    }
}
template <class H, class V> static inline H narrowed_f16(V x) {
    return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}
template <class V> static inline V round_f16(V x) {
    return (V)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
template <class V> static inline void stream(void* to, V x) { _mm256_stream_ps((float*)to, (__m256)x); }
static inline void copy_some(void* to, const void* from, int bytes) {
    memset(to, 0, 4 * W);
    memcpy(to, from, (size_t)bytes);
}
template <class V> static inline void put_some(void* to, V x, int bytes) {
    if (sizeof x == 32 && bytes % 4 == 0) {
        const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32(bytes / 4), lanes);
        return _mm256_maskstore_ps((float*)to, some, *(const __m256*)&x);
    }
    memcpy(to, &x, (size_t)bytes);
}
template <class V> static inline bool any(V x) { return !_mm256_testz_si256((__m256i)x, (__m256i)x); }
// The 64-bit products of the even lanes.
template <class V> static inline V mul_even(V x, V y) { return (V)_mm256_mul_epu32((__m256i)x, (__m256i)y); }

// The E2M1 numbers of codes in the low bits of dwords, whose other bits are arbitrary: by a table of magnitudes.
alignas(32) static const float E2M1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
template <class F, class V> static inline __attribute__((always_inline)) F e2m1(V codes) {
    const __m256 magnitudes = _mm256_permutevar8x32_ps(_mm256_load_ps(E2M1), (__m256i)codes);
    return (F)_mm256_or_ps(magnitudes, _mm256_and_ps((__m256)(codes << 28), _mm256_set1_ps(-0.0f)));
}
// The bytes of 16 bytes of a table, by indices below 16 in the same 16 bytes; x * y + z, rounded once.
template <class V> static inline V shuffled(V table, V at) {
    return (V)_mm256_shuffle_epi8((__m256i)table, (__m256i)at);
}
template <class V> static inline V fused(V x, V y, V z) { return (V)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); }

struct Lanes8 : lp::Vectors {
    static constexpr int ROWS = 6, COLUMNS = 2, FEW = 4, OFFSET = 0;
    // Four dwords of b, bytes up to 24 or signed ones, times those of a: sums of pairs fit 16 bits, of all 16 those of
    // the former.
    template <int BITS, class S, class V> static inline __attribute__((always_inline)) S sum16(S sum, const V* b,
                                                                                               const uint32_t* a) {
        const __m256i ones = _mm256_set1_epi16(1);
        __m256i pairs = _mm256_setzero_si256(), found = (__m256i)sum;
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
            const __m256i x = _mm256_set1_epi32((int)a[i]), w = (__m256i)b[i];
            if (BITS == 8)
                found = _mm256_add_epi32(
                    found, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), ones));
            else pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w, x));
        }
        return (S)(BITS == 8 ? found : _mm256_add_epi32(found, _mm256_madd_epi16(pairs, ones)));
    }
};
