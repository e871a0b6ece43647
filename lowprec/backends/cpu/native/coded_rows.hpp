// Few rows times codes. Stored ones are decoded in registers by FP32 units, next to the multiplication; other codes,
// and those of other units, are decoded into the L1 cache, some at a time.

template <class U, int ROWS, int TYPE> static void few_rows_of_codes(const FewRows& f) {
    typedef Decoder<TYPE, U::ELEMENT> D;
    constexpr int P = per_dword(U::ELEMENT), V = 2 * P, STEP = D::BLOCKS * W;
    alignas(64) uint32_t panel[STEP * V * W];
    for (int64_t at = 0; at < f.lanes; at += V * W) {
        const int64_t lane = f.lane + at, width = f.lanes - at < V * W ? f.lanes - at : V * W;
        D columns[4] = {{f.b, lane}, {f.b, lane + W}, {f.b, lane + 2 * W}, {f.b, lane + 3 * W}};
        for (int d = 0; d < f.dwords; d += STEP) {
            const int count = f.dwords - d < STEP ? f.dwords - d : STEP;
            const int64_t block = (f.step / P + d) / W;
            for (int v = 0; v < width / W; v++) columns[v].blocks(block, count / W, panel + v * W, V * W);
            FewRows some = f;
            some.a += d;
            some.at = (const char*)panel;
            some.ldb = 4 * V * W;
            some.dwords = count;
            some.y += at;
            some.lanes = width;
            some.adds |= d > 0;
            few_rows<U, ROWS, PANEL, LP_EXACT>(some);
        }
    }
}

// Whether E4M3 codes have NaN, by lane: a NaN makes the sums of its column NaN, so that the numbers need no check each.
struct NanLanes {
    bytes largest = {};  // of codes but for their signs
    INLINE_MEMBER void see(const void* row) {
        const bytes x = get<bytes>(row);
        largest = x + x > largest ? x + x : largest;
    }
    u32v found() const {
        alignas(64) uint8_t runs[4 * W];
        put(runs, (bytes)(largest == 0xfe));
        u32v any = {};
        UNROLLED(i, 4) any |= widen_u8<u32v>(runs + i * W);
        return (u32v)(any != 0) & 0x7fc00000u;
    }
};

// Vectors of columns at once.
template <class U> constexpr int vectors_of_stored(int rows) {
    if (W == 8) return rows > 2 ? 2 : 4;
    return rows > U::FEW ? 1 : (rows > 4 ? 2 : 4);
}

template <class U, int ROWS, int TYPE> static void few_rows_of_stored(const FewRows& f) {
    typedef Coded<TYPE> C;
    typedef typename U::Acc Acc;
    constexpr int PER = C::PER, AHEAD = has_scales(TYPE) ? 2048 : 4096;
    constexpr bool IS_E4M3 = TYPE == LP_MXFP8 || TYPE == LP_CODES_E4M3, BY_HALVES = W > 4 && IS_E4M3;
    const int64_t block = C::block(f.b), end = f.step + f.dwords;
    // Whether scales have the factor 2^8 that E4M3 numbers as float16 lack, unless it makes them infinite.
    constexpr bool FOLDS = BY_HALVES && vectors_of_stored<U>(ROWS) > 1;
    auto columns = [&](int64_t at, auto count) __attribute__((always_inline)) {
        constexpr int V = decltype(count)::value;
        constexpr float FACTOR = FOLDS && V > 1 ? 0x1p8f : 1;
        const Strip strip(f.b);
        const int64_t each = strip.bytes();
        const char* const first = f.b.at + (f.lane + at) / W * each;
        auto row = [&](int v, int64_t i)
                       __attribute__((always_inline)) { return get<u32v>(first + v * each + i * 4 * W); };
        Acc acc[ROWS][V];
        UNROLLED(i, ROWS)
            UNROLLED(v, V) acc[i][v] = f.adds ? get<Acc>(f.y + i * f.ldy + at + v * W) : Acc{};
        f32v scale[V] = {}, zero[V] = {};
        [[maybe_unused]] NanLanes nan[V];
        [[maybe_unused]] u32v large = {};  // whether a scale is from 2^120 on
        const uint32_t* a = f.a;
        uint32_t* kept = f.kept ? f.kept + at : nullptr;
        // A row of E4M3 codes as float16: read from memory, they are widened without a shuffle.
        alignas(64) [[maybe_unused]] uint16_t halves[V][BY_HALVES ? 4 * W : 1];
        auto multiply = [&](const char* codes, int64_t k) __attribute__((always_inline)) {
            f32v x[V];
            UNROLLED(v, V) {
                if constexpr (BY_HALVES) x[v] = load_f16_as<f32v>(halves[v] + k * W) * (0x1p8f / FACTOR);
                else x[v] = number_of<TYPE, false>(codes + v * each, k, zero[v]);
                if (has_scales(TYPE)) x[v] *= scale[v];
                if (kept) put(kept + v * W, bits(x[v]));
            }
            if (kept) kept += f.lanes;
            UNROLLED(i, ROWS) {
                const u32v dword = all(a[i * f.lda + k]);
                UNROLLED(v, V) acc[i][v] = U::dot(acc[i][v], dword, bits(x[v]));
            }
        };
        for (int64_t k = f.step; k < end;) {
            const int64_t number = k / block, stop = (number + 1) * block < end ? (number + 1) * block : end;
            UNROLLED(v, V) {
                if constexpr (has_scales(TYPE)) {
                    const int64_t of_scales = strip.codes + number / C::SCALES;
                    __builtin_prefetch(first + (v + V) * each + of_scales * 4 * W);  // of the next columns
                    scale[v] = scale_of<TYPE>(row(v, of_scales), number);
                }
                if constexpr (FACTOR != 1) {
                    large |= (u32v)((bits(scale[v]) & 0x7fffffffu) >= 0x7b800000u);
                    scale[v] *= FACTOR;
                }
                if (TYPE == LP_CODES_U4) zero[v] = zero_of(row(v, strip.codes + strip.scales + number / 4), number);
            }
            for (; k < stop; k += PER, a += PER) {
                const char* const codes = first + k / PER * 4 * W;
                UNROLLED(v, V) {
                    __builtin_prefetch(codes + v * each + AHEAD);
                    if constexpr (IS_E4M3) nan[v].see(codes + v * each);
                    if constexpr (BY_HALVES) halves_of_e4m3(codes + v * each, halves[v]);
                }
                if constexpr (BY_HALVES) __asm__ volatile("" : "+m"(halves));  // not from registers
                if (k + PER <= stop) {
                    UNROLLED(j, PER) multiply(codes, j);
                } else {
                    for (int j = 0; j < stop - k; j++) multiply(codes, j);
                }
            }
        }
        if constexpr (FACTOR != 1)
            if (any(large)) return false;
        UNROLLED(v, V) {
            const u32v lost = IS_E4M3 ? nan[v].found() : u32v{};
            if (IS_E4M3 && f.kept) {  // of all rows
                uint32_t* const first_kept = f.kept + at + v * W;
                put(first_kept, get<u32v>(first_kept) | lost);
            }
            UNROLLED(i, ROWS) put(f.y + i * f.ldy + at + v * W, IS_E4M3 ? (Acc)((u32v)acc[i][v] | lost) : acc[i][v]);
        }
        return true;
    };
    constexpr int V = vectors_of_stored<U>(ROWS);
    int64_t at = 0;
    for (; V > 1 && at + V * W <= f.lanes; at += V * W) {
        [[maybe_unused]] const bool done = columns(at, Int<V>());
        if constexpr (FOLDS)
            for (int v = 0; !done && v < V; v++) columns(at + v * W, Int<1>());
    }
    for (; at < f.lanes; at += W) columns(at, Int<1>());
}
