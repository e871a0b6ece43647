// lp_quantize: layouts, threads and processors give the same bits, and blocks of 32 the numbers of a search in double.

struct Rounded {
    uint16_t *values, *scales;  // of each vector along k; scales as bytes or floats
    float scale;
};

// Rounds `vectors` x `k` numbers in a layout: k contiguous, vectors contiguous, or neither. Buffers have exact sizes.
bool quantize(const lp_quantizer& rule, const float* x, int layout, int threads, int64_t scales, Rounded& to) {
    lp_quantizer q = rule;
    const int64_t count = q.vectors * q.k, size = q.elements == LP_NARROW_I8 ? 1 : 2, gap = layout == 2 ? 3 : 1;
    q.vector = layout == 1 ? 1 : gap * q.k, q.inner = layout == 1 ? q.vectors : gap;
    q.to_vector = layout == 1 ? 1 : q.k, q.to_inner = layout == 1 ? q.vectors : 1;
    float* from = (float*)malloc((size_t)((count - 1) * gap + 1) * 4);
    char* values = (char*)malloc((size_t)(count * size));
    for (int64_t v = 0; v < q.vectors; v++)
        for (int64_t i = 0; i < q.k; i++) from[v * q.vector + i * q.inner] = x[v * q.k + i];
    const bool is_good = lp_quantize(&q, from, values, scales ? to.scales : nullptr, &to.scale, threads) == LP_OK;
    for (int64_t v = 0; v < q.vectors; v++)
        for (int64_t i = 0; i < q.k; i++) {
            const char* at = values + (v * q.to_vector + i * q.to_inner) * size;
            uint16_t& word = to.values[v * q.k + i];
            word = 0, memcpy(&word, at, (size_t)size);
            if (size == 2 && (word & 0x7fff) > 0x7f80) word = 0x7fc0;
        }
    free(from), free(values);
    return is_good;
}

// The number of E4M3 or E2M1 that is nearest to a number, ties to even.
double nearest(double x, const Type& t, double largest) {
    const int e = x ? (int)fmax(ilogb(x), 2 - (1 << (t.exponent_bits - 1))) : 0;
    const double step = ldexp(1, e - t.fraction_bits);
    return fmin(nearbyint(x / step) * step, largest);
}

void check_rule(lp_quantizer q, int64_t vectors, int64_t k) {
    q.batches = 1, q.vectors = vectors, q.k = k, q.type = LP_F32;
    const bool of_vectors = q.scaling == LP_VECTORS, of_blocks = q.scaling == LP_F32_SCALES;
    const int64_t down = of_vectors ? vectors : (vectors + q.block_vectors - 1) / q.block_vectors, across = of_vectors ? 1 : (k + q.block_k - 1) / q.block_k;
    const int64_t scales = of_vectors || of_blocks ? down * across : 0, bytes = scales * 4;
    q.scale_vector = across, q.scale_inner = 1;
    float* x = (float*)malloc((size_t)(vectors * k) * 4);
    state = (uint64_t)(vectors * 1009 + k);
    for (int64_t i = 0; i < vectors * k; i++) x[i] = (float)decoded(random_code(TYPES[LP_F32]), TYPES[LP_F32]);
    if (k > 40) x[k / 2] = INFINITY, x[vectors * k - 1] = NAN;
    Rounded first, other;
    Rounded* both[] = {&first, &other};
    for (Rounded* r : both) r->values = (uint16_t*)malloc((size_t)(vectors * k) * 2), r->scales = (uint16_t*)calloc((size_t)bytes + 1, 1);
    bool is_good = quantize(q, x, 0, 1, scales, first);
    for (int layout = 0; layout < 3; layout++) {
        is_good &= quantize(q, x, layout, 1 + layout, scales, other) && !memcmp(&first.scale, &other.scale, 4);
        is_good &= !memcmp(first.values, other.values, (size_t)(vectors * k) * 2) && !memcmp(first.scales, other.scales, (size_t)bytes);
    }
    if (q.scaling == LP_FLOOR && !q.stochastic && !q.hadamard)
        for (int64_t i = 0; i < vectors * k; i++) {
            const float* block = x + i / k * k + i % k / 32 * 32;
            double peak = 0;
            bool finite = true;
            for (int64_t j = 0; j < 32 && block + j < x + (i / k + 1) * k; j++) peak = fmax(peak, fabs(block[j])), finite &= isfinite(block[j]) != 0;
            const Type& t = TYPES[q.elements == LP_NARROW_E2M1 ? LP_MXFP4 : LP_MXFP8];
            const double largest = q.elements == LP_NARROW_E2M1 ? 6 : 448, power = peak && finite ? ldexp(1, ilogb(peak) - ilogb(largest)) : 1;
            const double want = nearest(fabs(x[i]) / power, t, largest) * power, found = decoded(first.values[i], TYPES[LP_BF16]);
            is_good &= finite ? fabs(found) == want : isnan(found) != 0;
        }
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < vectors * k; i++) hash = (hash ^ first.values[i]) * 0x100000001b3u;
    for (int64_t i = 0; i < bytes / 2; i++) hash = (hash ^ first.scales[i]) * 0x100000001b3u;
    printf("fp32 quantize_%d_%d_%d_%d_%dx%d %016llx\n", q.elements, q.scaling, q.stochastic, q.hadamard, (int)vectors, (int)k, (unsigned long long)hash);
    good += is_good, bad += !is_good;
    if (!is_good) fprintf(stderr, "lp_quantize: elements %d, scaling %d, stochastic %d, hadamard %d, %d x %d\n", q.elements, q.scaling, q.stochastic, q.hadamard, (int)vectors, (int)k);
    for (Rounded* r : both) free(r->values), free(r->scales);
    free(x);
}

void check_quantize() {
    const int rules[][4] = {  // elements, scaling, block
                            {LP_NARROW_E4M3, LP_TENSOR, 1, 1},
                            {LP_NARROW_E5M2, LP_VECTORS, 1, 1},
                            {LP_NARROW_I8, LP_VECTORS, 1, 1},
                            {LP_NARROW_E4M3, LP_FLOOR, 1, 32},
                            {LP_NARROW_E2M1, LP_FLOOR, 1, 32},
                            {LP_NARROW_E5M2, LP_RCEIL, 1, 32},
                            {LP_NARROW_E2M1, LP_E4M3_SCALES, 1, 16},
                            {LP_NARROW_E2M1, LP_E4M3_SCALES, 16, 16},
                            {LP_NARROW_E4M3, LP_F32_SCALES, 1, 128},
                            {LP_NARROW_E4M3, LP_F32_SCALES, 128, 128}};
    const int64_t shapes[][2] = {{1, 1}, {3, 7}, {17, 65}, {5, 1200}, {260, 33}, {40, 300}};
    for (auto& rule : rules)
        for (auto& s : shapes)
            for (int measures = 0; measures < 4; measures++) {
                lp_quantizer q = {};
                q.elements = rule[0], q.scaling = rule[1], q.block_vectors = rule[2], q.block_k = rule[3];
                q.stochastic = measures & 1, q.hadamard = measures >> 1, q.seed = 0x123456789abcdefu, q.stream = 0xfedcba987654321u;
                check_rule(q, s[0], s[1]);
            }
}
