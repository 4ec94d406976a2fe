/* Scores and weighted values on the matrix unit (amx.h), for bf16 and for scaled keys.
 *
 * Up to sixteen queries are the rows of a tile, so the bits of a query do not depend on the others.
 * The transposed keys and the paired values of a block are tiles as they lie in memory. A tile row
 * of keys is one word of dimensions of sixteen keys; a tile row of values is one word of keys for
 * sixteen dimensions. Both are padded with zeros to whole tiles. The last tile of queries may
 * extend beyond the last query, into memory that is reserved for it (ROOM); those sums are not
 * read.
 *
 * The unit's sums of bytes are exact, so results have the same bits as with attention_bytes.h.
 */
#ifndef FT_ATTENTION_AMX_H
#define FT_ATTENTION_AMX_H

#include "attention_bytes.h"

#if defined(FT_AMX)

enum { TILE_WORDS = AMX_ROW_BYTES / 4 }; /* words of a tile row */

/* Set the tile shapes: sums (0 to 3) and queries or weights (4, 5) have a row for each query, at
 * most 16; keys or values (6, 7) have 16 rows. */
static void set_shapes(int64_t num_queries) {
    const uint8_t few = (uint8_t)ft_min(num_queries, AMX_ROWS);
    const uint8_t rows[8] = {few, few, few, few, few, few, AMX_ROWS, AMX_ROWS};
    ft_amx_configure(rows);
}

/* Copy a bf16 query, padded with zeros, to the memory of the widened queries. */
static void pack_pairs(const attend_task *task, attend_space *space, int64_t query,
                       const char *items) {
    const int64_t bytes = key_stride(task) * 4;
    char *to = (char *)space->wide + query * bytes;
    memcpy(to, items, (size_t)task->dim * 2);
    memset(to + task->dim * 2, 0, (size_t)(bytes - task->dim * 2));
}

/* ---- bf16 ---- */

/* Compute scores of the block's 64 keys for the tile of queries from `at` on. */
FT_INLINE void score_pairs_amx(attend_space *space, int64_t at, int64_t words) {
    const char *queries = (const char *)space->wide + at * words * 4;
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (int64_t word = 0; word < words; word += TILE_WORDS) {
        const uint32_t *keys = space->keys + word * 16;
        AMX_LOAD(4, queries + word * 4, words * 4);
        AMX_LOAD(6, keys, AMX_ROW_BYTES);
        AMX_DOT_BF16(0, 4, 6);
        AMX_LOAD(7, keys + words * 16, AMX_ROW_BYTES);
        AMX_DOT_BF16(1, 4, 7);
        AMX_LOAD(6, keys + 2 * words * 16, AMX_ROW_BYTES);
        AMX_DOT_BF16(2, 4, 6);
        AMX_LOAD(7, keys + 3 * words * 16, AMX_ROW_BYTES);
        AMX_DOT_BF16(3, 4, 7);
    }
    float *scores = space->scores[at];
    AMX_STORE(0, scores, KEYS * 4);
    AMX_STORE(1, scores + 16, KEYS * 4);
    AMX_STORE(2, scores + 32, KEYS * 4);
    AMX_STORE(3, scores + 48, KEYS * 4);
}

/* Write weighted values of `vecs` (1 to 4) times 16 dimensions from `d` on, summed over `keys`
 * keys, to products [16][64]. */
FT_INLINE void gather_pairs_amx(const attend_space *space, int64_t at, int64_t padded, int64_t d,
                                const int vecs, int64_t keys, float *products) {
    const int64_t stride = padded * 4;
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (int64_t key = 0; key < keys; key += 2 * TILE_WORDS) {
        const uint32_t *values = space->values + key / 2 * padded + d;
        AMX_LOAD(4, space->weights[at] + key, KEYS * 2);
        AMX_LOAD(6, values, stride);
        AMX_DOT_BF16(0, 4, 6);
        if (vecs < 2) continue;
        AMX_LOAD(7, values + 16, stride);
        AMX_DOT_BF16(1, 4, 7);
        if (vecs < 3) continue;
        AMX_LOAD(6, values + 32, stride);
        AMX_DOT_BF16(2, 4, 6);
        if (vecs < 4) continue;
        AMX_LOAD(7, values + 48, stride);
        AMX_DOT_BF16(3, 4, 7);
    }
    AMX_STORE(0, products, 256);
    AMX_STORE(1, products + 16, 256);
    AMX_STORE(2, products + 32, 256);
    AMX_STORE(3, products + 48, 256);
}

/* Scale the sums of queries [at, stop), at most sixteen, by `keep` and add the block's products. */
static void add_to_sums(attend_space *space, int64_t at, int64_t stop, int64_t padded, int64_t d,
                         int vecs, const float *products) {
    for (int64_t query = at; query < stop; query++, products += 64) {
        float *sums = space->acc + query * padded + d;
        const ft_vec keep = v_set(space->keep[query]);
        for (int i = 0; i < vecs * 16; i += 16)
            v_store(sums + i, v_fma(v_load(sums + i), keep, v_load(products + i)));
    }
}

static void gather_pairs_of(attend_space *space, int64_t at, int64_t stop, int64_t padded,
                            int64_t keys) {
    _Alignas(64) float products[AMX_ROWS * 64];
    for (int64_t d = 0; d < padded; d += 64) {
        const int vecs = (int)ft_min(4, (padded - d) / 16);
        if (vecs == 4) gather_pairs_amx(space, at, padded, d, 4, keys, products);
        else if (vecs == 3) gather_pairs_amx(space, at, padded, d, 3, keys, products);
        else if (vecs == 2) gather_pairs_amx(space, at, padded, d, 2, keys, products);
        else gather_pairs_amx(space, at, padded, d, 1, keys, products);
        add_to_sums(space, at, stop, padded, d, vecs, products);
    }
}

/* ---- bytes: 256 * sums of high bytes + sums of low bytes ---- */

typedef struct {
    _Alignas(64) int32_t high[AMX_ROWS][16], low[AMX_ROWS][16];
} amx_sums;

FT_INLINE vf join_row(const amx_sums *sums, int64_t row, int lane) {
    vf high = vf_from_vi(vi_load(sums->high[row] + lane));
    return vf_fma(high, vf_set1(256.0f), vf_from_vi(vi_load(sums->low[row] + lane)));
}

/* Store tiles 0 to 3: high and low sums of sixteen columns, then of the next sixteen. */
FT_INLINE void store_byte_sums(amx_sums sums[2]) {
    AMX_STORE(0, sums[0].high, 64);
    AMX_STORE(1, sums[0].low, 64);
    AMX_STORE(2, sums[1].high, 64);
    AMX_STORE(3, sums[1].low, 64);
}

/* Compute scores of 32 keys from key 16 * `sub` on for queries [at, stop), at most sixteen. */
static void score_bytes_amx(attend_space *space, int64_t at, int64_t stop, int64_t words, int sub) {
    amx_sums sums[2];
    const char *queries = (const char *)space->queries[at]; /* bytes that pack_query wrote */
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (int64_t word = 0; word < words; word += TILE_WORDS) {
        const uint32_t *keys = space->keys + (sub * words + word) * 16;
        AMX_LOAD(4, queries + word * 4, BYTE_QUERY);
        AMX_LOAD(5, queries + MAX_DIM + word * 4, BYTE_QUERY);
        AMX_LOAD(6, keys, AMX_ROW_BYTES);
        AMX_DOT_SS(0, 4, 6);
        AMX_DOT_SS(1, 5, 6);
        AMX_LOAD(7, keys + words * 16, AMX_ROW_BYTES);
        AMX_DOT_SS(2, 4, 7);
        AMX_DOT_SS(3, 5, 7);
    }
    store_byte_sums(sums);
    for (int64_t query = at; query < stop; query++)
        for (int key = 0; key < 32; key += FT_LANES) {
            vf score = join_row(&sums[key / 16], query - at, key % 16);
            score = vf_mul(score, vf_set1(space->query_scale[query]));
            vf scale = vf_load(space->key_scales + sub * 16 + key);
            vf_store(space->scores[query] + sub * 16 + key, vf_mul(score, scale));
        }
}

/* Sum the weighted values of `vecs` (1 or 2) times 16 dimensions from `d` on. */
FT_INLINE void gather_bytes_amx(const attend_space *space, int64_t padded, int64_t d, int vecs,
                                amx_sums sums[2]) {
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    AMX_LOAD(6, space->values + d, padded * 4);
    AMX_DOT_US(0, 4, 6);
    AMX_DOT_US(1, 5, 6);
    if (vecs == 2) {
        AMX_LOAD(7, space->values + d + 16, padded * 4);
        AMX_DOT_US(2, 4, 7);
        AMX_DOT_US(3, 5, 7);
    }
    store_byte_sums(sums);
}

/* Add weighted values of a block; its 64 keys, padded with zeros, are the depth of one tile. */
static void gather_bytes_of(attend_space *space, int64_t at, int64_t stop, int64_t padded) {
    amx_sums sums[2];
    const char *weights = (const char *)space->weights[at];
    AMX_LOAD(4, weights, KEYS * 2);
    AMX_LOAD(5, weights + KEYS, KEYS * 2);
    for (int64_t d = 0; d < padded; d += 32) {
        const int vecs = (int)ft_min(2, (padded - d) / 16);
        gather_bytes_amx(space, padded, d, vecs, sums);
        for (int64_t query = at; query < stop; query++)
            for (int lane = 0; lane < vecs * 16; lane += FT_LANES) {
                float *to = space->acc + query * padded + d + lane;
                vf kept = vf_mul(vf_load(to), vf_set1(space->keep[query]));
                vf joined = join_row(&sums[lane / 16], query - at, lane % 16);
                vf_store(to, vf_fma(joined, vf_set1(space->weight_scale[query]), kept));
            }
    }
}

/* ---- all queries of a block ---- */

static void score_all_amx(const attend_task *task, attend_space *space, int64_t first,
                          int64_t stop) {
    const int64_t words = key_stride(task);
    for (int64_t at = first; at < stop; at += AMX_ROWS) {
        if (!is_scaled(task)) {
            score_pairs_amx(space, at, words);
            continue;
        }
        for (int sub = 0; sub < SUBS; sub += 2)
            score_bytes_amx(space, at, ft_min(at + AMX_ROWS, stop), words, sub);
    }
}

static void gather_all_amx(const attend_task *task, attend_space *space, int64_t first,
                           int64_t stop, int64_t keys) {
    for (int64_t at = first; at < stop; at += AMX_ROWS) {
        const int64_t end = ft_min(at + AMX_ROWS, stop);
        if (is_scaled(task)) gather_bytes_of(space, at, end, task->padded);
        else gather_pairs_of(space, at, end, task->padded, keys);
    }
}

#endif
#endif
