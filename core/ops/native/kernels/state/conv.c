/* Gated short convolutions (arXiv 2511.23404): out = c * sum over taps of (b * x).
 *
 * A channel's sum is one chain in the order of the taps, whichever rows are computed with it.
 */
#include "state.h"

#include "common/vector.h"

enum { PIECE = 8192 }; /* elements that make a task worth another thread */

typedef struct {
    char *mixed, *out;
    const ft_conv *conv;
    ft_inputs inputs;
    int64_t item; /* bytes */
} conv_job;

FT_INLINE void multiply_row(char *b, const char *x, int64_t channels, int dtype) {
    for (int64_t i = 0; i < channels; i += FT_WIDTH) {
        int64_t n = channels - i;
        v_put(b, i, v_mul(v_get(b, i, n, dtype), v_get(x, i, n, dtype)), n, dtype);
    }
}

/* Replace b of each row with b * x. */
static void multiply_piece(void *context, int64_t begin, int64_t end) {
    const conv_job *job = context;
    int64_t channels = job->conv->channels;
    for (int64_t row = begin; row < end; row++) {
        char *b = job->mixed + row * job->inputs.row_bytes;
        const char *x = b + 2 * channels * job->item;
        if (job->inputs.dtype == FT_BFLOAT16) multiply_row(b, x, channels, FT_BFLOAT16);
        else multiply_row(b, x, channels, FT_FLOAT32);
    }
}

/* Convolve one row and multiply it by c. `inputs`: the input of each tap. */
FT_INLINE void convolve_row(const ft_conv *conv, const char *const *inputs, const char *c, char *out,
                            int64_t num_taps, int dtype) {
    int64_t channels = conv->channels;
    for (int64_t i = 0; i < channels; i += FT_WIDTH) {
        int64_t n = channels - i;
        ft_vec sum = v_mul(v_get(inputs[0], i, n, dtype), v_load_n(conv->taps + i, n));
        for (int64_t tap = 1; tap < num_taps; tap++)
            sum = v_fma(v_get(inputs[tap], i, n, dtype),
                        v_load_n(conv->taps + tap * channels + i, n), sum);
        if (conv->bias) sum = v_add(sum, v_load_n(conv->bias + i, n));
        v_put(out, i, v_mul(v_get(c, i, n, dtype), sum), n, dtype);
    }
}

/* The segment that a row belongs to. */
static int64_t segment_of(const ft_batch *batch, int64_t row) {
    int64_t first = 0, stop = batch->num_segments;
    while (first + 1 < stop) {
        int64_t middle = (first + stop) / 2;
        if (batch->first_rows[middle] <= row) first = middle;
        else stop = middle;
    }
    return first;
}

static void convolve_piece(void *context, int64_t begin, int64_t end) {
    const conv_job *job = context;
    const ft_conv *conv = job->conv;
    const ft_batch *batch = job->inputs.batch;
    int64_t num_taps = conv->num_taps, bytes = conv->channels * job->item;
    const char *inputs[FT_MAX_TAPS];
    for (int64_t row = begin; row < end; row++) {
        int64_t segment = segment_of(batch, row);
        int64_t at = *ft_position_of(&job->inputs, batch->states->slot_of[segment]);
        int64_t last = batch->starts[segment] + row - batch->first_rows[segment];
        for (int64_t tap = 0; tap < num_taps; tap++)
            inputs[tap] = ft_input_at(&job->inputs, segment, at, last - num_taps + 1 + tap);
        const char *c = job->mixed + row * job->inputs.row_bytes + bytes;
        char *out = job->out + row * bytes;
        if (job->inputs.dtype == FT_BFLOAT16 && num_taps == 3) /* the usual number, unrolled */
            convolve_row(conv, inputs, c, out, 3, FT_BFLOAT16);
        else if (job->inputs.dtype == FT_BFLOAT16)
            convolve_row(conv, inputs, c, out, num_taps, FT_BFLOAT16);
        else
            convolve_row(conv, inputs, c, out, num_taps, FT_FLOAT32);
    }
}

void ft_run_conv(void *mixed, void *out, const ft_batch *batch, const ft_conv *conv, int dtype) {
    int64_t item = dtype == FT_BFLOAT16 ? 2 : 4, channels = conv->channels;
    conv_job job = {.mixed = mixed, .out = out, .conv = conv, .item = item};
    job.inputs = (ft_inputs){mixed, 3 * channels * item, channels, conv->num_taps, conv->layer, dtype,
                             batch, batch->states};
    int64_t grain = ft_max(1, PIECE / channels);
    ft_parallel(multiply_piece, &job, batch->num_rows, grain);
    ft_parallel(convolve_piece, &job, batch->num_rows, grain);
    ft_keep_inputs(&job.inputs);
}

FT_EXPORT void ft_short_conv(void *mixed, void *out, const ft_batch *batch, const ft_conv *conv,
                             int dtype) {
    ft_run_conv(mixed, out, batch, conv, dtype);
}
