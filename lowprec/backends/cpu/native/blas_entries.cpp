// The functions of the BLAS that replace those of other libraries, on Linux.
//
// A routine is a list of its arguments in C, as members of Arguments. In Fortran they are addresses, options are
// letters, and there is no order. blas_words.cpp replaces the addresses of the routines in the libraries of a process.
#include "blas_observing.hpp"
#if defined(__linux__)

namespace lp::blas {
namespace {

// -- arguments of the routines -----------------------------------------------------------------------

// An option of CBLAS, whose values begin with FIRST, by its number; the letters of Fortran are in the same order.
template <int FIRST> struct Option {
    int number = 0;
};
const char* const LETTERS[] = {"RC", "NTC", "UL", "NU", "LR"};  // of options from 101, 111, 121, 131 and 141 on
enum { BY_ROWS, BY_COLUMNS };
enum { LEFT, RIGHT };
enum { PLAIN, TRANSPOSED, ADJOINT };

struct RealFactor : Factor {};

// With the names of the BLAS; increments are ldb and ldc. Members are set one by one, which takes less time than the
// instruction for all of them.
struct Arguments {
    Option<101> order = {BY_COLUMNS};
    Option<111> op_a, op_b;
    Option<121> part;
    Option<131> unit;
    Option<141> side;
    int64_t m = 0, n = 0, k = 0, lda = 0, ldb = 0, ldc = 0;
    Factor alpha = {}, beta = {};
    RealFactor real_alpha = {}, real_beta = {};
    const void *a = nullptr, *b = nullptr;
    void* c = nullptr;
};

template <auto... MEMBER> struct List {};
typedef Arguments X;
typedef List<&X::order, &X::op_a, &X::op_b, &X::m, &X::n, &X::k, &X::alpha, &X::a, &X::lda, &X::b, &X::ldb, &X::beta,
             &X::c, &X::ldc>
    Gemm;
typedef List<&X::order, &X::part, &X::op_a, &X::op_b, &X::n, &X::k, &X::alpha, &X::a, &X::lda, &X::b, &X::ldb, &X::beta,
             &X::c, &X::ldc>
    Gemmt;
typedef List<&X::order, &X::op_a, &X::m, &X::n, &X::alpha, &X::a, &X::lda, &X::b, &X::ldb, &X::beta, &X::c, &X::ldc>
    Gemv;
typedef List<&X::order, &X::side, &X::part, &X::m, &X::n, &X::alpha, &X::a, &X::lda, &X::b, &X::ldb, &X::beta, &X::c,
             &X::ldc>
    Symm;
typedef List<&X::order, &X::side, &X::part, &X::op_a, &X::unit, &X::m, &X::n, &X::alpha, &X::a, &X::lda, &X::c, &X::ldc>
    Trmm;
typedef List<&X::order, &X::part, &X::op_a, &X::n, &X::k, &X::alpha, &X::a, &X::lda, &X::beta, &X::c, &X::ldc> Syrk;
typedef List<&X::order, &X::part, &X::op_a, &X::n, &X::k, &X::real_alpha, &X::a, &X::lda, &X::real_beta, &X::c, &X::ldc>
    Herk;
typedef List<&X::order, &X::part, &X::n, &X::alpha, &X::a, &X::lda, &X::b, &X::ldb, &X::beta, &X::c, &X::ldc> Symv;
typedef List<&X::order, &X::m, &X::n, &X::alpha, &X::a, &X::lda, &X::b, &X::ldb, &X::c, &X::ldc> Ger;
typedef List<&X::n, &X::a, &X::lda, &X::b, &X::ldb> Dot;
// Routines that are counted alone; in Fortran blas_others.cpp does.
typedef List<&X::order, &X::part, &X::op_a, &X::n, &X::k, &X::alpha, &X::a, &X::lda, &X::b, &X::ldb, &X::beta, &X::c,
             &X::ldc>
    Syr2k;
typedef List<&X::order, &X::part, &X::op_a, &X::n, &X::k, &X::alpha, &X::a, &X::lda, &X::b, &X::ldb, &X::real_beta,
             &X::c, &X::ldc>
    Her2k;
typedef List<&X::order, &X::part, &X::op_a, &X::unit, &X::n, &X::a, &X::lda, &X::c, &X::ldc> Trmv;
typedef List<&X::n, &X::a, &X::lda, &X::b, &X::ldb, &X::c> DotSub;

// The type of an argument of a function, by that of the member, and its value; reading returns false if it is illegal.
template <class T, class I, bool IS_FORTRAN, class Member> struct Passed {  // an address
    typedef Member Value;
    static bool read(Value x, Member& to) { return to = x, true; }
};
template <class T, class I> struct Passed<T, I, false, int64_t> {
    typedef I Value;
    static bool read(Value x, int64_t& to) { return to = x, true; }
};
template <class T, class I> struct Passed<T, I, true, int64_t> {
    typedef const I* Value;
    static bool read(Value x, int64_t& to) { return to = *x, true; }
};
template <class T, class I, int FIRST> struct Passed<T, I, false, Option<FIRST>> {
    typedef int Value;
    static bool read(Value x, Option<FIRST>& to) {
        to.number = x - FIRST;
        return to.number >= 0 && to.number < (int)strlen(LETTERS[FIRST / 10 - 10]);
    }
};
template <class T, class I, int FIRST> struct Passed<T, I, true, Option<FIRST>> {
    typedef const char* Value;
    static bool read(Value x, Option<FIRST>& to) {
        const char* const letters = LETTERS[FIRST / 10 - 10];
        const char* const found = *x ? strchr(letters, *x & ~32) : nullptr;
        to.number = found ? (int)(found - letters) : 0;
        return found;
    }
};
// Real factors are values in C.
template <class T, class I, bool IS_FORTRAN> struct Passed<T, I, IS_FORTRAN, Factor> {
    typedef std::conditional_t<IS_FORTRAN || Type<T>::PLANES == 2, const T*, T> Value;
    static bool read(const T& x, Factor& to) {
        const auto* const part = (const typename Type<T>::Real*)&x;
        to.part[0] = part[0];
        if (Type<T>::PLANES == 2) to.part[1] = part[Type<T>::PLANES - 1];
        return true;
    }
    static bool read(const T* x, Factor& to) { return read(*x, to); }
};
template <class T, class I, bool IS_FORTRAN>
struct Passed<T, I, IS_FORTRAN, RealFactor> : Passed<typename Type<T>::Real, I, IS_FORTRAN, Factor> {};

// -- calls as products -------------------------------------------------------------------------------

// A routine of COMPUTED: the names of the extents m, n and k of its product, where s is that of the square matrix, the
// operands that are vectors, and the other part of a, which is a GENERAL matrix if all is stored.
enum { OF_A = 1, OF_B = 2, OF_OUT = 4 };
struct Form {
    const char* extents;
    int vectors;
    Shape shape;
    bool writes_part;
};
const Form FORMS[COMPUTED] = {
    {"mnk", 0, GENERAL, false},                      // gemm
    {"m1n", OF_B | OF_OUT, GENERAL, false},          // gemv
    {"mns", 0, SYMMETRIC, false},                    // symm
    {"mns", 0, HERMITIAN, false},                    // hemm
    {"nnk", 0, GENERAL, true},                       // syrk
    {"nnk", 0, GENERAL, true},                       // herk
    {"nnk", 0, GENERAL, true},                       // gemmt
    {"mns", 0, TRIANGULAR, false},                   // trmm
    {"n1n", OF_B | OF_OUT, SYMMETRIC, false},        // symv
    {"n1n", OF_B | OF_OUT, HERMITIAN, false},        // hemv
    {"11n", OF_A | OF_B | OF_OUT, GENERAL, false},   // dot
    {"mn1", OF_A | OF_B, GENERAL, false},            // ger
};

int64_t extent(const Arguments& x, char name) {
    if (name == '1') return 1;
    if (name == 's') return x.side.number == LEFT ? x.m : x.n;
    if (name == 'k') return x.k;
    return name == 'm' ? x.m : x.n;
}

// A vector, by its increment; its first element is the last one in memory if that is negative.
template <class T> void set_vector(Matrix& to, const void* at, int64_t step, int64_t rows, int64_t cols) {
    const T* const first = (const T*)at + (step < 0 ? (1 - rows * cols) * step : 0);
    to = {first, rows == 1 ? 1 : step, rows == 1 ? step : 1, false, false, WHOLE, GENERAL};
}

// A matrix of these extents after its option; false if ld is too short.
template <class T>
bool set_matrix(Matrix& to, const Arguments& x, const void* at, int64_t ld, int op, int64_t rows, int64_t cols) {
    const bool by_rows = (x.order.number == BY_ROWS) != (op != PLAIN);
    const bool is_conjugate = op == ADJOINT && Type<T>::PLANES == 2;
    to = {at, by_rows ? ld : 1, by_rows ? 1 : ld, is_conjugate, false, WHOLE, GENERAL};
    return ld >= (by_rows ? cols : rows);
}

// The parts of matrices that are stored and written.
void set_parts(Product& p, const Arguments& x, const Form& form) {
    const bool is_right = x.side.number == RIGHT;
    const bool is_transposed = (is_right ? x.op_b : x.op_a).number != PLAIN;
    const Part part = (x.part.number == 0) != is_transposed ? UPPER : LOWER;
    if (form.writes_part) p.out.part = x.part.number ? LOWER : UPPER;
    if (form.shape == GENERAL) return;
    Matrix& square = is_right ? p.b : p.a;
    Matrix& other = is_right ? p.a : p.b;
    square.part = part;
    square.shape = form.shape == TRIANGULAR && x.unit.number ? UNIT_TRIANGULAR : form.shape;
    other.is_overwritten = p.routine == TRMM;
}

// Describes a call; false if an extent, an increment or an option of complex numbers is illegal.
template <class T> bool describe(Product& p, Arguments& x) {
    const Form& form = FORMS[p.routine];
    const int other = p.routine == HERK ? ADJOINT : TRANSPOSED;
    const bool is_of_itself = p.routine == SYRK || p.routine == HERK;
    if (is_of_itself && Type<T>::PLANES == 2 && x.op_a.number != PLAIN && x.op_a.number != other) return false;
    if (is_of_itself) {
        x.b = x.a;
        x.ldb = x.lda;
        x.op_b.number = x.op_a.number == PLAIN ? other : PLAIN;
    }
    if (p.routine == TRMM) {
        x.b = x.c;
        x.ldb = x.ldc;
    }
    if (p.routine == GEMV && x.op_a.number != PLAIN) std::swap(x.m, x.n);
    if (x.side.number == RIGHT) {
        std::swap(x.a, x.b);
        std::swap(x.lda, x.ldb);
        std::swap(x.op_a, x.op_b);
    }
    p.m = extent(x, form.extents[0]);
    p.n = extent(x, form.extents[1]);
    p.k = extent(x, form.extents[2]);
    const auto set = [&](Matrix& to, int vector, const void* at, int64_t ld, int op, int64_t rows, int64_t cols) {
        if (!(form.vectors & vector)) return set_matrix<T>(to, x, at, ld, op, rows, cols);
        set_vector<T>(to, at, ld, rows, cols);
        return ld || p.routine == DOT;
    };
    if (!set(p.a, OF_A, x.a, x.lda, x.op_a.number, p.m, p.k)) return false;
    if (!set(p.b, OF_B, x.b, x.ldb, x.op_b.number, p.k, p.n)) return false;
    if (!set(p.out, OF_OUT, x.c, x.ldc, PLAIN, p.m, p.n)) return false;
    set_parts(p, x, form);
    return true;
}

// Describes a call of a routine of COMPUTED; false if it is illegal.
template <class T> bool is_product(Product& p, int routine, Arguments& x) {
    p.routine = routine;
    p.n = x.n;
    p.alpha = routine == HERK ? x.real_alpha : x.alpha;
    p.beta = routine == HERK ? x.real_beta : x.beta;
    if (routine == DOT) p.alpha = {{1, 0}};
    if (routine == GER) p.beta = {{1, 0}};
    return describe<T>(p, x);
}

// True if the result is computed.
template <class T> bool computes(int routine, Arguments& x, const void* caller) {
    if (routine < COMPUTED) {
        Product p;
        return is_product<T>(p, routine, x) && takes<T>(p, caller);
    }
    has_arrived = true;
    int64_t multiplications = x.n;
    if (routine == TRMV) multiplications = x.n * x.n / 2;
    if (routine == SYR2K || routine == HER2K) multiplications = x.n * x.n * x.k;
    if (multiplications > 0 && !passes_all() && !is_inside_lapack())
        count(scope_of_thread(), {Type<T>::LETTER, routine, 0, 0, 0, multiplications, caller}, NOT_TAKEN, -1);
    return false;
}

// -- entry points ------------------------------------------------------------------------------------

// A function of the BLAS. Those without a result return what is in the registers of one, which callers ignore.
template <class T, class I, bool IS_FORTRAN, int ROUTINE, int LIBRARY, class Members> struct Entry;
template <class T, class I, int ROUTINE, int LIBRARY, auto... MEMBER>
struct Entry<T, I, true, ROUTINE, LIBRARY, List<&X::order, MEMBER...>>
    : Entry<T, I, true, ROUTINE, LIBRARY, List<MEMBER...>> {};
template <class T, class I, bool IS_FORTRAN, int ROUTINE, int LIBRARY, auto... MEMBER>
struct Entry<T, I, IS_FORTRAN, ROUTINE, LIBRARY, List<MEMBER...>> {
    template <auto OF> using Pass = Passed<T, I, IS_FORTRAN, std::decay_t<decltype(std::declval<X&>().*OF)>>;
    static inline std::atomic<void*> original;
    static T call(typename Pass<MEMBER>::Value... value) {
        T result = {};
        Arguments x;
        x.c = &result;
        const bool is_legal = (Pass<MEMBER>::read(value, x.*MEMBER) & ...);
        const void* const caller = __builtin_return_address(0);
        if constexpr (ROUTINE < COMPUTED)
            if (is_legal && observers.load(std::memory_order_relaxed)) return observed(x, caller, value...);
        if (is_legal && computes<T>(ROUTINE, x, caller)) return result;
        return ((decltype(&call))original.load(std::memory_order_relaxed))(value...);
    }

private:
    // The argument for a member, with another address of the result.
    template <auto OF> static typename Pass<OF>::Value with_result(typename Pass<OF>::Value value, void* result) {
        if constexpr (std::is_same_v<decltype(OF), void* Arguments::*>) return result;
        else return value;
    }
    // The call while scopes of this process observe.
    static __attribute__((noinline)) T observed(Arguments x, const void* caller,
                                                typename Pass<MEMBER>::Value... value) {
        T result = {};
        if (ROUTINE == DOT) x.c = &result;
        const auto own = (decltype(&call))original.load(std::memory_order_relaxed);
        Product p = {};
        Observation seen;
        const bool is_legal = is_product<T>(p, ROUTINE, x);
        const bool is_seen = is_legal && seen.begins(p, sizeof(T), caller);
        if (!is_legal || !takes<T>(p, caller)) {
            result = own(value...);
        } else if (is_seen && seen.is_compared(p)) {
            void* const other = seen.other(x.c);
            const T number = own(with_result<MEMBER>(value, other)...);
            if (ROUTINE == DOT) memcpy(other, &number, sizeof number);
        }
        if (is_seen && p.reason != SOLVER) seen.record<T>(p, caller);
        return result;
    }
};

struct Row {
    char letter;
    int routine;
    bool is_cblas, is_64;
    Functions functions;
};
Row rows[512];
int row_count;

template <class T, class I, bool IS_FORTRAN, int ROUTINE, class Members, int... LIBRARY>
void add(std::integer_sequence<int, LIBRARY...>) {
    rows[row_count++] = {
        Type<T>::LETTER,
        ROUTINE,
        !IS_FORTRAN,
        sizeof(I) == 8,
        {{(void*)Entry<T, I, IS_FORTRAN, ROUTINE, LIBRARY, Members>::call...},
         {&Entry<T, I, IS_FORTRAN, ROUTINE, LIBRARY, Members>::original...}},
    };
}
template <class T, class I, int ROUTINE, class Members, bool IN_FORTRAN = true> void add() {
    const std::make_integer_sequence<int, Functions::LIBRARIES> libraries;
    add<T, I, false, ROUTINE, Members>(libraries);
    if constexpr (IN_FORTRAN) add<T, I, true, ROUTINE, Members>(libraries);
}

template <class T, class I> void add_type() {
    add<T, I, GEMM, Gemm>();
    add<T, I, GEMMT, Gemmt>();
    add<T, I, GEMV, Gemv>();
    add<T, I, TRMM, Trmm>();
    add<T, I, SYMM, Symm>();
    add<T, I, SYRK, Syrk>();
    add<T, I, SYR2K, Syr2k, false>();
    add<T, I, TRMV, Trmv, false>();
    if constexpr (Type<T>::PLANES == 2) {
        add<T, I, HEMM, Symm>();
        add<T, I, HERK, Herk>();
        add<T, I, HEMV, Symv>();
        add<T, I, HER2K, Her2k, false>();
        add<T, I, DOTU_SUB, DotSub, false>();
        add<T, I, DOTC_SUB, DotSub, false>();
    } else {
        add<T, I, SYMV, Symv>();
        add<T, I, DOT, Dot>();
        add<T, I, GER, Ger>();
    }
}

template <class I> void add_types() {
    add_type<float, I>();
    add_type<double, I>();
    add_type<Complex32, I>();
    add_type<Complex64, I>();
}

}  // namespace

Functions* functions_of(char letter, int routine, bool is_cblas, bool is_64) {
    if (!row_count) {
        add_types<int32_t>();
        add_types<int64_t>();
    }
    for (int i = 0; i < row_count; i++) {
        Row& row = rows[i];
        if (row.letter == letter && row.routine == routine && row.is_cblas == is_cblas && row.is_64 == is_64)
            return &row.functions;
    }
    return nullptr;
}

}  // namespace lp::blas
#endif
