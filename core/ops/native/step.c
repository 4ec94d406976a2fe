/* The layers of a whole decoder in one call: the same kernels in the same order as one by one. */
#include "decoder.h"
#include "linear.h"

typedef struct {
    const ft_linear_weight *qkv, *o, *gate_up, *down;
    const void *input_norm, *post_norm; /* [hidden] */
    const float *head_norm;             /* [num_heads + num_kv_heads, head_dim] or NULL */
    int64_t window;                     /* positions, 0 for full attention */
} ft_layer;

typedef struct {
    const ft_layer *layers;
    int64_t num_layers;
    const void *embedding;  /* [vocab, hidden] */
    const void *final_norm; /* [hidden] */
    int64_t hidden, width;  /* of the residual stream, of the MLP */
    float eps, head_eps;
} ft_decoder;

FT_EXPORT void ft_embedding(const int64_t *ids, const void *table, void *out, int64_t rows,
                            int64_t bytes);

/* Activations of a step, [rows, ...]. */
typedef struct {
    char *x, *residual; /* hidden */
    char *wide;         /* QKV, then attention's output, then gate and up */
    char *narrow;       /* queries, then the activation */
} step_space;

static int64_t round_up(int64_t bytes) { return ft_ceil_div(bytes, 64) * 64; }

/* Returns 0, or -1 when there is no memory. */
static int find_space(const ft_decoder *decoder, const ft_heads *heads, int64_t rows,
                      step_space *space) {
    int64_t item = heads->dtype == FT_BFLOAT16 ? 2 : 4, queries = heads->num_heads * heads->head_dim;
    int64_t qkv = queries + 2 * heads->num_kv_heads * heads->head_dim;
    int64_t hidden = round_up(rows * decoder->hidden * item);
    int64_t wide = round_up(rows * ft_max(qkv, 2 * decoder->width) * item);
    int64_t narrow = round_up(rows * ft_max(queries, decoder->width) * item);
    char *memory = ft_scratch(FT_SCRATCH_STEP, (size_t)(2 * hidden + wide + narrow));
    if (!memory) return -1;
    *space = (step_space){memory, memory + hidden, memory + 2 * hidden, memory + 2 * hidden + wide};
    return 0;
}

/* Normed input x and residual of a layer to those of the next, whose norm is `next_norm`. */
static int run_layer(const ft_decoder *decoder, int64_t index, const ft_batch *batch,
                     const ft_kv *kv, const ft_heads *heads, const ft_attend_plan *plan,
                     const step_space *space, const void *next_norm, void *out) {
    const ft_layer *layer = &decoder->layers[index];
    int64_t rows = batch->num_rows;
    int dtype = (int)heads->dtype;
    if (ft_linear(layer->qkv, space->x, dtype, rows, space->wide, dtype)) return -1;
    ft_rope_rows(space->wide, space->narrow, batch, kv, heads, index, layer->head_norm,
                 decoder->head_eps);
    if (ft_attend(space->narrow, space->wide, plan, batch, kv, heads, index, layer->window))
        return -1;
    if (ft_linear(layer->o, space->wide, dtype, rows, space->x, dtype)) return -1;
    ft_norm_rows(space->x, space->residual, layer->post_norm, space->x, rows, decoder->hidden,
                 decoder->eps, dtype);
    if (ft_linear(layer->gate_up, space->x, dtype, rows, space->wide, dtype)) return -1;
    ft_silu_rows(space->wide, space->narrow, rows, decoder->width, dtype);
    if (ft_linear(layer->down, space->narrow, dtype, rows, space->x, dtype)) return -1;
    ft_norm_rows(space->x, space->residual, next_norm, out, rows, decoder->hidden, decoder->eps,
                 dtype);
    return 0;
}

/* Copies of the residual stream: at[count] boundaries, out [num_rows, count, hidden]. */
typedef struct {
    int64_t count;
    const int64_t *at;
    char *out;
} ft_taps;

/* Copy the residual stream [rows] to the place of `boundary`, if it is wanted. */
static void tap(const ft_taps *taps, int64_t boundary, const char *residual, int64_t rows,
                int64_t row_bytes) {
    for (int64_t index = 0; index < taps->count; index++) {
        if (taps->at[index] != boundary) continue;
        char *out = taps->out + index * row_bytes;
        for (int64_t row = 0; row < rows; row++)
            memcpy(out + row * taps->count * row_bytes, residual + row * row_bytes,
                   (size_t)row_bytes);
    }
}

/* Token ids [num_rows] to the final norm's output [num_rows, hidden]; writes KV into the pool.
 * `tapped` [num_rows, num_taps, hidden] gets the residual stream at the boundaries `tapped_at`:
 * 0 is the embedding, b lies behind b layers. Returns 0, or -1 when there is no memory. */
FT_EXPORT int ft_forward(const ft_decoder *decoder, const int64_t *ids, const ft_batch *batch,
                         const ft_kv *kv, const ft_heads *heads, void *out, int64_t num_taps,
                         const int64_t *tapped_at, void *tapped) {
    step_space space;
    ft_attend_plan plan;
    int64_t rows = batch->num_rows, last = decoder->num_layers - 1;
    if (find_space(decoder, heads, rows, &space)) return -1;
    if (ft_plan_attention(batch, kv, heads, &plan)) return -1;
    int64_t row_bytes = decoder->hidden * (heads->dtype == FT_BFLOAT16 ? 2 : 4);
    ft_taps taps = {num_taps, tapped_at, tapped};
    ft_embedding(ids, decoder->embedding, space.residual, rows, row_bytes);
    tap(&taps, 0, space.residual, rows, row_bytes);
    ft_norm_rows(space.residual, NULL, decoder->layers[0].input_norm, space.x, rows,
                 decoder->hidden, decoder->eps, (int)heads->dtype);
    for (int64_t index = 0; index <= last; index++) {
        const void *norm =
            index < last ? decoder->layers[index + 1].input_norm : decoder->final_norm;
        void *target = index < last ? space.x : out;
        if (run_layer(decoder, index, batch, kv, heads, &plan, &space, norm, target)) return -1;
        tap(&taps, index + 1, space.residual, rows, row_bytes);
    }
    return 0;
}
