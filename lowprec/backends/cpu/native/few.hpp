// Products of few rows of a: b is read once, a block of k at a time, which is packed into the cache and multiplied at
// once, or multiplied where it is if its numbers are dwords in memory. The sums are those of the packed kernels:
// sequential over each chunk of k, then chunk by chunk. A unit U adds FEW, the most rows; 0 for none.

// Adds `dwords` of k to ROWS rows of sums, ldy apart, for `lanes` lanes (a multiple of W): from zero unless `adds`.
// a: rows of W dwords. b is multiplied as b + 128 by units of unsigned by signed numbers, unlike in packed kernels. b: a row of lanes per dword of k, ldb dwords apart.
template <class U, int ROWS>
static void few_rows(const uint32_t* a, const uint32_t* b, int64_t ldb, int dwords, uint32_t* y, int64_t ldy, int64_t lanes, bool adds) {
    typedef typename U::Acc Acc;
    auto columns = [&](int64_t at, auto count) __attribute__((always_inline)) {
        constexpr int V = decltype(count)::value;
        Acc acc[ROWS][V];
        UNROLL for (int i = 0; i < ROWS; i++)
            UNROLL for (int v = 0; v < V; v++) acc[i][v] = adds ? get<Acc>(y + i * ldy + at + v * W) : Acc{};
        _Pragma("GCC unroll 4") for (int d = 0; d < dwords; d++) {
            u32v row[V];
            UNROLL for (int v = 0; v < V; v++) row[v] = get<u32v>(b + d * ldb + at + v * W) ^ (U::ELEMENT == E_U8 ? 0x80808080u : 0);
            UNROLL for (int i = 0; i < ROWS; i++) {
                u32v dword = all(a[i * W + d]);
                UNROLL for (int v = 0; v < V; v++) acc[i][v] = U::ELEMENT == E_U8 ? U::dot(acc[i][v], row[v], dword) : U::dot(acc[i][v], dword, row[v]);
            }
        }
        UNROLL for (int i = 0; i < ROWS; i++)
            UNROLL for (int v = 0; v < V; v++) put(y + i * ldy + at + v * W, acc[i][v]);
    };
    constexpr int V = ROWS == 1 ? 4 : ROWS <= 4 ? 2 : 1;
    int64_t at = 0;
    for (; at + V * W <= lanes; at += V * W) columns(at, std::integral_constant<int, V>());
    for (; at < lanes; at += W) columns(at, std::integral_constant<int, 1>());
}

template <class U> struct Few {
    typedef typename U::Acc Acc;
    typedef Gemm<U> G;
    typedef void Rows(const uint32_t*, const uint32_t*, int64_t, int, uint32_t*, int64_t, int64_t, bool);
    static constexpr int M = U::ROWS, P = G::P, N = G::N;
    static constexpr Layout LAYOUT_A{true, M, W, M * W, 0};

    struct Job {
        lp::Work& p;
        Pack *pack_a, *pack_b;
        Rows* rows;
        bool in_place;  // b's numbers are dwords, lanes contiguous
        int64_t blocks, chunk, columns, tasks, memory_each, a_dwords, ldy;
        uint32_t* memory;
        int32_t *exponents_a, *exponents_b;
        alignas(64) std::atomic<int64_t> next_task;
        std::atomic<int> not_finite;
        explicit Job(lp::Work& work) : p(work) {}
    };

    static bool along_lanes(const lp::Work& p) { return p.b.lane == 1 && !p.b.lane_offsets && !is_coded(p.b.type); }
    static bool serves(const lp::Work& p) {
        if (p.m > U::FEW || p.packed_b || p.term_count > 1 || p.planes > 1) return false;
        return (p.b.k == 1 && !p.b.k_offsets) || along_lanes(p);
    }

    // Columns [first, first + lanes) of the result; `first` is a multiple of N.
    static void task(Job& j, int64_t first, int64_t lanes, const uint32_t* a, uint32_t* sums, uint32_t* part, uint32_t* panel, const int32_t* offsets) {
        const lp::Work& p = j.p;
        const int64_t padded = (lanes + N - 1) / N * N, strips = padded / N, whole = j.in_place ? lanes / W * W : 0;
        for (int64_t block = 0; block < j.blocks; block++) {
            const uint32_t* from = a + block * M * W;
            uint32_t* y = block < j.chunk ? sums : part;
            const bool adds = block % j.chunk != 0;
            const int64_t rest = p.k - block * W * P;
            const int dwords = (int)(rest < W ? rest : W);
            if (whole) j.rows(from, (const uint32_t*)p.b.at + first + p.b.k_offset(block * W), p.b.k, dwords, y, j.ldy, whole, adds);
            const int64_t packed = whole / N;  // strips that were multiplied in place
            if (whole < lanes) {
                j.pack_b(p.b, G::LAYOUT_B, first / N + packed, first / N + strips, block, block + 1, panel, N * W);
                for (int64_t s = packed; s < strips; s++) {
                    const int64_t skip = s == packed ? whole - packed * N : 0;
                    j.rows(from, panel + (s - packed) * N * W + skip, N, dwords, y + s * N + skip, j.ldy, N - skip, adds);
                }
            }
            if (y == part && ((block + 1) % j.chunk == 0 || block + 1 == j.blocks))
                for (int i = 0; i < p.m; i++)
                    for (int64_t q = 0; q < lanes; q += W) put(sums + i * j.ldy + q, get<Acc>(sums + i * j.ldy + q) + get<Acc>(part + i * j.ldy + q));
        }
        for (int i = 0; i < p.m; i++)
            for (int64_t q = 0; q < lanes; q += N) finish(j, sums + i * j.ldy + q, i, first + q, (int)(lanes - q < N ? lanes - q : N), offsets[i]);
    }

    static void finish(Job& j, const uint32_t* sums, int row, int64_t col, int count, int32_t offset) {
        const lp::Work& p = j.p;
        (void)offset;
        if constexpr (G::FLOATS) {
            if (finish_row<N>(p, (const float*)sums, 0, row, col, count, p.scales_a ? j.exponents_a : nullptr, p.scales_b ? j.exponents_b : nullptr))
                j.not_finite.store(1, std::memory_order_relaxed);
        } else {
            int32_t* to = (int32_t*)p.out.at + p.out.offset(row, col);
            for (int c = 0; c < count; c++) to[c * p.out.col] = (int32_t)sums[c] - offset;
        }
    }

    static void work(void* at, int thread) {
        Job& j = *(Job*)at;
        uint32_t* a = j.memory + thread * j.memory_each;
        uint32_t *sums = a + j.a_dwords, *part = sums + U::FEW * j.ldy, *panel = part + U::FEW * j.ldy;
        int32_t offsets[U::FEW + 1] = {};
        bool packed = false;
        for (int64_t i; (i = j.next_task.fetch_add(1)) < j.tasks;) {
            if (!packed) {
                packed = true;
                j.pack_a(j.p.a, LAYOUT_A, 0, 1, 0, j.blocks, a, 0);
                for (int row = 0; U::ELEMENT == E_U8 && row < j.p.m; row++)
                    for (int64_t block = 0; block < j.blocks; block++)
                        for (int q = 0; q < 4 * W; q++) offsets[row] += 128 * ((const int8_t*)(a + (block * M + row) * W))[q];
            }
            int64_t first = i * j.columns;
            task(j, first, j.p.n - first < j.columns ? j.p.n - first : j.columns, a, sums, part, panel, offsets);
        }
    }

    static int32_t gemm(lp::Work& p) {
        Job j(p);
        j.pack_a = find_pack<U::ELEMENT>(p.a), j.pack_b = find_pack<U::ELEMENT>(p.b);
        if (!j.pack_a || !j.pack_b) return LP_UNSUPPORTED;
        j.rows = p.m == 1 ? few_rows<U, 1> : p.m == 2 ? few_rows<U, 2> : p.m <= 4 ? few_rows<U, 4> : few_rows<U, (U::FEW > 4 ? U::FEW : 4)>;
        j.in_place = along_lanes(p) && !p.b.k_offsets && p.b.type == LP_F32 && p.b.format == LP_EXACT;
        int64_t threads = p.m * p.n * p.k >= 1 << 17 ? p.threads : 1;
        j.blocks = G::ceil(p.k, P * W), j.chunk = G::ceil(chunk_of(p.k, G::LONGEST), P * W);
        const int64_t most = along_lanes(p) ? 1024 : 256, share = G::ceil(p.n, threads);
        const int64_t pieces = G::ceil(share, most) * threads;  // equal shares of all threads
        j.columns = G::ceil(G::ceil(p.n, pieces), 64) * 64, j.tasks = G::ceil(p.n, j.columns);
        j.ldy = j.columns + N, j.a_dwords = G::ceil(j.blocks * M * W, 64) * 64;
        j.memory_each = G::ceil(j.a_dwords + 2 * U::FEW * j.ldy + j.columns * W, 1024) * 1024;
        threads = G::least(threads, j.tasks);
        lp::Memory borrowed(4 * (threads * j.memory_each + G::exponents_dwords(p)));
        if (!borrowed.at) return LP_NO_MEMORY;
        j.memory = (uint32_t*)borrowed.at;
        j.exponents_a = (int32_t*)(j.memory + threads * j.memory_each), j.exponents_b = j.exponents_a + (p.scales_a ? p.m + 64 : 0);
        if (p.scales_a) G::scale(p, true, j.exponents_a, p.m);
        if (p.scales_b) G::scale(p, false, j.exponents_b, p.n);
        j.next_task = 0, j.not_finite = 0;
        lp::run(work, &j, (int)threads);
        return j.not_finite ? lp::NOT_FINITE : LP_OK;
    }
};
