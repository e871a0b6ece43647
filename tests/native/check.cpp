// Checks of the kernels without Python, for sanitizers and emulators: every unit of the CPU, type, mode and layout.
//
// A problem is a product of random numbers of an own generator. Its result is compared with a sum in double, and then
// with that of every variant (layouts, threads, packed b, a batch, some rows alone, the other units of its class),
// which must have the same bits. Buffers have exact sizes: sanitizers see each access beyond them. Prints a line "class
// problem hash" each, to compare machines, and the counts last. usage: check STEP VARIANTS [PROBLEMS]. STEP: that of k
// in the sweep, 0 for threads alone; VARIANTS: at most, of each problem. PROBLEMS: as many random products and
// roundings instead, of which the variants have every buffer flush against a protected page, and the caller another
// floating-point mode.
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "lowprec.h"

namespace {

// --- numbers ----------------------------------------------------------------------------------------

uint64_t state;
uint32_t random_bits() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u, z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}
uint32_t below(uint32_t limit) { return random_bits() % limit; }

struct Type {
    const char* name;
    int bits, exponent_bits, fraction_bits, block;  // the last three of minifloats: with the block of a scale
};
const int WHOLE = 1 << 20;  // a block: all of k
const Type TYPES[LP_TYPES] = {{"f32", 32, 8, 23, 0},        {"bf16", 16, 8, 7, 0},     {"f16", 16, 5, 10, 0},
                              {"e4m3", 8, 4, 3, 0},         {"e5m2", 8, 5, 2, 0},      {"i8", 8, 0, 0, 0},
                              {"i32", 32, 0, 0, 0},         {"c64", 64, 8, 23, 0},     {"mxfp8", 8, 4, 3, 32},
                              {"mxfp4", 4, 2, 1, 32},       {"nvfp4", 4, 2, 1, 16},    {"codes_e4m3", 8, 4, 3, WHOLE},
                              {"codes_i8", 8, 0, 0, WHOLE}, {"codes_i4", 4, 0, 0, 32}, {"codes_u4", 4, 0, 0, 64}};

double decoded(uint32_t code, const Type& t) {
    const int width = t.bits == 64 ? 32 : t.bits, bias = (1 << (t.exponent_bits - 1)) - 1;
    const int e = (int)(code >> t.fraction_bits) & ((1 << t.exponent_bits) - 1),
              f = (int)(code & ((1u << t.fraction_bits) - 1));
    const double sign = code >> (width - 1) & 1 ? -1 : 1;
    if (t.exponent_bits >= 5 && e == (1 << t.exponent_bits) - 1) return f ? NAN : sign * INFINITY;
    return sign * ldexp(e ? (1 << t.fraction_bits) + f : f, (e ? e : 1) - bias - t.fraction_bits);
}
// A random code of moderate size: neither Inf nor NaN, products within every format's range.
uint32_t random_code(const Type& t) {
    const uint32_t fraction = random_bits() & ((1u << t.fraction_bits) - 1), sign = random_bits() & 1;
    const int bias = (1 << (t.exponent_bits - 1)) - 1, range = t.exponent_bits >= 5 ? 8 : bias;
    const uint32_t e = (uint32_t)(bias + 1 - range + (int)below((uint32_t)range));
    const int width = t.bits == 64 ? 32 : t.bits;
    return sign << (width - 1) | e << t.fraction_bits | fraction;
}

// --- buffers that end at a protected page, and callers with another floating-point mode --------------

bool is_fuzzing, is_guarded;
char* guarded[16];
unsigned next_guarded;
const size_t GUARDED = 1 << 22, PAGE = 1 << 16;

char* allocate(int64_t bytes) {
    if (!is_guarded) return (char*)malloc((size_t)bytes);
    if ((size_t)bytes > GUARDED) abort();
    char*& at = guarded[next_guarded++ % 16];
    if (!at) {
        at = (char*)mmap(nullptr, GUARDED + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED || mprotect(at + GUARDED, PAGE, PROT_NONE)) abort();
    }
    return at + GUARDED - bytes;
}
void discard(void* at) {
    if (!is_guarded) free(at);
}
// The same numbers in a buffer that may be guarded; they are not freed.
template <class T> const T* placed(const T* at, int64_t bytes) {
    return is_guarded && at ? (const T*)memcpy(allocate(bytes), at, (size_t)bytes) : at;
}

// While fuzzing: buffers are guarded, and subnormal numbers are flushed or results rounded up.
struct Strange {
    Strange() {
        if (!is_fuzzing) return;
        is_guarded = true;
#if defined(__x86_64__)
        __builtin_ia32_ldmxcsr(below(2) ? 0x9fc0 : 0x5f80);
#else
        const uint64_t mode = below(2) ? 1 << 24 : 1 << 22;
        __asm__ __volatile__("msr fpcr, %0" : : "r"(mode));
#endif
    }
    ~Strange() {
        if (!is_fuzzing) return;
        is_guarded = false;
#if defined(__x86_64__)
        __builtin_ia32_ldmxcsr(0x1f80);
#else
        __asm__ __volatile__("msr fpcr, xzr");
#endif
    }
};

// --- operands: lanes (rows of a, columns of b) of `k` numbers -----------------------------------------

struct Operand {
    int type;
    int64_t lanes, k;
    uint32_t* codes;  // lanes x k x components
    double* values;
    uint8_t *scales, *zeros;
    int64_t blocks() const { return TYPES[type].block ? (k + TYPES[type].block - 1) / TYPES[type].block : 0; }
    int64_t padded() const { return TYPES[type].block == WHOLE ? k : blocks() * TYPES[type].block; }
    int components() const { return type == LP_C64 ? 2 : 1; }
    int64_t block() const { return TYPES[type].block == WHOLE ? k : TYPES[type].block; }
    int64_t scale_bytes() const { return type >= LP_CODES_E4M3 ? 4 : 1; }
};

// `is_symmetric`: codes of 8 bits are not -128.
void fill(Operand& x, int type, int64_t lanes, int64_t k, bool special, bool is_symmetric = false) {
    x.type = type, x.lanes = lanes, x.k = k, x.scales = x.zeros = nullptr;
    const Type& t = TYPES[type];
    const int64_t count = lanes * k * x.components();
    x.codes = (uint32_t*)malloc((size_t)count * 4);
    const bool is_integer = !t.exponent_bits, has_floats = type >= LP_CODES_E4M3;
    for (int64_t i = 0; i < count; i++) x.codes[i] = is_integer ? random_bits() & ((1u << t.bits) - 1) : random_code(t);
    for (int64_t i = 0; is_symmetric && i < count; i++) x.codes[i] += x.codes[i] == 128;
    if (special && t.exponent_bits >= 5)
        for (int i = 0; i < 2; i++)
            x.codes[below((uint32_t)count)] = ((1u << t.exponent_bits) - 1) << t.fraction_bits | (i ? 1u : 0u);
    if (t.block) {
        const int64_t all = lanes * x.blocks();
        x.scales = (uint8_t*)malloc((size_t)all * (has_floats ? 4 : 1)), x.zeros = (uint8_t*)malloc((size_t)all);
        for (int64_t i = 0; i < all; i++) {
            x.zeros[i] = (uint8_t)below(16);
            const float scale = (float)(1 + below(1000)) / 512;
            if (has_floats) memcpy(x.scales + 4 * i, &scale, 4);
            else x.scales[i] = (uint8_t)((type == LP_NVFP4 ? 0x30 : 124) + below(8));
        }
    }
    x.values = (double*)malloc((size_t)count * 8);
    for (int64_t i = 0; i < count; i++) {
        const int64_t block = t.block ? i / k * x.blocks() + i % k / t.block : 0;
        const int width = t.bits, code = (int)x.codes[i];
        float scale = 1;
        if (has_floats) memcpy(&scale, x.scales + 4 * block, 4);
        else if (type == LP_NVFP4) scale = (float)decoded(x.scales[block], TYPES[LP_E4M3]);
        else if (t.block) scale = ldexpf(1, x.scales[block] - 127);
        double number =
            is_integer ? code - (code >> (width - 1) << width) : decoded(x.codes[i], t);  // two's complement
        if (type == LP_CODES_U4) number = code - x.zeros[block];
        x.values[i] = has_floats ? (double)((float)number * scale) : number * scale;
    }
}
void release(Operand& x) { free(x.codes), free(x.values), free(x.scales), free(x.zeros); }

// An operand in memory: `at` points to its first number, strides are in elements.
struct Stored {
    char *memory, *at;
    int64_t lane, k, *lane_offsets, *k_offsets;
};
const int LAYOUTS = 5;
Stored store(const Operand& x, int layout) {
    const int64_t lanes = x.lanes, k = x.k, bits = TYPES[x.type].bits;
    Stored s = {};
    s.lane = k, s.k = 1;
    int64_t first = 0, last = lanes * k - 1;
    if (TYPES[x.type].block) layout = 0, s.lane = x.padded() + x.padded() % (8 / bits), last = lanes * s.lane - 1;
    if (layout == 1) s.lane = 1, s.k = lanes;
    if (layout == 2) s.lane = -(2 * k + 3), s.k = 2, first = (lanes - 1) * (2 * k + 3), last = first + 2 * (k - 1);
    if (layout == 3) {  // lanes by offsets, backwards
        s.lane_offsets = (int64_t*)allocate(lanes * 8), last = lanes * (k + 1) - 2;
        for (int64_t i = 0; i < lanes; i++) s.lane_offsets[i] = (lanes - 1 - i) * (k + 1);
    }
    if (layout == 4) {  // numbers along k by offsets, with gaps
        s.k_offsets = (int64_t*)allocate(k * 8), s.lane = k + k / 3, last = lanes * s.lane - 1;
        for (int64_t i = 0; i < k; i++) s.k_offsets[i] = i + i / 3;
    }
    const int64_t bytes = (last + 1) * bits / 8;
    s.memory = allocate(bytes);
    memset(s.memory, 0x7f, (size_t)bytes);
    s.at = s.memory + first * bits / 8;
    for (int64_t i = 0; i < lanes; i++)
        for (int64_t j = 0; j < k; j++) {
            const int64_t offset =
                (s.lane_offsets ? s.lane_offsets[i] : i * s.lane) + (s.k_offsets ? s.k_offsets[j] : j * s.k);
            const uint32_t* code = x.codes + (i * k + j) * x.components();
            if (bits == 4) {
                char& byte = s.at[offset / 2];
                byte = (char)(offset % 2 ? (byte & 15) | (int)code[0] << 4 : (int)code[0]);
            } else {
                memcpy(s.at + offset * bits / 8, code, (size_t)bits / 8);
            }
        }
    if (TYPES[x.type].block) s.lane = s.lane * bits / 8;  // of codes in bytes
    return s;
}
void release(Stored& s) { discard(s.memory), discard(s.lane_offsets), discard(s.k_offsets); }

// --- modes ------------------------------------------------------------------------------------------

struct Mode {
    const char* name;
    int format, parts, part_exponent, sums_parts, scaled, pairs[9][2], count;
    float factor[9];
    double bound;  // error over the sum of |a| |b|
};
const float F = 0x1p-11f;
const Mode MODES[] = {
    {"fp32", LP_EXACT, 0, 0, 0, 0, {{0, 0}}, 1, {1}, 4e-6},
    {"tf32", LP_TO_TF32, 1, 0, 0, 0, {{0, 0}}, 1, {1}, 2e-3},
    {"bf16", LP_TO_BF16, 1, 0, 0, 0, {{0, 0}}, 1, {1}, 2e-2},
    {"fp16", LP_TO_F16, 1, 0, 0, 1, {{0, 0}}, 1, {1}, 2e-3},
    {"bf16x3", LP_TO_BF16, 2, 0, 0, 0, {{0, 1}, {1, 0}, {0, 0}}, 3, {1, 1, 1}, 4e-5},
    {"bf16x6", LP_TO_BF16, 3, 0, 0, 0, {{0, 2}, {1, 1}, {2, 0}, {0, 1}, {1, 0}, {0, 0}}, 6, {1, 1, 1, 1, 1, 1}, 4e-6},
    {"tf32x3", LP_TO_TF32, 2, 0, 0, 0, {{0, 1}, {1, 0}, {0, 0}}, 3, {1, 1, 1}, 4e-6},
    {"fp16x3", LP_TO_F16, 2, 11, 0, 1, {{0, 1}, {1, 0}, {0, 0}}, 3, {F, F, 1}, 4e-6},
    {"fp16x4", LP_TO_F16, 2, 11, 0, 1, {{1, 1}, {0, 1}, {1, 0}, {0, 0}}, 4, {F * F, F, F, 1}, 4e-6},
    {"karatsuba", LP_TO_F16, 2, 11, 1, 1, {{1, 1}, {2, 2}, {0, 0}}, 3, {F * F - F, F, 1 - F}, 8e-6},
};

lp_scheme scheme_of(const Mode& mode, bool rounds_a, bool rounds_b) {
    lp_scheme s = {};
    if (!rounds_a && !rounds_b) return s.pair_count = 1, s.factor[0] = 1, s;
    s.format = mode.format, s.parts_a = rounds_a ? mode.parts : 0, s.parts_b = rounds_b ? mode.parts : 0;
    s.part_exponent = mode.part_exponent, s.sums_parts = mode.sums_parts, s.scaled = mode.scaled;
    for (int i = 0; i < mode.count; i++) {
        if ((!rounds_a && mode.pairs[i][0]) || (!rounds_b && mode.pairs[i][1])) continue;
        s.pair_a[s.pair_count] = mode.pairs[i][0], s.pair_b[s.pair_count] = mode.pairs[i][1];
        s.factor[s.pair_count++] = mode.factor[i];
    }
    return s;
}

// --- problems and their variants --------------------------------------------------------------------

enum { EPILOGUE = 1, GELU = 2, SPECIAL = 4, SCALES = 8 };
struct Problem {
    const Mode* mode;
    int64_t m, n, k;
    int type_out, extras;
    Operand a, b;
    float *c, *bias, *scales;  // m x n and n numbers of the result's components; m and n factors
    int64_t words() const { return m * n * components(); }
    int components() const { return type_out == LP_C64 ? 2 : 1; }
};
struct Variant {
    int layout_a, layout_b, layout_out, threads;
    bool packed, batched, in_place;
    int64_t row, rows;  // rows of the problem
};

bool is_rounded(const Operand& x) { return x.type == LP_F32 || x.type == LP_C64; }
int64_t out_offset(int layout, int64_t i, int64_t j, int64_t m, int64_t n) {
    return layout == 0 ? i * n + j
        : layout == 1  ? j * m + i
        : layout == 2  ? (m - 1 - i) * (2 * n + 3) + 2 * j
                       : (m - 1 - i) * (n + 1) + j;
}

// Computes rows of a problem on a unit into `to`, as words of the result: m x n x components.
int compute(const Problem& p, int unit, const Variant& v, uint32_t* to) {
    const int64_t m = v.rows, n = p.n, size = TYPES[p.type_out].bits / 8, zero[2] = {0, 0};
    Operand rows = p.a;
    rows.lanes = m, rows.codes += v.row * p.k * rows.components();
    Stored a = store(rows, v.layout_a), b = store(p.b, v.layout_b);
    lp_product d = {};
    d.m = m, d.n = n, d.k = p.k, d.batches = v.batched ? 2 : 1, d.unit = unit;
    d.a = lp_matrix{a.lane, a.k, a.lane_offsets, a.k_offsets, v.batched ? zero : nullptr, 0, p.a.block(), p.a.type, 0};
    const int block = TYPES[p.b.type].block;
    d.b = lp_matrix{
        b.k,      b.lane, b.lane_offsets, b.k_offsets, v.batched ? zero : nullptr, 0, block == WHOLE ? p.k : block,
        p.b.type, 0};
    if (block) d.b.scale_col = p.b.blocks() * (p.b.type >= LP_CODES_E4M3 ? 4 : 1);
    const int64_t last = v.layout_out == 2 ? (m - 1) * (2 * n + 3) + 2 * (n - 1)
        : v.layout_out == 3                ? (m - 1) * (n + 1) + n - 1
                                           : m * n - 1;
    const int64_t offsets[2] = {0, last + 1};
    char* memory = allocate(size * (last + 1) * d.batches);
    memset(memory, 0x5a, (size_t)(size * (last + 1) * d.batches));
    int64_t* row_offsets = (int64_t*)allocate(m * 8);
    for (int64_t i = 0; i < m; i++) row_offsets[i] = out_offset(3, i, 0, m, n);
    const int64_t first = v.layout_out == 2 ? out_offset(2, 0, 0, m, n) : 0;
    d.out = lp_matrix{v.layout_out == 0       ? n
                          : v.layout_out == 1 ? 1
                                              : -(2 * n + 3),
                      v.layout_out == 1       ? m
                          : v.layout_out == 2 ? 2
                                              : 1,
                      v.layout_out == 3 ? row_offsets : nullptr,
                      nullptr,
                      v.batched ? offsets : nullptr,
                      0,
                      0,
                      p.type_out,
                      0};
    d.c.type = d.bias.type = -1;
    d.scheme = scheme_of(*p.mode, is_rounded(p.a), is_rounded(p.b));
    d.activation = p.extras & GELU ? 2 : p.extras & EPILOGUE && p.type_out != LP_C64;  // lp_activation: 1 is RELU
    lp_call call = {};
    const int64_t row_of_scales = p.a.blocks() * p.a.scale_bytes(), of_columns = n * p.b.blocks();
    call.a_scales = p.a.scales ? placed(p.a.scales + v.row * row_of_scales, m * row_of_scales) : nullptr;
    call.b_scales = placed(p.b.scales, of_columns * p.b.scale_bytes()), call.b_zeros = placed(p.b.zeros, of_columns);
    call.a = a.at, call.b = b.at, call.out = memory + first * size, call.threads = v.threads, call.alpha[0] = 1;
    if (p.extras & EPILOGUE) {
        const int type = p.type_out == LP_C64 ? LP_C64 : LP_F32, components = p.components();
        call.alpha[0] = 0.75, call.beta[0] = -1.25, call.alpha[1] = components == 2 ? 0.5 : 0;
        call.c = placed(p.c + v.row * n * components, m * n * components * 4);
        call.bias = placed(p.bias, n * components * 4);
        d.c = lp_matrix{n, 1, nullptr, nullptr, v.batched ? zero : nullptr, 0, 0, type, 0};
        d.bias = lp_matrix{0, 1, nullptr, nullptr, nullptr, 0, 0, type, 0};
        if (v.in_place) {
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < n; j++)
                    memcpy(memory + out_offset(v.layout_out, i, j, m, n) * size,
                           p.c + ((v.row + i) * n + j) * components, (size_t)size);
            call.c = call.out, d.c = d.out;
        }
    }
    float* scales[2] = {(float*)allocate(m * 8), (float*)allocate(n * 8)};  // of two products of a batch
    for (int i = 0; i < 2; i++)
        memcpy(scales[0] + i * m, p.scales + v.row, (size_t)m * 4),
            memcpy(scales[1] + i * n, p.scales + p.m, (size_t)n * 4);
    if (p.extras & SCALES) call.row_scales = scales[0], call.col_scales = scales[1];
    void* packed = nullptr;
    int status = LP_OK;
    if (v.packed) {
        const int64_t bytes = lp_pack(&d, &call, nullptr);
        if (bytes < 0) status = LP_UNSUPPORTED;
        else if (posix_memalign(&packed, 64, (size_t)bytes) || lp_pack(&d, &call, packed) != bytes) abort();
    }
    if (!status) {
        lp_product from_packed = d;
        lp_call packed_call = call;
        from_packed.b.packed = v.packed, packed_call.b = packed ? packed : call.b;
        status = lp_gemm(&from_packed, &packed_call);
        if (status == LP_NOT_FINITE && v.packed) status = lp_gemm(&d, &call);
    }
    for (int64_t batch = 0; batch < d.batches && !status; batch++)
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++)
                for (int c = 0; c < p.components(); c++) {
                    uint32_t word = 0;
                    memcpy(&word, memory + (batch * (last + 1) + out_offset(v.layout_out, i, j, m, n)) * size + 4 * c,
                           (size_t)(size < 4 ? size : 4));
                    const Type& t = TYPES[p.type_out];
                    if (t.exponent_bits && isnan(decoded(word, t))) word = 0x7fc00000;
                    uint32_t& at = to[((v.row + i) * n + j) * p.components() + c];
                    if (batch && at != word) status = 1000;
                    at = word;
                }
    free(packed), discard(memory), discard(row_offsets), discard(scales[0]), discard(scales[1]), release(a), release(b);
    return status;
}

int strangely(const Problem& p, int unit, const Variant& v, uint32_t* to) {
    const Strange strange;
    return compute(p, unit, v, to);
}

double gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

// The largest error of real or imaginary parts over the sum of magnitudes and its bound; special numbers must agree.
double error_of(const Problem& p, const uint32_t* result) {
    double worst = 0;
    const int ca = p.a.components(), cb = p.b.components(), co = p.components();
    for (int64_t i = 0; i < p.m; i++)
        for (int64_t j = 0; j < p.n; j++) {
            double sum[2] = {0, 0}, size = 0;
            const double *a = p.a.values + i * p.k * ca, *b = p.b.values + j * p.k * cb;
            for (int64_t q = 0; q < p.k; q++)
                for (int x = 0; x < ca; x++)
                    for (int y = 0; y < cb; y++) {
                        const double product = a[q * ca + x] * b[q * cb + y];
                        sum[x ^ y] += x && y ? -product : product, size += fabs(product);
                    }
            if (p.extras & SCALES) {
                const double scale = (double)p.scales[i] * p.scales[p.m + j];
                sum[0] *= scale, size *= scale;
            }
            if (p.extras & EPILOGUE) {
                const float *c = p.c + (i * p.n + j) * co, *bias = p.bias + j * co;
                const double re = 0.75 * sum[0] - (co == 2 ? 0.5 * sum[1] : 0), im = 0.75 * sum[1] + 0.5 * sum[0];
                sum[0] = re - 1.25 * c[0] + bias[0], size += fabs(1.25 * c[0]) + fabs(bias[0]);
                if (co == 2) sum[1] = im - 1.25 * c[1] + bias[1], size += fabs(1.25 * c[1]) + fabs(bias[1]);
                if (co == 1) sum[0] = p.extras & GELU ? gelu(sum[0]) : sum[0] < 0 ? 0 : sum[0];
            }
            for (int c = 0; c < co; c++) {
                const uint32_t word = result[(i * p.n + j) * co + c];
                const double got = p.type_out == LP_I32 ? (int32_t)word : decoded(word, TYPES[p.type_out]);
                const bool is_large = p.type_out == LP_F16 && fabs(sum[c]) > 65504;  // it overflows
                if (is_large && got == copysign(INFINITY, sum[c])) continue;
                if (!isfinite(sum[c]) || !isfinite(got)) {
                    const bool same = isnan(sum[c]) ? isnan(got) : got == sum[c];
                    if (!same && !(p.extras & SPECIAL && ca == 2)) return INFINITY;  // complex: Inf and NaN mix
                    continue;
                }
                const double rounding =
                    TYPES[p.type_out].bits == 16 ? ldexp(fabs(sum[c]), -TYPES[p.type_out].fraction_bits - 1) : 0;
                worst = fmax(worst, (fabs(got - sum[c]) - rounding) / (size + 1e-30));
            }
        }
    return worst;
}

// Units whose results have the same bits, by a name; null for a unit of its own.
const char* class_of(int unit) {
    switch (unit) {
    case LP_FP32_AVX2:
    case LP_FP32_AVX512:
    case LP_FP32_NEON: return "fp32";
    case LP_BF16_AVX512: return "bf16_avx512";
    case LP_BF16_AMX: return "bf16_amx";
    case LP_BF16_NEON: return "bf16_neon";
    default: return "int8";
    }
}

int64_t good, bad;
int most_variants;

void report(bool is_good, const char* what, const Problem& p, int unit, const Variant& v) {
    good += is_good, bad += !is_good;
    if (is_good) return;
    fprintf(stderr,
            "%s: unit %d %s %s x %s -> %s, %dx%dx%d, extras %d, layouts %d %d %d, threads %d, packed %d, batched %d, "
            "in place %d, rows %d to %d\n",
            what, unit, p.mode->name, TYPES[p.a.type].name, TYPES[p.b.type].name, TYPES[p.type_out].name, (int)p.m,
            (int)p.n, (int)p.k, p.extras, v.layout_a, v.layout_b, v.layout_out, v.threads, v.packed, v.batched,
            v.in_place, (int)v.row, (int)(v.row + v.rows));
}

int64_t problems, every = 1;

void check(Problem& p, int variants) {
    if (problems++ % every) return;
    const char* done[LP_UNITS] = {};
    uint32_t *first = (uint32_t*)malloc((size_t)p.words() * 4), *other = (uint32_t*)malloc((size_t)p.words() * 4);
    for (int unit = 0; unit < LP_UNITS; unit++) {
        if (!(lp_units() >> unit & 1)) continue;
        bool is_first = true;
        for (int i = 0; i < unit; i++) is_first &= !done[i] || strcmp(done[i], class_of(unit)) != 0;
        const Variant plain = {0, 0, 0, 1, false, false, false, 0, p.m};
        const int status = compute(p, unit, plain, is_first ? first : other);
        if (status == LP_UNSUPPORTED) continue;
        done[unit] = class_of(unit);
        if (is_first) {
            report(status == LP_OK && error_of(p, first) <= (p.type_out == LP_I32 ? 0 : p.mode->bound), "inexact", p,
                   unit, plain);
            uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
            for (int64_t i = 0; i < p.words(); i++) hash = (hash ^ first[i]) * 0x100000001b3u;
            if (!is_fuzzing)
                printf("%s %s_%s_%s_%s_%dx%dx%d_%d %016llx\n", class_of(unit), p.mode->name, TYPES[p.a.type].name,
                       TYPES[p.b.type].name, TYPES[p.type_out].name, (int)p.m, (int)p.n, (int)p.k, p.extras,
                       (unsigned long long)hash);
        } else {
            report(status == LP_OK && !memcmp(first, other, (size_t)p.words() * 4), "differs between units", p, unit,
                   plain);
        }
        for (int i = 0; i < variants && i < most_variants; i++) {
            Variant v = {(int)below(LAYOUTS),
                         (int)below(LAYOUTS),
                         (int)below(4),
                         1 + (int)below(3),
                         below(3) == 0,
                         below(4) == 0,
                         below(2) == 0,
                         0,
                         p.m};
            if (below(3) == 0) v.row = below((uint32_t)p.m), v.rows = 1 + below((uint32_t)(p.m - v.row));
            v.in_place &= !v.batched && TYPES[p.type_out].bits >= 32;
            memcpy(other, first, (size_t)p.words() * 4);
            const int found = strangely(p, unit, v, other);
            if (found == LP_UNSUPPORTED && v.packed) continue;
            report(found == LP_OK && !memcmp(first, other, (size_t)p.words() * 4), found ? "fails" : "differs", p, unit,
                   v);
        }
    }
    free(first), free(other);
}

void check(const Mode& mode, int type_a, int type_b, int type_out, int64_t m, int64_t n, int64_t k, int extras,
           int variants) {
    Problem p = {&mode, m, n, k, type_out, extras, {}, {}, nullptr, nullptr, nullptr};
    state = (uint64_t)(m * 1000003 + n * 10007 + k * 101 + type_a * 17 + type_b + extras * 5 +
                       type_out);  // independent of units
    const bool is_symmetric = type_a == LP_CODES_I8 && type_b == LP_CODES_I8;
    fill(p.a, type_a, m, k, extras & SPECIAL, is_symmetric), fill(p.b, type_b, n, k, extras & SPECIAL);
    const int64_t c = m * n * p.components(), bias = n * p.components();
    p.c = (float*)malloc((size_t)c * 4), p.bias = (float*)malloc((size_t)bias * 4);
    p.scales = (float*)malloc((size_t)(m + n) * 4);
    for (int64_t i = 0; i < m + n; i++) p.scales[i] = (float)(1 + below(1000)) / 1024;
    for (int64_t i = 0; i < c; i++) p.c[i] = (float)decoded(random_code(TYPES[LP_F32]), TYPES[LP_F32]);
    for (int64_t i = 0; i < bias; i++) p.bias[i] = (float)decoded(random_code(TYPES[LP_F32]), TYPES[LP_F32]);
    check(p, variants);
    release(p.a), release(p.b), free(p.c), free(p.bias), free(p.scales);
}

void check_products() {
    const int64_t shapes[][3] = {{1, 1, 1},     {3, 5, 7},     {6, 16, 32},  {1, 70, 400}, {17, 33, 65},
                                 {2, 130, 900}, {37, 70, 450}, {130, 9, 33}, {20, 50, 96}};
    const int types[][2] = {
        {LP_F32, LP_F32},        {LP_BF16, LP_BF16},         {LP_F16, LP_F16},           {LP_E4M3, LP_E4M3},
        {LP_E5M2, LP_E4M3},      {LP_F32, LP_BF16},          {LP_F16, LP_F32},           {LP_F32, LP_E5M2},
        {LP_C64, LP_C64},        {LP_C64, LP_F32},           {LP_F32, LP_MXFP8},         {LP_BF16, LP_MXFP8},
        {LP_F32, LP_MXFP4},      {LP_BF16, LP_MXFP4},        {LP_F32, LP_NVFP4},         {LP_BF16, LP_NVFP4},
        {LP_F32, LP_CODES_E4M3}, {LP_F32, LP_CODES_I8},      {LP_F32, LP_CODES_I4},      {LP_F32, LP_CODES_U4},
        {LP_MXFP4, LP_MXFP4},    {LP_NVFP4, LP_NVFP4},       {LP_MXFP4, LP_NVFP4},       {LP_NVFP4, LP_CODES_I8},
        {LP_CODES_I8, LP_MXFP4}, {LP_CODES_I8, LP_CODES_I4}, {LP_CODES_I8, LP_CODES_U4}, {LP_CODES_I8, LP_CODES_I8}};
    for (auto& s : shapes) {
        for (auto& t : types)
            for (auto& mode : MODES) {
                const bool is_complex = t[0] == LP_C64, is_rounded = t[0] == LP_F32 || t[1] == LP_F32 || is_complex;
                if (mode.sums_parts && (is_complex ? t[1] != LP_C64 : t[0] != LP_F32 || t[1] != LP_F32)) continue;
                if (!is_rounded && mode.parts) continue;
                check(mode, t[0], t[1], is_complex ? LP_C64 : LP_F32, s[0], s[1], s[2], 0, 6);
                check(mode, t[0], t[1], is_complex ? LP_C64 : LP_F32, s[0], s[1], s[2], EPILOGUE, 3);
                if (t[0] == t[1] && !TYPES[t[1]].block && TYPES[t[0]].exponent_bits >= 5)
                    check(mode, t[0], t[1], is_complex ? LP_C64 : LP_F32, s[0], s[1], s[2], SPECIAL, 3);
                if (is_complex) continue;
                check(mode, t[0], t[1], LP_F32, s[0], s[1], s[2], EPILOGUE | GELU, 2);
                check(mode, t[0], t[1], LP_BF16, s[0], s[1], s[2], EPILOGUE, 2);
                check(mode, t[0], t[1], LP_F16, s[0], s[1], s[2], 0, 2);
            }
        check(MODES[0], LP_I8, LP_I8, LP_I32, s[0], s[1], s[2], 0, 8);
        const int results[] = {LP_F32, LP_BF16, LP_F16}, scaled[] = {LP_I8, LP_BF16, LP_F32};
        for (int out : results)
            for (int extras = SCALES; extras <= (SCALES | EPILOGUE); extras++)
                for (int type : scaled)
                    if (type != LP_I8 || out != LP_F16) check(MODES[0], type, type, out, s[0], s[1], s[2], extras, 6);
    }
    // Long k with few rows and columns, and many rows of a small product.
    const int64_t more[][3] = {{1, 1, 20000}, {2, 3, 6500}, {3, 4, 1700}, {1100, 3, 5}};
    for (auto& s : more) {
        for (auto& mode : MODES) check(mode, LP_F32, LP_F32, LP_F32, s[0], s[1], s[2], EPILOGUE, 8);
        check(MODES[0], LP_BF16, LP_BF16, LP_F32, s[0], s[1], s[2], 0, 8);
        check(MODES[0], LP_C64, LP_C64, LP_C64, s[0], s[1], s[2], 0, 8);
        check(MODES[0], LP_I8, LP_I8, LP_I32, s[0], s[1], s[2], 0, 8);
    }
}

void check_every_k(int64_t step) {
    for (int64_t k = 1; k <= 1200; k += step) {
        for (auto& mode : MODES) check(mode, LP_F32, LP_F32, LP_F32, 3, 19, k, 0, 1);
        check(MODES[0], LP_BF16, LP_BF16, LP_F32, 5, 18, k, 0, 1);
        check(MODES[0], LP_I8, LP_I8, LP_I32, 5, 33, k, 0, 1);
    }
}

// --- threads: every caller gets the bits of a caller alone ---------------------------------------------

struct Caller {
    const Problem* p;
    uint32_t* expected;
    int64_t failures;
    int unit;
};
void* call_often(void* at) {
    Caller& caller = *(Caller*)at;
    uint32_t* result = (uint32_t*)malloc((size_t)caller.p->words() * 4);
    for (int i = 0; i < 20; i++) {
        const Variant v = {i % 5, i % 3, 0, 1 + i % 3, i % 4 == 0, i % 5 == 0, false, 0, caller.p->m};
        caller.failures += compute(*caller.p, caller.unit, v, result) != LP_OK ||
            memcmp(result, caller.expected, (size_t)caller.p->words() * 4);
        if (i % 8 == 0) lp_release_memory();
    }
    return free(result), nullptr;
}
void check_threads(int unit, const Mode& mode) {
    const int CALLERS = 6, type = strcmp(class_of(unit), "int8") ? LP_F32 : LP_I8;
    Problem p = {&mode, 90, 150, 300, type == LP_I8 ? LP_I32 : LP_F32, 0, {}, {}, nullptr, nullptr, nullptr};
    fill(p.a, type, p.m, p.k, false), fill(p.b, type, p.n, p.k, false);
    p.scales = (float*)calloc((size_t)(p.m + p.n), 4);
    uint32_t* expected = (uint32_t*)malloc((size_t)p.words() * 4);
    const Variant alone = {0, 0, 0, 1, false, false, false, 0, p.m};
    if (compute(p, unit, alone, expected) == LP_OK) {
        pthread_t threads[CALLERS];
        Caller callers[CALLERS];
        for (int i = 0; i < CALLERS; i++)
            callers[i] = Caller{&p, expected, 0, unit}, pthread_create(&threads[i], nullptr, call_often, &callers[i]);
        for (int i = 0; i < CALLERS; i++)
            pthread_join(threads[i], nullptr), report(!callers[i].failures, "differs between threads", p, unit, alone);
    }
    release(p.a), release(p.b), free(expected), free(p.scales);
}

// --- the stack of small products, which callers' threads may have little of ------------------------------

struct Measured {
    const Problem* p;
    uint32_t* result;
    char* stack;
    int64_t used;
    int unit, layout_b, status;
};
void* measure(void* at) {
    Measured& x = *(Measured*)at;
    const Variant plain = {0, x.layout_b, 0, 1, false, false, false, 0, x.p->m};
    char *here = (char*)__builtin_frame_address(0), *lowest = x.stack;
    memset(x.stack, 0x5a, (size_t)(here - x.stack - 512));
    x.status = compute(*x.p, x.unit, plain, x.result);
    while (*lowest == 0x5a) lowest++;
    x.used = here - lowest;
    return nullptr;
}
void check_stack(int unit, const Mode& mode, int type, int64_t m, int64_t n, int64_t k, int layout_b) {
    Problem p = {&mode, m, n, k, type == LP_I8 ? LP_I32 : LP_F32, 0, {}, {}, nullptr, nullptr, nullptr};
    state = 1, fill(p.a, type, m, k, false), fill(p.b, type, n, k, false);
    p.scales = (float*)calloc((size_t)(m + n), 4);
    const size_t size = 1 << 18;
    Measured x = {&p, (uint32_t*)malloc((size_t)p.words() * 4), nullptr, 0, unit, layout_b, 0};
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    if (posix_memalign((void**)&x.stack, 4096, size) || pthread_attr_setstack(&attributes, x.stack, size)) abort();
    if (pthread_create(&thread, &attributes, measure, &x) || pthread_join(thread, nullptr)) abort();
    const bool is_tiled = unit == LP_BF16_AMX || unit == LP_INT8_AMX;
    // `compute` has two of them; frames that clang makes are larger than those of GCC.
    const int64_t most = (mode.parts > 1 || is_tiled ? 17 : 11) << 10;
    const bool is_good = x.status == LP_UNSUPPORTED || (x.status == LP_OK && x.used <= most);
    good += is_good, bad += !is_good;
    if (!is_good)
        fprintf(stderr, "stack: unit %d %s %s %dx%dx%d: %d bytes\n", unit, mode.name, TYPES[type].name, (int)m, (int)n,
                (int)k, (int)x.used);
    free(x.stack), free(x.result), free(p.scales), release(p.a), release(p.b);
}
// Sanitizers need more stack than the threads have.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
const bool HAS_SMALL_STACKS = false;
#else
const bool HAS_SMALL_STACKS = true;
#endif

void check_stacks() {
    const int types[] = {LP_F32, LP_BF16, LP_F16, LP_E4M3, LP_I8};
    const int64_t shapes[][3] = {{8, 8, 8}, {3, 5, 7}, {1, 64, 64}, {64, 64, 64}, {20, 40, 200}};
    for (int unit = 0; unit < LP_UNITS; unit++)
        for (auto& mode : MODES)
            for (int type : types)
                for (auto& s : shapes)
                    for (int layout_b = 0; layout_b < 2; layout_b++)
                        if ((lp_units() >> unit & 1) && (type == LP_F32 || mode.parts == 0))
                            check_stack(unit, mode, type, s[0], s[1], s[2], layout_b);
}

// --- flat functions -----------------------------------------------------------------------------------

void check_unscale() {
    const int bytes[] = {4, 2, 8}, types[] = {0, 1, 100};
    for (int t = 0; t < 3; t++)
        for (int64_t size = 0; size < 70; size++) {
            char* memory = (char*)malloc((size_t)(size * bytes[t] + 1));
            for (int64_t i = 0; i < size; i++) {
                const uint32_t code = random_code(TYPES[t == 1 ? LP_BF16 : LP_F32]);
                const double wide = decoded(code, TYPES[LP_F32]);
                memcpy(memory + i * bytes[t], t == 2 ? (const void*)&wide : &code, (size_t)bytes[t]);
            }
            char* before = (char*)malloc((size_t)(size * bytes[t] + 1));
            memcpy(before, memory, (size_t)(size * bytes[t]));
            const lp_flat flat = {before, memory, size, types[t], 0};
            bool is_good = lp_unscale(&flat, 1, 0.25, 2) == 0;
            for (int64_t i = 0; i < size; i++) {
                uint64_t from = 0, to = 0;
                memcpy(&from, before + i * bytes[t], (size_t)bytes[t]),
                    memcpy(&to, memory + i * bytes[t], (size_t)bytes[t]);
                is_good &= from - to ==
                    (t == 2       ? (uint64_t)2 << 52
                         : t == 1 ? 2 << 7
                                  : 2 << 23);  // a quarter: two less in the exponent
            }
            good += is_good, bad += !is_good;
            if (!is_good) fprintf(stderr, "lp_unscale: type %d, size %d\n", types[t], (int)size);
            free(memory), free(before);
        }
}

#include "check_attention.hpp"
#include "check_emulation.hpp"
#include "check_quantizing.hpp"

// Random products and roundings.
void check_at_random(int64_t problems) {
    const int types[][2] = {{LP_F32, LP_F32},        {LP_BF16, LP_BF16},         {LP_F16, LP_F16},
                            {LP_E4M3, LP_E5M2},      {LP_C64, LP_C64},           {LP_I8, LP_I8},
                            {LP_F32, LP_MXFP8},      {LP_BF16, LP_MXFP4},        {LP_F32, LP_NVFP4},
                            {LP_F32, LP_CODES_I8},   {LP_F32, LP_CODES_U4},      {LP_MXFP4, LP_MXFP4},
                            {LP_NVFP4, LP_NVFP4},    {LP_CODES_I8, LP_CODES_I4}, {LP_CODES_I8, LP_MXFP4},
                            {LP_MXFP4, LP_CODES_I8}, {LP_CODES_I8, LP_CODES_I8}};
    is_fuzzing = true;
    for (int64_t i = 0; i < problems; i++) {
        state = (uint64_t)i;
        const int* t = types[below(sizeof types / sizeof *types)];
        const int64_t m = 1 + below(below(3) ? 10 : 40), n = 1 + below(70), k = 1 + below(below(4) ? 130 : 700);
        const int out = t[0] == LP_I8 ? LP_I32 : t[0] == LP_C64 ? LP_C64 : LP_F32;
        const Mode& mode = MODES[t[0] == LP_F32 && t[1] == LP_F32 ? below(10) : 0];
        check(mode, t[0], t[1], out, m, n, k, t[0] == LP_I8 ? 0 : (int)below(2), 3);
        state = (uint64_t)i;
        if (i % 2) check_random_rule();
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count > 3 && !strcmp(arguments[1], "random")) {
        most_variants = atoi(arguments[2]);
        check_at_random(atoll(arguments[3]));
        fprintf(stderr, "units %#llx: %lld good, %lld bad\n", (unsigned long long)lp_units(), (long long)good,
                (long long)bad);
        return bad != 0;
    }
    check_unscale();
    check_emulate();
    check_attention();
    check_quantize();
    check_rounded_products();
    if (HAS_SMALL_STACKS) check_stacks();
    for (int unit = 0; unit < LP_UNITS; unit++)
        for (int mode = 0; mode < 8; mode += 2)
            if (lp_units() >> unit & 1) check_threads(unit, MODES[mode]);
    const int step = count > 1 ? atoi(arguments[1]) : 1;
    most_variants = count > 2 ? atoi(arguments[2]) : 8;
    every = count > 3 ? atoi(arguments[3]) : 1;
    if (step) check_products(), check_every_k(step);
    lp_release_memory();
    good += lp_kept_bytes() == 0, bad += lp_kept_bytes() != 0;
    fprintf(stderr, "units %#llx: %lld good, %lld bad\n", (unsigned long long)lp_units(), (long long)good,
            (long long)bad);
    return bad != 0;
}
