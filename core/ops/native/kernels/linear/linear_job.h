/* What linear.c or linear_amx.c computes in one call, the rows that linear_rows.c prepares for it,
 * and what linear_finish.c makes of its sums. */
#ifndef FT_LINEAR_JOB_H
#define FT_LINEAR_JOB_H

#include "common/amx.h"
#include "common/simd.h"
#include "linear_weight.h"

/* Where no instruction multiplies bytes in quads, linear_words.h multiplies 16-bit numbers in pairs. */
#if !defined(FT_AVX512) && !defined(FT_AMX)
#define FT_WORDS 1
#endif

enum { PANEL = 2 * FT_LANES }; /* outputs that lie side by side */

typedef struct {
    const ft_linear_weight *weight;
    const char *x; /* tiles of [x_steps][rows of the tile] 32-bit groups */
    const float *x_scale;    /* quantised rows: tiles of [groups][rows of the tile] */
    const int32_t *x_offset; /* what the offset of the weights adds to a sum, negated, likewise;
                              * kinds with minima or zeros: the sum of the group's quantised
                              * activations; int6_k: two of each group */
    int64_t rows;
    int64_t tiles, tile_rows; /* the last tile may have fewer */
    int64_t x_steps;
    int64_t groups; /* scales of a row of x */
    int64_t steps;  /* of the kernel: x_steps, grouped kinds: groups */
    int64_t panel_bytes;
    void *y;
    int64_t y_stride; /* outputs of a row, other weights' included */
    int y_dtype;
} ft_linear_job;

/* Whether activations are 16-bit numbers, in pairs as vi_dot_words takes them. */
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

/* The same into memory of `ft_prepared_bytes`, which are 0 where x is taken as it is. */
size_t ft_prepared_bytes(const ft_linear_job *job);
void ft_prepare_rows_in(ft_linear_job *job, const void *x, int x_dtype, void *memory);

/* Bias, rounding, and the place in y of sums [count][PANEL], whose first is that of (row, column). */
void ft_finish_rows(const ft_linear_job *job, int64_t row, int64_t column, const float *sums,
                    int64_t count);

#if defined(FT_WORDS)
/* Whether a panel of the job's weight is widened once for all rows, and that panel's outputs. */
int ft_widens(const ft_linear_job *job);
void ft_run_widened(const ft_linear_job *job, int64_t panel);
#endif

#if defined(FT_AMX)
/* Whether the matrix unit computes this weight with so many rows. */
int ft_amx_suits(const ft_linear_weight *weight, int64_t rows);

/* What ft_linear does, through the unit. The job's weight, rows, steps, x_steps, groups, panel_bytes
 * and y are set. Returns -1 when there is no memory. */
int ft_amx_linear(ft_linear_job *job, const void *x, int x_dtype);

/* The same for a weight of a grouped kind and at least 16 rows. */
int ft_amx_groups(ft_linear_job *job, const void *x, int x_dtype);
#endif

#endif
