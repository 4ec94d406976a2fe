/* The gated delta rule (arXiv 2412.06464), Mamba-2 (arXiv 2405.21060) and lightning attention
 * (arXiv 2501.08313), one page after the other.
 *
 * S is the state at a page's start, c the sum of log decays since then, and s an earlier row of the page:
 *     u_t = beta_t (v_t - e^c_t S^T k_t - sum e^(c_t - c_s) (k_s k_t) u_s)
 *     o_t = e^c_t S^T q_t + sum e^(c_t - c_s) (k_s q_t) u_s + (k_t q_t) u_t
 * S of the next page is e^c_n S + sum e^(c_n - c_s) k_s u_s^T, where n is this page's last row. In
 * Mamba-2, q, k and v are C, B and x, u_t is dt_t v_t, and D v_t, the skip, is added to o_t. In
 * lightning attention u_t is v_t, and the decay is constant.
 *
 * A task is one head of a segment. Each sum is one chain in the order of key_dim, or of rows; the
 * number of rows that share a load of S changes no bits.
 */
#include "state.h"

#include "common/vector.h"

#include <stdatomic.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum { LEAST_WORK = 1 << 16 }; /* products that make a task worth another thread */
#define LENGTH_EPS 1e-6f       /* added to the squared length of queries and keys */

/* Rows and vectors of a product that are summed at once; the registers limit them. */
#if defined(FT_AVX512)
enum { BLOCK_ROWS = 8, BLOCK_VECTORS = 2, WIDE_VECTORS = 8 };
#else
enum { BLOCK_ROWS = 6, BLOCK_VECTORS = 1, WIDE_VECTORS = 2 };
#endif

enum { BLOCK_TERMS = 32 }; /* rows of `right` in a block, few enough to stay cached */

enum { LINE = 64, FETCHED_LINES = 8 }; /* bytes; lines prefetched with each vector's convolution */

/* Prefetch into the second-level cache: the first level allows fewer outstanding requests. */
#define FETCH(p) __builtin_prefetch((p), 0, 2)

typedef struct {
    const char *at, *stop;
} memory_range;

/* Scratch memory of a task. Rows are padded to whole vectors: key_dim to keys, value_dim to
 * values. */
typedef struct {
    float *x;       /* [page, 2, keys] keys and queries of the page's rows */
    float *weighed; /* [page, keys] keys, times their decay until the page's end */
    float *u;       /* [page, values] values, then u */
    float *read;    /* [page, 2, values] products of x with S */
    float *c, *beta; /* [page]; `beta` has dt for Mamba-2, 1 for lightning attention */
    float *own;     /* [key_dim, values] copy of S if a slot's rows are not whole vectors */
    float *draft;   /* [key_dim, values] S of pages that have only draft rows */
    memory_range soon[3]; /* memory that the task reads after its first inputs */
    int num_soon;         /* number of ranges not prefetched yet; the last one is next */
} delta_space;

typedef struct {
    const char *mixed;
    const float *gates;
    char *out;
    const ft_batch *batch;
    const ft_states *states;
    const ft_recurrence *delta;
    int dtype;
    int64_t num_gates; /* gates of a row */
    float *gated;      /* [num_rows, num_heads * value_dim] before the norm of parts, or NULL */
    ft_inputs inputs;
    int64_t keys, values; /* padded */
    delta_space *spaces;
    atomic_flag *taken; /* whether each space is in use */
} delta_job;

/* One head of a segment. */
typedef struct {
    const delta_job *job;
    delta_space *space;
    int64_t segment, head;
    int64_t start, stop; /* positions of its rows */
    int64_t final_stop;  /* rows from this position on are drafts */
    int64_t at;          /* position of S before the pass */
    char *log;
} delta_task;

static int is_delta(const delta_job *job) { return job->delta->rule == FT_DELTA; }
static int is_lightning(const delta_job *job) { return job->delta->rule == FT_LIGHTNING; }

static int64_t item_of(const delta_job *job) { return job->dtype == FT_BFLOAT16 ? 2 : 4; }

/* -- slots and logs --------------------------------------------------------------------------- */

static float *state_of(const delta_task *task, int64_t slot) {
    const ft_recurrence *delta = task->job->delta;
    float *states = (float *)ft_slot_field(&task->job->inputs, slot, FT_SLOT_STATE);
    return states + task->head * delta->key_dim * delta->value_dim;
}

/* Copy rows of `width` items between padded and unpadded memory. */
static void copy_rows(const float *from, int64_t from_step, float *to, int64_t to_step, int64_t rows,
                      int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        memcpy(to + row * to_step, from + row * from_step, (size_t)width * sizeof *to);
}

static void store_state(const delta_task *task, const float *state, int64_t slot) {
    const ft_recurrence *delta = task->job->delta;
    float *to = state_of(task, slot);
    if (to == state) return;
    copy_rows(state, task->job->values, to, delta->value_dim, delta->key_dim, delta->value_dim);
}

/* Address of k, u or c of a position in the log, `width` items. */
static float *entry(const delta_task *task, int field, int64_t position, int64_t width) {
    const ft_states *states = task->job->states;
    float *all = (float *)ft_log_field(&task->job->inputs, states->log_of[task->segment], field);
    return all + (task->head * states->ring + position % states->ring) * width;
}

/* Load the log entries of positions [first, stop) of the page at `base`. */
static void load_entries(const delta_task *task, int64_t base, int64_t first, int64_t stop) {
    const delta_job *job = task->job;
    const delta_space *space = task->space;
    int64_t key_dim = job->delta->key_dim, value_dim = job->delta->value_dim;
    for (int64_t position = first; position < stop; position++) {
        int64_t row = position - base;
        float *x = space->x + 2 * row * job->keys;
        memcpy(x, entry(task, FT_LOG_K, position, key_dim), (size_t)key_dim * 4);
        /* The padding may hold another request's numbers, which need not be finite. */
        memset(x + key_dim, 0, (size_t)(job->keys - key_dim) * 4);
        memcpy(space->u + row * job->values, entry(task, FT_LOG_U, position, value_dim),
               (size_t)value_dim * 4);
        space->c[row] = *entry(task, FT_LOG_C, position, 1);
    }
}

static void store_entries(const delta_task *task, int64_t base, int64_t first, int64_t stop) {
    const delta_job *job = task->job;
    const delta_space *space = task->space;
    int64_t key_dim = job->delta->key_dim, value_dim = job->delta->value_dim;
    for (int64_t position = first; position < stop; position++) {
        int64_t row = position - base;
        memcpy(entry(task, FT_LOG_K, position, key_dim), space->x + 2 * row * job->keys,
               (size_t)key_dim * 4);
        memcpy(entry(task, FT_LOG_U, position, value_dim), space->u + row * job->values,
               (size_t)value_dim * 4);
        *entry(task, FT_LOG_C, position, 1) = space->c[row];
    }
}

/* Decoding rows are limited by memory, so S and the log are prefetched while the row's inputs are
 * computed. The part of a log that wraps around to its ring's start is not prefetched. */
static void plan_fetches(const delta_task *task) {
    const ft_recurrence *delta = task->job->delta;
    delta_space *space = task->space;
    int64_t rows = ft_min(task->start - task->at, task->job->states->page_size);
    const char *k = (const char *)entry(task, FT_LOG_K, task->at, delta->key_dim);
    const char *u = (const char *)entry(task, FT_LOG_U, task->at, delta->value_dim);
    const char *state = (const char *)state_of(task, task->job->states->slot_of[task->segment]);
    space->soon[0] = (memory_range){state, state + delta->key_dim * delta->value_dim * 4};
    space->soon[1] = (memory_range){u, u + rows * delta->value_dim * 4};
    space->soon[2] = (memory_range){k, k + rows * delta->key_dim * 4};
    space->num_soon = rows ? 3 : 1;
}

FT_INLINE void fetch_soon(delta_space *space) {
    if (!space->num_soon) return;
    memory_range *range = &space->soon[space->num_soon - 1];
    for (int i = 0; i < FETCHED_LINES; i++) FETCH(range->at + i * LINE);
    range->at += FETCHED_LINES * LINE;
    if (range->at >= range->stop) space->num_soon--;
}

/* -- inputs: convolution, length, gates -------------------------------------------------------- */

/* Convolve `width` channels from `first` on: taps in order, the bias, then silu. The rest of the
 * last vector becomes 0. */
FT_INLINE void convolve(const delta_task *task, const char *const *inputs, int64_t first,
                        int64_t width, float *out, int64_t num_taps, int dtype) {
    const delta_job *job = task->job;
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        int64_t n = width - i;
        const float *taps = job->delta->taps + first + i;
        ft_vec sum = v_mul(v_get(inputs[0], first + i, n, dtype), v_load_n(taps, n));
        for (int64_t tap = 1; tap < num_taps; tap++)
            sum = v_fma(v_get(inputs[tap], first + i, n, dtype),
                        v_load_n(taps + tap * job->inputs.channels, n), sum);
        if (job->delta->taps_bias)
            sum = v_add(sum, v_load_n(job->delta->taps_bias + first + i, n));
        v_store(out + i, v_silu(sum));
        fetch_soon(task->space);
    }
}

/* Call `convolve`. Four taps, the usual number, are passed as a constant. */
static void convolve_part(const delta_task *task, const char *const *inputs, int64_t first,
                          int64_t width, float *out) {
    int64_t num_taps = task->job->delta->num_taps;
    if (task->job->dtype == FT_BFLOAT16 && num_taps == 4)
        convolve(task, inputs, first, width, out, 4, FT_BFLOAT16);
    else if (task->job->dtype == FT_BFLOAT16)
        convolve(task, inputs, first, width, out, num_taps, FT_BFLOAT16);
    else
        convolve(task, inputs, first, width, out, num_taps, FT_FLOAT32);
}

/* Divide a head, padded with zeros to `keys` items, by its length, and multiply it by `factor`. */
static void to_length(float *x, int64_t keys, float factor) {
    ft_vec squares = v_set(0.0f);
    for (int64_t i = 0; i < keys; i += FT_WIDTH) {
        ft_vec value = v_load(x + i);
        squares = v_fma(value, value, squares);
    }
    ft_vec scale = v_set(factor / sqrtf(v_sum(squares) + LENGTH_EPS));
    for (int64_t i = 0; i < keys; i += FT_WIDTH) v_store(x + i, v_mul(v_load(x + i), scale));
}

static float exp_one(float x) {
    float at[FT_WIDTH];
    v_store(at, v_exp(v_set(x)));
    return at[0];
}

/* Compute key, query, value, beta and, in c, the log decay of one row of the page at `base`. */
static void read_inputs(const delta_task *task, int64_t base, int64_t position) {
    const delta_job *job = task->job;
    const delta_space *space = task->space;
    const ft_recurrence *delta = job->delta;
    int64_t row = position - base, heads = delta->num_heads, num_taps = delta->num_taps;
    int64_t key_head = delta->is_tiled ? task->head % delta->num_key_heads
                                       : task->head / (heads / delta->num_key_heads);
    int64_t query_at = key_head * delta->key_dim, keys_width = delta->num_key_heads * delta->key_dim;
    int64_t value_at = 2 * keys_width + task->head * delta->value_dim;
    const char *inputs[FT_MAX_TAPS];
    for (int64_t tap = 0; tap < num_taps; tap++)
        inputs[tap] =
            ft_input_at(&job->inputs, task->segment, task->at, position - num_taps + 1 + tap);
    float *key = space->x + 2 * row * job->keys, *query = key + job->keys;
    float *value = space->u + row * job->values;
    convolve_part(task, inputs, keys_width + query_at, delta->key_dim, key);
    convolve_part(task, inputs, query_at, delta->key_dim, query);
    convolve_part(task, inputs, value_at, delta->value_dim, value);
    if (is_lightning(job)) {
        space->c[row] = delta->decay[task->head];
        space->beta[row] = 1.0f;
        return;
    }
    int64_t batch_row = job->batch->first_rows[task->segment] + position - task->start;
    const float *gates = job->gates + batch_row * job->num_gates;
    float x = gates[job->num_gates - heads + task->head] + delta->dt_bias[task->head];
    float softplus = log1pf(exp_one(-fabsf(x))) + (x > 0.0f ? x : 0.0f);
    space->c[row] = delta->decay[task->head] * softplus;
    if (!is_delta(job)) {
        space->beta[row] = softplus;
        return;
    }
    to_length(key, job->keys, 1.0f);
    to_length(query, job->keys, 1.0f / sqrtf((float)delta->key_dim));
    space->beta[row] = delta->most_beta / (1.0f + exp_one(-gates[task->head]));
}

/* -- products ---------------------------------------------------------------------------------- */

/* out[r] = scale * from[r] + sum over t of left(r, t) * right[t]; each sum is one chain. */
typedef struct {
    const float *left; /* (r, t) is at r * left_row + t * left_term */
    int64_t left_row, left_term;
    const float *right; /* [terms, width] */
    int64_t terms;
    const float *from; /* NULL: zeros */
    float scale;
    float *out;
    int64_t width; /* items of rows of right, from and out: whole vectors */
    const float *next; /* memory that is read after right, of the same size: prefetched meanwhile */
} product;

FT_INLINE void multiply_block(const product *p, int64_t row, int64_t column, int rows, int vectors) {
    ft_vec sums[BLOCK_ROWS][WIDE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            int64_t at = (row + r) * p->width + column + v * FT_WIDTH;
            sums[r][v] = p->from ? v_mul(v_load(p->from + at), v_set(p->scale)) : v_set(0.0f);
        }
    const float *left = p->left + row * p->left_row, *right = p->right + column;
    const float *next = p->next + column * p->terms;
    for (int64_t t = 0; t < p->terms; t++, left += p->left_term, right += p->width) {
        ft_vec loaded[WIDE_VECTORS];
        for (int v = 0; v < vectors; v++, next += FT_WIDTH) {
            loaded[v] = v_load(right + v * FT_WIDTH);
            if (row == 0) FETCH(next);
        }
        for (int r = 0; r < rows; r++) {
            ft_vec factor = v_set(left[r * p->left_row]);
            for (int v = 0; v < vectors; v++) sums[r][v] = v_fma(factor, loaded[v], sums[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            v_store(p->out + (row + r) * p->width + column + v * FT_WIDTH, sums[r][v]);
}

FT_INLINE void multiply_column(const product *p, int64_t rows, int64_t column, int vectors) {
    int64_t row = 0;
    for (; row + BLOCK_ROWS <= rows; row += BLOCK_ROWS)
        multiply_block(p, row, column, BLOCK_ROWS, vectors);
    switch (rows - row) {
    case 1: multiply_block(p, row, column, 1, vectors); break;
    case 2: multiply_block(p, row, column, 2, vectors); break;
    case 3: multiply_block(p, row, column, 3, vectors); break;
    case 4: multiply_block(p, row, column, 4, vectors); break;
    case 5: multiply_block(p, row, column, 5, vectors); break;
#if defined(FT_AVX512)
    case 6: multiply_block(p, row, column, 6, vectors); break;
    case 7: multiply_block(p, row, column, 7, vectors); break;
#endif
    }
}

/* Multiply the columns from `column` on. */
static void multiply_columns(const product *p, int64_t rows, int64_t column) {
    const int64_t step = BLOCK_VECTORS * FT_WIDTH;
    for (; column + step <= p->width; column += step) multiply_column(p, rows, column, BLOCK_VECTORS);
    for (; column < p->width; column += FT_WIDTH) multiply_column(p, rows, column, 1);
}

static void multiply_terms(const product *p, int64_t rows) {
    const int64_t wide = WIDE_VECTORS * FT_WIDTH;
    int64_t column = 0;
    /* A decoding row has only a key and a query, or a query: a wide block has enough independent
     * sums to hide the latency of an addition. */
    for (; rows <= 2 && column + wide <= p->width; column += wide) {
        if (rows == 2) multiply_block(p, 0, column, 2, WIDE_VECTORS);
        else multiply_block(p, 0, column, 1, WIDE_VECTORS);
    }
    multiply_columns(p, rows, column);
}

/* Multiply block by block of rows, in the order of `out` and `from` in memory; `right` is small. */
static void multiply_in_rows(const product *whole, int64_t rows) {
    product p = *whole;
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
        p.next = p.from + BLOCK_ROWS * p.width;
        multiply_columns(&p, ft_min(BLOCK_ROWS, rows - row), 0);
        p.left += BLOCK_ROWS * p.left_row;
        p.from += BLOCK_ROWS * p.width;
        p.out += BLOCK_ROWS * p.width;
    }
}

/* Multiply block by block of terms, in the order of `right` in memory; the sums continue in
 * `out`. */
static void multiply(const product *whole, int64_t rows) {
    product p = *whole;
    for (int64_t done = 0; done < whole->terms; done += p.terms) {
        p.terms = ft_min(BLOCK_TERMS, whole->terms - done);
        p.next = p.right + p.terms * p.width;
        multiply_terms(&p, rows);
        p.left += p.terms * p.left_term;
        p.right += p.terms * p.width;
        p.from = p.out;
        p.scale = 1.0f;
    }
}

static float dot(const float *x, const float *y, int64_t width) {
    ft_vec sum = v_set(0.0f);
    for (int64_t i = 0; i < width; i += FT_WIDTH) sum = v_fma(v_load(x + i), v_load(y + i), sum);
    return v_sum(sum);
}

/* Decay from each earlier row s to row `row`: e^(c_row - c_s). `out` must have room for a page. */
static void find_decays(const float *c, int64_t row, float *out) {
    ft_vec last = v_set(c[row]);
    for (int64_t s = 0; s < row; s += FT_WIDTH)
        v_store(out + s, v_exp(v_sub(last, v_load(c + s))));
}

/* -- rows of a page ---------------------------------------------------------------------------- */

/* Return `scale` * read, the product with S, plus factors[s] * u[s] of the rows s before `row`. */
FT_INLINE ft_vec gather(const float *read, float scale, const float *factors, const float *u,
                        int64_t row, int64_t values) {
    ft_vec sum = v_mul(v_load(read), v_set(scale));
    for (int64_t s = 0; s < row; s++) sum = v_fma(v_set(factors[s]), v_load(u + s * values), sum);
    return sum;
}

/* Compute u and o of one row; o replaces the product of S with its query. */
static void run_row(const delta_task *task, int64_t row) {
    const delta_space *space = task->space;
    int64_t keys = task->job->keys, values = task->job->values;
    const float *key = space->x + 2 * row * keys, *query = key + keys;
    float *read_key = space->read + 2 * row * values, *out = read_key + values;
    float for_key[FT_MAX_STATE_PAGE], for_query[FT_MAX_STATE_PAGE];
    float decays[FT_MAX_STATE_PAGE];
    find_decays(space->c, row, decays);
    for (int64_t s = 0; s < row; s++) {
        for_key[s] = decays[s] * dot(space->x + 2 * s * keys, key, keys);
        for_query[s] = decays[s] * dot(space->x + 2 * s * keys, query, keys);
    }
    float left = exp_one(space->c[row]), own = dot(key, query, keys);
    for (int64_t i = 0; i < values; i += FT_WIDTH) {
        float *u = space->u + row * values + i;
        ft_vec known = gather(read_key + i, left, for_key, space->u + i, row, values);
        ft_vec sum = gather(out + i, left, for_query, space->u + i, row, values);
        ft_vec added = v_mul(v_set(space->beta[row]), v_sub(v_load(u), known));
        v_store(u, added);
        v_store(out + i, v_fma(v_set(own), added, sum));
    }
}

/* Like run_row, for Mamba-2 and lightning attention, which multiply S only with the query. */
static void run_plain_row(const delta_task *task, int64_t row) {
    const delta_space *space = task->space;
    int64_t keys = task->job->keys, values = task->job->values;
    const float *key = space->x + 2 * row * keys, *query = key + keys;
    float *out = space->read + row * values;
    float for_query[FT_MAX_STATE_PAGE], decays[FT_MAX_STATE_PAGE];
    find_decays(space->c, row, decays);
    for (int64_t s = 0; s < row; s++)
        for_query[s] = decays[s] * dot(space->x + 2 * s * keys, query, keys);
    float left = exp_one(space->c[row]);
    ft_vec own = v_set(dot(key, query, keys)), dt = v_set(space->beta[row]);
    const float *skips = task->job->delta->skip;
    ft_vec skip = v_set(skips ? skips[task->head] : 0.0f);
    for (int64_t i = 0; i < values; i += FT_WIDTH) {
        float *u = space->u + row * values + i;
        ft_vec value = v_load(u), added = v_mul(dt, value);
        ft_vec sum = gather(out + i, left, for_query, space->u + i, row, values);
        v_store(u, added);
        v_store(out + i, v_fma(skip, value, v_fma(own, added, sum)));
    }
}

/* Address of z of all heads in a row. */
static const char *gate_at(const delta_job *job, int64_t batch_row) {
    int64_t channels = job->inputs.channels, all = job->delta->num_heads * job->delta->value_dim;
    return job->mixed + (batch_row * (channels + all) + channels) * item_of(job);
}

/* Write the norm of a head's output, times silu(z), to out. */
FT_INLINE void put_row(const delta_task *task, const float *read, int64_t batch_row, int dtype) {
    const delta_job *job = task->job;
    const ft_recurrence *delta = job->delta;
    int64_t width = delta->value_dim, all = delta->num_heads * width, item = item_of(job);
    const char *z = gate_at(job, batch_row);
    char *out = job->out + batch_row * all * item;
    ft_vec squares = v_set(0.0f);
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec value = v_load_n(read + i, width - i);
        squares = v_fma(value, value, squares);
    }
    ft_vec inverse = v_set(1.0f / sqrtf(v_sum(squares) / (float)width + delta->eps));
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        int64_t n = width - i, at = task->head * width + i;
        ft_vec normed = v_mul(v_mul(v_load(read + i), inverse), v_load_n(delta->norm + i, n));
        v_put(out, at, v_mul(normed, v_silu(v_get(z, at, n, dtype))), n, dtype);
    }
}

/* Write a head's output of lightning attention, or of Mamba-2 times silu(z). If there is a norm,
 * norm_piece computes it after all heads, and the gate of lightning attention after the norm. */
static void put_gated(const delta_task *task, const float *read, int64_t batch_row) {
    const delta_job *job = task->job;
    int64_t width = job->delta->value_dim, all = job->delta->num_heads * width;
    const char *z = gate_at(job, batch_row);
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        int64_t n = width - i, at = task->head * width + i;
        ft_vec gated = v_load(read + i);
        if (!is_lightning(job))
            gated = v_mul(gated, v_silu(v_get(z, at, n, job->dtype == FT_BFLOAT16)));
        if (job->gated) v_put(job->gated + batch_row * all, at, gated, n, 0);
        else v_put(job->out + batch_row * all * item_of(job), at, gated, n, job->dtype == FT_BFLOAT16);
    }
}

/* Compute rows [first, stop) of the page at `base`, whose S is `state`. */
static void run_rows(const delta_task *task, const float *state, int64_t base, int64_t first,
                     int64_t stop) {
    const delta_job *job = task->job;
    const delta_space *space = task->space;
    int64_t row = first - base, count = stop - first;
    int64_t reads_a_row = is_delta(job) ? 2 : 1; /* key and query, or the query */
    for (int64_t position = first; position < stop; position++) read_inputs(task, base, position);
    if (first == task->start) load_entries(task, base, base, first);
    for (int64_t place = ft_max(row, 1); place < stop - base; place++)
        space->c[place] += space->c[place - 1];
    product reads = {.left = space->x + (2 * row + 2 - reads_a_row) * job->keys,
                     .left_row = 2 / reads_a_row * job->keys, .left_term = 1, .right = state,
                     .terms = job->delta->key_dim,
                     .out = space->read + reads_a_row * row * job->values, .width = job->values};
    multiply(&reads, reads_a_row * count);
    for (int64_t i = 0; i < count; i++, row++) {
        const float *read = space->read + (reads_a_row * (row + 1) - 1) * job->values;
        int64_t batch_row = job->batch->first_rows[task->segment] + first + i - task->start;
        if (!is_delta(job)) {
            run_plain_row(task, row);
            put_gated(task, read, batch_row);
            continue;
        }
        run_row(task, row);
        if (job->dtype == FT_BFLOAT16) put_row(task, read, batch_row, FT_BFLOAT16);
        else put_row(task, read, batch_row, FT_FLOAT32);
    }
}

/* Compute S of the next page from a full page, whose entries are in the scratch memory. */
static void fold(const delta_task *task, const float *state, float *out) {
    const delta_job *job = task->job;
    const delta_space *space = task->space;
    int64_t page = job->states->page_size, keys = job->keys;
    float decays[FT_MAX_STATE_PAGE];
    find_decays(space->c, page - 1, decays);
    decays[page - 1] = 1.0f;
    for (int64_t s = 0; s < page; s++)
        for (int64_t i = 0; i < keys; i += FT_WIDTH)
            v_store(space->weighed + s * keys + i,
                    v_mul(v_set(decays[s]), v_load(space->x + 2 * s * keys + i)));
    product folded = {.left = space->weighed, .left_row = 1, .left_term = keys, .right = space->u,
                      .terms = page, .from = state, .scale = exp_one(space->c[page - 1]), .out = out,
                      .width = job->values};
    multiply_in_rows(&folded, job->delta->key_dim);
}

/* -- the walk of a segment
 * ----------------------------------------------------------------------- */

/* The slot that keeps the state at a position, or -1. */
static int64_t keeper_of(const delta_job *job, int64_t segment, int64_t position) {
    const ft_states *states = job->states;
    for (int64_t i = states->first_keeps[segment]; i < states->first_keeps[segment + 1]; i++)
        if (states->keeps[2 * i] == position) return states->keeps[2 * i + 1];
    return -1;
}

/* Return S in padded rows: the slot's own memory if its rows are whole vectors, else a copy. */
static float *load_state(const delta_task *task, float *slot_state) {
    const delta_job *job = task->job;
    const ft_recurrence *delta = job->delta;
    if (job->values == delta->value_dim) return slot_state;
    copy_rows(slot_state, delta->value_dim, task->space->own, job->values, delta->key_dim,
              delta->value_dim);
    return task->space->own;
}

static void run_task(const delta_task *task) {
    const delta_job *job = task->job;
    int64_t page = job->states->page_size, moved = ft_moved_to(&job->inputs, task->segment);
    int64_t slot = job->states->slot_of[task->segment], base = task->at;
    plan_fetches(task);
    float *own = load_state(task, state_of(task, slot)), *state = own;
    for (; base + page <= task->start; base += page) {
        load_entries(task, base, base, base + page);
        fold(task, own, own);
    }
    int64_t keeper = keeper_of(job, task->segment, task->start);
    if (keeper >= 0) store_state(task, own, keeper);
    for (int64_t first = task->start, end; first < task->stop; first = end) {
        end = ft_min(base + page, task->stop);
        run_rows(task, state, base, first, end);
        store_entries(task, base, ft_max(first, ft_min(moved, end)), end);
        if (end < base + page) break;
        keeper = keeper_of(job, task->segment, end);
        if (end == task->stop && keeper < 0) break;
        float *next = end <= moved ? own : task->space->draft;
        fold(task, state, next);
        if (keeper >= 0) store_state(task, next, keeper);
        state = next;
        base = end;
    }
    store_state(task, own, slot);
}

/* Return the index of a free space. There is one: each thread runs at most one piece at a time. */
static int64_t take_space(const delta_job *job) {
    for (int64_t index = 0;; index = (index + 1) % ft_num_threads())
        if (!atomic_flag_test_and_set(&job->taken[index])) return index;
}

/* 0x8040 flushes subnormal numbers to 0 (FTZ and DAZ): fast decay makes many, and they are slow. */
static void delta_piece(void *context, int64_t begin, int64_t end) {
    const delta_job *job = context;
    const int64_t heads = job->delta->num_heads, space = take_space(job);
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
#endif
    for (int64_t index = begin; index < end; index++) {
        int64_t segment = index / heads, start = job->batch->starts[segment];
        delta_task task = {
            .job = job,
            .space = &job->spaces[space],
            .segment = segment,
            .head = index % heads,
            .start = start,
            .stop = start + job->batch->lens[segment],
            .final_stop = job->states->final_stops[segment],
            .at = *ft_position_of(&job->inputs, job->states->slot_of[segment]),
        };
        run_task(&task);
    }
#if defined(__x86_64__)
    _mm_setcsr(before);
#endif
    atomic_flag_clear(&job->taken[space]);
}

/* -- the norm of parts --------------------------------------------------------------------------- */

/* Norm each part of a row separately; in lightning attention, multiply by sigmoid(z). */
static void norm_piece(void *context, int64_t begin, int64_t end) {
    const delta_job *job = context;
    const ft_recurrence *rule = job->delta;
    int64_t width = rule->num_heads * rule->value_dim / rule->num_norms;
    for (int64_t index = begin; index < end; index++) {
        int64_t weights_at = index % rule->num_norms * width;
        const char *z = gate_at(job, index / rule->num_norms);
        const float *part = job->gated + index * width;
        ft_vec squares = v_set(0.0f);
        for (int64_t i = 0; i < width; i += FT_WIDTH) {
            ft_vec value = v_load_n(part + i, width - i);
            squares = v_fma(value, value, squares);
        }
        ft_vec inverse = v_set(1.0f / sqrtf(v_sum(squares) / (float)width + rule->eps));
        for (int64_t i = 0; i < width; i += FT_WIDTH) {
            int64_t n = width - i;
            ft_vec normed = v_mul(v_load_n(part + i, n), inverse);
            normed = v_mul(normed, v_load_n(rule->norm + weights_at + i, n));
            if (is_lightning(job))
                normed = v_mul(normed, v_sigmoid(v_get(z, weights_at + i, n, job->dtype)));
            v_put(job->out, index * width + i, normed, n, job->dtype == FT_BFLOAT16);
        }
    }
}

/* -- the call
 * ------------------------------------------------------------------------------------ */

static float *take(char **memory, int64_t floats) {
    float *taken = (float *)*memory;
    *memory += ft_ceil_div(floats * 4, 64) * 64;
    return taken;
}

/* Place the arrays of a space in `memory`. Returns their size in bytes, also if `memory` is NULL. */
static int64_t lay_out(const delta_job *job, char *memory, delta_space *space) {
    int64_t page = ft_ceil_div(job->states->page_size, FT_WIDTH) * FT_WIDTH;
    int64_t state = job->delta->key_dim * job->values;
    char *at = memory;
    space->x = take(&at, 2 * page * job->keys);
    space->weighed = take(&at, page * job->keys);
    space->u = take(&at, page * job->values);
    space->read = take(&at, 2 * page * job->values);
    space->c = take(&at, page);
    space->beta = take(&at, page);
    space->own = take(&at, job->values == job->delta->value_dim ? 0 : state);
    space->draft = take(&at, state);
    return at - memory;
}

static int find_spaces(delta_job *job) {
    delta_space one;
    int64_t threads = ft_num_threads(), bytes = lay_out(job, NULL, &one);
    int64_t head = ft_ceil_div(threads * (int64_t)(sizeof one + sizeof *job->taken), 64) * 64;
    int64_t values = job->delta->num_heads * job->delta->value_dim;
    int64_t gated = job->delta->num_norms ? job->batch->num_rows * values * 4 : 0;
    char *memory = ft_scratch(FT_SCRATCH_STATE, (size_t)(head + threads * bytes + gated));
    if (!memory) return -1;
    if (gated) job->gated = (float *)(memory + head + threads * bytes);
    job->spaces = (delta_space *)memory;
    job->taken = (atomic_flag *)(memory + threads * (int64_t)sizeof one);
    for (int64_t i = 0; i < threads; i++) {
        char *own = memory + head + i * bytes;
        lay_out(job, own, &job->spaces[i]);
        if (job->keys != job->delta->key_dim) /* products read the padding of keys, so it must be finite */
            memset(job->spaces[i].x, 0, (size_t)(2 * job->states->page_size * job->keys) * 4);
        atomic_flag_clear(&job->taken[i]);
    }
    return 0;
}

int ft_run_recurrent(const void *mixed, const float *gates, void *out, const ft_batch *batch,
                     const ft_recurrence *delta, int dtype) {
    delta_job job = {.mixed = mixed, .gates = gates, .out = out, .batch = batch,
                     .states = batch->states, .delta = delta, .dtype = dtype};
    job.num_gates = (is_delta(&job) ? 2 : 1) * delta->num_heads;
    int64_t values = delta->num_heads * delta->value_dim;
    int64_t channels = 2 * delta->num_key_heads * delta->key_dim + values;
    job.inputs = (ft_inputs){mixed, (channels + values) * item_of(&job), channels, delta->num_taps,
                             delta->layer, dtype, batch, batch->states};
    job.keys = ft_ceil_div(delta->key_dim, FT_WIDTH) * FT_WIDTH;
    job.values = ft_ceil_div(delta->value_dim, FT_WIDTH) * FT_WIDTH;
    if (find_spaces(&job)) return -1;
    int64_t work = 2 * delta->key_dim * delta->value_dim * batch->num_rows / batch->num_segments;
    /* With ranges, a thread prefetches the state of the head that it computes next. */
    ft_parallel_ranges(delta_piece, &job, batch->num_segments * delta->num_heads,
                       ft_max(1, LEAST_WORK / work));
    ft_keep_inputs(&job.inputs);
    if (job.gated) ft_parallel(norm_piece, &job, batch->num_rows * delta->num_norms, 4);
    return 0;
}

FT_EXPORT int ft_recur(const void *mixed, const float *gates, void *out, const ft_batch *batch,
                       const ft_recurrence *rule, int dtype) {
    return ft_run_recurrent(mixed, gates, out, batch, rule, dtype);
}
