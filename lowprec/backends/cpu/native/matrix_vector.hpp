// Products of a stored matrix and a vector: numbers of the matrix are rounded in registers, in the pass that reads them.
//
// The order of sums is that of neither the packed kernels nor a BLAS, and depends on the layout. Sums are float32, in
// chains of at most k / W terms or, over rows, of SOME rows. Included after emulate.hpp.

// float64 with the significand of an lp_format, whose range is that of float32; NaN becomes quiet.
template <int FORMAT> INLINE f64v rounded_wide(f64v x) {
    if constexpr (FORMAT == LP_EXACT) return x;
    constexpr int DROPPED = FORMAT == LP_TO_BF16 ? 29 + 16 : 29 + 13;
    constexpr bool TIES_AWAY = FORMAT == LP_TO_TF32;
    const u64v number = (u64v)x;
    u64v sum = number + ((1ull << (DROPPED - 1)) - !TIES_AWAY);
    if (!TIES_AWAY) sum += (number >> DROPPED) & 1;
    return (f64v)((x != x ? number | 1ull << 51 : sum) & ~0ull << DROPPED);
}

// W numbers as float32, rounded to an lp_format once, if they are normal numbers of float32.
template <class Real, int FORMAT> INLINE f32v rounded_at(const Real* at) {
    if constexpr (sizeof(Real) == sizeof(float)) {
        return rounded<FORMAT>(get<f32v>(at));
    } else {
        const f32h low = __builtin_convertvector(rounded_wide<FORMAT>(get<f64v>(at)), f32h);
        const f32h high = __builtin_convertvector(rounded_wide<FORMAT>(get<f64v>(at + W / 2)), f32h);
        return (f32v)joined((i32h)low, (i32h)high, std::make_integer_sequence<int, W>());
    }
}

// The last numbers of a row, followed by zeros.
template <class Real> INLINE void copy_end(Real* to, const Real* from, int64_t count) {
    memset(to, 0, W * sizeof(Real));
    memcpy(to, from, (size_t)count * sizeof(Real));
}

template <class Real, int FORMAT> static void round_row(const Real* from, float* to, int64_t count) {
    Real end[W];
    int64_t i = 0;
    for (; i + W <= count; i += W) put(to + i, rounded_at<Real, FORMAT>(from + i));
    if (i == count) return;
    copy_end(end, from + i, count - i);
    const f32v last = rounded_at<Real, FORMAT>(end);
    memcpy(to + i, &last, (size_t)(count - i) * sizeof(float));
}

const int SOME = 4;  // rows at once

// A sum for each of R rows.
template <class Real, int FORMAT, int R> static void sum_rows(const lp::MatrixVector& p, int64_t row) {
    const Real* const from = (const Real*)p.a + row * p.ld;
    f32v acc[R] = {};
    int64_t i = 0;
    for (; i + W <= p.columns; i += W) {
        const f32v x = get<f32v>(p.x + i);
        UNROLLED(r, R) acc[r] = fused(rounded_at<Real, FORMAT>(from + r * p.ld + i), x, acc[r]);
    }
    if (i < p.columns) {  // x has zeros at its end
        const f32v x = get<f32v>(p.x + i);
        UNROLLED(r, R) {
            Real end[W];
            copy_end(end, from + r * p.ld + i, p.columns - i);
            acc[r] = fused(rounded_at<Real, FORMAT>(end), x, acc[r]);
        }
    }
    const std::make_integer_sequence<int, W> lanes;
    const auto add = [](f32v v, f32v w) { return v + w; };
    UNROLLED(r, R) p.y[row + r] = over_lanes(acc[r], add, lanes)[0];
}

// Adds R rows, times numbers of x, to the sums of the columns [first, end).
template <class Real, int FORMAT, int R>
static void add_rows(const lp::MatrixVector& p, int64_t row, int64_t first, int64_t end) {
    const Real* const from = (const Real*)p.a + row * p.ld;
    f32v x[R];
    UNROLLED(r, R) x[r] = all_floats(p.x[row + r]);
    int64_t i = first;
    for (; i + W <= end; i += W) {
        f32v acc = rounded_at<Real, FORMAT>(from + i) * x[0];
        for (int r = 1; r < R; r++) acc = fused(rounded_at<Real, FORMAT>(from + r * p.ld + i), x[r], acc);
        put(p.y + i, get<f32v>(p.y + i) + acc);
    }
    if (i == end) return;
    f32v acc = get<f32v>(p.y + i);  // y has space for a vector after its end
    UNROLLED(r, R) {
        Real last[W];
        copy_end(last, from + r * p.ld + i, end - i);
        acc = fused(rounded_at<Real, FORMAT>(last), x[r], acc);
    }
    put(p.y + i, acc);
}

// The part [first, end) of the sums.
template <class Real, int FORMAT>
static void multiply_vector_as(const lp::MatrixVector& p, int64_t first, int64_t end) {
    if (p.sums_rows) {
        int64_t row = first;
        for (; row + SOME <= end; row += SOME) sum_rows<Real, FORMAT, SOME>(p, row);
        for (; row < end; row++) sum_rows<Real, FORMAT, 1>(p, row);
        return;
    }
    int64_t row = 0;
    memset(p.y + first, 0, (size_t)(end - first) * sizeof(float));
    for (; row + SOME <= p.rows; row += SOME) add_rows<Real, FORMAT, SOME>(p, row, first, end);
    for (; row < p.rows; row++) add_rows<Real, FORMAT, 1>(p, row, first, end);
}

// Calls f with a format as a constant.
template <class F> INLINE void with_format(int format, F f) {
    if (format == LP_TO_TF32) return f(Int<LP_TO_TF32>());
    if (format == LP_TO_BF16) return f(Int<LP_TO_BF16>());
    f(Int<LP_EXACT>());
}
static void multiply_part(const lp::MatrixVector& p, int64_t first, int64_t end) {
    with_format(p.format, [&](auto format) {
        if (p.is_wide) multiply_vector_as<double, format>(p, first, end);
        else multiply_vector_as<float, format>(p, first, end);
    });
}
static void round_numbers(const void* from, bool is_wide, float* to, int64_t count, int format) {
    with_format(format, [&](auto constant) {
        if (is_wide) round_row<double, constant>((const double*)from, to, count);
        else round_row<float, constant>((const float*)from, to, count);
    });
}
