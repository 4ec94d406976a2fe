/* Conversion of a tile's sums to outputs: add the bias, round, and leave out padding. This is a
 * file of its own because every file of tiles calls it, and linear.c calls the files of tiles. */
#include "linear_job.h"

static void store_tail(const ft_linear_job *job, int64_t at, int64_t count, vf value) {
    float wide[FT_LANES];
    vf_store(wide, value);
    for (int64_t i = 0; i < count; i++) {
        if (job->y_dtype == FT_BFLOAT16) ((bf16 *)job->y)[at + i] = ft_to_bf16(wide[i]);
        else ((float *)job->y)[at + i] = wide[i];
    }
}

/* Write half a panel, whose last outputs may be padding. */
FT_INLINE void finish_half(const ft_linear_job *job, int64_t row, int64_t column,
                           const float *sums) {
    const int64_t at = row * job->y_stride + column;
    const int64_t left = job->weight->num_own - column;
    vf value = vf_load(sums);
    if (job->weight->bias) value = vf_add(value, vf_load(job->weight->bias + column));
    if (left < FT_LANES) store_tail(job, at, ft_max(left, 0), value);
    else if (job->y_dtype == FT_BFLOAT16) vf_store_bf16((bf16 *)job->y + at, value);
    else vf_store((float *)job->y + at, value);
}

void ft_finish_rows(const ft_linear_job *job, int64_t row, int64_t column, const float *sums,
                    int64_t count) {
    for (int64_t r = 0; r < count; r++, sums += PANEL) {
        finish_half(job, row + r, column, sums);
        finish_half(job, row + r, column + FT_LANES, sums + FT_LANES);
    }
}
