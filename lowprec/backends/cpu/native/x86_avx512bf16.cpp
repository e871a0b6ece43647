// Pairs of bfloat16 with AVX512-BF16: two bfloat16 a dword.
#if defined(__x86_64__)
#include "kernel.hpp"
#include "lanewise.hpp"
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,avx2")
namespace {
#include "x86_lanes16.hpp"
#include "templates.hpp"

struct Bf16 : Lanes16 {
    typedef f32v Acc;
    static constexpr int ELEMENT = E_BF16;
    INLINE f32v dot(f32v acc, u32v a, u32v b) { return (f32v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
};

// Two vectors of float32, of which `count` numbers exist, as bfloat16; subnormal numbers become zero.
INLINE __m512bh halves_at(const float* low, const float* high, int64_t count_low, int64_t count_high) {
    const __mmask16 of_low = (__mmask16)(count_low < W ? (1 << count_low) - 1 : -1);
    const __mmask16 of_high = (__mmask16)(count_high < W ? (1 << count_high) - 1 : -1);
    return _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(of_high, high), _mm512_maskz_loadu_ps(of_low, low));
}

// A sum for each of R rows.
template <int R> void sum_rows(const lp::MatrixVector& p, int64_t row) {
    const float* const from = (const float*)p.a + row * p.ld;
    __m512 acc[R] = {};
    for (int64_t i = 0; i < p.columns; i += 2 * W) {
        const int64_t rest = p.columns - i;
        const int64_t high = rest < W ? 0 : rest - W;
        const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(p.x + i + W), _mm512_loadu_ps(p.x + i));
        UNROLLED(r, R) {
            const float* const at = from + r * p.ld + i;
            const __m512bh a = rest >= 2 * W ? _mm512_cvtne2ps_pbh(_mm512_loadu_ps(at + W), _mm512_loadu_ps(at))
                                             : halves_at(at, at + W, rest, high);
            acc[r] = _mm512_dpbf16_ps(acc[r], a, x);
        }
    }
    UNROLLED(r, R) p.y[row + r] = _mm512_reduce_add_ps(acc[r]);
}

// Adds R rows, times numbers of x, to the sums of the columns [first, end). The last row is alone if R is odd.
template <int R> void add_rows(const lp::MatrixVector& p, int64_t row, int64_t first, int64_t end) {
    alignas(64) static const uint16_t ORDER[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(ORDER);
    const float* const from = (const float*)p.a + row * p.ld;
    u32v x[(R + 1) / 2];
    UNROLLED(r, (R + 1) / 2) {
        const float second = 2 * r + 1 < R ? p.x[row + 2 * r + 1] : 0;
        x[r] = bits(all_floats(p.x[row + 2 * r])) >> 16 | (bits(all_floats(second)) & 0xffff0000u);
    }
    for (int64_t i = first; i < end; i += W) {
        __m512 acc = {};
        UNROLLED(r, (R + 1) / 2) {
            const float* const at = from + 2 * r * p.ld + i;
            const __m512bh pair = halves_at(at, 2 * r + 1 < R ? at + p.ld : at, end - i, 2 * r + 1 < R ? end - i : 0);
            acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_permutexvar_epi16(order, (__m512i)pair), (__m512bh)x[r]);
        }
        put(p.y + i, get<f32v>(p.y + i) + (f32v)acc);
    }
}
}  // namespace
namespace lp {
void multiply_part_bf16(const MatrixVector& p, int64_t first, int64_t end) {
    int64_t i = p.sums_rows ? first : 0;
    if (p.sums_rows) {
        for (; i + 4 <= end; i += 4) sum_rows<4>(p, i);
        for (; i < end; i++) sum_rows<1>(p, i);
        return;
    }
    memset(p.y + first, 0, (size_t)(end - first) * sizeof(float));
    for (; i + 8 <= p.rows; i += 8) add_rows<8>(p, i, first, end);
    for (; i < p.rows; i++) add_rows<1>(p, i, first, end);
}
Unit bf16_avx512() { return unit<Bf16>(); }
}  // namespace lp
TARGET_END
#endif
