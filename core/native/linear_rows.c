/* The activations of a linear layer: widened, quantised, and interleaved for the tiles.
 *
 * A tile reads one 32-bit group of each of its rows at a time, so these lie side by side: rows that
 * are a power of two apart would fall into the same cache set.
 */
#include "linear_job.h"

typedef struct {
    ft_linear_job *job;
    const void *x;
    int x_dtype;
    int64_t group_size; /* that shares a scale */
    int32_t weight_offset;
    int8_t *bytes;  /* quantised rows, before they are interleaved: [rows, x_steps * 4] */
    uint32_t *out;  /* what job->x will be */
    float *scale;
    int32_t *offset;
} rows_t;

/* FT_LANES of a row, widened to float, with zeros behind in_features. */
FT_INLINE vf load_activation(const rows_t *q, int64_t row, int64_t k) {
    const int64_t width = q->job->weight->in_features, at = row * width + k, left = width - k;
    if (left >= FT_LANES)
        return q->x_dtype == FT_BFLOAT16 ? vf_load_bf16((const bf16 *)q->x + at)
                                         : vf_load((const float *)q->x + at);
    float wide[FT_LANES] = {0};
    for (int64_t i = 0; i < left; i++)
        wide[i] = q->x_dtype == FT_BFLOAT16 ? ft_from_bf16(((const bf16 *)q->x)[at + i])
                                            : ((const float *)q->x)[at + i];
    return vf_load(wide);
}

/* A group as signed bytes at `out`, its scale and offset at index `at`. */
static void quantise_group(const rows_t *q, int64_t row, int64_t begin, int8_t *out, int64_t at) {
    const int64_t end = begin + q->group_size;
    vf highest = vf_zero(), zero = vf_zero(); /* zero turns NaN where a value is not finite */
    for (int64_t k = begin; k < end; k += FT_LANES) {
        vf value = load_activation(q, row, k);
        highest = vf_max(highest, vf_abs(value));
        zero = vf_fma(value, vf_zero(), zero);
    }
    float lanes[FT_LANES], zeros[FT_LANES], top = 0.0f, nothing = 0.0f;
    vf_store(lanes, highest);
    vf_store(zeros, zero);
    for (int i = 0; i < FT_LANES; i++) {
        top = lanes[i] > top ? lanes[i] : top;
        nothing += zeros[i];
    }
    const vf factor = vf_set1(top > 0.0f ? 127.0f / top : 0.0f);
    for (int64_t k = begin; k < end; k += FT_LANES)
        vf_store_int8(out + k - begin, vf_mul(load_activation(q, row, k), factor));
    int32_t sum = 0;
    for (int64_t k = 0; k < q->group_size; k++) sum += out[k];
    q->scale[at] = top / 127.0f + nothing;
    q->offset[at] = -q->weight_offset * sum;
}

/* The 32-bit groups of a row, as they are in x or quantised. */
static const char *row_groups(const rows_t *q, int64_t row, int64_t first, int64_t count) {
    const ft_linear_job *job = q->job;
    if (!q->bytes) {
        const int64_t bytes = q->x_dtype == FT_BFLOAT16 ? 2 : 4;
        return (const char *)q->x + row * job->weight->in_features * bytes;
    }
    int8_t *out = q->bytes + row * job->x_steps * 4;
    const int64_t scales = first * job->groups + (row - first);
    for (int64_t g = 0; g < job->groups; g++)
        quantise_group(q, row, g * q->group_size, out + g * q->group_size, scales + g * count);
    return (const char *)out;
}

/* Tile by tile: quantise where asked for, and interleave the rows. */
static void prepare_tiles(void *context, int64_t begin, int64_t end) {
    const rows_t *q = context;
    const ft_linear_job *job = q->job;
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t first = tile * job->tile_rows;
        const int64_t count = ft_min(job->tile_rows, job->rows - first);
        for (int64_t r = 0; r < count; r++) {
            const char *groups = row_groups(q, first + r, first, count);
            uint32_t *out = q->out + first * job->x_steps + r;
            int64_t whole = job->x_steps;
            if (job->weight->kind == FT_LINEAR_BFLOAT16 && job->weight->in_features % 2) {
                whole--;
                out[whole * count] = *(const bf16 *)(groups + 4 * whole); /* and a zero */
            }
            for (int64_t s = 0; s < whole; s++) memcpy(out + s * count, groups + 4 * s, 4);
        }
    }
}

int ft_prepare_rows(ft_linear_job *job, const void *x, int x_dtype) {
    const int is_int4 = job->weight->kind == FT_LINEAR_INT4;
    const int quantised = is_int4 || job->weight->kind == FT_LINEAR_INT8;
    const int whole = job->weight->kind == FT_LINEAR_FLOAT32 || job->weight->in_features % 2 == 0;
    job->x = x;
    if (job->rows == 1 && !quantised && whole) return 0;
    const int64_t words = job->rows * job->x_steps, scales = job->rows * job->groups;
    uint32_t *memory = ft_scratch(FT_SCRATCH_LINEAR, (size_t)(8 * words + 8 * scales));
    if (!memory) return -1;
    rows_t q = {
        .job = job, .x = x, .x_dtype = x_dtype, .out = memory,
        .bytes = quantised ? (int8_t *)(memory + words) : NULL,
        .scale = (float *)(memory + 2 * words), .offset = (int32_t *)(memory + 2 * words) + scales,
        .group_size = is_int4 ? FT_INT4_GROUP : job->x_steps * 4,
        .weight_offset = is_int4 ? 8 : 128,
    };
    ft_parallel(prepare_tiles, &q, job->tiles, 1);
    job->x = (const char *)q.out;
    job->x_scale = q.scale;
    job->x_offset = q.offset;
    return 0;
}
