// Products of few rows of a: b is read where it is, rounded and paired in registers, if its lanes are
// contiguous, else packed into the cache, a block of k at a time. The sums are those of the packed kernels: sequential
// over each part of k, then part by part. A unit U adds FEW, the rows that are multiplied at once; 0 for none.
//
// Numbers that are rounded to float16 where they are need no scaling if their lane is WITHIN; else the columns are computed
// again with scales. The bits are the same: a number within 28 binades of the largest is a normal float16.

const int PANEL = -1;  // in the place of a type: packed dwords

// The largest magnitude of a lane, and the least but zero, less 1.
struct Extrema {
    u32v largest, least;
    u32v rounded(u32v x) {
        const u32v magnitude = x & 0x7fffffffu, less = magnitude - 1;
        largest = (u32v)larger((i32v)largest, (i32v)magnitude), least = least < less ? least : less;
        return (x + 0xfffu + (x >> 13 & 1)) & ~0x1fffu;
    }
    // Whether these numbers, and their products with others within, need no scaling.
    bool within() const {
        const u32v binades = (largest >> 23) - ((least + 1) >> 23);
        return !any((u32v)(largest >= (187u << 23)) | (u32v)(least < (68u << 23)) | (u32v)((i32v)binades > 28));
    }
};

// Adds `dwords` of k to ROWS rows of sums, ldy apart, for `lanes` lanes (a multiple of W): from zero unless `adds`.
// a: rows lda dwords apart. b: the first of the rows of lanes, `ldb` bytes apart; a panel has one per dword of k.
template <class U, int ROWS, int TYPE, int FORMAT>
static void few_rows(const Source& s, const uint32_t* a, int64_t lda, const char* b, int64_t ldb, int dwords, uint32_t* y, int64_t ldy, int64_t lanes, bool adds, Extrema* extrema) {
    typedef typename U::Acc Acc;
    constexpr int P = per_dword(U::ELEMENT), SIZE = TYPE == PANEL ? 4 : bits_of(TYPE) / 8;
    constexpr bool FINDS = TYPE == LP_F32 && FORMAT == LP_TO_F16, TWO_OF_PAIRS = P == 2 && TYPE == LP_F32 && ROWS == 2;
    // Bytes from a number to the one that is prefetched. Where loads wait behind long conversions, long lanes are prefetched
    // into the L2 cache before.
    constexpr int64_t TWICE_FROM = (P == 2 && ROWS > 2) || (FINDS && ROWS == 1) ? 4096 : (TWO_OF_PAIRS ? 16384 : INT64_MAX);
    const bool twice = lanes * SIZE >= TWICE_FROM;
    const int64_t near = twice ? 256 : (ROWS <= 2 ? 2048 : 768), far = 1024;
    auto columns = [&](int64_t at, auto count) __attribute__((always_inline)) {
        constexpr int V = decltype(count)::value;
        // At the end of the lanes follows the beginning of the next dword's.
        [[maybe_unused]] auto ahead = [&](int64_t bytes) { return (at * SIZE + bytes < lanes * SIZE ? 0 : order<U::ELEMENT>(1, 0) * ldb - lanes * SIZE) + bytes; };
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
                UNROLLED(v, V) acc[i][v] = U::ELEMENT == E_U8 ? U::dot(acc[i][v], row[v], dword) : U::dot(acc[i][v], dword, row[v]);
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

// The same for lanes that are contiguous along k, `ldb` bytes apart, and whole blocks: squares are transposed in registers.
template <class U, int ROWS, int TYPE, int FORMAT>
static void few_rows_along_k(const Source& s, const uint32_t* a, int64_t lda, const char* b, int64_t ldb, int dwords, uint32_t* y, int64_t ldy, int64_t lanes, bool adds, Extrema* extrema) {
    typedef typename U::Acc Acc;
    constexpr int P = per_dword(U::ELEMENT), PER = 32 / bits_of(TYPE), RUN = W * 4 / PER, GROUPS = RUN / 16, AHEAD = 512;
    constexpr bool FINDS = TYPE == LP_F32 && FORMAT == LP_TO_F16;
    const int64_t end = (int64_t)dwords * P * 4 / PER;
    for (int64_t at = 0; at < lanes; at += W, b += W * ldb) {
        Acc acc[ROWS];
        Extrema found = FINDS ? extrema[at / W] : Extrema{u32v{}, u32v{}};
        UNROLLED(i, ROWS) acc[i] = adds ? get<Acc>(y + i * ldy + at) : Acc{};
        const char* following = at + W < lanes ? b + W * ldb : b - at * ldb + end;  // the next lanes, or more of the first
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
template <class U, int ROWS>
static void int8_rows_along_k(const Source&, const uint32_t* a, int64_t lda, const char* b, int64_t ldb, int dwords, uint32_t* y, int64_t ldy, int64_t lanes, bool adds, Extrema*) {
    typedef typename U::Acc Acc;
    constexpr int SOME = ROWS <= 2 ? 4 : 2;  // lanes at once
    for (int64_t at = 0; at < lanes; at += SOME, b += SOME * ldb) {
        Acc acc[ROWS][SOME] = {};
        for (int d = 0; d < dwords; d += W) {
            const char* next = b + (d + 512 < dwords ? 4 * d + 2048 : 4 * (d - dwords) + 2048 + SOME * ldb);
            UNROLLED(q, SOME) {
                __builtin_prefetch(next + q * ldb);
                const u32v x = get<u32v>(b + q * ldb + 4 * d);
                UNROLLED(i, ROWS) {
                    const u32v of_a = get<u32v>(a + i * lda + d);
                    acc[i][q] = U::ELEMENT == E_U8 ? U::dot(acc[i][q], x ^ 0x80808080u, of_a) : U::dot(acc[i][q], of_a, x);
                }
            }
        }
        UNROLLED(i, ROWS)
            UNROLLED(q, SOME) {
                uint32_t* to = y + i * ldy + at + q;
                *to = (adds ? *to : 0) + over_lanes(acc[i][q], [](Acc v, Acc w) { return plus(v, w); }, std::make_integer_sequence<int, W>())[0];
            }
    }
}

// Calls f with the type and format of b as constants, if they are among those that fill most of a model's memory.
template <int ELEMENT, class F> INLINE void with_type(const Source& b, F f) {
    auto check = [&](auto type, auto format) {
        if constexpr (can_pack(ELEMENT, type, format))
            if (b.type == type && b.format == format) f(type, format);
    };
    Int<LP_EXACT> exact;
    check(Int<LP_F32>(), exact), check(Int<LP_F32>(), Int<LP_TO_TF32>()), check(Int<LP_F32>(), Int<LP_TO_BF16>()), check(Int<LP_F32>(), Int<LP_TO_F16>());
    check(Int<LP_F16>(), exact), check(Int<LP_BF16>(), exact), check(Int<LP_E4M3>(), exact), check(Int<LP_E5M2>(), exact), check(Int<LP_I8>(), exact);
}

// The same for codes, whole blocks of the first lanes of s: some are decoded into the L1 cache at a time.
template <class U, int ROWS, int TYPE>
static void few_rows_of_codes(const Source& s, const uint32_t* a, int64_t lda, const char*, int64_t, int dwords, uint32_t* y, int64_t ldy, int64_t lanes, bool adds, Extrema*) {
    typedef Decoder<TYPE, U::ELEMENT> D;
    constexpr int V = 2 * per_dword(U::ELEMENT), STEP = D::BLOCKS * W;
    alignas(64) uint32_t panel[STEP * V * W];
    for (int64_t at = 0; at < lanes; at += V * W) {
        D columns[4] = {{s, at}, {s, at + W}, {s, at + 2 * W}, {s, at + 3 * W}};
        const int64_t width = lanes - at < V * W ? lanes - at : V * W;
        for (int d = 0; d < dwords; d += STEP) {
            const int count = dwords - d < STEP ? dwords - d : STEP;
            for (int v = 0; v < width / W; v++) columns[v].blocks(d / W, count / W, panel + v * W, V * W);
            few_rows<U, ROWS, PANEL, LP_EXACT>(s, a + d, lda, (const char*)panel, 4 * V * W, count, y + at, ldy, width, adds || d, nullptr);
        }
    }
}

template <class U> struct Few {
    typedef typename U::Acc Acc;
    typedef Gemm<U> G;
    typedef void Rows(const Source&, const uint32_t*, int64_t, const char*, int64_t, int, uint32_t*, int64_t, int64_t, bool, Extrema*);
    static constexpr int M = U::FEW ? U::FEW : 1, MOST = 2 * M, P = G::P, N = G::N;
    static constexpr int64_t SPAN_LANES = 64, SPAN = 8;  // lanes of b and blocks of k that are transposed at a time

    struct Job : G::Common {
        bool in_place, along_k;  // of b
        Rows *whole[2], *panels[2];  // for M rows, and for the last ones: where b is, and packed
        int64_t columns, span, rows, lda, ldy, size;  // span: packed blocks; rows: in memory
        explicit Job(lp::Work& work) : G::Common(work) {}
    };
    struct Thread {
        uint32_t *a, *sums, *part, *panel;
        Extrema* extrema;
        int32_t offsets[MOST];
    };

    static bool along_lanes(const lp::Work& p) { return p.b.lane == 1 && !p.b.lane_offsets && !is_coded(p.b.type); }
    static bool serves(const lp::Work& p) {
        if (p.packed_b || p.term_count > 1 || p.planes > 1) return false;
        return p.m <= (along_lanes(p) || P == 4 ? MOST : M) && ((p.b.k == 1 && !p.b.k_offsets) || along_lanes(p));
    }

    // Adds the products of all rows and the columns [first, first + lanes).
    static void add(Job& j, Thread& t, int64_t first, int64_t lanes, bool in_place) {
        const lp::Work& p = j.p;
        const int64_t padded = G::ceil(lanes, W) * W, in_lanes = in_place ? lanes / W * W : 0, m = p.m;
        auto multiply = [&](Rows* const* rows, const Source& b, const uint32_t* a, const char* at, int64_t ldb, int64_t dwords, uint32_t* y, int64_t width, bool adds) {
            for (int64_t i = 0; i < m; i += M) rows[m - i < M](b, a + i * j.lda, j.lda, at, ldb, (int)dwords, y + i * j.ldy, j.ldy, width, adds, t.extrema);
        };
        const int group = j.along_k || p.scales_b || (P < 4 && m * lanes > 4096) ? (int)j.span * W : (P == 2 && m > 2 ? 8 : 4) / P;
        for (int64_t block = 0, end; block < j.blocks; block = end) {
            const int64_t left = j.sum - block % j.sum, rest = p.k - block * W * P;
            end = G::least(block + G::least(left, j.span), j.along_k && rest >= W * P ? p.k / (W * P) : j.blocks);
            uint32_t* y = block < j.sum ? t.sums : t.part;
            const bool adds = left < j.sum;
            const int dwords = (int)((end - block - 1) * W + G::least(rest - (end - block - 1) * W * P, W));
            const int64_t whole = rest >= W * P || (P == 1 && !j.along_k) ? in_lanes : 0;
            Source b = p.b;  // of codes from here on
            if (is_coded(b.type)) {
                const int64_t step = block * W * P;
                b.at += first * b.lane + step * bits_of(b.type) / 8, b.scales += first * b.scale_lane + step / block_of(b.type);
                b.lanes -= first, b.steps -= step;
            }
            for (int d = 0; whole && d < dwords; d += group) {  // few rows of b at once, whose runs are long, if the sums fit the L1 cache
                const char* at = p.b.at + (first * p.b.lane + p.b.k_offset(block * W * P + order<U::ELEMENT>(d, 0))) * j.size;
                multiply(j.whole, b, t.a + block * W + d, at, (j.along_k ? p.b.lane : p.b.k) * j.size, G::least(group, dwords - d), y, whole, adds || d);
            }
            if (whole < lanes) {
                const int64_t width = whole ? W : j.columns, strip = (first + whole) / width;
                j.pack_b(p.b, Layout{false, width, width, width * W, 0}, strip, strip + 1, block, end, t.panel, 0);
                multiply(j.panels, p.b, t.a + block * W, (const char*)t.panel, 4 * width, dwords, y + whole, padded - whole, adds);
            }
            for (int i = 0; y == t.part && (end % j.sum == 0 || end == j.blocks) && i < m; i++)
                for (int64_t q = i * j.ldy; q < i * j.ldy + lanes; q += W) put(t.sums + q, plus(get<Acc>(t.sums + q), get<Acc>(t.part + q)));
        }
    }

    // The columns [first, first + lanes) of the result; `first` is a multiple of j.columns, panels of which are packed.
    static void task(Job& j, Thread& t, int64_t first, int64_t lanes) {
        const lp::Work& p = j.p;
        bool scales = p.scales_b;
        if (scales && j.in_place && lanes % W == 0) {
            for (int64_t q = 0; q < lanes / W; q++) t.extrema[q] = Extrema{u32v{}, ~u32v{}};
            add(j, t, first, lanes, true);
            scales = false;
            for (int64_t q = 0; q < lanes / W; q++) scales |= !t.extrema[q].within();
        }
        if constexpr (G::SCALES)
            for (int64_t at = first; scales && at < first + lanes; at += MOST_LANES) find_exponents(p.b, at, G::least(at + MOST_LANES, first + lanes), j.exponents_b);
        if (scales || !p.scales_b) add(j, t, first, lanes, j.in_place && !scales);
        const int32_t *e = p.scales_a ? j.exponents_a : nullptr, *f = scales ? j.exponents_b : nullptr;
        for (int64_t q = 0; q < lanes; q += N) G::finish(p, t.sums + q, j.ldy, 0, (int)p.m, first + q, (int)G::least(lanes - q, N), e, f, t.offsets, j.not_finite);
    }

    static void work(void* at, int thread) {
        Job& j = *(Job*)at;
        const lp::Work& p = j.p;
        Thread t{};
        t.a = j.memory + thread * j.memory_each, t.sums = t.a + j.rows * j.lda, t.part = t.sums + j.rows * j.ldy;
        t.panel = t.part + j.rows * j.ldy, t.extrema = (Extrema*)(t.panel + j.columns * j.span * W);
        j.pack_a(p.a, Layout{true, M, j.lda, W, 0}, 0, j.rows / M, 0, j.blocks, t.a, M * j.lda);
        for (int row = 0; U::ELEMENT == E_U8 && row < p.m; row++)
            for (int64_t q = 0; q < 4 * j.lda; q++) t.offsets[row] += 128 * ((const int8_t*)(t.a + row * j.lda))[q];
        for (int64_t i; (i = j.next_task.fetch_add(1)) < j.tasks;) task(j, t, i * j.columns, G::least(p.n - i * j.columns, j.columns));
    }

    template <int ROWS, int TYPE, int FORMAT> static Rows* rows_along(bool k) {
        if constexpr (is_coded(TYPE)) return few_rows_of_codes<U, ROWS, TYPE>;
        else if (!k) return few_rows<U, ROWS, TYPE, FORMAT>;
        else if constexpr (P == 4 && TYPE != PANEL) return int8_rows_along_k<U, ROWS>;
        else if constexpr (TYPE != PANEL && bits_of(TYPE) > 8 && W * bits_of(TYPE) >= 128) return few_rows_along_k<U, ROWS, TYPE, FORMAT>;
        return nullptr;
    }
    template <int TYPE, int FORMAT> static Rows* rows_for(int64_t m, bool along_k) {
        if (m <= 2) return m == 1 ? rows_along<1, TYPE, FORMAT>(along_k) : rows_along<2, TYPE, FORMAT>(along_k);
        return m <= 4 ? rows_along<4, TYPE, FORMAT>(along_k) : rows_along<M, TYPE, FORMAT>(along_k);
    }

    static Rows* in_place_for(const lp::Work& p, int64_t m) {
        const bool along_k = !along_lanes(p);
        Rows* rows = nullptr;  // more than two rows need the registers in which int8 is interleaved
        if (p.b.k_offsets || p.b.lane_offsets || (along_k ? p.scales_b && p.k % W : p.b.type == LP_I8 && p.m > 2)) return rows;
        auto find = [&](auto type, auto format) { rows = rows_for<type, format>(m, along_k); };
        auto find_codes = [&](auto type) {
            if constexpr (can_pack(U::ELEMENT, type, LP_EXACT))
                if (p.b.type == type) find(type, Int<LP_EXACT>());
        };
        with_type<U::ELEMENT>(p.b, find);
        find_codes(Int<LP_MXFP8>()), find_codes(Int<LP_MXFP4>()), find_codes(Int<LP_NVFP4>());
        return rows;
    }

    static int32_t gemm(lp::Work& p) {
        Job j(p);
        if (!j.pack_a || !j.pack_b) return LP_UNSUPPORTED;
        j.rows = G::ceil(p.m, M) * M;
        for (int i = 0; i < 2; i++) {
            const int64_t rows = i ? p.m - (j.rows - M) : M;
            j.whole[i] = in_place_for(p, rows), j.panels[i] = rows_for<PANEL, LP_EXACT>(rows, false);
        }
        j.in_place = j.whole[1], j.along_k = j.in_place && !along_lanes(p), j.size = bits_of(p.b.type) / 8;
        int64_t threads = p.m * p.n * p.k >= 1 << 17 ? p.threads : 1;
        // Lanes that are read along k are read from end to end.
        const int64_t unit = j.along_k && !is_coded(p.b.type) ? 16 : SPAN_LANES;
        int64_t most = along_lanes(p) ? 1024 : unit;
        j.span = along_lanes(p) ? 1 : SPAN;
        if (j.along_k) j.span = j.sum;
        else if (j.in_place) most = p.m <= 4 || P == 2 ? 4096 : 2048;
        const int64_t pieces = G::ceil(G::ceil(p.n, threads), most) * threads;  // equal shares of all threads
        j.columns = G::ceil(G::ceil(p.n, pieces), unit) * unit, j.tasks = G::ceil(p.n, j.columns);
        j.lda = j.blocks * W, j.ldy = j.columns + N;
        j.memory_each = G::ceil(j.rows * (j.lda + 2 * j.ldy) + j.columns * (j.span * W + 2), 1024) * 1024;
        threads = G::least(threads, j.tasks);
        if (!j.begin(0, (int)threads, false)) return LP_NO_MEMORY;
        lp::run(work, &j, (int)threads);
        return j.not_finite ? lp::NOT_FINITE : LP_OK;
    }
};
