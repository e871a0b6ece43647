// Multiplication of arrays by the inverse of a loss scale, with the detection of Inf and NaN in the same pass.
//
// bfloat16 is multiplied in float32 and rounded once, to nearest even. Arrays may be scaled in place. Included after
// emulate.hpp.

template <class V, int BYTES, class Number>
static bool scale(const char* from, char* to, int64_t count, Number inverse) {
    const int bytes = (BYTES == 8 ? W / 2 : W) * BYTES;
    const V factor = inverse - V{};
    u32v special = {};
    char some[bytes] = {};
    for (int64_t rest = count * BYTES; rest > 0; rest -= bytes, from += bytes, to += bytes) {
        const bool whole = rest >= bytes;
        if (!whole) memcpy(some, from, (size_t)rest);
        V x;
        if constexpr (BYTES == 2) x = widened<LP_BF16>(whole ? from : some);
        else x = get<V>(whole ? from : some);
        special |= (u32v)(x - x);  // NaN for Inf and NaN, otherwise +0
        if constexpr (BYTES == 2) put(whole ? to : some, halves<LP_BF16>(x * factor));
        else put(whole ? to : some, x * factor);
        if (!whole) memcpy(to, some, (size_t)rest);
    }
    return any(special);
}

static bool unscale_some(const lp_flat& x, int64_t first, int64_t count, double inverse) {
    const int bytes = x.type == LP_F32 || x.type == LP_BF16 ? lp::bits_of(x.type) / 8 : 8;
    const char* from = (const char*)x.from + first * bytes;
    char* to = (char*)x.to + first * bytes;
    if (bytes == 8) return scale<f64v, 8>(from, to, count, inverse);
    if (bytes == 4) return scale<f32v, 4>(from, to, count, (float)inverse);
    return scale<f32v, 2>(from, to, count, (float)inverse);
}
