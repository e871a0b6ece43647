// The templates of a unit, in the order in which they use each other; included once per file of an instruction set.
#include "vec.hpp"
#include "pack.hpp"
#include "epilogue.hpp"
#include "gemm.hpp"
#include "few.hpp"
#include "small.hpp"
