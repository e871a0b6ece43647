// Products of two operands of integers in blocks, each with a scale. The sum over a block is an exact integer I, to
// which
//   acc = fma(I * scale of b, scale of a, acc)
// is applied, block by block; the sums of chunks of k are added. I * scale is exact unless the scale is a float32
// number.
//
// Codes of 4 bits are multiplied as unsigned bytes: numbers plus an offset, whose products are subtracted by the sums
// of the numbers of a. E2M1 numbers are multiplied by 2. A unit U adds BLOCKS, whether it has these products; OFFSET,
// that of codes of 8 bits; and sum16, which adds the products of four dwords of a and of b, 16 numbers of k.
//
// Scales of b that are powers of two lose a factor of 2^16, by which I times the scale cannot overflow; scales of a
// get it, or, where these could overflow, `lifts`, by which the product is multiplied in between.

// The bytes of codes of 4 bits: 2 * E2M1 + 12, int4 + 8, uint4; 2 * E2M1 of a.
alignas(64) static const int8_t BYTES_OF[4][16] = {
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};
constexpr bool is_e2m1(int type) { return type == LP_MXFP4 || type == LP_NVFP4; }

// A table of 16 bytes in each 16 bytes of a vector.
INLINE u32v table_of(const void* bytes) {
    u32v found;
    UNROLLED(i, W / 4) __builtin_memcpy((char*)&found + 16 * i, bytes, 16);
    return found;
}
// The dwords of eight codes of 4 bits: those of even and of odd k.
INLINE void two_dwords(u32v codes, u32v table, u32v* to) {
    to[0] = shuffled(table, codes & 0x0f0f0f0fu);
    to[1] = shuffled(table, codes >> 4 & 0x0f0f0f0fu);
}
// The bytes of runs as dwords: the inverse of in_runs.
template <int... I> INLINE u32v blocks_of_runs(u32v runs, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(runs, runs, (I % 4 * (W / 4) + I / 4)...);
}
INLINE u32v from_runs(u32v runs) {
    alignas(16) static const uint8_t TURNED[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const u32v blocks = blocks_of_runs(runs, std::make_integer_sequence<int, W>());
    return shuffled(blocks, table_of(TURNED));
}

// Infinities as the largest numbers, whose products with large scales are infinite, but not NaN when added to infinity.
INLINE f32v within_floats(f32v x) {
    const u32v largest = all(0x7f7fffffu), sign = bits(x) & 0x80000000u;
    return floats(choose((u32v)((bits(x) & 0x7fffffffu) == 0x7f800000u), largest | sign, bits(x)));
}

// A tile of rows and vectors of columns over a chunk of k.
struct BlockTile {
    const uint32_t* a;  // rows, lda dwords apart
    int64_t lda;
    const float *scales, *lifts;  // of the blocks of a row, and the factors or null, `blocks_of_a` apart
    const int32_t* sums;          // what the sums of the blocks begin with; with zeros, the sums of the numbers
    int64_t blocks_of_a;
    const char* strips[4];  // of codes, of each vector; or the first is a panel: dwords of all columns
    u32v table;
    const float* scales_b;   // of all columns, block by block
    const int32_t* zeros_b;  // or null
    int64_t blocks, quarters;  // quarters: sixteens of a block
    float* y;                  // rows of sums, ldy apart
    int64_t ldy;
    bool adds;
};

// SOURCE: the bits of codes in strips; negative, of those whose bytes a panel has.
template <class U, int ROWS, int V, int SOURCE> static void multiply_blocks(const BlockTile& t) {
    constexpr int BITS = SOURCE > 0 ? SOURCE : -SOURCE, AHEAD = 4096;
    const BlockTile f = t;
    f32v acc[ROWS][V] = {};
    const uint32_t* a = f.a;
    int64_t b = 0;
    for (int64_t block = 0; block < f.blocks; block++) {
        i32v sum[ROWS][V];
        UNROLLED(r, ROWS)
            UNROLLED(v, V) sum[r][v] = f.zeros_b ? i32v{} : (i32v)all((uint32_t)f.sums[r * f.blocks_of_a + block]);
        for (int64_t i = 0; i < f.quarters; i++, a += 4) {
            UNROLLED(v, V) {
                u32v w[4];
                if constexpr (SOURCE > 0) {
                    const char* const at = f.strips[v] + b;
                    UNROLLED_BY(line, 2 * BITS * W, 64) __builtin_prefetch(at + AHEAD + line);
                    if constexpr (BITS == 8) {
                        UNROLLED(d, 4) w[d] = from_runs(get<u32v>(at + d * 4 * W));
                        if (U::OFFSET)
                            UNROLLED(d, 4) w[d] ^= 0x80808080u;
                    } else {
                        two_dwords(get<u32v>(at), f.table, w);
                        two_dwords(get<u32v>(at + 4 * W), f.table, w + 2);
                    }
                } else {
                    UNROLLED(d, 4) w[d] = get<u32v>(f.strips[0] + b + (d * V + v) * 4 * W);
                }
                UNROLLED(r, ROWS) sum[r][v] = U::template sum16<BITS>(sum[r][v], w, a + r * f.lda);
            }
            b += SOURCE > 0 ? 2 * BITS * W : 16 * V * W;
        }
        UNROLLED(v, V) {
            const f32v scale = get<f32v>(f.scales_b + (block * V + v) * W);
            if (f.zeros_b) {
                const i32v zero = get<i32v>(f.zeros_b + (block * V + v) * W);
                UNROLLED(r, ROWS) sum[r][v] -= zero * f.sums[r * f.blocks_of_a + block];
            }
            f32v x[ROWS];
            UNROLLED(r, ROWS) x[r] = __builtin_convertvector(sum[r][v], f32v) * scale;
            if (__builtin_expect(!!f.lifts, 0))
                UNROLLED(r, ROWS) x[r] = within_floats(x[r] * f.lifts[r * f.blocks_of_a + block]);
            UNROLLED(r, ROWS) acc[r][v] = fused(x[r], all_floats(f.scales[r * f.blocks_of_a + block]), acc[r][v]);
        }
    }
    UNROLLED(r, ROWS)
        UNROLLED(v, V) {
            float* const to = f.y + r * f.ldy + v * W;
            put(to, f.adds ? get<f32v>(to) + acc[r][v] : acc[r][v]);
        }
}

template <class U> struct Blocks {
    typedef Gemm<U> G;
    typedef void Multiply(const BlockTile&);
    static constexpr int M = 4;
    static constexpr int64_t LONGEST = 512, MOST_ROWS = 128, GROUPS = 4;
    static constexpr int vectors(int rows) {
        if (W == 8) return 4 / rows;
        return rows <= 2 ? 4 : 2;
    }

    // What a thread has of b for a chunk: scales, zeros and panels of groups of V vectors.
    struct Thread {
        float *y, *scales;
        int32_t* zeros;
        uint32_t* panel;
    };
    struct Job {
        lp::Work& p;
        int64_t size, blocks, chunk;  // numbers with one sum; blocks of k; blocks of a chunk
        int64_t rows, lda, row_task, tile, groups;
        int v;
        bool in_registers, lifts;
        uint32_t* a;
        float *scales, *lift;
        int32_t* sums;
        uint32_t* memory;
        int64_t memory_each, tasks_m, tasks;
        void (*prepare)(const Job&, Thread&, int64_t lane, int64_t group, int64_t block, int64_t end);
        Multiply* multiply;
        std::atomic<int> any_lift{0};
        alignas(64) std::atomic<int64_t> next_task{0};
        explicit Job(lp::Work& work) : p(work) {}
        int64_t dwords() const { return chunk * size / 4; }
    };

    // What is added to the numbers of b, and their bytes.
    static int offset(int type) {
        if (is_e2m1(type)) return 12;
        if (type == LP_CODES_I4) return 8;
        return type == LP_CODES_U4 ? 0 : U::OFFSET;
    }
    static const int8_t* table(int type) {
        if (is_e2m1(type)) return BYTES_OF[0];
        return BYTES_OF[type == LP_CODES_I4 ? 1 : 2];
    }

    static float scale_of_a(const Source& s, const uint8_t* scales, int64_t block) {
        if (s.type == LP_MXFP4) return block_scales<LP_MXFP4>(all(scales[block]))[0];
        if (s.type == LP_NVFP4) return block_scales<LP_NVFP4>(all(scales[block]))[0];
        float found = 1;
        if (scales) __builtin_memcpy(&found, scales + 4 * block, 4);
        return found;
    }

    // Writes row i of a: dwords in the order of b's, the scales and the sums of blocks.
    static void pack_row_of_a(Job& j, int64_t i) {
        const Source& s = j.p.a;
        uint32_t* const to = j.a + i * j.lda;
        __builtin_memset(to, 0, 4 * (size_t)j.lda);
        const int64_t begin = i * j.blocks;
        if (i >= s.lanes) {
            __builtin_memset(j.scales + begin, 0, 4 * (size_t)j.blocks);
            __builtin_memset(j.sums + begin, 0, 4 * (size_t)j.blocks);
            for (int64_t block = 0; block < j.blocks; block++) j.lift[begin + block] = 1;
            return;
        }
        const bool is_half = is_e2m1(s.type), by_fours = bits_of(j.p.b.type) == 8;
        const int64_t lane = s.lane_offset(i);
        const char* const at = s.at + lane;
        const u32v numbers = table_of(BYTES_OF[3]);
        alignas(16) static const uint8_t EVEN_ODD[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
        const int per = is_half ? 8 : 4;  // numbers of a dword
        for (int64_t k = 0; k < s.steps; k += W * per) {
            const int64_t count = s.steps - k < W * per ? s.steps - k : W * per;
            alignas(64) uint32_t raw[W], halves[2][W];
            copy_some(raw, at + k * bits_of(s.type) / 8, (int)((count * bits_of(s.type) + 7) / 8));
            if (is_half && count % 2) ((uint8_t*)raw)[count / 2] &= 15;
            if (!is_half) {
                const u32v x = get<u32v>(raw);
                put(raw, by_fours ? x : shuffled(x, table_of(EVEN_ODD)));
                __builtin_memcpy(to + k / 4, raw, (size_t)((count + 15) / 16 * 16));
                continue;
            }
            u32v two[2];
            two_dwords(get<u32v>(raw), numbers, two);
            put(halves[0], two[0]);
            put(halves[1], two[1]);
            for (int64_t d = 0; d < (count + 7) / 8; d++) {
                uint32_t* const pair = to + k / 4 + 2 * d;
                pair[0] = halves[0][d];
                pair[1] = halves[1][d];
                if (!by_fours) continue;
                int8_t turned[8];
                for (int q = 0; q < 8; q++) turned[q] = ((const int8_t*)pair)[q % 2 * 4 + q / 2];
                __builtin_memcpy(pair, turned, 8);
            }
        }
        const int scale_size = has_float_scales(s.type) ? 4 : 1;
        const uint8_t* const scales = s.scales ? s.scales + lane * 8 / bits_of(s.type) / s.block * scale_size : nullptr;
        const bool by_powers = j.p.b.type == LP_MXFP4;
        const float half = (is_half ? 0.5f : 1) * (is_e2m1(j.p.b.type) ? 0.5f : 1);
        const float factor = by_powers ? 0x1p16f * half : (j.p.b.type == LP_NVFP4 ? 1 : half);
        const u32v one = all(0x01010101u), ones[4] = {one, one, one, one};
        for (int64_t block = 0; block < j.blocks; block++) {
            const float scale = scale_of_a(s, scales, block * j.size / s.block);
            const bool lifts = by_powers && __builtin_fabsf(scale) >= 0x1p111f;
            j.scales[begin + block] = lifts ? scale : scale * factor;
            j.lift[begin + block] = lifts ? factor : 1;
            if (lifts) j.any_lift.store(1, std::memory_order_relaxed);
            i32v sum = {};
            const uint32_t* const of_block = to + block * j.size / 4;
            for (int64_t d = 0; d < j.size / 4; d += 4) sum = U::template sum16<4>(sum, ones, of_block + d);
            j.sums[begin + block] = j.p.b.type == LP_CODES_U4 ? sum[0] : -offset(j.p.b.type) * sum[0];
        }
    }

    // Scales and zeros of W columns for blocks of a chunk, and their bytes, as vector `vector` of a group.
    template <int TYPE>
    static void prepare_vector(const Job& j, Thread& t, int64_t lane, int64_t vector, int64_t block, int64_t end) {
        typedef Coded<TYPE> C;
        const Columns<TYPE> columns(j.p.b, lane);
        const int64_t unit = TYPE == LP_CODES_U4 ? 4 : C::SCALES, group = vector / j.v, v = vector % j.v;
        const float half = (is_e2m1(j.p.a.type) ? 0.5f : 1) * 0.5f;
        const float factor = TYPE == LP_MXFP4 ? 0x1p-16f : (TYPE == LP_NVFP4 ? half : 1);
        const int64_t of_scale = C::block(j.p.b);  // numbers
        float* to = t.scales + (group * j.chunk * j.v + v) * W;
        [[maybe_unused]] int32_t* to_zeros = t.zeros + (to - t.scales);
        u32v rows[W], zeros[TYPE == LP_CODES_U4 ? W : 1];
        const char* next = columns.stored;  // the scales of the next task
        if (next) next += columns.strip.codes * 4 * W + j.tile / W * columns.strip.bytes();
        int64_t number = block * j.size / of_scale, left = (number + 1) * of_scale - block * j.size;
        for (int64_t i = block, start = 0, known = 0; i < end; i++, left -= j.size, to += j.v * W) {
            if (left <= 0) {
                number++;
                left += of_scale;
            }
            if (number >= known) {
                start = number / unit * unit;
                known = start + W * C::SCALES;
                columns.scales(start, rows);
                if constexpr (TYPE == LP_CODES_U4) columns.zeros(start, zeros);
            }
            if (next) __builtin_prefetch(next + number / C::SCALES * 4 * W);
            put(to, scale_of<TYPE>(rows[(number - start) / C::SCALES], number) * factor);
            if constexpr (TYPE == LP_CODES_U4) {
                put(to_zeros, __builtin_convertvector(zero_of(zeros[(number - start) / 4], number), i32v));
                to_zeros += j.v * W;
            }
        }
        if (j.in_registers) return;
        const u32v table = table_of(Blocks::table(TYPE));
        uint32_t* const panel = t.panel + (group * j.dwords() * j.v + v) * W;
        constexpr int EACH = C::BITS == 4 ? 2 : 1;  // dwords of a row
        const int64_t dwords = (end - block) * j.size / 4;
        for (int64_t d = 0; d < dwords; d += EACH * W) {
            columns.codes(block * j.size + 4 * d, rows);
            for (int i = 0; i < W && d + i * EACH < dwords; i++) {
                u32v two[2] = {columns.s.is_stored && C::BITS == 8 ? from_runs(rows[i]) : rows[i], u32v{}};
                if (C::BITS == 4) two_dwords(rows[i], table, two);
                else if (U::OFFSET) two[0] ^= 0x80808080u;
                UNROLLED(q, EACH) put(panel + (d + i * EACH + q) * j.v * W, two[q]);
            }
        }
    }
    template <int TYPE>
    static void prepare(const Job& j, Thread& t, int64_t lane, int64_t vectors, int64_t block, int64_t end) {
        const int64_t last = (j.p.n - 1) / W * W;
        for (int64_t v = 0; v < vectors; v++) prepare_vector<TYPE>(j, t, G::least(lane + v * W, last), v, block, end);
    }

    // The rows [row, row + rows) and the vectors of columns from `lane` on.
    static void task(const Job& j, Thread& t, int64_t row, int64_t rows, int64_t lane) {
        const lp::Work& p = j.p;
        const int64_t columns = G::least(p.n - lane, j.tile), groups = G::ceil(columns, j.v * W);
        const Strip strip(p.b);
        BlockTile x = {};
        x.lda = j.lda;
        x.blocks_of_a = j.blocks;
        x.ldy = j.tile;
        x.table = table_of(table(p.b.type));
        x.quarters = j.size / 16;
        for (int64_t block = 0, end; block < j.blocks; block = end) {
            end = G::least(block + j.chunk, j.blocks);
            j.prepare(j, t, lane, groups * j.v, block, end);
            x.blocks = end - block;
            x.adds = block > 0;
            for (int64_t i = row; i < row + rows; i += M)
                for (int64_t g = 0; g < groups; g++) {
                    const int64_t of_a = i * j.blocks + block, of_b = g * j.chunk * j.v * W;
                    x.a = j.a + i * j.lda + block * j.size / 4;
                    x.scales = j.scales + of_a;
                    x.sums = j.sums + of_a;
                    x.lifts = j.lifts ? j.lift + of_a : nullptr;
                    x.scales_b = t.scales + of_b;
                    x.zeros_b = p.b.type == LP_CODES_U4 ? t.zeros + of_b : nullptr;
                    x.strips[0] = (const char*)(t.panel + g * j.dwords() * j.v * W);
                    for (int v = 0; j.in_registers && v < j.v; v++) {
                        const int64_t number = G::least(lane / W + g * j.v + v, (p.n - 1) / W);
                        x.strips[v] = p.b.at + number * strip.bytes() + block * j.size * bits_of(p.b.type) / 8 * W;
                    }
                    x.y = t.y + (i - row) * j.tile + g * j.v * W;
                    j.multiply(x);
                }
        }
        const int64_t exist = G::least(rows, p.m - row);
        for (int64_t q = 0; q < columns; q += G::N) {
            const int count = (int)G::least(columns - q, G::N);
            finish_rows<G::N>(p, t.y + q, j.tile, row, (int)exist, lane + q, count, nullptr, nullptr);
        }
    }

    static void work(void* at, int thread) {
        Job& j = *(Job*)at;
        Thread t;
        t.y = (float*)(j.memory + thread * j.memory_each);
        t.scales = t.y + j.row_task * j.tile;
        t.zeros = (int32_t*)(t.scales + j.chunk * j.tile);
        t.panel = (uint32_t*)(t.zeros + j.chunk * j.tile);
        for (int64_t i; (i = j.next_task.fetch_add(1)) < j.tasks;) {
            const int64_t row = i % j.tasks_m * j.row_task;
            task(j, t, row, G::least(j.row_task, j.rows - row), i / j.tasks_m * j.tile);
        }
    }

    template <int ROWS> static Multiply* function(const Job& j) {
        constexpr int V = vectors(ROWS);
        if (bits_of(j.p.b.type) == 8)
            return j.in_registers ? multiply_blocks<U, ROWS, V, 8> : multiply_blocks<U, ROWS, V, -8>;
        return j.in_registers ? multiply_blocks<U, ROWS, V, 4> : multiply_blocks<U, ROWS, V, -4>;
    }

    static bool find(Job& j) {
        const int a = j.p.a.type;
        auto use = [&](auto type) {
            if (j.p.b.type == type) j.prepare = prepare<type>;
        };
        j.prepare = nullptr;
        use(Int<LP_MXFP4>());
        use(Int<LP_NVFP4>());
        use(Int<LP_CODES_I8>());
        use(Int<LP_CODES_I4>());
        use(Int<LP_CODES_U4>());
        j.size = a == LP_NVFP4 || j.p.b.type == LP_NVFP4 ? 16 : 32;
        auto divides = [&](int64_t block) { return block % j.size == 0 || block >= j.p.k; };
        return j.prepare && (is_e2m1(a) || a == LP_CODES_I8) && divides(j.p.a.block) && divides(j.p.b.block);
    }

    static int32_t gemm(lp::Work& p) {
        Job j(p);
        if (!find(j)) return LP_UNSUPPORTED;
        j.blocks = G::ceil(p.k, j.size);
        j.chunk = G::ceil(sum_length(p.k, LONGEST), j.size);
        const int rows = p.m <= 2 ? (int)p.m : M;
        j.rows = G::ceil(p.m, rows) * rows;
        j.lda = j.blocks * j.size / 4 + 16;
        j.in_registers = p.b.is_stored && p.m <= 2 * M;
        j.v = vectors(rows);
        j.multiply = function<M>(j);
        if (rows <= 2) j.multiply = rows == 1 ? function<1>(j) : function<2>(j);
        const int threads = p.m * p.n * p.k >= 1 << 18 ? p.threads : 1;
        j.tile = j.v * W * (p.m > 2 * M ? GROUPS : 1);
        j.row_task = G::least(j.rows, MOST_ROWS);
        j.tasks_m = G::ceil(j.rows, j.row_task);
        j.tasks = j.tasks_m * G::ceil(p.n, j.tile);
        j.memory_each = G::ceil(j.tile * (j.row_task + 2 * j.chunk + j.dwords()), 1024) * 1024 + 64;
        const int64_t of_a = G::ceil(j.rows * j.lda, 16) * 16, metas = G::ceil(j.rows * j.blocks, 16) * 16;
        j.a = (uint32_t*)p.memory.of(4 * (of_a + 3 * metas + threads * j.memory_each));
        if (!j.a) return LP_NO_MEMORY;
        j.scales = (float*)(j.a + of_a);
        j.lift = j.scales + metas;
        j.sums = (int32_t*)(j.lift + metas);
        j.memory = (uint32_t*)(j.sums + metas);
        auto pack = [&](int64_t i) { pack_row_of_a(j, i); };
        lp::share(j.rows, p.m * p.k >= 1 << 18 ? threads : 1, pack);
        j.lifts = j.any_lift;
        lp::run(work, &j, (int)G::least(threads, j.tasks));
        return LP_OK;
    }
};
