// lp_attend against sums in double, and with the same bits by each FP32 unit; included by check.cpp.

// The result of a query in double, and the sum of the magnitudes of its terms, for the error.
void attend_in_double(const lp_attention& x, int64_t head, int64_t query, int64_t keys, double* result, double& size) {
    const int64_t end = x.is_causal && query + 1 < keys ? query + 1 : keys;
    double largest = -INFINITY, sum = 0, *scores = (double*)malloc((size_t)end * sizeof(double));
    const float* const q = (const float*)x.q.at + head * x.q.head + query * x.q.token;
    const int64_t of_keys = head / x.groups;
    for (int64_t i = 0; i < end; i++) {
        scores[i] = x.mask.at ? ((const float*)x.mask.at)[query * x.mask.token + i] : 0;
        const float* const k = (const float*)x.k.at + of_keys * x.k.head + i * x.k.token;
        for (int64_t d = 0; d < x.width; d++) scores[i] += (double)x.scale * q[d] * k[d];
        largest = fmax(largest, scores[i]);
    }
    for (int64_t d = 0; d < x.width; d++) result[d] = 0;
    size = 0;
    for (int64_t i = 0; i < end && largest > -INFINITY; i++) {
        const double weight = exp(scores[i] - largest);
        const float* const v = (const float*)x.v.at + of_keys * x.v.head + i * x.v.token;
        sum += weight;
        for (int64_t d = 0; d < x.width; d++) {
            result[d] += weight * v[d * x.v.column];
            size = fmax(size, fabs(v[d * x.v.column]));
        }
    }
    for (int64_t d = 0; d < x.width && sum; d++) result[d] /= sum;
    free(scores);
}

// Attention of 4 heads, pairs of which share their keys; the 6th key and all of the 2nd query are masked.
void check_attention(int64_t queries, int64_t keys, int64_t width, bool is_masked) {
    const int64_t heads = 4, groups = 2,
                  sizes[] = {heads * queries * width, keys * width * 2, keys * width * 2, queries * keys,
                             heads * queries * width, queries * heads,  queries * heads};
    float *numbers[7], *first = nullptr;
    const int64_t first_blocks[] = {0, 1, 2};
    const int64_t ranges[] = {0, 0, (queries + 1) / 2, 0, keys, 0, (queries + 1) / 2, queries, 0, keys};
    for (int i = 0; i < 7; i++) {
        numbers[i] = (float*)malloc((size_t)sizes[i] * sizeof(float));
        for (int64_t j = 0; j < sizes[i]; j++) numbers[i][j] = (float)((int)below(2001) - 1000) / 500;
    }
    for (int64_t i = 0; i < queries; i++)
        for (int64_t j = 0; j < keys; j++)
            if ((j == 5 && keys > 6) || i == 1) numbers[3][i * keys + j] = -INFINITY;
    lp_attention x = {};
    x.q = {numbers[0], 0, queries * width, width, 1};
    x.k = {numbers[1], 0, width, 2 * width, 1};
    x.v = {numbers[2], 0, 1, 2 * width, 2};
    x.mask = {is_masked ? numbers[3] : nullptr, 0, 0, keys, 1};
    x.out = {numbers[4], 0, width, heads * width, 1};
    x.largest = numbers[5];
    x.sums = numbers[6];
    x.ranges = ranges;
    x.first_blocks = first_blocks;
    x.tasks = queries > 1 ? 2 : 1;
    x.heads = heads / groups;
    x.groups = groups;
    x.queries = queries;
    x.width = width;
    x.chunk = 48;
    x.scale = 0.5f;
    x.is_causal = !is_masked;
    // Scores have errors of (width + 3) units of their terms, up to 4; a weight changes by twice that.
    const double bound = (8 * x.scale * (double)((width + 3) * width) + (double)keys + 16) * 0x1p-24;
    double* exact = (double*)malloc((size_t)width * sizeof(double));
    for (int unit = 0; unit < LP_UNITS; unit++) {
        if (!(lp_units() >> unit & 1) || strcmp(class_of(unit), "fp32")) continue;
        lp_use_units(1 << unit);
        x.product = {};
        x.product.unit = unit;
        x.product.c.type = x.product.bias.type = -1;
        x.threads = 1 + unit % 2;
        bool is_good = lp_attend(&x) == LP_OK;
        lp_use_units(~0ll);
        const float* const found = numbers[4];
        for (int64_t i = 0; i < heads * queries; i++) {
            double size;
            attend_in_double(x, i % heads, i / heads, keys, exact, size);
            for (int64_t d = 0; d < width; d++) is_good &= fabs(found[i * width + d] - exact[d]) <= size * bound;
        }
        if (first) is_good &= !memcmp(first, found, (size_t)sizes[4] * sizeof(float));
        else first = (float*)memcpy(malloc((size_t)sizes[4] * sizeof(float)), found, (size_t)sizes[4] * sizeof(float));
        good += is_good;
        bad += !is_good;
        if (!is_good) fprintf(stderr, "lp_attend: unit %d, %d x %d x %d\n", unit, (int)queries, (int)keys, (int)width);
    }
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < sizes[4]; i++) {
        uint32_t word;
        memcpy(&word, first + i, sizeof word);
        hash = (hash ^ word) * 0x100000001b3u;
    }
    printf("fp32 attention_%dx%dx%d_%d %016llx\n", (int)queries, (int)keys, (int)width, is_masked,
           (unsigned long long)hash);
    for (float* each : numbers) free(each);
    free(first);
    free(exact);
}

void check_attention() {
    const int64_t queries[] = {1, 2, 21}, keys[] = {1, 16, 47, 49, 200}, widths[] = {1, 8, 40};
    state = 1;
    for (int64_t m : queries)
        for (int64_t n : keys)
            for (int64_t width : widths)
                for (int is_masked = 0; is_masked < 2; is_masked++) check_attention(m, n, width, is_masked);
}
