/* Quantised weights where no instruction multiplies bytes in quads (AVX2, plain C).
 *
 * Activations are 16-bit numbers, and two products of such numbers are added in one instruction. So
 * the weights are widened: of every quad of bytes, bytes 0 and 2 to one pair, bytes 1 and 3 to
 * another. Eight groups of a panel are widened at a time, into memory that stays in the first-level
 * cache, and every tile of rows multiplies them from there: what widening costs is shared by all
 * rows. Sums of a group are whole numbers of 32 bits, exact in any order; a row's sums over the
 * groups wait in memory while other tiles have their turn.
 */
#ifndef FT_LINEAR_WORDS_H
#define FT_LINEAR_WORDS_H

#include "linear_groups.h"

#if defined(FT_WORDS)

enum {
    PAIRS = FT_GROUP / 2, /* of a group */
    WORDS_TILE = 6,       /* rows */
    FEW_ROWS = 2,         /* that are multiplied without widening in memory */
    MOST_ROWS = 96,       /* that share a widened block; their sums stay in the cache, too */
};

typedef struct {
    vf scale[2][2]; /* of the group, or (int6_k) of its parts; by half of the panel, as all here */
    vf min[2];
} group_numbers;

typedef struct {
    vi pairs[PAIRS][2];
    group_numbers numbers;
} wide_group;

/* A super-group's numbers, which its groups multiply. */
typedef struct {
    vf scale[2], min[2];
    const char *scales; /* of iq4_xs: bytes of all groups */
} super_numbers;

FT_INLINE super_numbers read_super(const char *w, const int kind) {
    const uint16_t *numbers = (const uint16_t *)w;
    super_numbers super = {.scales = w + PANEL * 2};
    for (int half = 0; half < 2; half++) {
        super.scale[half] = vf_load_fp16(numbers + half * FT_LANES);
        if (has_min(kind)) super.min[half] = vf_load_fp16(numbers + PANEL + half * FT_LANES);
    }
    return super;
}

/* The scales and minima of group `g`, which begin at `numbers`. */
FT_INLINE void read_numbers(const char *numbers, const super_numbers *super, int64_t g,
                            group_numbers *out, const int kind) {
    for (int half = 0; half < 2; half++) {
        const char *bytes = numbers + half * FT_LANES;
        const uint16_t *halves = (const uint16_t *)numbers + half * FT_LANES;
        if (kind == FT_LINEAR_INT6_K) {
            out->scale[0][half] = vf_mul(super->scale[half], vf_load_int8(bytes));
            out->scale[1][half] = vf_mul(super->scale[half], vf_load_int8(bytes + PANEL));
        } else if (kind == FT_LINEAR_IQ4_XS) {
            bytes = super->scales + g % FT_SUPER * PANEL + half * FT_LANES;
            out->scale[0][half] = vf_mul(super->scale[half], vf_load_int8(bytes));
        } else if (is_k_kind(kind)) {
            vf taken = vf_mul(super->min[half], vf_load_uint8(bytes + PANEL));
            out->scale[0][half] = vf_mul(super->scale[half], vf_load_uint8(bytes));
            out->min[half] = vf_mul(taken, vf_set1(-1.0f));
        } else {
            out->scale[0][half] =
                kind == FT_LINEAR_MXFP4 ? vf_load_bf16(halves) : vf_load_fp16(halves);
            if (has_min(kind) || kind == FT_LINEAR_INT4_ZERO)
                out->min[half] = vf_load_fp16(halves + PANEL);
        }
    }
}

/* Groups [first, first + count) of a panel, whose weights begin at `w`; returns where they end. */
FT_INLINE const char *widen(const char *w, int64_t first, int64_t count, wide_group *out,
                                 const int kind) {
    const int block = block_bytes(kind);
    super_numbers super = {0};
    for (int64_t g = first; g < first + count; g++, out++, w += block) {
        if (is_k_kind(kind) && g % FT_SUPER == 0) {
            super = read_super(w, kind);
            w += super_bytes(kind);
        }
#pragma GCC unroll 18
        for (int line = 0; line < block; line += 64) ft_prefetch(w + NEAR + line);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
#pragma GCC unroll 8
            for (int j = 0; j < FT_GROUP / 4; j++) {
                vi quad = load_quad(w + half * STEP_BYTES / 2, j, kind);
                out->pairs[2 * j][half] = vi_even_bytes(quad);
                out->pairs[2 * j + 1][half] = vi_odd_bytes(quad);
            }
        }
        read_numbers(w + (has_bytes(kind) ? 8 : 4) * STEP_BYTES, &super, g, &out->numbers, kind);
    }
    return w;
}

/* Sums of `num_pairs` pairs of a group for the `count` rows of a tile (a constant), by row and half.
 * Functions of their own: within a larger one, gcc keeps the sums in memory. */
FT_INLINE void sum_pairs(const vi (*pairs)[2], const char *x, int num_pairs, vi (*out)[2],
                         const int count) {
    vi dots[WORDS_TILE][2];
#pragma GCC unroll 6
    for (int r = 0; r < count; r++) dots[r][0] = dots[r][1] = vi_zero();
    for (int i = 0; i < num_pairs; i++, x += 4 * count) {
        vi left = pairs[i][0], right = pairs[i][1];
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) vi_dot_words(dots[r], left, right, x + 4 * r);
    }
#pragma GCC unroll 6
    for (int r = 0; r < count; r++) out[r][0] = dots[r][0], out[r][1] = dots[r][1];
}

#define SUM_PAIRS(n)                                                                             \
    static __attribute__((noinline)) void sum_pairs_##n(const vi (*pairs)[2], const char *x,    \
                                                        int num_pairs, vi (*out)[2]) {          \
        sum_pairs(pairs, x, num_pairs, out, n);                                                  \
    }
SUM_PAIRS(1)
SUM_PAIRS(2)
SUM_PAIRS(3)
SUM_PAIRS(4)
SUM_PAIRS(5)
SUM_PAIRS(6)
static void (*const sum_pairs_of[])(const vi (*)[2], const char *, int, vi (*)[2]) = {
    NULL, sum_pairs_1, sum_pairs_2, sum_pairs_3, sum_pairs_4, sum_pairs_5, sum_pairs_6};

/* What a group, or a part of it, adds to a half of a row's sums. `offset`: as in the job. */
FT_INLINE vf add_dots(vf sum, vi dots, const group_numbers *numbers, int part, int half,
                      int32_t offset, float row_scale, const int kind) {
    const vf scale = vf_set1(row_scale), whole = vf_set1((float)offset);
    const vf factor = vf_mul(numbers->scale[part][half], scale);
    if (kind == FT_LINEAR_INT4_ZERO) /* all of these are whole numbers */
        return vf_fma(vf_fma(numbers->min[half], vf_mul(whole, vf_set1(-1.0f)), vf_from_vi(dots)),
                      factor, sum);
    if (!has_min(kind)) return vf_fma(vf_from_vi(vi_add(dots, vi_set1(offset))), factor, sum);
    sum = vf_fma(vf_from_vi(dots), factor, sum);
    return vf_fma(numbers->min[half], vf_mul(whole, scale), sum);
}

/* Adds some groups to the sums [count][PANEL] of a tile's rows from `row` on. */
FT_INLINE void add_groups(const ft_linear_job *job, const wide_group *groups, int64_t first,
                          int64_t num_groups, int64_t row, int64_t count, float *sums,
                          const int kind) {
    const int parts = kind == FT_LINEAR_INT6_K ? 2 : 1;
    const char *x = job->x + (row * job->x_steps + first * PAIRS * count) * 4;
    const float *x_scale = job->x_scale + row * job->groups + first * count;
    const int32_t *x_offset = job->x_offset + parts * (row * job->groups + first * count);
    for (const wide_group *group = groups; group < groups + num_groups; group++) {
        for (int part = 0; part < parts; part++, x += PAIRS / parts * 4 * count) {
            vi dots[WORDS_TILE][2];
            sum_pairs_of[count](group->pairs + part * PAIRS / parts, x, PAIRS / parts, dots);
            for (int64_t r = 0; r < count; r++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    float *at = sums + r * PANEL + half * FT_LANES;
                    vf_store(at, add_dots(vf_load(at), dots[r][half], &group->numbers, part, half,
                                          x_offset[parts * r + part], x_scale[r], kind));
                }
        }
        x_scale += count;
        x_offset += parts * count;
    }
}

/* All rows of one panel, whose weights begin at `weight` and outputs at `column`. */
FT_INLINE void widened_panel(const ft_linear_job *job, const char *weight, int64_t column,
                             const int kind) {
    wide_group groups[FT_SUPER];
    float sums[MOST_ROWS * PANEL];
    const int64_t most = MOST_ROWS / job->tile_rows * job->tile_rows;
    for (int64_t begin = 0; begin < job->rows; begin += most) {
        const int64_t end = ft_min(begin + most, job->rows);
        const char *w = weight;
        memset(sums, 0, (size_t)(end - begin) * PANEL * sizeof *sums);
        for (int64_t first = 0; first < job->groups; first += FT_SUPER) {
            int64_t num_groups = ft_min(FT_SUPER, job->groups - first);
            w = widen(w, first, num_groups, groups, kind);
            for (int64_t row = begin; row < end; row += job->tile_rows)
                add_groups(job, groups, first, num_groups, row, ft_min(job->tile_rows, end - row),
                           sums + (row - begin) * PANEL, kind);
        }
        ft_finish_rows(job, begin, column, sums, end - begin);
    }
}

/* The same for `count` rows, a constant, so few that widening in memory would take longer. */
FT_INLINE void direct_panel(const ft_linear_job *job, const char *w, int64_t column,
                            const int count, const int kind) {
    const int parts = kind == FT_LINEAR_INT6_K ? 2 : 1, block = block_bytes(kind);
    const char *x = job->x;
    float sums[FEW_ROWS * PANEL];
    vf sum[FEW_ROWS][2];
    super_numbers super = {0};
    for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = vf_zero();
    for (int64_t g = 0; g < job->groups; g++, w += block) {
        if (is_k_kind(kind) && g % FT_SUPER == 0) {
            super = read_super(w, kind);
            w += super_bytes(kind);
        }
        group_numbers numbers;
        read_numbers(w + (has_bytes(kind) ? 8 : 4) * STEP_BYTES, &super, g, &numbers, kind);
#pragma GCC unroll 18
        for (int line = 0; line < block; line += 64) ft_prefetch(w + NEAR + line);
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++) {
            vi dots[FEW_ROWS][2];
            for (int r = 0; r < count; r++) dots[r][0] = dots[r][1] = vi_zero();
#pragma GCC unroll 8
            for (int j = 0; j < 8 / parts; j++) {
                vi left = load_quad(w, part * 4 + j, kind);
                vi right = load_quad(w + STEP_BYTES / 2, part * 4 + j, kind);
                for (int odd = 0; odd < 2; odd++) {
                    vi left_pair = odd ? vi_odd_bytes(left) : vi_even_bytes(left);
                    vi right_pair = odd ? vi_odd_bytes(right) : vi_even_bytes(right);
                    for (int r = 0; r < count; r++, x += 4)
                        vi_dot_words(dots[r], left_pair, right_pair, x);
                }
            }
            for (int r = 0; r < count; r++)
                for (int half = 0; half < 2; half++) {
                    int64_t at = g * count + r;
                    sum[r][half] = add_dots(sum[r][half], dots[r][half], &numbers, part, half,
                                            job->x_offset[parts * at + part], job->x_scale[at], kind);
                }
        }
    }
    for (int r = 0; r < count; r++)
        for (int half = 0; half < 2; half++)
            vf_store(sums + r * PANEL + half * FT_LANES, sum[r][half]);
    ft_finish_rows(job, 0, column, sums, count);
}

#define WORDS_PANEL(name, KIND)                                                                \
    static void name##_panel(const ft_linear_job *job, const char *weight, int64_t column) { \
        if (job->rows == 1) direct_panel(job, weight, column, 1, KIND);                       \
        else if (job->rows == 2) direct_panel(job, weight, column, 2, KIND);                  \
        else widened_panel(job, weight, column, KIND);                                        \
    }
WORDS_PANEL(int4_min, FT_LINEAR_INT4_MIN)
WORDS_PANEL(int8_group, FT_LINEAR_INT8_GROUP)
WORDS_PANEL(int4_zero, FT_LINEAR_INT4_ZERO)
WORDS_PANEL(int4_k, FT_LINEAR_INT4_K)
WORDS_PANEL(int5_k, FT_LINEAR_INT5_K)
WORDS_PANEL(int6_k, FT_LINEAR_INT6_K)
WORDS_PANEL(iq4_nl, FT_LINEAR_IQ4_NL)
WORDS_PANEL(mxfp4, FT_LINEAR_MXFP4)
WORDS_PANEL(iq4_xs, FT_LINEAR_IQ4_XS)

static void run_words_panel(const ft_linear_job *job, const char *weight, int64_t column) {
    switch (job->weight->kind) {
        case FT_LINEAR_INT4_MIN: int4_min_panel(job, weight, column); break;
        case FT_LINEAR_INT8_GROUP: int8_group_panel(job, weight, column); break;
        case FT_LINEAR_INT4_ZERO: int4_zero_panel(job, weight, column); break;
        case FT_LINEAR_INT4_K: int4_k_panel(job, weight, column); break;
        case FT_LINEAR_INT5_K: int5_k_panel(job, weight, column); break;
        case FT_LINEAR_INT6_K: int6_k_panel(job, weight, column); break;
        case FT_LINEAR_IQ4_NL: iq4_nl_panel(job, weight, column); break;
        case FT_LINEAR_MXFP4: mxfp4_panel(job, weight, column); break;
        default: iq4_xs_panel(job, weight, column);
    }
}

#endif
#endif
