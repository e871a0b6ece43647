// What the units with 512-bit vectors share: conversions of float16, stores past the caches, the shape of a tile.
const int W = 16;
template <class V> static inline V load_f16_as(const void* at) { return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
template <class V> static inline void narrow_f16(void* to, V x) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT)); }
template <class V> static inline V round_f16(V x) { return (V)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT)); }
template <class V> static inline void stream(void* to, V x) { _mm512_stream_ps((float*)to, (__m512)x); }
template <class V> static inline bool any(V x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0; }
// The 64-bit products of the even lanes.
template <class V> static inline V mul_even(V x, V y) { return (V)_mm512_mul_epu32((__m512i)x, (__m512i)y); }

struct Lanes16 : lp::Vectors {
    static constexpr int ROWS = 14, COLUMNS = 2, FEW = 8;
};
