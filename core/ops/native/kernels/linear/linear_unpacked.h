/* Weights with a scale per group, for many rows. Some groups of a panel are unpacked once, one tile
 * of rows after the other is multiplied with them, and the products are scaled and added to the
 * sums of the rows. The operations and their order are the same as in linear_fine.h, and so are all
 * bits.
 */
#ifndef FT_LINEAR_UNPACKED_H
#define FT_LINEAR_UNPACKED_H

#include "linear_fine.h"

/* DEPTH: groups that are unpacked together. BLOCK_TILES: tiles of rows that share them; their sums
 * take 24 KiB, or 32 KiB on the matrix unit. PLANES: 2 where products of low and of high bytes are
 * apart. */
#if defined(FT_WORDS)
enum { DEPTH = 8, DOT_ROWS = MAX_TILE, PLANES = 1, VALUE_BYTES = 2, BLOCK_TILES = 64 };
#else
enum { DEPTH = 4, DOT_ROWS = AMX_ROWS, PLANES = 2, VALUE_BYTES = 1, BLOCK_TILES = 16 };
#endif
enum { TILE_SUMS = DOT_ROWS * PANEL };

/* Unpacked groups of a panel. Values are quads of bytes, [8][PANEL][4], or pairs of 16-bit words in
 * the order of part_dots of linear_fine.h. */
typedef struct {
    _Alignas(64) char values[DEPTH][FT_GROUP * PANEL * VALUE_BYTES];
    group_numbers numbers[DEPTH];
} unpacked_groups;

/* Products of a tile of rows with each part of each group, [rows][PANEL]. */
typedef int32_t tile_dots[DEPTH][2][PLANES][TILE_SUMS];

/* A tile of rows of x, and the strides of the scales (and offsets) from row to row and from group
 * to group. */
typedef struct {
    int64_t row, count, row_step, group_step;
} x_tile;

/* The including file defines these two. tile_of returns the tile of rows with that number; multiply
 * computes its products with `count` groups, whose activations begin at `x`. */
static x_tile tile_of(const ft_linear_job *job, int64_t number);
FT_INLINE void multiply(const ft_linear_job *job, const char *x, int64_t num_rows,
                        const unpacked_groups *groups, int64_t count, tile_dots dots,
                        const int kind, const int num_planes);

FT_INLINE char *put_vector(char *to, vi value) {
    memcpy(to, &value, sizeof value);
    return to + sizeof value;
}

FT_INLINE void unpack(const char *panel, int64_t first, int64_t count, unpacked_groups *out,
                      const int kind) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t g = first + i;
        const char *w = panel + group_at(kind, g);
        char *to = out->values[i];
        super_numbers super = {0};
        if (is_k_kind(kind)) super = read_super(panel + super_at(kind, g / FT_SUPER), kind);
        read_numbers(w + value_bytes(kind), &super, g, &out->numbers[i], kind);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const vi left = load_quad(w, j, kind), right = load_quad(w + STEP_BYTES / 2, j, kind);
#if defined(FT_WORDS)
            to = put_vector(put_vector(to, vi_even_bytes(left)), vi_even_bytes(right));
            to = put_vector(put_vector(to, vi_odd_bytes(left)), vi_odd_bytes(right));
#else
            to = put_vector(put_vector(to, left), right);
#endif
        }
        for (int line = 0; line < block_bytes(kind); line += 64)
            ft_prefetch(w + DEPTH * block_bytes(kind) + line);
    }
}

/* Return a product as float, with the same bits as part_dots of linear_fine.h or, for byte
 * activations, nibble_tile of linear.c. */
FT_INLINE vf whole_dot(int32_t planes[PLANES][TILE_SUMS], int64_t at, const int32_t *offset,
                       const int num_planes) {
    vi low = vi_load(planes[0] + at);
    if (offset) low = vi_add(low, vi_broadcast(offset));
    if (num_planes == 1) return vf_from_vi(low);
    return vf_fma(vf_from_vi(vi_load(planes[1] + at)), vf_set1(256.0f), vf_from_vi(low));
}

/* Scale the products of a tile with groups from `first` on, and add them to sums [rows][PANEL]. */
FT_INLINE void add_up(const ft_linear_job *job, const x_tile *tile, int64_t first,
                      const unpacked_groups *groups, int64_t count, tile_dots dots, float *sums,
                      const int kind, const int num_planes) {
    const int parts = num_parts(kind);
    for (int64_t r = 0; r < tile->count; r++, sums += PANEL) {
        int64_t at = tile->row * job->groups + r * tile->row_step + first * tile->group_step;
        vf sum[2] = {vf_load(sums), vf_load(sums + FT_LANES)};
        for (int64_t i = 0; i < count; i++, at += tile->group_step) {
            const group_numbers *numbers = &groups->numbers[i];
            const vf row_scale = vf_set1(job->x_scale[at]);
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++) {
                const int32_t *offset = job->x_offset + parts * at + part;
                const vf row_sum = vf_from_vi(vi_broadcast(offset));
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    vf dot = whole_dot(dots[i][part], r * PANEL + half * FT_LANES,
                                       has_sum(kind) ? NULL : offset, num_planes);
                    sum[half] = add_part(sum[half], dot, numbers->scale[part][half],
                                         numbers->min[half], row_scale, row_sum, kind);
                }
            }
        }
        vf_store(sums, sum[0]);
        vf_store(sums + FT_LANES, sum[1]);
    }
}

/* Compute a panel for `tiles` tiles of rows. */
FT_INLINE void run_panel(const ft_linear_job *job, int64_t panel, int64_t tiles, const int kind,
                         const int num_planes) {
    const char *weight = (const char *)job->weight->weight + panel * job->panel_bytes;
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
                const x_tile tile = tile_of(job, begin + i);
                const char *x = job->x + tile.row * job->x_steps * 4 +
                                g * tile.group_step * FT_GROUP * VALUE_BYTES * num_planes;
                multiply(job, x, tile.count, &groups, count, dots, kind, num_planes);
                add_up(job, &tile, g, &groups, count, dots, sums[i], kind, num_planes);
            }
        }
        for (int64_t i = 0; i < num_tiles; i++) {
            const x_tile tile = tile_of(job, begin + i);
            ft_finish_rows(job, tile.row, panel * PANEL, sums[i], tile.count);
        }
    }
}

/* Kinds with 16-bit activations. */
#define FINE_KINDS(EACH) \
    EACH(INT4_MIN) EACH(INT8_GROUP) EACH(INT4_ZERO) EACH(INT4_K) EACH(INT5_K) EACH(INT6_K) \
    EACH(IQ4_NL) EACH(MXFP4) EACH(IQ4_XS) EACH(INT4_GROUP) EACH(INT5_GROUP) EACH(INT5_MIN)

#define DEFINE_RUN(kind) \
    static void run_##kind(const ft_linear_job *job, int64_t panel, int64_t tiles) { \
        run_panel(job, panel, tiles, FT_LINEAR_##kind, PLANES); \
    }
#define RUN_ENTRY(kind) [FT_LINEAR_##kind] = run_##kind,
typedef void (*panel_run)(const ft_linear_job *job, int64_t panel, int64_t tiles);

#endif
