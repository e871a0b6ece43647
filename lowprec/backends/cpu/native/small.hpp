// Small products, most of them of a batch, without BLIS's loops 5 to 3: both operands are packed into kept memory, and
// the sums of ROWS rows (loop 1) and V vectors of columns (loop 2) computed in registers.
//
// The sums are those of the packed kernels. Where a run of numbers ends with its matrix, zeros follow it in a copy.

alignas(64) static const char ZEROS[4 * W] = {};

template <class U> struct Small {
    typedef typename U::Acc Acc;
    typedef Gemm<U> G;
    typedef bool Multiply(lp::Work&);
    static constexpr int P = G::P, MOST_ROWS = BLOCKING.small_rows, MOST_VECTORS = BLOCKING.small_vectors;
    static constexpr int MOST_DWORDS = BLOCKING.small_dwords, ROWS = BLOCKING.small_at_once;
    static constexpr int FEW = G::OFFSET ? 48 : 64;  // packed vectors up to which these are on the stack

    // Whether all numbers are within the same limits.
    INLINE bool within(const Extrema& x) {
        std::make_integer_sequence<int, W> lanes;
        auto larger_of = [](u32v v, u32v w) { return v > w ? v : w; };
        return Extrema{over_lanes(x.largest, larger_of, lanes), ~over_lanes(~x.least, larger_of, lanes)}.within();
    }

    // A run of `whole` bytes, of which `bytes` exist.
    INLINE const char* run(const char* from, int64_t bytes, int64_t whole, char* copy) {
        if (bytes >= whole) return from;
        if (bytes <= 0) return ZEROS;  // beyond the array may be no memory, which makes a masked load slow
        copy_some(copy, from, (int)bytes);
        return copy;
    }

    // Returns false, before it writes, if numbers that are rounded to float16 need scaling, or there is no memory.
    template <int TYPE, int FORMAT> static bool multiply(lp::Work& p) {
        constexpr int SIZE = bits_of(TYPE) / 8, RUN = W * SIZE, ALONG_K = RUN * (U::ELEMENT >= E_I16 ? P : 1);
        constexpr bool FINDS = FORMAT == LP_TO_F16;
        constexpr bool AS_STORED = U::ELEMENT == E_F32 && TYPE == LP_F32 && FORMAT == LP_EXACT;
        alignas(64) char copies[P][4 * W];
        const char* at[P];
        Acc begin[G::OFFSET ? MOST_VECTORS + 1 : 1] = {};
        Extrema extrema[2] = {{u32v{}, ~u32v{}}, {u32v{}, ~u32v{}}};
        auto pack = [&](const Source& s, bool of_a, u32v* to) __attribute__((always_inline)) {
            if constexpr (FINDS) *to = extrema[of_a].rounded(get<u32v>(at[0]));
            else pack_row<TYPE, FORMAT, U::ELEMENT, false>(at, of_a, s, nullptr, of_a ? G::LAYOUT_A.offset : 0, to);
        };
        const int m = (int)p.m, n = (int)p.n, k = (int)p.k, blocks = (k + P * W - 1) / (P * W);
        const int dwords = (blocks - 1) * W + (int)G::least(k - (blocks - 1) * P * W, W);
        const uint32_t *a = (const uint32_t*)p.a.at, *b = (const uint32_t*)p.b.at;
        int64_t lda = p.a.lane, ldb = p.b.k, vector = W;
        const bool plain = adds_nothing(p) && p.out.col == 1 && (G::FLOATS || p.out.type == LP_I32);
        const bool packs_a = !AS_STORED || p.a.lane_offsets, packs_b = !AS_STORED || n % W;
        u32v few[FEW], *packed_a = few;
        const int64_t vectors_a = packs_a ? m * blocks : 0, vectors_b = packs_b ? (n + W - 1) / W * dwords : 0;
        if (vectors_a + vectors_b > FEW) packed_a = (u32v*)p.memory.of(sizeof(u32v) * (vectors_a + vectors_b));
        if (!packed_a) return false;
        u32v* const packed_b = packed_a + vectors_a;
        if (packs_a) {
            a = (const uint32_t*)packed_a;
            lda = blocks * W;
            const bool is_one_run = k % (P * W) == 0 && p.a.lane == k && !p.a.lane_offsets;  // of all rows
            const int rows = is_one_run ? 1 : m, numbers = is_one_run ? m * k : k;
            u32v* to = packed_a;
            for (int i = 0; i < rows; i++) {
                const char* row = p.a.at + p.a.lane_offset(i) * SIZE;
                for (int from = 0; from < numbers; from += P * W, to++) {
                    UNROLLED(q, RUN == ALONG_K ? P : 1)
                        at[q] = run(row + (from + q * W) * SIZE, (numbers - from - q * W) * SIZE, ALONG_K, copies[q]);
                    pack(p.a, true, to);
                }
            }
        }
        if (packs_b) {
            b = (const uint32_t*)packed_b;
            ldb = W;
            vector = dwords * W;
            u32v* to = packed_b;
            for (int v = 0; v * W < n; v++)
                for (int d = 0; d < dwords; d++, to++) {
                    UNROLLED(q, P) {
                        const int row = d / W * P * W + order<U::ELEMENT>(d % W, q);
                        const int64_t bytes = row < k ? (n - v * W) * SIZE : 0;
                        at[q] = run(p.b.at + (row * p.b.k + v * W) * SIZE, bytes, RUN, copies[q]);
                    }
                    pack(p.b, false, to);
                    if constexpr (G::OFFSET) {
                        const u32v sum = (u32v)U::dot(Acc{}, all(0x80808080u), *to);
                        begin[v] = plus(begin[v], (Acc)(0 - sum));
                    }
                }
        }
        if (FINDS && !(within(extrema[0]) && within(extrema[1]))) return false;
        // The operands of the next product are prefetched by and by: a burst of all would wait for memory.
        const int steps = (m + ROWS - 1) / ROWS * ((n + 2 * W - 1) / (2 * W));
        const int lines = p.a.next || p.b.next ? (SIZE * k * (m > n ? m : n) / 64) / steps + 1 : 0;
        Packed packed{a, b, lda, ldb, vector, dwords, lines, plain, begin, p.a.at + p.a.next, p.b.at + p.b.next};
        if constexpr (AS_STORED) multiply_packed(p, packed);
        else multiply_shared(p, packed);  // as fast but for the smallest products, and the machine code is large
        return true;
    }

    // Packed operands: rows of a and b, and vectors of a row of b, in dwords; what sums begin with; the next operands.
    struct Packed {
        const uint32_t *a, *b;
        int64_t lda, ldb, vector;
        int dwords, lines;
        bool plain;
        const Acc* begin;
        const char *next_a, *next_b;
    };

    INLINE void multiply_packed(const lp::Work& p, Packed& x) {
        if constexpr (ROWS == 6) {  // four rows at once waste none
            if (p.m <= 32 && p.m % 4 == 0) return multiply_rows_of<4>(p, x);
        }
        multiply_rows_of<ROWS>(p, x);
    }
    template <int R> INLINE void multiply_rows_of(const lp::Work& p, Packed& x) {
        for (int v = 0; v * W < p.n; v += 2) {
            if ((v + 1) * W < p.n) columns<2, R>(p, x, v);
            else columns<1, R>(p, x, v);
        }
    }
    static __attribute__((noinline)) void multiply_shared(const lp::Work& p, Packed& x) { multiply_packed(p, x); }

    // The columns of V vectors from the vector `first` on.
    template <int V, int R> INLINE void columns(const lp::Work& p, Packed& x, int first) {
        const int m = (int)p.m;
        for (int i = 0; i < m; i += R) {
            Acc acc[R][V];
            const uint32_t *row[R], *from = x.b + first * x.vector;
            UNROLLED(r, R) {
                row[r] = x.a + (i + r < m ? i + r : m - 1) * x.lda;
                UNROLLED(v, V) acc[r][v] = G::OFFSET ? x.begin[first + v] : Acc{};
            }
            for (int line = 0; line < x.lines; line++, x.next_a += 64, x.next_b += 64) {
                __builtin_prefetch(x.next_a);
                __builtin_prefetch(x.next_b);
            }
            for (int d = 0; d < x.dwords; d++, from += x.ldb)
                UNROLLED(r, R) {
                    const u32v dword = all(row[r][d]);
                    UNROLLED(v, V) acc[r][v] = U::dot(acc[r][v], dword, get<u32v>(from + v * x.vector));
                }
            UNROLLED(r, R)
                if (i + r < m) write<V>(p, acc[r], i + r, first * W, x.plain);
        }
    }

    // A row of sums of V vectors of columns; `plain` ones are only rounded, to contiguous numbers.
    template <int V> INLINE void write(const lp::Work& p, const Acc* acc, int64_t row, int first, bool plain) {
        const int count = (int)G::least(p.n - first, V * W), size = bits_of(p.out.type) / 8;
        if (!plain) {
            alignas(64) Acc sums[G::N / W] = {};
            UNROLLED(v, V) sums[v] = acc[v];
            std::atomic<int> not_finite{0};
            return G::finish(p, {sums, 0, row, first, 1, count}, {nullptr, nullptr, nullptr}, not_finite);
        }
        char* to = p.out.at + p.out.offset(row, first) * size;
        UNROLLED(v, V) {
            alignas(64) char half[2 * W];
            const bool whole = count >= (v + 1) * W;
            char *at = to + v * W * size, *at_half = whole ? at : half;
            if (p.out.type == LP_BF16) put(at_half, halves<LP_BF16>((f32v)acc[v]));
            else if (p.out.type == LP_F16) put(at_half, halves<LP_F16>((f32v)acc[v]));
            else if (whole) put(at, acc[v]);
            else put_some(at, acc[v], (count - v * W) * size);
            if (size == 2 && !whole) put_some(at, get<u16v>(half), (count - v * W) * size);
        }
    }

    // Rows of float32 are multiplied where they are, any number of them.
    static bool is_as_stored(const lp::Work& p) {
        return U::ELEMENT == E_F32 && p.a.type == LP_F32 && p.a.format == LP_EXACT && !p.a.lane_offsets;
    }

    // The function for a product; null if there is none, or others are faster.
    static Multiply* find(const lp::Work& p) {
        Multiply* found = nullptr;
        const bool fits = (p.m <= MOST_ROWS || is_as_stored(p)) && p.n <= MOST_VECTORS * W && p.k <= MOST_DWORDS * P;
        const bool alike = p.a.type == p.b.type && p.a.format == p.b.format && p.scales_a == p.scales_b;
        if (!fits || !alike || p.term_count != 1 || p.planes != 1 || p.packed_b) return nullptr;
        if (p.scales_a != (p.a.format == LP_TO_F16) || p.a.k != 1 || p.b.lane != 1) return nullptr;
        if (p.a.k_offsets || p.b.k_offsets || p.b.lane_offsets) return nullptr;
        with_type<U::ELEMENT>(p.b, [&](auto type, auto format) { found = multiply<type, format>; });
        return found;
    }

    // Multiplies many rows by a small b, also where the transposed product is described; false if others serve it.
    static __attribute__((noinline)) bool multiply_rows(const lp::Work& given) {
        lp::Work p = given;
        if (p.is_transposed) {
            std::swap(p.m, p.n);
            std::swap(p.a, p.b);
            for (lp::Target* x : {&p.out, &p.c, &p.bias}) std::swap(x->row, x->col);
        }
        Multiply* const multiply = p.col_scales || p.row_scales || !is_as_stored(p) ? nullptr : find(p);
        if (!multiply || p.out.col != 1 || p.out.row_offsets || p.c.row_offsets || p.bias.row || p.bias.row_offsets)
            return false;
        const int64_t threads = p.m * p.n * p.k >= 1 << 20 ? p.threads : 1;
        const int64_t rows = G::least(1024, G::ceil(p.m, threads * ROWS) * ROWS);
        p.a.next = p.b.next = 0;
        auto some = [&, p](int64_t i) mutable {
            lp::Work q = p;
            q.m = G::least(rows, p.m - i * rows);
            q.a.at += i * rows * p.a.lane * 4;
            q.out.at += i * rows * p.out.row * bits_of(p.out.type) / 8;
            if (q.c.at) q.c.at += i * rows * p.c.row * bits_of(p.c.type) / 8;
            multiply(q);
        };
        lp::share(G::ceil(p.m, rows), (int)threads, some);
        return true;
    }
};
