// What api.cpp and the units exchange: one product of two matrices with its addresses, and the functions of a unit.
#pragma once
#include "common.hpp"

namespace lp {

// An operand as lanes (rows of a, columns of b) along k.
struct Source {
    const char* at;
    int64_t lane, k;                          // strides in elements; of codes `lane` is in bytes
    const int64_t *lane_offsets, *k_offsets;  // in elements (of codes in bytes); null: multiples of the strides
    int64_t lanes, steps;                     // extents: rows of a or columns of b; numbers of k
    const uint8_t *scales, *zeros;            // of codes; of stored ones they follow the codes of a strip
    int64_t scale_lane, block;                // bytes between the scales of lanes; numbers with a common scale
    bool is_stored;                           // codes in the order of codes.hpp
    float* factors;  // two per lane, lanes + 64 apart: their product scales the lane; null: none
    int32_t type, format, parts, part_exponent, sums_parts;
    int64_t next;  // bytes to the operand of the product after this, which is prefetched; 0: none

    int all_parts() const { return parts > 1 ? parts + sums_parts : 1; }
    int64_t lane_offset(int64_t i) const { return lane_offsets ? lane_offsets[i] : i * lane; }
    int64_t k_offset(int64_t i) const { return k_offsets ? k_offsets[i] : i * k; }
};

// A matrix that is read or written by elements: out, c, bias. `at` is null where there is none.
struct Target {
    char* at;
    int64_t row, col;  // strides in elements
    const int64_t* row_offsets;
    int32_t type;

    int64_t offset(int64_t i, int64_t j) const { return (row_offsets ? row_offsets[i] : i * row) + j * col; }
};

// A product of a slot of a and a slot of b; its sums times the factor are added to a plane (0 real, 1 imaginary part).
struct Term {
    int16_t a, b;
    int8_t plane;
    bool adds;  // false for the first of its plane
    float factor;
};

// The scales of the pieces of k: a sum over a piece becomes sum * (row scale * column scale) * alpha, and the pieces are
// added in ascending order. Scales are null for 1; steps are from one piece to the next.
struct Pieces {
    int64_t length;  // of k, a multiple of 128 that units sum at once; 0: no pieces
    const float *rows, *columns;
    int64_t row_step, column_step;
    float alpha;
};

struct Work {
    int64_t m, n, k;
    Pieces pieces;
    Source a, b;
    const uint32_t* packed_b;  // null: b is read through its source
    Target out, c, bias;
    const float *row_scales, *col_scales;  // of this product; null: none
    float alpha[2], beta[2];
    int32_t activation, threads;
    int32_t term_count, planes;
    Term terms[36 * 4];
    bool scales_a, scales_b;
    bool checks;  // report sums that are Inf or NaN
    bool streams;  // the result is large: write it past the caches
    bool is_transposed;
    Memory memory;
};

const int NOT_FINITE = 100;  // a status, if `checks`

// What units of vectors share: any number of rows, and nothing to begin.
struct Vectors {
    static constexpr bool IS_TILED = false, BLOCKS = false;
    static void begin() {}
    static void end() {}
};

struct Unit {
    int32_t (*gemm)(Work&);
    int64_t (*pack)(Work&,
                    void* target);  // -> bytes, which are all that is computed if target is null; -1: unsupported
    void (*epilogue)(const Work&, const float* sums);  // sums: m x n, complex numbers as pairs
};

// A product, or the packed b, of operands as they are stored: lp_gemm and lp_pack after the rounding to narrow formats.
// With pieces the scales of the call are those of the first one; `alpha_of_pieces` is a factor of each.
int32_t gemm(const lp_product&, const lp_call&, int64_t piece = 0, double alpha_of_pieces = 1);
int64_t pack(const lp_product&, const lp_call&, void* to);
// The epilogue of real products alone, on their sums, m x n each; -> lp_status.
int32_t apply_epilogue(const lp_product&, const lp_call&, const float* sums);

}  // namespace lp
