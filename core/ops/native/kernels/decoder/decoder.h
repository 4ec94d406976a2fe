/* The arguments of the kernels of a decoder's step. The caller owns the memory of all pointers.
 *
 * "elements" counts items of the dtype; activations, KV and norm weights have the model's dtype.
 */
#ifndef FT_DECODER_H
#define FT_DECODER_H

#include "common/common.h"

typedef struct ft_states ft_states; /* defined in state.h */

/* A ragged batch: the rows of all segments, one segment after the other. The rows of a segment are
 * at positions start, start + 1, ... of its own sequence. */
typedef struct {
    int64_t num_rows;
    int64_t num_segments;
    int64_t max_pages;
    const int64_t *starts;     /* [num_segments] */
    const int64_t *lens;       /* [num_segments] rows of each, 1 or more; their sum is num_rows */
    const int64_t *first_rows; /* [num_segments] */
    const int64_t *page_table; /* [num_segments, max_pages] page ids by position */
    const int64_t *tail_from;  /* [num_segments] keys from this position on have slots in `tails` */
    const int64_t *first_tails; /* [num_segments] index in `tails` of a segment's first slot */
    const int64_t *tails;       /* slots by position */
    const int64_t *slots;      /* [num_rows] page id * page_size + offset, where KV is written */
    const float *cos, *sin;    /* [tables, num_rows, rotated dimensions / 2] */
    const ft_states *states;   /* NULL without recurrent layers */
    const int64_t *reaches;    /* [num_rows] for mutual layers: the first position that a row does
                                * not see, never falling in a segment; NULL: its position + 1 */
} ft_batch;

/* A part of the KV pool. A page is [num_layers, 2, num_kv_heads] blocks [page_size, head_dim],
 * without the 2 if values are items of the keys. Blocks hold items of the model's dtype, or a
 * format of kv_codec.h, which may add an fp32 scale for each of the page_size vectors. */
typedef struct {
    void *data;
    int64_t page_blocks; /* blocks from one page to the next */
    int64_t page_size;   /* tokens */
    int64_t block_bytes;
    int64_t scales_at; /* bytes before a block's scales; 0: no scales */
    int64_t codec;     /* a code of kv_codec.h */
} ft_kv;

/* The heads of a row of QKV: queries, then keys, then values. With a rank (latent attention)
 * there are no values: the first `rank` items of a key are its value, and RoPE rotates only the
 * others. */
typedef struct {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t dtype;
    float scale; /* scale of the scores; queries are multiplied by it before they are rounded */
    float value_eps; /* epsilon of an RMS norm of each value, without a weight; below 0: no norm */
    int64_t rank;    /* 0: values are separate from keys */
} ft_heads;

/* Items of a value, and number of items at the end of a head that RoPE rotates. */
FT_INLINE int64_t ft_value_dim(const ft_heads *heads) {
    return heads->rank ? heads->rank : heads->head_dim;
}
FT_INLINE int64_t ft_rope_dim(const ft_heads *heads) { return heads->head_dim - heads->rank; }

enum {
    FT_MAX_DIM = 576, /* most items of a head */
    FT_MAX_PARTS = 4,
};

/* Layers whose heads have the same shape: the batch with their RoPE tables, and their part of the
 * pool. */
typedef struct {
    const ft_batch *batch;
    const ft_kv *kv;
    const ft_heads *heads;
} ft_part;

/* Address of a page's keys (which = 0) or values (1) of one KV head; latents have only keys. */
FT_INLINE char *ft_page(const ft_kv *kv, const ft_heads *heads, int64_t page, int64_t layer,
                        int64_t which, int64_t head) {
    int64_t block = heads->rank ? layer : layer * 2 + which;
    int64_t index = page * kv->page_blocks + block * heads->num_kv_heads + head;
    return (char *)kv->data + index * kv->block_bytes;
}

/* An RMS norm, or a layer norm, which first subtracts the mean. */
typedef struct {
    const void *weight; /* [width] */
    const float *bias;  /* [width] for a layer norm, or NULL */
    float eps;
    int32_t weight_dtype; /* the dtype of the rows, or fp32 */
    int32_t is_layer;     /* whether it is a layer norm */
} ft_norm;

/* Write (x + residual) * factor to `residual` and its norm to `out`, all [rows, width]. With
 * `residual` NULL, write the norm of x. Sums are fp32: over sixteen lanes, then across the
 * lanes. */
void ft_norm_rows(const void *x, void *residual, float factor, const ft_norm *norm, void *out,
                  int64_t rows, int64_t width, int dtype);

/* Write (x + residual) * factor to `residual`, [rows, width]; x + residual is rounded first. */
void ft_add_rows(const void *x, void *residual, float factor, int64_t rows, int64_t width,
                 int dtype);

/* The activation between the two matrices of an MLP. */
enum { FT_SILU = 0, FT_GELU_TANH = 1, FT_CLAMPED_SWIGLU = 2, FT_RELU2 = 3 };
typedef struct {
    int32_t kind;
    int32_t gated; /* whether each row holds the values of a gate before its own */
    float limit;   /* bound of the clamped kind, which is always gated */
} ft_activation;

/* Gated: x [rows, 2 * width], gate then factor, to act(gate) * factor, [rows, width]. Else x [rows,
 * width] to act(x). */
void ft_activate_rows(const void *x, void *out, int64_t rows, int64_t width,
                      const ft_activation *activation, int dtype);

/* Multiply x [rows, width] by the sigmoid of a gate, whose rows are `stride` items apart; rounded
 * once. */
void ft_gate_rows(void *x, const void *gate, int64_t stride, int64_t rows, int64_t width, int dtype);

/* How a layer norms and rotates queries and keys. */
typedef struct {
    const float *norm; /* [num_heads + num_kv_heads, head_dim], or NULL */
    float eps;
    int32_t over_all_heads;   /* whether one mean is over all query heads, one over all key heads */
    int64_t q_table, k_table; /* index of the tables of cos and sin in the batch */
    int32_t writes;           /* whether rows have keys and values; else they have only queries */
    int32_t is_after_rope;    /* whether RoPE comes before the norm, which is then per head */
    int64_t gate;             /* items of a row after its values, which these kernels do not read */
} ft_rope;

/* Norm and rotate queries and keys, write keys and values to the pool and queries to q.
 * qkv [num_rows, (num_heads + 2 * num_kv_heads) * head_dim + gate]; q [num_rows, num_heads *
 * head_dim]. With a rank qkv is [num_rows, (num_heads + 1) * head_dim], without a norm. */
void ft_rope_rows(const void *qkv, void *q, const ft_batch *batch, const ft_kv *kv,
                  const ft_heads *heads, int64_t layer, const ft_rope *rope);

/* The keys that a row sees, and how its scores change. */
typedef struct {
    int64_t window;     /* above 0: a row sees itself and the window - 1 positions before it */
    const float *sinks; /* [num_heads] scores of a key without a value, or NULL */
    float cap;          /* above 0: scores become cap * tanh(scores / cap) */
    int32_t is_mutual;  /* whether rows see all keys below the batch's `reaches` */
} ft_rule;

/* The tasks of a step's attention, the same for all layers; see attention_plan.h. */
typedef struct ft_attend_part ft_attend_part;
typedef struct {
    const ft_attend_part *parts;
    const int64_t *firsts; /* [num_tasks + 1] first part of each task */
    int64_t num_tasks;     /* tasks for one share of the query heads of a KV head */
    int64_t num_shares;    /* shares of a KV head */
    int64_t grain;         /* tasks that are worth another thread */
} ft_attend_plan;

/* Make a plan for each of `count` parts, whose heads have at most FT_MAX_DIM items. Plans are in
 * this thread's scratch memory, valid until its next call. Returns -1 when there is no memory, else
 * 0. */
int ft_plan_attention(const ft_part *parts, int64_t count, ft_attend_plan *plans);

/* Causal attention over the pages: q [num_rows, num_heads * head_dim] -> out [num_rows, num_heads *
 * value dimensions]. `plan` must be made from this batch. Returns -1 when there is no memory, else
 * 0. */
int ft_attend(const void *q, void *out, const ft_attend_plan *plan, const ft_batch *batch,
              const ft_kv *kv, const ft_heads *heads, int64_t layer, const ft_rule *rule);

#endif
