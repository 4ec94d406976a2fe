/* Preparation of a linear layer's activations: widening, quantising, and interleaving for the
 * tiles.
 *
 * A tile reads one 32-bit group of each of its rows at a time, so these groups lie side by side. If
 * rows were a power of two apart instead, they would compete for the same cache set.
 */
#include "linear_groups.h"

typedef struct {
    ft_linear_job *job;
    const void *x;
    int x_dtype;
    int64_t group_size; /* items that share a scale */
    int32_t weight_offset;
    int halves;     /* whether the halves of a group have separate offsets */
    int fine;       /* whether numbers have 16 bits; unless `words`, low bytes before high ones */
    int words;      /* whether numbers are 16-bit words in pairs; for int8 weights of byte range */
    int8_t *bytes;  /* quantised rows, before they are interleaved: [rows, x_steps * 4] */
    uint32_t *out;  /* becomes job->x */
    float *scale;
    int32_t *offset;
} rows_t;

/* Load FT_LANES items of a row as floats, from column `k` on, with zeros after in_features. */
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

/* Store rounded numbers as the columns from `k` on of the group at `out`. */
FT_INLINE void store_numbers(const rows_t *q, vi numbers, int64_t k, int8_t *out) {
#if defined(FT_WORDS)
    if (q->words) {
        vi_store_words(out + 2 * k, numbers);
        return;
    }
#endif
    vi_store_bytes(out + k, numbers);
    if (q->fine) /* 256 * high + low, both signed bytes */
        vi_store_bytes(out + FT_GROUP + k, vi_moved(vi_add(numbers, vi_set1(128)), -8));
}

/* Quantise a group to integers at `out`, with its scale and offset at index `at`. */
static void quantise_group(const rows_t *q, int64_t row, int64_t begin, int8_t *out, int64_t at) {
    const float most = q->fine ? 32639.0f : 127.0f; /* 256 * 127 + 127 */
    vi highest = vi_zero(); /* bit patterns, which order infinities and NaN above all numbers */
    for (int64_t k = 0; k < q->group_size; k += FT_LANES)
        highest = vi_max(highest, (vi)vf_abs(load_activation(q, row, begin + k)));
    const int32_t bits = vi_highest(highest);
    float top;
    memcpy(&top, &bits, 4);
    const float nothing = top * 0.0f; /* NaN where a value is not finite */
    const int is_sound = top > 0.0f && nothing == 0.0f;
    const vf factor = vf_set1(is_sound ? most / top : 0.0f);
    vi first = vi_zero(), second = vi_zero();
    for (int64_t k = 0; k < q->group_size; k += FT_LANES) {
        vi numbers = vi_round(vf_mul(load_activation(q, row, begin + k), factor));
        store_numbers(q, numbers, k, out);
        if (q->halves && k >= FT_GROUP / 2) second = vi_add(second, numbers);
        else first = vi_add(first, numbers);
    }
    q->scale[at] = top / most + nothing;
    int32_t *offset = q->offset + (at << q->halves);
    offset[0] = -q->weight_offset * vi_total(first);
    if (q->halves) offset[1] = -q->weight_offset * vi_total(second);
}

/* Return the 32-bit groups of a row: x itself, or the row quantised. */
static const char *row_groups(const rows_t *q, int64_t row, int64_t first, int64_t count) {
    const ft_linear_job *job = q->job;
    if (!q->bytes) {
        const int64_t bytes = q->x_dtype == FT_BFLOAT16 ? 2 : 4;
        return (const char *)q->x + row * job->weight->in_features * bytes;
    }
    int8_t *out = q->bytes + row * job->x_steps * 4;
    const int64_t scales = first * job->groups + (row - first);
    for (int64_t g = 0; g < job->groups; g++, out += q->group_size << q->fine)
        quantise_group(q, row, g * q->group_size, out, scales + g * count);
    return (const char *)(q->bytes + row * job->x_steps * 4);
}

/* Widen a row of bf16 to float32, to every `stride`-th word of `out`; a zero follows an odd number
 * of items. */
static void widen_row(const rows_t *q, int64_t row, uint32_t *out, int64_t stride) {
    const int64_t width = q->job->weight->in_features;
    const bf16 *x = (const bf16 *)q->x + row * width;
    for (int64_t k = 0; k < width; k++) out[k * stride] = (uint32_t)x[k] << 16;
    if (width % 2) out[width * stride] = 0;
}

/* Widen or quantise the rows of each tile if necessary, and interleave them. */
static void prepare_tiles(void *context, int64_t begin, int64_t end) {
    const rows_t *q = context;
    const ft_linear_job *job = q->job;
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t first = tile * job->tile_rows;
        const int64_t count = ft_min(job->tile_rows, job->rows - first);
        for (int64_t r = 0; r < count; r++) {
            uint32_t *out = q->out + first * job->x_steps + r;
            if (job->weight->kind == FT_LINEAR_BFLOAT16_WIDE) {
                widen_row(q, first + r, out, count);
                continue;
            }
            const char *groups = row_groups(q, first + r, first, count);
            int64_t whole = job->x_steps;
            if (job->weight->kind == FT_LINEAR_BFLOAT16 && job->weight->in_features % 2) {
                whole--;
                out[whole * count] = *(const bf16 *)(groups + 4 * whole); /* one item and a zero */
            }
            if (count == 1) memcpy(out, groups, (size_t)whole * 4);
            else for (int64_t s = 0; s < whole; s++) memcpy(out + s * count, groups + 4 * s, 4);
        }
    }
}

size_t ft_prepared_bytes(const ft_linear_job *job) {
    const ft_linear_weight *weight = job->weight;
    const int as_it_is = weight->kind == FT_LINEAR_FLOAT32 ||
                         (weight->kind == FT_LINEAR_BFLOAT16 && weight->in_features % 2 == 0);
    if (job->rows == 1 && as_it_is) return 0;
    return (size_t)(job->rows * (8 * job->x_steps + 12 * job->groups)); /* room for two offsets */
}

void ft_prepare_rows_in(ft_linear_job *job, const void *x, int x_dtype, void *memory) {
    const int grouped = ft_is_grouped(job->weight);
    const int quantised = grouped || job->weight->kind == FT_LINEAR_INT8;
    job->x = x;
    if (!ft_prepared_bytes(job)) return;
    const int64_t words = job->rows * job->x_steps, scales = job->rows * job->groups;
    uint32_t *out = memory;
    rows_t q = {
        .job = job, .x = x, .x_dtype = x_dtype, .out = out,
        .bytes = quantised ? (int8_t *)(out + words) : NULL,
        .scale = (float *)(out + 2 * words), .offset = (int32_t *)(out + 2 * words) + scales,
        .fine = ft_is_fine(job->weight), .halves = job->weight->kind == FT_LINEAR_INT6_K,
        .words = ft_has_words(job->weight),
        .group_size = grouped ? FT_GROUP : job->x_steps * 4 >> ft_has_words(job->weight),
        /* -1 gives the sum itself, which a minimum or a zero multiplies. */
        .weight_offset = value_offset(job->weight->kind) ? value_offset(job->weight->kind) : -1,
    };
    ft_parallel(prepare_tiles, &q, job->tiles, 1);
    job->x = (const char *)q.out;
    job->x_scale = q.scale;
    job->x_offset = q.offset;
}

int ft_prepare_rows(ft_linear_job *job, const void *x, int x_dtype) {
    const size_t bytes = ft_prepared_bytes(job);
    void *memory = bytes ? ft_scratch(FT_SCRATCH_LINEAR, bytes) : NULL;
    if (bytes && !memory) return -1;
    ft_prepare_rows_in(job, x, x_dtype, memory);
    return 0;
}
