// Sums of shifted lines for convolutions of few channels a group, which multiply each element by few numbers.
//
// Vectors have 16 lanes everywhere, and products and sums are rounded
// separately: an element of a sum has the same bits at any place and on any processor, and so has a dot product.
// Vectors may be read up to 16 steps beyond the width of a line.

const int LANES = 16, AT_ONCE = 4;
typedef float lanes __attribute__((vector_size(4 * LANES)));

static inline __attribute__((always_inline)) lanes load(const float* at, int64_t step) {
    lanes x;
    if (step == 1) {
        __builtin_memcpy(&x, at, sizeof x);
        return x;
    }
    if (step == 2) {
        lanes y;
        __builtin_memcpy(&x, at, sizeof x);
        __builtin_memcpy(&y, at + LANES, sizeof y);
        return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    }
    UNROLLED(i, LANES) x[i] = at[i * step];
    return x;
}

// VECTORS vectors of a line from column j on.
template <int VECTORS, bool ACROSS>
static inline __attribute__((always_inline)) void sum_vectors(const lp_lines& l, const lp::Line& at, int64_t j,
                                                              int64_t x_step) {
    lanes sums[VECTORS] = {};
    const float *const x = at.x + j * x_step, *const w = at.w + (ACROSS ? j : 0);
    for (int64_t t = 0; t < l.terms; t++) {
        const float *from = x + l.x_terms[t], *by = w + l.w_terms[t];
        UNROLLED(v, VECTORS) {
            const lanes factor = ACROSS ? load(by + v * LANES, 1) : *by - lanes{};
            sums[v] += load(from + v * LANES * x_step, x_step) * factor;
        }
    }
    UNROLLED(v, VECTORS) {
        const int64_t first = j + v * LANES, rest = l.width - first;
        lanes sum = sums[v];
        if (at.bias) sum += ACROSS ? load(at.bias + first, 1) : *at.bias - lanes{};
        if (rest >= LANES) __builtin_memcpy(at.out + first, &sum, sizeof sum);
        else __builtin_memcpy(at.out + first, &sum, 4 * (size_t)rest);
    }
}

template <bool ACROSS>
static inline __attribute__((always_inline)) void sum_line_of(const lp_lines& l, const lp::Line& at, int64_t x_step) {
    int64_t j = 0;
    for (; l.width - j > LANES * (AT_ONCE - 1); j += LANES * AT_ONCE) sum_vectors<AT_ONCE, ACROSS>(l, at, j, x_step);
    for (; l.width - j > LANES; j += LANES * 2) sum_vectors<2, ACROSS>(l, at, j, x_step);
    if (j < l.width) sum_vectors<1, ACROSS>(l, at, j, x_step);
}

static void sum_line(const lp_lines& l, const lp::Line& at) {
    if (l.across) return sum_line_of<true>(l, at, 1);
    if (l.x_step == 1) return sum_line_of<false>(l, at, 1);
    if (l.x_step == 2) return sum_line_of<false>(l, at, 2);
    sum_line_of<false>(l, at, l.x_step);
}

static inline lanes load_some(const float* at, int64_t step, int64_t count) {
    lanes x = {};
    for (int i = 0; i < count; i++) x[i] = at[i * step];
    return x;
}

// The dot products of rows of y with rows of x, for COUNT terms.
template <int COUNT>
static inline __attribute__((always_inline)) void dot_terms(const lp_lines& l, const float* y, const float* x,
                                                            int64_t x_step, const int64_t* terms, float* out) {
    lanes sums[COUNT] = {};
    for (int64_t line = 0; line < l.lines; line++) {
        const float *from = x + l.x_lines[line], *row = y + l.out_lines[line];
        int64_t j = 0;
        for (; j + LANES <= l.width; j += LANES) {
            const lanes factor = load(row + j, 1);
            UNROLLED(t, COUNT) sums[t] += load(from + terms[t] + j * x_step, x_step) * factor;
        }
        const int64_t rest = l.width - j;
        if (!rest) continue;
        const lanes factor = load_some(row + j, 1, rest);
        UNROLLED(t, COUNT) sums[t] += load_some(from + terms[t] + j * x_step, x_step, rest) * factor;
    }
    UNROLLED(t, COUNT) {
        float sum = 0;
        for (int i = 0; i < LANES; i++) sum += sums[t][i];
        out[t] = sum;
    }
}

static inline __attribute__((always_inline)) void dot_rows_of(const lp_lines& l, const float* y, const float* x,
                                                              int64_t x_step, float* out) {
    int64_t t = 0;
    for (; t + 9 <= l.terms; t += 9) dot_terms<9>(l, y, x, x_step, l.x_terms + t, out + t);
    for (; t + 3 <= l.terms; t += 3) dot_terms<3>(l, y, x, x_step, l.x_terms + t, out + t);
    for (; t < l.terms; t++) dot_terms<1>(l, y, x, x_step, l.x_terms + t, out + t);
}

static void dot_rows(const lp_lines& l, const float* y, const float* x, float* out) {
    if (l.x_step == 1) return dot_rows_of(l, y, x, 1, out);
    dot_rows_of(l, y, x, l.x_step, out);
}
