/* Attention over scaled keys and values: scores and weighted values as sums of byte products.
 *
 * A query is quantised to 16-bit integers. So are its weights of a block, after each is multiplied
 * by the scale of its value. Such an integer is two bytes, 256 * high + low. An instruction
 * multiplies twice as many bytes as bf16 numbers, so two bytes cost as much as one bf16 number, the
 * sums are exact, and keys and values are never widened, which would take longer than reading them.
 * The error is below 2^-15 of a query's largest item, or of a block's largest weight.
 */
#ifndef FT_ATTENTION_BYTES_H
#define FT_ATTENTION_BYTES_H

#include "attention_block.h"
#include "common/simd.h"

enum { PARTS = 16 / FT_LANES }; /* vectors that hold sixteen sums */
#define QUERY_TOP 32639.0f      /* 256 * 127 + 127 */
#define WEIGHT_TOP 65535.0f

/* -- a block of keys and values --------------------------------------------------------------- */

/* Load the scales of a step's keys and values, padded with zeros. `taint` becomes NaN if the scale
 * of a value is not finite, else 0. */
static void load_scales(const attend_task *task, attend_space *space, const ft_attend_step *step) {
    const attend_job *job = task->job;
    int64_t segment = task->parts[step->first].segment, lo = step->lo;
    memset(space->key_scales, 0, sizeof space->key_scales);
    memset(space->value_scales, 0, sizeof space->value_scales);
    for (int64_t i = 0; i < step->count;) {
        key_run run = find_run(job, segment, lo + i, lo + step->count);
        const char *block = ft_page(job->kv, job->heads, run.page, job->layer, 0, task->head);
        const char *scales = block + job->kv->scales_at + run.offset * 4;
        memcpy(space->key_scales + i, scales, (size_t)run.count * 4);
        memcpy(space->value_scales + i, scales + value_offset(task), (size_t)run.count * 4);
        i += run.count;
    }
    ft_vec taint = v_set(0.0f);
    for (int i = 0; i < KEYS; i += 16)
        taint = v_fma(v_load(space->value_scales + i), v_set(0.0f), taint);
    space->taint = v_sum(taint);
}

/* Transpose the block's keys, so that four dimensions of sixteen keys lie side by side, and
 * prefetch its values. */
static void load_key_bytes(const attend_task *task, attend_space *space, const char **rows,
                           int64_t count) {
    int64_t words = key_words(task), stride = key_stride(task), whole = task->dim / 4;
    for (int64_t i = 0; i < count; i += 16) {
        uint32_t *out = space->keys + i * stride;
        for (int64_t j = i; j < ft_min(i + 16, count); j++)
            fetch_soon(rows[j] + value_offset(task), vector_bytes(task));
        turn_words(rows + i, whole, out);
        memset(out + whole * 16, 0, (size_t)(stride - whole) * 16 * 4);
        if (whole == words) continue;
        for (int j = 0; j < 16; j++)
            memcpy(out + whole * 16 + j, rows[i + j] + whole * 4, (size_t)(task->dim % 4));
    }
}

/* Interleave four rows of bytes to quads, padded with zeros to a multiple of 16 quads. */
FT_INLINE void quad_rows(const char *const *rows, int64_t dim, uint32_t *out) {
    int64_t d = 0;
#if defined(FT_AVX512) || defined(FT_AVX2)
    for (; d + 16 <= dim; d += 16) {
        __m128i at[4], *to = (__m128i *)(out + d);
        for (int i = 0; i < 4; i++) at[i] = _mm_loadu_si128((const __m128i *)(rows[i] + d));
        __m128i near = _mm_unpacklo_epi8(at[0], at[1]), far = _mm_unpackhi_epi8(at[0], at[1]);
        __m128i near2 = _mm_unpacklo_epi8(at[2], at[3]), far2 = _mm_unpackhi_epi8(at[2], at[3]);
        _mm_store_si128(to, _mm_unpacklo_epi16(near, near2));
        _mm_store_si128(to + 1, _mm_unpackhi_epi16(near, near2));
        _mm_store_si128(to + 2, _mm_unpacklo_epi16(far, far2));
        _mm_store_si128(to + 3, _mm_unpackhi_epi16(far, far2));
    }
#endif
    for (; d < dim; d++) {
        char quad[4] = {rows[0][d], rows[1][d], rows[2][d], rows[3][d]};
        memcpy(out + d, quad, 4);
    }
    for (; d % 16; d++) out[d] = 0;
}

/* Load the block's values in quads of keys, and prefetch the next block's keys, `next`. */
static void load_value_bytes(const attend_task *task, attend_space *space, const char *const *rows,
                             const char *const *next, int64_t count) {
    for (int64_t i = 0; i < filled_keys(task, count); i += 4) {
        const char *quad[4];
        for (int j = 0; j < 4; j++) {
            fetch_soon(next[i + j], vector_bytes(task));
            quad[j] = value_row(task, rows, i + j, count);
        }
        quad_rows(quad, task->dim, space->values + i / 4 * task->padded);
    }
}

/* -- queries and weights as integers ---------------------------------------------------------- */

/* Split sixteen integers into bytes, 256 * high + low, with low from -half to 255 - half. */
FT_INLINE void split_numbers(ft_vec numbers, int32_t half, void *high, void *low) {
#if defined(FT_AVX512) /* compilers do not find these instructions by themselves */
    __m512i whole = _mm512_cvtps_epi32(numbers);
    __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(half)), 8);
    _mm_storeu_si128(high, _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128(low, _mm512_cvtepi32_epi8(whole));
#else
    float at[FT_WIDTH];
    v_store(at, numbers);
    for (int i = 0; i < FT_WIDTH; i++) {
        int32_t whole = (int32_t)at[i];
        ((uint8_t *)high)[i] = (uint8_t)((whole + half) >> 8);
        ((uint8_t *)low)[i] = (uint8_t)whole;
    }
#endif
}

/* Quantise a query to 16 bits, in the memory of the widened query: high bytes, and low bytes
 * MAX_DIM bytes after them. */
static void pack_query(attend_space *space, int64_t query, const char *items, int64_t dim,
                       int is_bf16) {
    int8_t *high = (int8_t *)space->wide + query * BYTE_QUERY, *low = high + MAX_DIM;
    float wide[MAX_DIM];
    for (int64_t d = 0; d < dim; d += FT_WIDTH)
        v_store(wide + d, v_get(items, d, dim - d, is_bf16));
    float reach = v_reach(wide, dim);
    for (int64_t d = 0; d < dim; d += FT_WIDTH) {
        ft_vec x = v_round(v_mul(v_load(wide + d), v_set(QUERY_TOP / reach)));
        x = v_max(v_min(x, v_set(QUERY_TOP)), v_set(-QUERY_TOP)); /* NaN becomes QUERY_TOP */
        split_numbers(x, 128, high + d, low + d);
    }
    space->queries[query] = high;
    space->query_scale[query] = reach / QUERY_TOP;
    /* Products take keys as unsigned bytes, 128 too large; the bias subtracts the excess. */
    space->bias[query][0] = space->bias[query][1] = 0;
    for (int64_t d = 0; d < ft_ceil_div(dim, 4) * 4; d++) {
        space->bias[query][0] -= 128 * high[d];
        space->bias[query][1] -= 128 * low[d];
    }
}

/* Quantise a query's weights of a block to 16 bits: high bytes, then low bytes. */
static void pack_weights(attend_space *space, int64_t query, const ft_vec *weights) {
    uint8_t *high = (uint8_t *)space->weights[query], *low = high + KEYS;
    ft_vec scaled[SUBS], top = v_set(0.0f);
    for (int sub = 0; sub < SUBS; sub++) {
        scaled[sub] = v_mul(weights[sub], v_load(space->value_scales + sub * 16));
        top = v_max(scaled[sub], top);
    }
    float reach = v_top(top);
    for (int sub = 0; sub < SUBS; sub++) {
        ft_vec x = v_round(v_mul(scaled[sub], v_set(WEIGHT_TOP / reach)));
        x = v_min(x, v_set(WEIGHT_TOP)); /* NaN becomes WEIGHT_TOP */
        split_numbers(x, 0, high + sub * 16, low + sub * 16);
    }
    space->weight_scale[query] = reach / WEIGHT_TOP + space->taint;
}

/* -- sums of products ------------------------------------------------------------------------- */

typedef struct {
    vi high[PARTS], low[PARTS];
} byte_sums; /* sixteen high and sixteen low sums */

FT_INLINE vf join_sums(const byte_sums *sums, int part) {
    return vf_fma(vf_from_vi(sums->high[part]), vf_set1(256.0f), vf_from_vi(sums->low[part]));
}

/* Compute scores of 32 keys from key 16 * `sub` on: more sums would not fit into the registers. */
FT_INLINE void score_bytes(attend_space *space, int64_t first, int count, int64_t words, int sub) {
    byte_sums sums[TILE][2];
    for (int r = 0; r < count; r++)
        for (int i = 0; i < 2 * PARTS; i++) {
            sums[r][i / PARTS].high[i % PARTS] = vi_set1(space->bias[first + r][0]);
            sums[r][i / PARTS].low[i % PARTS] = vi_set1(space->bias[first + r][1]);
        }
    for (int64_t word = 0; word < words; word++) {
        vi keys[2][PARTS];
        for (int i = 0; i < 2 * PARTS; i++) {
            const uint32_t *from = space->keys + ((sub + i / PARTS) * words + word) * 16;
            keys[i / PARTS][i % PARTS] =
                vi_load(from + i % PARTS * FT_LANES) ^ vi_set1((int32_t)0x80808080u);
        }
        for (int r = 0; r < count; r++) {
            const char *query = (const char *)space->queries[first + r] + word * 4;
            vi high = vi_broadcast(query), low = vi_broadcast(query + MAX_DIM);
            for (int i = 0; i < 2 * PARTS; i++) {
                byte_sums *to = &sums[r][i / PARTS];
                vi key = keys[i / PARTS][i % PARTS];
                to->high[i % PARTS] = vi_dot_u8s8(to->high[i % PARTS], key, high);
                to->low[i % PARTS] = vi_dot_u8s8(to->low[i % PARTS], key, low);
            }
        }
    }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < 2 * PARTS; i++) {
            int64_t key = sub * 16 + i * FT_LANES;
            vf score = join_sums(&sums[r][i / PARTS], i % PARTS);
            score = vf_mul(score, vf_set1(space->query_scale[first + r]));
            vf_store(space->scores[first + r] + key,
                     vf_mul(score, vf_load(space->key_scales + key)));
        }
}

/* Add weighted values of `vecs` (1 or 2) times 16 dimensions from `d` on, over `stop` keys. */
FT_INLINE void gather_bytes(attend_space *space, int64_t first, int count, int64_t padded,
                            int64_t d, int vecs, int64_t stop) {
    byte_sums sums[TILE][2];
    for (int r = 0; r < count; r++)
        for (int i = 0; i < vecs * PARTS; i++)
            sums[r][i / PARTS].high[i % PARTS] = sums[r][i / PARTS].low[i % PARTS] = vi_zero();
    for (int64_t quad = 0; quad < stop / 4; quad++) {
        vi values[2][PARTS];
        for (int i = 0; i < vecs * PARTS; i++)
            values[i / PARTS][i % PARTS] =
                vi_load(space->values + quad * padded + d + i * FT_LANES);
        for (int r = 0; r < count; r++) {
            const char *weight = (const char *)space->weights[first + r] + quad * 4;
            vi high = vi_broadcast(weight), low = vi_broadcast(weight + KEYS);
            for (int i = 0; i < vecs * PARTS; i++) {
                byte_sums *to = &sums[r][i / PARTS];
                vi value = values[i / PARTS][i % PARTS];
                to->high[i % PARTS] = vi_dot_u8s8(to->high[i % PARTS], high, value);
                to->low[i % PARTS] = vi_dot_u8s8(to->low[i % PARTS], low, value);
            }
        }
    }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < vecs * PARTS; i++) {
            float *to = space->acc + (first + r) * padded + d + i * FT_LANES;
            vf kept = vf_mul(vf_load(to), vf_set1(space->keep[first + r]));
            vf scale = vf_set1(space->weight_scale[first + r]);
            vf_store(to, vf_fma(join_sums(&sums[r][i / PARTS], i % PARTS), scale, kept));
        }
}

#endif
