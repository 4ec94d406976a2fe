/* Choosing tokens from logits. */
#ifndef FT_SAMPLE_H
#define FT_SAMPLE_H

#include "common/common.h"

enum { FT_NOT_FINITE = -1, FT_ALL_BANNED = -2 }; /* errors in place of a token */

/* A walk down a draft tree; see sample.c. */
typedef struct ft_walk ft_walk;

/* Find the `num_best` best tokens, at most 8, of the first row of each walk, and their scores.
 * Returns 0, or -1 when there is no memory. */
FT_EXPORT int ft_best(const float *logits, int64_t vocab, const int64_t *hashes,
                      const ft_walk *walks, int64_t num_walks, const int64_t *drafts,
                      int64_t num_best, int64_t *tokens, float *scores, int64_t *counts);

#endif
