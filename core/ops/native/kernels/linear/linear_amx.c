/* Linear layers on the matrix unit, for bf16 and int8 weights, with the same panels as linear.c.
 *
 * A step of a panel is 32 outputs by 4 bytes of K, so 16 steps are two tiles of weights side by
 * side, and 64 bytes of up to 16 rows of x are a tile as they lie in memory. One kernel serves from
 * one row to a prefill chunk: the sums of a row are the same additions in the same order in any
 * tile and at any place in it. So a last, partial tile of rows is not padded with zeros: it starts
 * some rows earlier, and computes these a second time.
 *
 * Few rows are limited by memory: they take two panels at once, and weights are prefetched a little
 * ahead. More rows are limited by the unit: two tiles of rows share each load of weights, and each
 * pair of tiles prefetches a share of the next panel into the second-level cache.
 */
#include "common/amx.h"
#include "linear_job.h"

#if defined(FT_AMX)

enum {
    K_STEPS = 16,               /* steps of a panel in a tile: AMX_ROW_BYTES of a row of x */
    K_BYTES = K_STEPS * 4 * PANEL, /* bytes of a panel in two tiles */
    HALF = 4 * AMX_COLUMNS,     /* bytes of a step in one tile */
    STRIDE = 4 * PANEL,         /* bytes of a step */
    NEAR = 4096,                /* bytes prefetched ahead for few rows; 16384: 0.85 of the speed */
    GROUPED_ROWS = 32,          /* least rows for grouped kinds on the unit; not measured yet */
};

typedef struct {
    const ft_linear_job *job;
    const char *x; /* rows of `row_bytes` */
    int64_t row_bytes;
    int64_t num_whole;   /* whole tiles along K */
    int64_t rest_steps;  /* steps of the panel after these tiles, at most K_STEPS */
    const char *x_rest;  /* [rows][AMX_ROW_BYTES] of x after these tiles, padded with zeros */
} amx_job;

/* A tile of rows of x. */
typedef struct {
    const char *x, *rest;
    int64_t row;
} amx_rows;

static amx_rows rows_from(const amx_job *job, int64_t row) {
    return (amx_rows){job->x + row * job->row_bytes, job->x_rest + row * AMX_ROW_BYTES, row};
}

/* Set the tile shapes: sums are tiles 0 to 3, x is tile 4 and, for the second tile of rows, 5;
 * weights are tiles 6 and 7. */
static void configure(int64_t first_rows, int64_t second_rows) {
    const uint8_t first = (uint8_t)first_rows, second = (uint8_t)second_rows;
    const uint8_t rows[8] = {first, first, second, second, first, second, AMX_ROWS, AMX_ROWS};
    ft_amx_configure(rows);
}

#define DOT(is_int8, c, a, b)              \
    do {                                   \
        if (is_int8) AMX_DOT_SU(c, a, b);  \
        else AMX_DOT_BF16(c, a, b);        \
    } while (0)

/* Copy a panel's steps after its whole tiles to `room`, padded with zeros. The bytes of the next
 * panel cannot serve as padding, although x is zero there: a bf16 NaN times zero is NaN. */
static const char *rest_of_panel(const amx_job *job, const char *panel, char *room) {
    const int64_t bytes = job->rest_steps * STRIDE;
    memcpy(room, panel + job->num_whole * K_BYTES, (size_t)bytes);
    memset(room + bytes, 0, (size_t)(K_BYTES - bytes));
    return room;
}

/* ---- results ---- */

/* Convert exact sums of bytes to floats in place, with the same bits as int8_tile of linear.c. */
static void scale_sums(const ft_linear_job *job, int64_t row, int64_t column, float *sums,
                       int64_t count) {
    for (int64_t half = 0; half < PANEL; half += FT_LANES) {
        vf scale = vf_load(job->weight->scale + column + half);
        for (int64_t r = 0; r < count; r++) {
            vi sum = vi_add(vi_load(sums + r * PANEL + half), vi_set1(job->x_offset[row + r]));
            vf row_scale = vf_mul(scale, vf_set1(job->x_scale[row + r]));
            vf_store(sums + r * PANEL + half, vf_mul(vf_from_vi(sum), row_scale));
        }
    }
}

static void put(const ft_linear_job *job, int64_t row, int64_t column, float *sums, int64_t count) {
    if (job->weight->kind == FT_LINEAR_INT8) scale_sums(job, row, column, sums, count);
    ft_finish_rows(job, row, column, sums, count);
}

/* Store sums 0 and 1, or 2 and 3, as [16][PANEL]. */
#define STORE(first, second, sums)                       \
    do {                                                 \
        AMX_STORE(first, sums, STRIDE);                  \
        AMX_STORE(second, (sums) + AMX_COLUMNS, STRIDE); \
    } while (0)

/* ---- up to 16 rows ---- */

FT_INLINE void fetch_near(const char *ahead) {
#pragma GCC unroll 32
    for (int line = 0; line < K_BYTES; line += 64) ft_prefetch(ahead + line);
}

/* Multiply a tile of x with one tile along K of two panels, or of one panel if `w2` is NULL. */
FT_INLINE void multiply_few(const char *x, int64_t stride, const char *w, const char *w2,
                            const int is_int8) {
    AMX_LOAD(4, x, stride);
    AMX_LOAD(6, w, STRIDE);
    AMX_LOAD(7, w + HALF, STRIDE);
    DOT(is_int8, 0, 4, 6);
    DOT(is_int8, 1, 4, 7);
    if (!w2) return;
    AMX_LOAD(6, w2, STRIDE);
    AMX_LOAD(7, w2 + HALF, STRIDE);
    DOT(is_int8, 2, 4, 6);
    DOT(is_int8, 3, 4, 7);
}

FT_INLINE void few_rows(const amx_job *job, int64_t panel, const int num_panels,
                        const int is_int8) {
    const int64_t bytes = job->job->panel_bytes, count = job->job->rows;
    const char *w = (const char *)job->job->weight->weight + panel * bytes, *x = job->x;
    const char *w2 = num_panels == 2 ? w + bytes : NULL;
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (int64_t k = 0; k < job->num_whole; k++, x += AMX_ROW_BYTES) {
        const char *at = w + k * K_BYTES, *at2 = w2 ? w2 + k * K_BYTES : NULL;
        fetch_near(at + NEAR);
        if (at2) fetch_near(at2 + NEAR);
        multiply_few(x, job->row_bytes, at, at2, is_int8);
    }
    if (job->rest_steps) {
        _Alignas(64) char room[2][K_BYTES];
        const char *rest = rest_of_panel(job, w, room[0]);
        const char *rest2 = w2 ? rest_of_panel(job, w2, room[1]) : NULL;
        multiply_few(job->x_rest, AMX_ROW_BYTES, rest, rest2, is_int8);
    }
    _Alignas(64) float sums[2][AMX_ROWS * PANEL];
    STORE(0, 1, sums[0]);
    put(job->job, 0, panel * PANEL, sums[0], count);
    if (!w2) return;
    STORE(2, 3, sums[1]);
    put(job->job, 0, (panel + 1) * PANEL, sums[1], count);
}

FT_INLINE void run_few(const amx_job *job, int64_t begin, int64_t end, const int is_int8) {
    configure(job->job->rows, job->job->rows);
    int64_t panel = begin;
    for (; panel + 2 <= end; panel += 2) few_rows(job, panel, 2, is_int8);
    if (panel < end) few_rows(job, panel, 1, is_int8);
}

/* ---- more rows ---- */

/* The share of the next panel that a pair of row tiles prefetches. */
typedef struct {
    const char *at;
    int64_t step; /* bytes prefetched with each tile along K */
} amx_share;

FT_INLINE void fetch_share(amx_share *share) {
    for (const char *stop = share->at + share->step; share->at < stop; share->at += 64)
        __builtin_prefetch(share->at, 0, 2);
}

/* Multiply one tile along K for two tiles of rows. Weights and x are loaded while the unit still
 * multiplies earlier tiles. */
FT_INLINE void multiply_pair(const char *x, const char *x2, int64_t stride, const char *w,
                             amx_share *share, const int is_int8) {
    AMX_LOAD(6, w, STRIDE);
    AMX_LOAD(4, x, stride);
    DOT(is_int8, 0, 4, 6);
    AMX_LOAD(7, w + HALF, STRIDE);
    fetch_share(share);
    DOT(is_int8, 1, 4, 7);
    AMX_LOAD(5, x2, stride);
    DOT(is_int8, 2, 5, 6);
    DOT(is_int8, 3, 5, 7);
}

FT_INLINE void pair_of_tiles(const amx_job *job, const char *w, const char *rest_w, amx_rows first,
                             amx_rows second, amx_share share, const int is_int8) {
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    for (int64_t k = 0; k < job->num_whole; k++, w += K_BYTES)
        multiply_pair(first.x + k * AMX_ROW_BYTES, second.x + k * AMX_ROW_BYTES, job->row_bytes, w,
                      &share, is_int8);
    if (job->rest_steps)
        multiply_pair(first.rest, second.rest, AMX_ROW_BYTES, rest_w, &share, is_int8);
}

FT_INLINE void one_tile(const amx_job *job, const char *w, const char *rest_w, amx_rows rows,
                        amx_share share, const int is_int8) {
    AMX_ZERO(0);
    AMX_ZERO(1);
    for (int64_t k = 0; k < job->num_whole; k++, w += K_BYTES) {
        multiply_few(rows.x + k * AMX_ROW_BYTES, job->row_bytes, w, NULL, is_int8);
        fetch_share(&share);
    }
    if (job->rest_steps) multiply_few(rows.rest, AMX_ROW_BYTES, rest_w, NULL, is_int8);
}

/* Compute all rows of a panel, one pair of tiles after the other. The last tile ends with the last
 * row. */
FT_INLINE void many_rows(const amx_job *job, int64_t panel, int64_t second_rows,
                         const int is_int8) {
    const int64_t num_rows = job->job->rows, bytes = job->job->panel_bytes;
    const int64_t pairs = ft_ceil_div(num_rows, 2 * AMX_ROWS);
    const int64_t share = ft_ceil_div(bytes, pairs * ft_max(1, job->num_whole) * 64) * 64;
    const char *w = (const char *)job->job->weight->weight + panel * bytes;
    _Alignas(64) char room[K_BYTES];
    const char *rest_w = job->rest_steps ? rest_of_panel(job, w, room) : NULL;
    _Alignas(64) float sums[AMX_ROWS * PANEL];
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t row = pair * 2 * AMX_ROWS, last = num_rows - second_rows;
        const amx_share ahead = {w + bytes + pair * share * job->num_whole, share};
        const amx_rows second = rows_from(job, ft_min(row + AMX_ROWS, last));
        if (row + AMX_ROWS < num_rows) {
            const amx_rows first = rows_from(job, row);
            pair_of_tiles(job, w, rest_w, first, second, ahead, is_int8);
            STORE(0, 1, sums);
            put(job->job, row, panel * PANEL, sums, AMX_ROWS);
            STORE(2, 3, sums);
        } else {
            one_tile(job, w, rest_w, second, ahead, is_int8);
            STORE(0, 1, sums);
        }
        put(job->job, second.row, panel * PANEL, sums, second_rows);
    }
}

FT_INLINE void run_many(const amx_job *job, int64_t begin, int64_t end, const int is_int8) {
    /* Up to 32 rows, the second tile has only the rows that are left, which takes less time. */
    const int64_t second_rows = ft_min(job->job->rows - AMX_ROWS, AMX_ROWS);
    configure(AMX_ROWS, second_rows);
    for (int64_t panel = begin; panel < end; panel++) many_rows(job, panel, second_rows, is_int8);
}

/* ---- the call ---- */

static void run_panels(void *context, int64_t begin, int64_t end) {
    const amx_job *job = context;
    const int is_int8 = job->job->weight->kind == FT_LINEAR_INT8;
    if (job->job->rows <= AMX_ROWS) {
        if (is_int8) run_few(job, begin, end, 1);
        else run_few(job, begin, end, 0);
    } else {
        if (is_int8) run_many(job, begin, end, 1);
        else run_many(job, begin, end, 0);
    }
    AMX_RELEASE();
}

/* Copy the end of each row of x, after whole tiles, to x_rest. Returns -1 when there is no
 * memory. */
static int copy_rest_of_x(amx_job *job) {
    const int64_t rows = job->job->rows, begin = job->num_whole * AMX_ROW_BYTES;
    const int64_t bytes = ft_min(AMX_ROW_BYTES, job->row_bytes - begin);
    char *memory = ft_scratch(FT_SCRATCH_AMX, (size_t)(rows * AMX_ROW_BYTES));
    if (!memory) return -1;
    memset(memory, 0, (size_t)(rows * AMX_ROW_BYTES));
    for (int64_t row = 0; row < rows; row++)
        memcpy(memory + row * AMX_ROW_BYTES, job->x + row * job->row_bytes + begin, (size_t)bytes);
    job->x_rest = memory;
    return 0;
}

int ft_amx_suits(const ft_linear_weight *weight, int64_t rows) {
    /* Sums of bytes are exact, so quantised kinds may use the unit from the row count at which it
     * is faster (int8, measured: 8). bf16 must use it always, to have one order of additions. */
    if (weight->kind == FT_LINEAR_INT8) return rows >= 8;
    if (ft_is_grouped(weight)) return rows >= GROUPED_ROWS;
    return weight->kind == FT_LINEAR_BFLOAT16;
}

int ft_amx_linear(ft_linear_job *linear, const void *x, int x_dtype) {
    const ft_linear_weight *weight = linear->weight;
    if (ft_is_grouped(weight)) return ft_amx_groups(linear, x, x_dtype);
    amx_job job = {.job = linear, .x = x, .row_bytes = (int64_t)weight->in_features * 2};
    if (weight->kind == FT_LINEAR_INT8) {
        linear->tile_rows = 1; /* rows one after the other: nothing to interleave */
        linear->tiles = linear->rows;
        if (ft_prepare_rows(linear, x, x_dtype) != 0) return -1;
        job.x = linear->x;
        job.row_bytes = linear->x_steps * 4;
    }
    job.num_whole = ft_min(job.row_bytes / AMX_ROW_BYTES, linear->steps / K_STEPS);
    job.rest_steps = linear->steps - job.num_whole * K_STEPS;
    if (job.rest_steps && copy_rest_of_x(&job) != 0) return -1;
    const int64_t panels = ft_ceil_div(weight->num_own, PANEL);
    ft_parallel_ranges(run_panels, &job, panels, ft_max(1, panels / (8 * ft_num_threads())));
    return 0;
}

#endif
