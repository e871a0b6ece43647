// Sums of a run of numbers of a result: of squares, of its error, and of the numbers with random signs. Included once
// for each instruction set, inside its namespace.

typedef double f64x8 __attribute__((vector_size(64)));

// The numbers belong to different sums. With `again`, the reference's result, its squares and those of the error, too.
template <class Real, bool IS_COMPARED>
static void measure(const Real* x, const Real* again, const float* signs, float sign, double* sketch, int64_t count,
                    double (&sums)[3]) {
    typedef Real Numbers __attribute__((vector_size(8 * sizeof(Real))));
    typedef float Signs __attribute__((vector_size(32)));
    f64x8 square = {}, reference = {}, error = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        Numbers numbers;
        Signs of_numbers;
        f64x8 before;
        __builtin_memcpy(&numbers, x + i, sizeof numbers);
        __builtin_memcpy(&of_numbers, signs + i, sizeof of_numbers);
        __builtin_memcpy(&before, sketch + i, sizeof before);
        const f64x8 value = __builtin_convertvector(numbers, f64x8);
        before += value * __builtin_convertvector(of_numbers * sign, f64x8);
        __builtin_memcpy(sketch + i, &before, sizeof before);
        square += value * value;
        if (!IS_COMPARED) continue;
        __builtin_memcpy(&numbers, again + i, sizeof numbers);
        const f64x8 other = __builtin_convertvector(numbers, f64x8);
        reference += other * other;
        error += (value - other) * (value - other);
    }
    for (; i < count; i++) {
        const double value = x[i];
        const double other = IS_COMPARED ? again[i] : 0;
        sketch[i] += value * (signs[i] * sign);
        square[i % 8] += value * value;
        reference[i % 8] += other * other;
        if (IS_COMPARED) error[i % 8] += (value - other) * (value - other);
    }
    for (int lane = 0; lane < 8; lane++) {
        sums[0] += square[lane];
        sums[1] += error[lane];
        sums[2] += reference[lane];
    }
}

static void measure_run(const lp::Run& x, const float* signs, float sign, double* sketch, double (&sums)[3]) {
    const float* const single = (const float*)x.numbers;
    const float* const other_single = (const float*)x.again;
    const double* const wide = (const double*)x.numbers;
    const double* const other_wide = (const double*)x.again;
    if (!x.is_wide && x.again) measure<float, true>(single, other_single, signs, sign, sketch, x.count, sums);
    else if (!x.is_wide) measure<float, false>(single, nullptr, signs, sign, sketch, x.count, sums);
    else if (x.again) measure<double, true>(wide, other_wide, signs, sign, sketch, x.count, sums);
    else measure<double, false>(wide, nullptr, signs, sign, sketch, x.count, sums);
}
