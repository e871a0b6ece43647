// lp_emulate against the definition of the arithmetic in emulation/arithmetic.py; included by check.cpp.

// An element of the result, in double; the exponents of the scales of groups of b are `step` apart.
uint32_t emulated(const float* a, const float* b, float c, int64_t n, int64_t k, const int32_t* scales_a,
                  const int32_t* scales_b, int64_t step, const lp_tensor_core_model& core) {
    for (int64_t first = 0; first < k; first += core.group) {
        const int scale = scales_a[first / core.group] + scales_b[first / core.group * step];
        double terms[33] = {core.adds_after ? 0 : c}, special = isfinite(c) ? 0.0 : c, sum = 0;
        int largest = c && !core.adds_after ? fmax(ilogb(c), -126) : core.least_exponent, count = 1;
        for (int64_t i = first; i < k && i < first + core.group; i++) {
            const double x = a[i], y = b[i * n], product = x * y;
            if (!isfinite(product)) special += product;
            if (product == 0 || !isfinite(product)) continue;
            largest = fmax(largest, fmax(ilogb(x), core.emin) + fmax(ilogb(y), core.emin) + scale);
            terms[count++] = ldexp(product, scale);
        }
        largest = fmax(largest, core.least_exponent);
        for (int i = 0; i < count; i++) sum += trunc(ldexp(terms[i], core.fraction_bits - largest));
        sum = ldexp(sum + 0.0, largest - core.fraction_bits);
        float rounded = (float)sum;
        if (fabs(sum) < 0x1p128 && fabs((double)rounded) > fabs(sum)) rounded = nextafterf(rounded, 0);
        uint32_t word;
        memcpy(&word, &rounded, 4), word &= ~0u << (23 - core.result_bits), memcpy(&rounded, &word, 4);
        if (core.adds_after) rounded += c;
        c = special != 0 ? (float)special : rounded;  // NaN is not equal to 0
    }
    uint32_t found = 0x7fffffff;
    if (c == c) memcpy(&found, &c, 4);
    return found;
}
void check_emulate() {
    const struct {
        lp_tensor_core_model core;
        int dropped;
    } models[] = {
        // float16 on Volta, tf32 on Ampere, all on Hopper; E5M2 on Hopper and Blackwell
        {{4, 23, -126, -14, 23, 0}, 13},   {{4, 24, -132, -126, 23, 0}, 13}, {{16, 25, -133, -14, 23, 0}, 13},
        {{16, 25, -133, -126, 23, 0}, 16}, {{8, 25, -133, -126, 23, 0}, 13}, {{32, 13, -133, -14, 13, 0}, 21},
        {{32, 25, -133, -14, 23, 1}, 21},
    };
    for (const auto& model : models)
        for (int round = 0; round < 24; round++) {
            const int64_t m = below(40), n = below(40), k = below(300), sizes[] = {m * k, k * n, m * n};
            const bool is_f16 = model.core.emin == -14;
            const uint32_t middle = is_f16 ? 127 : 60 + below(140), spread = is_f16 ? 14 : 8 + below(50);
            float *x[3], *result = (float*)malloc((size_t)(m * n) * 4 + 1);
            for (int i = 0; i < 3; i++) {
                x[i] = (float*)malloc((size_t)sizes[i] * 4 + 1);
                for (int64_t j = 0; j < sizes[i]; j++) {
                    const uint32_t exponent = middle - spread + below(2 * spread), dropped = i < 2 ? model.dropped : 0;
                    uint32_t code = (random_bits() >> 31) << 31;
                    if (below(10)) code |= exponent << 23 | (below(1 << 23) >> dropped << dropped);
                    if (round % 3 == 0 && below(100) == 0) code |= 0x7f800000;
                    memcpy(x[i] + j, &code, 4);
                }
            }
            memcpy(result, x[2], (size_t)(m * n) * 4);
            // Scales of groups: 0 as no scales, or with sums beyond float32.
            const int64_t groups = (k + model.core.group - 1) / model.core.group;
            const int reach = round % 4 == 3 ? 254 : round % 2;
            const int64_t counts[] = {m * groups, groups * n};
            int32_t* scales[2];
            for (int i = 0; i < 2; i++) {
                scales[i] = (int32_t*)malloc((size_t)counts[i] * 4 + 1);
                for (int64_t j = 0; j < counts[i]; j++) scales[i][j] = reach ? (int)below(reach) - reach / 2 : 0;
            }
            bool is_good = lp_emulate(x[0], x[1], result, m, n, k, reach ? scales[0] : nullptr,
                                      reach ? scales[1] : nullptr, &model.core, 1 + round % 2) == LP_OK;
            for (int64_t i = 0; i < m * n; i++) {
                const uint32_t expected = emulated(x[0] + i / n * k, x[1] + i % n, x[2][i], n, k,
                                                   scales[0] + i / n * groups, scales[1] + i % n, n, model.core);
                is_good &= !memcmp(result + i, &expected, 4);
            }
            good += is_good, bad += !is_good;
            if (!is_good) fprintf(stderr, "lp_emulate: group %d, emin %d\n", model.core.group, model.core.emin);
            free(x[0]), free(x[1]), free(x[2]), free(result), free(scales[0]), free(scales[1]);
        }
}
