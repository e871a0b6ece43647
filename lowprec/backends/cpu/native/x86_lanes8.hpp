// What the units with 256-bit vectors share: conversions of float16, stores past the caches, the shape of a tile.
const int W = 8;
// Two blocks of 16 bytes, `step` bytes apart.
template <class V> static inline V blocks_at(const char* at, int64_t step) { return (V)_mm256_loadu2_m128i((const __m128i*)(at + step), (const __m128i*)at); }
template <class V> static inline V widen_u8(const void* at) { return (V)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)); }
template <class V> static inline V widen_u16(const void* at) { return (V)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)); }
template <class V> static inline V load_f16_as(const void* at) { return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }
template <class H, class V> static inline H narrowed_f16(V x) { return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
template <class V> static inline V round_f16(V x) { return (V)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT)); }
template <class V> static inline void stream(void* to, V x) { _mm256_stream_ps((float*)to, (__m256)x); }
static inline void copy_some(void* to, const void* from, int bytes) { memset(to, 0, 4 * W), memcpy(to, from, (size_t)bytes); }
template <class V> static inline void put_some(void* to, V x, int bytes) { memcpy(to, &x, (size_t)bytes); }
template <class V> static inline bool any(V x) { return !_mm256_testz_si256((__m256i)x, (__m256i)x); }
// The 64-bit products of the even lanes.
template <class V> static inline V mul_even(V x, V y) { return (V)_mm256_mul_epu32((__m256i)x, (__m256i)y); }

struct Lanes8 : lp::Vectors {
    static constexpr int ROWS = 6, COLUMNS = 2, FEW = 4;
};
