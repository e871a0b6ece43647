// Dwords of k, the numbers that a unit multiplies at once, and the slots of a number.
//
// A lane is a row of a or a column of b. A dword holds P numbers of k: one float32, two bfloat16 (or int16), four int8.
// A block is W dwords of k, that is W * P numbers; dword d holds P consecutive integers, or the floats d and W + d of
// the block, so that packing needs no shuffles but one transposition. A slot is a part of a component of the numbers.

// What a micro-kernel multiplies. E_PAIR: two bfloat16 slots, whose sum is a TF32 or float16 number. E_U8: a + 128, b.
const int E_F32 = 0, E_BF16 = 1, E_PAIR = 2, E_I16 = 3, E_I8 = 4, E_U8 = 5;
constexpr int per_dword(int element) { return element >= E_I8 ? 4 : 1 + (element != E_F32); }
template <int ELEMENT> constexpr int order(int d, int p) {
    return ELEMENT >= E_I16 ? d * per_dword(ELEMENT) + p : p * W + d;
}

using lp::Source;

// Slots of a number: components times parts, twice as many in pairs; of a number in one part, and at most.
constexpr int whole_slots(int type, int element) { return (type == LP_C64 ? 2 : 1) * (element == E_PAIR ? 2 : 1); }
constexpr int most_slots(int type, int element, bool splits) { return whole_slots(type, element) * (splits ? 3 : 1); }
template <int ELEMENT> static int slots_of(const Source& s) { return whole_slots(s.type, ELEMENT) * s.all_parts(); }

constexpr bool can_pack(int element, int type, int format) {
    if (element >= E_I16) return type == LP_I8 && format == LP_EXACT;
    if (type == LP_I8 || type == LP_I32 || (has_float_scales(type) && element != E_F32)) return false;
    bool is_single = type == LP_F32 || type == LP_C64;
    if (element == E_F32)
        return is_single || format == LP_EXACT || (type == LP_BF16 && format == LP_TO_F16) ||
            (type == LP_F16 && format == LP_TO_BF16);
    if (element == E_PAIR)
        return is_single ? format == LP_TO_TF32 || format == LP_TO_F16
                         : format == LP_EXACT || (type == LP_BF16 && format == LP_TO_F16);
    return format == (is_single || type == LP_F16 ? LP_TO_BF16 : LP_EXACT);
}

// Writes P runs of W floats of one component as dwords of all their slots; returns the parts written.
template <int FORMAT, int ELEMENT, bool SPLITS> INLINE int emit_parts(f32v* x, const Source& s, u32v* out) {
    constexpr int P = per_dword(ELEMENT);
    auto emit = [&](const f32v* r, int slot) __attribute__((always_inline)) {
        if constexpr (ELEMENT == E_F32) {
            out[slot] = bits(r[0]);
        } else if constexpr (ELEMENT == E_PAIR) {  // the truncation and the rest, which have the same sign
            u32v high[2], low[2];
            UNROLLED(p, 2) {
                high[p] = bits(r[p]) & 0xffff0000u;
                low[p] = choose(is_special(bits(r[p])), u32v{}, bits(r[p] - floats(high[p])));
                high[p] |=
                    choose(is_special(bits(r[p])) & (u32v)((bits(r[p]) & 0x007fffffu) != 0), all(0x00400000u), u32v{});
            }
            out[2 * slot] = high[0] >> 16 | high[1];
            out[2 * slot + 1] = low[0] >> 16 | (low[1] & 0xffff0000u);
        } else {
            out[slot] = bits(r[0]) >> 16 | (bits(r[1]) & 0xffff0000u);
        }
    };
    f32v first[P], r[P];
    if constexpr (!SPLITS) {
        UNROLLED(p, P) r[p] = rounded<FORMAT>(x[p]);
        emit(r, 0);
        return 1;
    }
    const f32v factor = powers(i32v{} + s.part_exponent);
    for (int part = 0; part < s.parts; part++) {
        UNROLLED(p, P) r[p] = rounded<FORMAT>(x[p]);
        emit(r, part);
        UNROLLED(p, P) {
            x[p] = (x[p] - r[p]) * factor;
            first[p] = part ? first[p] : r[p];
        }
    }
    if (!s.sums_parts) return s.parts;
    UNROLLED(p, P) r[p] = rounded<FORMAT>(first[p] + r[p]);  // two parts
    emit(r, s.parts);
    return s.parts + 1;
}
