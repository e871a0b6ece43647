// Softmax of a row of scores, as its chunks of keys come: exponentials relative to the largest score so far.
//
// A row is summed in 16 lanes everywhere, and exponentials are a polynomial of fused operations: the bits depend on the
// scores alone, on any processor.

// The exponential of x < 88, or of NaN; zero below -87. Its relative error is below 2^-23.
INLINE f32v exponential(f32v x) {
    const f32v shifted = fused(x, all_floats(1.44269504f), all_floats(12582912.0f));  // an integer in the low bits
    const f32v n = shifted - 12582912.0f;
    const f32v r = fused(n, all_floats(1.90465421e-9f), fused(n, all_floats(-0.693147182f), x));
    f32v p = all_floats(0.00138210424f);
    p = fused(p, r, all_floats(0.00836867094f));
    p = fused(p, r, all_floats(0.0416682623f));
    p = fused(p, r, all_floats(0.166665211f));
    p = fused(p, r, all_floats(0.49999994f));
    p = fused(p * r, r, r) + 1.0f;
    const u32v power = (bits(shifted) << 23) + (127u << 23);
    return floats(~(u32v)(x < -87.0f) & bits(p * floats(power)));
}

const int ROW_VECTORS = 16 / W;  // which are read at once

// The mask of 16 keys from the i-th on, of which those that exist are copied to `lanes` if they are fewer.
INLINE const float* mask_at(const lp::ScoreRow& row, int64_t i, float* lanes) {
    if (!row.mask || row.keys - i >= 16) return row.mask ? row.mask + i : nullptr;
    __builtin_memset(lanes, 0, 16 * sizeof(float));
    __builtin_memcpy(lanes, row.mask + i, sizeof(float) * (size_t)(row.keys - i));
    return lanes;
}

// The v-th W of 16 scores from the i-th on; of keys that do not exist -Inf.
INLINE f32v scores_at(const lp::ScoreRow& row, int64_t i, int v, const float* mask) {
    f32v x = get<f32v>(row.scores + i + v * W);
    x = mask ? fused(x, all_floats(row.scale), get<f32v>(mask + v * W)) : x * row.scale;
    const i32v numbers = get<i32v>(LANE_NUMBERS + v * W) + (int32_t)i;
    return floats(choose((u32v)(numbers < (int32_t)row.keys), bits(x), bits(all_floats(-__builtin_inff()))));
}

static float weigh(const lp::ScoreRow& row) {
    f32v most[ROW_VECTORS], sums[ROW_VECTORS] = {};
    alignas(64) float lanes[16];
    UNROLLED(v, ROW_VECTORS) most[v] = all_floats(-__builtin_inff());
    for (int64_t i = 0; i < row.keys; i += 16) {
        const float* const mask = mask_at(row, i, lanes);
        UNROLLED(v, ROW_VECTORS) {
            const f32v x = scores_at(row, i, v, mask);
            most[v] = floats(choose((u32v)(x > most[v]), bits(x), bits(most[v])));
            put(row.scores + i + v * W, x);
        }
    }
    UNROLLED(v, ROW_VECTORS) put(lanes + v * W, most[v]);
    const float before = *row.largest;
    for (float x : lanes) *row.largest = x > *row.largest ? x : *row.largest;
    const float base = *row.largest == -__builtin_inff() ? 0 : *row.largest;
    for (int64_t i = 0; i < row.keys; i += 16)
        UNROLLED(v, ROW_VECTORS) {
            float* const at = row.scores + i + v * W;
            const f32v x = exponential(get<f32v>(at) - base);
            sums[v] += x;
            put(at, x);
        }
    UNROLLED(v, ROW_VECTORS) put(lanes + v * W, sums[v]);
    UNROLLED_BY(half, 4, 1)
        for (int i = 0; i < 8 >> half; i++) lanes[i] += lanes[i + (8 >> half)];
    const float factor = exponential(all_floats(before - base))[0];
    *row.sum = *row.sum * factor + lanes[0];
    return factor;
}

// Makes weights of scores, by the logarithms of the sums of their exponentials, and of the gradients of the weights those
// of the scores: (gradient - shift) * weight.
static void differentiate(const lp::ScoreRow& row, float* gradients, float logarithm, float shift) {
    alignas(64) float lanes[16];
    for (int64_t i = 0; i < row.keys; i += 16) {
        const float* const mask = mask_at(row, i, lanes);
        UNROLLED(v, ROW_VECTORS) {
            float* const at = gradients + i + v * W;
            const f32v weights = exponential(scores_at(row, i, v, mask) - logarithm);
            put(row.scores + i + v * W, weights);
            put(at, (get<f32v>(at) - shift) * weights);
        }
    }
}
