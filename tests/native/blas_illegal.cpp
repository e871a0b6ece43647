// A program that calls the BLAS of NumPy with one argument after the other replaced by illegal numbers, which the BLAS
// reports by its own error. It knows nothing of lowprec.
#include <stdint.h>
#include <stdio.h>

#include <tuple>
#include <type_traits>

typedef int64_t Int;
struct Complex {
    float re, im;
};
#define CBLAS(name) scipy_cblas_##name##64_
#define FORTRAN(name) scipy_##name##_64_
enum { ROWS = 101, COLUMNS, PLAIN = 111, TRANSPOSED, ADJOINT, UPPER = 121, WITH_DIAGONAL = 131, LEFT = 141, RIGHT };

extern "C" {
void CBLAS(sgemm)(int, int, int, Int, Int, Int, float, const float*, Int, const float*, Int, float, float*, Int);
void CBLAS(sgemmt)(int, int, int, int, Int, Int, float, const float*, Int, const float*, Int, float, float*, Int);
void CBLAS(sgemv)(int, int, Int, Int, float, const float*, Int, const float*, Int, float, float*, Int);
void CBLAS(ssymm)(int, int, int, Int, Int, float, const float*, Int, const float*, Int, float, float*, Int);
void CBLAS(ssyrk)(int, int, int, Int, Int, float, const float*, Int, float, float*, Int);
void CBLAS(cherk)(int, int, int, Int, Int, float, const Complex*, Int, float, Complex*, Int);
void CBLAS(strmm)(int, int, int, int, int, Int, Int, float, const float*, Int, float*, Int);
void CBLAS(ssymv)(int, int, Int, float, const float*, Int, const float*, Int, float, float*, Int);
void CBLAS(sger)(int, Int, Int, float, const float*, Int, const float*, Int, float*, Int);
void FORTRAN(sgemm)(const char*, const char*, const Int*, const Int*, const Int*, const float*, const float*,
                    const Int*, const float*, const Int*, const float*, float*, const Int*);
}

static float a[64], b[64], c[64];
static Complex z[64];

// Calls a function with its argument I as -1, 0, and, if it is an extent or a distance, 1.
template <size_t I, class... T> void spoil_one(const char* name, void (*function)(T...), std::tuple<T...> arguments) {
    typedef std::tuple_element_t<I, std::tuple<T...>> Argument;
    if constexpr (std::is_integral<Argument>::value)
        for (int number = -1; number <= (sizeof(Argument) == sizeof(Int)); number++) {
            printf("%s, argument %d: %d\n", name, (int)I, number);
            std::get<I>(arguments) = number;
            std::apply(function, arguments);
        }
}
template <class... T, size_t... I>
void spoil_each(const char* name, void (*function)(T...), std::tuple<T...> arguments, std::index_sequence<I...>) {
    (spoil_one<I>(name, function, arguments), ...);
}
template <class... T, class... Legal> void spoil(const char* name, void (*function)(T...), Legal... arguments) {
    spoil_each(name, function, std::tuple<T...>(arguments...), std::index_sequence_for<T...>());
}

int main() {
    setvbuf(stdout, nullptr, _IONBF, 0);
    spoil("gemm", CBLAS(sgemm), ROWS, PLAIN, PLAIN, 3, 3, 3, 1, a, 4, b, 4, 0, c, 4);
    spoil("gemm", CBLAS(sgemm), COLUMNS, TRANSPOSED, PLAIN, 3, 2, 4, 1, a, 4, b, 4, 0, c, 4);
    spoil("gemmt", CBLAS(sgemmt), COLUMNS, UPPER, PLAIN, PLAIN, 3, 3, 1, a, 4, b, 4, 0, c, 4);
    spoil("gemv", CBLAS(sgemv), COLUMNS, PLAIN, 3, 3, 1, a, 4, b, 1, 0, c, 1);
    spoil("symm", CBLAS(ssymm), COLUMNS, LEFT, UPPER, 3, 3, 1, a, 4, b, 4, 0, c, 4);
    spoil("symm", CBLAS(ssymm), ROWS, RIGHT, UPPER, 3, 2, 1, a, 4, b, 4, 0, c, 4);
    spoil("syrk", CBLAS(ssyrk), COLUMNS, UPPER, PLAIN, 3, 3, 1, a, 4, 0, c, 4);
    spoil("herk", CBLAS(cherk), COLUMNS, UPPER, ADJOINT, 3, 3, 1, z, 4, 0, z, 4);
    CBLAS(cherk)(COLUMNS, UPPER, TRANSPOSED, 3, 3, 1, z, 4, 0, z, 4);
    spoil("trmm", CBLAS(strmm), COLUMNS, LEFT, UPPER, PLAIN, WITH_DIAGONAL, 3, 3, 1, a, 4, c, 4);
    spoil("symv", CBLAS(ssymv), COLUMNS, UPPER, 3, 1, a, 4, b, 1, 0, c, 1);
    spoil("ger", CBLAS(sger), COLUMNS, 3, 3, 1, a, 1, b, 1, c, 4);
    const float one = 1, zero = 0;
    const Int two = 2, three = 3, minus = -1;
    FORTRAN(sgemm)("X", "N", &three, &three, &three, &one, a, &three, b, &three, &zero, c, &three);
    FORTRAN(sgemm)("N", "N", &three, &three, &three, &one, a, &two, b, &three, &zero, c, &three);
    FORTRAN(sgemm)("N", "N", &minus, &three, &three, &one, a, &three, b, &three, &zero, c, &three);
    FORTRAN(sgemm)("N", "N", &three, &three, &three, &one, a, &three, b, &three, &zero, c, &two);
}
