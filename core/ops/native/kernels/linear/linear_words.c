/* Prompts over weights with a scale per group, on CPUs without an instruction that multiplies quads
 * of bytes. A panel is widened to 16-bit words once for many rows; the tiles of linear_fine.h widen
 * it again for every six rows, the most that registers hold.
 */
#include "linear_job.h"

#if defined(FT_WORDS)

#include "linear_unpacked.h"

enum { LEAST_TILES = 4 }; /* least tiles of rows for which it is faster to widen a panel once */

static x_tile tile_of(const ft_linear_job *job, int64_t number) {
    const int64_t row = number * job->tile_rows, count = ft_min(job->tile_rows, job->rows - row);
    return (x_tile){row, count, 1, count};
}

/* `num_rows` and `parts` are constants. */
FT_INLINE void multiply_rows(const char *x, const unpacked_groups *groups, int64_t count,
                             tile_dots dots, const int num_rows, const int parts) {
    for (int64_t i = 0; i < count; i++) {
        const char *w = groups->values[i];
        for (int part = 0; part < parts; part++) {
            vi sums[MAX_TILE][2];
#pragma GCC unroll 6
            for (int r = 0; r < num_rows; r++) sums[r][0] = sums[r][1] = vi_zero();
            for (int s = 0; s < FT_GROUP / 2 / parts; s++, w += STEP_BYTES) {
                const vi left = vi_load(w), right = vi_load(w + STEP_BYTES / 2);
#pragma GCC unroll 6
                for (int r = 0; r < num_rows; r++, x += 4) vi_dot_words(sums[r], left, right, x);
            }
            char *to = (char *)dots[i][part][0];
#pragma GCC unroll 6
            for (int r = 0; r < num_rows; r++) to = put_vector(put_vector(to, sums[r][0]), sums[r][1]);
        }
    }
}

#define ROWS_CASE(n) \
    case n: multiply_rows(x, groups, count, dots, n, parts); break;
#define DEFINE_MULTIPLY(name, parts_of_a_group) \
    static void name(const char *x, int64_t num_rows, const unpacked_groups *groups, int64_t count, \
                     tile_dots dots) { \
        const int parts = parts_of_a_group; \
        switch (num_rows) { \
            ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6) \
        } \
    }
DEFINE_MULTIPLY(multiply_whole, 1)
DEFINE_MULTIPLY(multiply_parts, 2)

FT_INLINE void multiply(const ft_linear_job *job, const char *x, int64_t num_rows,
                        const unpacked_groups *groups, int64_t count, tile_dots dots,
                        const int kind, const int num_planes) {
    (void)job, (void)num_planes;
    (num_parts(kind) == 1 ? multiply_whole : multiply_parts)(x, num_rows, groups, count, dots);
}

FINE_KINDS(DEFINE_RUN)

int ft_widens(const ft_linear_job *job) {
    return ft_is_fine(job->weight) && job->tiles >= LEAST_TILES;
}

void ft_run_widened(const ft_linear_job *job, int64_t panel) {
    static const panel_run runs[] = {FINE_KINDS(RUN_ENTRY)};
    runs[job->weight->kind](job, panel, job->tiles);
}

#endif
