/* Paged attention in place, for decode, verify and prefill rows alike.
 *
 * A task is a few rows of one segment and one KV head: all query heads of that KV head together.
 * Keys are taken 64 at a time at absolute positions and merged by an online softmax (arXiv
 * 1805.02867), so a query adds up the same numbers in the same order whatever rides beside it: a
 * block that it does not see, or sees in part, adds exact zeros where it is hidden.
 *
 * Keys are turned once per task and block so that sixteen of them lie side by side; then a score
 * is one running sum over the head's dimensions, whatever the number of queries.
 */
#include "attention_block.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* -- scores ----------------------------------------------------------------------------------- */

FT_INLINE void score_wide(attend_space *space, int64_t first, int count, int64_t dim) {
    ft_vec sums[TILE][SUBS];
    for (int r = 0; r < count; r++)
        for (int sub = 0; sub < SUBS; sub++) sums[r][sub] = v_set(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        ft_vec keys[SUBS];
        for (int sub = 0; sub < SUBS; sub++)
            keys[sub] = v_load((const float *)space->keys + (sub * dim + d) * 16);
        for (int r = 0; r < count; r++) {
            ft_vec query = v_set(((const float *)space->queries[first + r])[d]);
            for (int sub = 0; sub < SUBS; sub++)
                sums[r][sub] = v_fma(query, keys[sub], sums[r][sub]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int sub = 0; sub < SUBS; sub++)
            v_store(space->scores[first + r] + sub * 16, sums[r][sub]);
}

#if defined(FT_DOT_BF16)
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
#if defined(FT_DOT_BF16)
    if (uses_dot(task->job->heads)) {
        score_pairs(space, first, count, task->dim / 2);
        return;
    }
#endif
    score_wide(space, first, count, task->dim);
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

/* To bf16, where the products are of pairs of these. */
FT_INLINE void round_weights(bf16 *out, const ft_vec *weights) {
#if defined(FT_DOT_BF16)
    for (int sub = 0; sub < SUBS; sub += 2) {
        __m512bh both = _mm512_cvtne2ps_pbh(weights[sub + 1], weights[sub]);
        _mm512_store_si512(out + sub * 16, (__m512i)both);
    }
#else
    (void)out, (void)weights;
#endif
}

/* Scores of one query to weights, of which it sees [from, to). */
static void weigh(attend_space *space, int64_t query, int64_t from, int64_t to) {
    float *row = space->scores[query];
    int all_seen = from == 0 && to == KEYS;
    if (!all_seen) fill_hidden(row, from, to, HIDDEN);
    ft_vec at[SUBS];
    for (int sub = 0; sub < SUBS; sub++) at[sub] = v_load(row + sub * 16);
    float before = space->top[query];
    float top = v_top(v_max(v_max(at[0], at[1]), v_max(at[2], at[3])));
    top = top > before ? top : before;
    for (int sub = 0; sub < SUBS; sub++) {
        at[sub] = v_exp(v_sub(at[sub], v_set(top)));
        v_store(row + sub * 16, at[sub]);
    }
    if (!all_seen) {
        fill_hidden(row, from, to, 0.0f);
        for (int sub = 0; sub < SUBS; sub++) at[sub] = v_load(row + sub * 16);
    }
    round_weights(space->weights[query], at);
    float keep = top == before ? 1.0f : exp_one(before - top);
    space->top[query] = top;
    space->keep[query] = keep;
    float sum = v_sum(v_add(v_add(at[0], at[1]), v_add(at[2], at[3])));
    space->total[query] = space->total[query] * keep + sum;
}

/* The query's first and last visible key within the block at `lo`. */
static void weigh_seen(const attend_task *task, attend_space *space, int64_t query, int64_t lo) {
    int64_t position = task->first_position + query / task->group, window = task->job->window;
    int64_t to = ft_min(KEYS, ft_max(0, position + 1 - lo));
    int64_t from = window > 0 ? ft_min(KEYS, ft_max(0, position + 1 - window - lo)) : 0;
    weigh(space, query, from, ft_max(from, to));
}

/* -- weighted values -------------------------------------------------------------------------- */

/* `vecs` sixteens of dimensions from `d` on, of `count` queries, over `stop` keys. */
FT_INLINE void gather_wide(attend_space *space, int64_t first, int count, int64_t padded,
                           int64_t d, int vecs, int64_t stop) {
    ft_vec sums[TILE][4];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vecs; v++) {
            const float *from = space->sums + (first + r) * padded + d + v * 16;
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
            v_store(space->sums + (first + r) * padded + d + v * 16, sums[r][v]);
}

#if defined(FT_DOT_BF16)
FT_INLINE void gather_pairs(attend_space *space, int64_t first, int count, int64_t padded,
                            int64_t d, int vecs, int64_t stop) {
    __m512 sums[TILE][4];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vecs; v++) {
            const float *from = space->sums + (first + r) * padded + d + v * 16;
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
            v_store(space->sums + (first + r) * padded + d + v * 16, sums[r][v]);
}
#endif

FT_INLINE void gather_part(const attend_task *task, attend_space *space, int64_t first, int count,
                           int64_t d, int vecs, int64_t stop) {
#if defined(FT_DOT_BF16)
    if (uses_dot(task->job->heads)) {
        gather_pairs(space, first, count, task->padded, d, vecs, stop);
        return;
    }
#endif
    gather_wide(space, first, count, task->padded, d, vecs, stop);
}

FT_INLINE void gather_tile(const attend_task *task, attend_space *space, int64_t first, int count,
                           int64_t stop) {
    int64_t d = 0;
    for (; d + 64 <= task->padded; d += 64) gather_part(task, space, first, count, d, 4, stop);
    for (; d < task->padded; d += 16) gather_part(task, space, first, count, d, 1, stop);
}

/* -- a task ----------------------------------------------------------------------------------- */

/* Whole tiles, then the rest; a query's own operations are the same in a tile of any size. */
#define FT_TILES(first, stop, call)                           \
    for (int64_t at = (first); at < (stop); at += TILE) {     \
        switch (ft_min(TILE, (stop) - at)) {                  \
            case 1: { enum { SIZE = 1 }; call; break; }       \
            case 2: { enum { SIZE = 2 }; call; break; }       \
            case 3: { enum { SIZE = 3 }; call; break; }       \
            default: { enum { SIZE = TILE }; call; break; }   \
        }                                                     \
    }

static void score_all(const attend_task *task, attend_space *space, int64_t first, int64_t stop) {
    FT_TILES(first, stop, score_tile(task, space, at, SIZE));
}

static void gather_all(const attend_task *task, attend_space *space, int64_t first, int64_t stop,
                       int64_t keys) {
    FT_TILES(first, stop, gather_tile(task, space, at, SIZE, keys));
}

static void begin_task(const attend_task *task, attend_space *space) {
    const ft_heads *heads = task->job->heads;
    int64_t width = heads->num_heads * task->dim, num_queries = task->num_rows * task->group;
    int widens = heads->dtype == FT_BFLOAT16 && !uses_dot(heads);
    for (int64_t i = 0; i < num_queries; i++) {
        int64_t row = task->first_row + i / task->group;
        int64_t head = task->head * task->group + i % task->group;
        const char *query = task->job->q + (row * width + head * task->dim) * item_size(heads);
        float *wide = space->wide + i * task->dim;
        if (widens)
            for (int64_t d = 0; d < task->dim; d += FT_WIDTH)
                v_store_n(wide + d, v_get(query, d, task->dim - d, 1), task->dim - d);
        space->queries[i] = widens ? (const void *)wide : query;
        space->top[i] = HIDDEN;
        space->total[i] = 0.0f;
    }
    memset(space->sums, 0, (size_t)(num_queries * task->padded) * 4);
}

static void end_task(const attend_task *task, const attend_space *space) {
    const ft_heads *heads = task->job->heads;
    int64_t width = heads->num_heads * task->dim;
    for (int64_t i = 0; i < task->num_rows * task->group; i++) {
        int64_t row = task->first_row + i / task->group;
        int64_t head = task->head * task->group + i % task->group;
        int64_t at = row * width + head * task->dim;
        for (int64_t d = 0; d < task->dim; d += FT_WIDTH) {
            ft_vec sum = v_load(space->sums + i * task->padded + d);
            v_put(task->job->out, at + d, v_div(sum, v_set(space->total[i])), task->dim - d,
                  heads->dtype == FT_BFLOAT16);
        }
    }
}

static void attend_block(const attend_task *task, attend_space *space, int64_t lo) {
    int64_t num_queries = task->num_rows * task->group, count = count_keys(task, lo);
    /* Rows before the block see none of it. */
    int64_t first = ft_max(0, lo - task->first_position) * task->group;
    const char **rows = space->key_rows[lo / KEYS % 2], **next = space->key_rows[1 - lo / KEYS % 2];
    load_keys(task, space, rows, count);
    score_all(task, space, first, num_queries);
    for (int64_t i = first; i < num_queries; i++) weigh_seen(task, space, i, lo);
    find_keys(task, next, lo + KEYS);
    load_values(task, space, rows, next, count);
    gather_all(task, space, first, num_queries, ft_ceil_div(count, 16) * 16);
}

static void attend_one(const attend_task *task, attend_space *space) {
    int64_t window = task->job->window, stop = task->first_position + task->num_rows;
    int64_t seen = window > 0 ? ft_max(0, task->first_position + 1 - window) : 0;
    int64_t lo = seen / KEYS * KEYS;
    begin_task(task, space);
    find_keys(task, space->key_rows[lo / KEYS % 2], lo);
    for (; lo < stop; lo += KEYS) attend_block(task, space, lo);
    end_task(task, space);
}

/* Task `index` is a KV head of the index / num_kv_heads-th piece of the segments' rows. */
static attend_task find_task(const attend_job *job, int64_t index) {
    const ft_batch *batch = job->batch;
    const ft_heads *heads = job->heads;
    int64_t piece = index / heads->num_kv_heads, segment = 0;
    for (;; segment++) {
        int64_t pieces = ft_ceil_div(batch->lens[segment], job->rows_per_task);
        if (piece < pieces) break;
        piece -= pieces;
    }
    int64_t skipped = piece * job->rows_per_task;
    return (attend_task){
        .job = job,
        .segment = segment,
        .head = index % heads->num_kv_heads,
        .first_row = batch->first_rows[segment] + skipped,
        .first_position = batch->starts[segment] + skipped,
        .num_rows = ft_min(job->rows_per_task, batch->lens[segment] - skipped),
        .group = heads->num_heads / heads->num_kv_heads,
        .dim = heads->head_dim,
        .padded = ft_ceil_div(heads->head_dim, 16) * 16,
    };
}

/* Numbers too small to be normal become 0, as the products of bf16 pairs have it anyway. */
static void attend_piece(void *context, int64_t begin, int64_t end) {
    attend_job *job = context;
    attend_space *space = ft_scratch(FT_SCRATCH_ATTENTION, sizeof *space);
    if (!space) {
        job->failed = 1;
        return;
    }
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
#endif
    for (int64_t index = begin; index < end; index++) {
        attend_task task = find_task(job, index);
        attend_one(&task, space);
    }
#if defined(__x86_64__)
    _mm_setcsr(before);
#endif
}

int ft_attend(const void *q, void *out, const ft_batch *batch, const ft_kv *kv,
              const ft_heads *heads, int64_t layer, int64_t window) {
    int64_t group = heads->num_heads / heads->num_kv_heads, pieces = 0, keys = 0;
    attend_job job = {q, out, batch, kv, heads, layer, window, ft_max(1, QUERIES / group), 0};
    for (int64_t i = 0; i < batch->num_segments; i++) {
        pieces += ft_ceil_div(batch->lens[i], job.rows_per_task);
        keys += batch->lens[i] * (batch->starts[i] + batch->lens[i]);
    }
    int64_t work = ft_max(1, keys * group * heads->head_dim / pieces); /* of a task */
    ft_parallel(attend_piece, &job, pieces * heads->num_kv_heads, ft_max(1, LEAST_WORK / work));
    return job.failed ? -1 : 0;
}

FT_EXPORT int ft_attention(const void *q, void *out, const ft_batch *batch, const ft_kv *kv,
                           const ft_heads *heads, int64_t layer, int64_t window) {
    return ft_attend(q, out, batch, kv, heads, layer, window);
}
