/* Recurrent layers: states at page ends, and logs of the positions after them. See
 * core/ops/state_pool.py. */
#ifndef FT_STATE_H
#define FT_STATE_H

#include "decoder/decoder.h"

enum {
    FT_MAX_TAPS = 8,
    FT_MAX_STATE_PAGE = 64,
};

/* The gated delta rule, Mamba-2, and lightning attention, which has a constant decay and no gates. */
enum { FT_DELTA, FT_MAMBA2, FT_LIGHTNING };

/* A layer that computes one of the rules. A row of its input has the channels that the convolution reads
 * (queries and keys of num_key_heads, values of num_heads), then the gate z, one item for each
 * value. */
typedef struct {
    int64_t rule;
    int64_t num_key_heads, num_heads, key_dim, value_dim;
    int64_t num_taps;      /* 1: no convolution, and no inputs in slots and logs */
    int64_t is_tiled;      /* head j reads key head j % num_key_heads; else neighbours share one */
    const float *taps;     /* [num_taps, channels]; the last tap reads the row itself */
    const float *decay, *dt_bias; /* [num_heads]; FT_LIGHTNING has no dt_bias */
    const float *norm;     /* [num_heads * value_dim], or NULL; FT_DELTA: [value_dim] */
    float eps;             /* epsilon of the norm */
    float most_beta;       /* factor of the sigmoid that gives beta; only for FT_DELTA */
    int64_t layer;         /* index of the layer in slots and logs */
    const float *skip;      /* [num_heads], or NULL */
    const float *taps_bias; /* [channels], or NULL */
    int64_t num_norms;      /* equal parts of a row with separate norms; 0: none, or one per head */
} ft_recurrence;

enum { FT_SLOT_STATE, FT_SLOT_TAIL, FT_SLOT_FIELDS };
enum { FT_LOG_K, FT_LOG_U, FT_LOG_C, FT_LOG_INPUTS, FT_LOG_FIELDS };

/* Slots and logs, and the slots and logs of a pass's segments. */
struct ft_states {
    int64_t page_size, ring; /* positions; a log has position p at index p % ring */
    int64_t num_layers;
    char *slots, *logs;
    int64_t slot_bytes, log_bytes;
    const int64_t *slot_fields; /* [num_layers, FT_SLOT_FIELDS] offset of each in bytes */
    const int64_t *log_fields;  /* [num_layers, FT_LOG_FIELDS] */
    int64_t *at;                /* [num_slots, num_layers] position of the state in a slot */
    const int64_t *slot_of, *log_of; /* [num_segments] */
    const int64_t *final_stops; /* [num_segments] rows from this position on are drafts */
    const int64_t *first_keeps; /* [num_segments + 1] index in `keeps` of a segment's first pair */
    const int64_t *keeps;       /* [.., 2] page end, ascending, and the slot that gets its state */
};

/* Rows of a pass, `row_bytes` apart; the convolution of a layer reads the first `channels`
 * items. */
typedef struct {
    const char *rows;
    int64_t row_bytes, channels, num_taps;
    int64_t layer; /* index of the layer in slots and logs */
    int dtype;
    const ft_batch *batch;
    const ft_states *states;
} ft_inputs;

/* Address of a field of the layer in a slot, or in a log. */
char *ft_slot_field(const ft_inputs *inputs, int64_t slot, int field);
char *ft_log_field(const ft_inputs *inputs, int64_t log, int field);

/* Address of the position of the layer's state in a slot. */
int64_t *ft_position_of(const ft_inputs *inputs, int64_t slot);

/* Position of the state in a segment's slot after a pass: the start of the last final row's
 * page. */
int64_t ft_moved_to(const ft_inputs *inputs, int64_t segment);

/* Address of the input of a position, for a segment whose state is at position `at`: in the pass,
 * in the log or in the tail of the state. */
const char *ft_input_at(const ft_inputs *inputs, int64_t segment, int64_t at, int64_t position);

/* After a pass, write tails and positions of all slots that it moves or keeps, and inputs to
 * logs. */
void ft_keep_inputs(const ft_inputs *inputs);

/* A gated short convolution (arXiv 2511.23404). */
typedef struct {
    int64_t channels, num_taps;
    const float *taps; /* [num_taps, channels]; the last tap reads the row itself */
    const float *bias; /* [channels], or NULL */
    int64_t layer;     /* index of the layer in slots and logs */
} ft_conv;

/* Compute out [num_rows, channels] from mixed [num_rows, b | c | x] of `dtype`, and advance the
 * states and logs of the batch. b is overwritten with b * x, which the convolution reads. */
void ft_run_conv(void *mixed, void *out, const ft_batch *batch, const ft_conv *conv, int dtype);

/* Compute out [num_rows, num_heads * value_dim] from mixed [num_rows, channels + values] of
 * `dtype`, and advance the states and logs of the batch. Gates are [num_rows, 2 * num_heads], beta
 * then decay; for Mamba-2 [num_rows, num_heads], dt; FT_LIGHTNING reads none. Returns 0, or -1 when
 * there is no memory; then nothing has advanced. */
int ft_run_recurrent(const void *mixed, const float *gates, void *out, const ft_batch *batch,
                     const ft_recurrence *rule, int dtype);

#endif
