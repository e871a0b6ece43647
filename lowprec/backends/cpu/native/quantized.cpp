// lp_gemm and lp_pack: operands that a mode quantises are rounded into temporary memory, then api.cpp multiplies.
// Operands of integers in blocks are rounded to codes, which have their own scales.
//
// A packed b that is quantised is followed by its scales, and by the scale of the whole operand. Sums over pieces of k
// are added in float32, in ascending order, before the epilogue.
#include "kernel.hpp"

namespace {

// Scales of vectors from LARGE on lose FACTOR to the scale of the operand, so that products of two are finite.
const float LARGE = 0x1p63f, FACTOR = 0x1p58f;

bool is_integer(const lp_quantizer& q) { return q.elements == LP_NARROW_I8; }
int64_t count_of(const lp_quantizer& q) { return q.batches * q.vectors * q.k; }
int64_t scale_count(const lp_quantizer& q) {
    if (q.codes) return 0;
    return q.scaling == LP_VECTORS || q.scaling == LP_F32_SCALES ? q.batches * q.scale_batch : 0;
}
int64_t numbers_bytes(const lp_quantizer& q) {
    const int64_t codes = q.batches * q.vectors * q.to_vector / (is_integer(q) ? 1 : 2);
    return ((q.codes ? codes : 2 * count_of(q)) + 63) / 64 * 64;
}
int64_t code_scale_bytes(const lp_quantizer& q) {
    return q.codes ? q.batches * q.scale_batch * (q.scaling == LP_F32_SCALES ? 4 : 1) : 0;
}
int64_t bytes_after(const lp_quantizer& q) { return 8 * ((scale_count(q) + 1) / 2 + 1); }

// A rounded operand.
struct Rounded {
    const char* at = nullptr;
    float* scales = nullptr;  // of vectors or blocks; null: none
    char* code_scales = nullptr;
    double scale = 1;         // of all numbers
    lp::Memory memory, ordered, bounded;
};

// int8 numbers become bfloat16 numbers, which an operand with other numbers needs.
void widen(char* at, int64_t count) {
    for (int64_t i = count - 1; i >= 0; i--) {
        const float x = ((const int8_t*)at)[i];
        ((uint16_t*)at)[i] = (uint16_t)(__builtin_bit_cast(uint32_t, x) >> 16);
    }
}

void reduce_scales(Rounded& r, int64_t count) {
    float largest = 0;
    for (int64_t i = 0; i < count; i++) largest = r.scales[i] > largest ? r.scales[i] : largest;
    if (largest < LARGE) return;
    for (int64_t i = 0; i < count; i++) r.scales[i] /= FACTOR;
    r.scale *= FACTOR;
}

// Rounds operand 0 or 1 of a product into new memory, which has room for the scales after the numbers; -> lp_status.
int32_t round_operand(Rounded& r, const lp_product& p, const lp_call& c, int operand) {
    lp_quantizer q = p.rounding[operand];
    if (q.stochastic) q.stream = 2 * c.draw + (uint64_t)operand;
    const int64_t bytes = numbers_bytes(q);
    char* const to = (char*)r.memory.of(bytes + bytes_after(q) + code_scale_bytes(q));
    if (!to) return LP_NO_MEMORY;
    float scale = 1;
    float* const scales = scale_count(q) || q.codes ? (float*)(to + bytes) : nullptr;
    if (const int32_t status = lp_quantize(&q, operand ? c.b : c.a, to, scales, &scale, c.threads)) return status;
    r.at = to;
    r.scale = scale;
    r.code_scales = (char*)scales;
    if (q.codes) return LP_OK;
    if (is_integer(q) && (operand ? p.b : p.a).type != LP_I8) widen(to, count_of(q));
    r.scales = scales;
    if (scales) reduce_scales(r, scale_count(q));
    return LP_OK;
}

// The numbers of a packed b, and the scales after them.
void find_packed(Rounded& r, const lp_product& p, const lp_call& c, int64_t bytes) {
    const lp_quantizer& q = p.rounding[1];
    r.at = (const char*)c.b;
    if (scale_count(q)) r.scales = (float*)(r.at + bytes);
    memcpy(&r.scale, r.at + bytes + bytes_after(q) - 8, 8);
}

int64_t packed_bytes(const lp_product& p, const lp_call& c) {
    return p.piece ? numbers_bytes(p.rounding[1]) : lp::pack(p, c, nullptr);
}

// Finds the scales of the rows of a or the columns of b in some pieces of k, in the order of the products, one piece
// after the other; false if there is no memory. `to` becomes null if there are no scales.
bool order_scales(Rounded& r, const lp_product& p, int operand, int64_t first, int64_t pieces, const float*& to) {
    const lp_quantizer& q = p.rounding[operand];
    const int64_t* const order = p.scale_order[operand];
    to = r.scales;
    if (!r.scales || (!order && q.scaling == LP_VECTORS)) return true;
    const lp_matrix& x = operand ? p.b : p.a;
    const int64_t count = (x.batch_offsets ? p.batches : 1) * (operand ? p.n : p.m);
    float* const ordered = (float*)r.ordered.of(4 * count * pieces + 256);  // kernels read the scales of whole strips
    if (!ordered) return false;
    for (int64_t i = 0; i < count; i++) {
        const int64_t vector = order ? order[i] : i, batch = vector / q.vectors;
        const int64_t in_batch = vector % q.vectors / q.block_vectors * q.scale_vector;
        const float* const of_vector = r.scales + batch * q.scale_batch + in_batch;
        for (int64_t piece = 0; piece < pieces; piece++)
            ordered[piece * count + i] = of_vector[(first + piece) * q.scale_inner];
    }
    to = ordered;
    return true;
}

// Moves a factor of alpha to the rows: infinity, as a float32 alpha, times a sum of zero would be NaN.
bool bound_alpha(lp_call& c, const lp_product& p, Rounded& a) {
    const double largest = __FLT_MAX__;
    double& alpha = c.alpha[0];
    if (!(__builtin_fabs(alpha) > largest) || !__builtin_isfinite(alpha)) return true;
    if (!c.row_scales || !c.col_scales) {
        const int64_t count = (p.a.batch_offsets ? p.batches : 1) * p.m;
        float* const rows = (float*)a.bounded.of(4 * count);
        if (!rows) return false;
        for (int64_t i = 0; i < count; i++) rows[i] = (c.row_scales ? c.row_scales[i] : 1) * FACTOR;
        c.row_scales = rows;
        alpha /= FACTOR;
    }
    if (__builtin_fabs(alpha) > largest) alpha = __builtin_copysign(largest, alpha);
    return true;
}

int32_t at_once(const lp_product& p, lp_call c, Rounded& a, Rounded& b) {
    c.alpha[0] = c.alpha[0] * a.scale * b.scale;
    if (!order_scales(a, p, 0, 0, 1, c.row_scales) || !order_scales(b, p, 1, 0, 1, c.col_scales)) return LP_NO_MEMORY;
    return bound_alpha(c, p, a) ? lp::gemm(p, c) : LP_NO_MEMORY;
}

// Whether a kernel adds the pieces of k; products of few rows or columns are added one by one.
bool adds_pieces(const lp_product& p) {
    for (const lp_quantizer& q : p.rounding)
        if (q.batches && q.scaling != LP_F32_SCALES) return false;
    return p.m > 16 && p.n > 16 && (p.k % p.piece == 0 || p.unit == p.last_unit);
}

int32_t with_pieces(const lp_product& p, lp_call c, Rounded& a, Rounded& b) {
    lp_product whole = p;
    whole.b.packed = 0;
    const int64_t pieces = (p.k + p.piece - 1) / p.piece;
    if (!order_scales(a, p, 0, 0, pieces, c.row_scales)) return LP_NO_MEMORY;
    if (!order_scales(b, p, 1, 0, pieces, c.col_scales)) return LP_NO_MEMORY;
    return lp::gemm(whole, c, p.piece, a.scale * b.scale);
}

__attribute__((noinline)) int32_t in_pieces(const lp_product& p, const lp_call& c, Rounded& a, Rounded& b) {
    const int64_t each = p.m * p.n, size = p.batches * each;
    lp::Memory memory;
    int64_t* const offsets = (int64_t*)memory.of(8 * p.batches + 4 * size + 512);
    if (!offsets) return LP_NO_MEMORY;
    float* const sums = (float*)(offsets + p.batches);
    for (int64_t i = 0; i < p.batches; i++) offsets[i] = i * each;
    memset(sums, 0, (size_t)(4 * size));

    lp_product part = p;
    part.b.packed = 0;
    part.out = lp_matrix{p.n, 1, nullptr, nullptr, p.batches > 1 ? offsets : nullptr, 0, 0, LP_F32, 0};
    part.c = part.out;
    part.bias.type = -1;
    part.activation = 0;
    lp_call now = c;
    now.out = sums;
    now.c = sums;
    now.bias = nullptr;
    now.alpha[0] = a.scale * b.scale;
    now.beta[0] = 1;
    now.alpha[1] = now.beta[1] = 0;
    for (int64_t piece = 0, k = 0; k < p.k; piece++, k += p.piece) {
        part.k = p.k - k < p.piece ? p.k - k : p.piece;
        part.unit = part.k < p.piece ? p.last_unit : p.unit;
        now.a = a.at + k * p.a.col * lp::bits_of(p.a.type) / 8;
        now.b = b.at + k * p.b.row * lp::bits_of(p.b.type) / 8;
        const bool found =
            order_scales(a, p, 0, piece, 1, now.row_scales) && order_scales(b, p, 1, piece, 1, now.col_scales);
        if (!found) return LP_NO_MEMORY;
        if (const int32_t status = lp::gemm(part, now)) return status;
    }
    return lp::apply_epilogue(p, c, sums);
}

// Not inline: threads that multiply small matrices may have little stack.
__attribute__((noinline)) int32_t multiply_rounded(const lp_product& p, lp_call c) {
    if (p.k < 1) return LP_UNSUPPORTED;
    const lp::Arithmetic standard;  // the caller's thread may flush subnormal numbers
    Rounded a;
    Rounded b;
    a.at = (const char*)c.a;
    b.at = (const char*)c.b;
    int32_t status = p.rounding[0].batches ? round_operand(a, p, c, 0) : LP_OK;
    if (p.rounding[1].batches && p.b.packed) find_packed(b, p, c, packed_bytes(p, c));
    else if (p.rounding[1].batches && !status) status = round_operand(b, p, c, 1);
    if (status) return status;
    c.a = a.at;
    c.b = b.at;
    if (p.rounding[0].codes) c.a_scales = a.code_scales;
    if (p.rounding[1].codes) c.b_scales = b.code_scales;
    if (p.piece && p.k > p.piece) return adds_pieces(p) ? with_pieces(p, c, a, b) : in_pieces(p, c, a, b);
    if (!p.piece) return at_once(p, c, a, b);
    lp_product one = p;
    one.b.packed = 0;
    if (p.k < p.piece) one.unit = p.last_unit;
    return at_once(one, c, a, b);
}

}  // namespace

LP_API int32_t lp_gemm(const lp_product* p, const lp_call* c) {
    return p->rounding[0].batches || p->rounding[1].batches ? multiply_rounded(*p, *c) : lp::gemm(*p, *c);
}

LP_API int64_t lp_pack(const lp_product* product, const lp_call* call, void* to) {
    const lp_product& p = *product;
    const lp_quantizer& q = p.rounding[1];
    if (!q.batches) return lp::pack(p, *call, to);
    const int64_t bytes = packed_bytes(p, *call);
    if (bytes < 0 || !to) return bytes < 0 ? -1 : bytes + bytes_after(q);
    const lp::Arithmetic standard;
    Rounded b;
    if (round_operand(b, p, *call, 1)) return -1;
    lp_call c = *call;
    c.b = b.at;
    if (q.codes) c.b_scales = b.code_scales;
    if (p.piece) memcpy(to, b.at, (size_t)bytes);
    else lp::pack(p, c, to);
    char* const after = (char*)to + bytes;
    if (b.scales) memcpy(after, b.scales, (size_t)(4 * scale_count(q)));
    memcpy(after + bytes_after(q) - 8, &b.scale, 8);
    return bytes + bytes_after(q);
}
