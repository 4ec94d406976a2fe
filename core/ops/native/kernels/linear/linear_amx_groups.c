/* Linear layers through the matrix unit: weights whose groups have scales of their own, for prompts.
 *
 * A group of a panel is unpacked once for many rows, into two tiles of bytes 8 steps deep that lie
 * side by side. What differs from linear_amx.c is that sums leave the unit after every group, where
 * they are scaled: in the order of groups and by the operations of linear_fine.h, so that all bits are
 * those of the vector kernels. Activations of 16 bits are two tiles, of low and of high bytes, with
 * sums of their own. The depth of 16 steps that the unit has is of no use here: two groups in one
 * product would have one sum.
 *
 * Counted, never run on hardware. For 16 rows, 32 outputs and a group of Q4_K the unit needs 64 cycles
 * (4 products of 16) and as many to store sums, beside which vectors scale them: 224 instructions, 112
 * cycles of two ports. The vector kernel takes about 800 instructions, 400 cycles, for the same. So
 * this takes 0.3 (all overlaps) to 0.45 (nothing does) of its time; of Q6_K, whose groups are of 16,
 * 0.4 to 0.7; of int4 as of Q4_K. Unpacking takes some 60 cycles, which the rows share.
 */
#include "common/amx.h"
#include "linear_fine.h"

#if defined(FT_AMX)

enum {
    DEPTH = 4,        /* groups whose sums wait in memory together: in 16 KiB, of int6_k 32 */
    BLOCK_TILES = 16, /* of rows that share what is unpacked; their sums take 32 KiB */
    TILE_SUMS = AMX_ROWS * PANEL,
};

/* Some groups of a panel. */
typedef struct {
    _Alignas(64) char values[DEPTH][FT_GROUP * PANEL]; /* of a group: [8][PANEL][4] */
    group_numbers numbers[DEPTH];
} unpacked_groups;

/* Sums of a tile of rows: of each group by part, and by low and high bytes of activations. */
typedef int32_t tile_dots[DEPTH][2][2][TILE_SUMS];

/* Sums 0 to 3: of low bytes, of high ones, each by half of the panel; x 4 and 5; weights 6 and 7. */
static void configure(const int kind) {
    const int k_bytes = FT_GROUP / num_parts(kind);
    ft_amx_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? k_bytes : AMX_ROW_BYTES);
        shapes.rows[i] = (uint8_t)(i < 6 ? AMX_ROWS : k_bytes / 4);
    }
    AMX_CONFIGURE(&shapes);
}

FT_INLINE void unpack(const char *panel, int64_t first, int64_t count, unpacked_groups *out,
                      const int kind) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t g = first + i;
        const char *w = panel + group_at(kind, g);
        super_numbers super = {0};
        if (is_k_kind(kind)) super = read_super(panel + super_at(kind, g / FT_SUPER), kind);
        read_numbers(w + value_bytes(kind), &super, g, &out->numbers[i], kind);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const vi left = load_quad(w, j, kind), right = load_quad(w + STEP_BYTES / 2, j, kind);
            memcpy(out->values[i] + j * STEP_BYTES, &left, sizeof left);
            memcpy(out->values[i] + j * STEP_BYTES + STEP_BYTES / 2, &right, sizeof right);
        }
        for (int line = 0; line < block_bytes(kind); line += 64)
            ft_prefetch(w + DEPTH * block_bytes(kind) + line);
    }
}

/* Products of groups with a tile of rows that begins at `x`. `bytes`: of an activation. */
FT_INLINE void multiply(const ft_linear_job *job, const char *x, const unpacked_groups *groups,
                        int64_t count, tile_dots dots, const int kind, const int bytes) {
    const int64_t stride = job->x_steps * 4;
    for (int64_t i = 0; i < count; i++, x += FT_GROUP * bytes) {
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
            if (bytes == 2) {
                AMX_ZERO(2);
                AMX_ZERO(3);
                AMX_LOAD(5, low + FT_GROUP, stride);
                AMX_DOT_SU(2, 5, 6);
                AMX_DOT_SU(3, 5, 7);
            }
            AMX_STORE(0, dots[i][part][0], STEP_BYTES);
            AMX_STORE(1, dots[i][part][0] + AMX_COLUMNS, STEP_BYTES);
            if (bytes == 2) {
                AMX_STORE(2, dots[i][part][1], STEP_BYTES);
                AMX_STORE(3, dots[i][part][1] + AMX_COLUMNS, STEP_BYTES);
            }
        }
    }
}

/* The same product as part_dots of linear_fine.h makes it, and nibble_tile of linear.c of bytes. */
FT_INLINE vf whole_dot(int32_t low_and_high[2][TILE_SUMS], int64_t at, const int32_t *offset,
                       const int bytes) {
    vi low = vi_load(low_and_high[0] + at);
    if (offset) low = vi_add(low, vi_broadcast(offset));
    if (bytes == 1) return vf_from_vi(low);
    return vf_fma(vf_from_vi(vi_load(low_and_high[1] + at)), vf_set1(256.0f), vf_from_vi(low));
}

/* Scale what `multiply` left of rows from `row` on, groups from `first` on, and add it to sums. */
FT_INLINE void add_up(const ft_linear_job *job, int64_t row, int64_t first,
                      const unpacked_groups *groups, int64_t count, tile_dots dots, float *sums,
                      const int kind, const int bytes) {
    const int parts = num_parts(kind);
    for (int64_t r = 0; r < AMX_ROWS; r++, sums += PANEL) {
        const int64_t at = (row + r) * job->groups + first;
        vf sum[2] = {vf_load(sums), vf_load(sums + FT_LANES)};
        for (int64_t i = 0; i < count; i++) {
            const group_numbers *numbers = &groups->numbers[i];
            const vf row_scale = vf_set1(job->x_scale[at + i]);
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++) {
                const int32_t *offset = job->x_offset + parts * (at + i) + part;
                const vf row_sum = vf_from_vi(vi_broadcast(offset));
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    vf dot = whole_dot(dots[i][part], r * PANEL + half * FT_LANES,
                                       has_sum(kind) ? NULL : offset, bytes);
                    sum[half] = add_part(sum[half], dot, numbers->scale[part][half],
                                         numbers->min[half], row_scale, row_sum, kind);
                }
            }
        }
        vf_store(sums, sum[0]);
        vf_store(sums + FT_LANES, sum[1]);
    }
}

/* A last tile of rows that would not be full begins some rows earlier, as in linear_amx.c. */
static int64_t row_of(const ft_linear_job *job, int64_t tile) {
    return ft_min(tile * AMX_ROWS, job->rows - AMX_ROWS);
}

FT_INLINE void run_panel(const ft_linear_job *job, int64_t panel, const int kind, const int bytes) {
    const char *weight = (const char *)job->weight->weight + panel * job->panel_bytes;
    const int64_t tiles = ft_ceil_div(job->rows, AMX_ROWS);
    unpacked_groups groups;
    _Alignas(64) tile_dots dots;
    _Alignas(64) float sums[BLOCK_TILES][TILE_SUMS];
    for (int64_t begin = 0; begin < tiles; begin += BLOCK_TILES) {
        const int64_t num_tiles = ft_min(BLOCK_TILES, tiles - begin);
        memset(sums, 0, (size_t)num_tiles * sizeof *sums);
        for (int64_t g = 0; g < job->groups; g += DEPTH) {
            const int64_t count = ft_min(DEPTH, job->groups - g);
            unpack(weight, g, count, &groups, kind);
            for (int64_t i = 0; i < num_tiles; i++) {
                const int64_t row = row_of(job, begin + i);
                const char *x = job->x + row * job->x_steps * 4 + g * FT_GROUP * bytes;
                multiply(job, x, &groups, count, dots, kind, bytes);
                add_up(job, row, g, &groups, count, dots, sums[i], kind, bytes);
            }
        }
        for (int64_t i = 0; i < num_tiles; i++)
            ft_finish_rows(job, row_of(job, begin + i), panel * PANEL, sums[i], AMX_ROWS);
    }
}

/* Kinds, and bytes of their activations: a function each. */
#define KINDS(EACH) \
    EACH(INT4, 1) EACH(INT4_MIN, 2) EACH(INT8_GROUP, 2) EACH(INT4_ZERO, 2) EACH(INT4_K, 2) \
    EACH(INT5_K, 2) EACH(INT6_K, 2) EACH(IQ4_NL, 2) EACH(MXFP4, 2) EACH(IQ4_XS, 2) \
    EACH(INT4_GROUP, 2) EACH(INT5_GROUP, 2) EACH(INT5_MIN, 2)

#define DEFINE_RUN(kind, bytes) \
    static void run_##kind(const ft_linear_job *job, int64_t panel) { \
        run_panel(job, panel, FT_LINEAR_##kind, bytes); \
    }
KINDS(DEFINE_RUN)

static void run_rough(const ft_linear_job *job, int64_t panel) {
    run_panel(job, panel, FT_LINEAR_INT4_MIN, 1);
}

static void run_panels(void *context, int64_t begin, int64_t end) {
#define ENTRY(kind, bytes) [FT_LINEAR_##kind] = run_##kind,
    static void (*const runs[])(const ft_linear_job *, int64_t) = {KINDS(ENTRY)};
    const ft_linear_job *job = context;
    const ft_linear_weight *weight = job->weight;
    configure(weight->kind);
    for (int64_t panel = begin; panel < end; panel++)
        (weight->is_rough ? run_rough : runs[weight->kind])(job, panel);
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
