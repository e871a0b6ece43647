// AMX: a as two tiles of 16 rows, b as two tiles of 16 columns, four tiles of sums.
#if defined(__x86_64__)
#include "kernel.hpp"
#if defined(LP_AMX_IN_SOFTWARE)
#include "amx_in_software.hpp"
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2")
#else
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2,amx-tile,amx-bf16,amx-int8")
#endif
namespace {
#include "x86_lanes16.hpp"
#include "templates.hpp"

// clang-format off: tiles side by side
template <class U> static void tile_kernel(const MicroTile& tile) {
    const uint32_t *a = tile.a, *b = tile.b;
    const char* next = tile.next;
    const int64_t ldc = tile.ldc;
    const float factor = tile.factor;
    const bool adds = tile.write == ADDS;
    const bool whole = adds && factor == 1;  // the tiles begin with C; else the sums begin with zero
    char *to = (char*)tile.c, *half = to + 64 * ldc;
    const int64_t ld = 4 * ldc;
    if (whole && U::ELEMENT == E_I8) {
        _tile_loadd(0, to, ld); _tile_loadd(1, to + 64, ld); _tile_loadd(2, half, ld); _tile_loadd(3, half + 64, ld);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (int64_t dwords = tile.dwords; dwords > 0; dwords -= W) {
        for (int line = 0; line < 4; line++) __builtin_prefetch(next + 64 * line, 0, 2);
        _tile_stream_loadd(4, a, 64); _tile_stream_loadd(5, a + 256, 64);
        _tile_loadd(6, b, 128); _tile_loadd(7, b + 16, 128);
        if constexpr (U::ELEMENT == E_I8) {
            _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 4, 7); _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
        }
        a += tile.step_a;
        b += tile.step_b;
        next += tile.step_next;
    }
    if (U::ELEMENT == E_I8 || !adds) {
        if (U::ELEMENT == E_I8 || factor == 1) {
            _tile_stored(0, to, ld);
            _tile_stored(1, to + 64, ld);
            _tile_stored(2, half, ld);
            _tile_stored(3, half + 64, ld);
            return;
        }
    }
    alignas(64) float sums[32 * 32];
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 512, 128);
    _tile_stored(3, sums + 528, 128);
    for (int i = 0; i < 32; i++)
        for (int j = 0; j < 32; j += W) {
            char* at = to + i * ld + 4 * j;
            f32v x = get<f32v>(sums + 32 * i + j) * factor;
            put(at, adds ? x + get<f32v>(at) : x);
        }
}

// clang-format on
struct Tiles {
    static constexpr int ROWS = 32, COLUMNS = 2, FEW = 0;
    static constexpr bool IS_TILED = true, BLOCKS = false;
    static void begin() {
        alignas(64) unsigned char config[64] = {1};  // palette 1: eight tiles of 16 rows of 64 bytes
        for (int i = 0; i < 8; i++) {
            config[16 + 2 * i] = 64;
            config[48 + i] = 16;
        }
        _tile_loadconfig(config);
    }
    static void end() { _tile_release(); }
};
template <int E, class A> struct Tile : Tiles {
    typedef A Acc;
    static constexpr int ELEMENT = E;
    static constexpr Micro* tile = tile_kernel<Tile>;
};
}  // namespace
namespace lp {
Unit bf16_amx() { return unit<Tile<E_BF16, f32v>>(); }
Unit pair_amx() { return unit<Tile<E_PAIR, f32v>>(); }
Unit int8_amx() { return unit<Tile<E_I8, i32v>>(); }
}  // namespace lp
TARGET_END
#endif
