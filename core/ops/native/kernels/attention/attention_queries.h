/* Scores, weights and weighted values of queries with a block of keys and values.
 *
 * The operations of a query do not depend on the other queries. Blocks are merged by an online
 * softmax (arXiv 1805.02867); the keys of a block that a query does not see add exact zeros.
 */
#ifndef FT_ATTENTION_QUERIES_H
#define FT_ATTENTION_QUERIES_H

#include "attention_amx.h"
#include "attention_bytes.h"

/* -- scores ----------------------------------------------------------------------------------- */

/* Vectors of 16 keys, or of 16 dimensions of values, that a tile of `count` queries takes at
 * once: enough independent sums to hide the latency of an addition, and no more than fit into
 * registers. */
FT_INLINE int sixteens(const int count) {
#if defined(FT_AVX2)
    return count == 1 ? 4 : count <= 3 ? 2 : 1;
#else
    (void)count;
    return 4;
#endif
}

/* Compute scores of 16 * `subs` keys from key 16 * `from` on. */
FT_INLINE void score_wide(attend_space *space, int64_t first, int count, int64_t dim, int from,
                          const int subs) {
    ft_vec sums[TILE][SUBS];
    for (int r = 0; r < count; r++)
        for (int sub = 0; sub < subs; sub++) sums[r][sub] = v_set(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        ft_vec keys[SUBS];
        for (int sub = 0; sub < subs; sub++)
            keys[sub] = v_load((const float *)space->keys + ((from + sub) * dim + d) * 16);
        for (int r = 0; r < count; r++) {
            ft_vec query = v_set(((const float *)space->queries[first + r])[d]);
            for (int sub = 0; sub < subs; sub++)
                sums[r][sub] = v_fma(query, keys[sub], sums[r][sub]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int sub = 0; sub < subs; sub++)
            v_store(space->scores[first + r] + (from + sub) * 16, sums[r][sub]);
}

#if defined(FT_DOT_BF16) && !defined(FT_AMX)
#define FT_DOT_TILES 1 /* the instruction computes tiles of TILE queries; AMX has its own tiles */
#endif
#if defined(FT_DOT_TILES)
FT_INLINE __m512bh pairs_at(const uint32_t *p) { return (__m512bh)_mm512_load_si512(p); }
FT_INLINE __m512bh pair_of(const void *pairs, int64_t at) {
    return (__m512bh)_mm512_set1_epi32(((const int *)pairs)[at]);
}

FT_INLINE void score_pairs(attend_space *space, int64_t first, int count, int64_t words) {
    __m512 sums[TILE][SUBS];
    for (int r = 0; r < count; r++)
        for (int sub = 0; sub < SUBS; sub++) sums[r][sub] = _mm512_setzero_ps();
    for (int64_t word = 0; word < words; word++) {
        __m512bh keys[SUBS];
        for (int sub = 0; sub < SUBS; sub++)
            keys[sub] = pairs_at(space->keys + (sub * words + word) * 16);
        for (int r = 0; r < count; r++) {
            __m512bh query = pair_of(space->queries[first + r], word);
            for (int sub = 0; sub < SUBS; sub++)
                sums[r][sub] = _mm512_dpbf16_ps(sums[r][sub], query, keys[sub]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int sub = 0; sub < SUBS; sub++)
            v_store(space->scores[first + r] + sub * 16, sums[r][sub]);
}
#endif

FT_INLINE void score_tile(const attend_task *task, attend_space *space, int64_t first, int count) {
    if (is_scaled(task)) {
        for (int sub = 0; sub < SUBS; sub += 2)
            score_bytes(space, first, count, key_words(task), sub);
        return;
    }
#if defined(FT_DOT_TILES)
    if (uses_dot(task->job->heads)) {
        score_pairs(space, first, count, task->dim / 2);
        return;
    }
#endif
    const int wide = sixteens(count);
    for (int sub = 0; sub < SUBS; sub += wide)
        score_wide(space, first, count, task->dim, sub, wide);
}

/* -- softmax ---------------------------------------------------------------------------------- */

static float exp_one(float x) {
    float at[FT_WIDTH];
    v_store(at, v_exp(v_set(x)));
    return at[0];
}

static void fill_hidden(float *row, int64_t from, int64_t to, float value) {
    for (int64_t i = 0; i < from; i++) row[i] = value;
    for (int64_t i = to; i < KEYS; i++) row[i] = value;
}

/* Round weights to bf16, for products of bf16 pairs. */
FT_INLINE void round_weights(bf16 *out, const ft_vec *weights) {
#if defined(FT_DOT_BF16)
    for (int sub = 0; sub < SUBS; sub += 2) {
        __m512bh both = _mm512_cvtne2ps_pbh(weights[sub + 1], weights[sub]);
        _mm512_store_si512(out + sub * 16, (__m512i)both);
    }
#else
    for (int sub = 0; sub < SUBS; sub++) v_store_bf16(out + sub * 16, weights[sub]);
#endif
}

static void cap_scores(float *row, float cap) {
    for (int sub = 0; sub < SUBS; sub++) {
        ft_vec score = v_div(v_load(row + sub * 16), v_set(cap));
        v_store(row + sub * 16, v_mul(v_tanh(score), v_set(cap)));
    }
}

/* Turn the scores of a query into weights; the query sees keys [from, to) of the block. */
static void weigh(const attend_task *task, attend_space *space, int64_t query, int64_t from,
                  int64_t to) {
    float *row = space->scores[query];
    int all_seen = from == 0 && to == KEYS;
    if (task->job->rule->cap > 0.0f) cap_scores(row, task->job->rule->cap);
    if (!all_seen) fill_hidden(row, from, to, HIDDEN);
    ft_vec at[SUBS];
    for (int sub = 0; sub < SUBS; sub++) at[sub] = v_load(row + sub * 16);
    ft_vec top = v_max(v_max(at[0], at[1]), v_max(at[2], at[3]));
    float max_score = space->max_score[query];
    space->keep[query] = 1.0f;
    if (v_exceeds(top, v_set(max_score))) { /* rare after the first blocks */
        max_score = v_top(top);
        space->keep[query] = exp_one(space->max_score[query] - max_score);
        space->max_score[query] = max_score;
    }
    for (int sub = 0; sub < SUBS; sub++) at[sub] = v_exp(v_sub(at[sub], v_set(max_score)));
    if (!all_seen) {
        for (int sub = 0; sub < SUBS; sub++) v_store(row + sub * 16, at[sub]);
        fill_hidden(row, from, to, 0.0f);
        for (int sub = 0; sub < SUBS; sub++) at[sub] = v_load(row + sub * 16);
    }
    if (is_scaled(task))
        pack_weights(space, query, at);
    else if (uses_dot(task->job->heads))
        round_weights(space->weights[query], at);
    else
        for (int sub = 0; sub < SUBS; sub++) v_store(row + sub * 16, at[sub]);
    float *sums = space->exp_sums[query];
    ft_vec sum = v_add(v_add(at[0], at[1]), v_add(at[2], at[3]));
    v_store(sums, v_fma(v_load(sums), v_set(space->keep[query]), sum));
}

/* Weigh the keys of the block at `lo` that the query sees: below its reach and in its window. */
static void weigh_seen(const attend_task *task, attend_space *space, int64_t query, int64_t lo) {
    int64_t position = space->positions[query], window = task->job->rule->window;
    int64_t to = ft_min(KEYS, ft_max(0, space->reaches[query] - lo));
    int64_t from = window > 0 ? ft_min(KEYS, ft_max(0, position + 1 - window - lo)) : 0;
    weigh(task, space, query, from, ft_max(from, to));
}

/* -- weighted values -------------------------------------------------------------------------- */

/* Add weighted values of 16 * `vecs` dimensions from `d` on to `count` queries, over `stop`
 * keys. */
FT_INLINE void gather_wide(attend_space *space, int64_t first, int count, int64_t padded,
                           int64_t d, int vecs, int64_t stop) {
    ft_vec sums[TILE][4];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vecs; v++) {
            const float *from = space->acc + (first + r) * padded + d + v * 16;
            sums[r][v] = v_mul(v_load(from), v_set(space->keep[first + r]));
        }
    for (int64_t key = 0; key < stop; key++) {
        const float *row = space->value_rows[key] + d;
        ft_vec values[4];
        for (int v = 0; v < vecs; v++) values[v] = v_load(row + v * 16);
        for (int r = 0; r < count; r++) {
            ft_vec weight = v_set(space->scores[first + r][key]);
            for (int v = 0; v < vecs; v++) sums[r][v] = v_fma(weight, values[v], sums[r][v]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vecs; v++)
            v_store(space->acc + (first + r) * padded + d + v * 16, sums[r][v]);
}

#if defined(FT_DOT_TILES)
FT_INLINE void gather_pairs(attend_space *space, int64_t first, int count, int64_t padded,
                            int64_t d, int vecs, int64_t stop) {
    __m512 sums[TILE][4];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vecs; v++) {
            const float *from = space->acc + (first + r) * padded + d + v * 16;
            sums[r][v] = v_mul(v_load(from), v_set(space->keep[first + r]));
        }
    for (int64_t pair = 0; pair < stop / 2; pair++) {
        __m512bh values[4];
        for (int v = 0; v < vecs; v++)
            values[v] = pairs_at(space->values + pair * padded + d + v * 16);
        for (int r = 0; r < count; r++) {
            __m512bh weight = pair_of(space->weights[first + r], pair);
            for (int v = 0; v < vecs; v++)
                sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weight, values[v]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vecs; v++)
            v_store(space->acc + (first + r) * padded + d + v * 16, sums[r][v]);
}
#endif

FT_INLINE void gather_part(const attend_task *task, attend_space *space, int64_t first, int count,
                           int64_t d, int vecs, int64_t stop) {
#if defined(FT_DOT_TILES)
    if (uses_dot(task->job->heads)) {
        gather_pairs(space, first, count, task->padded, d, vecs, stop);
        return;
    }
#endif
    gather_wide(space, first, count, task->padded, d, vecs, stop);
}

FT_INLINE void gather_tile(const attend_task *task, attend_space *space, int64_t first, int count,
                           int64_t stop) {
    int64_t d = 0, padded = task->padded;
    if (is_scaled(task)) {
        for (; d + 32 <= padded; d += 32) gather_bytes(space, first, count, padded, d, 2, stop);
        for (; d < padded; d += 16) gather_bytes(space, first, count, padded, d, 1, stop);
        return;
    }
    const int wide = sixteens(count);
    for (; d + wide * 16 <= padded; d += wide * 16)
        gather_part(task, space, first, count, d, wide, stop);
    for (; d < padded; d += 16) gather_part(task, space, first, count, d, 1, stop);
}

/* -- all queries of a block ------------------------------------------------------------------- */

/* Make `call` for whole tiles, then for the rest. A query's operations are the same in a tile of
 * any size. */
#define FT_TILES(first, stop, call)                           \
    for (int64_t at = (first); at < (stop); at += TILE) {     \
        switch (ft_min(TILE, (stop) - at)) {                  \
            case 1: { enum { SIZE = 1 }; call; break; }       \
            case 2: { enum { SIZE = 2 }; call; break; }       \
            case 3: { enum { SIZE = 3 }; call; break; }       \
            case 4: { enum { SIZE = 4 }; call; break; }       \
            case 5: { enum { SIZE = TILE < 5 ? TILE : 5 }; call; break; } \
            default: { enum { SIZE = TILE }; call; break; }   \
        }                                                     \
    }

static void score_all(const attend_task *task, attend_space *space, int64_t first, int64_t stop) {
#if defined(FT_AMX)
    if (uses_amx(task)) {
        score_all_amx(task, space, first, stop);
        return;
    }
#endif
    FT_TILES(first, stop, score_tile(task, space, at, SIZE));
}

static void gather_all(const attend_task *task, attend_space *space, int64_t first, int64_t stop,
                       int64_t keys) {
#if defined(FT_AMX)
    if (uses_amx(task)) {
        gather_all_amx(task, space, first, stop, keys);
        return;
    }
#endif
    FT_TILES(first, stop, gather_tile(task, space, at, SIZE, keys));
}

#endif
