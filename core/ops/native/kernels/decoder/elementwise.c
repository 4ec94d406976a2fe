/* Elementwise kernels: norms, RoPE with the KV write, activations, embedding. */
#include "kv_codec.h"
#include "common/vector.h"

enum {
    PIECE = 8192, /* elements that make a task worth another thread */
};

static int64_t rows_per_piece(int64_t width) { return ft_max(1, PIECE / ft_max(width, 1)); }

/* -- norms ------------------------------------------------------------------------------------ */

typedef struct {
    const char *x;
    char *residual, *out;
    float factor;
    const ft_norm *norm;
    int64_t width;
    int dtype;
} norm_job;

static float inverse_rms(ft_vec squares, int64_t width, float eps) {
    return 1.0f / sqrtf(v_sum(squares) / (float)width + eps);
}

/* Write (x + residual) * factor to residual; x + residual is rounded to the dtype first. */
FT_INLINE void add_row(const char *x, char *residual, float factor, int64_t width, int dtype) {
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec sum = v_add(v_get(x, i, width - i, dtype), v_get(residual, i, width - i, dtype));
        if (factor != 1.0f) sum = v_mul(v_as(sum, dtype), v_set(factor));
        v_put(residual, i, sum, width - i, dtype);
    }
}

/* Inlined once for each pair of dtypes, so that the loops do not branch on them. */
FT_INLINE void rms_row(const norm_job *job, const char *x, char *out, int dtype, int weight_dtype) {
    int64_t width = job->width;
    ft_vec squares = v_set(0.0f);
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec value = v_get(x, i, width - i, dtype);
        squares = v_fma(value, value, squares);
    }
    ft_vec inverse = v_set(inverse_rms(squares, width, job->norm->eps));
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec normed = v_mul(v_get(x, i, width - i, dtype), inverse);
        normed = v_mul(normed, v_get(job->norm->weight, i, width - i, weight_dtype));
        v_put(out, i, normed, width - i, dtype);
    }
}

/* Keep the first n of sixteen elements and set the others to 0. */
FT_INLINE ft_vec first_of(ft_vec x, int64_t n) {
    if (n >= FT_WIDTH) return x;
    float at[FT_WIDTH] = {0};
    v_store_n(at, x, n);
    return v_load(at);
}

/* Layer norm (arXiv 1607.06450); the weight is fp32. */
static void layer_row(const norm_job *job, const char *x, char *out, int dtype) {
    int64_t width = job->width;
    const ft_norm *norm = job->norm;
    ft_vec sums = v_set(0.0f), squares = v_set(0.0f);
    for (int64_t i = 0; i < width; i += FT_WIDTH)
        sums = v_add(v_get(x, i, width - i, dtype), sums);
    ft_vec mean = v_set(v_sum(sums) / (float)width);
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec off = first_of(v_sub(v_get(x, i, width - i, dtype), mean), width - i);
        squares = v_fma(off, off, squares);
    }
    ft_vec inverse = v_set(inverse_rms(squares, width, norm->eps));
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        int64_t n = width - i;
        ft_vec normed = v_mul(v_sub(v_get(x, i, n, dtype), mean), inverse);
        normed = v_mul(normed, v_load_n((const float *)norm->weight + i, n));
        if (norm->bias) normed = v_add(normed, v_load_n(norm->bias + i, n));
        v_put(out, i, normed, n, dtype);
    }
}

FT_INLINE void norm_row(const norm_job *job, int64_t row, int dtype) {
    int64_t bytes = job->width * (dtype == FT_BFLOAT16 ? 2 : 4);
    const char *x = job->x + row * bytes;
    char *out = job->out + row * bytes;
    if (job->residual) {
        char *residual = job->residual + row * bytes;
        add_row(x, residual, job->factor, job->width, dtype);
        x = residual;
    }
    if (job->norm->is_layer) layer_row(job, x, out, dtype);
    else if (job->norm->weight_dtype == dtype) rms_row(job, x, out, dtype, dtype);
    else rms_row(job, x, out, dtype, FT_FLOAT32);
}

static void norm_piece(void *context, int64_t begin, int64_t end) {
    const norm_job *job = context;
    for (int64_t row = begin; row < end; row++)
        if (job->dtype == FT_BFLOAT16)
            norm_row(job, row, FT_BFLOAT16);
        else
            norm_row(job, row, FT_FLOAT32);
}

void ft_norm_rows(const void *x, void *residual, float factor, const ft_norm *norm, void *out,
                  int64_t rows, int64_t width, int dtype) {
    norm_job job = {x, residual, out, factor, norm, width, dtype};
    ft_parallel(norm_piece, &job, rows, rows_per_piece(width));
}

static void add_piece(void *context, int64_t begin, int64_t end) {
    const norm_job *job = context;
    int64_t bytes = job->width * (job->dtype == FT_BFLOAT16 ? 2 : 4);
    for (int64_t row = begin; row < end; row++)
        add_row(job->x + row * bytes, job->residual + row * bytes, job->factor, job->width,
                job->dtype);
}

void ft_add_rows(const void *x, void *residual, float factor, int64_t rows, int64_t width,
                 int dtype) {
    norm_job job = {x, residual, NULL, factor, NULL, width, dtype};
    ft_parallel(add_piece, &job, rows, rows_per_piece(width));
}

/* -- activation ------------------------------------------------------------------------------- */

typedef struct {
    const char *x;
    char *out;
    int64_t width;
    ft_activation activation;
    int dtype;
} activation_job;

/* x / 2 * (1 + tanh(u)) as x / (1 + exp(-2 u)): arXiv 1606.08415, section 2. */
FT_INLINE ft_vec gelu_tanh(ft_vec x) {
    ft_vec cube = v_mul(v_mul(x, x), x);
    ft_vec inner = v_mul(v_fma(cube, v_set(0.044715f), x), v_set(-1.5957691216f)); /* -2 sqrt(2 / pi) */
    return v_div(x, v_add(v_exp(inner), v_set(1.0f)));
}

/* relu(x) ** 2: arXiv 2109.08668. NaN stays NaN. */
FT_INLINE ft_vec relu2(ft_vec x) {
    ft_vec positive = v_max(v_set(0.0f), x);
    return v_mul(positive, positive);
}

FT_INLINE ft_vec activated_by(ft_vec x, int kind) {
    if (kind == FT_RELU2) return relu2(x);
    return kind == FT_SILU ? v_silu(x) : gelu_tanh(x);
}

/* The activation of gpt-oss (arXiv 2508.10925): (factor + 1) * gate * sigmoid(1.702 gate), where
 * factor and gate are clamped. */
FT_INLINE ft_vec clamped_swiglu(ft_vec gate, ft_vec factor, float limit, int dtype) {
    ft_vec top = v_set(limit), bottom = v_set(-limit);
    gate = v_min(top, gate);
    factor = v_max(bottom, v_min(top, factor));
    ft_vec below = v_add(v_exp(v_mul(gate, v_set(-1.702f))), v_set(1.0f));
    return v_mul(v_as(v_div(gate, below), dtype), v_add(factor, v_set(1.0f)));
}

FT_INLINE void activate_row(const activation_job *job, int64_t row, int dtype, int kind,
                            int gated) {
    int64_t width = job->width, item = dtype == FT_BFLOAT16 ? 2 : 4;
    const char *gate = job->x + row * (1 + gated) * width * item, *factor = gate + width * item;
    char *out = job->out + row * width * item;
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec x = v_get(gate, i, width - i, dtype);
        if (kind == FT_CLAMPED_SWIGLU) {
            ft_vec y = v_get(factor, i, width - i, dtype);
            v_put(out, i, clamped_swiglu(x, y, job->activation.limit, dtype), width - i, dtype);
            continue;
        }
        ft_vec activated = v_as(activated_by(x, kind), dtype);
        if (gated) activated = v_mul(activated, v_get(factor, i, width - i, dtype));
        v_put(out, i, activated, width - i, dtype);
    }
}

FT_INLINE void activate_rows(const activation_job *job, int64_t begin, int64_t end, int kind,
                             int gated) {
    for (int64_t row = begin; row < end; row++)
        if (job->dtype == FT_BFLOAT16)
            activate_row(job, row, FT_BFLOAT16, kind, gated);
        else
            activate_row(job, row, FT_FLOAT32, kind, gated);
}

static void activate_piece(void *context, int64_t begin, int64_t end) {
    const activation_job *job = context;
    int kind = job->activation.kind;
    if (kind == FT_CLAMPED_SWIGLU) activate_rows(job, begin, end, FT_CLAMPED_SWIGLU, 1);
    else if (job->activation.gated && kind == FT_SILU) activate_rows(job, begin, end, FT_SILU, 1);
    else if (job->activation.gated) activate_rows(job, begin, end, kind, 1);
    else activate_rows(job, begin, end, kind, 0);
}

void ft_activate_rows(const void *x, void *out, int64_t rows, int64_t width,
                      const ft_activation *activation, int dtype) {
    activation_job job = {x, out, width, *activation, dtype};
    ft_parallel(activate_piece, &job, rows, rows_per_piece((1 + activation->gated) * width));
}

typedef struct {
    char *x;
    const char *gate;
    int64_t stride, width;
    int dtype;
} gate_job;

static void gate_piece(void *context, int64_t begin, int64_t end) {
    const gate_job *job = context;
    int64_t width = job->width, item = job->dtype == FT_BFLOAT16 ? 2 : 4;
    for (int64_t row = begin; row < end; row++) {
        char *x = job->x + row * width * item;
        const char *gate = job->gate + row * job->stride * item;
        for (int64_t i = 0; i < width; i += FT_WIDTH) {
            ft_vec below = v_exp(v_sub(v_set(0.0f), v_get(gate, i, width - i, job->dtype)));
            ft_vec value = v_get(x, i, width - i, job->dtype);
            v_put(x, i, v_div(value, v_add(below, v_set(1.0f))), width - i, job->dtype);
        }
    }
}

void ft_gate_rows(void *x, const void *gate, int64_t stride, int64_t rows, int64_t width,
                  int dtype) {
    gate_job job = {x, gate, stride, width, dtype};
    ft_parallel(gate_piece, &job, rows, rows_per_piece(width));
}

/* -- RoPE and the KV write -------------------------------------------------------------------- */

typedef struct {
    const char *qkv;
    char *q;
    const ft_batch *batch;
    const ft_kv *kv;
    const ft_heads *heads;
    int64_t layer;
    const ft_rope *rope;
} rope_job;

FT_INLINE ft_vec add_squares(ft_vec squares, const char *x, int64_t width, int dtype) {
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec value = v_get(x, i, width - i, dtype);
        squares = v_fma(value, value, squares);
    }
    return squares;
}

/* Sixteen items of each half of a head, rotated by RoPE (arXiv 2104.09864). */
typedef struct {
    ft_vec first, second;
} rotated_pair;

FT_INLINE rotated_pair rotate_items(ft_vec x, ft_vec y, const float *cos, const float *sin,
                                    int64_t n) {
    ft_vec c = v_load_n(cos, n), s = v_load_n(sin, n);
    return (rotated_pair){v_sub(v_mul(x, c), v_mul(y, s)), v_add(v_mul(y, c), v_mul(x, s))};
}

/* Sum the squares of a rotated head in sixteen lanes. */
FT_INLINE ft_vec rotated_squares(const char *head, const float *cos, const float *sin, int64_t half,
                                 int dtype) {
    ft_vec squares = v_set(0.0f);
    for (int64_t i = 0; i < half; i += FT_WIDTH) {
        int64_t n = half - i;
        ft_vec x = v_get(head, i, n, dtype), y = v_get(head, half + i, n, dtype);
        rotated_pair pair = rotate_items(x, y, cos + i, sin + i, n);
        squares = v_fma(pair.first, pair.first, squares);
        squares = v_fma(pair.second, pair.second, squares);
    }
    return squares;
}

/* Norm and rotate head `index` of a row, or rotate and norm it; scale it if it is a query.
 * `shared`: result of shared_inverse for all query heads, or for all key heads. */
FT_INLINE void rotate_head(const rope_job *job, int64_t row, int64_t index, const char *head,
                           float shared, int dtype, void *out, int out_dtype) {
    const ft_rope *rope = job->rope;
    int64_t dim = job->heads->head_dim, half = dim / 2;
    int is_query = index < job->heads->num_heads;
    int64_t at = ((is_query ? rope->q_table : rope->k_table) * job->batch->num_rows + row) * half;
    const float *cos = job->batch->cos + at, *sin = job->batch->sin + at;
    const float *norm = rope->norm ? rope->norm + index * dim : NULL;
    int is_after_rope = norm && rope->is_after_rope;
    float inverse = shared;
    if (is_after_rope)
        inverse = inverse_rms(rotated_squares(head, cos, sin, half, dtype), dim, rope->eps);
    else if (norm && !rope->over_all_heads)
        inverse = inverse_rms(add_squares(v_set(0.0f), head, dim, dtype), dim, rope->eps);
    ft_vec factor = v_set(inverse);
    ft_vec scales = v_set(is_query ? job->heads->scale : 1.0f);
    for (int64_t i = 0; i < half; i += FT_WIDTH) {
        int64_t n = half - i;
        ft_vec x = v_get(head, i, n, dtype), y = v_get(head, half + i, n, dtype);
        if (norm && !is_after_rope) {
            x = v_mul(v_mul(x, factor), v_load_n(norm + i, n));
            y = v_mul(v_mul(y, factor), v_load_n(norm + half + i, n));
        }
        rotated_pair pair = rotate_items(x, y, cos + i, sin + i, n);
        if (is_after_rope) {
            pair.first = v_mul(v_mul(pair.first, factor), v_load_n(norm + i, n));
            pair.second = v_mul(v_mul(pair.second, factor), v_load_n(norm + half + i, n));
        }
        v_put(out, i, v_mul(pair.first, scales), n, out_dtype);
        v_put(out, half + i, v_mul(pair.second, scales), n, out_dtype);
    }
}

/* Rotate the items after `rank` of a query or a key of latent attention, and multiply all by
 * `scale`. */
FT_INLINE void rotate_latent(const rope_job *job, int64_t row, int64_t table, const char *head,
                             float scale, int dtype, void *out) {
    int64_t rank = job->heads->rank, half = ft_rope_dim(job->heads) / 2;
    int64_t at = (table * job->batch->num_rows + row) * half;
    ft_vec scales = v_set(scale);
    for (int64_t i = 0; i < rank; i += FT_WIDTH)
        v_put(out, i, v_mul(v_get(head, i, rank - i, dtype), scales), rank - i, dtype);
    for (int64_t i = 0; i < half; i += FT_WIDTH) {
        int64_t n = half - i, first = rank + i, second = rank + half + i;
        ft_vec x = v_get(head, first, n, dtype), y = v_get(head, second, n, dtype);
        rotated_pair pair =
            rotate_items(x, y, job->batch->cos + at + i, job->batch->sin + at + i, n);
        v_put(out, first, v_mul(pair.first, scales), n, dtype);
        v_put(out, second, v_mul(pair.second, scales), n, dtype);
    }
}

/* Rotate the queries of a row, and write the one key that all of them read. */
FT_INLINE void latent_row(const rope_job *job, int64_t row, int dtype) {
    const ft_heads *heads = job->heads;
    const ft_kv *kv = job->kv;
    int64_t bytes = heads->head_dim * (dtype == FT_BFLOAT16 ? 2 : 4);
    const char *head = job->qkv + row * (heads->num_heads + 1) * bytes;
    char *q = job->q + row * heads->num_heads * bytes;
    for (int64_t i = 0; i < heads->num_heads; i++, head += bytes, q += bytes)
        rotate_latent(job, row, job->rope->q_table, head, heads->scale, dtype, q);
    int64_t page = job->batch->slots[row] / kv->page_size;
    int64_t offset = job->batch->slots[row] % kv->page_size;
    char *keys = ft_page(kv, heads, page, job->layer, 0, 0);
    rotate_latent(job, row, job->rope->k_table, head, 1.0f, dtype, keys + offset * bytes);
}

/* Copy a value, with the layer's norm of values if there is one. */
FT_INLINE void copy_value(const ft_heads *heads, const char *value, int dtype, void *out,
                          int out_dtype) {
    int64_t dim = heads->head_dim;
    float inverse = 1.0f;
    if (heads->value_eps >= 0.0f)
        inverse = inverse_rms(add_squares(v_set(0.0f), value, dim, dtype), dim, heads->value_eps);
    for (int64_t i = 0; i < dim; i += FT_WIDTH) {
        ft_vec x = v_mul(v_get(value, i, dim - i, dtype), v_set(inverse));
        v_put(out, i, x, dim - i, out_dtype);
    }
}

/* Write a key, which is head `index` of the row, and its value to the row's slot. */
FT_INLINE void write_kv(const rope_job *job, int64_t row, int64_t index, const char *key,
                        const char *value, float shared, int dtype) {
    const ft_kv *kv = job->kv;
    const ft_heads *heads = job->heads;
    int64_t page = job->batch->slots[row] / kv->page_size, head = index - heads->num_heads;
    int64_t offset = job->batch->slots[row] % kv->page_size, bytes = ft_vector_bytes(kv, heads);
    char *keys = ft_page(kv, heads, page, job->layer, 0, head);
    char *values = ft_page(kv, heads, page, job->layer, 1, head);
    if (ft_is_scaled(kv)) {
        float wide[FT_MAX_DIM];
        rotate_head(job, row, index, key, shared, dtype, wide, FT_FLOAT32);
        ft_store_vector(kv, heads, keys, offset, wide);
        copy_value(heads, value, dtype, wide, FT_FLOAT32);
        ft_store_vector(kv, heads, values, offset, wide);
    } else {
        rotate_head(job, row, index, key, shared, dtype, keys + offset * bytes, dtype);
        copy_value(heads, value, dtype, values + offset * bytes, dtype);
    }
}

/* Return 1 / RMS of `count` heads together, or 1 if the norm is not over all heads. */
FT_INLINE float shared_inverse(const rope_job *job, const char *heads, int64_t count, int dtype) {
    if (!job->rope->norm || !job->rope->over_all_heads) return 1.0f;
    int64_t width = count * job->heads->head_dim;
    return inverse_rms(add_squares(v_set(0.0f), heads, width, dtype), width, job->rope->eps);
}

FT_INLINE void rope_row(const rope_job *job, int64_t row, int dtype) {
    int64_t num_heads = job->heads->num_heads, num_kv_heads = job->heads->num_kv_heads;
    int64_t bytes = job->heads->head_dim * (dtype == FT_BFLOAT16 ? 2 : 4);
    int64_t num_all = num_heads + (job->rope->writes ? 2 * num_kv_heads : 0);
    int64_t gate_bytes = job->rope->gate * (dtype == FT_BFLOAT16 ? 2 : 4);
    const char *head = job->qkv + row * (num_all * bytes + gate_bytes);
    char *q = job->q + row * num_heads * bytes;
    float shared = shared_inverse(job, head, num_heads, dtype);
    for (int64_t i = 0; i < num_heads; i++, head += bytes)
        rotate_head(job, row, i, head, shared, dtype, q + i * bytes, dtype);
    if (!job->rope->writes) return;
    shared = shared_inverse(job, head, num_kv_heads, dtype);
    for (int64_t i = 0; i < num_kv_heads; i++, head += bytes)
        write_kv(job, row, num_heads + i, head, head + num_kv_heads * bytes, shared, dtype);
}

static void rope_piece(void *context, int64_t begin, int64_t end) {
    const rope_job *job = context;
    for (int64_t row = begin; row < end; row++)
        if (job->heads->rank && job->heads->dtype == FT_BFLOAT16)
            latent_row(job, row, FT_BFLOAT16);
        else if (job->heads->rank)
            latent_row(job, row, FT_FLOAT32);
        else if (job->heads->dtype == FT_BFLOAT16)
            rope_row(job, row, FT_BFLOAT16);
        else
            rope_row(job, row, FT_FLOAT32);
}

void ft_rope_rows(const void *qkv, void *q, const ft_batch *batch, const ft_kv *kv,
                  const ft_heads *heads, int64_t layer, const ft_rope *rope) {
    rope_job job = {qkv, q, batch, kv, heads, layer, rope};
    int64_t width = (heads->num_heads + 2 * heads->num_kv_heads) * heads->head_dim;
    ft_parallel(rope_piece, &job, batch->num_rows, rows_per_piece(width));
}

/* -- for Python ------------------------------------------------------------------------------- */

/* ft_norm_rows, or ft_add_rows if `norm` is NULL. */
FT_EXPORT void ft_add_norm(const void *x, void *residual, float factor, const ft_norm *norm,
                           void *out, int64_t rows, int64_t width, int dtype) {
    if (norm) ft_norm_rows(x, residual, factor, norm, out, rows, width, dtype);
    else ft_add_rows(x, residual, factor, rows, width, dtype);
}

FT_EXPORT void ft_activate(const void *x, void *out, int64_t rows, int64_t width,
                           const ft_activation *activation, int dtype) {
    ft_activate_rows(x, out, rows, width, activation, dtype);
}

FT_EXPORT void ft_gate(void *x, const void *gate, int64_t rows, int64_t width, int dtype) {
    ft_gate_rows(x, gate, width, rows, width, dtype);
}

FT_EXPORT void ft_rope_write(const void *qkv, void *q, const ft_batch *batch, const ft_kv *kv,
                             const ft_heads *heads, int64_t layer, const ft_rope *rope) {
    ft_rope_rows(qkv, q, batch, kv, heads, layer, rope);
}

/* Copy rows `ids` [rows] of a table, whose rows are `bytes` long, to `out`; an id below 0 copies
 * row 0. */
FT_EXPORT void ft_embedding(const int64_t *ids, const void *table, void *out, int64_t rows,
                            int64_t bytes) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t id = ft_max(ids[row], 0);
        memcpy((char *)out + row * bytes, (const char *)table + id * bytes, (size_t)bytes);
    }
}
