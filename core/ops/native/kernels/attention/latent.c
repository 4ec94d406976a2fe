/* Latent attention. The products with the matrices of all heads are one job. */
#include "latent.h"

/* The working memory of a call. Rows that the matrices of single heads read or write are in the
 * order [heads, rows]. */
typedef struct {
    char *made;     /* [rows, q_width + key], the output of `first` */
    char *q;        /* [rows, q_width], after the norm */
    char *queries;  /* [rows, num_heads * (nope + RoPE dimensions)]; unused without q_up */
    char *latent;   /* [rows, rank] */
    char *one, *other; /* [rows, (num_heads + 1) * the widest row of a head], used alternately */
    int64_t *firsts;   /* [num_heads + 1] index of each head's first row in `one` and `other` */
} latent_space;

/* Copy `count` pieces of `bytes` bytes in each row. Strides are in bytes: `from_row` and `to_row`
 * from row to row, `from_each` and `to_each` from piece to piece. */
typedef struct {
    const char *from;
    char *to;
    int64_t count, bytes;
    int64_t from_row, from_each, to_row, to_each;
} copy_job;

static void copy_piece(void *context, int64_t begin, int64_t end) {
    const copy_job *job = context;
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < job->count; i++)
            memcpy(job->to + row * job->to_row + i * job->to_each,
                   job->from + row * job->from_row + i * job->from_each, (size_t)job->bytes);
}

static void copy_columns(copy_job job, int64_t rows) {
    ft_parallel(copy_piece, &job, rows, ft_max(1, 32768 / (job.count * job.bytes)));
}

static void *take(char **memory, int64_t bytes) {
    void *taken = *memory;
    *memory += ft_ceil_div(bytes, 64) * 64;
    return taken;
}

/* Place the arrays of a call in `memory`. Returns their size in bytes, also if `memory` is NULL. */
static int64_t lay_out(const ft_latent *latent, const ft_linear_weight *first,
                       const ft_heads *heads, int64_t rows, int64_t item, char *memory,
                       latent_space *space) {
    const ft_linear_weight *up = latent->q_up;
    int64_t widest = ft_max(heads->head_dim, latent->keys[0]->in_features);
    widest = ft_max(widest, latent->values[0]->out_features);
    char *at = memory;
    space->made = take(&at, rows * first->out_features * item);
    space->q = take(&at, up ? rows * latent->q_width * item : 0);
    space->queries = take(&at, up ? rows * up->out_features * item : 0);
    space->latent = take(&at, rows * heads->rank * item);
    space->one = take(&at, rows * (heads->num_heads + 1) * widest * item);
    space->other = take(&at, rows * (heads->num_heads + 1) * widest * item);
    space->firsts = take(&at, (heads->num_heads + 1) * 8);
    return at - memory;
}

/* Compute the queries, to which the heads' key matrices are not applied yet. Returns their address,
 * or NULL when there is no memory, and sets `row_bytes`, the distance of rows. */
static const char *make_queries(const ft_latent *latent, const latent_space *space, int64_t rows,
                                int64_t *row_bytes, int dtype) {
    const int64_t item = dtype == FT_BFLOAT16 ? 2 : 4, width = latent->q_width;
    if (!latent->q_up) return space->made;
    copy_columns((copy_job){space->made, space->q, 1, width * item, *row_bytes, 0, width * item, 0},
                 rows);
    ft_norm_rows(space->q, NULL, 1.0f, latent->q_norm, space->q, rows, width, dtype);
    *row_bytes = latent->q_up->out_features * item;
    return ft_linear(latent->q_up, space->q, dtype, rows, space->queries, dtype) ? NULL
                                                                                  : space->queries;
}

/* Write the queries of all heads and the key, [rows, (num_heads + 1) * head_dim], to space->one. */
static int make_rows(const ft_latent *latent, const latent_space *space, const ft_heads *heads,
                     int64_t rows, int64_t made_row, int dtype) {
    const int64_t item = dtype == FT_BFLOAT16 ? 2 : 4, count = heads->num_heads;
    const int64_t nope = latent->keys[0]->in_features * item, rank = heads->rank * item;
    const int64_t rope = ft_rope_dim(heads) * item, key = rank + rope;
    int64_t row = made_row, out_row = (count + 1) * key;
    const char *queries = make_queries(latent, space, rows, &row, dtype);
    if (!queries) return -1;
    copy_columns((copy_job){queries, space->one, count, nope, row, nope + rope, nope, rows * nope},
                 rows);
    if (ft_linear_many(latent->keys, space->firsts, count, space->one, dtype, space->other, dtype))
        return -1;
    copy_columns((copy_job){space->other, space->one, count, rank, rank, rows * rank, out_row, key},
                 rows);
    copy_columns((copy_job){queries + nope, space->one + rank, count, rope, row, nope + rope,
                            out_row, key}, rows);
    const char *latents = space->made + latent->q_width * item;
    char *last = space->one + count * key;
    copy_columns((copy_job){latents, space->latent, 1, rank, made_row, 0, rank, 0}, rows);
    ft_norm_rows(space->latent, NULL, 1.0f, latent->kv_norm, space->latent, rows, heads->rank,
                 dtype);
    copy_columns((copy_job){space->latent, last, 1, rank, rank, 0, out_row, 0}, rows);
    copy_columns((copy_job){latents + rank, last + rank, 1, rope, made_row, 0, out_row, 0}, rows);
    return 0;
}

/* Multiply the weighted latents of each head, in space->one, by its value matrix. The result is
 * [rows, num_heads * value dimensions] in space->other. */
static int make_values(const ft_latent *latent, const latent_space *space, const ft_heads *heads,
                       int64_t rows, int dtype) {
    const int64_t item = dtype == FT_BFLOAT16 ? 2 : 4, count = heads->num_heads;
    const int64_t rank = heads->rank * item, value = latent->values[0]->out_features * item;
    copy_columns((copy_job){space->one, space->other, count, rank, count * rank, rank, rank,
                            rows * rank}, rows);
    if (ft_linear_many(latent->values, space->firsts, count, space->other, dtype, space->one, dtype))
        return -1;
    copy_columns((copy_job){space->one, space->other, count, value, value, rows * value,
                            count * value, value}, rows);
    return 0;
}

const char *ft_run_latent(const ft_latent *latent, const ft_linear_weight *first, const void *x,
                          const ft_part *part, const ft_attend_plan *plan, int64_t kv_layer,
                          const ft_rope *rope, const ft_rule *rule) {
    const ft_heads *heads = part->heads;
    const int64_t rows = part->batch->num_rows, item = heads->dtype == FT_BFLOAT16 ? 2 : 4;
    const int dtype = (int)heads->dtype;
    latent_space space;
    int64_t bytes = lay_out(latent, first, heads, rows, item, NULL, &space);
    char *memory = ft_scratch(FT_SCRATCH_LATENT, (size_t)bytes);
    if (!memory) return NULL;
    lay_out(latent, first, heads, rows, item, memory, &space);
    for (int64_t i = 0; i <= heads->num_heads; i++) space.firsts[i] = i * rows;
    ft_linear_ahead(latent->q_up);
    if (ft_linear(first, x, dtype, rows, space.made, dtype)) return NULL;
    if (make_rows(latent, &space, heads, rows, first->out_features * item, dtype)) return NULL;
    ft_rope_rows(space.one, space.other, part->batch, part->kv, heads, kv_layer, rope);
    if (ft_attend(space.other, space.one, plan, part->batch, part->kv, heads, kv_layer, rule))
        return NULL;
    return make_values(latent, &space, heads, rows, dtype) ? NULL : space.other;
}
