/* Tasks of attention, and the loading of a block of keys and values from the pages. */
#ifndef FT_ATTENTION_BLOCK_H
#define FT_ATTENTION_BLOCK_H

#include "common/amx.h"
#include "attention_plan.h"
#include "common/vector.h"
#include "decoder/kv_codec.h"

#if defined(FT_DOT_BF16) || defined(FT_AMX)
#define FT_PAIRS 1 /* bf16 numbers are kept in pairs, for instructions that multiply pairs */
#endif

enum {
    SUBS = KEYS / 16, /* groups of 16 keys in a block */
#if defined(FT_AVX2)
    TILE = 6, /* queries that share the loads of a block */
#else
    TILE = 4,
#endif
    MAX_DIM = FT_MAX_DIM,
    BYTE_QUERY = 2 * MAX_DIM, /* bytes of a query with two bytes for each item */
#if defined(FT_AMX)
    ROOM = QUERIES + AMX_ROWS, /* the last tile of queries may extend beyond the last query */
#else
    ROOM = QUERIES,
#endif
};
#define HIDDEN (-1e30f) /* finite, so that a block of hidden keys does not give NaN */

typedef struct {
    const char *q;
    char *out;
    const ft_attend_plan *plan;
    const ft_batch *batch;
    const ft_kv *kv;
    const ft_heads *heads;
    int64_t layer;
    const ft_rule *rule;
    int failed; /* set when a thread has no memory */
} attend_job;

/* A task of the plan for one KV head, or for a share of the query heads that read it. Its queries
 * are `group` query heads of each row of each part, in this order. */
typedef struct {
    const attend_job *job;
    const ft_attend_part *parts;
    int64_t num_parts;
    int64_t head;         /* the KV head */
    int64_t first, group; /* first query head, and their number */
    int64_t dim;          /* items of a query and of a key */
    int64_t value_dim, padded; /* items of a value, and these rounded up to a multiple of 16 */
} attend_task;

/* Working memory of a thread. A word is an fp32 number, a pair of bf16 or a quad of bytes. */
typedef struct {
    _Alignas(64) uint32_t keys[KEYS * MAX_DIM];   /* [SUBS][words of a head][16] */
    _Alignas(64) uint32_t values[KEYS * MAX_DIM]; /* [KEYS, or pairs or quads of keys][padded] */
    _Alignas(64) float scores[ROOM][KEYS];        /* scores, then weights */
    _Alignas(64) bf16 weights[ROOM][KEYS];        /* bf16, or high bytes, then low bytes */
    _Alignas(64) float acc[QUERIES * MAX_DIM];    /* [queries][padded] weighted values */
    _Alignas(64) float wide[ROOM * MAX_DIM];      /* [queries][dim] queries widened to fp32 */
    _Alignas(64) float exp_sums[QUERIES][16];     /* sum i has keys i, i + 16, ... of each block */
    float max_score[QUERIES], keep[QUERIES];
    /* The fields up to `bias` are used only for scaled keys and values. */
    _Alignas(64) float key_scales[KEYS], value_scales[KEYS];
    float taint;
    float query_scale[QUERIES], weight_scale[QUERIES];
    int32_t bias[QUERIES][2];
    const void *queries[QUERIES];
    int64_t rows[QUERIES], positions[QUERIES]; /* row in the batch, position in the sequence */
    int64_t reaches[QUERIES];                  /* the first position that a query does not see */
    int64_t first_query[QUERIES + 1];          /* index of each part's first query */
    const char *key_rows[2][KEYS]; /* addresses in the pages, of this block and of the next */
    const float *value_rows[KEYS];
} attend_space;

static const float zeros[MAX_DIM];

static int uses_dot(const ft_heads *heads) {
#if defined(FT_PAIRS)
    return heads->dtype == FT_BFLOAT16;
#else
    (void)heads;
    return 0;
#endif
}

static int64_t item_size(const ft_heads *heads) { return heads->dtype == FT_BFLOAT16 ? 2 : 4; }

/* Whether keys and values are integers with scales. */
static int is_scaled(const attend_task *task) { return ft_is_scaled(task->job->kv); }

/* Whether the matrix unit computes the task. */
static int uses_amx(const attend_task *task) {
#if defined(FT_AMX)
    return is_scaled(task) || uses_dot(task->job->heads);
#else
    (void)task;
    return 0;
#endif
}

/* Words of a transposed key. */
static int64_t key_words(const attend_task *task) {
    if (is_scaled(task)) return ft_ceil_div(task->dim, 4);
    return uses_dot(task->job->heads) ? task->dim / 2 : task->dim;
}

/* Words of a transposed key, padded to whole tiles where the matrix unit computes. */
static int64_t key_stride(const attend_task *task) {
    return uses_amx(task) ? ft_ceil_div(key_words(task), 16) * 16 : key_words(task);
}

/* Number of keys whose values the products read: `count`, rounded up to 16 or to a whole tile. The
 * values after `count` are zeros. */
static int64_t filled_keys(const attend_task *task, int64_t count) {
    int64_t unit = !uses_amx(task) ? 16 : is_scaled(task) ? 64 : 32;
    return ft_ceil_div(count, unit) * unit;
}

/* Bytes of a key or value in the pages. */
static int64_t vector_bytes(const attend_task *task) {
    return ft_vector_bytes(task->job->kv, task->job->heads);
}

/* -- a block of keys and values --------------------------------------------------------------- */

/* Bytes from a key to its value, and from the key's scale to the value's. */
static int64_t value_offset(const attend_task *task) {
    const ft_heads *heads = task->job->heads;
    return heads->rank ? 0 : heads->num_kv_heads * task->job->kv->block_bytes;
}

/* Prefetch a row, because the CPU cannot predict in which page the next row lies. Rows go into the
 * second-level cache, a few at a time: the first level allows too few outstanding reads (measured:
 * 0.7 times the speed). */
FT_INLINE void fetch_soon(const char *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
}

/* Consecutive keys of a segment that are adjacent in one page. */
typedef struct {
    int64_t page, offset, count;
} key_run;

/* Return the run of keys that starts at `position` and ends before `stop`. A key of the tail is a
 * run of its own because its slot may be anywhere. */
static key_run find_run(const attend_job *job, int64_t segment, int64_t position, int64_t stop) {
    const ft_batch *batch = job->batch;
    int64_t size = job->kv->page_size, tail = batch->tail_from[segment];
    if (position >= tail) {
        int64_t slot = batch->tails[batch->first_tails[segment] + position - tail];
        return (key_run){slot / size, slot % size, 1};
    }
    int64_t page = batch->page_table[segment * batch->max_pages + position / size];
    int64_t offset = position % size, count = ft_min(stop, tail) - position;
    return (key_run){page, offset, ft_min(count, size - offset)};
}

/* Write the addresses of a step's keys to `rows`, and the address of zeros for the keys after
 * them. */
static void find_keys(const attend_task *task, const ft_attend_step *step, const char **rows) {
    const attend_job *job = task->job;
    int64_t segment = task->parts[step->first].segment, lo = step->lo;
    int64_t bytes = vector_bytes(task), scales = job->kv->scales_at;
    for (int64_t i = 0; i < step->count;) {
        key_run run = find_run(job, segment, lo + i, lo + step->count);
        const char *row = ft_page(job->kv, job->heads, run.page, job->layer, 0, task->head);
        if (scales) {
            fetch_soon(row + scales + run.offset * 4, run.count * 4);
            fetch_soon(row + scales + run.offset * 4 + value_offset(task), run.count * 4);
        }
        row += run.offset * bytes;
        for (int64_t stop = i + run.count; i < stop; i++, row += bytes) rows[i] = row;
    }
    for (int64_t i = step->count; i < KEYS; i++) rows[i] = (const char *)zeros;
}

#if defined(FT_AVX2)
/* Transpose eight rows of eight words; rows of the result are 16 words apart. */
FT_INLINE void transpose_eight(__m256 *a, uint32_t *out) {
    __m256 b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_store_ps((float *)out + 16 * i, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_store_ps((float *)out + 16 * (i + 4), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}
#endif

/* Transpose sixteen rows of sixteen words to out[word][row]. */
FT_INLINE void transpose_square(const char *const *rows, int64_t byte, uint32_t *out) {
#if defined(FT_AVX512)
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + byte);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm512_store_si512(out + 16 * i, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_store_si512(out + 16 * (i + 8), _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_store_si512(out + 16 * (i + 4), _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_store_si512(out + 16 * (i + 12), _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
#elif defined(FT_AVX2)
    for (int half = 0; half < 16; half += 8)
        for (int word = 0; word < 16; word += 8) {
            __m256 a[8];
            for (int i = 0; i < 8; i++)
                a[i] = _mm256_loadu_ps((const float *)(rows[half + i] + byte) + word);
            transpose_eight(a, out + word * 16 + half);
        }
#else
    for (int i = 0; i < 16; i++) {
        uint32_t words[16];
        memcpy(words, rows[i] + byte, sizeof words);
        for (int word = 0; word < 16; word++) out[word * 16 + i] = words[word];
    }
#endif
}

/* Transpose sixteen rows of bf16 to fp32, out[dimension][row]. */
static void transpose_wide(const char *const *rows, int64_t dim, uint32_t *out) {
    int64_t d = 0;
#if defined(FT_AVX2)
    for (; d + 8 <= dim; d += 8)
        for (int half = 0; half < 16; half += 8) {
            __m256 a[8];
            for (int i = 0; i < 8; i++) a[i] = ft_widen8((const bf16 *)rows[half + i] + d);
            transpose_eight(a, out + d * 16 + half);
        }
#endif
    for (; d < dim; d++)
        for (int i = 0; i < 16; i++) out[d * 16 + i] = (uint32_t)((const bf16 *)rows[i])[d] << 16;
}

static void turn_words(const char *const *rows, int64_t words, uint32_t *out) {
    int64_t word = 0;
    for (; word + 16 <= words; word += 16) transpose_square(rows, word * 4, out + word * 16);
    for (; word < words; word++)
        for (int i = 0; i < 16; i++) memcpy(out + word * 16 + i, rows[i] + word * 4, 4);
}

/* Transpose the block's keys, and prefetch its values. Keys after `count` must be rows of zeros,
 * because pages hold arbitrary data there. */
static void load_keys(const attend_task *task, attend_space *space, const char **rows,
                      int64_t count) {
    const ft_heads *heads = task->job->heads;
    int widens = heads->dtype == FT_BFLOAT16 && !uses_dot(heads);
    int64_t words = key_words(task), stride = key_stride(task);
    for (int64_t i = 0; i < count; i += 16) {
        uint32_t *out = space->keys + i * stride;
        for (int64_t j = i; j < ft_min(i + 16, count); j++)
            if (!heads->rank) fetch_soon(rows[j] + value_offset(task), task->dim * item_size(heads));
        if (widens)
            transpose_wide(rows + i, task->dim, out);
        else
            turn_words(rows + i, words, out);
        memset(out + words * 16, 0, (size_t)(stride - words) * 16 * 4);
    }
}

#if defined(FT_PAIRS)
/* Interleave two rows of bf16 to pairs, padded with zeros to a multiple of 16. */
FT_INLINE void pair_rows(const bf16 *first, const bf16 *second, int64_t dim, uint32_t *out) {
    int64_t d = 0;
#if defined(FT_AVX512)
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (; d + 32 <= dim; d += 32) {
        __m512i a = _mm512_loadu_si512(first + d), b = _mm512_loadu_si512(second + d);
        _mm512_store_si512(out + d, _mm512_permutex2var_epi16(a, low, b));
        _mm512_store_si512(out + d + 16, _mm512_permutex2var_epi16(a, high, b));
    }
#endif
    for (; d < dim; d++) out[d] = (uint32_t)first[d] | (uint32_t)second[d] << 16;
    for (; d % 16; d++) out[d] = 0;
}
#endif

static const char *value_row(const attend_task *task, const char *const *rows, int64_t i,
                             int64_t count) {
    return i < count ? rows[i] + value_offset(task) : (const char *)zeros;
}

/* Load the block's values as pairs or as fp32 rows, and prefetch the next block's keys, `next`.
 * fp32 rows that need no padding are used where they are, in the pages. */
static void load_values(const attend_task *task, attend_space *space, const char *const *rows,
                        const char *const *next, int64_t count) {
    int64_t bytes = task->dim * item_size(task->job->heads); /* bytes of a prefetched key */
    int64_t dim = task->value_dim, padded = task->padded, stop = filled_keys(task, count);
#if defined(FT_PAIRS)
    if (uses_dot(task->job->heads)) {
        for (int64_t i = 0; i < stop; i += 2) {
            fetch_soon(next[i], bytes);
            fetch_soon(next[i + 1], bytes);
            const bf16 *first = (const bf16 *)value_row(task, rows, i, count);
            const bf16 *second = (const bf16 *)value_row(task, rows, i + 1, count);
            pair_rows(first, second, dim, space->values + i / 2 * padded);
        }
        return;
    }
#endif
    int is_bf16 = task->job->heads->dtype == FT_BFLOAT16;
    for (int64_t i = 0; i < stop; i++) {
        fetch_soon(next[i], bytes);
        const char *row = value_row(task, rows, i, count);
        float *copy = (float *)space->values + i * padded;
        space->value_rows[i] = (is_bf16 || dim != padded) ? copy : (const float *)row;
        if (space->value_rows[i] != copy) continue;
        for (int64_t d = 0; d < dim; d += FT_WIDTH)
            v_store(copy + d, v_get(row, d, dim - d, is_bf16));
    }
}

#endif
