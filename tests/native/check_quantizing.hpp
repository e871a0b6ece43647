// lp_quantize: layouts, threads and processors give the same bits, and blocks of 32 the numbers of a search in double.
// lp_gemm with rounding: the product of the numbers of lp_quantize with their scales, also of a packed b.

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
    const Strange strange;
    float* from = (float*)allocate(((count - 1) * gap + 1) * 4);
    char* values = allocate(count * size);
    void* const found = allocate(4 * scales);
    for (int64_t v = 0; v < q.vectors; v++)
        for (int64_t i = 0; i < q.k; i++) from[v * q.vector + i * q.inner] = x[v * q.k + i];
    const bool is_good = lp_quantize(&q, from, values, scales ? found : nullptr, &to.scale, threads) == LP_OK;
    memcpy(to.scales, found, (size_t)scales * 4);
    for (int64_t v = 0; v < q.vectors; v++)
        for (int64_t i = 0; i < q.k; i++) {
            const char* at = values + (v * q.to_vector + i * q.to_inner) * size;
            uint16_t& word = to.values[v * q.k + i];
            word = 0, memcpy(&word, at, (size_t)size);
            if (size == 2 && (word & 0x7fff) > 0x7f80) word = 0x7fc0;
        }
    discard(from), discard(values), discard(found);
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
    const int64_t down = of_vectors ? vectors : (vectors + q.block_vectors - 1) / q.block_vectors,
                  across = of_vectors ? 1 : (k + q.block_k - 1) / q.block_k;
    const int64_t scales = of_vectors || of_blocks ? down * across : 0, bytes = scales * 4;
    q.scale_vector = across, q.scale_inner = 1;
    float* x = (float*)malloc((size_t)(vectors * k) * 4);
    state = (uint64_t)(vectors * 1009 + k);
    for (int64_t i = 0; i < vectors * k; i++) x[i] = (float)decoded(random_code(TYPES[LP_F32]), TYPES[LP_F32]);
    if (k > 40) x[k / 2] = INFINITY, x[vectors * k - 1] = NAN;
    Rounded first, other;
    Rounded* both[] = {&first, &other};
    for (Rounded* r : both)
        r->values = (uint16_t*)malloc((size_t)(vectors * k) * 2), r->scales = (uint16_t*)calloc((size_t)bytes + 1, 1);
    bool is_good = quantize(q, x, 0, 1, scales, first);
    for (int layout = 0; layout < 3; layout++) {
        is_good &= quantize(q, x, layout, 1 + layout, scales, other) && !memcmp(&first.scale, &other.scale, 4);
        is_good &= !memcmp(first.values, other.values, (size_t)(vectors * k) * 2) &&
            !memcmp(first.scales, other.scales, (size_t)bytes);
    }
    if (q.scaling == LP_FLOOR && !q.stochastic && !q.hadamard)
        for (int64_t i = 0; i < vectors * k; i++) {
            const float* block = x + i / k * k + i % k / 32 * 32;
            double peak = 0;
            bool finite = true;
            for (int64_t j = 0; j < 32 && block + j < x + (i / k + 1) * k; j++)
                peak = fmax(peak, fabs(block[j])), finite &= isfinite(block[j]) != 0;
            const Type& t = TYPES[q.elements == LP_NARROW_E2M1 ? LP_MXFP4 : LP_MXFP8];
            const double largest = q.elements == LP_NARROW_E2M1 ? 6 : 448,
                         power = peak && finite ? ldexp(1, ilogb(peak) - ilogb(largest)) : 1;
            const double want = nearest(fabs(x[i]) / power, t, largest) * power,
                         found = decoded(first.values[i], TYPES[LP_BF16]);
            is_good &= finite ? fabs(found) == want : isnan(found) != 0;
        }
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < vectors * k; i++) hash = (hash ^ first.values[i]) * 0x100000001b3u;
    for (int64_t i = 0; i < bytes / 2; i++) hash = (hash ^ first.scales[i]) * 0x100000001b3u;
    if (!is_fuzzing)
        printf("fp32 quantize_%d_%d_%d_%d_%dx%d %016llx\n", q.elements, q.scaling, q.stochastic, q.hadamard,
               (int)vectors, (int)k, (unsigned long long)hash);
    good += is_good, bad += !is_good;
    if (!is_good)
        fprintf(stderr, "lp_quantize: elements %d, scaling %d, stochastic %d, hadamard %d, %d x %d\n", q.elements,
                q.scaling, q.stochastic, q.hadamard, (int)vectors, (int)k);
    for (Rounded* r : both) free(r->values), free(r->scales);
    free(x);
}

const int RULES[][4] = {  // elements, scaling, block
                        {LP_NARROW_E4M3, LP_TENSOR, 1, 1},        {LP_NARROW_E5M2, LP_VECTORS, 1, 1},
                        {LP_NARROW_I8, LP_VECTORS, 1, 1},         {LP_NARROW_E4M3, LP_FLOOR, 1, 32},
                        {LP_NARROW_E2M1, LP_FLOOR, 1, 32},        {LP_NARROW_E5M2, LP_RCEIL, 1, 32},
                        {LP_NARROW_E2M1, LP_E4M3_SCALES, 1, 16},  {LP_NARROW_E2M1, LP_E4M3_SCALES, 16, 16},
                        {LP_NARROW_E4M3, LP_F32_SCALES, 1, 128},  {LP_NARROW_I8, LP_F32_SCALES, 1, 32},
                        {LP_NARROW_E4M3, LP_F32_SCALES, 128, 128}};

lp_quantizer quantizer(const int* rule, int measures) {
    lp_quantizer q = {};
    q.elements = rule[0], q.scaling = rule[1], q.block_vectors = rule[2], q.block_k = rule[3];
    q.stochastic = measures & 1, q.hadamard = measures >> 1, q.seed = 0x123456789abcdefu, q.stream = 0xfedcba987654321u;
    return q;
}

void check_random_rule() {
    const int* const rule = RULES[below(sizeof RULES / sizeof *RULES)];
    const lp_quantizer q = quantizer(rule, (int)below(4));
    const int64_t vectors = 1 + below(40);
    check_rule(q, vectors, 1 + below(300));
}

void check_quantize() {
    const int64_t shapes[][2] = {{1, 1}, {3, 7}, {17, 65}, {5, 1200}, {260, 33}, {40, 300}};
    for (auto& rule : RULES)
        for (auto& s : shapes)
            for (int measures = 0; measures < 4; measures++) check_rule(quantizer(rule, measures), s[0], s[1]);
}

// The result of lp_gemm, of which a and b have exact sizes; of a packed b if `packs`.
int multiply(lp_product p, lp_call c, bool packs, float* out) {
    c.out = out;
    if (!packs) return lp_gemm(&p, &c);
    void* packed = nullptr;
    const int64_t bytes = lp_pack(&p, &c, nullptr);
    if (bytes < 0) return LP_UNSUPPORTED;
    if (posix_memalign(&packed, 64, (size_t)bytes) || lp_pack(&p, &c, packed) != bytes) abort();
    p.b.packed = 1;
    c.b = packed;
    const int status = lp_gemm(&p, &c);
    free(packed);
    return status;
}

void check_rounded_product(int unit, const lp_quantizer& rule, int64_t m, int64_t n, int64_t k) {
    const bool is_integer = rule.elements == LP_NARROW_I8, in_pieces = rule.scaling == LP_F32_SCALES;
    const int64_t lanes[] = {m, n}, size = is_integer ? 1 : 2;
    lp_product p = {};
    p.m = m, p.n = n, p.k = k, p.batches = 1, p.unit = p.last_unit = unit, p.piece = in_pieces ? 128 : 0;
    p.a = lp_matrix{k, 1, nullptr, nullptr, nullptr, 0, 0, is_integer ? LP_I8 : LP_BF16, 0};
    p.b = lp_matrix{1, k, nullptr, nullptr, nullptr, 0, 0, p.a.type, 0};
    p.out = lp_matrix{n, 1, nullptr, nullptr, nullptr, 0, 0, LP_F32, 0};
    p.c.type = p.bias.type = -1;
    lp_product plain = p;
    float *x[2], *scales[2], scale[2];
    void* rounded[2];
    bool is_good = true;
    for (int i = 0; i < 2; i++) {
        lp_quantizer& q = p.rounding[i];
        q = rule;
        q.batches = 1, q.vectors = lanes[i], q.k = k, q.type = LP_F32;
        q.vector = q.to_vector = k, q.inner = q.to_inner = 1;
        if (!i) q.block_vectors = 1;
        const int64_t across = (lanes[i] + q.block_vectors - 1) / q.block_vectors;
        q.scale_vector = 1, q.scale_inner = in_pieces ? across : 0;
        q.scale_batch = in_pieces ? across * ((k + 127) / 128) : lanes[i];
        x[i] = (float*)malloc((size_t)(lanes[i] * k) * 4), rounded[i] = malloc((size_t)(lanes[i] * k * size));
        scales[i] = (float*)malloc((size_t)q.scale_batch * 4);
        for (int64_t j = 0; j < lanes[i] * k; j++) x[i][j] = (float)(int32_t)random_bits() * 0x1p-31f;
        is_good &= lp_quantize(&q, x[i], rounded[i], rule.scaling == LP_VECTORS || in_pieces ? scales[i] : nullptr,
                               scale + i, 1) == LP_OK;
    }
    float* results[3];
    for (float*& r : results) r = (float*)malloc((size_t)(m * n) * 4);
    lp_call c = {};
    c.alpha[0] = 1, c.threads = 2, c.a = x[0], c.b = x[1];
    for (int packs = 0; packs < 2; packs++) is_good &= multiply(p, c, packs, results[packs]) == LP_OK;
    is_good &= !memcmp(results[0], results[1], (size_t)(m * n) * 4);
    c.a = rounded[0], c.b = rounded[1], c.alpha[0] = (double)scale[0] * scale[1];
    if (rule.scaling == LP_VECTORS) c.row_scales = scales[0], c.col_scales = scales[1];
    if (!in_pieces)
        is_good &=
            multiply(plain, c, false, results[2]) == LP_OK && !memcmp(results[0], results[2], (size_t)(m * n) * 4);
    for (int64_t i = 0; i < m * n; i++) is_good &= isfinite(results[0][i]) != 0;
    good += is_good, bad += !is_good;
    if (!is_good)
        fprintf(stderr, "rounded product: unit %d, elements %d, scaling %d, %d x %d x %d\n", unit, rule.elements,
                rule.scaling, (int)m, (int)n, (int)k);
    for (int i = 0; i < 2; i++) free(x[i]), free(rounded[i]), free(scales[i]);
    for (float* r : results) free(r);
}

void check_rounded_products() {
    const int rules[][4] = {  // elements, scaling, block
                            {LP_NARROW_E4M3, LP_TENSOR, 1, 1},        {LP_NARROW_E5M2, LP_VECTORS, 1, 1},
                            {LP_NARROW_I8, LP_VECTORS, 1, 1},         {LP_NARROW_E2M1, LP_FLOOR, 1, 32},
                            {LP_NARROW_E2M1, LP_E4M3_SCALES, 16, 16}, {LP_NARROW_E4M3, LP_F32_SCALES, 128, 128}};
    const int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {1, 70, 300}, {20, 33, 65}, {65, 130, 257}};
    const int units[] = {LP_FP32_AVX2, LP_FP32_AVX512, LP_BF16_AVX512, LP_BF16_AMX, LP_FP32_NEON, LP_BF16_NEON};
    const int integers[] = {LP_INT8_AVX2, LP_INT8_AVXVNNI, LP_INT8_AVX512, LP_INT8_AMX, LP_INT8_NEON};
    for (auto& rule : rules) {
        lp_quantizer q = {};
        q.elements = rule[0], q.scaling = rule[1], q.block_vectors = rule[2], q.block_k = rule[3];
        auto check = [&](int unit) {
            for (auto& s : shapes)
                if (lp_units() >> unit & 1) check_rounded_product(unit, q, s[0], s[1], s[2]);
        };
        if (q.elements == LP_NARROW_I8)
            for (int unit : integers) check(unit);
        else
            for (int unit : units) check(unit);
    }
}
