// lp_attend: a task has the queries of a block, of all heads that share their keys. It goes through the keys in chunks:
// scores, their softmax relative to the largest score so far, and the products with the values, which are added to the
// result times the factor by which a larger score changed the weights before. A task of gradients has all blocks of an
// image and a head of keys, one after the other, because each adds to the gradients of keys and values.
//
// Chunks begin at the first key of the block and have one length, and a later key that is masked changes no bit: weights
// of zero, and a factor of one.
#include "kernel.hpp"
#include "lanewise.hpp"

namespace {

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T = float> T* matrix_at(const lp_heads& x, int64_t image, int64_t head, int64_t token) {
    return (T*)x.at + image * x.image + head * x.head + token * x.token;
}

// A range of lp_attention, and the head of its keys.
struct Block {
    int64_t image, first_query, end_query, first_key, end_key, head;
};

struct Chunk {
    int64_t first, keys;
};

// An operand or a result of a product; offsets are those of lp_matrix.
struct Matrix {
    float* at;
    int64_t row, col;
    const int64_t *row_offsets = nullptr, *inner_offsets = nullptr;
};

// The rows of a block: those of a head of queries after those of the last one.
struct Rows {
    const lp_attention& x;
    Block block;
    int32_t threads;  // of each product
    int64_t queries = block.end_query - block.first_query, count = x.groups * queries, pitch = x.chunk + 16;
    float *scores, *weighted, *largest, *sums, *gradients;  // those of the scores
    int64_t *of_queries, *of_results;  // offsets

    bool begin(lp::Memory& memory) {
        const int64_t scores_each = x.of_q.at ? 2 * pitch : pitch;
        const int64_t bytes = (int64_t)sizeof(float) * (scores_each + x.width + 2) + 2 * (int64_t)sizeof(int64_t);
        scores = (float*)memory.of(count * bytes);
        if (!scores) return false;
        gradients = scores + count * (scores_each - pitch);
        of_queries = (int64_t*)(scores + count * scores_each);
        of_results = of_queries + count;
        weighted = (float*)(of_results + count);
        largest = weighted + count * x.width;
        sums = largest + count;
        for (int64_t i = 0; i < count; i++) {
            largest[i] = -__builtin_inff();
            sums[i] = 0;
            of_queries[i] = i / queries * x.q.head + i % queries * x.q.token;
            of_results[i] = i / queries * x.out.head + i % queries * x.out.token;
        }
        return true;
    }
    int64_t head(int64_t row) const { return block.head * x.groups + row / queries; }
    int64_t query(int64_t row) const { return block.first_query + row % queries; }
    int64_t sum_at(int64_t row) const {
        return (block.image * x.queries + query(row)) * x.heads * x.groups + head(row);
    }
    float* first_row(const lp_heads& of) const {
        return matrix_at(of, block.image, block.head * x.groups, block.first_query);
    }
    float* keys_at(const lp_heads& of, int64_t first) const { return matrix_at(of, block.image, block.head, first); }
};

lp_matrix described(const Matrix& x) {
    lp_matrix to = {};
    to.row = x.row;
    to.col = x.col;
    to.row_offsets = x.row_offsets;
    to.inner_offsets = x.inner_offsets;
    return to;
}

// out = alpha * a @ b, or its sum with the former `out`. `inner` is the number of columns of a.
struct Product {
    int64_t m, n, inner;
    Matrix a, b, out;
    bool adds = false;
    float alpha = 1;
};
int32_t multiply(const Rows& rows, const Product& given) {
    lp_product p = rows.x.product;
    lp_call c = {};
    p.m = given.m;
    p.n = given.n;
    p.k = given.inner;
    p.batches = 1;
    p.a = described(given.a);
    p.b = described(given.b);
    p.out = described(given.out);
    c.a = given.a.at;
    c.b = given.b.at;
    c.out = given.out.at;
    c.alpha[0] = given.alpha;
    c.threads = rows.threads;
    if (given.adds) {
        p.c = p.out;
        c.c = c.out;
        c.beta[0] = 1;
    }
    return lp::gemm(p, c);
}

int32_t multiply_keys(const Rows& rows, const Chunk& chunk) {
    const lp_attention& x = rows.x;
    return multiply(rows,
                    {rows.count,
                     chunk.keys,
                     x.width,
                     {rows.first_row(x.q), 0, x.q.column, rows.of_queries},
                     {rows.keys_at(x.k, chunk.first), x.k.column, x.k.token},
                     {rows.scores, rows.pitch, 1}});
}

// Makes weights of scores, and multiplies the results of the chunks before by their factors. For gradients the factor
// is one.
void weigh_rows(const Rows& rows, const Chunk& chunk, const lp::Lanewise& functions) {
    const lp_attention& x = rows.x;
    for (int64_t i = 0; i < rows.count; i++) {
        const int64_t query = rows.query(i);
        float *const scores = rows.scores + i * rows.pitch, *const gradients = rows.gradients + i * rows.pitch;
        int64_t open = chunk.keys;
        if (x.is_causal) open = query < chunk.first ? 0 : least(open, query + 1 - chunk.first);
        const float* mask = nullptr;
        if (x.mask.at) mask = matrix_at<const float>(x.mask, rows.block.image, rows.head(i), query) + chunk.first;
        const lp::ScoreRow row = {scores, mask, open, x.scale, rows.largest + i, rows.sums + i};
        float factor = 1;
        if (x.of_q.at) functions.differentiate(row, gradients, x.largest[rows.sum_at(i)], x.sums[rows.sum_at(i)]);
        else factor = functions.weigh(row);
        for (int64_t j = open; j < chunk.keys; j++) scores[j] = gradients[j] = 0;
        float* const weighted = rows.weighted + i * x.width;
        if (factor != 1 && chunk.first > rows.block.first_key)
            for (int64_t j = 0; j < x.width; j++) weighted[j] *= factor;
    }
}

// The product of weights, or of gradients of scores, with values or keys is added to those of the chunks before.
int32_t add_chunk(const Rows& rows, const Chunk& chunk, float* weights, const lp_heads& values) {
    return multiply(rows,
                    {rows.count,
                     rows.x.width,
                     chunk.keys,
                     {weights, rows.pitch, 1},
                     {rows.keys_at(values, chunk.first), values.token, values.column},
                     {rows.weighted, rows.x.width, 1},
                     chunk.first > rows.block.first_key});
}

void store_row(const Rows& rows, const lp_heads& to, int64_t row, float factor) {
    float* const at = matrix_at(to, rows.block.image, rows.head(row), rows.query(row));
    for (int64_t j = 0; j < rows.x.width; j++) at[j * to.column] = rows.weighted[row * rows.x.width + j] * factor;
}

int32_t attend(Rows& rows, lp::Memory& memory, const lp::Lanewise& functions) {
    const lp_attention& x = rows.x;
    if (!rows.begin(memory)) return LP_NO_MEMORY;
    for (int64_t first = rows.block.first_key; first < rows.block.end_key; first += x.chunk) {
        const Chunk chunk = {first, least(x.chunk, rows.block.end_key - first)};
        int32_t status = multiply_keys(rows, chunk);
        if (status) return status;
        weigh_rows(rows, chunk, functions);
        status = add_chunk(rows, chunk, rows.scores, x.v);
        if (status) return status;
    }
    for (int64_t i = 0; i < rows.count; i++) {
        const bool is_empty = x.mask.at && rows.sums[i] == 0;  // a query without keys: its result is zero
        store_row(rows, x.out, i, is_empty ? 0 : 1 / rows.sums[i]);
        x.largest[rows.sum_at(i)] = rows.largest[i];
        x.sums[rows.sum_at(i)] = rows.sums[i];
    }
    return LP_OK;
}

// Adds the products of the transposed scores with rows of queries, or of results, to the gradient of keys, or of values.
int32_t add_to_keys(const Rows& rows, const Chunk& chunk, float* scores, const lp_heads& other, const int64_t* offsets,
                    const lp_heads& to, float alpha) {
    return multiply(rows,
                    {chunk.keys,
                     rows.x.width,
                     rows.count,
                     {scores, 1, rows.pitch},
                     {rows.first_row(other), 0, other.column, nullptr, offsets},
                     {rows.keys_at(to, chunk.first), to.token, to.column},
                     true,
                     alpha});
}

int32_t differentiate(Rows& rows, lp::Memory& memory, const lp::Lanewise& functions) {
    const lp_attention& x = rows.x;
    if (!rows.begin(memory)) return LP_NO_MEMORY;
    for (int64_t first = rows.block.first_key; first < rows.block.end_key; first += x.chunk) {
        const Chunk chunk = {first, least(x.chunk, rows.block.end_key - first)};
        int32_t status = multiply_keys(rows, chunk);
        if (status) return status;
        status = multiply(rows,
                          {rows.count,
                           chunk.keys,
                           x.width,
                           {rows.first_row(x.out), 0, x.out.column, rows.of_results},
                           {rows.keys_at(x.v, first), x.v.column, x.v.token},
                           {rows.gradients, rows.pitch, 1}});
        if (status) return status;
        weigh_rows(rows, chunk, functions);
        status = add_to_keys(rows, chunk, rows.scores, x.out, rows.of_results, x.of_v, 1);
        if (status) return status;
        status = add_to_keys(rows, chunk, rows.gradients, x.q, rows.of_queries, x.of_k, x.scale);
        if (status) return status;
        status = add_chunk(rows, chunk, rows.gradients, x.k);
        if (status) return status;
    }
    for (int64_t i = 0; i < rows.count; i++) store_row(rows, x.of_q, i, x.scale);
    return LP_OK;
}

}  // namespace

LP_API int32_t lp_attend(const lp_attention* x) {
    const lp::Arithmetic standard;
    const lp::Lanewise* functions = lp::lanewise();
    if (!functions) return LP_UNSUPPORTED;
    std::atomic<int32_t> status{LP_OK};
    const int64_t tasks = x->tasks * x->heads;
    const int32_t inner = tasks < x->threads ? x->threads : 1;  // few tasks share each product among threads
    const auto compute = x->of_q.at ? differentiate : attend;
    auto task = [&, memory = lp::Memory()](int64_t i) mutable {
        const int64_t number = x->tasks - 1 - i / x->heads;  // the last blocks have the most keys
        for (int64_t block = x->first_blocks[number]; block < x->first_blocks[number + 1]; block++) {
            const int64_t* const range = x->ranges + 5 * block;
            Rows rows = {*x, {range[0], range[1], range[2], range[3], range[4], i % x->heads}, inner};
            if (const int32_t found = compute(rows, memory, *functions)) status = found;
        }
    };
    lp::share(tasks, inner > 1 ? 1 : x->threads, task);
    return status;
}
