// Sums of products by the arithmetic of tensor cores, bit by bit, as defined in emulation/arithmetic.py.
//
// A number is an exponent and a significand in [2, 4), or less if it is subnormal. Numbers of formats as narrow as
// float16, whose products float32 has, are kept instead of significands. Operands have at most 12 significant
// bits, so products of significands are exact in float32. Terms are aligned by a power of two and truncated to int32;
// eight of at most 25 fraction bits, and c, have an exact sum in int32, and all terms of a group in float64, which is
// rounded once. A lane is an element of the result. Included after vec.hpp.

typedef double f64v __attribute__((vector_size(4 * W)));  // half of the lanes
typedef int64_t i64v __attribute__((vector_size(4 * W)));
typedef float f32h __attribute__((vector_size(2 * W)));
typedef int32_t i32h __attribute__((vector_size(2 * W)));

using lp::EMULATED_K;

// 2^exponent and integers as float64, W / 2 from lane FIRST. By shuffles, because GCC 12 converts 4 lanes at a time.
template <int FIRST, int... I> INLINE f64v powers_from(i32v exponent, std::integer_sequence<int, I...>) {
    return (f64v)__builtin_shufflevector(i32v{}, (exponent + 1023) << 20, (I % 2 ? W + FIRST + I / 2 : 0)...);
}
template <int FIRST, int... I> INLINE f64v doubles_from(u32v x, std::integer_sequence<int, I...>) {
    // x + 2^31 is the low half of 2^52 + 2^31 + x.
    return (f64v)__builtin_shufflevector(x ^ 0x80000000, all(0x43300000), (I % 2 ? W : FIRST + I / 2)...) -
        (0x1p52 + 0x1p31);
}
template <int... I> INLINE u32v joined(i32h lower, i32h upper, std::integer_sequence<int, I...>) {
    return (u32v)__builtin_shufflevector(lower, upper, I...);
}

// Decomposes numbers of a format; `emin` is the exponent of its subnormal numbers. Exponents of zeros are below all
// others, and Inf and NaN remain Inf and NaN. Returns the exponents in the bits, which are 128 for Inf and NaN.
template <bool NARROW = false> INLINE i32v decompose(f32v x, int emin, void* significand, void* exponent) {
    i32v magnitude = (i32v)x & 0x7fffffff, found = (magnitude >> 23) - 127;
    i32v normal = larger(found, (i32v)all((uint32_t)emin));
    put(significand, NARROW ? x : x * (f32v)((128 - (normal & ~(i32v)(found == 128))) << 23));
    put(exponent, (i32v)choose((u32v)(magnitude == 0), all((uint32_t)-(1 << 20)), (u32v)normal));
    return found;
}

// Rounds toward zero to float32; from 2^128 to Inf. The nearest float32 is the wanted one or the next after it.
INLINE i32h toward_zero(f64v value) {
    f32h nearest = __builtin_convertvector(value, f32h);
    i64v magnitude = (i64v)value & INT64_MAX, rounded = (i64v) __builtin_convertvector(nearest, f64v) & INT64_MAX;
    i64v previous = (i64v)(rounded > magnitude) & (i64v)(magnitude < (int64_t)1151 << 52);
    return (i32h)nearest + __builtin_convertvector(previous, i32h);
}

// Decomposed numbers: of b, the elements of W columns; of a, those of rows.
struct EmulatedB {
    f32v significand[EMULATED_K];
    i32v exponent[EMULATED_K];
};
template <int R> struct EmulatedA {
    alignas(4 * W) float significand[R][EMULATED_K];
    alignas(4 * W) int32_t exponent[R][EMULATED_K];
};

// Adds a group of products, from element `first` of the block, to W elements of R rows. Exponents are less `scale`, that
// of the scales of the group, which the numbers lack.
template <int R, bool NARROW>
INLINE void add_group(const lp_tensor_core_model& core, const EmulatedA<R>& a, const EmulatedB& b, int first,
                      bool special, const i32v* scale, f32v* c) {
    const int end = first + core.group;
    std::make_integer_sequence<int, W> lanes;
    i32v largest[R], own[R], offset[R];  // exponents: of the group, of c, and of the scale of a product's term
    u32v sum[R];
    f32v significand[R], unit[R];  // of c; the factor by which a product has the scale of the sum
    f64v lower[R], upper[R];
    UNROLLED(r, R) {
        decompose(c[r], -126, &significand[r], &own[r]);
        own[r] = core.adds_after ? (i32v)all((uint32_t)-(1 << 20)) : own[r] - scale[r];
        largest[r] = larger(own[r], core.least_exponent - scale[r]);
    }
    for (int i = first; i < end; i++)
        UNROLLED(r, R) largest[r] = larger(largest[r], b.exponent[i] + a.exponent[r][i]);
    UNROLLED(r, R) {
        offset[r] = core.fraction_bits + 125 - largest[r];
        f32v of_c = (f32v)(larger(own[r] + offset[r] + 1, i32v{}) << 23);
        sum[r] = (u32v) __builtin_convertvector(significand[r] * of_c, i32v);
        i32v field = -larger(-2 - offset[r], (i32v)all((uint32_t)-254));  // less only if all products are 0
        unit[r] = (f32v)(larger(field, i32v{}) << 23);
        lower[r] = upper[r] = f64v{};
    }
    for (int eight = first; eight < end; eight += 8) {
        for (int i = eight; i < end && i < eight + 8; i++)
            UNROLLED(r, R) {
                f32v power = unit[r];
                if (!NARROW) power = (f32v)(larger(b.exponent[i] + (a.exponent[r][i] + offset[r]), i32v{}) << 23);
                sum[r] += (u32v) __builtin_convertvector(b.significand[i] * a.significand[r][i] * power, i32v);
            }
        UNROLLED(r, R) {
            lower[r] += doubles_from<0>(sum[r], lanes);
            upper[r] += doubles_from<W / 2>(sum[r], lanes);
            sum[r] = u32v{};
        }
    }
    UNROLLED(r, R) {
        i32v exponent = largest[r] + scale[r] - core.fraction_bits;
        u32v rounded = joined(toward_zero(lower[r] * powers_from<0>(exponent, lanes)),
                              toward_zero(upper[r] * powers_from<W / 2>(exponent, lanes)), lanes);
        rounded &= ~0u << (23 - core.result_bits);
        if (core.adds_after) rounded = bits(c[r] + floats(rounded));
        f32v infinite = floats(bits(c[r]) & is_special(bits(c[r])));
        if (special)
            for (int i = first; i < end; i++) {
                f32v product = b.significand[i] * a.significand[r][i];
                infinite += floats(bits(product) & is_special(bits(product)));
            }
        c[r] = floats(choose((u32v)(infinite != 0), bits(infinite), rounded));
    }
}

// Up to W numbers, and zeros.
INLINE f32v get_some(const float* from, int64_t count) {
    f32v x = {};
    if (count >= W) return get<f32v>(from);
    if (count > 0) memcpy(&x, from, 4 * (size_t)count);
    return x;
}

// Adds `count` products, from element `inner` of k, to W elements of R rows.
template <int R, bool NARROW>
INLINE void add_rows(const lp::Emulation& job, const EmulatedB& b, bool special, int64_t row, int64_t column,
                     int64_t inner, int count) {
    EmulatedA<R> a;
    f32v c[R];
    i32v largest = {};
    const int64_t columns = job.n - column;
    UNROLLED(r, R) {
        for (int i = 0; i < EMULATED_K; i += W) {
            f32v x = get_some(job.a + (row + r) * job.k + inner + i, count - i);
            largest = larger(largest, decompose<NARROW>(x, job.core.emin, &a.significand[r][i], &a.exponent[r][i]));
        }
        c[r] = get_some(job.c + (row + r) * job.n + column, columns);
    }
    special |= any((u32v)(largest == 128));
    const int64_t groups = (job.k + job.core.group - 1) / job.core.group;
    for (int i = 0; i < count; i += job.core.group) {
        const int64_t group = (inner + i) / job.core.group;
        i32v scale[R] = {};
        if (job.scales_b) {
            const i32v of_b = (i32v)get_some((const float*)job.scales_b + group * job.n + column, columns);
            UNROLLED(r, R) scale[r] = of_b + job.scales_a[(row + r) * groups + group];
        }
        add_group<R, NARROW>(job.core, a, b, i, special, scale, c);
    }
    UNROLLED(r, R) {
        c[r] = floats(choose((u32v)(c[r] != c[r]), all(0x7fffffff), bits(c[r])));
        memcpy(job.c + (row + r) * job.n + column, &c[r], 4 * (size_t)(columns < W ? columns : W));
    }
}

// Computes a block of EMULATED_ROWS by W elements of the result, from its first row and column.
template <bool NARROW> void emulate_numbers(const lp::Emulation& job, int64_t top, int64_t column) {
    EmulatedB b;
    const int step = EMULATED_K / job.core.group * job.core.group;
    const int64_t bottom = top + lp::EMULATED_ROWS < job.m ? top + lp::EMULATED_ROWS : job.m;
    int64_t inner = 0;
    do {
        int count = (int)(job.k - inner < step ? job.k - inner : step);
        i32v largest = {};
        for (int i = 0; i < step; i++) {
            const float* from = job.b + (inner + i) * job.n + column;
            f32v x = get_some(from, i < count ? job.n - column : 0);
            largest = larger(largest, decompose<NARROW>(x, job.core.emin, &b.significand[i], &b.exponent[i]));
        }
        const bool special = any((u32v)(largest == 128));
        int64_t row = top;
        for (; row + 4 <= bottom; row += 4) add_rows<4, NARROW>(job, b, special, row, column, inner, count);
        for (; row < bottom; row++) add_rows<1, NARROW>(job, b, special, row, column, inner, count);
        inner += step;
    } while (inner < job.k);
}

static void emulate_block(const lp::Emulation& job, int64_t top, int64_t column) {
    if (job.core.emin < -14) return emulate_numbers<false>(job, top, column);
    return emulate_numbers<true>(job, top, column);
}
