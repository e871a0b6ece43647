// Observation of the products of a scope, for the comparison of two runs: the error against the BLAS's own product of
// the same operands, and a sketch of the result.
#pragma once
#include <algorithm>

#include "blas_product.hpp"
#include "observing.hpp"

namespace lp::blas {

// A call of a routine. `begins` is called before it, and `record` after it and, of compared products, after the BLAS
// has computed the product again, in other memory.
class Observation {
    Observer* observer = nullptr;
    lp::Memory memory;
    const char* lowest;  // byte of the result
    int64_t bytes;       // from there to its end
    char* again = nullptr;

public:
    // Whether the product of the calling thread is observed; keeps the former result if the product adds to it.
    bool begins(const Product& p, int64_t element_size, const void* caller);
    // Whether the BLAS is to compute it again: it was computed in another mode than the reference, and there is memory.
    bool is_compared(const Product& p);
    // The address for the other result, of the address for the result that the program passed.
    void* other(const void* of_program) const { return again + ((const char*)of_program - lowest); }
    template <class T> void record(const Product& p, const void* caller);
};

}  // namespace lp::blas
