// Kernels for few rows of a: b is read where its lanes are contiguous, rounded and paired in registers, or from a
// panel.
//
// Numbers that are rounded to float16 where they are need no scaling if their lane is WITHIN; else the columns are
// computed again with scales. The bits are the same: a number within 28 binades of the largest is a normal float16.

const int PANEL = -1;  // in the place of a type: packed dwords

// The largest magnitude of a lane, and the least but zero, less 1.
struct Extrema {
    u32v largest, least;
    u32v rounded(u32v x) {
        const u32v magnitude = x & 0x7fffffffu, less = magnitude - 1;
        largest = (u32v)larger((i32v)largest, (i32v)magnitude);
        least = least < less ? least : less;
        return (x + 0xfffu + (x >> 13 & 1)) & ~0x1fffu;
    }
    // Whether these numbers, and their products with others within, need no scaling.
    bool within() const {
        const u32v binades = (largest >> 23) - ((least + 1) >> 23);
        return !any((u32v)(largest >= (187u << 23)) | (u32v)(least < (68u << 23)) | (u32v)((i32v)binades > 28));
    }
};

// The arguments of kernels for few rows: they add `dwords` of k to rows of sums, from zero unless `adds`.
struct FewRows {
    const Source& b;
    int64_t lane, step;  // the first column and number of k
    const uint32_t* a;   // rows, lda dwords apart
    int64_t lda;
    const char* at;  // the first of the rows of lanes, `ldb` bytes apart; a panel has one per dword of k
    int64_t ldb;
    uint32_t* y;  // rows of sums, ldy dwords apart
    int64_t ldy;
    int64_t lanes;  // a multiple of W
    int dwords;
    bool adds;
    Extrema* extrema;
    uint32_t* kept;  // what is decoded, with a panel's layout; null: not kept
};

template <class U, int ROWS, int TYPE, int FORMAT> static void few_rows(const FewRows& f) {
    const char* const b = f.at;
    const bool adds = f.adds;
    [[maybe_unused]] Extrema* const extrema = f.extrema;
    [[maybe_unused]] const Source& s = f.b;
    const uint32_t* const a = f.a;
    const int64_t lda = f.lda, ldb = f.ldb, ldy = f.ldy, lanes = f.lanes;
    const int dwords = f.dwords;
    uint32_t* const y = f.y;
    typedef typename U::Acc Acc;
    constexpr int P = per_dword(U::ELEMENT), SIZE = TYPE == PANEL ? 4 : bits_of(TYPE) / 8;
    constexpr bool FINDS = TYPE == LP_F32 && FORMAT == LP_TO_F16, TWO_OF_PAIRS = P == 2 && TYPE == LP_F32 && ROWS == 2;
    // Bytes from a number to the one that is prefetched. Where loads wait behind long conversions, long lanes are
    // prefetched into the L2 cache before.
    constexpr int64_t TWICE_FROM =
        (P == 2 && ROWS > 2) || (FINDS && ROWS == 1) ? 4096 : (TWO_OF_PAIRS ? 16384 : INT64_MAX);
    const bool twice = lanes * SIZE >= TWICE_FROM;
    const int64_t near = twice ? 256 : (ROWS <= 2 ? 2048 : 768), far = 1024;
    auto columns = [&](int64_t at, auto count) __attribute__((always_inline)) {
        constexpr int V = decltype(count)::value;
        // At the end of the lanes follows the beginning of the next dword's.
        [[maybe_unused]] auto ahead = [&](int64_t bytes) {
            return (at * SIZE + bytes < lanes * SIZE ? 0 : order<U::ELEMENT>(1, 0) * ldb - lanes * SIZE) + bytes;
        };
        [[maybe_unused]] const int64_t ahead_near = ahead(near), ahead_far = ahead(far);
        Acc acc[ROWS][V];
        Extrema found[V];
        UNROLLED(i, ROWS)
            UNROLLED(v, V) acc[i][v] = adds ? get<Acc>(y + i * ldy + at + v * W) : Acc{};
        UNROLLED(v, V)
            if (FINDS) found[v] = extrema[at / W + v];
        _Pragma("GCC unroll 2") for (int d = 0; d < dwords; d++) {
            u32v row[V];
            UNROLLED(v, V) {
                const char* from = b + (at + v * W) * SIZE;
                if constexpr (TYPE == PANEL) {
                    row[v] = get<u32v>(from + d * ldb);
                } else {
                    const char* runs[P];
                    UNROLLED(p, P) runs[p] = from + order<U::ELEMENT>(d, p) * ldb;
                    if (v * W * SIZE % 64 == 0)
                        UNROLLED(p, P) {
                            __builtin_prefetch(runs[p] + ahead_near);
                            if (twice) __builtin_prefetch(runs[p] + ahead_far, 0, 2);
                        }
                    if constexpr (P == 4 && V % 4 == 0) {
                        if (v % 4 == 0) int8_dwords(runs, row + v);
                    } else if constexpr (FINDS) {
                        row[v] = found[v].rounded(get<u32v>(runs[0]));
                    } else {
                        pack_row<TYPE, FORMAT, U::ELEMENT, false>(runs, false, s, nullptr, 0, row + v);
                    }
                }
            }
            UNROLLED(v, V)
                if (U::ELEMENT == E_U8) row[v] ^= 0x80808080u;  // b + 128 times a, unlike in packed kernels
            UNROLLED(i, ROWS) {
                u32v dword = all(a[i * lda + d]);
                UNROLLED(v, V)
                    acc[i][v] =
                        U::ELEMENT == E_U8 ? U::dot(acc[i][v], row[v], dword) : U::dot(acc[i][v], dword, row[v]);
            }
        }
        UNROLLED(i, ROWS)
            UNROLLED(v, V) put(y + i * ldy + at + v * W, acc[i][v]);
        UNROLLED(v, V)
            if (FINDS) extrema[at / W + v] = found[v];
    };
    constexpr int FITTING = (W == 8 ? 14 : 30) / (ROWS + 1 + 2 * FINDS);
    constexpr int V = FITTING < 4 ? FITTING : (FITTING < 8 || TWO_OF_PAIRS ? 4 : 8);
    int64_t at = 0;
    for (; at + V * W <= lanes; at += V * W) columns(at, Int<V>());
    for (; V > 4 && at + 4 * W <= lanes; at += 4 * W) columns(at, Int<4>());
    for (; at < lanes; at += W) columns(at, Int<1>());
}
