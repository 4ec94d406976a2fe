/* What linear.c computes in one call, and the rows that linear_rows.c prepares for it. */
#ifndef FT_LINEAR_JOB_H
#define FT_LINEAR_JOB_H

#include "linear.h"
#include "simd.h"

typedef struct {
    const ft_linear_weight *weight;
    const char *x; /* tiles of [x_steps][rows of the tile] 32-bit groups */
    const float *x_scale;    /* quantised rows: tiles of [groups][rows of the tile] */
    const int32_t *x_offset; /* what the offset of the weights adds to a sum, negated, likewise;
                              * int4_min: the sum of the group's quantised activations */
    int64_t rows;
    int64_t tiles, tile_rows; /* the last tile may have fewer */
    int64_t x_steps;
    int64_t groups; /* scales of a row of x */
    int64_t steps;  /* of the kernel: x_steps, grouped kinds: groups */
    int64_t panel_bytes;
    void *y;
    int y_dtype;
} ft_linear_job;

/* Quantise and interleave x for the job's tiles, on the pool; sets x, x_scale and x_offset. Returns
 * -1 when there is no memory. The rows lie in this thread's scratch memory. */
int ft_prepare_rows(ft_linear_job *job, const void *x, int x_dtype);

#endif
