// The epilogue: v = activation(alpha * sum + beta * c + bias), each operation rounded once in float32, then rounded to
// the type of the result. The product of the scales of row and column multiplies the sum first. Rows of sums
// are contiguous; complex sums are two planes.

alignas(64) static const int32_t LANE_NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE f32v exp_(f32v x) {  // the polynomial of the Cephes library, good to two units in the last place
    x = floats(choose((u32v)(x > -87.0f), bits(x), bits(all_floats(-87.0f))));
    x = floats(choose((u32v)(x < 88.0f), bits(x), bits(all_floats(88.0f))));
    f32v n = (x * 1.4426950408889634f + 12582912.0f) - 12582912.0f;  // rounds to an integer
    f32v r = x - n * 0.693359375f - n * -2.12194440e-4f;
    f32v p = all_floats(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 0.5f;
    i32v power = (__builtin_convertvector(n, i32v) + 127) << 23;
    return (p * r * r + r + 1.0f) * (f32v)power;
}

// The tanh form of GELU: 0.5 (1 + tanh y) is 1 / (1 + exp(-2 y)). Below -44 the exponential overflows.
INLINE f32v gelu(f32v x) {
    f32v y = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    f32v v = x / (1.0f + exp_(-2.0f * y));
    return floats(choose((u32v)(y < -44.0f), bits(all_floats(-0.0f)), bits(v)));
}

// In the order of ACTIVATIONS in planning/activations.py; 0 for none.
enum lp_activation { LP_RELU = 1, LP_GELU };

INLINE f32v activated(f32v x, int activation) {
    if (activation == LP_RELU) return floats(~(u32v)(x < 0.0f) & bits(x));
    return activation == LP_GELU ? gelu(x) : x;
}

// Reads `count` numbers of a row as float32; complex ones as pairs, if `floats_each` is 2.
static void read_row(const lp::Target& x, int64_t row, int64_t col, int count, float* to, int floats_each) {
    const int size = bits_of(x.type) / 8;
    const char* at = x.at + x.offset(row, col) * size;
    auto load = [&](const char* from) __attribute__((always_inline)) {
        if (x.type == LP_BF16) return widened<LP_BF16>(from);
        return x.type == LP_F16 ? widened<LP_F16>(from) : get<f32v>(from);
    };
    if (x.type == LP_C64) {
        for (int j = 0; j < count; j++) __builtin_memcpy(to + 2 * j, at + j * x.col * size, 8);
        return;
    }
    auto number = [&](int64_t j) {
        alignas(64) char one[4 * W] = {};
        __builtin_memcpy(one, at + j * x.col * size, (size_t)size);
        return load(one)[0];
    };
    int j = 0;
    for (; floats_each == 1 && x.col == 1 && j + W <= count; j += W) put(to + j, load(at + j * size));
    for (; j < count; j++) {
        to[j * floats_each] = number(j);
        if (floats_each == 2) to[2 * j + 1] = 0;
    }
}

// Multiplies sums by 2^-e, the inverse of the scales of a row of a and columns of b, rounding once. Sums are multiples
// of 2^-70, so that a first factor of 2^-70 is exact where 2^-e is not a normal number.
INLINE i32v limited(i32v v, int low, int high) {
    v = (i32v)choose((u32v)(v < low), (u32v)(i32v{} + low), (u32v)v);
    return (i32v)choose((u32v)(v > high), (u32v)(i32v{} + high), (u32v)v);
}
INLINE f32v unscaled(f32v x, i32v e) {
    if (__builtin_expect(!any((u32v)((u32v)(e + 126) > 252u)), 1)) return x * floats((u32v)(127 - e) << 23);
    const i32v first = limited(-e, -70, 127), second = limited(-e - first, -149, 127);
    return x * powers(first) * powers(second);
}

// NaN where a sum is not finite, else its value.
INLINE f32v marked(f32v value, f32v sum) {
    return floats(choose((u32v)(bits(sum - sum) != 0), all(0x7fc00000u), bits(value)));
}

// Numbers rounded to 16 bits.
template <int TYPE> INLINE u16v halves(f32v x) {
    if constexpr (TYPE == LP_BF16) return __builtin_convertvector(nearest<16, false>(bits(x)) >> 16, u16v);
    return narrowed_f16<u16v>(x);
}
template <int... I> INLINE f32v joined(u16v a, u16v b, std::integer_sequence<int, I...>) {
    return (f32v)__builtin_shufflevector(a, b, I...);
}

// Writes past the caches if it streams.
INLINE void put_past(char* to, f32v x, bool streams) {
    if (streams && (intptr_t)to % (4 * W) == 0) stream(to, x);
    else put(to, x);
}

// Writes `count` numbers of the result's type to a row.
static void write_some(const lp::Target& out, char* to, const char* from, int count) {
    const size_t size = (size_t)bits_of(out.type) / 8;
    if (out.col == 1) __builtin_memcpy(to, from, count * size);
    else
        for (int j = 0; j < count; j++) __builtin_memcpy(to + j * out.col * (int64_t)size, from + j * size, size);
}

INLINE bool adds_nothing(const lp::Work& p) {
    return p.alpha[0] == 1 && p.alpha[1] == 0 && !p.c.at && !p.bias.at && !p.activation && !p.row_scales &&
        !p.col_scales;
}

// GCC 12's vectorizer fuses alternate differences and sums of two products (vfmaddsub), as of complex numbers, whatever
// -ffp-contract is; it does not vectorize calls.
static __attribute__((noinline)) float sum_of_two(float a, float b, float c, float d) { return a * b + c * d; }

// One row of complex results from two planes of sums; returns whether any sum is Inf or NaN.
template <int WIDTH>
static bool finish_complex(const lp::Work& p, const float* sums, int64_t plane, int64_t row, int64_t col, int count,
                           const int32_t* e, const int32_t* f) {
    alignas(64) float parts[2][WIDTH], v[2 * WIDTH], addend[2 * WIDTH];
    bool special = false;
    for (int c = 0; c < 2; c++)
        for (int j = 0; j < WIDTH; j += W) {
            const f32v x = get<f32v>(sums + c * plane + j);
            special |= any(bits(x - x) & (u32v)(get<i32v>(LANE_NUMBERS) + j < count));
            const f32v y = e || f ? unscaled(x, (f ? get<i32v>(f + col + j) : i32v{}) + (e ? e[row] : 0)) : x;
            put(parts[c] + j, p.checks ? marked(y, x) : y);
        }
    for (int j = 0; j < count; j++) {
        v[2 * j] = parts[0][j];
        v[2 * j + 1] = parts[1][j];
    }
    auto multiply = [&](float* x, const float* f) {  // as numpy does: no factor of zero is skipped
        for (int j = 0; j < count; j++, x += 2) {
            const float product[2] = {f[1] == 0 ? x[0] * f[0] : sum_of_two(x[0], f[0], -x[1], f[1]),
                                      f[1] == 0 ? x[1] * f[0] : sum_of_two(x[0], f[1], x[1], f[0])};
            x[0] = product[0];
            x[1] = product[1];
        }
    };
    if (p.alpha[0] != 1 || p.alpha[1] != 0) multiply(v, p.alpha);
    for (const lp::Target* x : {&p.c, &p.bias}) {
        if (!x->at || (x == &p.c && p.beta[0] == 0 && p.beta[1] == 0)) continue;
        read_row(*x, row, col, count, addend, 2);
        if (x == &p.c) multiply(addend, p.beta);
        for (int j = 0; j < 2 * count; j++) v[j] += addend[j];
    }
    char* to = p.out.at + p.out.offset(row, col) * 8;
    for (int j = 0; j < count; j++) __builtin_memcpy(to + j * p.out.col * 8, v + 2 * j, 8);
    return special;
}

// Rows of WIDTH real sums, lds apart, of which `count` exist; returns whether any of them is Inf or NaN.
template <int WIDTH>
static bool finish_rows(const lp::Work& p, const float* sums, int64_t lds, int64_t row, int rows, int64_t col,
                        int count, const int32_t* e, const int32_t* f) {
    constexpr int V = WIDTH / W;
    const lp::Target out = p.out, c = p.c;  // copies, which stores to the result do not change
    const float alpha = p.alpha[0], beta = p.beta[0], *row_scales = p.row_scales;
    const int activation = p.activation, size = bits_of(out.type) / 8;
    const bool marks = p.checks;
    const bool whole = count == WIDTH, direct = whole && out.col == 1;
    const bool streams =
        p.streams && direct && size * WIDTH % 64 == 0 && (const char*)sums != out.at + out.offset(row, col) * size;
    const bool adds = c.at && beta != 0, reads_c = adds && whole && c.col == 1 && c.type == LP_F32,
               computes = !adds_nothing(p);
    alignas(64) float addend[WIDTH], bias[WIDTH], scales[WIDTH];
    alignas(64) char stored[4 * WIDTH];
    i32v exponents[V];
    u32v factors[V], exists[V], special = {}, far = {};  // far from 0: two exponents might not give a normal number
    UNROLLED(v, V) {
        exponents[v] = f ? get<i32v>(f + col + v * W) : i32v{};
        exists[v] = (u32v)(get<i32v>(LANE_NUMBERS) + v * W < count);
        factors[v] = (u32v)(127 - exponents[v]) << 23;
        far |= (u32v)((u32v)(exponents[v] + 63) > 126u);
    }
    bool is_far = any(far);
    for (int i = 0; e && i < rows; i++) is_far |= (uint32_t)(e[row + i] + 63) > 126u;
    const bool scales_columns = p.col_scales, has_bias = p.bias.at,
               has_biases = has_bias && (p.bias.row || p.bias.row_offsets);
    if (has_bias && (p.bias.col || !has_biases)) read_row(p.bias, row, col, count, bias, 1);
    if (scales_columns) __builtin_memcpy(scales, p.col_scales + col, 4 * (size_t)count);
    for (int i = 0; i < rows; i++, sums += lds) {
        char* const at = out.at + out.offset(row + i, col) * size;
        char* const to = direct ? at : stored;
        const int32_t exponent = e ? e[row + i] : 0;
        f32v x[V];
        UNROLLED(v, V) {
            const f32v sum = get<f32v>(sums + v * W);
            special |= bits(sum - sum) & exists[v];
            x[v] =
                is_far ? unscaled(sum, exponents[v] + exponent) : sum * floats(factors[v] - ((uint32_t)exponent << 23));
            if (marks) x[v] = marked(x[v], sum);
        }
        if (computes) {
            const float* const more = reads_c ? (const float*)c.at + c.offset(row + i, col) : addend;
            if (adds && !reads_c) read_row(p.c, row + i, col, count, addend, 1);
            if (has_biases && i && p.bias.col) read_row(p.bias, row + i, col, count, bias, 1);
            if (has_biases && !p.bias.col) {
                read_row(p.bias, row + i, col, 1, bias, 1);
                UNROLLED(v, V) put(bias + v * W, all_floats(bias[0]));
            }
            UNROLLED(v, V) {
                if (scales_columns)
                    x[v] *= row_scales ? get<f32v>(scales + v * W) * row_scales[row + i] : get<f32v>(scales + v * W);
                else if (row_scales) x[v] *= row_scales[row + i];
                if (alpha != 1) x[v] *= alpha;
                if (adds) x[v] += beta * get<f32v>(more + v * W);
                if (has_bias) x[v] += get<f32v>(bias + v * W);
            }
            if (activation)
                UNROLLED(v, V) x[v] = activated(x[v], activation);
        }
        auto put_halves = [&](auto type) __attribute__((always_inline)) {
            UNROLLED_BY(v, V, 2)
                put_past(to + v * 2 * W,
                         joined(halves<type>(x[v]), halves<type>(x[v + 1]), std::make_integer_sequence<int, 2 * W>()),
                         streams);
        };
        if (out.type == LP_BF16) put_halves(Int<LP_BF16>());
        else if (out.type == LP_F16) put_halves(Int<LP_F16>());
        else
            UNROLLED(v, V) put_past(to + v * 4 * W, x[v], streams);
        if (!direct) write_some(p.out, at, stored, count);
    }
    return any(special);
}

// At most ROWS rows of int8 products, whose sums are exact, less `offsets`; a bias is added with saturation. A result
// of another type than int32 has the epilogue of floats.
template <int WIDTH, int ROWS>
static void finish_integers(const lp::Work& p, const int32_t* sums, int64_t lds, int64_t row, int rows, int64_t col,
                            int count, const int32_t* offsets) {
    alignas(64) int32_t numbers[ROWS][WIDTH];
    const bool rounds = p.out.type != LP_I32;
    for (int i = 0; i < rows; i++)
        UNROLLED_BY(j, WIDTH, W) {
            const i32v x = (i32v)(get<u32v>(sums + i * lds + j) - (uint32_t)(offsets ? offsets[i] : 0));
            put(numbers[i] + j, rounds ? bits(__builtin_convertvector(x, f32v)) : (u32v)x);
        }
    if (rounds) finish_rows<WIDTH>(p, (const float*)numbers, WIDTH, row, rows, col, count, nullptr, nullptr);
    for (int i = 0; !rounds && i < rows; i++, row++) {
        int32_t* v = numbers[i];
        for (int j = 0; (p.bias.at || p.activation) && j < count; j++) {
            const char* at =
                p.bias.at ? p.bias.at + p.bias.offset(row, col + j) * (p.bias.type == LP_I8 ? 1 : 4) : nullptr;
            int32_t addend = 0;
            if (at) addend = p.bias.type == LP_I8 ? *(const int8_t*)at : *(const int32_t*)at;
            if (__builtin_add_overflow(v[j], addend, v + j)) v[j] = addend < 0 ? INT32_MIN : INT32_MAX;
            v[j] = p.activation == LP_RELU && v[j] < 0 ? 0 : v[j];
        }
        char* const at = p.out.at + p.out.offset(row, col) * 4;
        if (count < WIDTH || p.out.col != 1) write_some(p.out, at, (const char*)v, count);
        else
            UNROLLED_BY(j, WIDTH, W) put_past(at + 4 * j, get<f32v>(v + j), p.streams);
    }
}
