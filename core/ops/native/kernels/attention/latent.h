/* Latent attention (arXiv 2405.04434) with absorbed matrices: a position keeps one row for all
 * heads. */
#ifndef FT_LATENT_H
#define FT_LATENT_H

#include "decoder/decoder.h"
#include "linear/linear.h"

/* A layer of latent attention. From a row, the layer's `first` computes the input of the queries
 * (q_width items), the latent, and the part of the key that RoPE rotates. Its `second` reads the
 * values of all heads. */
typedef struct {
    const ft_norm *q_norm, *kv_norm;     /* q_norm is NULL where `first` computes the queries */
    const ft_linear_weight *q_up;        /* NULL where `first` computes the queries */
    const ft_linear_weight *const *keys; /* [num_heads] of [rank, nope] */
    const ft_linear_weight *const *values; /* [num_heads] of [value dimensions, rank] */
    int64_t q_width;
} ft_latent;

/* Compute the input of `second` from x [num_rows, hidden], and write the keys to the pool. Returns
 * memory of this thread that is valid until its next call, or NULL when there is no memory. */
const char *ft_run_latent(const ft_latent *latent, const ft_linear_weight *first, const void *x,
                          const ft_part *part, const ft_attend_plan *plan, int64_t kv_layer,
                          const ft_rope *rope, const ft_rule *rule);

#endif
