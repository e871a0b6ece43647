// What lanewise.cpp calls in the file of an instruction set: functions in which a vector's lane is an element.
#pragma once
#include "common.hpp"

namespace lp {

struct Emulation {  // the arguments of lp_emulate
    const float *a, *b;
    float* c;
    int64_t m, n, k;
    const int32_t *scales_a, *scales_b;  // exponents of groups, or null
    lp_tensor_core_model core;
};

// A block of the result has a vector's columns; EMULATED_K elements of k, whole groups, are decomposed at once.
const int EMULATED_ROWS = 32, EMULATED_K = 128;

// The arguments of lp_quantize, and its matrices with the contiguous axis of the source along columns.
struct Quantization {
    lp_quantizer q;
    const char* x;
    char *to, *scales;
    float scale;   // of the tensor
    bool along_k;  // whether columns are along k
    int64_t rows, columns, row, column, to_row, scale_row, scale_column;  // extents, strides
    int64_t block_rows, block_columns,
        chunk;  // of a stripe: its rows, columns with a common scale (0: all), all columns
    uint32_t* peaks;  // bits of the largest magnitudes of vectors across rows
};
// Rows and columns of a matrix: whole stripes, or up to its end.
struct Part {
    int64_t batch, row, row_end, column, column_end;
};
const int STRIPE = 128 * 128, STRIPE_COLUMNS = 1024;  // elements of a stripe, and its columns, at most
const int64_t STRIPE_BYTES = 9 * STRIPE + 5 * 4 * STRIPE_COLUMNS;

// A product of a matrix whose rows are contiguous, of float32 or float64, and a vector that has been rounded: y = a @ x,
// or, if not `sums_rows`, x @ a. After x are ENDS zeros, after y is space for ENDS numbers.
const int ENDS = 32;
struct MatrixVector {
    const char* a;
    const float* x;
    float* y;
    int64_t rows, columns, ld;
    bool is_wide, sums_rows;
    int32_t format;  // to which numbers of a are rounded: LP_EXACT, LP_TO_TF32 or LP_TO_BF16
};

// A line of lp_lines; bias is null if there is none.
struct Line {
    const float *x, *w, *bias;
    float* out;
};

// The scores of a query in a chunk of keys, with 15 floats of memory after them, and what is known of its keys so far.
struct ScoreRow {
    float* scores;
    const float* mask;  // null: there is none
    int64_t keys;
    float scale;
    float *largest, *sum;  // not of gradients
};

// Numbers of a result, one after the other; `again` has those of the reference, or is null.
struct Run {
    const void *numbers, *again;
    int64_t count;
    bool is_wide;  // of float64
};

struct Lanewise {
    int lanes;
    void (*emulate)(const Emulation&, int64_t row, int64_t column);  // a block of the result
    bool (*unscale)(const lp_flat&, int64_t first, int64_t count, double inverse);  // whether any has Inf or NaN
    uint32_t (*peak)(const Quantization&, const Part&, void* memory);  // the bits of the largest finite magnitude
    void (*vector_peaks)(const Quantization&, const Part&, void* memory);
    void (*quantize)(const Quantization&, const Part&, void* memory);
    void (*multiply)(const MatrixVector&, int64_t first, int64_t end);  // a part of the sums
    void (*round)(const void* from, bool is_wide, float* to, int64_t count, int format);
    void (*sum_line)(const lp_lines&, const Line&);
    void (*dot_rows)(const lp_lines&, const float* y, const float* x, float* out);
    float (*weigh)(const ScoreRow&);  // scores become weights; returns the factor of those before
    void (*differentiate)(const ScoreRow&, float* gradients, float logarithm, float shift);
    void (*measure)(const Run&, const float* signs, float sign, double* sketch, double (&sums)[3]);
};

const Lanewise* lanewise();  // of this processor; null if there is none

// False if this processor has no unit.
bool multiply_vector(const MatrixVector&, int threads);
// Rounds `rows` rows of contiguous numbers, `ld` apart, to such a format, into rows without gaps.
bool round_rows(const void* from, bool is_wide, float* to, int64_t rows, int64_t columns, int64_t ld, int format,
                int threads);

}  // namespace lp
