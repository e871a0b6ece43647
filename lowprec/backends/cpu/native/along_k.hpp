// Few rows times lanes that are contiguous along k, ldb bytes apart, and whole blocks: squares are transposed in
// registers.

template <class U, int ROWS, int TYPE, int FORMAT> static void few_rows_along_k(const FewRows& f) {
    const char* b = f.at;
    const bool adds = f.adds;
    [[maybe_unused]] Extrema* const extrema = f.extrema;
    [[maybe_unused]] const Source& s = f.b;
    const uint32_t* const a = f.a;
    const int64_t lda = f.lda, ldb = f.ldb, ldy = f.ldy, lanes = f.lanes;
    const int dwords = f.dwords;
    uint32_t* const y = f.y;
    typedef typename U::Acc Acc;
    constexpr int P = per_dword(U::ELEMENT), PER = 32 / bits_of(TYPE), RUN = W * 4 / PER, GROUPS = RUN / 16,
                  AHEAD = 512;
    constexpr bool FINDS = TYPE == LP_F32 && FORMAT == LP_TO_F16;
    const int64_t end = (int64_t)dwords * P * 4 / PER;
    for (int64_t at = 0; at < lanes; at += W, b += W * ldb) {
        Acc acc[ROWS];
        Extrema found = FINDS ? extrema[at / W] : Extrema{u32v{}, u32v{}};
        UNROLLED(i, ROWS) acc[i] = adds ? get<Acc>(y + i * ldy + at) : Acc{};
        const char* following =
            at + W < lanes ? b + W * ldb : b - at * ldb + end;  // the next lanes, or more of the first
        for (int d = 0; d < dwords; d += W) {
            const int64_t first = (int64_t)d * P * 4 / PER, ahead = first + AHEAD;
            const char *from = b + first, *next = ahead < end ? b + ahead : following + ahead - end;
            u32v rows[W];
            UNROLLED(i, W)
                UNROLLED_BY(line, P * RUN, 64) __builtin_prefetch(next + line + i * ldb, 0, 2);
            UNROLLED(i, RUN / 4) {  // rows of memory one after the other: those far apart share few places of a cache
                u32v raw[P];
                UNROLLED(p, P) raw[p] = blocks_at<u32v>(from + p * RUN + i % GROUPS * 16 + i / GROUPS * ldb, 4 * ldb);
                UNROLLED(half, PER) {
                    u32v& row = rows[(i % GROUPS * PER + half) * 4 + i / GROUPS];
                    f32v x[P];
                    UNROLLED(p, P) x[p] = number<TYPE>(raw[p], half);
                    if (FINDS) row = raw[0];
                    else emit_parts<FORMAT, U::ELEMENT, false>(x, s, &row);
                }
            }
            transpose_blocks(rows);
            UNROLLED(j, W) {
                u32v row = rows[j / (4 * PER) * 4 * PER + j % PER * 4 + j / PER % 4];
                if (FINDS) row = found.rounded(row);
                UNROLLED(i, ROWS) acc[i] = U::dot(acc[i], all(a[i * lda + d + j]), row);
            }
        }
        UNROLLED(i, ROWS) put(y + i * ldy + at, acc[i]);
        if (FINDS) extrema[at / W] = found;
    }
}

// The same for int8, whose sums are exact in any order: each number of a vector of sums has a part of k.
template <class U, int ROWS> static void int8_rows_along_k(const FewRows& f) {
    const char* b = f.at;
    const bool adds = f.adds;
    const uint32_t* const a = f.a;
    const int64_t lda = f.lda, ldb = f.ldb, ldy = f.ldy, lanes = f.lanes;
    const int dwords = f.dwords;
    uint32_t* const y = f.y;
    typedef typename U::Acc Acc;
    constexpr int SOME = ROWS <= 2 ? 4 : 2, P = per_dword(U::ELEMENT);  // lanes at once
    for (int64_t at = 0; at < lanes; at += SOME, b += SOME * ldb) {
        Acc acc[ROWS][SOME] = {};
        for (int d = 0; d < dwords; d += W) {
            const char* next = b + (P * (d - dwords) + 2048 < 0 ? P * d + 2048 : P * (d - dwords) + 2048 + SOME * ldb);
            UNROLLED(q, SOME) {
                __builtin_prefetch(next + q * ldb);
                const u32v x = int8_along_k<P>(b + q * ldb + P * d);
                UNROLLED(i, ROWS) {
                    const u32v of_a = get<u32v>(a + i * lda + d);
                    acc[i][q] =
                        U::ELEMENT == E_U8 ? U::dot(acc[i][q], x ^ 0x80808080u, of_a) : U::dot(acc[i][q], of_a, x);
                }
            }
        }
        UNROLLED(i, ROWS)
            UNROLLED(q, SOME) {
                uint32_t* to = y + i * ldy + at + q;
                *to = (adds ? *to : 0) +
                    over_lanes(
                          acc[i][q], [](Acc v, Acc w) { return plus(v, w); }, std::make_integer_sequence<int, W>())[0];
            }
    }
}
