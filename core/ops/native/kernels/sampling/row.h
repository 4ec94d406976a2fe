/* A row of logits on its way to a token: what edit.c, cut.c and sample.c share.
 *
 * Plain loops over blocks of ids, which the compiler turns into vectors: every element is rounded
 * on its own and sums are of integers, so the outcome is the same in every variant.
 * verifier.py, logits_processors.py, top_k_top_p.py and gumbel.py of core/sampling define what is computed.
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

/* One request's parameters: the record of core/sampling/encoded.py, field by field. Ids are inside the
 * vocabulary, but for those of words that are only compared. */
typedef struct {
    uint64_t noise_start; /* what the noise of all positions starts from */
    int64_t kind;         /* FT_GREEDY: the best token, without noise */
    double temperature;
    double min_p_logit; /* least of logits over temperature whose best is 0; -inf: off */
    int64_t top_k;      /* 0: off */
    double top_p;       /* 1: off */
    int64_t prompt_len;
    int64_t edited_until; /* output positions below it are edited by what follows */
    int64_t min_tokens;
    float repetition_penalty; /* 1: off */
    float frequency_penalty, presence_penalty;
    ft_ids biased;
    ft_ids allowed; /* rising; all are allowed where `at` is NULL */
    ft_ids stops;   /* banned below min_tokens, where there is no mask */
    ft_ids word_ids; /* bad words, one after the other, and the length of each */
    ft_ids word_lens;
    const float *bias; /* [biased.count] */
} ft_sampling;

enum { FT_GREEDY, FT_SAMPLED }; /* kinds; those above leave some tokens out */

/* The tokens before a place: the request's own, then those of a draft. */
typedef struct {
    const int64_t *tokens;
    int64_t num_tokens;
    const int64_t *tail;
    int64_t tail_len;
    const uint8_t *mask; /* [vocab] 1: constraint and min_tokens allow it; NULL: none */
} ft_path;

FT_INLINE int64_t ft_path_len(const ft_path *path) { return path->num_tokens + path->tail_len; }
FT_INLINE int64_t ft_path_at(const ft_path *path, int64_t index) {
    int64_t in_tail = index - path->num_tokens;
    return in_tail < 0 ? path->tokens[index] : path->tail[in_tail];
}

/* Whether `ft_edit` has anything to do. */
int ft_is_edited(const ft_sampling *sampling, const ft_path *path);

/* All that comes before the temperature, in place. `counts` [vocab] is working space. */
void ft_edit(float *values, int64_t vocab, const ft_sampling *sampling, const ft_path *path,
             int32_t *counts);

/* A row of sound logits on its way to a token. */
typedef struct {
    const float *values;
    int64_t vocab;
    float top; /* the greatest, finite */
    float temperature;
} ft_row;

/* What cuts leave: ids whose key is below `key`, and the first `ties` of those that have it.
 * A key is the magnitude of a scaled value as an integer: the better, the smaller. */
typedef struct {
    uint32_t key;
    int64_t ties;
} ft_kept;

#define FT_ALL_TIES INT64_MAX

/* Working space of one thread for one row. */
typedef struct {
    uint32_t *keys; /* of whole blocks of ids, and one block more */
    float *masses;  /* likewise */
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

/* Logits over the temperature, the best 0, of ids [at, at + FT_BLOCK); -inf beyond the last. */
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
