// Products of few rows of a: b is read once, where it is: rounded and paired in registers if its lanes are contiguous,
// else packed into the cache, a block of k at a time. The sums are those of the packed kernels: sequential over each chunk
// of k, then chunk by chunk. A unit U adds FEW, the most rows; 0 for none.

const int PANEL = -1;  // in the place of a type: packed dwords

// Adds `dwords` of k to ROWS rows of sums, ldy apart, for `lanes` lanes (a multiple of W): from zero unless `adds`.
// a: rows of W dwords. b: the first of the rows of lanes, `ldb` bytes apart; a panel has one per dword of k.
template <class U, int ROWS, int TYPE, int FORMAT>
static void few_rows(const Source& s, const uint32_t* a, const char* b, int64_t ldb, int dwords, uint32_t* y, int64_t ldy, int64_t lanes, bool adds) {
    typedef typename U::Acc Acc;
    constexpr int P = per_dword(U::ELEMENT), SIZE = TYPE == PANEL ? 4 : bits_of(TYPE) / 8;
    auto columns = [&](int64_t at, auto count) __attribute__((always_inline)) {
        constexpr int V = decltype(count)::value;
        Acc acc[ROWS][V];
        UNROLLED(i, ROWS)
            UNROLLED(v, V) acc[i][v] = adds ? get<Acc>(y + i * ldy + at + v * W) : Acc{};
        _Pragma("GCC unroll 2") for (int d = 0; d < dwords; d++) {
            u32v row[V];
            UNROLLED(v, V) {
                const char* from = b + d * ldb + (at + v * W) * SIZE;
                if constexpr (TYPE == PANEL) {
                    row[v] = get<u32v>(from);
                } else {  // the numbers of a dword are W rows apart; the next block is prefetched
                    const char* runs[P];
                    UNROLLED(p, P) runs[p] = from + p * W * ldb;
                    if (SIZE == 4 || v % (4 / SIZE) == 0)
                        UNROLLED(p, P) __builtin_prefetch(runs[p] + P * W * ldb, 0, 2);
                    pack_row<TYPE, FORMAT, U::ELEMENT, false>(runs, s, nullptr, nullptr, 0, row + v);
                }
                if (U::ELEMENT == E_U8) row[v] ^= 0x80808080u;  // b + 128 times a, unlike in packed kernels
            }
            UNROLLED(i, ROWS) {
                u32v dword = all(a[i * W + d]);
                UNROLLED(v, V) acc[i][v] = U::ELEMENT == E_U8 ? U::dot(acc[i][v], row[v], dword) : U::dot(acc[i][v], dword, row[v]);
            }
        }
        UNROLLED(i, ROWS)
            UNROLLED(v, V) put(y + i * ldy + at + v * W, acc[i][v]);
    };
    constexpr int V = ROWS == 1 ? 4 : 1 + (ROWS <= 4);
    int64_t at = 0;
    for (; at + V * W <= lanes; at += V * W) columns(at, std::integral_constant<int, V>());
    for (; at < lanes; at += W) columns(at, std::integral_constant<int, 1>());
}

template <class U> struct Few {
    typedef typename U::Acc Acc;
    typedef Gemm<U> G;
    typedef void Rows(const Source&, const uint32_t*, const char*, int64_t, int, uint32_t*, int64_t, int64_t, bool);
    static constexpr int M = U::ROWS, P = G::P, N = G::N;
    static constexpr Layout LAYOUT_A{true, M, W, M * W, 0};

    struct Job {
        lp::Work& p;
        Pack *pack_a, *pack_b;
        Rows *rows, *in_place;  // of panels, and of b where it is; null where it cannot be read so
        int64_t blocks, chunk, columns, tasks, memory_each, a_dwords, ldy, size;
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

    // Columns [first, first + lanes) of the result; `first` is a multiple of j.columns, panels of which are packed.
    static void task(Job& j, int64_t first, int64_t lanes, const uint32_t* a, uint32_t* sums, uint32_t* part, uint32_t* panel, const int32_t* offsets) {
        const lp::Work& p = j.p;
        const int64_t padded = G::ceil(lanes, W) * W, in_lanes = j.in_place ? lanes / W * W : 0, piece = first / j.columns;
        const Layout wide{false, j.columns, j.columns, 0, 0}, edge{false, W, W, 0, 0};
        for (int64_t block = 0; block < j.blocks; block++) {
            const uint32_t* from = a + block * M * W;
            uint32_t* y = block < j.chunk ? sums : part;
            const bool adds = block % j.chunk != 0;
            const int64_t rest = p.k - block * W * P;
            const int dwords = (int)(rest < W ? rest : W);
            const int64_t whole = rest >= W * P ? in_lanes : 0;
            if (whole) j.in_place(p.b, from, p.b.at + (first + p.b.k_offset(block * W * P)) * j.size, p.b.k * j.size, dwords, y, j.ldy, whole, adds);
            if (whole < lanes) {
                if (whole) j.pack_b(p.b, edge, (first + whole) / W, (first + whole) / W + 1, block, block + 1, panel, 0);
                else j.pack_b(p.b, wide, piece, piece + 1, block, block + 1, panel, 0);
                j.rows(p.b, from, (const char*)panel, 4 * (whole ? W : j.columns), dwords, y + whole, j.ldy, padded - whole, adds);
            }
            if (y == part && ((block + 1) % j.chunk == 0 || block + 1 == j.blocks))
                for (int i = 0; i < p.m; i++)
                    for (int64_t q = 0; q < lanes; q += W) put(sums + i * j.ldy + q, plus(get<Acc>(sums + i * j.ldy + q), get<Acc>(part + i * j.ldy + q)));
        }
        for (int i = 0; i < p.m; i++)
            for (int64_t q = 0; q < lanes; q += N) finish(j, sums + i * j.ldy + q, i, first + q, (int)(lanes - q < N ? lanes - q : N), offsets[i]);
    }

    static void finish(Job& j, const uint32_t* sums, int row, int64_t col, int count, int32_t offset) {
        const lp::Work& p = j.p;
        (void)offset;
        if constexpr (G::FLOATS) {
            const int32_t *e = p.scales_a ? j.exponents_a : nullptr, *f = p.scales_b ? j.exponents_b : nullptr;
            if (finish_row<N>(p, (const float*)sums, 0, row, col, count, e, f)) j.not_finite.store(1, std::memory_order_relaxed);
        } else {
            finish_integers<N>(p, (const int32_t*)sums, offset, row, col, count);
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

    template <int TYPE, int FORMAT> static Rows* rows_for(int64_t m) {
        constexpr int MOST = U::FEW > 4 ? U::FEW : 4;
        if (m <= 2) return m == 1 ? few_rows<U, 1, TYPE, FORMAT> : few_rows<U, 2, TYPE, FORMAT>;
        return m <= 4 ? few_rows<U, 4, TYPE, FORMAT> : few_rows<U, MOST, TYPE, FORMAT>;
    }

    // What is read in place: the types that fill most of a model's memory; narrow ones, of which several rows are read at
    // once, from the caches only.
    static Rows* in_place_for(const lp::Work& p) {
        const int type = p.b.type, format = p.b.format;
        if (!along_lanes(p) || p.b.k_offsets || (bits_of(type) < 32 && p.n * p.k * bits_of(type) / 8 > 4 << 20)) return nullptr;
        if constexpr (U::ELEMENT == E_F32) {
            if (type == LP_F32 && format == LP_EXACT) return rows_for<LP_F32, LP_EXACT>(p.m);
            if (type == LP_F32 && format == LP_TO_TF32) return rows_for<LP_F32, LP_TO_TF32>(p.m);
            if (type == LP_F32 && format == LP_TO_BF16) return rows_for<LP_F32, LP_TO_BF16>(p.m);
            if (type == LP_F16 && format == LP_EXACT) return rows_for<LP_F16, LP_EXACT>(p.m);
            if (type == LP_BF16 && format == LP_EXACT) return rows_for<LP_BF16, LP_EXACT>(p.m);
        } else if constexpr (U::ELEMENT == E_BF16) {
            if (type == LP_F32) return rows_for<LP_F32, LP_TO_BF16>(p.m);
            if (type == LP_BF16) return rows_for<LP_BF16, LP_EXACT>(p.m);
        }
        return nullptr;
    }

    static int32_t gemm(lp::Work& p) {
        Job j(p);
        j.pack_a = find_pack<U::ELEMENT>(p.a), j.pack_b = find_pack<U::ELEMENT>(p.b);
        if (!j.pack_a || !j.pack_b) return LP_UNSUPPORTED;
        j.rows = rows_for<PANEL, LP_EXACT>(p.m), j.in_place = in_place_for(p), j.size = bits_of(p.b.type) / 8;
        int64_t threads = p.m * p.n * p.k >= 1 << 17 ? p.threads : 1;
        j.blocks = G::ceil(p.k, P * W), j.chunk = G::ceil(chunk_of(p.k, G::LONGEST), P * W);
        int64_t most = along_lanes(p) ? 1024 : 256;
        if (j.in_place) most = p.m <= 2 ? 4096 : 2048;
        const int64_t share = G::ceil(p.n, threads);
        const int64_t pieces = G::ceil(share, most) * threads;  // equal shares of all threads
        j.columns = G::ceil(G::ceil(p.n, pieces), 64) * 64, j.tasks = G::ceil(p.n, j.columns);
        j.ldy = j.columns + N, j.a_dwords = G::ceil(j.blocks * M * W, 64) * 64;
        j.memory_each = G::ceil(j.a_dwords + 2 * U::FEW * j.ldy + j.columns * W, 1024) * 1024;
        threads = G::least(threads, j.tasks);
        lp::Memory borrowed(4 * (threads * j.memory_each + G::exponents_dwords(p)));
        if (!borrowed.at) return LP_NO_MEMORY;
        j.memory = (uint32_t*)borrowed.at;
        j.exponents_a = (int32_t*)(j.memory + threads * j.memory_each), j.exponents_b = j.exponents_a + (p.scales_a ? G::exponents_dwords(p.m) : 0);
        if (p.scales_a) G::scale(p, true, j.exponents_a);
        if (p.scales_b) G::scale(p, false, j.exponents_b);
        j.next_task = 0, j.not_finite = 0;
        lp::run(work, &j, (int)threads);
        return j.not_finite ? lp::NOT_FINITE : LP_OK;
    }
};
