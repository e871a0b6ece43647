// Packing: from memory in any type and strides to the order in which the micro-kernel reads, rounded, split, scaled and
// decoded on the way.
//
// a: for each block and slot, LANES rows of W dwords. b: for each block and slot, W rows of LANES dwords.

// W dwords of each slot, from P runs of W numbers each, along k (one after the other) or across. f: the two powers of
// two that scale them.
template <int TYPE, int FORMAT, int ELEMENT, bool SPLITS>
INLINE void pack_row(const char* const* at, [[maybe_unused]] bool along_k, const Source& s, const f32v* f,
                     uint32_t offset, u32v* out) {
    constexpr int P = per_dword(ELEMENT);
    if constexpr (P == 4) {
        if (along_k) return (void)(out[0] = get<u32v>(at[0]) ^ offset);
        out[0] = (widen_u8<u32v>(at[0]) | widen_u8<u32v>(at[1]) << 8 | widen_u8<u32v>(at[2]) << 16 |
                  widen_u8<u32v>(at[3]) << 24) ^
            offset;
    } else if constexpr (ELEMENT == E_I16) {
        out[0] = along_k ? int8_along_k<P>(at[0]) : (widen_i8<u32v>(at[0]) & 0xffffu) | widen_i8<u32v>(at[1]) << 16;
    } else if constexpr (TYPE == LP_BF16 && ELEMENT == E_BF16) {
        out[0] = widen_u16<u32v>(at[0]) | widen_u16<u32v>(at[1]) << 16;
    } else if constexpr (W == 16 && TYPE == LP_E4M3 && ELEMENT == E_BF16) {
        out[0] = bf16_of_e4m3(widen_u8<u32v>(at[0]) | widen_u8<u32v>(at[1]) << 16);
    } else if constexpr (TYPE == LP_C64) {
        f32v x[2][P];
        UNROLLED(p, P) {
            u32v parts[2];
            deinterleave(get<u32v>(at[p]), get<u32v>(at[p] + 4 * W), parts, std::make_integer_sequence<int, W>());
            UNROLLED(c, 2) x[c][p] = FORMAT == LP_TO_F16 ? floats(parts[c]) * f[0] * f[1] : floats(parts[c]);
        }
        int done = emit_parts<FORMAT, ELEMENT, SPLITS>(x[0], s, out);
        emit_parts<FORMAT, ELEMENT, SPLITS>(x[1], s, out + done * (ELEMENT == E_PAIR ? 2 : 1));
    } else {
        f32v x[P];
        UNROLLED(p, P) {
            x[p] = widened<TYPE>(at[p]);
            if (FORMAT == LP_TO_F16) x[p] = x[p] * f[0] * f[1];
        }
        emit_parts<FORMAT, ELEMENT, SPLITS>(x, s, out);
    }
}

// The factors of W lanes, or of one.
template <int FORMAT> INLINE void lane_factors(const Source& s, int64_t lane, bool of_lanes, f32v* f) {
    if constexpr (FORMAT == LP_TO_F16)
        UNROLLED(i, 2) {
            const float* at = s.factors + i * (s.lanes + 64) + lane;
            f[i] = all_floats(1);
            if (s.factors) f[i] = of_lanes ? get<f32v>(at) : all_floats(*at);
        }
}

// How packed strips are laid out: `width` dwords between the rows of a tile, `slot` between slots.
struct Layout {
    bool of_a;
    int64_t lanes;  // of a strip
    int64_t width, slot;
    uint32_t offset;  // added to the numbers of a by units that multiply unsigned by signed numbers
};

// The P runs of W numbers of each lane of a tile, or of each dword of k if the lanes are contiguous. Lanes from `end`
// on are the last one again.
template <int TYPE, int ELEMENT> struct Runs {
    static constexpr int P = per_dword(ELEMENT), SIZE = bits_of(TYPE) / 8, RUN = W * SIZE;
    const char* at[W][P];
    alignas(64) char copies[W][P * RUN];

    // Copies what does not have all of these numbers, or has them with strides on both sides.
    __attribute__((noinline)) void find(const Source& s, int64_t lane, int64_t step, int end, bool along_k,
                                        bool by_lane) {
        const int64_t have = s.lanes - lane < W ? s.lanes - lane : W,
                      steps = s.steps - step < W * P ? s.steps - step : W * P;
        const bool direct = by_lane ? along_k && (steps == W * P || (ELEMENT < E_I16 && steps % W == 0)) : have == W;
        if (direct) __builtin_memset(copies[0], 0, RUN);  // of runs after the last step
        else __builtin_memset(copies, 0, sizeof copies);
        for (int i = 0; i < W; i++) {
            if (by_lane && i >= end) {
                UNROLLED(p, P) at[i][p] = at[end - 1][p];
                continue;
            }
            const int64_t offset = by_lane ? s.lane_offset(lane + i) : lane;
            const char* from = s.at + (offset + (along_k ? step : 0)) * SIZE;
            UNROLLED(p, P) {
                const int k = order<ELEMENT>(i, p);
                at[i][p] = direct ? copies[0] : copies[i] + p * RUN;
                if (direct && along_k && p * W < steps) at[i][p] = from + p * RUN;
                if (by_lane || k >= steps) continue;
                const char* run = from + s.k_offset(step + k) * SIZE;
                if (direct) at[i][p] = run;
                else __builtin_memcpy(copies[i] + p * RUN, run, (size_t)have * SIZE);
            }
            if (direct || !by_lane) continue;
            if (along_k) __builtin_memcpy(copies[i], from, (size_t)(steps * SIZE));
            for (int64_t j = 0; !along_k && j < steps; j++)
                __builtin_memcpy(copies[i] + j * SIZE, from + s.k_offset(step + j) * SIZE, SIZE);
        }
    }
};

// Packs tiles of W lanes and W * P numbers of k, of which the first `lanes` lanes are written.
template <int TYPE, int FORMAT, int ELEMENT, bool SPLITS>
static __attribute__((noinline)) void pack_tiles(const Source& s, const Layout& l, int64_t lane, int64_t block,
                                                 int64_t end_block, int lanes, uint32_t* to) {
    typedef Runs<TYPE, ELEMENT> R;
    constexpr int P = R::P;
    const bool along_k = s.k == 1 && !s.k_offsets, by_lane = along_k || s.lane != 1 || s.lane_offsets;
    const int end = (int)(s.lanes - lane < lanes ? s.lanes - lane : lanes);
    const int slots = SPLITS ? slots_of<ELEMENT>(s) : whole_slots(TYPE, ELEMENT);
    R runs;
    for (int64_t first = block, ahead = 0; block < end_block; block++, ahead += P * R::RUN) {
        const int64_t step = block * W * P;
        if (!along_k || block == first || step + W * P > s.steps) {
            runs.find(s, lane, step, end, along_k, by_lane);
            ahead = 0;
        }
        u32v rows[most_slots(TYPE, ELEMENT, SPLITS)][W], out[most_slots(TYPE, ELEMENT, SPLITS)];
        f32v f[2];
        if (!by_lane) lane_factors<FORMAT>(s, lane, true, f);
        auto row = [&](int i) __attribute__((always_inline)) {
            const char* at[P];
            UNROLLED(p, P) {
                at[p] = runs.at[i][p] + ahead;
                if (p * R::RUN % 64 == 0 && (along_k || s.next))
                    __builtin_prefetch(at[p] + (s.next ? s.next : 512), 0, 2);
            }
            if (by_lane) lane_factors<FORMAT>(s, lane + i, false, f);
            pack_row<TYPE, FORMAT, ELEMENT, SPLITS>(at, by_lane, s, f, l.offset, out);
            for (int p = 0; p < slots; p++) rows[p][i] = out[p];
        };
        if constexpr (SPLITS || TYPE == LP_C64) {  // whose machine code is large
            for (int i = 0; i < W; i++) row(i);
        } else {
            UNROLLED(i, W) row(i);
        }
        for (int p = 0; p < slots; p++, to += l.slot) {
            if (by_lane != l.of_a) transpose(rows[p]);
            UNROLLED(i, W)
                if (!l.of_a || i < lanes) put(to + i * l.width, rows[p][i]);
        }
    }
}

// Packs strips of lanes, blocks [first, end) of k; strips are `strip_dwords` apart. Reads memory in long runs.
template <int TYPE, int FORMAT, int ELEMENT, bool SPLITS>
static void pack(const Source& s, const Layout& l, int64_t first_strip, int64_t end_strip, int64_t first, int64_t end,
                 uint32_t* to, int64_t strip_dwords) {
    constexpr int P = per_dword(ELEMENT), SIZE = bits_of(TYPE) / 8, RUN = is_coded(TYPE) ? 64 : 8;
    const int slots = SPLITS ? slots_of<ELEMENT>(s) : whole_slots(TYPE, ELEMENT);
    auto pack_blocks = [&](int64_t strip, int64_t block, int64_t end_block, int64_t lane) {
        uint32_t* base = to + (strip - first_strip) * strip_dwords + (block - first) * slots * l.slot;
        for (; lane < l.lanes; lane += W) {
            uint32_t* tile = base + lane * (l.of_a ? W : 1);
            const int lanes = l.lanes - lane < W ? (int)(l.lanes - lane) : W;
            if (strip * l.lanes + lane < s.lanes) {
                if constexpr (is_coded(TYPE)) {
                    Decoder<TYPE, ELEMENT> columns(s, strip * l.lanes + lane);
                    constexpr int AT_ONCE = columns.BLOCKS;
                    for (int64_t i = block; i < end_block; i += AT_ONCE, tile += AT_ONCE * slots * l.slot)
                        columns.blocks(i, end_block - i < AT_ONCE ? end_block - i : AT_ONCE, tile, l.width);
                } else {
                    pack_tiles<TYPE, FORMAT, ELEMENT, SPLITS>(s, l, strip * l.lanes + lane, block, end_block, lanes,
                                                              tile);
                }
                continue;
            }
            for (int64_t p = 0; p < (end_block - block) * slots; p++)
                for (int i = 0; i < (l.of_a ? lanes : W); i++) put(tile + p * l.slot + i * l.width, u32v{});
        }
    };
    const bool along_lanes = s.lane == 1 && !s.lane_offsets && !is_coded(TYPE) && !(s.k == 1 && !s.k_offsets);
    if (l.of_a || !along_lanes) {
        for (int64_t strip = first_strip; strip < end_strip; strip++)
            for (int64_t block = first; block < end; block += RUN)
                pack_blocks(strip, block, block + RUN < end ? block + RUN : end, 0);
        return;
    }
    // Row by row of memory: rows that are a power of two apart share few places of a cache.
    for (int64_t block = first; block < end; block++) {
        uint32_t* base = to + (block - first) * slots * l.slot;
        const bool whole_k = (block + 1) * W * P <= s.steps;
        for (int row = 0; whole_k && row < W; row++) {
            const char* at[P];
            UNROLLED(p, P)
                at[p] = s.at + (first_strip * l.lanes + s.k_offset(block * W * P + order<ELEMENT>(row, p))) * SIZE;
            const int64_t ahead = s.next || s.k_offsets || (block + 2) * W * P > s.steps ? s.next : W * P * s.k * SIZE;
            for (int64_t strip = first_strip; strip < end_strip; strip++) {
                const int64_t first_lane = strip * l.lanes,
                              have = s.lanes - first_lane < l.lanes ? s.lanes - first_lane : l.lanes;
                uint32_t* tile = base + (strip - first_strip) * strip_dwords + row * l.width;
                int64_t lane = 0;
                for (; P == 4 && lane + 4 * W <= have; lane += 4 * W) {
                    u32v out[4];
                    UNROLLED(p, P) __builtin_prefetch(at[p] + ahead, 0, 2);
                    if constexpr (P == 4) int8_dwords(at, out);
                    UNROLLED(v, 4) put(tile + lane + v * W, out[v]);
                    UNROLLED(p, P) at[p] += 4 * W;
                }
                for (; lane + W <= have; lane += W) {
                    u32v out[most_slots(TYPE, ELEMENT, SPLITS)];
                    f32v f[2];
                    lane_factors<FORMAT>(s, first_lane + lane, true, f);
                    UNROLLED(p, P)
                        if (lane * SIZE % 64 == 0) __builtin_prefetch(at[p] + ahead, 0, 2);
                    pack_row<TYPE, FORMAT, ELEMENT, SPLITS>(at, false, s, f, l.offset, out);
                    for (int p = 0; p < slots; p++) put(tile + p * l.slot + lane, out[p]);
                    UNROLLED(p, P) at[p] += W * SIZE;
                }
            }
        }
        for (int64_t strip = whole_k ? s.lanes / l.lanes : first_strip; strip < end_strip; strip++)
            pack_blocks(strip, block, block + 1, whole_k ? (s.lanes - strip * l.lanes) / W * W : 0);
    }
}

typedef void Pack(const Source&, const Layout&, int64_t, int64_t, int64_t, int64_t, uint32_t*, int64_t);

// The packing functions by type and format, of numbers in one part and in several; null where there is none.
template <int ELEMENT, bool SPLITS, int I> constexpr Pack* pack_for() {
    constexpr int TYPE = I / LP_FORMATS, FORMAT = I % LP_FORMATS;
    if constexpr (can_pack(ELEMENT, TYPE, FORMAT) && !(SPLITS && FORMAT == LP_EXACT))
        return pack<TYPE, FORMAT, ELEMENT, SPLITS>;
    return nullptr;
}
template <int ELEMENT, int... I> INLINE Pack* find_pack(const Source& s, std::integer_sequence<int, I...>) {
    static constexpr Pack* whole[] = {pack_for<ELEMENT, false, I>()...};
    static constexpr Pack* split[] = {pack_for<ELEMENT, true, I>()...};
    return (s.parts > 1 ? split : whole)[s.type * LP_FORMATS + s.format];
}
template <int ELEMENT> static Pack* find_pack(const Source& s) {
    return find_pack<ELEMENT>(s, std::make_integer_sequence<int, LP_TYPES * LP_FORMATS>());
}

const int MOST_LANES = 256;

// The largest finite magnitudes in runs of memory: BY_LANE a run is a lane, whose largest of W are found[lane], else
// the numbers of all lanes at one k. Numbers with strides on both sides are first copied.
template <int TYPE, bool BY_LANE> static void find_largest(const Source& s, int64_t first, int64_t lanes, u32v* found) {
    constexpr int SIZE = bits_of(TYPE) / 8, V = TYPE == LP_C64 ? W / 2 : W;
    const bool in_place = !BY_LANE || (s.k == 1 && !s.k_offsets);
    const int64_t length = BY_LANE ? s.steps : lanes;
    for (int64_t run = 0; run < (BY_LANE ? lanes : s.steps); run++) {
        const char* at = s.at + (BY_LANE ? s.lane_offset(first + run) : first + s.k_offset(run)) * SIZE;
        u32v most = {};
        for (int64_t i = 0; i < length; i += V) {
            alignas(64) char copies[4 * W] = {};
            const char* from = at + i * SIZE;
            if (!in_place || length - i < V) {
                for (int64_t j = 0; j < V && i + j < length; j++)
                    __builtin_memcpy(copies + j * SIZE, in_place ? from + j * SIZE : at + s.k_offset(i + j) * SIZE,
                                     SIZE);
                from = copies;
            }
            u32v x = bits(widened<TYPE>(from)) & 0x7fffffffu, &to = BY_LANE ? most : found[i / V];
            to = (u32v)larger((i32v)to, (i32v)(x & (u32v)(x < 0x7f800000u)));
        }
        if (BY_LANE) found[run] = most;
    }
}

// Vectors of the largest magnitudes: one of each lane, or one or two (complex numbers) of W lanes.
const int MOST_FOUND = 2 * MOST_LANES / W;

static void find_exponents_of(const Source& s, int64_t first, int64_t end, int32_t* exponents) {
    u32v found[MOST_FOUND] = {}, square[W];
    const bool by_lane = s.lane != 1 || s.lane_offsets || (s.k == 1 && !s.k_offsets), is_complex = s.type == LP_C64;
    auto find = by_lane ? find_largest<LP_F32, true> : find_largest<LP_F32, false>;
    if (s.type == LP_BF16) find = by_lane ? find_largest<LP_BF16, true> : find_largest<LP_BF16, false>;
    if (is_complex) find = by_lane ? find_largest<LP_C64, true> : find_largest<LP_C64, false>;
    find(s, first, end - first, found);
    for (int64_t lane = 0; first + lane < end; lane += W) {
        i32v x = (i32v)found[lane / W];
        if (by_lane || is_complex) {
            for (int i = 0; i < W; i++)
                square[i] = by_lane ? found[lane + i] : i < 2 ? found[lane / W * 2 + i] : u32v{};
            if (by_lane) transpose(square);
            else deinterleave(square[0], square[1], square, std::make_integer_sequence<int, W>());
            x = (i32v)square[0];
            for (int i = 1; i < W; i++) x = larger(x, (i32v)square[i]);
        }
        i32v e = 141 - (x >> 23);
        for (int i = 0; i < W; i++)  // subnormal numbers, and zeros
            if (x[i] < 0x00800000) e[i] = x[i] ? 132 + __builtin_clz((unsigned)x[i]) : 0;
        const int64_t at = first + lane;  // memory for all lanes is padded
        put(exponents + at, e);
        put(s.factors + at, powers(e >> 1));
        put(s.factors + s.lanes + 64 + at, powers(e - (e >> 1)));
    }
}

// The exponents that bring the largest finite magnitude of each lane into [2^14, 2^15), float16's second highest
// binade, and the factors: of lanes [first, end), at most MOST_LANES, of which `first` is a multiple of W.
INLINE void find_exponents(const Source& s, int64_t first, int64_t end, int32_t* exponents) {
    for (int64_t next; first < end; first = next) {
        next = s.lane != 1 || s.lane_offsets || s.k == 1 ? first + MOST_FOUND : end;
        find_exponents_of(s, first, next < end ? next : end, exponents);
    }
}
