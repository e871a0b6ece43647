// What the units with 128-bit vectors of AArch64 share: conversions of float16, the shape of a tile.
const int W = 4;
template <class V> static inline V blocks_at(const char* at, int64_t) { return (V)vld1q_u8((const uint8_t*)at); }
template <class V> static inline V widen_u8(const void* at) {
    uint32_t four;
    __builtin_memcpy(&four, at, 4);
    return (V)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
template <class V> static inline V widen_i8(const void* at) {
    uint32_t four;
    __builtin_memcpy(&four, at, 4);
    return (V)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
}
template <class V> static inline V widen_u16(const void* at) { return (V)vmovl_u16(vld1_u16((const uint16_t*)at)); }
template <class V> static inline V load_f16_as(const void* at) { return (V)vcvt_f32_f16(vld1_f16((const __fp16*)at)); }
// E4M3 numbers times 2^-8; 480 is NaN. E4M3 is float16 with another bias and 4 bits of its exponent.
template <class V> static inline V small_e4m3(const void* at) {
    uint32_t four;
    __builtin_memcpy(&four, at, 4);
    const int16x4_t halves = vshl_n_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))), 7);
    return (V)vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(halves, vdup_n_s16((short)0xbfff))));
}
template <class H, class V> static inline H narrowed_f16(V x) { return (H)vcvt_f16_f32((float32x4_t)x); }
template <class V> static inline V round_f16(V x) { return (V)vcvt_f32_f16(vcvt_f16_f32((float32x4_t)x)); }
template <class V> static inline void stream(void* to, V x) { vst1q_f32((float*)to, (float32x4_t)x); }
static inline void copy_some(void* to, const void* from, int bytes) {
    memset(to, 0, 4 * W);
    memcpy(to, from, (size_t)bytes);
}
template <class V> static inline void put_some(void* to, V x, int bytes) { memcpy(to, &x, (size_t)bytes); }
template <class V> static inline bool any(V x) { return vmaxvq_u32((uint32x4_t)x) != 0; }
// The 64-bit products of the even lanes.
template <class V> static inline V mul_even(V x, V y) {
    return (V)vmull_u32(vmovn_u64((uint64x2_t)x), vmovn_u64((uint64x2_t)y));
}
// The bytes of a table, by indices below 16; x * y + z, rounded once.
template <class V> static inline V shuffled(V table, V at) { return (V)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)at); }
template <class V> static inline V fused(V x, V y, V z) {
    return (V)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
}

struct Lanes4 : lp::Vectors {
    static constexpr int ROWS = 6, COLUMNS = 4, FEW = 4;
};
