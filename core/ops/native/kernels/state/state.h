/* Recurrent layers: states at page ends, logs of the positions behind them. See ../state_pool.py. */
#ifndef FT_STATE_H
#define FT_STATE_H

#include "decoder/decoder.h"

enum {
    FT_MAX_TAPS = 8,
    FT_MAX_STATE_PAGE = 64,
};

/* A layer of the gated delta rule or of Mamba-2. A row of its input: queries and keys of num_key_heads,
 * values of num_heads, which the convolution reads (channels), then the gate z of as many items as
 * values. */
typedef struct {
    int64_t num_key_heads, num_heads, key_dim, value_dim;
    int64_t num_taps;
    int64_t is_tiled;      /* head j reads key head j % num_key_heads, not one of neighbours */
    const float *taps;     /* [num_taps, channels], the last is the row's own */
    const float *decay, *dt_bias; /* [num_heads] */
    const float *norm;     /* [value_dim]; of Mamba-2 [num_heads * value_dim], or NULL */
    float eps;             /* of the norm */
    float most_beta;       /* what the sigmoid of beta is multiplied by; not of Mamba-2 */
    int64_t layer;         /* of the slots and logs */
    /* Of Mamba-2 alone, else NULL: */
    const float *skip;      /* [num_heads] */
    const float *taps_bias; /* [channels], or NULL */
    int64_t num_norms;      /* equal parts of a row, each with a norm of its own; 0: no norm */
} ft_recurrence;

enum { FT_SLOT_STATE, FT_SLOT_TAIL, FT_SLOT_FIELDS };
enum { FT_LOG_K, FT_LOG_U, FT_LOG_C, FT_LOG_INPUTS, FT_LOG_FIELDS };

/* Slots and logs, and which of them a pass's segments have. */
struct ft_states {
    int64_t page_size, ring; /* of a log: position p is at p % ring */
    int64_t num_layers;
    char *slots, *logs;
    int64_t slot_bytes, log_bytes;
    const int64_t *slot_fields; /* [num_layers, FT_SLOT_FIELDS] bytes before each */
    const int64_t *log_fields;  /* [num_layers, FT_LOG_FIELDS] */
    int64_t *at;                /* [num_slots, num_layers] position of the state in a slot */
    const int64_t *slot_of, *log_of; /* [num_segments] */
    const int64_t *final_stops; /* [num_segments] rows from there on are drafts */
    const int64_t *first_keeps; /* [num_segments + 1] where in `keeps` a segment's begin */
    const int64_t *keeps;       /* [.., 2] page ends, rising, and the slots that get their states */
};

/* Rows of a pass that the convolution of a layer reads: `channels` items each, then what else a row
 * has. */
typedef struct {
    const char *rows;
    int64_t row_bytes, channels, num_taps;
    int64_t layer; /* of the slots and logs */
    int dtype;
    const ft_batch *batch;
    const ft_states *states;
} ft_inputs;

/* A field of a layer in a slot, and in a log. */
char *ft_slot_field(const ft_inputs *inputs, int64_t slot, int field);
char *ft_log_field(const ft_inputs *inputs, int64_t log, int field);

/* Where the state of the layer in a slot stands. */
int64_t *ft_position_of(const ft_inputs *inputs, int64_t slot);

/* Where the state of a segment's slot stands behind a pass: at the start of the last final row's page. */
int64_t ft_moved_to(const ft_inputs *inputs, int64_t segment);

/* The input of a position that a row of the segment reads, whose state stands `at`: of the pass, of
 * the log or of the tail. */
const char *ft_input_at(const ft_inputs *inputs, int64_t segment, int64_t at, int64_t position);

/* Behind a pass: the tails and positions of all slots that it moves or keeps, and inputs in the logs. */
void ft_keep_inputs(const ft_inputs *inputs);

/* A gated short convolution (arXiv 2511.23404). */
typedef struct {
    int64_t channels, num_taps;
    const float *taps; /* [num_taps, channels], the last is the row's own */
    const float *bias; /* [channels], or NULL */
    int64_t layer;     /* of the slots and logs */
} ft_conv;

/* mixed [num_rows, b | c | x] of `dtype` to out [num_rows, channels]; moves states and logs of the batch.
 * b becomes b * x, which the convolution reads. */
void ft_run_conv(void *mixed, void *out, const ft_batch *batch, const ft_conv *conv, int dtype);

/* mixed [num_rows, channels + values] of `dtype` and gates to out [num_rows, num_heads * value_dim];
 * moves states and logs of the batch. Gates [num_rows, 2 * num_heads] are of beta, then of the decay;
 * of Mamba-2 [num_rows, num_heads], of dt. Returns -1 when there is no memory; then nothing has moved. */
int ft_run_recurrent(const void *mixed, const float *gates, void *out, const ft_batch *batch,
                     const ft_recurrence *rule, int dtype);

#endif
