// Small products, most of them of a batch: both operands are packed on the stack, and the sums of ROWS rows and V vectors
// of columns computed in registers.
//
// The sums are those of the packed kernels. Where a run of numbers ends with its matrix, zeros follow it in a copy.

alignas(64) static const char ZEROS[4 * W] = {};

template <class U> struct Small {
    typedef typename U::Acc Acc;
    typedef Gemm<U> G;
    typedef bool Multiply(const lp::Work&);
    static constexpr int P = G::P, MOST_ROWS = 64, MOST_VECTORS = 4, MOST_DWORDS = 64;  // of a; of columns; of k

    // Whether numbers and their products need no scaling.
    static bool within(const Extrema& x) {
        uint32_t largest = 0, least = ~0u;
        for (int i = 0; i < W; i++) largest = x.largest[i] > largest ? x.largest[i] : largest, least = x.least[i] < least ? x.least[i] : least;
        const uint32_t high = largest >> 23, low = (least + 1) >> 23;
        return !largest || (high < 127 + 60 && low > 127 - 60 && high - low <= 28);
    }

    // A run of `whole` bytes, of which `bytes` exist.
    INLINE const char* run(const char* from, int64_t bytes, int64_t whole, char* copy) {
        if (bytes >= whole) return from;
        if (bytes <= 0) return ZEROS;  // an address beyond the array may be without memory, which makes a masked load slow
        copy_some(copy, from, (int)bytes);
        return copy;
    }

    // Returns false, before it writes, if numbers that are rounded to float16 need scaling.
    template <int TYPE, int FORMAT> static bool multiply(const lp::Work& p) {
        constexpr int SIZE = bits_of(TYPE) / 8, RUN = W * SIZE, ALONG_K = RUN * (U::ELEMENT >= E_I16 ? P : 1);
        constexpr bool FINDS = FORMAT == LP_TO_F16;
        alignas(64) u32v a[MOST_ROWS * MOST_DWORDS / W], b[MOST_VECTORS * MOST_DWORDS];
        alignas(64) char copies[P][4 * W];
        const char* at[P];
        Acc begin[MOST_VECTORS + 1] = {};
        Extrema extrema[2] = {{u32v{}, ~u32v{}}, {u32v{}, ~u32v{}}};
        auto pack = [&](const Source& s, bool of_a, u32v* to) __attribute__((always_inline)) {
            if constexpr (FINDS) *to = extrema[of_a].rounded(get<u32v>(at[0]));
            else pack_row<TYPE, FORMAT, U::ELEMENT, false>(at, of_a, s, nullptr, of_a && G::OFFSET ? 0x80808080u : 0, to);
        };
        const int blocks = (int)G::ceil(p.k, P * W), dwords = (blocks - 1) * W + (int)G::least(p.k - (blocks - 1) * P * W, W);
        for (int64_t i = 0; i < p.m; i++)
            for (int64_t block = 0, k = 0; block < blocks; block++, k += P * W) {
                UNROLLED(q, RUN == ALONG_K ? P : 1)
                    at[q] = run(p.a.at + (p.a.lane_offset(i) + k + q * W) * SIZE, (p.k - k - q * W) * SIZE, ALONG_K, copies[q]);
                pack(p.a, true, a + i * blocks + block);
            }
        for (int d = 0; d < dwords; d++)
            for (int64_t v = 0; v * W < p.n; v++) {
                u32v& to = b[v * dwords + d];
                UNROLLED(q, P) {
                    const int64_t k = d / W * P * W + order<U::ELEMENT>(d % W, q);
                    at[q] = run(p.b.at + (k * p.b.k + v * W) * SIZE, k < p.k ? (p.n - v * W) * SIZE : 0, RUN, copies[q]);
                    if (P * SIZE > 4) __builtin_prefetch(at[q] + p.b.next, 0, 2);  // pairs of runs far apart
                }
                pack(p.b, false, &to);
                if constexpr (G::OFFSET) begin[v] = plus(begin[v], (Acc)(0 - (u32v)U::dot(Acc{}, all(0x80808080u), to)));
            }
        if (FINDS && !(within(extrema[0]) && within(extrema[1]))) return false;
        auto columns = [&](int64_t first, auto rows, auto vectors) __attribute__((always_inline)) {
            constexpr int ROWS = decltype(rows)::value, V = decltype(vectors)::value;
            const u32v* from = b + first * dwords;
            for (int64_t i = 0; i < p.m; i += ROWS) {
                Acc acc[ROWS][V];
                const uint32_t* row[ROWS];
                UNROLLED(r, ROWS) {
                    row[r] = (const uint32_t*)(a + G::least(i + r, p.m - 1) * blocks);
                    UNROLLED(v, V) acc[r][v] = begin[first + v];
                }
                for (int d = 0; d < dwords; d++)
                    UNROLLED(r, ROWS) {
                        const u32v dword = all(row[r][d]);
                        UNROLLED(v, V) acc[r][v] = U::dot(acc[r][v], dword, from[v * dwords + d]);
                    }
                UNROLLED(r, ROWS)
                    if (i + r < p.m) write<V>(p, acc[r], i + r, first * W);
            }
        };
        for (int64_t v = 0; v * W < p.n; v += 2) {
            if ((v + 1) * W < p.n) columns(v, std::integral_constant<int, 4>(), std::integral_constant<int, 2>());
            else columns(v, std::integral_constant<int, W == 16 ? 8 : 4>(), std::integral_constant<int, 1>());
        }
        return true;
    }

    // A row of sums of V vectors of columns.
    template <int V> INLINE void write(const lp::Work& p, const Acc* acc, int64_t row, int64_t first) {
        const int count = (int)G::least(p.n - first, V * W), size = bits_of(p.out.type) / 8;
        if (G::is_plain(p) && p.out.col == 1 && (G::FLOATS || p.out.type == LP_I32)) {
            char* to = p.out.at + p.out.offset(row, first) * size;
            for (int v = 0; v < V; v++, to += W * size) {
                const bool whole = count >= (v + 1) * W;
                alignas(64) char half[2 * W];
                if (p.out.type == LP_BF16) store<LP_BF16>(whole ? to : half, (f32v)acc[v]);
                else if (p.out.type == LP_F16) store<LP_F16>(whole ? to : half, (f32v)acc[v]);
                else if (whole) put(to, acc[v]);
                else put_some(to, acc[v], (count - v * W) * size);
                if (size == 2 && !whole) put_some(to, get<u16v>(half), (count - v * W) * size);
            }
            return;
        }
        alignas(64) Acc sums[G::N / W] = {};
        UNROLLED(v, V) sums[v] = acc[v];
        std::atomic<int> not_finite{0};
        G::finish(p, sums, row, first, count, nullptr, nullptr, 0, not_finite);
    }

    template <int TYPE, int FORMAT> static void find(const lp::Work& p, Multiply*& found) {
        if constexpr (can_pack(U::ELEMENT, TYPE, FORMAT))
            if (p.b.type == TYPE && p.b.format == FORMAT) found = multiply<TYPE, FORMAT>;
    }
    // The function for a product; null if there is none, or others are faster.
    static Multiply* find(const lp::Work& p) {
        Multiply* found = nullptr;
        const bool fits = p.m <= MOST_ROWS && p.n <= MOST_VECTORS * W && p.k <= MOST_DWORDS * P && p.n * G::ceil(p.k, P) <= 128 * W && p.term_count == 1 && p.planes == 1 && !p.packed_b;
        const bool alike = p.a.type == p.b.type && p.a.format == p.b.format && p.scales_a == p.scales_b;
        if (!fits || !alike || p.a.k != 1 || p.b.lane != 1 || p.a.k_offsets || p.b.k_offsets || p.b.lane_offsets) return nullptr;
        find<LP_F32, LP_EXACT>(p, found), find<LP_F32, LP_TO_TF32>(p, found), find<LP_F32, LP_TO_BF16>(p, found);
        find<LP_F16, LP_EXACT>(p, found), find<LP_BF16, LP_EXACT>(p, found), find<LP_E4M3, LP_EXACT>(p, found), find<LP_I8, LP_EXACT>(p, found);
        if (p.scales_a) find<LP_F32, LP_TO_F16>(p, found);
        return found;
    }
};
