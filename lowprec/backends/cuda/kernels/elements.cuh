// Element types, and rounding between them.
//
// Every conversion is written twice: in bit arithmetic, which compiles for any device and for the host, and in the
// instructions of newer devices, which give the same bits. NaN becomes the one quiet NaN that those instructions give.
// No header is included: a machine with only the run-time compiler has no CUDA headers.

typedef unsigned char Byte;
struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };  // bfloat16
struct E4M3 { Byte bits; };
struct E5M2 { Byte bits; };  // the upper half of a Half

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

__device__ inline float widen(E5M2 x)
{
    Half longer;
    longer.bits = (unsigned short)(x.bits << 8);
    return widen(longer);
}

__device__ inline float widen(E4M3 x)
{
    if ((x.bits & 0x7fu) == 0x7fu) return same_bits<float>(0x7fc00000u | (x.bits & 0x80u) << 24);
    Half scaled;  // by 2^-8, the difference of the exponents' biases
    scaled.bits = (unsigned short)((x.bits & 0x7fu) << 7 | (x.bits & 0x80u) << 8);
    return widen(scaled) * 256.0f;
}

__device__ inline float widen(Brain x) { return same_bits<float>((unsigned int)x.bits << 16); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

template <class T> __device__ inline typename Arithmetic<T>::type real(T x) { return widen(x); }
template <class T> __device__ inline T real(Complex<T> x) { return x.re; }
template <class T> __device__ inline typename Arithmetic<T>::type imaginary(T) { return 0; }
template <class T> __device__ inline T imaginary(Complex<T> x) { return x.im; }

// -- rounding to nearest, ties to even -----------------------------------------------------------

// The bits of |x| in a type with DIGITS bits after the leading one and smallest normal number 2^LEAST, whose largest
// exponents continue without end: for the caller to limit.
template <int DIGITS, int LEAST> __device__ inline unsigned int rounded_magnitude(unsigned int magnitude)
{
    constexpr int shift = 23 - DIGITS;
    constexpr unsigned int power = (unsigned int)(LEAST + shift + 127) << 23;
    if (magnitude < (unsigned int)(LEAST + 127) << 23)  // in a sum with this power of two the last digit is the type's
        return same_bits<unsigned int>(same_bits<float>(magnitude) + same_bits<float>(power)) - power;
    unsigned int half = (1u << (shift - 1)) - 1u + (magnitude >> shift & 1u);
    return (magnitude + half - ((unsigned int)(LEAST + 126) << 23)) >> shift;
}

__device__ inline void round_to(Half& to, float x)
{
#if __CUDA_ARCH__ >= 530
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
    unsigned int bits = same_bits<unsigned int>(x), sign = bits >> 16 & 0x8000u;
    unsigned int magnitude = bits & 0x7fffffffu, result = rounded_magnitude<10, -14>(magnitude);
    if (result > 0x7c00u) result = 0x7c00u;
    if (magnitude > 0x7f800000u) result = 0x7fffu, sign = 0;
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

__device__ inline void round_to(E4M3& to, float x)
{
    unsigned int bits = same_bits<unsigned int>(x), result = rounded_magnitude<3, -6>(bits & 0x7fffffffu);
    to.bits = (Byte)((result < 0x7fu ? result : 0x7fu) | (bits >> 24 & 0x80u));  // there is no infinity
}

__device__ inline void round_to(E5M2& to, float x)
{
    unsigned int bits = same_bits<unsigned int>(x), magnitude = bits & 0x7fffffffu;
    unsigned int result = rounded_magnitude<2, -14>(magnitude);
    if (result > 0x7cu) result = 0x7cu;
    if (magnitude > 0x7f800000u) result = 0x7eu;
    to.bits = (Byte)(result | (bits >> 24 & 0x80u));
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

template <class To> struct FromDouble {
    static __device__ inline To of(double x) { return Convert<float, To>::of(rounded_to_odd(x)); }
};

template <> struct Convert<double, Half> : FromDouble<Half> {};
template <> struct Convert<double, Brain> : FromDouble<Brain> {};
template <> struct Convert<double, E4M3> : FromDouble<E4M3> {};
template <> struct Convert<double, E5M2> : FromDouble<E5M2> {};

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

// Stores in global memory. NVRTC splits an assignment of 16 bytes into words; the inline instruction stays whole.
template <int WIDTH> __device__ inline void store_chunk(Chunk<WIDTH>* to, const Chunk<WIDTH>& from) { *to = from; }

#ifdef __CUDA_ARCH__
__device__ inline void store_chunk(Chunk<16>* to, const Chunk<16>& from)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(from.words[0]), "r"(from.words[1]), "r"(from.words[2]), "r"(from.words[3]) : "memory");
}
#endif

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
        for (int i = 0; i < chunks; ++i) store_chunk(reinterpret_cast<Chunk<width>*>(to) + i, whole[i]);
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
