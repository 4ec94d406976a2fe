/* Low-rank updates of linear layers (LoRA, arXiv 2106.09685) for some rows of a batch. */
#ifndef FT_LORA_H
#define FT_LORA_H

#include "common/common.h"

enum { FT_LORA_CHUNK = 64 }; /* outputs that lie together in a block of B */

/* A block of B: its product with the num_ranks outputs of A from first_rank on is added to outputs
 * [first_out, first_out + num_outs). b is [chunks of FT_LORA_CHUNK outputs][num_ranks]
 * [FT_LORA_CHUNK], padded with zeros. No output is in two blocks. */
typedef struct {
    int64_t first_out, num_outs, first_rank, num_ranks;
    const void *b;
} ft_lora_block;

/* The update of one linear layer. Its weights have the dtype of the activations. */
typedef struct {
    int64_t in_features, out_features, ranks;
    const void *a; /* [ranks, in_features] */
    const ft_lora_block *blocks;
    int64_t num_blocks;
} ft_lora;

/* An update and the rows that get it. */
typedef struct {
    const ft_lora *lora;
    const int64_t *rows; /* [num_rows] of x and of y */
    int64_t num_rows;
} ft_lora_rows;

/* Add B (A x) to y [.., out_features] for the rows of each update; x is [.., in_features]. Products
 * and sums are fp32, rounded once when they are added. No row is in two updates. Returns 0, or -1
 * when there is no memory. */
FT_EXPORT int ft_add_lora(const ft_lora_rows *updates, int64_t count, const void *x, void *y,
                          int dtype);

#endif
