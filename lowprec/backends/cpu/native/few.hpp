// Products of few rows of a, without BLIS's loops 3 and 1: b is read where it is, by one of the kernels for few rows,
// else packed into the cache, a block of k at a time (loop 4). The sums are those of the packed kernels: sequential
// over each part of k, then part by part. A unit U adds FEW, the rows that are multiplied at once; 0 for none.

// Calls f with the type and format of b as constants, if they are among those that fill most of a model's memory.
template <int ELEMENT, class F> INLINE void with_type(const Source& b, F f) {
    auto check = [&](auto type, auto format) {
        if constexpr (can_pack(ELEMENT, type, format))
            if (b.type == type && b.format == format) f(type, format);
    };
    Int<LP_EXACT> exact;
    Int<LP_F32> f32;
    check(f32, exact);
    check(f32, Int<LP_TO_TF32>());
    check(f32, Int<LP_TO_BF16>());
    check(f32, Int<LP_TO_F16>());
    check(Int<LP_F16>(), exact);
    check(Int<LP_BF16>(), exact);
    check(Int<LP_E4M3>(), exact);
    check(Int<LP_E5M2>(), exact);
    check(Int<LP_I8>(), exact);
}

template <class U> struct Few {
    typedef typename U::Acc Acc;
    typedef Gemm<U> G;
    typedef void Rows(const FewRows&);
    static constexpr int M = U::FEW ? U::FEW : 1, MOST = 2 * M, P = G::P, N = G::N;
    static constexpr int WIDE = P > 1 || W == 4 ? M : (W == 8 ? 6 : 2 * M);  // rows at once of many, by stored codes
    static constexpr int64_t SPAN_LANES = 64, SPAN = 8;  // lanes of b and blocks of k that are transposed at a time

    struct Job : G::Common {
        bool in_place, along_k;  // of b
        bool reads_a;            // where it is
        Rows *whole[2], *panels[2];  // for M rows, and for the last ones: where b is, and packed
        int64_t at_once, rows;                 // rows of a kernel, and in memory
        int64_t columns, span, lda, ldy, size;  // span: packed blocks
        explicit Job(lp::Work& work) : G::Common(work) {}
    };
    struct Thread {
        uint32_t *a, *sums, *part, *panel;
        Extrema* extrema;
        int32_t offsets[MOST];
    };

    static bool along_lanes(const lp::Work& p) { return p.b.lane == 1 && !p.b.lane_offsets && !is_coded(p.b.type); }
    // Whether stored codes are decoded in registers, for the first rows.
    static bool decodes(const lp::Work& p) { return p.b.is_stored && P == 1; }
    static bool serves(const lp::Work& p) {
        if (p.packed_b || p.term_count > 1 || p.planes > 1) return false;
        if (decodes(p)) return p.m <= stored_rows(p.b.type) && (p.m <= 16 || 4 * p.m * p.k <= LONG_BYTES);
        return p.m <= (along_lanes(p) || P == 4 ? MOST : M) && ((p.b.k == 1 && !p.b.k_offsets) || along_lanes(p));
    }

    // Adds the products of all rows and the columns [first, first + lanes).
    static void add(Job& j, Thread& t, int64_t first, int64_t lanes, bool in_place) {
        const lp::Work& p = j.p;
        const int64_t padded = G::ceil(lanes, W) * W, in_lanes = in_place ? lanes / W * W : 0, m = p.m;
        auto multiply = [&](Rows* const* rows, FewRows f) {
            const int64_t r = j.at_once;
            for (int64_t i = 0; i < m; i += r, f.a += r * j.lda, f.y += r * j.ldy) rows[m - i < r](f);
        };
        // The first rows keep what they decode of a strip for the others.
        auto decode = [&](const FewRows& f) {
            const int64_t r = j.at_once, width = W * vectors_of_stored<U>((int)r);
            for (int64_t at = 0; at < f.lanes; at += width) {
                FewRows some = f;
                some.lane += at;
                some.y += at;
                some.lanes = G::least(width, f.lanes - at);
                some.kept = t.panel;
                j.whole[0](some);
                some.at = (const char*)t.panel;
                some.ldb = 4 * some.lanes;
                for (int64_t i = r; i < m; i += r) {
                    some.a += r * j.lda;
                    some.y += r * j.ldy;
                    j.panels[m - i < r](some);
                }
            }
        };
        const bool has_long_rows = j.along_k || p.scales_b || (P < 4 && m * lanes > MOST_SUMS);
        const int group = has_long_rows ? (int)j.span * W : (P == 2 && m > 2 ? 8 : 4) / P;
        for (int64_t block = 0, end; block < j.blocks; block = end) {
            const int64_t left = j.sum - block % j.sum, rest = p.k - block * W * P;
            end = G::least(block + G::least(left, j.span), j.along_k && rest >= W * P ? p.k / (W * P) : j.blocks);
            uint32_t* y = block < j.sum ? t.sums : t.part;
            const bool adds = left < j.sum;
            const int dwords = (int)((end - block - 1) * W + G::least(rest - (end - block - 1) * W * P, W));
            const int64_t whole = rest >= W * P || (P == 1 && !j.along_k) ? in_lanes : 0;
            const int64_t step = block * W * P;
            // Few rows of b at once, whose runs are long, if the sums fit the L1 cache.
            for (int d = 0; whole && d < dwords; d += group) {
                const char* at = p.b.at + (first * p.b.lane + p.b.k_offset(step + order<U::ELEMENT>(d, 0))) * j.size;
                const int64_t ldb = (j.along_k ? p.b.lane : p.b.k) * j.size;
                const int count = (int)G::least(group, dwords - d);
                const uint32_t* const a = t.a + block * W + d;
                const int64_t k = step + d * P;
                const FewRows f{p.b, first, k,     a,     j.lda,     at,        ldb,
                                y,   j.ldy, whole, count, adds || d, t.extrema, nullptr};
                if (decodes(p) && m > j.at_once) decode(f);
                else multiply(j.whole, f);
            }
            if (whole < lanes) {
                const int64_t width = whole ? W : j.columns, strip = (first + whole) / width;
                j.pack_b(p.b, Layout{false, width, width, width * W, 0}, strip, strip + 1, block, end, t.panel, 0);
                const char* const at = (const char*)t.panel;
                const uint32_t* const a = t.a + block * W;
                uint32_t* const to = y + whole;
                const int64_t left_over = padded - whole;
                multiply(j.panels,
                         {p.b, 0, 0, a, j.lda, at, 4 * width, to, j.ldy, left_over, dwords, adds, t.extrema, nullptr});
            }
            for (int i = 0; y == t.part && (end % j.sum == 0 || end == j.blocks) && i < m; i++)
                for (int64_t q = i * j.ldy; q < i * j.ldy + lanes; q += W)
                    put(t.sums + q, plus(get<Acc>(t.sums + q), get<Acc>(t.part + q)));
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
            for (int64_t at = first; scales && at < first + lanes; at += MOST_LANES)
                find_exponents(p.b, at, G::least(at + MOST_LANES, first + lanes), j.exponents_b);
        if (scales || !p.scales_b) add(j, t, first, lanes, j.in_place && !scales);
        const int32_t *e = p.scales_a ? j.exponents_a : nullptr, *f = scales ? j.exponents_b : nullptr;
        for (int64_t q = 0; q < lanes; q += N) {
            const int columns = (int)G::least(lanes - q, N);
            G::finish(p, {t.sums + q, j.ldy, 0, first + q, (int)p.m, columns}, {e, f, t.offsets}, j.not_finite);
        }
    }

    static void work(void* at, int thread) {
        Job& j = *(Job*)at;
        const lp::Work& p = j.p;
        Thread t{};
        t.a = j.memory + thread * j.memory_each;
        t.sums = t.a + (j.reads_a ? 0 : j.rows * j.lda);
        t.part = t.sums + j.rows * j.ldy;
        t.panel = t.part + j.rows * j.ldy;
        t.extrema = (Extrema*)(t.panel + j.columns * j.span * W);
        const int64_t strip = G::least(j.rows, j.at_once);
        if (j.reads_a) t.a = (uint32_t*)p.a.at;
        else j.pack_a(p.a, Layout{true, strip, j.lda, W, 0}, 0, j.rows / strip, 0, j.blocks, t.a, strip * j.lda);
        for (int row = 0; U::ELEMENT == E_U8 && row < p.m; row++)
            for (int64_t q = 0; q < 4 * W * j.blocks; q++)
                t.offsets[row] += 128 * ((const int8_t*)(t.a + row * j.lda))[q];
        for (int64_t i; (i = j.next_task.fetch_add(1)) < j.tasks;)
            task(j, t, i * j.columns, G::least(p.n - i * j.columns, j.columns));
    }

    // How a kernel reads b: rows of contiguous lanes, lanes along k, stored codes.
    enum Access { ALONG_LANES, ALONG_K, STORED };

    // The rows of the kernel for m of them.
    static int rows_at_once(int64_t m) {
        if (m <= 2) return (int)m;
        if (m <= 4) return 4;
        return m <= M ? M : WIDE;
    }
    template <int ROWS, int TYPE, int FORMAT> static Rows* rows_along(Access access) {
        if constexpr (is_coded(TYPE)) {
            if constexpr (U::ELEMENT == E_F32)
                if (access == STORED) return few_rows_of_stored<U, ROWS, TYPE>;
            if constexpr (ROWS <= M) return few_rows_of_codes<U, ROWS, TYPE>;
        } else if (access == ALONG_LANES) {
            return few_rows<U, ROWS, TYPE, FORMAT>;
        } else if constexpr (U::ELEMENT >= E_I16 && TYPE != PANEL) {
            return int8_rows_along_k<U, ROWS>;
        } else if constexpr (TYPE != PANEL && bits_of(TYPE) > 8 && W * bits_of(TYPE) >= 128) {
            return few_rows_along_k<U, ROWS, TYPE, FORMAT>;
        }
        return nullptr;
    }
    template <int TYPE, int FORMAT> static Rows* rows_for(int64_t m, Access access) {
        const int rows = rows_at_once(m);
        if (rows <= 2) return rows == 1 ? rows_along<1, TYPE, FORMAT>(access) : rows_along<2, TYPE, FORMAT>(access);
        if constexpr (WIDE > M && (is_coded(TYPE) || TYPE == PANEL))
            if (rows > M) return rows_along<WIDE, TYPE, FORMAT>(access);
        return rows == 4 ? rows_along<4, TYPE, FORMAT>(access) : rows_along<M, TYPE, FORMAT>(access);
    }
    template <int... I>
    static Rows* rows_of_codes(int type, int64_t m, Access access, std::integer_sequence<int, I...>) {
        Rows* found = nullptr;
        auto find = [&](auto each) {
            if constexpr (can_pack(U::ELEMENT, each, LP_EXACT))
                if (type == each) found = rows_for<each, LP_EXACT>(m, access);
        };
        (find(Int<LP_MXFP8 + I>()), ...);
        return found;
    }

    // The rows of a kernel: of stored codes more, if few of these are idle.
    static int64_t at_once(const lp::Work& p) {
        const int64_t last = p.m % WIDE;
        const bool fill = W == 8 ? p.m <= WIDE || p.m > 2 * M : last == 0 || last > M + M / 2;
        return decodes(p) && p.m > M && fill ? WIDE : M;
    }

    // Whether the kernels read a where it is, of float32 rows.
    static bool reads_a(const lp::Work& p, int64_t rows) {
        const bool is_packed = U::ELEMENT == E_F32 && p.a.type == LP_F32 && p.a.format == LP_EXACT;
        return is_packed && p.m == rows && p.a.k == 1 && !p.a.k_offsets && !p.a.lane_offsets && !is_coded(p.b.type);
    }

    static Rows* in_place_for(const lp::Work& p, int64_t m) {
        const bool along_k = !along_lanes(p);
        Rows* rows = nullptr;  // more than two rows need the registers in which int8 is interleaved
        const bool is_packed = along_k ? p.scales_b && p.k % W : p.b.type == LP_I8 && p.m > 2;
        if (p.b.k_offsets || p.b.lane_offsets || is_packed) return rows;
        if (is_coded(p.b.type)) {
            const Access access = p.b.is_stored ? STORED : ALONG_K;
            return rows_of_codes(p.b.type, m, access, std::make_integer_sequence<int, LP_TYPES - LP_MXFP8>());
        }
        const Access access = along_k ? ALONG_K : ALONG_LANES;
        with_type<U::ELEMENT>(p.b, [&](auto type, auto format) { rows = rows_for<type, format>(m, access); });
        return rows;
    }

    static __attribute__((noinline)) int32_t gemm(lp::Work& p) {
        Job j(p);
        if (!j.pack_a || !j.pack_b) return LP_UNSUPPORTED;
        j.at_once = at_once(p);
        const int64_t strips = G::ceil(p.m, j.at_once);
        j.rows = strips > 1 ? strips * j.at_once : rows_at_once(p.m);
        for (int i = 0; i < 2; i++) {
            const int64_t rows = i ? p.m - (strips - 1) * j.at_once : j.at_once;
            j.whole[i] = in_place_for(p, rows);
            const int64_t least = decodes(p) ? 4 : 1;  // fewer rows of few lanes wait for their sums
            j.panels[i] = rows_for<PANEL, LP_EXACT>(strips > 1 && rows < least ? least : rows, ALONG_LANES);
        }
        j.in_place = j.whole[1];
        j.along_k = j.in_place && !along_lanes(p);
        j.size = bits_of(p.b.type) / 8;
        int64_t threads = p.m * p.n * p.k >= 1 << 17 ? p.threads : 1;
        // Lanes that are read along k are read from end to end.
        const int64_t unit = j.along_k && !is_coded(p.b.type) ? 16 : SPAN_LANES;
        int64_t most = along_lanes(p) ? FEW_PACKED : unit;
        j.span = along_lanes(p) ? 1 : SPAN;
        if (j.along_k) j.span = j.sum;
        else if (j.in_place) most = p.m <= 4 || P == 2 ? FEW_WIDE : FEW_COLUMNS;
        const int64_t pieces = G::ceil(G::ceil(p.n, threads), most) * threads;  // equal shares of all threads
        j.columns = G::ceil(G::ceil(p.n, pieces), unit) * unit;
        j.tasks = G::ceil(p.n, j.columns);
        j.reads_a = reads_a(p, j.rows);
        j.lda = j.reads_a ? p.a.lane : j.blocks * W + 16;  // rows a power of two apart share places of a cache
        j.ldy = j.columns + N;
        const int64_t rows_dwords = j.rows * ((j.reads_a ? 0 : j.lda) + 2 * j.ldy);
        j.memory_each = G::ceil(rows_dwords + j.columns * (j.span * W + 2), 1024) * 1024;
        threads = G::least(threads, j.tasks);
        if (!j.begin(0, (int)threads, false)) return LP_NO_MEMORY;
        lp::run(work, &j, (int)threads);
        return j.not_finite ? lp::NOT_FINITE : LP_OK;
    }
};
