// What lanewise.cpp calls in the file of an instruction set: functions in which a vector's lane is an element.
#pragma once
#include "common.hpp"

namespace lp {

struct Emulation {  // the arguments of lp_emulate
    const float *a, *b;
    float* c;
    int64_t m, n, k;
    lp_tensor_core core;
};

// A block of the result has a vector's columns; EMULATED_K elements of k, whole groups, are decomposed at once.
const int EMULATED_ROWS = 32, EMULATED_K = 128;

struct Lanewise {
    int lanes;
    void (*emulate)(const Emulation&, int64_t row, int64_t column);  // a block of the result
    bool (*unscale)(const lp_flat&, int64_t first, int64_t count, double inverse);  // whether any has Inf or NaN
};

}  // namespace lp
