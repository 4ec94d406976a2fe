/* Linear layers on the matrix unit for weights with a scale per group, for prompts.
 *
 * A group of a panel is unpacked once for many rows, into two tiles of bytes that are 8 steps deep
 * and lie side by side. Unlike in linear_amx.c, sums leave the unit after every group and are
 * scaled, in the order of groups and by the operations of linear_fine.h, so that results have the
 * same bits as with the vector kernels. 16-bit activations are two tiles, of low and of high bytes,
 * with separate sums. The unit's full depth of 16 steps is of no use here: two groups in one
 * product would share a sum.
 *
 * The cost is estimated, not measured on hardware. For 16 rows, 32 outputs and a group of Q4_K, the
 * unit needs 64 cycles (4 products of 16 cycles) and as many to store sums, while vector
 * instructions scale them: 224 instructions, 112 cycles on two ports. The vector kernel takes about
 * 800 instructions, 400 cycles, for the same work. So the unit takes 0.3 (all overlaps) to 0.45
 * (nothing overlaps) of that time; 0.4 to 0.7 for Q6_K, which has a scale for every 16 values; for
 * int4, the same as for Q4_K. Unpacking takes some 60 cycles, shared by the rows.
 */
#include "linear_job.h"

#if defined(FT_AMX)

#include "linear_unpacked.h"

/* Set the tile shapes: sums 0 and 1 are of low bytes for both halves of the panel, sums 2 and 3 of
 * high bytes; x is in 4 and 5, weights are in 6 and 7. */
static void configure(const int kind) {
    const int k_bytes = FT_GROUP / num_parts(kind);
    ft_amx_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? k_bytes : AMX_ROW_BYTES);
        shapes.rows[i] = (uint8_t)(i < 6 ? AMX_ROWS : k_bytes / 4);
    }
    AMX_CONFIGURE(&shapes);
}

/* A last tile of rows that would not be full starts some rows earlier, as in linear_amx.c. */
static x_tile tile_of(const ft_linear_job *job, int64_t number) {
    return (x_tile){ft_min(number * AMX_ROWS, job->rows - AMX_ROWS), AMX_ROWS, job->groups, 1};
}

FT_INLINE void multiply(const ft_linear_job *job, const char *x, int64_t num_rows,
                        const unpacked_groups *groups, int64_t count, tile_dots dots,
                        const int kind, const int num_planes) {
    (void)num_rows;
    const int64_t stride = job->x_steps * 4;
    for (int64_t i = 0; i < count; i++, x += FT_GROUP * num_planes) {
        for (int part = 0; part < num_parts(kind); part++) {
            const char *w = groups->values[i] + part * 4 * STEP_BYTES;
            const char *low = x + part * FT_GROUP / 2;
            AMX_ZERO(0);
            AMX_ZERO(1);
            AMX_LOAD(6, w, STEP_BYTES);
            AMX_LOAD(4, low, stride);
            AMX_DOT_SU(0, 4, 6);
            AMX_LOAD(7, w + STEP_BYTES / 2, STEP_BYTES);
            AMX_DOT_SU(1, 4, 7);
            if (num_planes == 2) {
                AMX_ZERO(2);
                AMX_ZERO(3);
                AMX_LOAD(5, low + FT_GROUP, stride);
                AMX_DOT_SU(2, 5, 6);
                AMX_DOT_SU(3, 5, 7);
            }
            AMX_STORE(0, dots[i][part][0], STEP_BYTES);
            AMX_STORE(1, dots[i][part][0] + AMX_COLUMNS, STEP_BYTES);
            if (num_planes == 2) {
                AMX_STORE(2, dots[i][part][1], STEP_BYTES);
                AMX_STORE(3, dots[i][part][1] + AMX_COLUMNS, STEP_BYTES);
            }
        }
    }
}

FINE_KINDS(DEFINE_RUN)

static void run_int4(const ft_linear_job *job, int64_t panel, int64_t tiles) {
    run_panel(job, panel, tiles, FT_LINEAR_INT4, 1);
}

static void run_rough(const ft_linear_job *job, int64_t panel, int64_t tiles) {
    run_panel(job, panel, tiles, FT_LINEAR_INT4_MIN, 1);
}

static void run_panels(void *context, int64_t begin, int64_t end) {
    static const panel_run runs[] = {FINE_KINDS(RUN_ENTRY)[FT_LINEAR_INT4] = run_int4};
    const ft_linear_job *job = context;
    const panel_run run = job->weight->is_rough ? run_rough : runs[job->weight->kind];
    configure(job->weight->kind);
    for (int64_t panel = begin; panel < end; panel++)
        run(job, panel, ft_ceil_div(job->rows, AMX_ROWS));
    AMX_RELEASE();
}

int ft_amx_groups(ft_linear_job *job, const void *x, int x_dtype) {
    job->tile_rows = 1; /* rows one after the other: nothing to interleave */
    job->tiles = job->rows;
    if (ft_prepare_rows(job, x, x_dtype) != 0) return -1;
    const int64_t panels = ft_ceil_div(job->weight->num_own, PANEL);
    ft_parallel_ranges(run_panels, job, panels, ft_max(1, panels / (8 * ft_num_threads())));
    return 0;
}

#endif
