/* Linear layers. A row has the same result bits alone and in a prefill chunk.
 *
 * A vector holds neighbouring outputs, and each activation is broadcast to all lanes. So an output
 * is one chain of additions in the order of k, without a reduction across lanes. The rows of a tile
 * share each load of weights; their number changes no output.
 *
 * The weights stream once from memory. A single tile of rows prefetches a little ahead in its
 * panel; of several tiles, each prefetches its share of the next panel.
 */
#include "linear.h"
#include "linear_tile.h"

/* ---- tiles; `count` is a constant wherever they are inlined ---- */

FT_INLINE void float32_tile(const ft_linear_job *job, const tile_t *tile, const int count) {
    const char *x = job->x + tile->row * job->x_steps * 4, *w = tile->weight, *ahead = tile->ahead;
    vf sum[MAX_TILE][2];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = vf_zero();
    for (int64_t s = 0; s < job->steps; s++, w += STEP_BYTES, ahead += tile->ahead_step) {
        vf left = vf_load((const float *)w), right = vf_load((const float *)w + FT_LANES);
        ft_prefetch(ahead);
        ft_prefetch(ahead + 64);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            vf value = vf_set1(((const float *)x)[r]);
            sum[r][0] = vf_fma(left, value, sum[r][0]);
            sum[r][1] = vf_fma(right, value, sum[r][1]);
        }
        x += 4 * count;
    }
    finish_sums(job, tile, sum, count);
}

FT_INLINE void bfloat16_tile(const ft_linear_job *job, const tile_t *tile, const int count) {
    const char *x = job->x + tile->row * job->x_steps * 4, *w = tile->weight, *ahead = tile->ahead;
    vf sum[MAX_TILE][2];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = vf_zero();
    for (int64_t s = 0; s < job->steps; s++, w += STEP_BYTES, ahead += tile->ahead_step) {
        vi left = vi_load(w), right = vi_load(w + STEP_BYTES / 2);
        ft_prefetch(ahead);
        ft_prefetch(ahead + 64);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            vi pair = vi_broadcast(x + 4 * r);
            sum[r][0] = vf_dot_bf16(sum[r][0], left, pair);
            sum[r][1] = vf_dot_bf16(sum[r][1], right, pair);
        }
        x += 4 * count;
    }
    finish_sums(job, tile, sum, count);
}

/* Products in float32, for CPUs on which products of bf16 pairs take longer. x is already
 * float32. */
FT_INLINE void bfloat16_wide_tile(const ft_linear_job *job, const tile_t *tile, const int count) {
    const char *w = tile->weight, *ahead = tile->ahead;
    const float *x = (const float *)(job->x + tile->row * job->x_steps * 4);
    vf sum[MAX_TILE][2];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = vf_zero();
    for (int64_t s = 0; s < job->steps; s++, w += STEP_BYTES, ahead += tile->ahead_step) {
        vi left = vi_load(w), right = vi_load(w + STEP_BYTES / 2);
        vf even_left = vf_even_bf16(left), even_right = vf_even_bf16(right);
        ft_prefetch(ahead);
        ft_prefetch(ahead + 64);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++, x++) {
            vf value = vf_set1(*x);
            sum[r][0] = vf_fma(even_left, value, sum[r][0]);
            sum[r][1] = vf_fma(even_right, value, sum[r][1]);
        }
        vf odd_left = vf_odd_bf16(left), odd_right = vf_odd_bf16(right);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++, x++) {
            vf value = vf_set1(*x);
            sum[r][0] = vf_fma(odd_left, value, sum[r][0]);
            sum[r][1] = vf_fma(odd_right, value, sum[r][1]);
        }
    }
    finish_sums(job, tile, sum, count);
}

FT_INLINE void int8_tile(const ft_linear_job *job, const tile_t *tile, const int count) {
    const char *x = job->x + tile->row * job->x_steps * 4, *w = tile->weight, *ahead = tile->ahead;
    vi sum[MAX_TILE][2];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++)
        sum[r][0] = sum[r][1] = vi_set1(job->x_offset[tile->row + r]);
    for (int64_t s = 0; s < job->steps; s++, w += STEP_BYTES, ahead += tile->ahead_step) {
        vi left = vi_load(w), right = vi_load(w + STEP_BYTES / 2);
        ft_prefetch(ahead);
        ft_prefetch(ahead + 64);
#if defined(FT_WORDS)
        vi even_left = vi_even_bytes(left), even_right = vi_even_bytes(right);
#pragma GCC unroll 6
        for (int r = 0; r < count; r++, x += 4) vi_dot_words(sum[r], even_left, even_right, x);
        vi odd_left = vi_odd_bytes(left), odd_right = vi_odd_bytes(right);
#pragma GCC unroll 6
        for (int r = 0; r < count; r++, x += 4) vi_dot_words(sum[r], odd_left, odd_right, x);
#else
#pragma GCC unroll 12
        for (int r = 0; r < count; r++, x += 4) {
            vi quad = vi_broadcast(x);
            sum[r][0] = vi_dot_u8s8(sum[r][0], left, quad);
            sum[r][1] = vi_dot_u8s8(sum[r][1], right, quad);
        }
#endif
    }
    const float *scale = job->weight->scale + tile->column;
    float out[MAX_TILE][PANEL];
    vf left_scale = vf_load(scale), right_scale = vf_load(scale + FT_LANES);
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) {
        vf x_scale = vf_set1(job->x_scale[tile->row + r]);
        vf_store(out[r], vf_mul(vf_from_vi(sum[r][0]), vf_mul(left_scale, x_scale)));
        vf_store(out[r] + FT_LANES, vf_mul(vf_from_vi(sum[r][1]), vf_mul(right_scale, x_scale)));
    }
    ft_finish_rows(job, tile->row, tile->column, out[0], count);
}

/* 4-bit weights and byte activations, whose sums over a group fit into 16 bits. `min_added`:
 * whether a minimum is added to every weight; else the offset of the values is subtracted. */
FT_INLINE void nibble_tile(const ft_linear_job *job, const tile_t *tile, const int count,
                           const int min_added) {
    const int block = block_bytes(min_added ? FT_LINEAR_INT4_MIN : FT_LINEAR_INT4);
    const char *x = job->x + tile->row * job->x_steps * 4, *w = tile->weight, *ahead = tile->ahead;
    const float *x_scale = job->x_scale + tile->row * job->groups;
    const int32_t *x_offset = job->x_offset + tile->row * job->groups;
    vf sum[MAX_TILE][2];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = vf_zero();
    for (int64_t g = 0; g < job->groups; g++, w += block, ahead += tile->ahead_step) {
        vi dots[MAX_TILE][2];
#pragma GCC unroll 5
        for (int line = 0; line < block; line += 64) ft_prefetch(ahead + line);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) dots[r][0] = dots[r][1] = vi_zero();
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++, x += 4 * count) {
            const char *at = w + j % 4 * STEP_BYTES;
            vi left = vi_load(at), right = vi_load(at + STEP_BYTES / 2);
            left = j < 4 ? vi_low_nibbles(left) : vi_high_nibbles(left);
            right = j < 4 ? vi_low_nibbles(right) : vi_high_nibbles(right);
#pragma GCC unroll 12
            for (int r = 0; r < count; r++) vi_gather_u4s8(dots[r], left, right, x + 4 * r);
        }
        const uint16_t *numbers = (const uint16_t *)(w + 4 * STEP_BYTES);
        vf scale[2], min[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++, numbers += FT_LANES) {
            scale[half] = vf_load_fp16(numbers);
            if (min_added) min[half] = vf_load_fp16(numbers + PANEL);
        }
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            /* With minima, x_offset holds the sum of the group's activations. */
            vi offset = min_added ? vi_zero() : vi_set1(x_offset[r]);
            vf row_scale = vf_set1(x_scale[r]), row_sum = vf_set1((float)x_offset[r] * x_scale[r]);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                vf dot = vf_from_vi(vi_add(vi_gathered(dots[r][half]), offset));
                sum[r][half] = vf_fma(dot, vf_mul(scale[half], row_scale), sum[r][half]);
                if (min_added) sum[r][half] = vf_fma(min[half], row_sum, sum[r][half]);
            }
        }
        x_scale += count;
        x_offset += count;
    }
    finish_sums(job, tile, sum, count);
}

FT_INLINE void int4_tile(const ft_linear_job *job, const tile_t *tile, const int count) {
    nibble_tile(job, tile, count, 0);
}

FT_INLINE void rough_tile(const ft_linear_job *job, const tile_t *tile, const int count) {
    nibble_tile(job, tile, count, 1);
}

#define PLAIN_TILE(kind) static DEFINE_TILE(kind)
PLAIN_TILE(float32)
PLAIN_TILE(bfloat16)
PLAIN_TILE(bfloat16_wide)
PLAIN_TILE(int8)
PLAIN_TILE(int4)
PLAIN_TILE(rough)

static void run_tile(const ft_linear_job *job, const tile_t *tile, int64_t count) {
    if (job->weight->is_rough) {
        ft_run_rough(job, tile, count);
        return;
    }
    switch (job->weight->kind) {
        case FT_LINEAR_FLOAT32: ft_run_float32(job, tile, count); break;
        case FT_LINEAR_BFLOAT16: ft_run_bfloat16(job, tile, count); break;
        case FT_LINEAR_BFLOAT16_WIDE: ft_run_bfloat16_wide(job, tile, count); break;
        case FT_LINEAR_INT8: ft_run_int8(job, tile, count); break;
        case FT_LINEAR_INT4: ft_run_int4(job, tile, count); break;
        case FT_LINEAR_INT4_MIN: ft_run_int4_min(job, tile, count); break;
        case FT_LINEAR_INT8_GROUP: ft_run_int8_group(job, tile, count); break;
        case FT_LINEAR_INT4_ZERO: ft_run_int4_zero(job, tile, count); break;
        case FT_LINEAR_INT4_K: ft_run_int4_k(job, tile, count); break;
        case FT_LINEAR_INT5_K: ft_run_int5_k(job, tile, count); break;
        case FT_LINEAR_INT6_K: ft_run_int6_k(job, tile, count); break;
        case FT_LINEAR_IQ4_NL: ft_run_iq4_nl(job, tile, count); break;
        case FT_LINEAR_MXFP4: ft_run_mxfp4(job, tile, count); break;
        case FT_LINEAR_IQ4_XS: ft_run_iq4_xs(job, tile, count); break;
        case FT_LINEAR_INT4_GROUP: ft_run_int4_group(job, tile, count); break;
        case FT_LINEAR_INT5_GROUP: ft_run_int5_group(job, tile, count); break;
        default: ft_run_int5_min(job, tile, count);
    }
}

static void run_panels(void *context, int64_t begin, int64_t end) {
    const ft_linear_job *job = context;
    const int64_t share = job->panel_bytes / job->tiles;
    for (int64_t panel = begin; panel < end; panel++) {
#if defined(FT_WORDS)
        if (ft_widens(job)) {
            ft_run_widened(job, panel);
            continue;
        }
#endif
        const char *weight = (const char *)job->weight->weight + panel * job->panel_bytes;
        for (int64_t i = 0; i < job->tiles; i++) {
            tile_t tile = {.weight = weight, .row = i * job->tile_rows, .column = panel * PANEL};
            tile.ahead = job->tiles == 1 ? weight + NEAR : weight + job->panel_bytes + i * share;
            tile.ahead_step = share / job->steps;
            int64_t count = ft_min(job->tile_rows, job->rows - tile.row);
            if (count > 0) run_tile(job, &tile, count);
        }
    }
}

/* ---- the call ---- */

static int64_t round_up(int64_t value, int64_t unit) { return ft_ceil_div(value, unit) * unit; }

/* Number of 32-bit groups in a row of x. int8 rows are padded to whole vectors; their weights are
 * not. */
static int64_t words_of_row(const ft_linear_weight *weight) {
    switch (weight->kind) {
        case FT_LINEAR_FLOAT32: return weight->in_features;
        case FT_LINEAR_BFLOAT16: return ft_ceil_div(weight->in_features, 2);
        case FT_LINEAR_BFLOAT16_WIDE: return round_up(weight->in_features, 2);
        case FT_LINEAR_INT8:
            return (round_up(weight->in_features, FT_LANES) << ft_has_words(weight)) / 4;
        default: return (round_up(weight->in_features, FT_GROUP) << ft_is_fine(weight)) / 4;
    }
}

/* Make the job for one or more rows and a weight, whose `others` are left out. */
static ft_linear_job make_job(const ft_linear_weight *weight, int64_t rows, void *y, int64_t y_stride,
                              int y_dtype) {
    ft_linear_job job = {
        .weight = weight, .rows = rows, .y = y, .y_stride = y_stride, .y_dtype = y_dtype};
    job.tiles = ft_ceil_div(rows, MAX_TILE);
    job.tile_rows = ft_ceil_div(rows, job.tiles);
    job.tiles = ft_ceil_div(rows, job.tile_rows);
    job.steps = ft_ceil_div(weight->in_features, step_columns(weight->kind));
    job.x_steps = words_of_row(weight);
    job.groups = ft_is_grouped(weight) ? job.steps : 1;
    job.panel_bytes = panel_bytes(weight->kind, weight->in_features);
    return job;
}

/* Panels in a piece: many enough to stream, few enough that a slow core does not delay the job. */
static int64_t grain_of(int64_t panels) {
    return ft_max(1, panels / (8 * ft_num_threads()));
}

static int64_t num_panels(const ft_linear_weight *weight) {
    return ft_ceil_div(weight->num_own, PANEL);
}

int ft_linear(const ft_linear_weight *weight, const void *x, int x_dtype, int64_t rows, void *y,
              int y_dtype) {
    if (rows <= 0) return 0;
    if (weight->others)
        return ft_linear_many(&weight, (int64_t[]){0, rows}, 1, x, x_dtype, y, y_dtype);
    ft_linear_job job = make_job(weight, rows, y, weight->out_features, y_dtype);
#if defined(FT_AMX)
    if (ft_amx_suits(weight, rows)) return ft_amx_linear(&job, x, x_dtype);
#endif
    if (ft_prepare_rows(&job, x, x_dtype) != 0) return -1;
    ft_parallel_ranges(run_panels, &job, num_panels(weight), grain_of(num_panels(weight)));
    return 0;
}

void ft_linear_ahead(const ft_linear_weight *next) {
    if (!next) {
        ft_ahead(NULL, 0);
        return;
    }
    const int64_t bytes = panel_bytes(next->kind, next->in_features);
    ft_ahead(next->weight, (size_t)(num_panels(next) * bytes));
}

/* ---- many weights in one call ---- */

/* A job, its rows, and where its panels and its prepared rows begin when all jobs are joined. */
typedef struct {
    ft_linear_job job;
    const char *x;
    int64_t first_panel;
    size_t prepared_at;
} one_of_many;

typedef struct {
    one_of_many *all;
    int64_t count, panels;
    char *prepared;
    size_t prepared_bytes;
    int x_dtype;
} many_jobs;

static void prepare_some(void *context, int64_t begin, int64_t end) {
    const many_jobs *jobs = context;
    for (int64_t i = begin; i < end; i++) {
        one_of_many *one = &jobs->all[i];
        ft_prepare_rows_in(&one->job, one->x, jobs->x_dtype, jobs->prepared + one->prepared_at);
    }
}

/* Compute panels [begin, end), counted through all jobs. */
static void run_some(void *context, int64_t begin, int64_t end) {
    const many_jobs *jobs = context;
    int64_t at = 0;
    while (at + 1 < jobs->count && jobs->all[at + 1].first_panel <= begin) at++;
    for (; begin < end; at++) {
        one_of_many *one = &jobs->all[at];
        int64_t stop = at + 1 < jobs->count ? jobs->all[at + 1].first_panel : end;
        stop = ft_min(stop, end);
        run_panels(&one->job, begin - one->first_panel, stop - one->first_panel);
        begin = stop;
    }
}

/* Add a job with rows `x`, or run it now if it takes the matrix unit. Returns -1 when there is no
 * memory. */
static int add_job(many_jobs *jobs, ft_linear_job job, const char *x) {
#if defined(FT_AMX)
    if (ft_amx_suits(job.weight, job.rows)) return ft_amx_linear(&job, x, jobs->x_dtype);
#endif
    jobs->all[jobs->count++] = (one_of_many){job, x, jobs->panels, jobs->prepared_bytes};
    jobs->panels += num_panels(job.weight);
    jobs->prepared_bytes += (ft_prepared_bytes(&job) + 63) / 64 * 64;
    return 0;
}

int ft_linear_many(const ft_linear_weight *const *weights, const int64_t *firsts, int64_t count,
                   const void *x, int x_dtype, void *y, int y_dtype) {
    const int64_t x_size = x_dtype == FT_BFLOAT16 ? 2 : 4, y_size = y_dtype == FT_BFLOAT16 ? 2 : 4;
    int64_t parts = 0;
    for (int64_t i = 0; i < count; i++)
        for (const ft_linear_weight *part = weights[i]; part; part = part->others) parts++;
    many_jobs jobs = {.x_dtype = x_dtype};
    jobs.all = ft_scratch(FT_SCRATCH_JOBS, (size_t)parts * sizeof *jobs.all);
    if (!jobs.all) return -1;
    for (int64_t i = 0; i < count; i++) {
        const int64_t rows = firsts[i + 1] - firsts[i], stride = weights[i]->out_features;
        if (rows == 0) continue;
        const char *from = (const char *)x + firsts[i] * weights[i]->in_features * x_size;
        char *to = (char *)y + firsts[i] * stride * y_size;
        for (const ft_linear_weight *part = weights[i]; part; part = part->others) {
            if (add_job(&jobs, make_job(part, rows, to, stride, y_dtype), from)) return -1;
            to += part->num_own * y_size;
        }
    }
    if (jobs.prepared_bytes) jobs.prepared = ft_scratch(FT_SCRATCH_LINEAR, jobs.prepared_bytes);
    if (jobs.prepared_bytes && !jobs.prepared) return -1;
    ft_parallel(prepare_some, &jobs, jobs.count, ft_max(1, jobs.count / (4 * ft_num_threads())));
    ft_parallel_ranges(run_some, &jobs, jobs.panels, grain_of(jobs.panels));
    return 0;
}

/* Return L of the layouts in linear_weight.h; a panel has 2 L outputs. */
FT_EXPORT int ft_lanes(void) { return FT_LANES; }

/* Return the number of rows of a full tile. One row more than a multiple of it costs another
 * tile. */
FT_EXPORT int ft_tile_rows(void) {
#if defined(FT_AMX)
    return AMX_ROWS;
#else
    return MAX_TILE;
#endif
}
