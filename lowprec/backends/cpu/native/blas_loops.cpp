// The inner loops of NumPy's products, on Linux, which are set in its functions: products of float16 are computed, and
// calls of loops that do not reach the BLAS are counted.
#include "blas_product.hpp"
#if defined(__linux__)

namespace lp::blas {
namespace {

typedef void Loop(char** arrays, const intptr_t* sizes, const intptr_t* steps, void* data);
struct Replaced {
    Loop* original;
    int routine;
    char letter;
};
const int LOOPS = 96;
Replaced loops[LOOPS];

bool multiplies_half(char* const* arrays, const intptr_t* sizes, const intptr_t* steps, const void* caller) {
    const auto in_elements = [&](int i) { return (int64_t)(steps[i] / (intptr_t)sizeof(uint16_t)); };
    Product p = {GEMM, sizes[1], sizes[3], sizes[2], {}, {}, {}, {{1, 0}}, {{0, 0}}, nullptr, 1};
    Matrix* const matrices[] = {&p.a, &p.b, &p.out};
    for (int i = 0; i < 3; i++)
        *matrices[i] = {arrays[i], in_elements(2 * i + 3), in_elements(2 * i + 4), false, false, WHOLE, GENERAL};
    return takes<uint16_t>(p, caller);
}

template <int SLOT> void loop(char** arrays, const intptr_t* sizes, const intptr_t* steps, void* data) {
    const Replaced& x = loops[SLOT];
    const void* const caller = __builtin_return_address(0);
    if (x.letter == Type<uint16_t>::LETTER && x.routine == MATMUL) {
        char* each[] = {arrays[0], arrays[1], arrays[2]};
        const intptr_t one[] = {1, sizes[1], sizes[2], sizes[3]};
        for (intptr_t i = 0; i < sizes[0]; i++) {
            if (!multiplies_half(each, one, steps, caller)) x.original(each, one, steps, data);
            for (int array = 0; array < 3; array++) each[array] += steps[array];
        }
        return;
    }
    has_arrived = false;
    x.original(arrays, sizes, steps, data);
    if (has_arrived || passes_all()) return;
    int64_t multiplications = sizes[0] * sizes[1];
    if (x.routine != VECDOT) multiplications *= sizes[2];
    if (x.routine == MATMUL) multiplications *= sizes[3];
    if (!multiplications) return;
    count(scope_of_thread(), {x.letter, x.routine, 0, 0, 0, multiplications, caller}, OWN_LOOP, -1);
}
template <int... SLOT> Loop* loop_of(int slot, std::integer_sequence<int, SLOT...>) {
    static Loop* const all[] = {loop<SLOT>...};
    return all[slot];
}

}  // namespace
}  // namespace lp::blas

using namespace lp::blas;

// The caller has the interpreter's lock, without which NumPy begins no loop: the original one is known before a call.
LP_API int32_t lp_blas_set_loop(int32_t slot, void* function, const char* name, char letter, int32_t number,
                                void* replace, int32_t is_on) {
    typedef int Replace(void* function, Loop* loop, const int* types, Loop** before);
    if (slot >= LOOPS) return LP_UNSUPPORTED;
    Replaced& x = loops[slot];
    const int types[] = {number, number, number};
    if (!is_on) return x.original ? ((Replace*)replace)(function, x.original, types, nullptr) : LP_OK;
    int routine = MATMUL;
    while (routine < FIRST_OF_LAPACK && strcmp(name, name_of(routine))) routine++;
    x.routine = routine;
    x.letter = letter;
    Loop* const ours = loop_of(slot, std::make_integer_sequence<int, LOOPS>());
    Loop* before = nullptr;
    const int status = ((Replace*)replace)(function, ours, types, &before);
    if (before && before != ours) x.original = before;
    return status;
}
#endif
