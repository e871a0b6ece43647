// The micro-kernel and BLIS's five loops around it, as templates of a unit: loop 5 (NC) in `gemm`, 4 (KC) and 3 (MC) in
// `work`, 2 (NR) and 1 (MR) in `chunk_of_task`. Blocks of a are in the L2 cache. A unit U has ELEMENT, ROWS (MR),
// COLUMNS (NR, in vectors), Acc, dot(acc, a, b), begin(), end(), and IS_TILED: then its micro-kernel is `tile`, without
// variants for fewer rows.
// One call of a micro-kernel sums one product of parts over a part of k from zero, then adds the sum to a tile of C.
// These parts depend on k only, so an element of the result depends on its row of a, its column of b and k alone. In
// floating point there are two in a chunk, for which the operands are packed (one if a is short): shorter sums have
// smaller errors, and the tile is in the L1 cache.

const int SETS = 0, ADDS = 1, STREAMS = 2;  // how a micro-kernel writes C: past the caches if it STREAMS

// The scales of the rows of a strip that has none.
static constexpr struct Ones {
    float at[64];
    constexpr Ones() : at() {
        for (float& x : at) x = 1;
    }
} ONES;

// The arguments of a micro-kernel.
struct MicroTile {
    const uint32_t *a, *b;  // the first blocks
    int64_t step_a, step_b;  // dwords between blocks
    int64_t dwords;  // of k
    void* c;  // a tile, ldc floats between its rows
    int64_t ldc;
    float factor;
    int write;
    const int32_t* sums;  // 128 times the sums of the columns of b, which int8 units with an offset subtract; or null
    const char* next;  // what to prefetch: 256 bytes for each block, step_next bytes between
    int64_t step_next;
    const float *row_scales, *column_scales;  // of a piece of k, which are multiplied before the factor; or both null
};
typedef void Micro(const MicroTile&);

template <class U, int ROWS> static void micro(const MicroTile& tile) {
    const uint32_t *a = tile.a, *b = tile.b;
    const int64_t step_a = tile.step_a, step_b = tile.step_b, ldc = tile.ldc, step_next = tile.step_next;
    const float factor = tile.factor;
    const int write = tile.write;
    const int32_t* const sums = tile.sums;
    const float *const row_scales = tile.row_scales, *const column_scales = tile.column_scales;
    void* const c = tile.c;
    const char* next = tile.next;
    int64_t dwords = tile.dwords;
    typedef typename U::Acc Acc;
    constexpr int N = U::COLUMNS, LINES = 4;
    constexpr bool OFFSET = U::ELEMENT == E_U8;
    Acc acc[ROWS][N];
    UNROLLED(i, ROWS)
        UNROLLED(j, N) acc[i][j] = Acc{};
    const bool prefetches = write != STREAMS && !(row_scales && write == ADDS);
    for (int i = 0; prefetches && i < ROWS; i++)
        for (int j = 0; j < N * W; j += 16) __builtin_prefetch((char*)c + 4 * (i * ldc + j), 1);
    auto step = [&](int d) __attribute__((always_inline)) {
        u32v row[N];
        UNROLLED(j, N) row[j] = get<u32v>(b + (d * N + j) * W);
        UNROLLED(i, ROWS) {
            u32v dword = all(a[i * W + d]);
            UNROLLED(j, N) acc[i][j] = U::dot(acc[i][j], dword, row[j]);
        }
    };
    for (; dwords >= W; dwords -= W, a += step_a, b += step_b) {
        UNROLLED(line, LINES) __builtin_prefetch(next + 64 * line, 0, 2);
        next += step_next;
        _Pragma("GCC unroll 2") for (int d = 0; d < W; d++) step(d);
    }
    for (int d = 0; d < dwords; d++) step(d);
    if constexpr (__is_same(Acc, f32v)) {
        if (row_scales) {
            UNROLLED(j, N) {
                const f32v of_columns = get<f32v>(column_scales + j * W);
                UNROLLED(i, ROWS) acc[i][j] *= of_columns * row_scales[i];
            }
            if (factor != 1)
                UNROLLED(i, ROWS)
                    UNROLLED(j, N) acc[i][j] *= factor;
            UNROLLED(i, ROWS)
                UNROLLED(j, N) {
                    float* const at = (float*)c + i * ldc + j * W;
                    put(at, acc[i][j] + (write == ADDS ? get<f32v>(at) : f32v{}));  // + 0, as of a sum from zero
                }
            return;
        }
    }
    UNROLLED(i, ROWS)
        UNROLLED(j, N) {
            char* at = (char*)c + 4 * (i * ldc + j * W);
            if constexpr (OFFSET) {
                if (sums) acc[i][j] = plus(acc[i][j], (Acc)(0 - get<u32v>(sums + j * W)));
            }
            if constexpr (__is_same(Acc, f32v)) acc[i][j] *= factor;
            if (write == ADDS) acc[i][j] = plus(acc[i][j], get<Acc>(at));
            if (write == STREAMS) stream(at, acc[i][j]);
            else put(at, acc[i][j]);
        }
}

// The length of the sums over k: all of k, or equal parts of at most `longest`, in multiples of 64.
static int64_t sum_length(int64_t k, int64_t longest) {
    if (k <= longest) return k;
    int64_t sums = (k + longest - 1) / longest;
    return ((k + sums - 1) / sums + 63) / 64 * 64;
}

template <class U> struct Few;
template <class U> struct Small;
template <class U> struct Blocks;
template <class U> struct LongK;

template <class U> struct Gemm {
    static constexpr int M = U::ROWS, N = U::COLUMNS * W, P = per_dword(U::ELEMENT);
    static constexpr bool FLOATS = __is_same(typename U::Acc, f32v), OFFSET = U::ELEMENT == E_U8;
    static constexpr bool SCALES = U::ELEMENT == E_F32 || U::ELEMENT == E_PAIR;
    static constexpr int64_t BLOCK = P * W, SUMS = FLOATS ? 2 : 1, LONGEST = KC * P;
    static constexpr int64_t MOST_PIECES = SUMS * (LONGEST / 128 + 1);  // of k in a chunk

    // A product of packed operands, or of few rows. Blocks are of k.
    struct Common {
        lp::Work& p;
        Pack *pack_a = find_pack<U::ELEMENT>(p.a), *pack_b = find_pack<U::ELEMENT>(p.b);
        int64_t blocks = ceil(p.k, BLOCK), piece = p.pieces.length / BLOCK;  // in all; of a sum with own scales, or 0
        int64_t sum = ceil(sum_length(p.k, LONGEST), piece ? p.pieces.length : BLOCK) * (piece ? piece : 1);
        int64_t tasks, memory_each;  // dwords of a thread
        uint32_t* memory;
        int32_t *exponents_a, *exponents_b;
        alignas(64) std::atomic<int64_t> next_task{0};
        std::atomic<int> not_finite{0};
        explicit Common(lp::Work& work) : p(work) {}

        // Gets memory, after `before` dwords for other uses, and finds exponents of a, and of b if `finds_b`.
        bool begin(int64_t before, int threads, bool finds_b) {
            memory = (uint32_t*)p.memory.of(4 * (before + threads * memory_each + exponents_dwords(p)));
            if (!memory) return false;
            memory += before;
            exponents_a = (int32_t*)(memory + threads * memory_each);
            exponents_b = exponents_a + (p.scales_a ? exponents_dwords(p.m) : 0);
            scale(p, true, exponents_a, true);
            scale(p, false, exponents_b, finds_b);
            return true;
        }
    };
    struct Job : Common {
        int slots_a = slots_of<U::ELEMENT>(Common::p.a), slots_b = slots_of<U::ELEMENT>(Common::p.b);
        int64_t strips_m = ceil(Common::p.m, M), strips_n = ceil(Common::p.n, N), chunk = SUMS * Common::sum;
        int64_t task_m, task_n, grid_m;  // the most strips of a task, the tasks along m
        int64_t at_once;  // strips of a by which a strip of b is multiplied
        int64_t strip_a, strip_b = strip_dwords(Common::blocks, slots_b);  // dwords of packed strips
        bool own_a, own_b;  // tasks pack their strips of a, of b; the other operand is packed before tasks
        bool direct, plain, streams;  // sums are kept in the result, and final
        uint32_t* packed;
        int64_t first_n = 0, range_n;  // strips of b that are packed at once, and the first of them
        int64_t a_at, acc_at, scales_at, tile;  // dwords
        int64_t pack_tasks, pack_strips, packed_strips;
        alignas(64) std::atomic<int64_t> next_pack{0}, done_pack{0};
        explicit Job(lp::Work& work) : Common(work) {}
    };

    static constexpr Layout LAYOUT_A{true, M, W, M * W, OFFSET ? 0x80808080u : 0u}, LAYOUT_B{false, N, N, N * W, 0};

    static int64_t ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }
    static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
    static int64_t mc_bytes() { return least(BLOCKING.mc_bytes, lp::l2_bytes() * 7 / 16); }
    static constexpr int64_t sums_dwords() { return OFFSET ? N : 0; }
    static int64_t strip_dwords(int64_t blocks, int slots) { return blocks * slots * N * W + PAD + sums_dwords(); }

    // 128 times the sums of the columns of a packed strip, at its end.
    static const int32_t* sum_columns(uint32_t* b, int64_t blocks, int64_t strip) {
        if constexpr (OFFSET) {
            int32_t* sums = (int32_t*)(b + strip - sums_dwords());
            for (int j = 0; j < U::COLUMNS; j++) {
                typename U::Acc sum[4] = {};
                for (int64_t d = 0; d < blocks * W; d += 4)
                    UNROLLED(i, 4) sum[i] = U::dot(sum[i], all(0x80808080u), get<u32v>(b + (d + i) * N + j * W));
                put(sums + j * W, plus(plus(sum[0], sum[1]), plus(sum[2], sum[3])));
            }
            return sums;
        }
        return nullptr;
    }

    static void pack_strips(const Job& j, int64_t first, int64_t end, uint32_t* to) {
        j.pack_b(j.p.b, LAYOUT_B, first, end, 0, j.blocks, to, j.strip_b);
        for (int64_t s = first; s < end; s++, to += j.strip_b) sum_columns(to, j.blocks, j.strip_b);
    }

    template <int R> static constexpr Micro* kernel() {
        if constexpr (U::IS_TILED) return U::tile;
        else return micro<U, R>;
    }
    // The micro-kernel for the rows of the last strip; those for an odd number compute one row more.
    template <int... I> static Micro* micro_for(int64_t rows, std::integer_sequence<int, I...>) {
        Micro* found = nullptr;
        (void)((rows <= 2 * I + 2 ? (found = kernel<(2 * I + 2 < M ? 2 * I + 2 : M)>(), true) : false) || ...);
        return found;
    }

    // What is prefetched while the columns [n0, n1) and blocks [k0, k1) of b are multiplied by the task that packed
    // them: the numbers that it packs next. They are in rows `step` bytes apart, and each row in pieces of 256 bytes;
    // the codes of a stored strip are together, and some `pieces` of them are prefetched for each block.
    struct Ahead {
        const char* at = nullptr;
        int64_t step = 256, pieces, blocks, calls = 0, strips = 0, strip_bytes;
        Ahead(const Job& j, int64_t n0, int64_t n1, int64_t k0, int64_t k1) : blocks(k1 - k0) {
            const Source& b = j.p.b;
            if (!j.own_b || b.k_offsets || b.lane_offsets) return;
            if (is_coded(b.type) && !b.is_stored) return;
            const bool is_end = k1 >= j.blocks;
            const int64_t strip = is_end ? n0 + j.p.threads * (n1 - n0) : n0, block = is_end ? 0 : k1;
            if (b.is_stored) {
                if (strip >= j.strips_n) return;
                const int64_t block_bytes = BLOCK * W * bits_of(b.type) / 8;
                strip_bytes = Strip(b).bytes();
                strips = (n1 - n0) * U::COLUMNS;
                at = b.at + strip * U::COLUMNS * strip_bytes + block * block_bytes;
                pieces = ceil(block_bytes, 256);
                return;
            }
            const int64_t size = bits_of(b.type) / 8, bytes = (b.k == 1 ? blocks * BLOCK : (n1 - n0) * N) * size;
            at = b.at + (strip * N * b.lane + block * BLOCK * b.k) * size;
            step = (b.k == 1 ? b.lane : b.k) * size;
            pieces = ceil(bytes, 256);
        }
        const char* next() {
            const int64_t call = calls++;
            if (strips) return at + call / pieces % strips * strip_bytes + call % pieces * blocks * 256;
            return at + call % pieces * 256 + call / pieces * blocks * step;
        }
    };

    // The rows and columns of a task, in strips, and a chunk of k, in blocks.
    struct Part {
        int64_t m0, m1, n0, n1, k0, k1;
    };
    static void chunk_of_task(Job& j, const Part& part, uint32_t* memory) {
        const auto [m0, m1, n0, n1, k0, k1] = part;
        const lp::Work& p = j.p;
        const int64_t rows_last = p.m - (j.strips_m - 1) * M;
        Micro *whole = kernel<M>(), *last = micro_for(rows_last, std::make_integer_sequence<int, (M + 1) / 2>());
        const bool last_exact = rows_last == M || (rows_last % 2 == 0 && !U::IS_TILED), one_chunk = j.chunk >= j.blocks;
        const int32_t *e = p.scales_a ? j.exponents_a : nullptr, *f = p.scales_b ? j.exponents_b : nullptr;
        const uint32_t* const packed_a = j.own_a ? memory + j.a_at : j.packed + k0 * j.slots_a * M * W;
        if (j.own_a) j.pack_a(p.a, LAYOUT_A, m0, m1, k0, k1, memory + j.a_at, j.strip_a);
        const bool by_strip = j.own_b && p.b.is_stored;
        if (j.own_b && !by_strip) j.pack_b(p.b, LAYOUT_B, n0, n1, k0, k1, memory, j.strip_b);
        Ahead ahead(j, n0, n1, k0, k1);
        for (int64_t n = n0; n < n1; n++) {  // loop 2
            uint32_t* strip = j.own_b ? memory + (n - n0) * j.strip_b : j.packed + (n - j.first_n) * j.strip_b;
            if (by_strip) {
                strip = memory;
                j.pack_b(p.b, LAYOUT_B, n, n + 1, k0, k1, strip, j.strip_b);
            }
            uint32_t* b = j.own_b ? strip : strip + k0 * j.slots_b * N * W;
            const int32_t* sums = nullptr;
            if (OFFSET && j.own_b) sums = sum_columns(b, k1 - k0, j.strip_b);
            else if (OFFSET && !k0) sums = (const int32_t*)(strip + j.strip_b - sums_dwords());
            const int columns = (int)least(p.n - n * N, N);
            const char* next = (const char*)(b + j.strip_b);
            float* const column_scales = (float*)(memory + j.scales_at);  // of the strip in the pieces of the chunk
            for (int64_t k = k0; k < k1 && j.piece; k += j.piece) {
                float* const of_strip = column_scales + (k - k0) / j.piece * N;
                for (int i = 0; i < N; i++) of_strip[i] = 1;
                const float* const from = p.pieces.columns;
                if (!from) continue;
                __builtin_memcpy(of_strip, from + k / j.piece * p.pieces.column_step + n * N, 4 * (size_t)columns);
            }
            for (int64_t m = m0; m < m1; m++) {  // loop 1
                const bool is_last = m == j.strips_m - 1;
                const int rows = (int)(is_last ? rows_last : M);
                const bool direct = j.direct && columns == N && (!is_last || last_exact);
                float* c = (float*)(memory + j.acc_at) + (one_chunk ? 0 : ((m - m0) * j.task_n + n - n0) * j.tile);
                int64_t ldc = N;
                if (direct) {
                    c = (float*)p.out.at + m * M * p.out.row + n * N;
                    ldc = p.out.row;
                }
                const uint32_t* a = packed_a + (m - m0) * j.strip_a;
                for (int i = 0; p.c.at && k1 == j.blocks && i < rows; i++)
                    for (int q = 0; q < N; q += 16)
                        __builtin_prefetch(p.c.at + p.c.offset(m * M + i, n * N + q) * bits_of(p.c.type) / 8);
                for (int64_t k = k0; k < k1 && j.piece; k += j.piece) {
                    const int64_t end = least(k + j.piece, k1), rest = p.k - (end - 1) * BLOCK, piece = k / j.piece;
                    const float* const of_rows =
                        p.pieces.rows ? p.pieces.rows + piece * p.pieces.row_step + m * M : ONES.at;
                    const float* const of_columns = column_scales + (k - k0) / j.piece * N;
                    const int64_t dwords = (end - k - 1) * W + least(rest, W);
                    MicroTile t{a + (k - k0) * M * W, b + (k - k0) * N * W, M * W, N * W, dwords, c, ldc};
                    t.factor = p.pieces.alpha;
                    t.write = k ? ADDS : SETS;
                    t.next = next + 256 * (k - k0);
                    t.step_next = 256;
                    t.row_scales = of_rows;
                    t.column_scales = of_columns;
                    if constexpr (U::IS_TILED) add_piece(is_last ? last : whole, t, rows);
                    else (is_last ? last : whole)(t);
                }
                for (int64_t k = k0; k < k1 && !j.piece; k += j.sum) {
                    const int64_t end = least(k + j.sum, k1), rest = p.k - (end - 1) * BLOCK;
                    for (int i = 0; i < p.term_count; i++) {
                        const lp::Term& term = p.terms[i];
                        const int write = k > 0 || term.adds ? ADDS : (direct && j.streams ? STREAMS : SETS);
                        const uint32_t* const from_a = a + ((k - k0) * j.slots_a + term.a) * M * W;
                        const uint32_t* const from_b = b + ((k - k0) * j.slots_b + term.b) * N * W;
                        const char* const after = ahead.at ? ahead.next() : next + 256 * (k - k0);
                        const int64_t dwords = (end - k - 1) * W + least(rest, W);
                        (is_last ? last : whole)({from_a, from_b, j.slots_a * M * W, j.slots_b * N * W, dwords,
                                                  c + term.plane * M * N, ldc, term.factor, write, sums, after,
                                                  ahead.step, nullptr, nullptr});
                    }
                }
                next = (m - m0 + 1) * 256 < 4 * N * W * j.slots_b ? next + 256 * (k1 - k0) : (const char*)b;
                if (k1 < j.blocks || (direct && j.plain)) continue;
                finish(p, {c, ldc, m * M, n * N, rows, columns}, {e, f, nullptr}, j.not_finite);
            }
        }
    }

    // Sums of rows and columns of the result, `ld` numbers between rows.
    struct Tile {
        const void* sums;
        int64_t ld, row, col;
        int rows, columns;
    };
    // Adds the sums over a piece of k, times their scales, to a tile of C, after a micro-kernel without scales.
    static __attribute__((noinline)) void add_piece(Micro* multiply, MicroTile t, int rows) {
        if constexpr (FLOATS) {
            alignas(64) float sums[M * N];
            char* const c = (char*)t.c;
            const int64_t ldc = t.ldc;
            const float factor = t.factor;
            const bool adds = t.write == ADDS;
            t.c = sums;
            t.ldc = N;
            t.factor = 1;
            t.write = SETS;
            multiply(t);
            for (int i = 0; i < rows; i++)
                UNROLLED(v, U::COLUMNS) {
                    char* const at = c + 4 * (i * ldc + v * W);
                    f32v x = get<f32v>(sums + i * N + v * W) * (get<f32v>(t.column_scales + v * W) * t.row_scales[i]);
                    put(at, x * factor + (adds ? get<f32v>(at) : f32v{}));
                }
        }
    }

    // Exponents of rows and columns, and what int8 sums of the rows have too much; each null if there are none.
    struct Corrections {
        const int32_t *of_rows, *of_columns, *offsets;
    };

    // Writes the rows of a tile.
    static __attribute__((noinline)) void finish(const lp::Work& p, const Tile& t, const Corrections& x,
                                                 std::atomic<int>& not_finite) {
        const float* const sums = (const float*)t.sums;
        const int32_t *const e = x.of_rows, *const f = x.of_columns;
        bool special = false;
        if constexpr (!FLOATS) {
            const int32_t* const integers = (const int32_t*)t.sums;
            finish_integers<N, (M > 16 ? M : 16)>(p, integers, t.ld, t.row, t.rows, t.col, t.columns, x.offsets);
        } else if (p.planes == 1) {
            special = finish_rows<N>(p, sums, t.ld, t.row, t.rows, t.col, t.columns, e, f);
        } else {
            for (int i = 0; i < t.rows; i++)
                special |= finish_complex<N>(p, sums + i * t.ld, M * N, t.row + i, t.col, t.columns, e, f);
        }
        if (special && p.checks) not_finite.store(1, std::memory_order_relaxed);
    }

    static void work(void* at, int thread) {
        Job& j = *(Job*)at;
        uint32_t* memory = j.memory + thread * j.memory_each;
        for (int64_t i; j.pack_tasks && (i = j.next_pack.fetch_add(1)) < j.pack_tasks; j.done_pack.fetch_add(1)) {
            int64_t first = i * j.pack_strips, end = least(first + j.pack_strips, j.packed_strips);
            if (j.own_b) j.pack_a(j.p.a, LAYOUT_A, first, end, 0, j.blocks, j.packed + first * j.strip_a, j.strip_a);
            else pack_strips(j, j.first_n + first, j.first_n + end, j.packed + first * j.strip_b);
        }
        if (j.pack_tasks) lp::wait_for(j.done_pack, j.pack_tasks);
        U::begin();
        for (int64_t i; (i = j.next_task.fetch_add(1)) < j.tasks;) {
            // The next task has other rows: threads are the first to touch different pages of a new result.
            const int64_t m0 = i % j.grid_m * j.strips_m / j.grid_m, m1 = (i % j.grid_m + 1) * j.strips_m / j.grid_m;
            const int64_t n = j.first_n + i / j.grid_m * j.task_n;
            const int64_t end_n = least(n + j.task_n, least(j.first_n + j.range_n, j.strips_n));
            for (int64_t m = m0, end; m < m1; m = end) {  // loop 3, if its rows are not those of a task
                end = least(m + j.at_once, m1);
                for (int64_t k = 0; k < j.blocks; k += j.chunk)  // loop 4
                    chunk_of_task(j, {m, end, n, end_n, k, least(k + j.chunk, j.blocks)}, memory);
            }
        }
        U::end();
    }

    // How the result is divided into tasks, and what is packed before them: a if it is short, else b.
    static void divide(Job& j, int64_t threads) {
        const lp::Work& p = j.p;
        const int64_t sum_a = 4 * j.sum * j.slots_a * M * W;  // bytes of a strip of a
        const bool is_few = j.strips_m <= 4;
        const bool fits = is_few || j.strips_m * sum_a <= least(BLOCKING.short_bytes, mc_bytes());
        const bool is_long = is_few && j.strips_n <= 16 && 4 * j.strip_b > LONG_BYTES;
        j.own_b = !p.packed_b && (is_long || (fits && threads * p.m <= 2 * p.n));
        j.own_a = !j.own_b;
        if (j.own_b) j.chunk = j.sum;
        const int64_t ranges = j.own_b || p.packed_b ? 1 : ceil(4 * j.strips_n * j.strip_b, NC_BYTES);
        j.range_n = least(j.strips_n, ranges > 1 ? 16 + ceil(j.strips_n, ranges) : j.strips_n);
        j.packed_strips = j.own_b ? j.strips_m : (p.packed_b ? 0 : j.range_n);
        j.pack_strips = j.own_b ? 1 : 16;  // rows of b are read in long runs
        while (j.pack_strips > 1 && j.range_n < 4 * threads * j.pack_strips) j.pack_strips /= 2;
        int64_t a_strip = least(j.chunk, j.blocks) * j.slots_a * M * W, fitting = mc_bytes() / (4 * a_strip);
        if (j.own_b) {
            bool along_k = p.b.k == 1;
            j.grid_m = 1;
            j.task_m = j.strips_m;
            // Fewer tasks are faster, because each reads all of a; stored codes are decoded a strip at a time.
            j.task_n = p.b.is_stored ? 32 : (along_k ? 2 : 8 << (P > 1));
            const int64_t tasks = (p.b.is_stored ? 4 : 2) * threads;
            while (j.task_n > 1 && ceil(j.strips_n, j.task_n) < tasks) j.task_n /= 2;
            j.strip_b = strip_dwords(least(j.chunk, j.blocks), j.slots_b);
            j.a_at = j.acc_at = (p.b.is_stored ? 1 : j.task_n) * j.strip_b;
            const int64_t all_a = j.strips_m * j.blocks * j.slots_a * M * W;
            j.own_a = 4 * all_a > LONG_BYTES && j.strips_n <= 4 * j.task_n;
            j.strip_a = (j.own_a ? a_strip : all_a / j.strips_m) + PAD;
            if (j.own_a) {
                j.packed_strips = 0;
                j.acc_at += j.strips_m * j.strip_a;
            }
        } else {
            int64_t ranges_m = ceil(j.strips_m, fitting < 1 ? 1 : fitting);
            if (ranges_m > 1 || p.n < 4 * threads * p.m) {  // else only the columns are divided
                if (threads > 1 && ranges_m < 2 * threads) ranges_m = least(j.strips_m, 2 * threads);
                // 7 tasks for 2 threads cost as much as 8.
                if (j.strips_m >= threads) ranges_m = ceil(ranges_m, threads) * threads;
            }
            j.grid_m = ranges_m;
            j.task_m = ceil(j.strips_m, ranges_m);
            int64_t ranges_n = threads > 1 && ranges_m < 2 * threads ? ceil(2 * threads, ranges_m) : 1;
            if (ranges_n < ceil(j.range_n, 64)) ranges_n = ceil(j.range_n, 64);
            j.task_n = ceil(j.range_n, ranges_n);
            j.a_at = 0;
            j.strip_a = a_strip + PAD;
            j.acc_at = j.task_m * j.strip_a;
        }
        j.tasks = j.grid_m * ceil(j.range_n, j.task_n);
        j.pack_tasks = ceil(j.packed_strips, j.pack_strips);
        const bool mostly_writes = p.streams && !j.own_b && j.blocks * j.slots_b <= 8;
        j.at_once = mostly_writes ? 1 : j.task_m;
        j.tile = (int64_t)p.planes * M * N;
        bool one_chunk = j.chunk >= j.blocks;
        j.scales_at = j.acc_at + (one_chunk ? 1 : j.task_m * j.task_n) * j.tile;
        j.memory_each = ceil(j.scales_at + (j.piece ? MOST_PIECES * N : 0), 1024) * 1024;
    }

    // Exponents of lanes, and the two factors of each: a single one may exceed float32.
    static int64_t exponents_dwords(int64_t lanes) { return 3 * (lanes + 64); }
    static int64_t exponents_dwords(const lp::Work& p) {
        return (p.scales_a ? exponents_dwords(p.m) : 0) + (p.scales_b ? exponents_dwords(p.n) : 0);
    }

    // Gives the lanes of an operand memory for their exponents and factors, and finds them if `now`.
    static void scale(lp::Work& p, bool of_a, int32_t* exponents, bool now) {
        if (!SCALES || !(of_a ? p.scales_a : p.scales_b)) return;
        lp::Source& s = of_a ? p.a : p.b;
        for (int i = 0; i < 3; i++) __builtin_memset(exponents + i * (s.lanes + 64) + s.lanes, 0, 64 * 4);
        s.factors = (float*)(exponents + s.lanes + 64);
        auto find = [&](int64_t i) {
            if constexpr (SCALES) find_exponents(s, i * MOST_LANES, least((i + 1) * MOST_LANES, s.lanes), exponents);
        };
        if (now) lp::share(ceil(s.lanes, MOST_LANES), s.lanes * p.k >= 1 << 19 ? p.threads : 1, find);
    }

    static bool is_plain(const lp::Work& p) { return adds_nothing(p) && !p.scales_a && !p.scales_b && !p.checks; }

    static int32_t gemm(lp::Work& p) {
        if constexpr (U::BLOCKS) {
            if (is_coded(p.a.type)) return Blocks<U>::gemm(p);
        }
        if (is_coded(p.a.type)) return LP_UNSUPPORTED;
        if (p.pieces.length && (!FLOATS || p.term_count > 1 || p.planes > 1)) return LP_UNSUPPORTED;
        if constexpr (U::FEW > 0) {
            if (p.pieces.length) return packed(p);
            const bool is_shared = p.threads > 1 && p.m * p.n * p.k >= 1 << 20;
            if (is_shared || p.m > BLOCKING.small_rows || (p.is_transposed && p.n > BLOCKING.small_rows)) {
                if (p.k <= BLOCKING.small_dwords && Small<U>::multiply_rows(p)) return LP_OK;
            } else if (auto multiply = Small<U>::find(p); multiply && multiply(p)) return LP_OK;
            if (LongK<U>::serves(p)) return LongK<U>::gemm(p);
            if (Few<U>::serves(p)) return Few<U>::gemm(p);
        }
        return packed(p);
    }

    // The product of packed operands.
    static int32_t packed(lp::Work& p) {
        Job j(p);
        if (!j.pack_a || !j.pack_b) return LP_UNSUPPORTED;
        int threads = p.m * p.n * p.k * p.term_count >= 1 << 20 ? p.threads : 1;
        divide(j, threads);
        j.plain = is_plain(p) && (FLOATS || p.out.type == LP_I32);
        // Sums may be kept in the result with several chunks, or if they are final, but rows far apart share few places
        // of a cache.
        const bool is_result = p.planes == 1 && p.out.col == 1 && !p.out.row_offsets && bits_of(p.out.type) == 32;
        j.direct = is_result && !(p.b.is_stored && j.own_b) && p.c.at != p.out.at &&
            (j.chunk < j.blocks || (j.plain && p.term_count == 1));
        j.streams = p.streams && j.sum >= j.blocks && ((intptr_t)p.out.at | 4 * p.out.row) % (4 * W) == 0;
        const int64_t packed_dwords = ceil(j.packed_strips * (j.own_b ? j.strip_a : j.strip_b), 1024) * 1024;
        threads = (int)least(threads, j.tasks > j.pack_tasks ? j.tasks : j.pack_tasks);
        if (!j.begin(packed_dwords, threads, !p.packed_b)) return LP_NO_MEMORY;
        j.packed = p.packed_b ? (uint32_t*)p.packed_b : j.memory - packed_dwords;
        if (p.packed_b) j.exponents_b = (int32_t*)(p.packed_b + j.strips_n * j.strip_b);
        for (; j.first_n < j.strips_n; j.first_n += j.range_n) {  // loop 5
            const int64_t strips = least(j.range_n, j.strips_n - j.first_n);
            if (j.packed_strips > 0 && !j.own_b) j.packed_strips = strips;
            j.pack_tasks = ceil(j.packed_strips, j.pack_strips);
            j.tasks = j.grid_m * ceil(strips, j.task_n);
            j.next_pack = j.done_pack = j.next_task = 0;
            lp::run(work, &j, threads);
        }
        return j.not_finite ? lp::NOT_FINITE : LP_OK;
    }

    static int64_t prepare(lp::Work& p, void* target) {
        Job j(p);
        if (U::BLOCKS && is_coded(p.a.type) && is_coded(p.b.type)) return store_codes(p, (char*)target);
        if (!j.pack_a || !j.pack_b) return -1;
        if (is_coded(p.b.type)) return store_codes(p, (char*)target);
        if (target) {
            j.packed = (uint32_t*)target;
            scale(p, false, (int32_t*)(j.packed + j.strips_n * j.strip_b), true);
            j.pack_strips = 1;
            j.packed_strips = j.pack_tasks = j.strips_n;
            j.tasks = j.memory_each = 0;
            j.own_b = false;
            j.memory = nullptr;
            lp::run(work, &j, p.n * p.k >= 1 << 18 ? p.threads : 1);
        }
        return ceil(4 * (j.strips_n * j.strip_b + (p.scales_b ? exponents_dwords(p.n) : 0)), 4096) * 4096;
    }

    // The epilogue alone, on sums in memory, after which 512 bytes can be read.
    static void epilogue(const lp::Work& p, const float* sums) {
        alignas(64) float v[2 * N] = {};
        lp::Work plain = p;
        plain.checks = plain.scales_a = plain.scales_b = false;
        for (int64_t i = 0; i < p.m; i++)
            for (int64_t col = 0; col < p.n; col += N) {
                const int count = (int)least(N, p.n - col);
                const float* const at = sums + (i * p.n + col) * p.planes;
                if (p.planes == 1) {
                    finish_rows<N>(plain, at, p.n, i, 1, col, count, nullptr, nullptr);
                    continue;
                }
                for (int q = 0; q < count; q++)
                    for (int c = 0; c < 2; c++) v[c * N + q] = at[2 * q + c];
                finish_complex<N>(plain, v, N, i, col, count, nullptr, nullptr);
            }
    }
};

template <class U> static lp::Unit unit() { return lp::Unit{Gemm<U>::gemm, Gemm<U>::prepare, Gemm<U>::epilogue}; }
