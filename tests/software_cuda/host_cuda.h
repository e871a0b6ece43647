// CUDA C++ on the host: enough of the language for kernels that are compiled for one architecture of a GPU.
//
// Threads of a block run one after the other from barrier to barrier, each on a stack of its own, where the kernel has
// barriers, and as plain calls where it has none. Every load and store is checked by the compiler's instrumentation
// against the allocations of the device and against the alignment of its type.

// Of C alone: C++'s headers take the compiler longer than a kernel does.
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

extern "C" {
float tanhf(float);
double tanh(double);
float fminf(float, float);
float fmaf(float, float, float);

// The linker's: where the compiled kernel lies in memory. Its static variables are the kernels' shared memory.
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
}

#define __global__ __attribute__((used))
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __fmaf_rn fmaf
#define __syncthreads() host_cuda::barrier()

struct uint3_host { unsigned int x, y, z; };
static uint3_host threadIdx, blockIdx, blockDim, gridDim;

// Time that goes by at once for those who wait for it.
static long long clock_now;
inline long long clock64() { return clock_now += 1LL << 40; }

namespace host_cuda {

#define HOST_CUDA_UNCHECKED __attribute__((no_sanitize("kernel-address", "alignment"), noinline))

// What Python tells before a launch: first address, one after the last, and whether it is allocated on this device.
struct Range { uint64_t first, end, alive; };

static const Range* ranges;
static int64_t range_count;
static const Range* recent;
static char fault_text[256];

static jmp_buf fault_exit;
static ucontext_t scheduler;
static bool in_fibre;
static bool faulted;

constexpr size_t stack_bytes = 64 << 10;
static unsigned int fibres;
static char* stacks;
static ucontext_t* contexts;
static bool* finished;
static unsigned int current;

[[noreturn]] HOST_CUDA_UNCHECKED static void fault(const char* what, uint64_t address, uint64_t size)
{
    snprintf(fault_text, sizeof fault_text, "%s of %llu bytes at %#llx, thread (%u, %u, %u) of block (%u, %u, %u)", what,
             (unsigned long long)size, (unsigned long long)address, threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x,
             blockIdx.y, blockIdx.z);
    faulted = true;
    if (in_fibre) {
        setcontext(&scheduler);
        abort();
    }
    longjmp(fault_exit, 1);
}

HOST_CUDA_UNCHECKED static bool is_own(uint64_t address)
{
    if (address >= (uint64_t)__ehdr_start && address < (uint64_t)_end) return true;
    if (in_fibre) return address >= (uint64_t)stacks && address < (uint64_t)stacks + fibres * stack_bytes;
    char here;
    uint64_t stack = (uint64_t)&here;
    return address >= stack - (1 << 16) && address < stack + (1 << 20);
}

HOST_CUDA_UNCHECKED static void check(const char* what, uint64_t address, uint64_t size)
{
    if (recent && address >= recent->first && address + size <= recent->end) return;
    int64_t low = 0, high = range_count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (ranges[middle].end <= address) low = middle + 1; else high = middle;
    }
    if (low < range_count && address >= ranges[low].first && address + size <= ranges[low].end && ranges[low].alive) {
        recent = ranges + low;
        return;
    }
    bool freed = low < range_count && address >= ranges[low].first && address < ranges[low].end;
    if (freed || !is_own(address)) fault(what, address, size);
}

// -- threads --------------------------------------------------------------------------------------

HOST_CUDA_UNCHECKED static void place(unsigned int number)
{
    current = number;
    threadIdx.x = number % blockDim.x;
    threadIdx.y = number / blockDim.x % blockDim.y;
    threadIdx.z = number / blockDim.x / blockDim.y;
}

HOST_CUDA_UNCHECKED static void barrier()
{
    unsigned int me = current;
    swapcontext(&contexts[me], &scheduler);
}

struct Body {
    void (*call)(void**);
    void** arguments;
};
static Body body;

HOST_CUDA_UNCHECKED static void run_fibre()
{
    body.call(body.arguments);
    finished[current] = true;
    setcontext(&scheduler);
}

HOST_CUDA_UNCHECKED static void prepare_fibres(unsigned int count)
{
    if (count <= fibres) return;
    free(stacks), free(contexts), free(finished);
    stacks = (char*)malloc(count * stack_bytes);
    contexts = (ucontext_t*)malloc(count * sizeof(ucontext_t));
    finished = (bool*)malloc(count);
    fibres = count;
}

HOST_CUDA_UNCHECKED static void run_block_of_fibres(unsigned int count)
{
    prepare_fibres(count);
    for (unsigned int i = 0; i < count; ++i) {
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks + i * stack_bytes;
        contexts[i].uc_stack.ss_size = stack_bytes;
        contexts[i].uc_link = nullptr;
        makecontext(&contexts[i], run_fibre, 0);
        finished[i] = false;
    }
    in_fibre = true;
    // From barrier to barrier; every second round backwards, as no order is promised.
    volatile unsigned int round = 0, left = count;
    for (; left && !faulted; ++round) {
        left = 0;
        for (volatile unsigned int i = 0; i < count && !faulted; ++i) {
            unsigned int number = round % 2 ? count - 1 - i : i;
            if (finished[number]) continue;
            place(number);
            swapcontext(&scheduler, &contexts[number]);
            if (!finished[number]) left = left + 1;
        }
    }
    in_fibre = false;
}

HOST_CUDA_UNCHECKED static void run_block(unsigned int count)
{
    for (unsigned int i = 0; i < count; ++i) {
        place(count - 1 - i);
        body.call(body.arguments);
    }
}

// -- launching ------------------------------------------------------------------------------------

template <class T> struct Argument {
    typedef T Value;
    static constexpr char letter = sizeof(T) == 8 ? 'l' : 'i';
};
template <class T> struct Argument<const T> : Argument<T> {};
template <class T> struct Argument<T*> {
    typedef T* Value;
    static constexpr char letter = 'p';
};
template <> struct Argument<float> {
    typedef float Value;
    static constexpr char letter = 'f';
};
template <> struct Argument<double> {
    typedef double Value;
    static constexpr char letter = 'd';
};

template <size_t...> struct Indices {};

template <auto Function> struct Kernel;

template <class... Arguments, void (*Function)(Arguments...)> struct Kernel<Function> {
    static constexpr int count = sizeof...(Arguments);
    static_assert(count <= 64, "more arguments than there is room for");

    static const char* letters()
    {
        static const char found[] = {Argument<Arguments>::letter..., '\0'};
        return found;
    }

    template <size_t... Index> static void call_with(void** values, Indices<Index...>)
    {
        Function(*(typename Argument<Arguments>::Value*)values[Index]...);
    }

    static void call(void** values) { call_with(values, Indices<__integer_pack(sizeof...(Arguments))...>()); }
};

constexpr int most_arguments = 64;

HOST_CUDA_UNCHECKED static const char* launch(
    void (*call)(void**), int arguments, void** values, const unsigned int* extents, bool barriers)
{
    // Copied to where the kernel may read them.
    static uint64_t copies[most_arguments];
    static void* pointers[most_arguments];
    for (int i = 0; i < arguments; ++i) {
        memcpy(&copies[i], values[i], 8);
        pointers[i] = &copies[i];
    }
    body = {call, pointers};
    gridDim = {extents[0], extents[1], extents[2]};
    blockDim = {extents[3], extents[4], extents[5]};
    static unsigned int count;
    count = blockDim.x * blockDim.y * blockDim.z;
    faulted = false;
    recent = nullptr;
    if (setjmp(fault_exit)) return fault_text;
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
                if (barriers) run_block_of_fibres(count); else run_block(count);
                if (faulted) return fault_text;
            }
    return nullptr;
}

}  // namespace host_cuda

template <class T> static inline T atomicMax(T* address, T value)
{
    T before = *address;
    if (value > before) *address = value;
    return before;
}

template <class T> static inline T atomicAdd(T* address, T value)
{
    T before = *address;
    *address = before + value;
    return before;
}

// -- what the compiler's instrumentation calls ------------------------------------------------------

extern "C" {
#define HOST_CUDA_CHECKS(size)                                                                                        \
    HOST_CUDA_UNCHECKED void __asan_load##size##_noabort(uint64_t at) { host_cuda::check("illegal read", at, size); }      \
    HOST_CUDA_UNCHECKED void __asan_store##size##_noabort(uint64_t at) { host_cuda::check("illegal write", at, size); }
HOST_CUDA_CHECKS(1)
HOST_CUDA_CHECKS(2)
HOST_CUDA_CHECKS(4)
HOST_CUDA_CHECKS(8)
HOST_CUDA_CHECKS(16)
HOST_CUDA_UNCHECKED void __asan_loadN_noabort(uint64_t at, size_t size) { host_cuda::check("illegal read", at, size); }
HOST_CUDA_UNCHECKED void __asan_storeN_noabort(uint64_t at, size_t size) { host_cuda::check("illegal write", at, size); }
HOST_CUDA_UNCHECKED void __asan_handle_no_return() {}
HOST_CUDA_UNCHECKED void __ubsan_handle_type_mismatch_v1_abort(void*, uint64_t address)
{
    host_cuda::fault("misaligned access", address, 0);
}
HOST_CUDA_UNCHECKED void __ubsan_handle_type_mismatch_v1(void*, uint64_t address)
{
    host_cuda::fault("misaligned access", address, 0);
}

HOST_CUDA_UNCHECKED void host_cuda_ranges(const host_cuda::Range* ranges, int64_t count)
{
    host_cuda::ranges = ranges;
    host_cuda::range_count = count;
}
}
