// Gradients divided by a loss scale, and whether one of them was Inf or NaN: all arrays of an element type in one pass.
//
// Macros: ELEMENT, an element type of elements.cuh; CHUNK, the elements of a block at a time.

// Elements without gaps, and how many chunks the runs before this one have.
struct Run { const ELEMENT* source; ELEMENT* target; long long length, first; };
struct Table { long long runs, chunks; Run run[1]; };

extern "C" __global__ void unscale(const Table* table, long long* found, double inverse)
{
    typedef Arithmetic<ELEMENT>::type Wide;
    bool beyond = false;
    for (long long chunk = blockIdx.x; chunk < table->chunks; chunk += gridDim.x) {
        // The last run that does not begin after this chunk.
        long long low = 0, high = table->runs;
        while (high - low > 1) {
            long long middle = (low + high) / 2;
            if (table->run[middle].first <= chunk) low = middle; else high = middle;
        }
        const Run& run = table->run[low];
        const ELEMENT* source = run.source;
        ELEMENT* target = run.target;
        long long begin = (chunk - run.first) * CHUNK;
        long long end = begin + CHUNK < run.length ? begin + CHUNK : run.length;
        for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) {
            Wide x = widen(source[i]);
            if (!(x - x == 0)) beyond = true;
            round_to(target[i], x * (Wide)inverse);
        }
    }
    // Whoever writes it writes the same.
    if (beyond) *found = 1;
}
