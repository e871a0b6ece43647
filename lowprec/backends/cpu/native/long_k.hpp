// Long k with few rows and columns: a lane of a vector is a part of k, so that W parts are summed at once.
//
// BLIS's loop over k (KC) is outermost here and the one that threads share. Each part is summed from zero, as the
// packed kernels do; the sums of parts are kept and added in their order, by one thread, at the end of each round.

template <class U> struct LongK {
    typedef typename U::Acc Acc;
    typedef Gemm<U> G;
    static constexpr int P = G::P, MOST = W == 8 ? 3 : 4;  // rows of a and of b that share registers
    static constexpr int64_t PANEL_BYTES = 32 << 10, SUMS_BYTES = 2 << 20;

    // A packed operand: rows of vectors, one for each dword of k. Distances are in dwords.
    struct Panel {
        Pack* pack;
        bool is_dense;
        int64_t size, row, dword, block;
    };

    struct Job : G::Common {
        Panel a, b;
        bool is_same;                    // b has the numbers of a
        int64_t length, parts, groups;   // numbers of a part; whole parts; vectors of parts, and the rest of k
        int64_t chunk, group_dwords;     // blocks that are packed at once; of the sums of a group
        int64_t elements, first, round;  // of the result, in vectors; groups: first of a round, of a round
        uint32_t *sums, *totals;
        explicit Job(lp::Work& work) : G::Common(work) {}

        int lanes_of(int64_t group) const { return group * W < parts ? (int)G::least(W, parts - group * W) : 1; }
        Acc* sums_of(int64_t group, int term) const {
            return (Acc*)(sums + (group - first) * group_dwords) + term * elements * W;
        }
    };

    // Whether the numbers of all rows at one k are contiguous, so that one run of each part has all rows.
    static bool is_dense(const Source& s) {
        const bool has_slots = P > 1 || slots_of<U::ELEMENT>(s) > 1 || s.format == LP_TO_F16;  // or scales of rows
        return !has_slots && s.lane == 1 && !s.lane_offsets && s.lanes > 1 && s.k >= s.lanes && s.k <= 2 * s.lanes;
    }

    static Panel panel(const Source& s, Pack* pack, int64_t chunk) {
        const int64_t slots = slots_of<U::ELEMENT>(s), row = chunk * slots * W * W;
        if (!is_dense(s)) return Panel{pack, false, s.lanes * row, row, W, slots * W * W};
        return Panel{pack, true, chunk * s.k * W * W, W, s.k * W, W * s.k * W};
    }

    static void pack(const Job& j, const Source& from, const Panel& x, int64_t group, int64_t first, int64_t end,
                     uint32_t offset, uint32_t* to) {
        const Layout layout{false, W, W, W * W, offset};
        const int64_t k = group * W < j.parts ? group * W * j.length : j.parts * j.length;
        const int64_t steps = G::least(j.length, from.steps - k), bytes = bits_of(from.type) / 8;
        alignas(64) float factors[2 * (W + 64)];
        Source s = from;
        s.lane = j.length * from.k;
        s.lanes = j.lanes_of(group);
        s.steps = steps;
        s.next = W * s.lane * bytes;
        if (x.is_dense) {
            s.k = 1;
            s.steps = (steps - 1) * from.k + from.lanes;
            s.at += k * from.k * bytes;
            return x.pack(s, layout, 0, 1, first * from.k, G::least(end * from.k, G::ceil(s.steps, W)), to, 0);
        }
        for (int64_t i = 0; i < from.lanes; i++) {
            s.at = from.at + (from.lane_offset(i) + k * from.k) * bytes;
            s.lane_offsets = nullptr;
            for (int q = 0; from.factors && q < W; q++) {  // those of a row, for each part
                factors[q] = from.factors[i];
                factors[s.lanes + 64 + q] = from.factors[from.lanes + 64 + i];
            }
            if (from.factors) s.factors = factors;
            x.pack(s, layout, 0, 1, first, end, to + i * x.row, 0);
        }
    }

    // Adds a chunk of k to the sums of R rows of a by C of b.
    template <int R, int C>
    static void tile(const Job& j, const uint32_t* a, const uint32_t* b, int64_t dwords, bool adds, Acc* to) {
        Acc acc[R][C];
        UNROLLED(r, R)
            UNROLLED(c, C) acc[r][c] = adds ? to[r * j.p.n + c] : Acc{};
        for (; dwords > 0; dwords -= W) {
            const uint32_t *row = a, *column = b;
            for (int d = 0; d < W && d < dwords; d++) {
                u32v of_a[R];
                UNROLLED(r, R) of_a[r] = get<u32v>(row + r * j.a.row);
                UNROLLED(c, C) {
                    const u32v of_b = get<u32v>(column + c * j.b.row);
                    UNROLLED(r, R) acc[r][c] = U::dot(acc[r][c], of_a[r], of_b);
                }
                row += j.a.dword;
                column += j.b.dword;
            }
            a += j.a.block;
            b += j.b.block;
        }
        UNROLLED(r, R)
            UNROLLED(c, C) to[r * j.p.n + c] = acc[r][c];
    }

    // Calls f with the first of MOST, two or one of `count`, and their number as a constant.
    template <class F> INLINE void in_pieces(int64_t count, F f) {
        int64_t i = 0;
        for (; i + MOST <= count; i += MOST) f(i, Int<MOST>());
        for (; i + 2 <= count; i += 2) f(i, Int<2>());
        for (; i < count; i++) f(i, Int<1>());
    }

    // Sums a group of parts; transposed, so that a vector has elements of the result.
    static void sum(Job& j, int64_t group, uint32_t* memory) {
        const lp::Work& p = j.p;
        const int64_t numbers = group * W < j.parts ? j.length : p.k - j.parts * j.length, length = G::ceil(numbers, P);
        const u32v ones = all(0x80808080u);
        uint32_t* const panel_b = j.is_same ? memory : memory + j.a.size;
        for (int64_t block = 0, end; block < G::ceil(length, W); block = end) {
            end = G::least(block + j.chunk, G::ceil(length, W));
            pack(j, p.a, j.a, group, block, end, G::LAYOUT_A.offset, memory);
            if (!j.is_same) pack(j, p.b, j.b, group, block, end, 0, panel_b);
            const int64_t dwords = P == 1 ? G::least(end * W, length) - block * W : (end - block) * W;
            for (int t = 0; t < p.term_count; t++) {
                const uint32_t *a = memory + p.terms[t].a * W * W, *b = panel_b + p.terms[t].b * W * W;
                Acc* const sums = j.sums_of(group, t);
                in_pieces(p.m, [&](int64_t row, auto rows) {
                    in_pieces(p.n, [&](int64_t column, auto columns) {
                        const uint32_t *row_a = a + row * j.a.row, *row_b = b + column * j.b.row;
                        tile<rows, columns>(j, row_a, row_b, dwords, block > 0, sums + row * p.n + column);
                    });
                });
                for (int64_t e = 0; G::OFFSET && e < p.m * p.n; e++)  // 128 times the sums of b
                    for (int64_t q = 0; q < end - block; q++)
                        for (int d = 0; d < W; d++) {
                            const u32v x = get<u32v>(b + e % p.n * j.b.row + q * j.b.block + d * W);
                            sums[e] = plus(sums[e], (Acc)(0 - (u32v)U::dot(Acc{}, ones, x)));
                        }
            }
        }
        for (int64_t e = 0; e < p.term_count * j.elements; e++) transpose((u32v*)j.sums_of(group, 0) + e * W);
    }

    static void work(void* at, int thread) {
        Job& j = *(Job*)at;
        uint32_t* const memory = j.memory + thread * j.memory_each;
        for (int64_t i; (i = j.next_task.fetch_add(1)) < j.tasks;) sum(j, j.first + i, memory);
    }

    // Adds the sums of a round, part by part, and in a part term by term.
    static void add(Job& j) {
        const lp::Work& p = j.p;
        for (int64_t e = 0; e < j.elements; e++) {
            bool begun[2] = {j.first > 0, j.first > 0};
            for (int64_t group = j.first; group < j.first + j.tasks; group++)
                for (int part = 0; part < j.lanes_of(group); part++)
                    for (int t = 0; t < p.term_count; t++) {
                        const lp::Term& term = p.terms[t];
                        uint32_t* const to = j.totals + (term.plane * j.elements + e) * W;
                        Acc x = j.sums_of(group, t)[e * W + part];
                        if constexpr (G::FLOATS) x *= term.factor;
                        put(to, begun[term.plane] ? plus(x, get<Acc>(to)) : x);
                        begun[term.plane] = true;
                    }
        }
    }

    static void finish(Job& j) {
        const lp::Work& p = j.p;
        const int32_t* const e = p.scales_a ? j.exponents_a : nullptr;
        const int32_t* const f = p.scales_b ? j.exponents_b : nullptr;
        alignas(64) uint32_t tile[G::M * G::N + G::N];
        for (int64_t row = 0; row < p.m; row++)
            for (int64_t col = 0; col < p.n; col += G::N) {
                const int count = (int)G::least(p.n - col, G::N);
                for (int plane = 0; plane < p.planes; plane++) {
                    const uint32_t* const from = j.totals + plane * j.elements * W + row * p.n + col;
                    memcpy(tile + plane * G::M * G::N, from, 4 * (size_t)count);
                }
                G::finish(p, {tile, G::N, row, col, 1, count}, {e, f, nullptr}, j.not_finite);
            }
    }

    // Whether both operands are one matrix and its transpose.
    static bool is_gram(const lp::Work& p) {
        const Source &a = p.a, &b = p.b;
        const bool is_one = a.at == b.at && a.lane == b.lane && a.k == b.k && a.lanes == b.lanes && a.type == b.type;
        return !G::OFFSET && is_one && !a.lane_offsets && !b.lane_offsets && a.format == b.format && a.parts == b.parts;
    }

    // Where this is faster than the kernels for few rows, which fill vectors with columns.
    static bool serves(const lp::Work& p) {
        const int64_t parts = p.k / sum_length(p.k, G::LONGEST), size = p.m * p.n;
        if (p.packed_b || is_coded(p.b.type) || p.a.k_offsets || p.b.k_offsets || parts < 2) return false;
        if (size == 1 || (is_gram(p) && parts >= 64)) return p.m <= 64;
        const bool is_quick = (p.a.k == 1 || is_dense(p.a)) && (p.b.k == 1 || is_dense(p.b));
        const bool fills = p.n < W || (p.m > 1 && p.a.lane == 1);
        return parts >= (is_quick ? 4 : 16) && fills && size <= (is_quick && p.b.k != 1 ? 64 : 16);
    }

    static __attribute__((noinline)) int32_t gemm(lp::Work& p) {  // callers of small products may have little stack
        Job j(p);
        if (!j.pack_a || !j.pack_b) return LP_UNSUPPORTED;
        const int64_t rows = p.m * slots_of<U::ELEMENT>(p.a) + p.n * slots_of<U::ELEMENT>(p.b);
        const int threads = p.m * p.n * p.k * p.term_count >= 1 << 18 ? p.threads : 1;
        j.length = j.sum * G::BLOCK;
        j.parts = p.k / j.length;
        j.groups = G::ceil(j.parts, W) + (p.k % j.length > 0);
        j.chunk = G::least(j.sum, 1 + PANEL_BYTES / (4 * W * W * rows));
        j.a = panel(p.a, j.pack_a, j.chunk);
        j.b = panel(p.b, j.pack_b, j.chunk);
        j.is_same = is_gram(p);
        j.elements = G::ceil(p.m * p.n, W);
        j.group_dwords = p.term_count * j.elements * W * W;
        j.round = G::least(j.groups, 1 + SUMS_BYTES / (4 * j.group_dwords));
        j.memory_each = G::ceil(j.a.size + j.b.size, 1024) * 1024;
        const int64_t totals = G::ceil(p.planes * j.elements * W, 1024) * 1024;
        const int64_t before = totals + G::ceil(j.round * j.group_dwords, 1024) * 1024;
        if (!j.begin(before, threads, true)) return LP_NO_MEMORY;
        j.totals = j.memory - before;
        j.sums = j.totals + totals;
        for (j.first = 0; j.first < j.groups; j.first += j.tasks) {
            j.tasks = G::least(j.round, j.groups - j.first);
            j.next_task = 0;
            lp::run(work, &j, threads);
            add(j);
        }
        finish(j);
        return j.not_finite ? lp::NOT_FINITE : LP_OK;
    }
};
