/* Norms, RoPE with the KV write, activation, embedding: what touches every number once. */
#include "decoder.h"
#include "vector.h"

enum {
    PIECE = 8192,  /* elements that make a task worth another thread */
    MAX_DIM = 256, /* of a head, as in attention_block.h */
};

static int64_t rows_per_piece(int64_t width) { return ft_max(1, PIECE / ft_max(width, 1)); }

/* -- norms ------------------------------------------------------------------------------------ */

typedef struct {
    const char *x, *weight;
    char *residual, *out;
    int64_t width;
    float eps;
    int dtype;
} norm_job;

static float inverse_rms(ft_vec squares, int64_t width, float eps) {
    return 1.0f / sqrtf(v_sum(squares) / (float)width + eps);
}

/* Inlined once for each dtype, which frees the loops of asking for it. */
FT_INLINE void norm_row(const norm_job *job, int64_t row, int dtype) {
    int64_t width = job->width, bytes = width * (dtype == FT_BFLOAT16 ? 2 : 4);
    const char *x = job->x + row * bytes;
    char *out = job->out + row * bytes;
    ft_vec squares = v_set(0.0f);
    if (job->residual) {
        char *residual = job->residual + row * bytes;
        for (int64_t i = 0; i < width; i += FT_WIDTH) {
            ft_vec sum = v_add(v_get(x, i, width - i, dtype), v_get(residual, i, width - i, dtype));
            v_put(residual, i, sum, width - i, dtype);
        }
        x = residual; /* as rounded */
    }
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec value = v_get(x, i, width - i, dtype);
        squares = v_fma(value, value, squares);
    }
    ft_vec inverse = v_set(inverse_rms(squares, width, job->eps));
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec normed = v_mul(v_get(x, i, width - i, dtype), inverse);
        normed = v_mul(normed, v_get(job->weight, i, width - i, dtype));
        v_put(out, i, normed, width - i, dtype);
    }
}

static void norm_piece(void *context, int64_t begin, int64_t end) {
    const norm_job *job = context;
    for (int64_t row = begin; row < end; row++)
        if (job->dtype == FT_BFLOAT16)
            norm_row(job, row, FT_BFLOAT16);
        else
            norm_row(job, row, FT_FLOAT32);
}

void ft_norm_rows(const void *x, void *residual, const void *weight, void *out, int64_t rows,
                  int64_t width, float eps, int dtype) {
    norm_job job = {x, weight, residual, out, width, eps, dtype};
    ft_parallel(norm_piece, &job, rows, rows_per_piece(width));
}

/* -- activation ------------------------------------------------------------------------------- */

typedef struct {
    const char *gate_up;
    char *out;
    int64_t width;
    int dtype;
} silu_job;

FT_INLINE void silu_row(const silu_job *job, int64_t row, int dtype) {
    int64_t width = job->width, item = dtype == FT_BFLOAT16 ? 2 : 4;
    const char *gate = job->gate_up + row * 2 * width * item, *up = gate + width * item;
    char *out = job->out + row * width * item;
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec x = v_get(gate, i, width - i, dtype);
        ft_vec below = v_add(v_exp(v_sub(v_set(0.0f), x)), v_set(1.0f));
        ft_vec activated = v_as(v_div(x, below), dtype);
        v_put(out, i, v_mul(activated, v_get(up, i, width - i, dtype)), width - i, dtype);
    }
}

static void silu_piece(void *context, int64_t begin, int64_t end) {
    const silu_job *job = context;
    for (int64_t row = begin; row < end; row++)
        if (job->dtype == FT_BFLOAT16)
            silu_row(job, row, FT_BFLOAT16);
        else
            silu_row(job, row, FT_FLOAT32);
}

void ft_silu_rows(const void *gate_up, void *out, int64_t rows, int64_t width, int dtype) {
    silu_job job = {gate_up, out, width, dtype};
    ft_parallel(silu_piece, &job, rows, rows_per_piece(2 * width));
}

/* -- RoPE and the KV write -------------------------------------------------------------------- */

typedef struct {
    const char *qkv;
    char *q;
    const ft_batch *batch;
    const ft_kv *kv;
    const ft_heads *heads;
    int64_t layer;
    const float *norm;
    float eps;
} rope_job;

/* Head `index` of a row, normed, then turned by halves (arXiv 2104.09864); queries are scaled. */
FT_INLINE void turn_head(const rope_job *job, int64_t row, int64_t index, const char *head,
                         int dtype, void *out, int out_dtype) {
    int64_t dim = job->heads->head_dim, half = dim / 2;
    const float *cos = job->batch->cos + row * half, *sin = job->batch->sin + row * half;
    const float *norm = job->norm ? job->norm + index * dim : NULL;
    float inverse = 1.0f;
    if (norm) {
        ft_vec squares = v_set(0.0f);
        for (int64_t i = 0; i < dim; i += FT_WIDTH) {
            ft_vec value = v_get(head, i, dim - i, dtype);
            squares = v_fma(value, value, squares);
        }
        inverse = inverse_rms(squares, dim, job->eps);
    }
    ft_vec factor = v_set(inverse);
    ft_vec scales = v_set(index < job->heads->num_heads ? job->heads->scale : 1.0f);
    for (int64_t i = 0; i < half; i += FT_WIDTH) {
        int64_t n = half - i;
        ft_vec x = v_get(head, i, n, dtype), y = v_get(head, half + i, n, dtype);
        if (norm) {
            x = v_mul(v_mul(x, factor), v_load_n(norm + i, n));
            y = v_mul(v_mul(y, factor), v_load_n(norm + half + i, n));
        }
        ft_vec c = v_load_n(cos + i, n), s = v_load_n(sin + i, n);
        ft_vec first = v_sub(v_mul(x, c), v_mul(y, s));
        ft_vec second = v_add(v_mul(y, c), v_mul(x, s));
        v_put(out, i, v_mul(first, scales), n, out_dtype);
        v_put(out, half + i, v_mul(second, scales), n, out_dtype);
    }
}

/* A vector to its place in a block, as int8: its largest item becomes 127, zeros have the scale 0.
 * One that is not finite has a scale of NaN, so that all of it is NaN when it is read. */
static void put_int8(const ft_kv *kv, char *block, int64_t offset, const float *vector,
                     int64_t dim) {
    int8_t *items = (int8_t *)block + offset * dim;
    float scale = v_reach(vector, dim) / 127.0f, at[FT_WIDTH];
    memcpy(block + kv->scales_at + offset * 4, &scale, 4);
    memset(items, 0, (size_t)dim);
    if (!(scale > 0.0f)) return;
    for (int64_t i = 0; i < dim; i += FT_WIDTH) {
        ft_vec x = v_round(v_div(v_load_n(vector + i, dim - i), v_set(scale)));
        v_store(at, v_max(v_min(x, v_set(127.0f)), v_set(-127.0f)));
        for (int64_t j = 0; j < ft_min(FT_WIDTH, dim - i); j++) items[i + j] = (int8_t)at[j];
    }
}

/* A key and its value to a place in their blocks. Head `index` of the row is the key's. */
FT_INLINE void write_kv(const rope_job *job, int64_t row, int64_t index, const char *key,
                        const char *value, int dtype) {
    const ft_kv *kv = job->kv;
    int64_t dim = job->heads->head_dim, bytes = dim * (dtype == FT_BFLOAT16 ? 2 : 4);
    int64_t page = job->batch->slots[row] / kv->page_size, head = index - job->heads->num_heads;
    int64_t offset = job->batch->slots[row] % kv->page_size;
    char *keys = ft_page(kv, job->heads, page, job->layer, 0, head);
    char *values = ft_page(kv, job->heads, page, job->layer, 1, head);
    float wide[MAX_DIM];
    int is_int8 = kv->scales_at != 0;
    turn_head(job, row, index, key, dtype, is_int8 ? (void *)wide : keys + offset * bytes,
              is_int8 ? FT_FLOAT32 : dtype);
    if (!is_int8) {
        memcpy(values + offset * bytes, value, (size_t)bytes);
        return;
    }
    put_int8(kv, keys, offset, wide, dim);
    for (int64_t i = 0; i < dim; i += FT_WIDTH)
        v_store_n(wide + i, v_get(value, i, dim - i, dtype), dim - i);
    put_int8(kv, values, offset, wide, dim);
}

FT_INLINE void rope_row(const rope_job *job, int64_t row, int dtype) {
    int64_t num_heads = job->heads->num_heads, num_kv_heads = job->heads->num_kv_heads;
    int64_t bytes = job->heads->head_dim * (dtype == FT_BFLOAT16 ? 2 : 4);
    const char *head = job->qkv + row * (num_heads + 2 * num_kv_heads) * bytes;
    char *q = job->q + row * num_heads * bytes;
    for (int64_t i = 0; i < num_heads; i++, head += bytes)
        turn_head(job, row, i, head, dtype, q + i * bytes, dtype);
    for (int64_t i = 0; i < num_kv_heads; i++, head += bytes)
        write_kv(job, row, num_heads + i, head, head + num_kv_heads * bytes, dtype);
}

static void rope_piece(void *context, int64_t begin, int64_t end) {
    const rope_job *job = context;
    for (int64_t row = begin; row < end; row++)
        if (job->heads->dtype == FT_BFLOAT16)
            rope_row(job, row, FT_BFLOAT16);
        else
            rope_row(job, row, FT_FLOAT32);
}

void ft_rope_rows(const void *qkv, void *q, const ft_batch *batch, const ft_kv *kv,
                  const ft_heads *heads, int64_t layer, const float *norm, float eps) {
    rope_job job = {qkv, q, batch, kv, heads, layer, norm, eps};
    int64_t width = (heads->num_heads + 2 * heads->num_kv_heads) * heads->head_dim;
    ft_parallel(rope_piece, &job, batch->num_rows, rows_per_piece(width));
}

/* -- for Python ------------------------------------------------------------------------------- */

FT_EXPORT void ft_rms_norm(const void *x, const void *weight, void *out, int64_t rows,
                           int64_t width, float eps, int dtype) {
    ft_norm_rows(x, NULL, weight, out, rows, width, eps, dtype);
}

/* residual becomes the sum. */
FT_EXPORT void ft_add_rms_norm(const void *x, void *residual, const void *weight, void *out,
                               int64_t rows, int64_t width, float eps, int dtype) {
    ft_norm_rows(x, residual, weight, out, rows, width, eps, dtype);
}

FT_EXPORT void ft_silu_mul(const void *gate_up, void *out, int64_t rows, int64_t width,
                           int dtype) {
    ft_silu_rows(gate_up, out, rows, width, dtype);
}

FT_EXPORT void ft_rope_write(const void *qkv, void *q, const ft_batch *batch, const ft_kv *kv,
                             const ft_heads *heads, int64_t layer, const float *norm, float eps) {
    ft_rope_rows(qkv, q, batch, kv, heads, layer, norm, eps);
}

/* Rows `ids` [rows] of a table whose rows are `bytes` long, to out. */
FT_EXPORT void ft_embedding(const int64_t *ids, const void *table, void *out, int64_t rows,
                            int64_t bytes) {
    for (int64_t row = 0; row < rows; row++)
        memcpy((char *)out + row * bytes, (const char *)table + ids[row] * bytes, (size_t)bytes);
}
