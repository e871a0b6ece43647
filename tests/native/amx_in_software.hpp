// The tile instructions of AMX by AVX-512, for checks of x86_amx.cpp on processors without them.
//
// As in Intel's manual (TDPBF16PS, TDPBSSD): sums of even and odd elements of a row are separate until the end, by FMA
// in round-to-nearest; subnormal numbers of operands and results are zero. Tiles are those of the calling thread.
#pragma once
#include "common.hpp"

TARGET_BEGIN("avx512f")

struct SoftwareTiles {
    int rows[8], row_bytes[8];
    alignas(64) unsigned char data[8][16][64];
};
static thread_local SoftwareTiles lp_tiles;

static void lp_tile_config(const void* from) {
    const unsigned char* config = (const unsigned char*)from;
    memset(&lp_tiles, 0, sizeof lp_tiles);
    for (int t = 0; t < 8; t++)
        lp_tiles.row_bytes[t] = config[16 + 2 * t] + 256 * config[17 + 2 * t], lp_tiles.rows[t] = config[48 + t];
}
static void lp_tile_zero(int t) { memset(lp_tiles.data[t], 0, sizeof lp_tiles.data[t]); }
static void lp_tile_load(int t, const void* from, int64_t stride) {
    lp_tile_zero(t);
    for (int i = 0; i < lp_tiles.rows[t]; i++)
        memcpy(lp_tiles.data[t][i], (const char*)from + i * stride, (size_t)lp_tiles.row_bytes[t]);
}
static void lp_tile_store(int t, void* to, int64_t stride) {
    for (int i = 0; i < lp_tiles.rows[t]; i++)
        memcpy((char*)to + i * stride, lp_tiles.data[t][i], (size_t)lp_tiles.row_bytes[t]);
}

static void lp_tile_multiply_bf16(int to, int a, int b) {
    SoftwareTiles& tiles = lp_tiles;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // subnormal operands and results are zero
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    for (int i = 0; i < tiles.rows[to]; i++) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int k = 0; k < tiles.row_bytes[a] / 4; k++) {
            int pair;
            memcpy(&pair, &tiles.data[a][i][4 * k], 4);
            const __m512i x = _mm512_set1_epi32(pair), y = _mm512_load_si512(tiles.data[b][k]);
            even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                   _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), even);
            odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, high)),
                                  _mm512_castsi512_ps(_mm512_and_si512(y, high)), odd);
        }
        _mm512_store_ps(tiles.data[to][i], _mm512_add_ps(_mm512_load_ps(tiles.data[to][i]), _mm512_add_ps(even, odd)));
    }
    _mm_setcsr(before);
}
static void lp_tile_multiply_int8(int to, int a, int b) {
    SoftwareTiles& tiles = lp_tiles;
    for (int i = 0; i < tiles.rows[to]; i++)
        for (int j = 0; j < tiles.row_bytes[to] / 4; j++) {
            uint32_t sum;
            memcpy(&sum, &tiles.data[to][i][4 * j], 4);
            for (int k = 0; k < tiles.row_bytes[a]; k++)
                sum += (uint32_t)((int8_t)tiles.data[a][i][k] * (int8_t)tiles.data[b][k / 4][4 * j + k % 4]);
            memcpy(&tiles.data[to][i][4 * j], &sum, 4);
        }
}

TARGET_END

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig lp_tile_config
#define _tile_release() (void)0
#define _tile_zero lp_tile_zero
#define _tile_loadd lp_tile_load
#define _tile_stream_loadd lp_tile_load
#define _tile_stored lp_tile_store
#define _tile_dpbf16ps lp_tile_multiply_bf16
#define _tile_dpbssd lp_tile_multiply_int8
