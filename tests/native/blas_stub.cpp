// The functions of a BLAS that blas_program.cpp calls, for systems without one. Those that lowprec takes only end the
// program, so a program that succeeds has called none of them.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define STUB(name)                     \
    void name() {                      \
        puts("a stub called: " #name); \
        exit(2);                       \
    }
#define ROUTINE(name)  \
    STUB(cblas_##name) \
    STUB(name##_)
#define ROUTINES(letter)   \
    ROUTINE(letter##gemm)  \
    ROUTINE(letter##gemv)  \
    ROUTINE(letter##symm)  \
    ROUTINE(letter##syrk)  \
    ROUTINE(letter##gemmt) \
    ROUTINE(letter##trmm)
#define HERMITIAN(letter)      \
    STUB(cblas_##letter##hemm) \
    STUB(cblas_##letter##herk) \
    STUB(cblas_##letter##hemv)

extern "C" {
ROUTINES(s)
ROUTINES(d)
ROUTINES(c)
ROUTINES(z)
HERMITIAN(c)
HERMITIAN(z)
STUB(cblas_ssymv)

float cblas_sdot(int32_t n, const float* x, int32_t step_x, const float* y, int32_t step_y) {
    float sum = 0;
    for (int32_t i = 0; i < n; i++) sum += x[i * step_x] * y[i * step_y];
    return sum;
}
const char* openblas_get_config(void) { return "none"; }
}
