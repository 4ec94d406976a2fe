/* AMX: the matrix unit of Intel Xeons since Sapphire Rapids, or C functions that do the same.
 *
 * A thread has eight tiles of up to 16 rows of up to 64 bytes. A dot instruction adds A times B to
 * the sums of C: C[m][n] += sum over k and i of A[m][k][i] * B[k][n][i], where k counts groups of 4
 * bytes (2 bf16 or 4 bytes) and i the numbers in a group. The panels of linear_weight.h and the
 * transposed keys of attention have this layout of B, and rows of activations are rows of A as they
 * lie in memory. A row of C depends only on the same row of A.
 *
 * The arithmetic of the bf16 instruction was found by experiment, bit by bit: from zero, one chain
 * of fused multiply-adds over the even numbers (i = 0) and one over the odd ones, both in the order
 * of k; then even + odd; then C + that sum. Subnormal numbers count as 0, before and after every
 * operation. Sums of bytes are exact.
 *
 * A process must request permission from Linux (build.py does); without it, every tile instruction
 * ends the process. Tile shapes belong to a thread. Each piece of work sets them and releases the
 * tiles at its end, because a context switch takes longer while tiles are in use.
 *
 * With FT_AMX_EMULATED, amx_emulated.c of the tests replaces the unit and ends the process where
 * the unit would, so the tests of tile code run on any x86 machine.
 */
#ifndef FT_AMX_H
#define FT_AMX_H

#include "common.h"

#if defined(FT_AMX_EMULATED) || \
    (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define FT_AMX 1

enum {
    AMX_ROWS = 16,     /* rows of a tile */
    AMX_ROW_BYTES = 64,
    AMX_COLUMNS = 16,  /* 4-byte sums in a row of C */
    AMX_BYTES = AMX_ROWS * AMX_ROW_BYTES,
};

/* The operand of ldtilecfg. */
typedef struct {
    uint8_t palette; /* 1: eight tiles of 1 KiB */
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16]; /* per tile; only the first eight tiles exist */
    uint8_t rows[16];
} ft_amx_shapes;

#if defined(FT_AMX_EMULATED)

void ft_emulated_configure(const ft_amx_shapes *shapes);
void ft_emulated_release(void);
void ft_emulated_zero(int tile);
void ft_emulated_load(int tile, const void *from, int64_t stride);
void ft_emulated_store(int tile, void *to, int64_t stride);
void ft_emulated_dot_bf16(int c, int a, int b);
void ft_emulated_dot_bytes(int c, int a, int b, int a_signed, int b_signed);

#define AMX_CONFIGURE(shapes) ft_emulated_configure(shapes)
#define AMX_RELEASE() ft_emulated_release()
#define AMX_ZERO(tile) ft_emulated_zero(tile)
#define AMX_LOAD(tile, from, stride) ft_emulated_load(tile, from, stride)
#define AMX_STORE(tile, to, stride) ft_emulated_store(tile, to, stride)
#define AMX_DOT_BF16(c, a, b) ft_emulated_dot_bf16(c, a, b)
#define AMX_DOT_SS(c, a, b) ft_emulated_dot_bytes(c, a, b, 1, 1)
#define AMX_DOT_SU(c, a, b) ft_emulated_dot_bytes(c, a, b, 1, 0)
#define AMX_DOT_US(c, a, b) ft_emulated_dot_bytes(c, a, b, 0, 1)

#else

#include <immintrin.h>

/* These are macros because tile numbers are part of the instructions. The bytes of A, then of B,
 * are signed (S) or unsigned (U). Two macros are inline assembly: gcc's intrinsics declare to read
 * only eight bytes of the shapes and nothing of a tile, so gcc may drop or delay the stores before
 * them. */
#define AMX_CONFIGURE(shapes) __asm__ volatile("ldtilecfg %0" : : "m"(*(shapes)) : "memory")
#define AMX_LOAD(tile, from, stride)                                       \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile                    \
                     :                                                     \
                     : "r"((const void *)(from)), "r"((int64_t)(stride))   \
                     : "memory")
#define AMX_RELEASE() _tile_release()
#define AMX_ZERO(tile) _tile_zero(tile)
#define AMX_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define AMX_DOT_BF16(c, a, b) _tile_dpbf16ps(c, a, b)
#define AMX_DOT_SS(c, a, b) _tile_dpbssd(c, a, b)
#define AMX_DOT_SU(c, a, b) _tile_dpbsud(c, a, b)
#define AMX_DOT_US(c, a, b) _tile_dpbusd(c, a, b)

#endif

/* Set the number of rows of each tile, with 64 bytes a row, and zero the tiles. */
FT_INLINE void ft_amx_configure(const uint8_t rows[8]) {
    ft_amx_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = AMX_ROW_BYTES;
        shapes.rows[i] = rows[i];
    }
    AMX_CONFIGURE(&shapes);
}

#endif
#endif
