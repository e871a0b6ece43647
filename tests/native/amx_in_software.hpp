// The tile instructions of AMX in plain C++, for checks of x86_amx.cpp on processors without them.
//
// As in Intel's manual (TDPBF16PS, TDPBSSD): the sums of even and odd elements of a row are separate until the end, by
// FMA in round-to-nearest, subnormal numbers of operands and of sums are zero. Tiles are of the calling thread.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

struct SoftwareTiles {
    int rows[8], row_bytes[8];
    alignas(64) unsigned char data[8][16][64];
};
static thread_local SoftwareTiles lp_tiles;

static void lp_tile_config(const void* from) {
    memset(&lp_tiles, 0, sizeof lp_tiles);
    const unsigned char* config = (const unsigned char*)from;
    for (int t = 0; t < 8; t++) lp_tiles.row_bytes[t] = config[16 + 2 * t] + 256 * config[17 + 2 * t], lp_tiles.rows[t] = config[48 + t];
}
static void lp_tile_zero(int t) { memset(lp_tiles.data[t], 0, sizeof lp_tiles.data[t]); }
static void lp_tile_load(int t, const void* from, int64_t stride) {
    lp_tile_zero(t);
    for (int i = 0; i < lp_tiles.rows[t]; i++) memcpy(lp_tiles.data[t][i], (const char*)from + i * stride, (size_t)lp_tiles.row_bytes[t]);
}
static void lp_tile_store(int t, void* to, int64_t stride) {
    for (int i = 0; i < lp_tiles.rows[t]; i++) memcpy((char*)to + i * stride, lp_tiles.data[t][i], (size_t)lp_tiles.row_bytes[t]);
}

static float lp_normal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
static float lp_tile_number(const unsigned char* at) {
    uint32_t bits = (uint32_t)(at[0] | at[1] << 8) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return lp_normal(x);
}
static void lp_tile_multiply_bf16(int to, int a, int b) {
    for (int i = 0; i < lp_tiles.rows[to]; i++)
        for (int j = 0; j < lp_tiles.row_bytes[to] / 4; j++) {
            float sums[2] = {0, 0}, c;
            for (int k = 0; k < lp_tiles.row_bytes[a] / 4; k++)
                for (int odd = 0; odd < 2; odd++) {
                    float x = lp_tile_number(&lp_tiles.data[a][i][4 * k + 2 * odd]), y = lp_tile_number(&lp_tiles.data[b][k][4 * j + 2 * odd]);
                    sums[odd] = lp_normal(fmaf(x, y, sums[odd]));
                }
            memcpy(&c, &lp_tiles.data[to][i][4 * j], 4);
            c = lp_normal(lp_normal(c) + lp_normal(sums[0] + sums[1]));
            memcpy(&lp_tiles.data[to][i][4 * j], &c, 4);
        }
}
static void lp_tile_multiply_int8(int to, int a, int b) {
    for (int i = 0; i < lp_tiles.rows[to]; i++)
        for (int j = 0; j < lp_tiles.row_bytes[to] / 4; j++) {
            uint32_t sum;
            memcpy(&sum, &lp_tiles.data[to][i][4 * j], 4);
            for (int k = 0; k < lp_tiles.row_bytes[a]; k++)
                sum += (uint32_t)((int8_t)lp_tiles.data[a][i][k] * (int8_t)lp_tiles.data[b][k / 4][4 * j + k % 4]);
            memcpy(&lp_tiles.data[to][i][4 * j], &sum, 4);
        }
}

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
