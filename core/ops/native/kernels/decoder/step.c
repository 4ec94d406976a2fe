/* The layers of a whole decoder in one call: the same kernels in the same order as one by one. */
#include "decoder.h"
#include "experts.h"
#include "attention/latent.h"
#include "linear/linear.h"
#include "linear/lora.h"
#include "sampling/sample.h"
#include "state/state.h"
#include "common/vector.h"

/* -- Gemma 4's parts: see ../gemma4.py ---------------------------------------------------------- */

/* Experts beside the MLP, which read the stream by norms of their own. */
typedef struct {
    const ft_experts *experts; /* NULL: there are none */
    const ft_norm *norm, *router_norm, *out_norm, *mlp_out_norm;
} ft_beside;

/* What a layer makes of its input of each token, behind its MLP. */
typedef struct {
    const ft_linear_weight *gate, *out; /* NULL: there are no such inputs */
    const ft_norm *out_norm;
    ft_activation activation;
} ft_token_input;

/* What a layer has besides Llama's parts. */
typedef struct {
    const ft_norm *out_norm; /* of the sum of MLP and experts, in place of the layer's mlp_out_norm */
    float factor;            /* of the stream behind the layer */
    ft_beside beside;
    ft_token_input token_input;
} ft_extras;

/* The inputs of all layers: the norm of each one's part of a projection of the embedding, plus a
 * row of a table, times a factor. */
typedef struct {
    const void *table;                  /* [vocab, num_layers * width], or NULL */
    const ft_linear_weight *projection; /* [num_layers * width, hidden] */
    const ft_norm *norm;
    int64_t width;
    float factor;
} ft_token_inputs;

/* -- layers and decoder ------------------------------------------------------------------------- */

/* What mixes rows in place of attention or beside it: `first` makes its rows, `second` takes its
 * output, as a layer's do for attention: `first` makes QKV, and `second` is o. */
typedef struct {
    const ft_linear_weight *first, *gates, *second;
    ft_recurrence rule;
} ft_recurrent;

/* Norms that a layer does not have are NULL. Without one before the mixer or the MLP, these read
 * the residual stream itself. A layer without a mixer has no `second`, one without an MLP neither
 * `gate_up` nor `experts`. */
typedef struct {
    const ft_linear_weight *first, *second, *gate_up, *down;
    const ft_norm *mixer_norm, *mixer_out_norm, *mlp_norm, *mlp_out_norm;
    ft_turn turn;
    ft_rule rule;
    ft_activation activation;
    int64_t is_parallel;       /* whether the MLP reads what attention reads */
    const ft_experts *experts; /* in place of gate_up and down, or NULL */
    int64_t part, kv_layer;    /* where its keys and values are */
    const ft_extras *extras;   /* or NULL */
    const ft_recurrent *recurrent; /* in place of attention, or NULL */
    const ft_conv *conv;           /* likewise */
    const ft_recurrent *beside;    /* reads what attention reads, or NULL */
    const ft_latent *latent;       /* of latent attention, or NULL */
} ft_layer;

typedef struct {
    const ft_layer *layers;
    int64_t num_layers;
    const void *embedding; /* [vocab, hidden], or NULL: rows of a packed weight, times a factor */
    const ft_linear_weight *packed_embedding;
    float embedding_factor;
    const ft_norm *final_norm;
    int64_t hidden, width; /* of the residual stream, of the widest MLP */
    int64_t mixed, gates, read; /* the widest rows that recurrent layers or gates make, see step_space */
    ft_token_inputs token_inputs;
    const ft_linear_weight *head; /* the output layer */
} ft_decoder;

FT_EXPORT void ft_embedding(const int64_t *ids, const void *table, void *out, int64_t rows,
                            int64_t bytes);

/* An adapter's updates of all layers' linears, and the rows that get them. */
enum { NUM_PLACES = 4 }; /* first, second, gate_up, down */
typedef struct {
    const ft_lora *const *updates; /* [num_layers, NUM_PLACES], NULL where there is none */
    const int64_t *rows;           /* [num_rows] */
    int64_t num_rows;
} ft_adapted;

/* Activations of a step, [rows, ...]. */
typedef struct {
    char *x, *residual; /* hidden */
    char *wide;         /* QKV and its gate, then attention's output, then gate and up; `mixed` */
    char *narrow;       /* queries, then the activation; what recurrent layers `read` */
    char *beside;       /* what is beside `mixed`: fp32 of `gates`, or gated attention's output */
    char *added;        /* hidden: what a parallel block adds to the stream, what experts say */
    char *inputs;       /* of tokens for all layers */
} step_space;

static int64_t round_up(int64_t bytes) { return ft_ceil_div(bytes, 64) * 64; }

/* Returns 0, or -1 when there is no memory. */
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
    int64_t beside = decoder->mixed ? round_up(rows * ft_max(most_queries, decoder->gates) * 4) : 0;
    size_t bytes = (size_t)(3 * hidden + wide + narrow + beside + inputs);
    char *memory = ft_scratch(FT_SCRATCH_STEP, bytes);
    if (!memory) return -1;
    char *behind = memory + 3 * hidden;
    *space = (step_space){
        .x = memory,
        .residual = memory + hidden,
        .wide = behind,
        .narrow = behind + wide,
        .beside = behind + wide + narrow,
        .added = memory + 2 * hidden,
        .inputs = behind + wide + narrow + beside,
    };
    return 0;
}

/* What a layer's steps work on. */
typedef struct {
    const ft_decoder *decoder;
    const ft_part *parts;
    const ft_attend_plan *plans; /* of the parts */
    step_space space;
    int64_t rows;
    int dtype;
    const ft_adapted *adapted; /* [num_adapted], no row in two of them */
    int64_t num_adapted;
    const int64_t *ids; /* [rows] */
    int64_t num_behind; /* layers behind which rows of images get more, `behind` of them */
    const char *behind;
} step_job;

/* Add what adapters change of y, which a linear at a place of the layers has made of x. */
static int adapt(const step_job *step, int64_t place, const char *x, char *y) {
    ft_lora_rows *found =
        ft_scratch(FT_SCRATCH_UPDATES, (size_t)step->num_adapted * sizeof *found);
    if (!found) return -1;
    int64_t count = 0;
    for (int64_t i = 0; i < step->num_adapted; i++) {
        const ft_adapted *each = &step->adapted[i];
        if (each->updates[place])
            found[count++] = (ft_lora_rows){each->updates[place], each->rows, each->num_rows};
    }
    return ft_add_lora(found, count, x, y, step->dtype);
}

/* Rows x to y by a linear of a layer, and what adapters change of it. */
static int run_linear(const step_job *step, int64_t index, const ft_linear_weight *weight,
                      const char *x, char *y) {
    if (ft_linear(weight, x, step->dtype, step->rows, y, step->dtype)) return -1;
    if (!step->num_adapted) return 0;
    const ft_layer *layer = &step->decoder->layers[index];
    const ft_linear_weight *places[] = {layer->first, layer->second, layer->gate_up, layer->down};
    for (int64_t place = 0; place < NUM_PLACES; place++)
        if (places[place] == weight) return adapt(step, index * NUM_PLACES + place, x, y);
    return 0;
}

/* The norm of rows of the stream's width, where there is one. */
static void norm_rows(const step_job *step, const char *x, const ft_norm *norm, char *out) {
    if (norm) ft_norm_rows(x, NULL, 1.0f, norm, out, step->rows, step->decoder->hidden, step->dtype);
}

/* Add x to the stream, times `factor`; what is read next, its norm in `out` or the stream itself. */
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

/* Rows x to what `second` takes; NULL when there is no memory. */
static const char *run_attention(const step_job *step, int64_t index, const char *x) {
    const ft_layer *layer = &step->decoder->layers[index];
    const ft_part *part = &step->parts[layer->part];
    const step_space *space = &step->space;
    int dtype = step->dtype;
    int64_t width = layer->turn.gate, stride = layer->first->out_features;
    char *attended = width ? space->beside : space->wide;
    ft_linear_ahead(layer->second);
    if (run_linear(step, index, layer->first, x, space->wide)) return NULL;
    ft_rope_rows(space->wide, space->narrow, part->batch, part->kv, part->heads, layer->kv_layer,
                 &layer->turn);
    if (ft_attend(space->narrow, attended, &step->plans[layer->part], part->batch, part->kv,
                  part->heads, layer->kv_layer, &layer->rule))
        return NULL;
    const char *gate = space->wide + (stride - width) * (dtype == FT_BFLOAT16 ? 2 : 4);
    if (width) ft_gate_rows(attended, gate, stride, step->rows, width, dtype);
    return attended;
}

/* The same by the states of the sequences. */
static const char *run_recurrent(const step_job *step, int64_t index, const ft_recurrent *mixer,
                                 const char *x) {
    const step_space *space = &step->space;
    int dtype = step->dtype;
    float *gates = (float *)space->beside;
    ft_linear_ahead(mixer->gates);
    if (run_linear(step, index, mixer->first, x, space->wide)) return NULL;
    ft_linear_ahead(mixer->second);
    if (ft_linear(mixer->gates, x, dtype, step->rows, gates, FT_FLOAT32)) return NULL;
    if (ft_run_recurrent(space->wide, gates, space->narrow, step->parts->batch, &mixer->rule, dtype))
        return NULL;
    return space->narrow;
}

/* The same by a short convolution. */
static const char *run_conv(const step_job *step, int64_t index, const char *x) {
    const ft_layer *layer = &step->decoder->layers[index];
    const step_space *space = &step->space;
    int dtype = step->dtype;
    ft_linear_ahead(layer->second);
    if (run_linear(step, index, layer->first, x, space->wide)) return NULL;
    ft_run_conv(space->wide, space->narrow, step->parts->batch, layer->conv, dtype);
    return space->narrow;
}

/* The same by whichever the layer has. */
static const char *run_any(const step_job *step, int64_t index, const char *x) {
    const ft_layer *layer = &step->decoder->layers[index];
    const ft_part *part = &step->parts[layer->part];
    if (layer->latent)
        return ft_run_latent(layer->latent, layer->first, x, part, &step->plans[layer->part],
                             layer->kv_layer, &layer->turn, &layer->rule);
    if (layer->conv) return run_conv(step, index, x);
    if (layer->recurrent) return run_recurrent(step, index, layer->recurrent, x);
    return run_attention(step, index, x);
}

/* Rows x to what a mixer beside attention adds to the stream, in `out`. */
static int run_beside(const step_job *step, int64_t index, const ft_recurrent *mixer,
                      const char *x, char *out) {
    const char *mixed = run_recurrent(step, index, mixer, x);
    return mixed ? run_linear(step, index, mixer->second, mixed, out) : -1;
}

/* Rows x to what the mixer adds to the stream, in `out`, which may be x. */
static int run_mixer(const step_job *step, int64_t index, const char *x, char *out) {
    const ft_layer *layer = &step->decoder->layers[index];
    char *added = step->space.added; /* only where no parallel MLP has its output there */
    if (layer->beside && run_beside(step, index, layer->beside, x, added)) return -1;
    const char *mixed = run_any(step, index, x);
    if (!mixed) return -1;
    ft_linear_ahead(layer->gate_up);
    if (run_linear(step, index, layer->second, mixed, out)) return -1;
    if (layer->beside)
        ft_add_rows(added, out, 1.0f, step->rows, step->decoder->hidden, step->dtype);
    norm_rows(step, out, layer->mixer_out_norm, out);
    return 0;
}

/* The same for the MLP. */
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
        ft_linear_ahead(index + 1 < step->decoder->num_layers ? layer[1].first : NULL);
        if (run_linear(step, index, layer->down, space->narrow, out)) return -1;
    }
    norm_rows(step, out, layer->mlp_out_norm, out);
    return 0;
}

/* -- Gemma 4's parts ---------------------------------------------------------------------------- */

/* Add the output of experts beside the MLP to `out`, the output of the MLP. */
static int add_experts(const step_job *step, const ft_beside *beside, char *out) {
    const step_space *space = &step->space;
    norm_rows(step, out, beside->mlp_out_norm, out);
    norm_rows(step, space->residual, beside->norm, space->added);
    norm_rows(step, space->residual, beside->router_norm, space->wide);
    if (ft_run_experts(beside->experts, space->wide, space->added, space->added, step->rows,
                       step->dtype))
        return -1;
    norm_rows(step, space->added, beside->out_norm, space->added);
    ft_add_rows(space->added, out, 1.0f, step->rows, step->decoder->hidden, step->dtype);
    return 0;
}

/* The token inputs of all layers, of the embedding in the stream. */
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

/* What a layer adds to the stream of the inputs that tokens have for it, in `out`. */
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

/* The MLP's output in `out` to what is still to be added to the stream, in `out`. */
static int add_extras(const step_job *step, int64_t index, char *out) {
    const ft_extras *extras = step->decoder->layers[index].extras;
    if (extras->beside.experts && add_experts(step, &extras->beside, out)) return -1;
    norm_rows(step, out, extras->out_norm, out);
    if (!extras->token_input.gate) return 0;
    add(step, out, 1.0f, NULL, NULL);
    return run_input(step, index, out);
}

/* -- the layers ---------------------------------------------------------------------------------- */

/* Add what images add to the stream behind a layer to what the layer adds, in rows of ids below 0. */
static void add_behind(const step_job *step, int64_t index, char *added) {
    if (index >= step->num_behind) return;
    int64_t hidden = step->decoder->hidden, row_bytes = hidden * (step->dtype == FT_BFLOAT16 ? 2 : 4);
    const char *behind = step->behind + index * step->rows * row_bytes;
    for (int64_t row = 0, stop; row < step->rows; row = stop) {
        for (stop = row; stop < step->rows && step->ids[stop] < 0; stop++) continue;
        if (stop > row)
            ft_add_rows(behind + row * row_bytes, added + row * row_bytes, 1.0f, stop - row, hidden,
                        step->dtype);
        else
            stop = row + 1;
    }
}

/* Input x of a layer to that of the next, whose norm is `next_norm`, in `out` or the stream itself.
 * Returns NULL when there is no memory. */
static const char *run_layer(const step_job *step, int64_t index, const char *x,
                             const ft_norm *next_norm, char *out) {
    const ft_layer *layer = &step->decoder->layers[index];
    /* In parallel x is read again. */
    char *added = layer->is_parallel ? step->space.added : step->space.x;
    const char *next = x;
    if (layer->second) {
        if (run_mixer(step, index, x, added)) return NULL;
        if (!layer->gate_up && !layer->experts) {
            add_behind(step, index, added);
            return add(step, added, 1.0f, next_norm, out);
        }
        next = add(step, added, 1.0f, layer->is_parallel ? NULL : layer->mlp_norm, step->space.x);
    }
    if (run_mlp(step, index, layer->is_parallel ? x : next, added)) return NULL;
    if (layer->extras && add_extras(step, index, added)) return NULL;
    add_behind(step, index, added);
    return add(step, added, layer->extras ? layer->extras->factor : 1.0f, next_norm, out);
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

/* The stream before the layers: the rows of the embedding, and those of `given` [num_rows, hidden]
 * in the place of ids below 0. */
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

/* Logits [num_logits, vocab] of rows of `hidden` [num_rows, hidden]; `at` NULL: of all of them.
 * Returns 0, or -1 when there is no memory. */
static int make_logits(const step_job *step, const char *hidden, int64_t row_bytes,
                       const int64_t *at, int64_t num_logits, float *logits) {
    char *rows = step->space.x; /* no layer needs it any more */
    for (int64_t index = 0; at && index < num_logits; index++)
        memcpy(rows + index * row_bytes, hidden + at[index] * row_bytes, (size_t)row_bytes);
    return ft_linear(step->decoder->head, at ? rows : hidden, step->dtype, num_logits, logits,
                     FT_FLOAT32);
}

/* Token ids [num_rows] to the final norm's output [num_rows, hidden]; writes KV into the pool.
 * `given`: see `embed`; NULL where there are no such ids. `behind` [num_behind, num_rows, hidden]:
 * see `add_behind`. `adapted`: rows that adapters change.
 * `tapped` [num_rows, num_taps, hidden] gets the residual stream at the boundaries `tapped_at`:
 * 0 is the embedding, b lies behind b layers. `logits` [num_logits, vocab]: see `make_logits`.
 * Returns 0, or -1 when there is no memory. */
FT_EXPORT int ft_forward(const ft_decoder *decoder, const int64_t *ids, const void *given,
                         int64_t num_behind, const void *behind, const ft_part *parts,
                         int64_t num_parts, const ft_adapted *adapted, int64_t num_adapted,
                         void *out, int64_t num_taps, const int64_t *tapped_at, void *tapped,
                         const int64_t *logit_rows, int64_t num_logits, float *logits) {
    ft_attend_plan plans[FT_MAX_PARTS];
    int64_t last = decoder->num_layers - 1;
    step_job step = {decoder, parts, plans, .rows = parts->batch->num_rows,
                     .dtype = (int)parts->heads->dtype, .adapted = adapted,
                     .num_adapted = num_adapted, .ids = ids, .num_behind = num_behind,
                     .behind = behind};
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
    for (int64_t index = 0; index <= last; index++) {
        const ft_norm *norm =
            index < last ? decoder->layers[index + 1].mixer_norm : decoder->final_norm;
        x = run_layer(&step, index, x, norm, index < last ? space->x : out);
        if (!x) return -1;
        tap(&taps, index + 1, space->residual, step.rows, row_bytes);
    }
    return make_logits(&step, out, row_bytes, logit_rows, num_logits, logits);
}

/* -- a pass of drafts in one call --------------------------------------------------------------- */

/* Layers with heads alike, as ft_part; their tables are those of all positions. */
typedef struct {
    const ft_kv *kv;
    const ft_heads *heads;
    int64_t num_tables;
    const float *const *tables; /* [num_tables] cos, then as many sin: [positions, turned / 2] */
} ft_row_part;

/* A row: at `layout` its token, its position, how many pages and how many slots of a tail it has,
 * then the pages, then the tail. */
enum { ROW_TOKEN, ROW_POSITION, ROW_PAGES, ROW_TAIL, ROW_HEAD };

/* Memory of a pass, taken piece by piece; with `memory` NULL only counted. */
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
    float *turns[FT_MAX_PARTS];
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
        space.turns[i] = take(from, parts[i].num_tables * rows * parts[i].heads->head_dim * 4);
    space.hidden = take(from, rows * hidden * 4);
    space.logits = take(from, rows * vocab * 4);
    return space;
}

/* The columns of a batch, of which each row is a segment of its own. */
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

/* The turns of the rows' positions: cos of each table, then sin of each. */
static void read_turns(const ft_row_part *part, const pass_space *space, int64_t rows, float *out) {
    const int64_t width = ft_turned_dim(part->heads) / 2;
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

/* One pass over rows of requests: their KV into the pool, and the best `num_best` tokens behind each,
 * as ft_best has them. `max_pages`: of a row. `cap`: of the logits; 0: none. Returns 0, or -1 when
 * there is no memory. */
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
        const int64_t sin_at = parts[i].num_tables * rows * (ft_turned_dim(parts[i].heads) / 2);
        read_turns(&parts[i], &space, rows, space.turns[i]);
        batches[i] = (ft_batch){rows, rows, max_pages, space.starts, space.lens, space.first_rows,
                                space.pages, space.tail_from, space.first_tails, layout, space.slots,
                                space.turns[i], space.turns[i] + sin_at, NULL, NULL};
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
