// Element types, and rounding between them.
//
// Every conversion is written twice: in bit arithmetic, which compiles for any device and for the host, and in the
// instructions of newer devices, which give the same bits. NaN becomes the one quiet NaN that those instructions give.
// No header is included: a machine with only the run-time compiler has no CUDA headers.

typedef unsigned char Byte;
struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };  // bfloat16

// Aligned as its parts: arrays of complex numbers need no larger alignment.
template <class T> struct Complex { T re, im; };

template <class T> struct Arithmetic { typedef float type; };
template <> struct Arithmetic<double> { typedef double type; };
template <> struct Arithmetic<Complex<double> > { typedef double type; };

template <class To, class From> __device__ inline To same_bits(From value)
{
    static_assert(sizeof(To) == sizeof(From), "bits are neither added nor lost");
    union { From from; To to; } both;
    both.from = value;
    return both.to;
}

// -- to float ------------------------------------------------------------------------------------

__device__ inline float widen(Half x)
{
#if __CUDA_ARCH__ >= 530
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
#else
    unsigned int magnitude = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
    if (magnitude < 0x400u)  // subnormal: a multiple of 2^-24
        return same_bits<float>(same_bits<unsigned int>((float)magnitude * 5.9604644775390625e-8f) | sign);
    unsigned int exponent = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;
    return same_bits<float>(((magnitude << 13) + exponent) | sign);
#endif
}

__device__ inline float widen(Brain x) { return same_bits<float>((unsigned int)x.bits << 16); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

template <class T> __device__ inline typename Arithmetic<T>::type real(T x) { return widen(x); }
template <class T> __device__ inline T real(Complex<T> x) { return x.re; }
template <class T> __device__ inline typename Arithmetic<T>::type imaginary(T) { return 0; }
template <class T> __device__ inline T imaginary(Complex<T> x) { return x.im; }

// -- rounding to nearest, ties to even -----------------------------------------------------------

__device__ inline void round_to(Half& to, float x)
{
#if __CUDA_ARCH__ >= 530
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
    unsigned int bits = same_bits<unsigned int>(x), sign = bits >> 16 & 0x8000u;
    unsigned int magnitude = bits & 0x7fffffffu, result;
    if (magnitude > 0x7f800000u) {
        result = 0x7fffu, sign = 0;
    } else if (magnitude >= 0x477ff000u) {  // 65520, the tie between the largest and what comes after it
        result = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: in a sum with 1/2 the last digit is 2^-24
        result = same_bits<unsigned int>(same_bits<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        result = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    }
    to.bits = (unsigned short)(result | sign);
#endif
}

__device__ inline void round_to(Brain& to, float x)
{
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
    unsigned int bits = same_bits<unsigned int>(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = (unsigned short)(nan ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
}

__device__ inline void round_to(float& to, float x) { to = x; }
__device__ inline void round_to(double& to, double x) { to = x; }

// -- conversion of elements ----------------------------------------------------------------------

template <class From, class To> struct Convert {
    static __device__ inline To of(From x)
    {
        To result;
        round_to(result, real(x));
        return result;
    }
};

template <class From, class Part> struct Convert<From, Complex<Part> > {
    static __device__ inline Complex<Part> of(From x)
    {
        Complex<Part> result;
        round_to(result.re, real(x));
        round_to(result.im, imaginary(x));
        return result;
    }
};

template <class T> struct Convert<T, T> {
    static __device__ inline T of(T x) { return x; }
};

template <class T> struct Convert<Complex<T>, Complex<T> > {
    static __device__ inline Complex<T> of(Complex<T> x) { return x; }
};

// A double as the float next to it on the side of zero, or the one after, whichever is odd: rounding that to a type of
// fewer digits gives what rounding the double once would.
__device__ inline float rounded_to_odd(double x)
{
    float nearest = (float)x;
    if (x - x != 0 || nearest == x) return nearest;
    unsigned int bits = same_bits<unsigned int>(nearest);
    if (x > 0 ? nearest > x : nearest < x) --bits;
    return same_bits<float>(bits | 1u);
}

template <> struct Convert<double, Half> {
    static __device__ inline Half of(double x) { return Convert<float, Half>::of(rounded_to_odd(x)); }
};

template <> struct Convert<double, Brain> {
    static __device__ inline Brain of(double x) { return Convert<float, Brain>::of(rounded_to_odd(x)); }
};

template <> struct Convert<Byte, int> {
    static __device__ inline int of(Byte x) { return (signed char)x; }
};

// -- powers of two -------------------------------------------------------------------------------

// 2^exponent, for exponents from -126 to 127.
__device__ inline float power_of_two(int exponent)
{
    return same_bits<float>((unsigned int)(exponent + 127) << 23);
}

// 2^exponent, for exponents from -1022 to 1023.
__device__ inline double power_of_two_double(int exponent)
{
    return same_bits<double>((unsigned long long)(exponent + 1023) << 52);
}

// -- elements side by side -----------------------------------------------------------------------

// So many bytes that one instruction loads or stores them.
template <int WIDTH> struct alignas(WIDTH) Chunk { unsigned int words[WIDTH / 4]; };
template <> struct Chunk<1> { Byte bits; };
template <> struct Chunk<2> { unsigned short bits; };

// Elements that one thread takes at a time. `width` is the length of the loads and stores of a whole group in bytes.
template <class T, int N> struct Group {
    static constexpr int width = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
    static constexpr int chunks = N * sizeof(T) / width;

    union { T items[N]; Chunk<width> whole[chunks]; };

    __device__ inline void load(const T* from)
    {
#pragma unroll
        for (int i = 0; i < chunks; ++i) whole[i] = reinterpret_cast<const Chunk<width>*>(from)[i];
    }

    __device__ inline void store(T* to) const
    {
#pragma unroll
        for (int i = 0; i < chunks; ++i) reinterpret_cast<Chunk<width>*>(to)[i] = whole[i];
    }

    // Elements from `first` on, `stride` apart, in a line of `length`; those beyond its end are zero.
    __device__ inline void load(const T* line, long long first, long long length, long long stride)
    {
#pragma unroll
        for (int i = 0; i < N; ++i) items[i] = first + i < length ? line[(first + i) * stride] : T();
    }

    __device__ inline void store(T* line, long long first, long long length, long long stride) const
    {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (first + i < length) line[(first + i) * stride] = items[i];
    }
};

// -- indices -------------------------------------------------------------------------------------

// Quotient and remainder of numbers that are not negative: 64-bit division costs five times that of 32 bits.
struct Split {
    long long quotient, remainder;

    __device__ inline Split(long long number, long long divisor)
    {
        if (divisor == 1) {
            quotient = number, remainder = 0;
        } else if (((unsigned long long)(number | divisor) >> 32) == 0) {
            quotient = (unsigned int)number / (unsigned int)divisor;
            remainder = (unsigned int)number - (unsigned int)quotient * (unsigned int)divisor;
        } else {
            quotient = number / divisor, remainder = number % divisor;
        }
    }
};

// Where a matrix of a stack begins, from its number: the inner two of three batch extents, and the strides of all.
__device__ inline long long batch_offset(
    long long number, long long extent1, long long extent2, long long stride0, long long stride1, long long stride2)
{
    Split inner(number, extent2), outer(inner.quotient, extent1);
    return outer.quotient * stride0 + outer.remainder * stride1 + inner.remainder * stride2;
}
