/* A job is one call of linear.c or linear_amx.c. linear_rows.c prepares its rows, and
 * linear_finish.c converts its sums to outputs. */
#ifndef FT_LINEAR_JOB_H
#define FT_LINEAR_JOB_H

#include "common/amx.h"
#include "common/simd.h"
#include "linear_weight.h"

/* Without an instruction that multiplies quads of bytes, kernels multiply pairs of 16-bit
 * numbers. */
#if !defined(FT_AVX512) && !defined(FT_AMX)
#define FT_WORDS 1
#endif

enum { PANEL = 2 * FT_LANES }; /* outputs that lie side by side */

typedef struct {
    const ft_linear_weight *weight;
    const char *x; /* tiles of [x_steps][rows of the tile] 32-bit groups */
    const float *x_scale;    /* quantised rows: tiles of [groups][rows of the tile] */
    const int32_t *x_offset; /* like x_scale: the sum of a group's quantised activations, times the
                              * negated offset of the values unless the kind has minima or zeros;
                              * int6_k: two of each group */
    int64_t rows;
    int64_t tiles, tile_rows; /* number of tiles, rows of each; the last may have fewer */
    int64_t x_steps;
    int64_t groups; /* scales of a row of x */
    int64_t steps;  /* steps of a panel; for grouped kinds, groups */
    int64_t panel_bytes;
    void *y;
    int64_t y_stride; /* items from one row of y to the next: outputs of all weights that share y */
    int y_dtype;
} ft_linear_job;

/* Whether activations are pairs of 16-bit numbers, for vi_dot_words. */
FT_INLINE int ft_has_words(const ft_linear_weight *weight) {
#if defined(FT_WORDS)
    return weight->kind == FT_LINEAR_INT8 || ft_is_fine(weight);
#else
    (void)weight;
    return 0;
#endif
}

/* Quantise and interleave x for the job's tiles, on the pool; sets x, x_scale and x_offset. Returns
 * -1 when there is no memory. The rows lie in this thread's scratch memory. */
int ft_prepare_rows(ft_linear_job *job, const void *x, int x_dtype);

/* ft_prepare_rows_in: like ft_prepare_rows, but in `memory`. ft_prepared_bytes: the bytes that it
 * needs, 0 where kernels read x itself. */
size_t ft_prepared_bytes(const ft_linear_job *job);
void ft_prepare_rows_in(ft_linear_job *job, const void *x, int x_dtype, void *memory);

/* Add the bias to sums [count][PANEL], round them, and write them to y from (row, column) on. */
void ft_finish_rows(const ft_linear_job *job, int64_t row, int64_t column, const float *sums,
                    int64_t count);

#if defined(FT_WORDS)
/* ft_widens: whether the panels of a job are widened once for all rows. ft_run_widened: compute
 * such a panel. */
int ft_widens(const ft_linear_job *job);
void ft_run_widened(const ft_linear_job *job, int64_t panel);
#endif

#if defined(FT_AMX)
/* Whether the matrix unit computes this weight with `rows` rows. */
int ft_amx_suits(const ft_linear_weight *weight, int64_t rows);

/* Compute a job on the unit. Its weight, rows, steps, x_steps, groups, panel_bytes and y must be
 * set. Returns -1 when there is no memory. */
int ft_amx_linear(ft_linear_job *job, const void *x, int x_dtype);

/* Like ft_amx_linear, for a weight of a grouped kind and at least 16 rows. */
int ft_amx_groups(ft_linear_job *job, const void *x, int x_dtype);
#endif

#endif
