// Codes with the scales of blocks: how W columns of them are read, decoded to dwords of k, and stored by lp_pack.
//
// The caller's codes are contiguous along k and are transposed as they are read. Stored codes are in strips of W
// columns, each with rows of 4 * W bytes: of codes, then of scales, then of zeros. A row of 4-bit codes has a dword of
// each column, eight numbers of k; one of 8-bit codes has four numbers of k, each of W columns, one of 16 bits two. A row of scales has a
// dword of each column, one float32 or four of 8 bits, as zeros. The last strip repeats the last column.

template <int TYPE> struct Coded {
    static constexpr int BITS = bits_of(TYPE), PER = 32 / BITS;  // numbers of a column in a row
    static constexpr bool FLOATS = has_float_scales(TYPE);
    static constexpr int SCALES = FLOATS ? 1 : 4;  // of a column in a row
    // Numbers with a common scale.
    static int64_t block(const Source& s) { return FLOATS ? s.block : block_of(TYPE); }
};

constexpr int64_t rounded_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// The rows of a strip. Those of codes are whole blocks of every unit.
struct Strip {
    int64_t codes, scales, zeros;
    Strip() {}
    explicit Strip(const Source& s) {
        const int64_t blocks = rounded_up(s.steps, s.block) / s.block, fours = rounded_up(blocks, 4) / 4;
        codes = rounded_up(s.steps, 32) * bits_of(s.type) / 32;
        scales = has_float_scales(s.type) ? blocks : fours;
        if (!has_scales(s.type)) scales = 0;
        zeros = s.type == LP_CODES_U4 ? fours : 0;
    }
    int64_t bytes() const { return 4 * W * (codes + scales + zeros); }
};

// Puts the bytes of W dwords in four runs of W bytes: first within blocks of 16 bytes, as instructions do.
template <int... I> INLINE u32v runs_of_blocks(u32v dwords, std::integer_sequence<int, I...>) {
    return (u32v)__builtin_shufflevector((bytes)dwords, (bytes)dwords, (I / 16 * 16 + I % 4 * 4 + I % 16 / 4)...);
}
template <int... I> INLINE u32v joined_runs(u32v blocks, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(blocks, blocks, (I % (W / 4) * 4 + I / (W / 4))...);
}
INLINE u32v in_runs(u32v dwords) {
    const u32v blocks = runs_of_blocks(dwords, std::make_integer_sequence<int, 4 * W>());
    return joined_runs(blocks, std::make_integer_sequence<int, W>());
}

// W columns of codes from `lane` on; those after the last are the last.
template <int TYPE> struct Columns {
    typedef Coded<TYPE> C;
    const Source& s;
    const int64_t lane, end_lane;
    Strip strip;
    const char* stored = nullptr;
    Columns(const Source& source, int64_t first) : s(source), lane(first), end_lane(s.lanes) {
        if (!s.is_stored) return;
        strip = Strip(s);
        stored = s.at + first / W * strip.bytes();
    }

    // Reads W dwords of each column, of which `size` bytes exist, and transposes them.
    template <class Start> INLINE_MEMBER void transposed(int64_t size, const Start& start, u32v* rows) const {
        auto column = [&](int i) __attribute__((always_inline)) {
            return start(lane + i < end_lane ? lane + i : end_lane - 1);
        };
        if (size >= 4 * W) {
            UNROLLED(i, W) {
                rows[i] = get<u32v>(column(i));
                __builtin_prefetch(column(i) + 128, 0, 2);
            }
        } else {
            for (int i = 0; i < W; i++) copy_some(rows + i, column(i), size > 0 ? (int)size : 0);
        }
        transpose(rows);
    }
    // Loads W rows of the stored strip from `first` on, of which those from `end` on are zero.
    INLINE_MEMBER void loaded(int64_t first, int64_t end, u32v* rows) const {
        UNROLLED(i, W) {
            const char* const at = stored + (first + i) * 4 * W;
            rows[i] = first + i < end ? get<u32v>(at) : u32v{};
            __builtin_prefetch(at + 2048);
        }
    }

    // Rows of codes of W * PER numbers of k; dwords of each column unless they are stored.
    INLINE_MEMBER void codes(int64_t step, u32v* rows) const {
        if (s.is_stored) return loaded(step / C::PER, strip.codes, rows);
        const int64_t steps = s.steps - step;
        const char* const at = s.at + step * C::BITS / 8;
        const int64_t* const offsets = s.lane_offsets;
        auto start = [&](int64_t j) { return at + (offsets ? offsets[j] : j * s.lane); };
        transposed((steps * C::BITS + 7) / 8, start, rows);
        if (C::BITS == 4 && steps < W * C::PER && steps % 2) rows[steps / C::PER] &= (1u << steps % C::PER * 4) - 1;
    }
    // Rows of scales from a block on, a multiple of SCALES, and of zeros from a multiple of 4 on.
    INLINE_MEMBER void scales(int64_t block, u32v* rows) const {
        if (s.is_stored) return loaded(strip.codes + block / C::SCALES, strip.codes + strip.scales, rows);
        if (C::FLOATS && !s.scales) {
            UNROLLED(i, W) rows[i] = bits(all_floats(1));
            return;
        }
        constexpr int SIZE = 4 / C::SCALES;
        const int64_t blocks = (s.steps - 1) / C::block(s) + 1 - block;
        auto start = [&](int64_t j) { return (const char*)s.scales + j * s.scale_lane + block * SIZE; };
        transposed(blocks * SIZE, start, rows);
    }
    INLINE_MEMBER void zeros(int64_t block, u32v* rows) const {
        if (s.is_stored) {
            const int64_t first = strip.codes + strip.scales;
            return loaded(first + block / 4, first + strip.zeros, rows);
        }
        const int64_t blocks = (s.steps - 1) / C::block(s) + 1 - block;
        transposed(blocks, [&](int64_t j) { return (const char*)s.zeros + j * (s.scale_lane / 4) + block; }, rows);
    }
};

// The element type of codes of 16 bits.
constexpr int wide_of(int type) { return type == LP_CODES_BF16 ? LP_BF16 : LP_F16; }

// The k-th numbers of W columns from rows of codes, without their scale.
template <int TYPE, bool HAS_NAN = true> INLINE f32v number_of(const void* rows, int64_t k,
                                                               [[maybe_unused]] f32v zero) {
    if constexpr (!has_scales(TYPE)) return widened<wide_of(TYPE)>((const char*)rows + k * 2 * W);
    if constexpr (bits_of(TYPE) == 8) {
        const char* const at = (const char*)rows + k * W;
        if constexpr (TYPE == LP_CODES_I8) return __builtin_convertvector(widen_i8<i32v>(at), f32v);
        return HAS_NAN ? widened<LP_E4M3>(at) : small_e4m3<f32v>(at) * 0x1p8f;
    }
    const u32v dwords = get<u32v>((const char*)rows + k / 8 * 4 * W) >> (uint32_t)(k % 8 * 4);
    if constexpr (TYPE == LP_CODES_I4) return __builtin_convertvector((i32v)(dwords << 28) >> 28, f32v);
    if constexpr (TYPE == LP_CODES_U4) return __builtin_convertvector((i32v)(dwords & 15u), f32v) - zero;
    return e2m1_of(dwords);
}

// The scales of a block from a row of scales.
template <int TYPE> INLINE f32v scale_of(u32v row, int64_t block) {
    if constexpr (has_float_scales(TYPE)) return floats(row);
    return block_scales<TYPE>(row >> (uint32_t)(block % 4 * 8) & 0xffu);
}
INLINE f32v zero_of(u32v row, int64_t block) {
    return __builtin_convertvector((i32v)(row >> (uint32_t)(block % 4 * 8) & 0xffu), f32v);
}

// Decodes W columns from `lane` on, W dwords of each at a time.
template <int TYPE, int ELEMENT> struct Decoder {
    typedef Coded<TYPE> C;
    static constexpr int P = per_dword(ELEMENT), BITS = C::BITS, PER = C::PER, BLOCKS = PER / P;
    static constexpr int SLOTS = whole_slots(TYPE, ELEMENT);
    typedef uint16_t words __attribute__((vector_size(4 * W)));
    const Columns<TYPE> columns;
    int64_t start = 0, end = 0;  // of k: the numbers of `scales`
    u32v scales[W], zeros[C::FLOATS ? W : 1];
    Decoder(const Source& s, int64_t lane) : columns(s, lane) {}

    void find_scales(int64_t step, int64_t needed) {
        if (needed <= end) return;
        const int64_t unit = C::block(columns.s) * (TYPE == LP_CODES_U4 ? 4 : C::SCALES);
        start = step / unit * unit;
        end = start + W * C::SCALES * C::block(columns.s);
        columns.scales(start / C::block(columns.s), scales);
        if constexpr (TYPE == LP_CODES_U4) columns.zeros(start / C::block(columns.s), zeros);
    }

    // bfloat16 of pairs of codes by a table, if no number exceeds bfloat16; scales below its normal numbers are zero to
    // the unit. Of NVFP4 there are two scales, for the low and the high words, and that of zero has another exponent.
    INLINE_MEMBER bool by_table(const u32v* rows, bool has_runs, u32v four, u32v code, uint32_t* to,
                                int64_t width) const {
        constexpr uint8_t LEAST = TYPE == LP_NVFP4, RANGE = TYPE == LP_NVFP4 ? 0x7d : 246;
        const bytes distance = (bytes)four - LEAST;
        if (any((u32v)(distance > RANGE))) return false;
        const u32v one = (code & 0xff) << 7, two = bf16_of_e4m3((code & 0xffff) | code << 8);
        const words scale = (words)(TYPE == LP_NVFP4 ? two : one | one << 16);
        const words exponents = (uint16_t)(BITS == 8 ? 0x8380 : 0x7f80) - (scale & 0x7f80);
        const words significands = scale >> 1 & 0x38;
        if (BITS == 8 && has_runs) {
            const char* const at = (const char*)rows;
            UNROLLED(d, W) {
                const words pair = (words)(widen_u8<u32v>(at + d * W) | widen_u8<u32v>(at + (W + d) * W) << 16);
                put(to + d * width, scaled_bf16<BITS == 8>(pair, exponents, significands));
            }
        } else {
            UNROLLED(i, W / PER) {
                const u32v low = rows[i], high = rows[W / PER + i];
                const u32v pairs[2] = {(low & 0xffff) | high << 16, low >> 16 | (high & 0xffff0000u)};
                UNROLLED(j, PER) {
                    const words codes = (words)pairs[j * 2 / PER] >> j % (PER / 2) * BITS;
                    put(to + (i * PER + j) * width, scaled_bf16<BITS == 8>(codes, exponents, significands));
                }
            }
        }
        return true;
    }

    // Writes `count` blocks, at most BLOCKS: W dwords of each slot, `width` apart.
    __attribute__((noinline)) void blocks(int64_t block, int64_t count, uint32_t* to, int64_t width) {
        const int64_t step = block * W * P, last = step + count * W * P;
        if constexpr (!has_scales(TYPE)) {
            const char* const at = columns.stored + step * 2 * W;
            for (int64_t k = 0; k < last - step; k += W)
                UNROLLED(i, W) put(to + (k + i) * width, bits(number_of<TYPE>(at, k + i, f32v{})));
            return;
        }
        find_scales(step, last < columns.s.steps ? last : columns.s.steps);
        u32v rows[W];
        columns.codes(step, rows);
        bytes largest = {};  // of codes but for their signs
        UNROLLED(i, W) {
            const bytes x = (bytes)rows[i] + (bytes)rows[i];
            largest = x > largest ? x : largest;
        }
        bool has_runs = BITS == 4 || columns.s.is_stored;
        const int64_t shift = columns.s.is_stored ? step % PER : 0;
        [[maybe_unused]] const bool has_nan = BITS == 8 && any((u32v)(largest == 0xfe));
        for (int64_t b = 0; b < count; b++, to += SLOTS * W * width) {
            const uint64_t first =
                (uint64_t)(step - start + b * W * P) / (uint64_t)C::block(columns.s);  // of the scales
            const uint64_t number = (uint64_t)(shift + b * W * P);
            const uint64_t rest = W * P % PER ? number % PER : 0;  // a block may end inside a dword
            const u32v* const codes = rows + number / PER;
            const u32v row = scales[first / C::SCALES];
            if constexpr (W == 16 && ELEMENT == E_BF16)
                if (!has_nan && by_table(codes, has_runs, row, row >> (uint32_t)(first % 4 * 8), to, width)) continue;
            if (!has_runs)
                UNROLLED(i, W) rows[i] = in_runs(rows[i]);
            has_runs = true;
            f32v scale[P], zero = {};
            if constexpr (TYPE == LP_CODES_U4) zero = zero_of(zeros[first / 4], (int64_t)first);
            UNROLLED(p, P) scale[p] = scale_of<TYPE>(row, (int64_t)first + (block_of(TYPE) < W * P ? p : 0));
            auto decode = [&](auto nan) __attribute__((always_inline)) {
                UNROLLED(d, W) {
                    f32v x[P];
                    u32v out[SLOTS];
                    UNROLLED(p, P) {
                        const int64_t k = (int64_t)rest + order<ELEMENT>(d, p);
                        x[p] = number_of<TYPE, decltype(nan)::value>(codes, k, zero) * scale[p];
                    }
                    emit_parts<LP_EXACT, ELEMENT, false>(x, columns.s, out);
                    for (int p = 0; p < SLOTS; p++) put(to + (p * W + d) * width, out[p]);
                }
            };
            if constexpr (BITS == 4 || TYPE == LP_CODES_I8) {
                decode(Int<0>());
            } else {
                if (has_nan) decode(Int<1>());
                else decode(Int<0>());
            }
        }
    }
};

// Writes the strip of W columns of 16 bits from `lane` on, from any strides.
static void store_numbers(const Source& s, int64_t lane, char* to) {
    const bool are_together = s.lane == 1 && !s.lane_offsets && lane + W <= s.lanes;
    const Strip strip(s);
    __builtin_memset(to, 0, (size_t)strip.bytes());
    for (int64_t k = 0; k < s.steps; k++, to += 2 * W) {
        const char* const from = s.at + 2 * s.k_offset(k);
        if (are_together) {
            __builtin_memcpy(to, from + 2 * lane, 2 * W);
            continue;
        }
        for (int64_t i = 0; i < W; i++) {
            const int64_t offset = s.lane_offset(lane + i < s.lanes ? lane + i : s.lanes - 1);
            __builtin_memcpy(to + 2 * i, from + 2 * offset, 2);
        }
    }
}

// Writes the strip of W columns from `lane` on.
template <int TYPE> static void store_strip(const Source& s, int64_t lane, char* to) {
    if constexpr (!has_scales(TYPE)) return store_numbers(s, lane, to);
    const Columns<TYPE> columns(s, lane);
    u32v rows[W];
    auto write = [&](int64_t first, int64_t end) {
        for (int64_t i = 0; i < W && first + i < end; i++) put(to + (first + i) * 4 * W, rows[i]);
    };
    const Strip strip(s);
    const int64_t scales = strip.codes, zeros = scales + strip.scales;
    for (int64_t i = 0; i < strip.codes; i += W) {
        columns.codes(i * Coded<TYPE>::PER, rows);
        if (Coded<TYPE>::BITS == 8)
            UNROLLED(j, W) rows[j] = in_runs(rows[j]);
        write(i, scales);
    }
    for (int64_t i = 0; i < strip.scales; i += W) {
        columns.scales(i * Coded<TYPE>::SCALES, rows);
        write(scales + i, zeros);
    }
    for (int64_t i = 0; i < strip.zeros; i += W) {
        columns.zeros(i * 4, rows);
        write(zeros + i, zeros + strip.zeros);
    }
}
typedef void StoreStrip(const Source&, int64_t lane, char* to);
template <int... I> static StoreStrip* store_strip_of(int type, std::integer_sequence<int, I...>) {
    static constexpr StoreStrip* of[] = {store_strip<LP_MXFP8 + I>...};
    return of[type - LP_MXFP8];
}

// Stores the codes of a matrix if `to` is not null; returns the bytes.
static int64_t store_codes(const lp::Work& p, char* to) {
    const Source& s = p.b;
    const int64_t each = Strip(s).bytes(), strips = rounded_up(s.lanes, W) / W;
    StoreStrip* const store = store_strip_of(s.type, std::make_integer_sequence<int, LP_TYPES - LP_MXFP8>());
    const int threads = s.lanes * s.steps >= 1 << 18 ? p.threads : 1;
    if (to) lp::share(strips, threads, [&](int64_t i) { store(s, i * W, to + i * each); });
    return rounded_up(strips * each, 64);
}
