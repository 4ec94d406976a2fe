/* What the kernels of a decoder's step are told of it. All pointers are lent for the call.
 *
 * "elements" counts items of the dtype; activations, KV and norm weights have the model's dtype.
 */
#ifndef FT_DECODER_H
#define FT_DECODER_H

#include "common.h"

/* A ragged batch: rows of segments, one segment after the other. A segment's rows are at
 * positions start, start + 1, ... of its own sequence. */
typedef struct {
    int64_t num_rows;
    int64_t num_segments;
    int64_t max_pages;
    const int64_t *starts;     /* [num_segments] */
    const int64_t *lens;       /* [num_segments] rows, 1 or more; together num_rows */
    const int64_t *first_rows; /* [num_segments] */
    const int64_t *page_table; /* [num_segments, max_pages] page ids by position */
    const int64_t *slots;      /* [num_rows] page id * page_size + offset, where KV is written */
    const float *cos, *sin;    /* [num_rows, head_dim / 2] */
} ft_batch;

/* The KV pool [num_pages, num_layers, 2, num_kv_heads] of blocks [page_size, head_dim]: of the
 * model's dtype, or of int8 and then an fp32 scale for each of the page_size vectors. */
typedef struct {
    void *data;
    int64_t num_layers;
    int64_t page_size;
    int64_t block_bytes;
    int64_t scales_at; /* bytes before a block's scales; 0: there are none */
} ft_kv;

/* A row of QKV: queries, keys, values, a head after the other. */
typedef struct {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t dtype;
    float scale; /* of the scores; queries are multiplied by it before they are rounded */
} ft_heads;

/* Address of a page's keys (which = 0) or values (1) of one KV head. */
FT_INLINE char *ft_page(const ft_kv *kv, const ft_heads *heads, int64_t page, int64_t layer,
                        int64_t which, int64_t head) {
    int64_t index = (page * kv->num_layers + layer) * 2 + which;
    return (char *)kv->data + (index * heads->num_kv_heads + head) * kv->block_bytes;
}

/* [rows, width] x, residual -> the sum into residual, its norm into out. `residual` may be NULL:
 * then the norm of x. Sum in fp32 over sixteen lanes, then over these. */
void ft_norm_rows(const void *x, void *residual, const void *weight, void *out, int64_t rows,
                  int64_t width, float eps, int dtype);

/* [rows, 2 * width] gate, up -> silu(gate) * up, [rows, width]. */
void ft_silu_rows(const void *gate_up, void *out, int64_t rows, int64_t width, int dtype);

/* Norm and rotate queries and keys, write keys and values to the pool, queries to q.
 * qkv [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]; q [num_rows, num_heads * head_dim];
 * norm [num_heads + num_kv_heads, head_dim] fp32 or NULL. */
void ft_rope_rows(const void *qkv, void *q, const ft_batch *batch, const ft_kv *kv,
                  const ft_heads *heads, int64_t layer, const float *norm, float eps);

/* The tasks of a step's attention, the same for all layers; see attention_plan.h. */
typedef struct ft_attend_part ft_attend_part;
typedef struct {
    const ft_attend_part *parts;
    const int64_t *firsts; /* [num_tasks + 1] first part of each task */
    int64_t num_tasks;     /* of a KV head */
    int64_t grain;         /* tasks that are worth another thread */
} ft_attend_plan;

/* Heads of at most 256 dimensions, at most 64 query heads per KV head. The plan lies in this
 * thread's scratch memory, until the next one. Returns -1 when there is no memory, else 0. */
int ft_plan_attention(const ft_batch *batch, const ft_kv *kv, const ft_heads *heads,
                      ft_attend_plan *plan);

/* Causal attention over the pages: q -> out, both [num_rows, num_heads * head_dim]. With a window
 * above 0 a row sees itself and the window - 1 positions before it. `plan` is of this batch.
 * Returns -1 when there is no memory, else 0. */
int ft_attend(const void *q, void *out, const ft_attend_plan *plan, const ft_batch *batch,
              const ft_kv *kv, const ft_heads *heads, int64_t layer, int64_t window);

#endif
