/* How a pool stores a vector of keys or values. core/interface/kv_codec.py has the same codes.
 *
 * A scaled vector is signed bytes, and an fp32 scale in the same block.
 */
#ifndef FT_KV_CODEC_H
#define FT_KV_CODEC_H

#include "decoder.h"
#include "common/vector.h"

enum {
    FT_KV_PLAIN = 0, /* items of the model's dtype, without a scale */
    FT_KV_INT8 = 1,
};

FT_INLINE int ft_is_scaled(const ft_kv *kv) { return kv->codec != FT_KV_PLAIN; }

/* Bytes of a stored vector, without its scale. */
FT_INLINE int64_t ft_vector_bytes(const ft_kv *kv, const ft_heads *heads) {
    switch (kv->codec) {
        case FT_KV_INT8: return heads->head_dim;
        default: return heads->head_dim * (heads->dtype == FT_BFLOAT16 ? 2 : 4);
    }
}

/* Quantise a vector and write it to its place in a block. The item of largest magnitude becomes 127
 * or -127; a vector of zeros has the scale 0. A vector that is not finite has a NaN scale, so that
 * all of it is NaN when read. */
FT_INLINE void ft_store_vector(const ft_kv *kv, const ft_heads *heads, char *block, int64_t offset,
                               const float *vector) {
    const float greatest = 127.0f;
    int64_t dim = heads->head_dim, bytes = ft_vector_bytes(kv, heads);
    float scale = v_reach(vector, dim) / greatest, at[FT_WIDTH];
    int8_t numbers[FT_MAX_DIM];
    memset(numbers, 0, (size_t)dim);
    for (int64_t i = 0; scale > 0.0f && i < dim; i += FT_WIDTH) {
        ft_vec x = v_round(v_div(v_load_n(vector + i, dim - i), v_set(scale)));
        v_store(at, v_max(v_min(x, v_set(greatest)), v_set(-greatest)));
        for (int64_t j = 0; j < ft_min(FT_WIDTH, dim - i); j++) numbers[i + j] = (int8_t)at[j];
    }
    memcpy(block + kv->scales_at + offset * 4, &scale, 4);
    memcpy(block + offset * bytes, numbers, (size_t)bytes);
}

#endif
