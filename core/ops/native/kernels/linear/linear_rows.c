/* The activations of a linear layer: widened, quantised, and interleaved for the tiles.
 *
 * A tile reads one 32-bit group of each of its rows at a time, so these lie side by side: rows that
 * are a power of two apart would fall into the same cache set.
 */
#include "linear_groups.h"

typedef struct {
    ft_linear_job *job;
    const void *x;
    int x_dtype;
    int64_t group_size; /* that shares a scale */
    int32_t weight_offset;
    int halves;     /* two offsets of each group: those of its halves */
    int fine;       /* numbers of 16 bits: of each group the low bytes, then the high ones, or */
    int words;      /* pairs of such numbers; of int8 weights these hold bytes */
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

/* A group as bytes; returns their sum. */
FT_INLINE int32_t store_bytes(const rows_t *q, int64_t row, int64_t begin, vf factor, int8_t *out) {
    int32_t sum = 0;
    for (int64_t k = 0; k < q->group_size; k += FT_LANES)
        vf_store_int8(out + k, vf_mul(load_activation(q, row, begin + k), factor));
    for (int64_t k = 0; k < q->group_size; k++) sum += out[k];
    return sum;
}

/* Numbers from -32639 to 32639 as 16-bit words: of each four the first and the third, then the others. */
FT_INLINE void store_words(const int32_t *numbers, int64_t count, int8_t *out) {
    for (int64_t k = 0; k < count; k += 4) {
        const int16_t words[4] = {(int16_t)numbers[k], (int16_t)numbers[k + 2],
                                  (int16_t)numbers[k + 1], (int16_t)numbers[k + 3]};
        memcpy(out + 2 * k, words, sizeof words);
    }
}

/* A group of such numbers, each 256 * high + low, both signed bytes: the low ones, then the high ones. */
FT_INLINE void store_split(const int32_t *numbers, int8_t *out) {
    for (int k = 0; k < FT_GROUP; k++) {
        out[k] = (int8_t)numbers[k];
        out[FT_GROUP + k] = (int8_t)((numbers[k] + 128) >> 8);
    }
}

FT_INLINE int32_t add_up(const int32_t *numbers) {
    int32_t sum = 0;
    for (int k = 0; k < FT_GROUP / 2; k++) sum += numbers[k];
    return sum;
}

/* A group of rounded numbers to the bytes at `out`, and their sum, or those of its halves. */
FT_INLINE void store_group(const rows_t *q, int64_t row, int64_t begin, vf factor, int8_t *out,
                           int32_t *sums) {
    sums[0] = sums[1] = 0;
    if (!q->fine && !q->words) {
        sums[0] = store_bytes(q, row, begin, factor, out);
        return;
    }
    for (int64_t first = 0; first < q->group_size; first += FT_GROUP, out += 2 * FT_GROUP) {
        const int64_t count = ft_min(FT_GROUP, q->group_size - first);
        float rounded[FT_GROUP] = {0};
        int32_t numbers[FT_GROUP];
        for (int64_t k = 0; k < count; k += FT_LANES) {
            vf x = load_activation(q, row, begin + first + k);
            vf_store(rounded + k, vf_round(vf_mul(x, factor)));
        }
        for (int k = 0; k < FT_GROUP; k++) numbers[k] = (int32_t)rounded[k];
        if (q->words) store_words(numbers, count, out);
        else store_split(numbers, out);
        sums[0] += add_up(numbers);
        sums[q->halves] += add_up(numbers + FT_GROUP / 2);
    }
}

/* A group as signed bytes at `out`, its scale and offset at index `at`. */
static void quantise_group(const rows_t *q, int64_t row, int64_t begin, int8_t *out, int64_t at) {
    const int64_t end = begin + q->group_size;
    const float most = q->fine ? 32639.0f : 127.0f; /* 256 * 127 + 127 */
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
    const int is_sound = top > 0.0f && nothing == 0.0f;
    int32_t sums[2];
    store_group(q, row, begin, vf_set1(is_sound ? most / top : 0.0f), out, sums);
    q->scale[at] = top / most + nothing;
    for (int half = 0; half <= q->halves; half++)
        q->offset[(at << q->halves) + half] = -q->weight_offset * sums[half];
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
    for (int64_t g = 0; g < job->groups; g++, out += q->group_size << q->fine)
        quantise_group(q, row, g * q->group_size, out, scales + g * count);
    return (const char *)(q->bytes + row * job->x_steps * 4);
}

/* bf16 as float32, every `stride`-th word of `out`; a zero behind an odd number of them. */
static void widen_row(const rows_t *q, int64_t row, uint32_t *out, int64_t stride) {
    const int64_t width = q->job->weight->in_features;
    const bf16 *x = (const bf16 *)q->x + row * width;
    for (int64_t k = 0; k < width; k++) out[k * stride] = (uint32_t)x[k] << 16;
    if (width % 2) out[width * stride] = 0;
}

/* Tile by tile: widen or quantise where asked for, and interleave the rows. */
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
                out[whole * count] = *(const bf16 *)(groups + 4 * whole); /* and a zero */
            }
            for (int64_t s = 0; s < whole; s++) memcpy(out + s * count, groups + 4 * s, 4);
        }
    }
}

size_t ft_prepared_bytes(const ft_linear_job *job) {
    const ft_linear_weight *weight = job->weight;
    const int as_it_is = weight->kind == FT_LINEAR_FLOAT32 ||
                         (weight->kind == FT_LINEAR_BFLOAT16 && weight->in_features % 2 == 0);
    if (job->rows == 1 && as_it_is) return 0;
    return (size_t)(job->rows * (8 * job->x_steps + 12 * job->groups)); /* two offsets of a group */
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
        /* Without an offset the sum itself is wanted: a minimum or a zero multiplies it. */
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
