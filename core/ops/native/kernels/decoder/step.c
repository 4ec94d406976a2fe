/* All layers of a decoder in one call: the same kernels in the same order as in separate calls. */
#include "decoder.h"
#include "experts.h"
#include "attention/latent.h"
#include "linear/linear.h"
#include "linear/lora.h"
#include "sampling/sample.h"
#include "state/state.h"
#include "common/vector.h"

/* -- Gemma 4's parts: see core/ops/gemma4.py
 * ---------------------------------------------------- */

/* Experts of a layer that also has an MLP: they read the residual stream through their own norms,
 * and their output is added to the MLP's. */
typedef struct {
    const ft_experts *experts; /* NULL: no experts */
    const ft_norm *norm, *router_norm, *out_norm, *mlp_out_norm;
} ft_parallel_experts;

/* The block after a layer's MLP, which reads the layer's own input vector of each token. */
typedef struct {
    const ft_linear_weight *gate, *out; /* NULL: no token inputs */
    const ft_norm *out_norm;
    ft_activation activation;
} ft_token_input;

/* Parts of a layer that Llama does not have. */
typedef struct {
    const ft_norm *out_norm; /* norm of MLP + experts, in place of the layer's mlp_out_norm */
    ft_parallel_experts experts;
    ft_token_input token_input;
} ft_extras;

/* The token inputs of all layers: (norm(projection of the embedding) + row of a table) * factor,
 * with a norm for each layer's `width` items. */
typedef struct {
    const void *table;                  /* [vocab, num_layers * width], or NULL */
    const ft_linear_weight *projection; /* [num_layers * width, hidden] */
    const ft_norm *norm;
    int64_t width;
    float factor;
} ft_token_inputs;

/* -- layers and decoder
 * ------------------------------------------------------------------------- */

/* Attention over the pages: over keys and values, or over latents. */
typedef struct {
    ft_rope rope;
    ft_rule rule;
    int64_t part, kv_layer;  /* part of the pool, and layer in it, of keys and values */
    const ft_latent *latent; /* weights of latent attention, or NULL */
} ft_attention;

/* A mixer of the rows of a sequence. `first` computes its input, like QKV, and `second` reads its
 * output. Exactly one of attention, recurrence and conv is not NULL. */
typedef struct {
    const ft_linear_weight *first, *second; /* NULL: no mixer */
    const ft_attention *attention;
    const ft_linear_weight *gates; /* computes the gates of the recurrence; or NULL */
    const ft_recurrence *recurrence;
    const ft_conv *conv;
} ft_mixer;

/* A norm that a layer does not have is NULL. A mixer or an MLP without a norm before it reads
 * the residual stream itself. `gate_up` and `experts` are NULL without an MLP. */
typedef struct {
    ft_mixer mixer, second_mixer; /* both have the same input; their outputs are summed */
    const ft_linear_weight *gate_up, *down;
    const ft_norm *mixer_norm, *mixer_out_norm, *mlp_norm, *mlp_out_norm;
    ft_activation activation;
    int64_t is_parallel;       /* whether the MLP has the mixer's input */
    const ft_experts *experts; /* replaces gate_up and down; or NULL */
    const ft_extras *extras;   /* NULL: no extras */
    /* These multiply the residual stream after the mixer and after the MLP. */
    float mixer_factor, mlp_factor;
} ft_layer;

typedef struct {
    const ft_layer *layers;
    int64_t num_layers;
    const void *embedding; /* [vocab, hidden]; NULL: packed_embedding * embedding_factor */
    const ft_linear_weight *packed_embedding;
    float embedding_factor;
    const ft_norm *final_norm;
    int64_t norms_stream; /* whether the output of each norm replaces the residual stream */
    int64_t hidden, width; /* items of a row of the residual stream, and of the widest MLP */
    /* Items that recurrent layers and gates need in a row of `wide`, `gates`, `narrow`
     * (step_space). */
    int64_t mixed, gates, read;
    ft_token_inputs token_inputs;
    const ft_linear_weight *head; /* the output layer */
} ft_decoder;

FT_EXPORT void ft_embedding(const int64_t *ids, const void *table, void *out, int64_t rows,
                            int64_t bytes);

/* Linears of a layer that adapters may change: the mixer's first and second, gate_up, down. */
enum { NUM_ADAPTABLE = 4 };

/* The updates of one adapter for the linears of all layers, and the rows that it changes. */
typedef struct {
    const ft_lora *const *updates; /* [num_layers, NUM_ADAPTABLE]; NULL: no update */
    const int64_t *rows;           /* [num_rows] */
    int64_t num_rows;
} ft_adapted;

/* Activations of a step. Rows of x, residual and added have `hidden` items. */
typedef struct {
    char *x, *residual;
    char *wide;         /* QKV, then attention's output, then MLP gate and up; or recurrent input */
    char *narrow;       /* queries, then the activation's output; or recurrent output */
    char *gates;        /* fp32 gates of a recurrent layer, or the output of gated attention */
    char *added;        /* output of a parallel block, of a second mixer, or of experts */
    char *inputs;       /* token inputs of all layers */
} step_space;

static int64_t round_up(int64_t bytes) { return ft_ceil_div(bytes, 64) * 64; }

/* Place the activations of a step in scratch memory. Returns 0, or -1 when there is no memory. */
static int find_space(const ft_decoder *decoder, const ft_part *parts, int64_t num_parts,
                      step_space *space) {
    int64_t rows = parts->batch->num_rows, most_queries = 0, most_qkv = 0;
    int64_t item = parts->heads->dtype == FT_BFLOAT16 ? 2 : 4;
    for (int64_t i = 0; i < num_parts; i++) {
        const ft_heads *heads = parts[i].heads;
        int64_t queries = heads->num_heads * heads->head_dim;
        most_queries = ft_max(most_queries, queries);
        most_qkv = ft_max(most_qkv, queries + 2 * heads->num_kv_heads * heads->head_dim);
    }
    int64_t width = ft_max(decoder->width, decoder->token_inputs.width);
    int64_t all_inputs = decoder->token_inputs.width * decoder->num_layers;
    most_qkv = ft_max(ft_max(most_qkv, 2 * width), ft_max(all_inputs, decoder->hidden));
    most_qkv = ft_max(most_qkv, decoder->mixed);
    int64_t hidden = round_up(rows * decoder->hidden * item);
    int64_t wide = round_up(rows * most_qkv * item), inputs = round_up(rows * all_inputs * item);
    int64_t narrow = round_up(rows * ft_max(ft_max(most_queries, width), decoder->read) * item);
    int64_t gates = decoder->mixed ? round_up(rows * ft_max(most_queries, decoder->gates) * 4) : 0;
    size_t bytes = (size_t)(3 * hidden + wide + narrow + gates + inputs);
    char *memory = ft_scratch(FT_SCRATCH_STEP, bytes);
    if (!memory) return -1;
    char *wide_at = memory + 3 * hidden;
    *space = (step_space){
        .x = memory,
        .residual = memory + hidden,
        .wide = wide_at,
        .narrow = wide_at + wide,
        .gates = wide_at + wide + narrow,
        .added = memory + 2 * hidden,
        .inputs = wide_at + wide + narrow + gates,
    };
    return 0;
}

/* The state of a step, which all its operations share. */
typedef struct {
    const ft_decoder *decoder;
    const ft_part *parts;
    const ft_attend_plan *plans; /* one for each part */
    step_space space;
    int64_t rows;
    int dtype;
    const ft_adapted *adapted; /* [num_adapted]; no row is in two of them */
    int64_t num_adapted;
    const int64_t *ids; /* [rows] */
    int64_t num_vectors; /* number of first layers after which vectors are added */
    const char *layer_vectors; /* [num_vectors, rows, hidden] added to rows whose id is below 0 */
} step_job;

/* Add the updates of adapters to y, the output of a linear for x. `index`: index of the linear in
 * `updates`. Returns -1 when there is no memory. */
static int adapt(const step_job *step, int64_t index, const char *x, char *y) {
    ft_lora_rows *found =
        ft_scratch(FT_SCRATCH_UPDATES, (size_t)step->num_adapted * sizeof *found);
    if (!found) return -1;
    int64_t count = 0;
    for (int64_t i = 0; i < step->num_adapted; i++) {
        const ft_adapted *each = &step->adapted[i];
        if (each->updates[index])
            found[count++] = (ft_lora_rows){each->updates[index], each->rows, each->num_rows};
    }
    return ft_add_lora(found, count, x, y, step->dtype);
}

/* Compute a linear of layer `index` from x to y, with the updates of adapters. Returns -1 when
 * there is no memory. */
static int run_linear(const step_job *step, int64_t index, const ft_linear_weight *weight,
                      const char *x, char *y) {
    if (ft_linear(weight, x, step->dtype, step->rows, y, step->dtype)) return -1;
    if (!step->num_adapted) return 0;
    const ft_layer *layer = &step->decoder->layers[index];
    const ft_linear_weight *adaptable[] = {layer->mixer.first, layer->mixer.second, layer->gate_up,
                                           layer->down};
    for (int64_t i = 0; i < NUM_ADAPTABLE; i++)
        if (adaptable[i] == weight) return adapt(step, index * NUM_ADAPTABLE + i, x, y);
    return 0;
}

/* Write the norm of x [rows, hidden] to out; do nothing if `norm` is NULL. */
static void norm_rows(const step_job *step, const char *x, const ft_norm *norm, char *out) {
    if (norm) ft_norm_rows(x, NULL, 1.0f, norm, out, step->rows, step->decoder->hidden, step->dtype);
}

/* Add x to the residual stream and multiply the stream by `factor`. Returns the next input: the
 * norm of the stream, in `out`, or without a norm the stream itself. */
static const char *add(const step_job *step, const char *x, float factor, const ft_norm *norm,
                       char *out) {
    char *residual = step->space.residual;
    int64_t hidden = step->decoder->hidden;
    if (!norm) {
        ft_add_rows(x, residual, factor, step->rows, hidden, step->dtype);
        return residual;
    }
    ft_norm_rows(x, residual, factor, norm, out, step->rows, hidden, step->dtype);
    return out;
}

/* Replace the residual stream with x, the output of its norm, if the decoder `norms_stream`. */
static void norm_stream(const step_job *step, const char *x) {
    char *residual = step->space.residual;
    int64_t bytes = step->decoder->hidden * (step->dtype == FT_BFLOAT16 ? 2 : 4);
    if (step->decoder->norms_stream) memcpy(residual, x, (size_t)(step->rows * bytes));
}

/* Compute attention from x [rows, hidden]. Returns the input of `second`, or NULL when there is no
 * memory. */
static const char *run_attention(const step_job *step, int64_t index, const ft_mixer *mixer,
                                 const char *x) {
    const ft_attention *attention = mixer->attention;
    const ft_part *part = &step->parts[attention->part];
    const ft_attend_plan *plan = &step->plans[attention->part];
    const step_space *space = &step->space;
    int dtype = step->dtype;
    if (attention->latent)
        return ft_run_latent(attention->latent, mixer->first, x, part, plan, attention->kv_layer,
                             &attention->rope, &attention->rule);
    int64_t width = attention->rope.gate, stride = mixer->first->out_features;
    char *attended = width ? space->gates : space->wide;
    ft_linear_ahead(mixer->second);
    if (run_linear(step, index, mixer->first, x, space->wide)) return NULL;
    ft_rope_rows(space->wide, space->narrow, part->batch, part->kv, part->heads,
                 attention->kv_layer, &attention->rope);
    if (ft_attend(space->narrow, attended, plan, part->batch, part->kv, part->heads,
                  attention->kv_layer, &attention->rule))
        return NULL;
    const char *gate = space->wide + (stride - width) * (dtype == FT_BFLOAT16 ? 2 : 4);
    if (width) ft_gate_rows(attended, gate, stride, step->rows, width, dtype);
    return attended;
}

/* Like run_attention, for a recurrent mixer. */
static const char *run_recurrent(const step_job *step, int64_t index, const ft_mixer *mixer,
                                 const char *x) {
    const step_space *space = &step->space;
    int dtype = step->dtype;
    float *gates = (float *)space->gates;
    ft_linear_ahead(mixer->gates);
    if (run_linear(step, index, mixer->first, x, space->wide)) return NULL;
    ft_linear_ahead(mixer->second);
    if (mixer->gates && ft_linear(mixer->gates, x, dtype, step->rows, gates, FT_FLOAT32))
        return NULL;
    if (ft_run_recurrent(space->wide, gates, space->narrow, step->parts->batch, mixer->recurrence,
                         dtype))
        return NULL;
    return space->narrow;
}

/* Like run_attention, for a short convolution. */
static const char *run_conv(const step_job *step, int64_t index, const ft_mixer *mixer,
                            const char *x) {
    const step_space *space = &step->space;
    ft_linear_ahead(mixer->second);
    if (run_linear(step, index, mixer->first, x, space->wide)) return NULL;
    ft_run_conv(space->wide, space->narrow, step->parts->batch, mixer->conv, step->dtype);
    return space->narrow;
}

/* Write a mixer's output, after its `second`, to `out`, which may be x. `next`: linear that is
 * computed after it. */
static int run_mixer(const step_job *step, int64_t index, const ft_mixer *mixer,
                     const ft_linear_weight *next, const char *x, char *out) {
    const char *mixed = mixer->attention    ? run_attention(step, index, mixer, x)
                        : mixer->recurrence ? run_recurrent(step, index, mixer, x)
                                            : run_conv(step, index, mixer, x);
    if (!mixed) return -1;
    ft_linear_ahead(next);
    return run_linear(step, index, mixer->second, mixed, out);
}

/* Write the sum of the outputs of a layer's mixers, after its norm, to `out`, which may be x. */
static int run_mixers(const step_job *step, int64_t index, const char *x, char *out) {
    const ft_layer *layer = &step->decoder->layers[index];
    char *added = step->space.added; /* free: a layer with two mixers is not parallel */
    int has_second = layer->second_mixer.first != NULL;
    if (has_second && run_mixer(step, index, &layer->second_mixer, layer->mixer.first, x, added))
        return -1;
    if (run_mixer(step, index, &layer->mixer, layer->gate_up, x, out)) return -1;
    if (has_second)
        ft_add_rows(added, out, 1.0f, step->rows, step->decoder->hidden, step->dtype);
    norm_rows(step, out, layer->mixer_out_norm, out);
    return 0;
}

/* Write the MLP's output, after its norm, to `out`. */
static int run_mlp(const step_job *step, int64_t index, const char *x, char *out) {
    const ft_layer *layer = &step->decoder->layers[index];
    const step_space *space = &step->space;
    int dtype = step->dtype;
    if (layer->experts) {
        if (ft_run_experts(layer->experts, x, x, out, step->rows, dtype)) return -1;
    } else {
        ft_linear_ahead(layer->down);
        if (run_linear(step, index, layer->gate_up, x, space->wide)) return -1;
        ft_activate_rows(space->wide, space->narrow, step->rows, layer->down->in_features,
                         &layer->activation, dtype);
        ft_linear_ahead(index + 1 < step->decoder->num_layers ? layer[1].mixer.first : NULL);
        if (run_linear(step, index, layer->down, space->narrow, out)) return -1;
    }
    norm_rows(step, out, layer->mlp_out_norm, out);
    return 0;
}

/* -- Gemma 4's parts
 * ---------------------------------------------------------------------------- */

/* Add the output of the experts to `out`, the output of the MLP. */
static int add_experts(const step_job *step, const ft_parallel_experts *parallel, char *out) {
    const step_space *space = &step->space;
    norm_rows(step, out, parallel->mlp_out_norm, out);
    norm_rows(step, space->residual, parallel->norm, space->added);
    norm_rows(step, space->residual, parallel->router_norm, space->wide);
    if (ft_run_experts(parallel->experts, space->wide, space->added, space->added, step->rows,
                       step->dtype))
        return -1;
    norm_rows(step, space->added, parallel->out_norm, space->added);
    ft_add_rows(space->added, out, 1.0f, step->rows, step->decoder->hidden, step->dtype);
    return 0;
}

/* Compute the token inputs of all layers. The residual stream must hold the embeddings. */
static int make_inputs(const step_job *step, const int64_t *ids) {
    const ft_token_inputs *inputs = &step->decoder->token_inputs;
    const step_space *space = &step->space;
    int64_t num_layers = step->decoder->num_layers, width = num_layers * inputs->width;
    int dtype = step->dtype;
    ft_embedding(ids, inputs->table, space->inputs, step->rows,
                 width * (dtype == FT_BFLOAT16 ? 2 : 4));
    if (ft_linear(inputs->projection, space->residual, dtype, step->rows, space->wide, dtype))
        return -1;
    ft_norm_rows(space->wide, NULL, 1.0f, inputs->norm, space->wide, step->rows * num_layers,
                 inputs->width, dtype);
    ft_add_rows(space->wide, space->inputs, inputs->factor, step->rows, width, dtype);
    return 0;
}

/* Write the output of a layer's token input block to `out`. */
static int run_input(const step_job *step, int64_t index, char *out) {
    const ft_token_input *layer = &step->decoder->layers[index].extras->token_input;
    const step_space *space = &step->space;
    int dtype = step->dtype;
    int64_t item = dtype == FT_BFLOAT16 ? 2 : 4, width = step->decoder->token_inputs.width;
    int64_t bytes = width * item, stride = bytes * step->decoder->num_layers;
    if (ft_linear(layer->gate, space->residual, dtype, step->rows, space->narrow, dtype)) return -1;
    for (int64_t row = 0; row < step->rows; row++) {
        char *pair = space->wide + 2 * row * bytes;
        memcpy(pair, space->narrow + row * bytes, (size_t)bytes);
        memcpy(pair + bytes, space->inputs + row * stride + index * bytes, (size_t)bytes);
    }
    ft_activate_rows(space->wide, space->narrow, step->rows, width, &layer->activation, dtype);
    if (ft_linear(layer->out, space->narrow, dtype, step->rows, out, dtype)) return -1;
    norm_rows(step, out, layer->out_norm, out);
    return 0;
}

/* Replace the MLP's output in `out` with the layer's last addition to the residual stream: the sum
 * of MLP and experts. If the layer has token inputs, that sum is added to the stream here, and
 * `out` is the output of the token input block. */
static int add_extras(const step_job *step, int64_t index, char *out) {
    const ft_extras *extras = step->decoder->layers[index].extras;
    if (extras->experts.experts && add_experts(step, &extras->experts, out)) return -1;
    norm_rows(step, out, extras->out_norm, out);
    if (!extras->token_input.gate) return 0;
    add(step, out, 1.0f, NULL, NULL);
    return run_input(step, index, out);
}

/* -- the layers
 * ---------------------------------------------------------------------------------- */

/* Add the layer's vectors to `added`, in rows whose token id is below 0. */
static void add_layer_vectors(const step_job *step, int64_t index, char *added) {
    if (index >= step->num_vectors) return;
    int64_t hidden = step->decoder->hidden, row_bytes = hidden * (step->dtype == FT_BFLOAT16 ? 2 : 4);
    const char *vectors = step->layer_vectors + index * step->rows * row_bytes;
    for (int64_t row = 0, stop; row < step->rows; row = stop) {
        for (stop = row; stop < step->rows && step->ids[stop] < 0; stop++) continue;
        if (stop > row)
            ft_add_rows(vectors + row * row_bytes, added + row * row_bytes, 1.0f, stop - row,
                        hidden, step->dtype);
        else
            stop = row + 1;
    }
}

/* Run a layer on its input x. Returns the input of the next layer: the residual stream after
 * `next_norm`, in `out`, or without a norm the stream itself; NULL when there is no memory. */
static const char *run_layer(const step_job *step, int64_t index, const char *x,
                             const ft_norm *next_norm, char *out) {
    const ft_layer *layer = &step->decoder->layers[index];
    /* The MLP of a parallel layer reads x after the mixer has run. */
    char *added = layer->is_parallel ? step->space.added : step->space.x;
    const char *next = x;
    if (layer->mixer.first) {
        if (run_mixers(step, index, x, added)) return NULL;
        if (!layer->gate_up && !layer->experts) {
            add_layer_vectors(step, index, added);
            return add(step, added, layer->mlp_factor, next_norm, out);
        }
        next = add(step, added, layer->mixer_factor, layer->is_parallel ? NULL : layer->mlp_norm,
                   step->space.x);
        norm_stream(step, next);
    }
    if (run_mlp(step, index, layer->is_parallel ? x : next, added)) return NULL;
    if (layer->extras && add_extras(step, index, added)) return NULL;
    add_layer_vectors(step, index, added);
    return add(step, added, layer->mlp_factor, next_norm, out);
}

/* Boundaries at[count] whose residual streams are copied to out [num_rows, count, hidden]. */
typedef struct {
    int64_t count;
    const int64_t *at;
    char *out;
} ft_taps;

/* Copy the residual stream to `taps` if it has `boundary`. */
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

/* Fill the residual stream with rows of the embedding, and with rows of `given` [num_rows, hidden]
 * for ids below 0. */
static void embed(const step_job *step, const int64_t *ids, const char *given, int64_t row_bytes) {
    const ft_decoder *decoder = step->decoder;
    char *residual = step->space.residual;
    if (decoder->embedding) {
        ft_embedding(ids, decoder->embedding, residual, step->rows, row_bytes);
    } else {
        ft_unpack_rows(decoder->packed_embedding, ids, step->rows, decoder->embedding_factor,
                       residual, step->dtype);
    }
    for (int64_t row = 0; given && row < step->rows; row++)
        if (ids[row] < 0)
            memcpy(residual + row * row_bytes, given + row * row_bytes, (size_t)row_bytes);
}

/* Compute logits [num_logits, vocab] of the rows `at` of `hidden` [num_rows, hidden]; of all rows
 * if `at` is NULL. Returns 0, or -1 when there is no memory. */
static int make_logits(const step_job *step, const char *hidden, int64_t row_bytes,
                       const int64_t *at, int64_t num_logits, float *logits) {
    char *rows = step->space.x; /* free after the last layer */
    for (int64_t index = 0; at && index < num_logits; index++)
        memcpy(rows + index * row_bytes, hidden + at[index] * row_bytes, (size_t)row_bytes);
    return ft_linear(step->decoder->head, at ? rows : hidden, step->dtype, num_logits, logits,
                     FT_FLOAT32);
}

/* Run all layers on token ids [num_rows]: write KV to the pool, and the final norm's output to
 * `out` [num_rows, hidden]. `given`: see `embed`; NULL if no id is below 0. `layer_vectors`
 * [num_vectors, num_rows, hidden]: see `add_layer_vectors`. `adapted`: updates of adapters, with
 * their rows. `tapped` [num_rows, num_taps, hidden] gets the residual stream at the boundaries
 * `tapped_at`: boundary 0 is the embedding, boundary b follows b layers. `logits` [num_logits,
 * vocab]: see `make_logits`. Returns 0, or -1 when there is no memory. */
FT_EXPORT int ft_forward(const ft_decoder *decoder, const int64_t *ids, const void *given,
                         int64_t num_vectors, const void *layer_vectors, const ft_part *parts,
                         int64_t num_parts, const ft_adapted *adapted, int64_t num_adapted,
                         void *out, int64_t num_taps, const int64_t *tapped_at, void *tapped,
                         const int64_t *logit_rows, int64_t num_logits, float *logits) {
    ft_attend_plan plans[FT_MAX_PARTS];
    int64_t last = decoder->num_layers - 1;
    step_job step = {decoder, parts, plans, .rows = parts->batch->num_rows,
                     .dtype = (int)parts->heads->dtype, .adapted = adapted,
                     .num_adapted = num_adapted, .ids = ids, .num_vectors = num_vectors,
                     .layer_vectors = layer_vectors};
    const step_space *space = &step.space;
    if (find_space(decoder, parts, num_parts, &step.space)) return -1;
    if (ft_plan_attention(parts, num_parts, plans)) return -1;
    int64_t row_bytes = decoder->hidden * (step.dtype == FT_BFLOAT16 ? 2 : 4);
    ft_taps taps = {num_taps, tapped_at, tapped};
    embed(&step, ids, given, row_bytes);
    tap(&taps, 0, space->residual, step.rows, row_bytes);
    if (decoder->token_inputs.table && make_inputs(&step, ids)) return -1;
    const ft_norm *first = decoder->layers[0].mixer_norm;
    norm_rows(&step, space->residual, first, space->x);
    const char *x = first ? space->x : space->residual;
    norm_stream(&step, x);
    for (int64_t index = 0; index <= last; index++) {
        const ft_norm *norm =
            index < last ? decoder->layers[index + 1].mixer_norm : decoder->final_norm;
        x = run_layer(&step, index, x, norm, index < last ? space->x : out);
        if (!x) return -1;
        tap(&taps, index + 1, space->residual, step.rows, row_bytes);
        norm_stream(&step, x);
    }
    return make_logits(&step, out, row_bytes, logit_rows, num_logits, logits);
}

/* -- a pass of drafts in one call
 * --------------------------------------------------------------- */

/* Like ft_part, without a batch; the tables have all positions. */
typedef struct {
    const ft_kv *kv;
    const ft_heads *heads;
    int64_t num_tables;
    const float *const *tables; /* [2 * num_tables] cos, then sin: each [positions, rotated / 2] */
} ft_row_part;

/* A row in `layout`: its token, its position, its number of pages, its number of tail slots, then
 * the pages, then the tail slots. */
enum { ROW_TOKEN, ROW_POSITION, ROW_PAGES, ROW_TAIL, ROW_HEAD };

/* Memory of a pass, taken in pieces; with `memory` NULL, `take` only adds up their sizes. */
typedef struct {
    char *memory;
    size_t used;
} pieces;

static void *take(pieces *from, int64_t bytes) {
    void *piece = from->memory ? from->memory + from->used : NULL;
    from->used += (size_t)round_up(bytes);
    return piece;
}

typedef struct {
    int64_t *ids, *starts, *lens, *first_rows, *pages, *tail_from, *first_tails, *slots;
    float *cos_sin[FT_MAX_PARTS];
    char *hidden;
    float *logits;
} pass_space;

static pass_space lay_out_rows(pieces *from, const ft_row_part *parts, int64_t num_parts,
                              int64_t rows, int64_t max_pages, int64_t hidden, int64_t vocab) {
    pass_space space;
    int64_t **columns[] = {&space.ids, &space.starts, &space.lens, &space.first_rows,
                           &space.tail_from, &space.first_tails, &space.slots};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) *columns[i] = take(from, rows * 8);
    space.pages = take(from, rows * max_pages * 8);
    for (int64_t i = 0; i < num_parts; i++)
        space.cos_sin[i] = take(from, parts[i].num_tables * rows * parts[i].heads->head_dim * 4);
    space.hidden = take(from, rows * hidden * 4);
    space.logits = take(from, rows * vocab * 4);
    return space;
}

/* Read `layout` into the arrays of a batch in which each row is its own segment. */
static void read_rows(const int64_t *layout, int64_t rows, int64_t max_pages, int64_t page_size,
                      const pass_space *space) {
    const int64_t *at = layout;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t position = at[ROW_POSITION], num_tails = at[ROW_TAIL];
        const int64_t *pages = at + ROW_HEAD, *tail = pages + at[ROW_PAGES];
        space->ids[row] = at[ROW_TOKEN];
        space->starts[row] = position;
        space->lens[row] = 1;
        space->first_rows[row] = row;
        memcpy(space->pages + row * max_pages, pages, (size_t)at[ROW_PAGES] * sizeof *pages);
        space->tail_from[row] = position + 1 - num_tails;
        space->first_tails[row] = tail - layout;
        at = tail + num_tails;
        space->slots[row] = num_tails
                                ? tail[num_tails - 1]
                                : pages[position / page_size] * page_size + position % page_size;
    }
}

/* Copy the rows' cos from each table, then their sin from each, to `out`. */
static void read_rope(const ft_row_part *part, const pass_space *space, int64_t rows, float *out) {
    const int64_t width = ft_rope_dim(part->heads) / 2;
    for (int64_t table = 0; table < 2 * part->num_tables; table++)
        for (int64_t row = 0; row < rows; row++, out += width)
            memcpy(out, part->tables[table] + space->starts[row] * width, (size_t)width * 4);
}

static void cap_logits(void *context, int64_t begin, int64_t end) {
    float *const *job = context; /* logits and the cap */
    const ft_vec cap = v_set(*job[1]);
    for (int64_t at = begin * FT_WIDTH; at < end * FT_WIDTH; at += FT_WIDTH)
        v_store(job[0] + at, v_mul(v_tanh(v_div(v_load(job[0] + at), cap)), cap));
}

/* Run one pass over one row per request: write the row's KV to the pool and find the `num_best`
 * best next tokens, as ft_best does. `max_pages`: greatest number of pages of a row. `cap`: logits
 * become cap * tanh(logits / cap); 0: they stay. Returns 0, or -1 when there is no memory. */
FT_EXPORT int ft_row_pass(const ft_decoder *decoder, float cap, const ft_row_part *parts,
                          int64_t num_parts, const int64_t *layout, int64_t max_pages,
                          const int64_t *hashes, const ft_walk *walks, int64_t rows,
                          const int64_t *drafts, int64_t num_best, int64_t *tokens, float *scores,
                          int64_t *counts) {
    const int64_t vocab = decoder->head->out_features;
    pieces memory = {0};
    lay_out_rows(&memory, parts, num_parts, rows, max_pages, decoder->hidden, vocab);
    memory = (pieces){ft_scratch(FT_SCRATCH_PASS, memory.used), 0};
    if (!memory.memory) return -1;
    const pass_space space =
        lay_out_rows(&memory, parts, num_parts, rows, max_pages, decoder->hidden, vocab);
    read_rows(layout, rows, max_pages, parts->kv->page_size, &space);
    ft_batch batches[FT_MAX_PARTS];
    ft_part of_batch[FT_MAX_PARTS];
    for (int64_t i = 0; i < num_parts; i++) {
        const int64_t sin_at = parts[i].num_tables * rows * (ft_rope_dim(parts[i].heads) / 2);
        read_rope(&parts[i], &space, rows, space.cos_sin[i]);
        batches[i] = (ft_batch){rows, rows, max_pages, space.starts, space.lens, space.first_rows,
                                space.pages, space.tail_from, space.first_tails, layout, space.slots,
                                space.cos_sin[i], space.cos_sin[i] + sin_at, NULL, NULL};
        of_batch[i] = (ft_part){&batches[i], parts[i].kv, parts[i].heads};
    }
    if (ft_forward(decoder, space.ids, NULL, 0, NULL, of_batch, num_parts, NULL, 0, space.hidden, 0,
                   NULL, NULL, NULL, rows, space.logits))
        return -1;
    float *to_cap[] = {space.logits, &cap};
    if (cap > 0.0f) ft_parallel(cap_logits, to_cap, ft_ceil_div(rows * vocab, FT_WIDTH), 1024);
    return ft_best(space.logits, vocab, hashes, walks, rows, drafts, num_best, tokens, scores,
                   counts);
}
