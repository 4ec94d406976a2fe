/* Latent attention (arXiv 2405.04434), absorbed: a position keeps one row for all heads. */
#ifndef FT_LATENT_H
#define FT_LATENT_H

#include "decoder/decoder.h"
#include "linear/linear.h"

/* A layer. Its `first` makes of a row what queries are made of (q_width items), the latent, and the key
 * that is to be turned; its `second` takes the values of all heads. */
typedef struct {
    const ft_norm *q_norm, *kv_norm;     /* the first NULL: `first` makes the queries themselves */
    const ft_linear_weight *q_up;        /* or NULL */
    const ft_linear_weight *const *keys; /* [num_heads] of [rank, nope] */
    const ft_linear_weight *const *values; /* [num_heads] of [value dimensions, rank] */
    int64_t q_width;
} ft_latent;

/* Rows x [num_rows, hidden] to what `second` takes, in this thread's scratch memory until the next
 * call; writes the keys. Returns NULL when there is no memory. */
const char *ft_run_latent(const ft_latent *latent, const ft_linear_weight *first, const void *x,
                          const ft_part *part, const ft_attend_plan *plan, int64_t kv_layer,
                          const ft_turn *turn, const ft_rule *rule);

#endif
