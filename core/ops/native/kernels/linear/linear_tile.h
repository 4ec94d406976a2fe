/* The product of a tile of rows with one panel: code that all kinds of weight share. */
#ifndef FT_LINEAR_TILE_H
#define FT_LINEAR_TILE_H

#include "linear_groups.h"

#if defined(FT_AVX512)
enum { MAX_TILE = 12 }; /* rows; 24 sums, two weights and a broadcast in 32 registers */
#elif defined(FT_AMX_EMULATED)
enum { MAX_TILE = 3 }; /* only for tests, because more would compile slowly */
#else
enum { MAX_TILE = 6 }; /* 12 sums, two weights, a broadcast and a product in 16 registers */
#endif

/* A tile of the output: its weights, its first row and column, and the memory that it prefetches. */
typedef struct {
    const char *weight;
    const char *ahead;
    int64_t ahead_step; /* bytes to prefetch with each step of the panel */
    int64_t row;
    int64_t column;
} tile_t;

FT_INLINE void finish_sums(const ft_linear_job *job, const tile_t *tile, vf sum[][2],
                           const int count) {
    float out[MAX_TILE][PANEL];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) {
        vf_store(out[r], sum[r][0]);
        vf_store(out[r] + FT_LANES, sum[r][1]);
    }
    ft_finish_rows(job, tile->row, tile->column, out[0], count);
}

/* For each kind, a function with separate code for every number of rows, which is a constant
 * there. */
#define CASE(kind, n) \
    case n: kind##_tile(job, tile, n); break;
#if defined(FT_AVX512)
#define MORE_CASES(kind) \
    CASE(kind, 4) CASE(kind, 5) CASE(kind, 6) CASE(kind, 7) CASE(kind, 8) CASE(kind, 9) \
    CASE(kind, 10) CASE(kind, 11) CASE(kind, 12)
#elif defined(FT_AMX_EMULATED)
#define MORE_CASES(kind)
#else
#define MORE_CASES(kind) CASE(kind, 4) CASE(kind, 5) CASE(kind, 6)
#endif
#define DEFINE_TILE(kind) \
    void ft_run_##kind(const ft_linear_job *job, const tile_t *tile, int64_t count) { \
        switch (count) { CASE(kind, 1) CASE(kind, 2) CASE(kind, 3) MORE_CASES(kind) } \
    }
#define DECLARE_TILE(kind) \
    void ft_run_##kind(const ft_linear_job *job, const tile_t *tile, int64_t count);
DECLARE_TILE(int4_min)
DECLARE_TILE(int8_group)
DECLARE_TILE(int4_zero)
DECLARE_TILE(int4_k)
DECLARE_TILE(int5_k)
DECLARE_TILE(int6_k)
DECLARE_TILE(iq4_nl)
DECLARE_TILE(mxfp4)
DECLARE_TILE(iq4_xs)
DECLARE_TILE(int4_group)
DECLARE_TILE(int5_group)
DECLARE_TILE(int5_min)

#endif
