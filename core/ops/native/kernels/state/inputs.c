/* Inputs of the convolutions of recurrent layers: rows of a pass, entries of a log, the tail of a
 * state. */
#include "state.h"

static int64_t input_bytes(const ft_inputs *inputs) {
    return inputs->channels * (inputs->dtype == FT_BFLOAT16 ? 2 : 4);
}

char *ft_slot_field(const ft_inputs *inputs, int64_t slot, int field) {
    const ft_states *states = inputs->states;
    int64_t at = states->slot_fields[inputs->layer * FT_SLOT_FIELDS + field];
    return states->slots + slot * states->slot_bytes + at;
}

char *ft_log_field(const ft_inputs *inputs, int64_t log, int field) {
    const ft_states *states = inputs->states;
    int64_t at = states->log_fields[inputs->layer * FT_LOG_FIELDS + field];
    return states->logs + log * states->log_bytes + at;
}

int64_t *ft_position_of(const ft_inputs *inputs, int64_t slot) {
    return inputs->states->at + slot * inputs->states->num_layers + inputs->layer;
}

int64_t ft_moved_to(const ft_inputs *inputs, int64_t segment) {
    int64_t page = inputs->states->page_size;
    return (inputs->states->final_stops[segment] - 1) / page * page;
}

const char *ft_input_at(const ft_inputs *inputs, int64_t segment, int64_t at, int64_t position) {
    const ft_states *states = inputs->states;
    int64_t start = inputs->batch->starts[segment], bytes = input_bytes(inputs);
    if (position >= start)
        return inputs->rows +
               (inputs->batch->first_rows[segment] + position - start) * inputs->row_bytes;
    if (position >= at)
        return ft_log_field(inputs, states->log_of[segment], FT_LOG_INPUTS) +
               position % states->ring * bytes;
    int64_t index = position - at + inputs->num_taps - 1;
    return ft_slot_field(inputs, states->slot_of[segment], FT_SLOT_TAIL) + index * bytes;
}

/* Write the tail and the position of the state in a slot, for a state at `position` of the
 * segment. */
static void move_tail(const ft_inputs *inputs, int64_t segment, int64_t at, int64_t slot,
                      int64_t position) {
    int64_t bytes = input_bytes(inputs), count = inputs->num_taps - 1;
    char *tail = ft_slot_field(inputs, slot, FT_SLOT_TAIL);
    for (int64_t i = 0; i < count; i++)
        memcpy(tail + i * bytes, ft_input_at(inputs, segment, at, position - count + i),
               (size_t)bytes);
    *ft_position_of(inputs, slot) = position;
}

static void keep_piece(void *context, int64_t begin, int64_t end) {
    const ft_inputs *inputs = context;
    const ft_states *states = inputs->states;
    int64_t bytes = input_bytes(inputs);
    for (int64_t segment = begin; segment < end; segment++) {
        int64_t slot = states->slot_of[segment], at = *ft_position_of(inputs, slot);
        int64_t start = inputs->batch->starts[segment];
        int64_t stop = start + inputs->batch->lens[segment];
        int64_t moved = ft_moved_to(inputs, segment);
        for (int64_t i = states->first_keeps[segment]; i < states->first_keeps[segment + 1]; i++)
            move_tail(inputs, segment, at, states->keeps[2 * i + 1], states->keeps[2 * i]);
        if (moved > at) move_tail(inputs, segment, at, slot, moved);
        if (inputs->num_taps == 1) continue;
        char *log = ft_log_field(inputs, states->log_of[segment], FT_LOG_INPUTS);
        for (int64_t position = ft_max(start, moved); position < stop; position++)
            memcpy(log + position % states->ring * bytes,
                   ft_input_at(inputs, segment, at, position), (size_t)bytes);
    }
}

void ft_keep_inputs(const ft_inputs *inputs) {
    ft_parallel(keep_piece, (void *)inputs, inputs->batch->num_segments, 4);
}
