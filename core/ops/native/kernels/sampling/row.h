/* A row of logits and its sampling parameters, shared by edit.c, cut.c and sample.c.
 *
 * The kernels are plain loops over blocks of ids, which the compiler vectorises. Every element is
 * rounded separately and sums are integers, so all variants have the same results. verifier.py,
 * logits_processors.py, top_k_top_p.py and gumbel.py of core/sampling define the computation.
 */
#ifndef FT_ROW_H
#define FT_ROW_H

#include "common/common.h"

#include <math.h>

enum { FT_BLOCK = 64 }; /* ids handled at once */

typedef struct {
    const int64_t *at;
    int64_t count;
} ft_ids;

/* The parameters of a request: the record of core/sampling/encoded.py, field by field. Ids are
 * inside the vocabulary, except ids of words that are only compared. */
typedef struct {
    uint64_t noise_start; /* seed of the noise of all positions */
    int64_t kind;         /* FT_GREEDY: the best token, without noise */
    double temperature;
    double min_p_logit; /* least (logit - best) / temperature; -inf: off */
    int64_t top_k;      /* 0: off */
    double top_p;       /* 1: off */
    int64_t prompt_len;
    int64_t edited_until; /* the fields below edit output positions below this */
    int64_t min_tokens;
    float repetition_penalty; /* 1: off */
    float frequency_penalty, presence_penalty;
    ft_ids biased;
    ft_ids allowed; /* ascending; `at` NULL: all tokens are allowed */
    ft_ids stops;   /* banned before min_tokens outputs, unless the path has a mask */
    ft_ids word_ids; /* bad words, one after the other */
    ft_ids word_lens; /* length of each bad word */
    const float *bias; /* [biased.count] */
} ft_sampling;

enum { FT_GREEDY, FT_SAMPLED }; /* kinds of sampling; greater numbers: with top-k, min-p or top-p */

/* The tokens before the one to choose: the request's own, then tokens of a draft. */
typedef struct {
    const int64_t *tokens;
    int64_t num_tokens;
    const int64_t *tail;
    int64_t tail_len;
    const uint8_t *mask; /* [vocab] 1: constraint and min_tokens allow a token; NULL: no mask */
} ft_path;

FT_INLINE int64_t ft_path_len(const ft_path *path) { return path->num_tokens + path->tail_len; }
FT_INLINE int64_t ft_path_at(const ft_path *path, int64_t index) {
    int64_t in_tail = index - path->num_tokens;
    return in_tail < 0 ? path->tokens[index] : path->tail[in_tail];
}

/* Whether `ft_edit` has anything to do. */
int ft_is_edited(const ft_sampling *sampling, const ft_path *path);

/* Apply all edits before the temperature, in place. `counts` [vocab] is working memory. */
void ft_edit(float *values, int64_t vocab, const ft_sampling *sampling, const ft_path *path,
             int32_t *counts);

/* A row of logits without NaN. */
typedef struct {
    const float *values;
    int64_t vocab;
    float top; /* the greatest value, which is finite */
    float temperature;
} ft_row;

/* The result of the cuts: ids whose key is below `key` stay, and the first `ties` ids with that
 * key. A key is the bit pattern of a scaled value's magnitude; a better value has a smaller key. */
typedef struct {
    uint32_t key;
    int64_t ties;
} ft_kept;

#define FT_ALL_TIES INT64_MAX

/* Working memory of one thread for one row. */
typedef struct {
    uint32_t *keys; /* [ids rounded up to whole blocks, plus one block] */
    float *masses;  /* [ids rounded up to whole blocks, plus one block] */
    int64_t *bins;  /* [FT_BINS] */
} ft_cut_space;

enum { FT_BINS = 2048 };

ft_kept ft_cut(const ft_row *row, const ft_sampling *sampling, const ft_cut_space *space);

FT_INLINE uint32_t ft_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

FT_INLINE uint32_t ft_key(float scaled) { return ft_float_bits(scaled) & 0x7fffffffu; }

/* Write (logit - best) / temperature of ids [at, at + FT_BLOCK), and -inf after the last id. */
FT_INLINE void ft_scaled_block(const ft_row *row, int64_t at, float *out) {
    const float *values = row->values + at;
    int64_t count = ft_min(FT_BLOCK, row->vocab - at);
    if (count == FT_BLOCK) {
        for (int i = 0; i < FT_BLOCK; i++) out[i] = values[i] - row->top;
    } else {
        for (int64_t i = 0; i < count; i++) out[i] = values[i] - row->top;
        for (int64_t i = count; i < FT_BLOCK; i++) out[i] = -INFINITY;
    }
    if (row->temperature != 1.0f)
        for (int i = 0; i < FT_BLOCK; i++) out[i] /= row->temperature;
}

FT_INLINE void ft_keys_block(const float *scaled, uint32_t *keys) {
    for (int i = 0; i < FT_BLOCK; i++) keys[i] = ft_key(scaled[i]);
}

/* Whether a block has a key of at most `most`. */
FT_INLINE int ft_any_within(const uint32_t *keys, uint32_t most) {
    uint32_t least = UINT32_MAX;
    for (int i = 0; i < FT_BLOCK; i++) least = keys[i] < least ? keys[i] : least;
    return least <= most;
}

#endif
