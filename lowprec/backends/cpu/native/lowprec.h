// The C interface of the CPU's kernels: plain structs, no exceptions, nothing of Python.
//
// A product is described once, with its plan, by an lp_product without addresses; lp_gemm executes it with the
// addresses of a call. Strides are in elements (complex64: complex elements; codes: bytes) and may be 0 or negative.
// The Python side of these declarations is lowprec/backends/cpu/library.py; both change together.
#pragma once
#include <stdint.h>

#if defined(_WIN32)
#define LP_API extern "C" __declspec(dllexport)
#else
#define LP_API extern "C" __attribute__((visibility("default")))
#endif

// clang-format off
// Element types. From LP_MXFP8 on they are codes with a scale per block along k, which b may have: `data` is uint8,
// contiguous along k (two 4-bit codes a byte, the first in the low half), `col` the bytes between columns. Blocks of
// the next four have any length and float32 scales, those of LP_CODES_U4 also the code of zero; FP32 units decode them.
// If a has codes, too (LP_MXFP4, LP_NVFP4, or LP_CODES_I8, by codes of 8 bits without -128), int8 units multiply both
// as integers. The last two are what FP32 units make of a packed b of LP_BF16 or LP_F16, without scales; no operand
// of a call has them.
enum lp_type {
    LP_F32, LP_BF16, LP_F16, LP_E4M3, LP_E5M2, LP_I8, LP_I32, LP_C64, LP_MXFP8, LP_MXFP4, LP_NVFP4,
    LP_CODES_E4M3, LP_CODES_I8, LP_CODES_I4, LP_CODES_U4,
    LP_CODES_BF16, LP_CODES_F16, LP_TYPES
};

// Formats to which each part of an operand is rounded, to nearest even (TF32: ties away from zero).
enum lp_format { LP_EXACT, LP_TO_TF32, LP_TO_BF16, LP_TO_F16, LP_FORMATS };

// Units, by what they multiply and the instruction set; lp_units() has a bit for each that this CPU has.
enum lp_unit {
    LP_FP32_AVX2, LP_INT8_AVX2, LP_INT8_AVXVNNI,
    LP_FP32_AVX512, LP_BF16_AVX512, LP_INT8_AVX512,
    LP_BF16_AMX, LP_INT8_AMX,
    LP_FP32_NEON, LP_BF16_NEON, LP_INT8_NEON,
    LP_UNITS
};

enum lp_status {
    LP_OK = 0,
    LP_UNSUPPORTED = 1,  // no unit, type, format or shape of this kind; nothing was written
    LP_NO_MEMORY = 2,    // nothing was written
    LP_NOT_FINITE = 3,   // b is packed and a sum of split operands is Inf or NaN: call again with b as it is stored
};

typedef struct {
    int64_t row, col;              // strides
    const int64_t* row_offsets;    // offsets of the rows (of b: of the columns); null: multiples of the stride
    const int64_t* inner_offsets;  // of a and b: offsets along k; null: multiples of the stride
    const int64_t* batch_offsets;  // offsets of the products' matrices; null: the same matrix for all
    int64_t scale_col, block;      // of codes: bytes between the scales of columns; numbers with a common scale
    int32_t type;                  // lp_type
    int32_t packed;                // b: the memory was written by lp_pack, matrix after matrix; strides are ignored
} lp_matrix;

// How operands are rounded, split into parts and multiplied: the rows of the mode table. Part i is the rounded rest
// times 2^(i * part_exponent). The products of parts are summed one after the other, each times its factor.
typedef struct {
    int32_t format;            // lp_format of the rounded operands
    int32_t parts_a, parts_b;  // 0: the operand is multiplied as it is stored
    int32_t part_exponent;
    int32_t sums_parts;        // a further part is the rounded sum of the parts
    int32_t scaled;            // rows of a and columns of b are scaled by powers of two before they are rounded
    int32_t pair_count;
    int32_t pair_a[9], pair_b[9];
    float factor[9];
} lp_scheme;

// Formats of rounded elements, and how their scales are found: one float32 a tensor or a vector along k, or a block's
// power of two (OCP's rule, rounded up, or of the rounded peak), E4M3 number (with a float32 of the tensor) or float32
// number.
enum lp_elements { LP_NARROW_E4M3, LP_NARROW_E5M2, LP_NARROW_E2M1, LP_NARROW_I8, LP_NARROW_I4 };  // I4: codes alone
enum lp_scaling { LP_TENSOR, LP_VECTORS, LP_FLOOR, LP_RCEIL, LP_E4M3_SCALES, LP_F32_SCALES, LP_EVEN };

// A batch of matrices of `vectors` vectors along k. Strides are in elements.
typedef struct {
    int64_t batches, vectors, k;
    int64_t vector, inner;                // strides of the source
    int64_t to_vector, to_inner;          // of the rounded numbers, one of which is 1; of codes to_inner is 1
    const int64_t *offsets, *to_offsets;  // of the batch's matrices; null: one matrix
    int64_t scale_batch, scale_vector, scale_inner;  // strides of scales: of vectors, or of blocks
    int64_t block_vectors, block_k;       // the elements with a common scale; 1 or a power of two from 16 to 128
    uint64_t seed, stream;                // of Philox4x32-10: its key, and half of its counter
    int32_t type, elements, scaling;      // float32, bfloat16 or float16; lp_elements; lp_scaling
    int32_t stochastic, hadamard;         // rounding; whether groups of 16 along k are transformed first
    int32_t codes;                        // write codes, padded to whole blocks, and codes of scales, not numbers
    int32_t powers, pad;                  // whether float32 scales are rounded up to powers of two
} lp_quantizer;

typedef struct {
    int64_t m, n, k, batches;
    lp_matrix a, b, out, c, bias;  // c.type and bias.type are -1 where there is none; bias has a stride `col`
    lp_scheme scheme;
    int32_t unit, activation;      // lp_unit; lp_activation of epilogue.hpp
    lp_quantizer rounding[2];      // of a and b, which are described as they are after it; batches is 0: none
    const int64_t* scale_order[2]; // of float32 scales: the vector of each row of a or column of b; null: in order
    int64_t piece;                 // length of the parts of k that have scales of their own; 0: all of k
    int32_t last_unit, pad;        // lp_unit of a shorter last piece
} lp_product;

// The addresses and numbers of one call.
typedef struct {
    const void *a, *b;
    const void *a_scales, *b_scales, *b_zeros;  // of codes; null float32 scales are 1, zeros are bytes
    void* out;
    const void *c, *bias;
    const float *row_scales, *col_scales;  // factors of rows and columns of real sums; null: none. One a row of every
                                           // matrix of a, and a column of every matrix of b, in the order of the batch
    double alpha[2], beta[2];  // real and imaginary part
    int32_t threads;
    uint64_t draw;             // of stochastic rounding: operand i has the stream 2 * draw + i
} lp_call;

LP_API uint64_t lp_version(void);  // hash of the sources
LP_API int64_t lp_units(void);     // bits of the units that this CPU has, and that may be used
LP_API void lp_use_units(int64_t);  // bits of the units that may be used, of all functions; at first all

// out = activation(alpha * a @ b + beta * c + bias); -> lp_status. out may be c, but overlap nothing else. With scales
// a sum becomes sum * (row scale * column scale), rounded twice in float32; sums of int8 are first rounded to float32.
LP_API int32_t lp_gemm(const lp_product*, const lp_call*);

// Packs b, with the scales and zeros and the threads of a call, for products of this kind: all matrices of its batch,
// 64-byte aligned; codes are reordered only. Returns the bytes, which are all that is computed if target is null; -1 if
// unsupported, or if there is no memory to round b.
LP_API int64_t lp_pack(const lp_product*, const lp_call*, void* target);

// Multiplies `count` arrays by inverse, bfloat16 in float32; returns 1 if any has Inf or NaN, -1 without a unit.
// Types are 0 (float32), 1 (bfloat16) and 100 (float64). `from` and `to` are equal or do not overlap; both may be
// unaligned.
typedef struct { const void* from; void* to; int64_t size; int32_t type; int32_t pad; } lp_flat;
LP_API int32_t lp_unscale(const lp_flat* arrays, int64_t count, double inverse, int32_t threads);

// c += a @ b by the arithmetic of tensor cores, bit by bit; a (m, k), b (k, n), c (m, n), float32, row-major; numbers
// of a and b have at most 12 significant bits. Groups have at most 128 products, and terms 25 fraction bits. ->
// lp_status result_bits: fraction bits of sums, toward zero. adds_after: c is added, to nearest, to the sum of the
// products alone.
typedef struct { int32_t group, fraction_bits, least_exponent, emin, result_bits, adds_after; } lp_tensor_core_model;
// `scales_a` (m x groups) and `scales_b` (groups x n) are exponents of the scales of a group, or null.
LP_API int32_t lp_emulate(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                          const int32_t* scales_a, const int32_t* scales_b, const lp_tensor_core_model*,
                          int32_t threads);

// Rounds x to narrow numbers: bfloat16 with the scales of their blocks but without float32 scales, or int8, or codes.
// `scales` has the float32 scales of vectors or blocks, or the codes of blocks (if `codes`); -> lp_status and *scale.
LP_API int32_t lp_quantize(const lp_quantizer*, const void* x, void* to, void* scales, float* scale, int32_t threads);

// Lines of float32 numbers. A line of a sum is that of its terms, lines of x times factors: one factor for a line, or a
// line of factors if `across`. x has `x_step` numbers between columns, and at least 15 columns more.
typedef struct {
    int64_t lines, width, terms, dots, x_step;
    const int64_t *out_lines, *x_lines, *w_lines, *bias_lines;  // offsets of the lines
    const int64_t *x_terms, *w_terms;                           // offsets of the terms
    int32_t across, pad;
} lp_lines;

// out[line] = bias + the sum over terms of x[line + term] * w[line + term]; bias may be null. -> lp_status
LP_API int32_t lp_sum_lines(const lp_lines*, const float* x, const float* w, const float* bias, float* out,
                            int32_t threads);
// out[dot, term] = the sum over lines of x[dot + line + term] . y[dot + line]. Here the lines of y have `out_lines`, the
// dots of y `w_lines`, those of x `bias_lines`. -> lp_status
LP_API int32_t lp_dot_lines(const lp_lines*, const float* x, const float* y, float* out, int32_t threads);

// Attention: the softmax of scale * q @ k^T + mask, by v. A matrix of each image and head; heads of k and v have
// `groups` heads of queries each. Numbers are float32.
typedef struct {
    void* at;                            // null: there is no mask, or no gradients are computed
    int64_t image, head, token, column;  // strides; columns of the mask, which are keys, are contiguous
} lp_heads;
typedef struct {
    lp_heads q, k, v, mask, out;
    // Gradients: of_q is written, the others are added to. `out` has the gradient of the result, `largest` the logarithms
    // of the sums of the exponentials, `sums` the dot products of result and gradient.
    lp_heads of_q, of_k, of_v;
    float *largest, *sums;  // of each query: its largest score, the sum of the exponentials relative to it. In order of
                            // images, queries and heads
    const int64_t* ranges;  // of each block: image, first query, end of the queries, first key, end of the keys
    const int64_t* first_blocks;  // of each task, and the end of the last; of gradients tasks are images
    int64_t tasks, heads, groups, queries, width;
    int64_t chunk;  // keys whose products are one sum
    float scale;
    int32_t is_causal;   // query i attends to the keys up to i
    lp_product product;  // the unit and scheme of all products, and the types of their operands
    int32_t threads, pad;
} lp_attention;
LP_API int32_t lp_attend(const lp_attention*);  // -> lp_status

// How the BLAS calls of a process are computed (blas.cpp). A mode: its unit is -1 for types on which it does not act.
typedef struct {
    char name[24];
    lp_scheme scheme[2];  // of real and of complex products
    int32_t unit[2];      // lp_unit
    int32_t unit_of_few;  // for products of few numbers and of vectors: one that needs no preparation
    int32_t quantises;    // whether operands of real products are rounded as `rounding` has it, without sizes
    int32_t is_native;    // it acts on float64 and complex128, whose products the BLAS computes
    int32_t piece;        // of k, and the lp_unit of a shorter last one, as in lp_product
    int32_t last_unit, pad;
    int64_t most_k;       // longest k of a product of real operands
    lp_quantizer rounding[2];
} lp_blas_mode;

// Rules: the mode of each routine, of the products inside LAPACK and others, by its number in `modes`; -1: none.
enum { LP_BLAS_RULES = 16, LP_BLAS_MODES = 6 };
typedef struct {
    uint64_t version;  // lp_version of the library for which it was made. LOWPREC_BLAS has the bytes of all this
    int32_t casts;     // whether modes act on float64 and complex128, which are rounded once
    int32_t threads;
    int64_t units;  // for lp_use_units, in a program without Python
    int32_t rules[LP_BLAS_RULES];
    lp_blas_mode modes[LP_BLAS_MODES];
} lp_blas;

// Products of one kind. m, n, k: extents, 0 where those of several shapes are summed.
typedef struct {
    int64_t calls, multiplications, m, n, k;
    int32_t routine, reason, mode;  // numbers of a name in lp_blas_name, a reason of blas.hpp, and in `modes`; -1: FP32
    char letter;                    // of the type: s, d, c or z; in loops of NumPy its letter
    char caller[91];                // the Python function at the first call, if it is known; "...": others call, too
} lp_blas_count;

// Sums of some products of one place of a program, for comparisons of two runs.
#define LP_SUMS 1021  // numbers of a sketch. A prime: those of a row, and those of a column, belong to different sums
typedef struct lp_observed {
    struct lp_observed* next;
    int64_t calls, multiplications;
    int64_t begin, end;  // numbers of the first product in the run, and of that after the last one
    double square, error, reference;  // sums of squares: of the results, of their errors, and of the reference's results
    int64_t fault_at;                 // number of the first product with a fault; -1: none
    float* sampled;                   // vectors of both factors of the first product; null: none
    int32_t is_compared;              // with the reference
    int32_t fault, fault_of_a, fault_of_b, fault_again;  // of that product. 1: a NaN, 2: Inf, 3: both
    int32_t vectors[2], length[2];                       // of `sampled`
    int32_t pad;
    double sketch[LP_SUMS];  // sums of all numbers of the results, with random signs
} lp_observed;

LP_API void* lp_site_create(void);  // null if there is no memory
LP_API void lp_site_free(void* site);
// Adds a product of contiguous float32 or float64; `again`, that of the reference, may be null. `index` is its number
// in the run; -1: that at the site. -> 1 if it is the first one of a record, plus 2 for the first fault of the record.
LP_API int32_t lp_site_add(void* site, const void* numbers, const void* again, int64_t count, int32_t is_wide,
                           int64_t multiplications, int64_t index);
LP_API lp_observed* lp_site_take(void* site);  // since the last call; lp_free_observed frees them
LP_API void lp_free_observed(lp_observed*);
typedef struct {
    const void* at;
    int64_t count;
    int32_t is_wide;  // whether they are float64
    int32_t pad;
} lp_numbers;
// Adds a product: the result, that of the reference (the same if it is not compared) and both factors. `words`, or null,
// describe vectors along k of each factor: their number and length, the numbers of axes across and along k, and the
// extent and stride of each axis.
LP_API void lp_site_observe(void* site, const lp_numbers* x, int64_t multiplications, int32_t is_compared,
                            const int64_t* words);
LP_API void* lp_jax_observe(void* frame);  // a handler in XLA's interface for foreign functions

// Observed products of a Python function and routine.
typedef struct {
    lp_observed* first;
    int32_t routine, reason, mode;  // as in lp_blas_count
    char letter;
    char caller[103];  // the function and its line, if it is known
    int32_t pad[2];
} lp_blas_site;
// The place of an observed product, and the extents of its result.
typedef struct {
    int32_t site, m, n;
} lp_blas_step;

// A scope applies to the thread that enters it and to those that it starts, or to all threads without one.
LP_API void* lp_blas_create(const lp_blas*);                          // null if there is no memory
LP_API int32_t lp_blas_enter(void* scope, int32_t all_threads);       // -> lp_status
LP_API void lp_blas_leave(void* scope);                               // in any thread
LP_API void lp_blas_free(void* scope);                                // when the calls of its threads have ended
LP_API void* lp_blas_scope(void);                                     // the innermost one of this thread
LP_API int64_t lp_blas_counts(void* scope, lp_blas_count*);           // moves at most 640; null: of other threads
typedef struct {
    int32_t records;    // whether products are recorded
    int32_t compares;   // whether they are computed again, but for those in the mode `reference`
    int32_t reference;  // number of a mode; -1: none
    char alone[128];    // "caller (routine)": the only one that is not in the mode `reference`; empty: all are not
} lp_blas_observation;
LP_API int32_t lp_blas_observe(void* scope, const lp_blas_observation*);  // before it is entered. -> lp_status
LP_API int64_t lp_blas_sites(void* scope, lp_blas_site* to);  // moves the records of at most 1024; -> number of sites
// Moves the order of at most `most` products since the last call; -> their number.
LP_API int64_t lp_blas_order(void* scope, lp_blas_step* to, int64_t most);
LP_API const char* lp_blas_name(int32_t routine);                     // null: there is none of this number
LP_API void lp_blas_install(int32_t is_on);                           // whether calls of the BLAS reach the scopes
// Sets our loop, or the original one, for a type (its letter and number) of NumPy's matmul, matvec, vecmat or vecdot by
// PyUFunc_ReplaceLoopBySignature.
LP_API int32_t lp_blas_set_loop(int32_t slot, void* function, const char* name, char letter, int32_t number,
                                void* replace, int32_t is_on);
LP_API int32_t lp_blas_pass(int32_t depth);                           // 1: calls of this thread pass; -> before

LP_API void lp_use_openmp(void* gomp_parallel, void* omp_in_parallel);  // both null: own threads
LP_API void lp_release_memory(void);                                    // returns unused temporary memory
LP_API int64_t lp_kept_bytes(void);                                     // unused temporary memory
LP_API void lp_run(void (*work)(void*, int), void* argument, int threads);  // for tests
