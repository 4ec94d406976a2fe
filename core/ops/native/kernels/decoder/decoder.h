/* The arguments of the kernels of a decoder's step. All pointers are lent for the call.
 *
 * "elements" counts items of the dtype; activations, KV and norm weights have the model's dtype.
 */
#ifndef FT_DECODER_H
#define FT_DECODER_H

#include "common/common.h"

typedef struct ft_states ft_states; /* of state.h */

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
    const int64_t *tail_from;  /* [num_segments] from this position on, slots are in the tail */
    const int64_t *first_tails; /* [num_segments] where in `tails` a segment's begin */
    const int64_t *tails;       /* slots by position */
    const int64_t *slots;      /* [num_rows] page id * page_size + offset, where KV is written */
    const float *cos, *sin;    /* [tables, num_rows, turned dimensions / 2] */
    const ft_states *states;   /* of models with recurrent layers, or NULL */
    const int64_t *reaches;    /* [num_rows] the first position that a row does not see, never falling
                                * in a segment, where layers are mutual; NULL: that behind its own */
} ft_batch;

/* A part of the KV pool, [num_layers, 2, num_kv_heads] of a page of blocks [page_size, head_dim],
 * or without the 2 where values are items of the keys: of the model's dtype, or as kv_codec.h stores
 * them, and then an fp32 scale for each of the page_size vectors. */
typedef struct {
    void *data;
    int64_t page_blocks; /* from a page to the next */
    int64_t page_size;
    int64_t block_bytes;
    int64_t scales_at; /* bytes before a block's scales; 0: there are none */
    int64_t codec;     /* kv_codec.h */
} ft_kv;

/* A row of QKV: queries, keys, values, a head after the other. With a rank (latent attention) there
 * are no values: the first `rank` items of a key are its value, and the others alone are turned. */
typedef struct {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t dtype;
    float scale; /* of the scores; queries are multiplied by it before they are rounded */
    float value_eps; /* of an RMS norm of each value, without a weight; below 0: there is none */
    int64_t rank;    /* 0: values are their own */
} ft_heads;

/* Items of a value, and of the end of a head that is turned. */
FT_INLINE int64_t ft_value_dim(const ft_heads *heads) {
    return heads->rank ? heads->rank : heads->head_dim;
}
FT_INLINE int64_t ft_turned_dim(const ft_heads *heads) { return heads->head_dim - heads->rank; }

enum {
    FT_MAX_DIM = 576, /* of a head */
    FT_MAX_PARTS = 4,
};

/* Layers with heads alike: their part of the pool, and the batch with the tables that turn them. */
typedef struct {
    const ft_batch *batch;
    const ft_kv *kv;
    const ft_heads *heads;
} ft_part;

/* Address of a page's keys (which = 0) or values (1) of one KV head; of latents there are keys alone. */
FT_INLINE char *ft_page(const ft_kv *kv, const ft_heads *heads, int64_t page, int64_t layer,
                        int64_t which, int64_t head) {
    int64_t block = heads->rank ? layer : layer * 2 + which;
    int64_t index = page * kv->page_blocks + block * heads->num_kv_heads + head;
    return (char *)kv->data + index * kv->block_bytes;
}

/* RMS norm, or layer norm: then the mean is subtracted first. */
typedef struct {
    const void *weight; /* [width] */
    const float *bias;  /* [width], of a layer norm, or NULL */
    float eps;
    int32_t weight_dtype; /* that of the rows, or fp32 */
    int32_t is_layer;
} ft_norm;

/* [rows, width] x, residual -> the sum times `factor` into residual, its norm into out. `residual`
 * may be NULL: then the norm of x. Sum in fp32 over sixteen lanes, then over these. */
void ft_norm_rows(const void *x, void *residual, float factor, const ft_norm *norm, void *out,
                  int64_t rows, int64_t width, int dtype);

/* [rows, width] (x + residual) * factor, into residual; the sum is rounded before. */
void ft_add_rows(const void *x, void *residual, float factor, int64_t rows, int64_t width,
                 int dtype);

/* What stands between the two matrices of an MLP. */
enum { FT_SILU = 0, FT_GELU_TANH = 1, FT_CLAMPED_SWIGLU = 2, FT_RELU2 = 3 };
typedef struct {
    int32_t kind;
    int32_t gated; /* whether a row is a gate and then a factor */
    float limit;   /* of the clamped kind, which is always gated */
} ft_activation;

/* [rows, 2 * width] gate, factor -> act(gate) * factor, [rows, width]; not gated: x -> act(x). */
void ft_activate_rows(const void *x, void *out, int64_t rows, int64_t width,
                      const ft_activation *activation, int dtype);

/* x [rows, width] times the sigmoid of a gate, whose rows are `stride` items apart; rounded once. */
void ft_gate_rows(void *x, const void *gate, int64_t stride, int64_t rows, int64_t width, int dtype);

/* How a layer turns queries and keys. */
typedef struct {
    const float *norm; /* [num_heads + num_kv_heads, head_dim], or NULL */
    float eps;
    int32_t is_whole;         /* whether the mean is over all heads of a kind together */
    int64_t q_table, k_table; /* of the batch's cos and sin */
    int32_t writes;           /* whether rows have keys and values; else they are queries alone */
    int32_t is_behind;        /* whether the norm is behind the turn; then of each head alone */
    int64_t gate;             /* items of a row behind its values, which are left alone */
} ft_turn;

/* Norm and rotate queries and keys, write keys and values to the pool, queries to q.
 * qkv [num_rows, (num_heads + 2 * num_kv_heads) * head_dim + gate]; q [num_rows, num_heads *
 * head_dim]. With a rank qkv is [num_rows, (num_heads + 1) * head_dim], without a norm. */
void ft_rope_rows(const void *qkv, void *q, const ft_batch *batch, const ft_kv *kv,
                  const ft_heads *heads, int64_t layer, const ft_turn *turn);

/* Which keys a row sees, and what becomes of its scores. */
typedef struct {
    int64_t window;     /* above 0: a row sees itself and the window - 1 positions before it */
    const float *sinks; /* [num_heads] scores of a key without a value, or NULL */
    float cap;          /* above 0: scores become cap * tanh(scores / cap) */
    int32_t is_mutual;  /* whether rows see up to the batch's `reaches` */
} ft_rule;

/* The tasks of a step's attention, the same for all layers; see attention_plan.h. */
typedef struct ft_attend_part ft_attend_part;
typedef struct {
    const ft_attend_part *parts;
    const int64_t *firsts; /* [num_tasks + 1] first part of each task */
    int64_t num_tasks;     /* of a share of a KV head's query heads */
    int64_t num_shares;    /* of a KV head */
    int64_t grain;         /* tasks that are worth another thread */
} ft_attend_plan;

/* Heads of at most FT_MAX_DIM dimensions. A plan for each of
 * `count` parts, in this thread's scratch memory until the next call. Returns -1 when there is no
 * memory, else 0. */
int ft_plan_attention(const ft_part *parts, int64_t count, ft_attend_plan *plans);

/* Causal attention over the pages: q [num_rows, num_heads * head_dim] -> out [num_rows, num_heads *
 * value dimensions]. `plan` is of this batch. Returns -1 when there is no memory, else 0. */
int ft_attend(const void *q, void *out, const ft_attend_plan *plan, const ft_batch *batch,
              const ft_kv *kv, const ft_heads *heads, int64_t layer, const ft_rule *rule);

#endif
