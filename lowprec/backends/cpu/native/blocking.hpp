// Tuning numbers by the width of vectors, with the loops of BLIS that they bound.
//
// Loops from the outside: 5 (NC, columns), 4 (KC, along k), 3 (MC, rows), 2 (NR), 1 (MR), then the micro-kernel.
struct Blocking {
    int64_t mc_bytes;     // loop 3: the most of a in the L2 cache
    int64_t short_bytes;  // loop 3: up to here a is packed before b, of which each task packs its own columns
    // Products that are packed as a whole, without loops 5 to 3.
    int small_rows, small_vectors, small_dwords;  // at most: rows of a, vectors of columns, dwords of k
    int small_at_once;                            // rows in registers
};
constexpr Blocking AVX2{224 << 10, 96 << 10, 128, 16, 128, 6};   // tuned on a Xeon with AMX, by AVX2 alone
constexpr Blocking OTHERS{448 << 10, 448 << 10, 64, 4, 64, 8};  // tuned on Zen 5
constexpr Blocking BLOCKING = W == 8 ? AVX2 : OTHERS;

const int64_t NC_BYTES = 96 << 20;   // loop 5: the most of packed b
const int64_t LONG_BYTES = 4 << 20;  // loop 4: from here an operand with few rows or columns is packed by parts of k
const int64_t KC = 384;              // loop 4: the most dwords of a sum
const int64_t PAD = 48;              // loops 2 and 1: dwords between strips, which else share places of a cache

// Loop 5 of few rows: columns of a task that packs b, that reads it where it is, and with sums of at most four rows.
const int64_t FEW_PACKED = 1024, FEW_COLUMNS = 2048, FEW_WIDE = 4096;
// Rows of a up to which stored codes are decoded in registers, next to the product of the first rows; tuned on Zen 4.
constexpr int64_t stored_rows(int type) {
    if (W == 4) return 8;
    return W == 8 ? 256 : bits_of(type) == 16 ? 32 : 16;
}
const int64_t MOST_SUMS = 4096;  // loop 4 of few rows: sums in the L1 cache, which several short parts of k add to
