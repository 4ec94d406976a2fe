/* Tiles for weights that a file holds quantised, with 16-bit activations.
 *
 * Where an instruction multiplies quads of bytes (AVX-512), an activation is two bytes, low and
 * high, with separate sums. Elsewhere 16-bit numbers are multiplied in pairs, and the bytes of
 * weights are widened: bytes 0 and 2 of a quad to one pair, bytes 1 and 3 to another. In both cases
 * the sums of a group are integers, so their order does not matter.
 */
#ifndef FT_LINEAR_FINE_H
#define FT_LINEAR_FINE_H

#include "linear_tile.h"

/* Number of parts of a group with separate scales. */
FT_INLINE int num_parts(const int kind) { return kind == FT_LINEAR_INT6_K ? 2 : 1; }

/* The scales of each part of a group, and its minimum or zero. The last index is the half of the
 * panel, in all arrays here. */
typedef struct {
    vf scale[2][2];
    vf min[2];
} group_numbers;

/* The factors of a super-group, by which the scales and minima of its groups are multiplied. */
typedef struct {
    vf scale[2], min[2];
    const char *scales; /* scale bytes of all groups, for iq4_xs */
} super_numbers;

FT_INLINE super_numbers read_super(const char *w, const int kind) {
    const uint16_t *numbers = (const uint16_t *)w;
    super_numbers super = {.scales = w + PANEL * 2};
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        super.scale[half] = vf_load_fp16(numbers + half * FT_LANES);
        if (has_min(kind)) super.min[half] = vf_load_fp16(numbers + PANEL + half * FT_LANES);
    }
    return super;
}

/* Read the scales and minima of group `g`, which begin at `numbers`. */
FT_INLINE void read_numbers(const char *numbers, const super_numbers *super, int64_t g,
                            group_numbers *out, const int kind) {
#pragma GCC unroll 2
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
            if (number_bytes(kind) > PANEL * 2) out->min[half] = vf_load_fp16(halves + PANEL);
        }
    }
}

/* Sum the products of a part of a group for `count` rows (a constant) to out[row]. Every `parts`-th
 * of `offsets` is added to the sum of a row, unless NULL. Returns the address of the next
 * activations. */
#if defined(FT_WORDS)
FT_INLINE const char *part_dots(const char *w, const char *x, const int32_t *offsets, const int part,
                                const int count, const int kind, vf out[][2]) {
    const int parts = num_parts(kind);
    vi dots[MAX_TILE][2];
#pragma GCC unroll 6
    for (int r = 0; r < count; r++)
        dots[r][0] = dots[r][1] = offsets ? vi_set1(offsets[parts * r]) : vi_zero();
#pragma GCC unroll 8
    for (int j = 0; j < 8 / parts; j++) {
        vi left = load_quad(w, part * 4 + j, kind);
        vi right = load_quad(w + STEP_BYTES / 2, part * 4 + j, kind);
        vi left_pair = vi_even_bytes(left), right_pair = vi_even_bytes(right);
#pragma GCC unroll 6
        for (int r = 0; r < count; r++, x += 4) vi_dot_words(dots[r], left_pair, right_pair, x);
        left_pair = vi_odd_bytes(left), right_pair = vi_odd_bytes(right);
#pragma GCC unroll 6
        for (int r = 0; r < count; r++, x += 4) vi_dot_words(dots[r], left_pair, right_pair, x);
    }
#pragma GCC unroll 6
    for (int r = 0; r < count; r++) {
        out[r][0] = vf_from_vi(dots[r][0]);
        out[r][1] = vf_from_vi(dots[r][1]);
    }
    return x;
}
#else
FT_INLINE const char *part_dots(const char *w, const char *x, const int32_t *offsets, const int part,
                                const int count, const int kind, vf out[][2]) {
    const int parts = num_parts(kind), begin = part * 4, end = begin + 8 / parts;
    vi left[8], right[8];
#pragma GCC unroll 8
    for (int j = begin; j < end; j++) {
        left[j] = load_quad(w, j, kind);
        right[j] = load_quad(w + STEP_BYTES / 2, j, kind);
    }
#pragma GCC unroll 12
    for (int r = 0; r < count; r++, x += 4) {
        vi first = offsets ? vi_set1(offsets[parts * r]) : vi_zero();
        vi dots[2][2] = {{first, first}, {vi_zero(), vi_zero()}}; /* low bytes, high bytes */
#pragma GCC unroll 2
        for (int byte = 0; byte < 2; byte++) {
#pragma GCC unroll 8
            for (int j = begin; j < end; j++) {
                vi quad = vi_broadcast(x + 4 * (byte * 8 + j) * count);
                dots[byte][0] = vi_dot_u8s8(dots[byte][0], left[j], quad);
                dots[byte][1] = vi_dot_u8s8(dots[byte][1], right[j], quad);
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            out[r][half] = vf_fma(vf_from_vi(dots[1][half]), vf_set1(256.0f),
                                  vf_from_vi(dots[0][half]));
    }
    /* All parts read the same rows; x moves past the group after the last part. */
    return part + 1 == parts ? x - 4 * count + 2 * FT_GROUP * count : x - 4 * count;
}
#endif

/* Add a part of a group to the sum of a row. `dot` is the product of the row's activations with the
 * values, `row_sum` the sum of the activations. */
FT_INLINE vf add_part(vf sum, vf dot, vf scale, vf min, vf row_scale, vf row_sum, const int kind) {
    if (kind == FT_LINEAR_INT4_ZERO) /* exact, because all numbers are integers */
        dot = vf_fma(min, vf_mul(row_sum, vf_set1(-1.0f)), dot);
    sum = vf_fma(dot, vf_mul(scale, row_scale), sum);
    return has_min(kind) ? vf_fma(min, vf_mul(row_sum, row_scale), sum) : sum;
}

/* Whether x_offset holds the sum of a group's activations, not that sum times the values'
 * offset. */
FT_INLINE int has_sum(const int kind) { return has_min(kind) || kind == FT_LINEAR_INT4_ZERO; }

/* `count` and `kind` are constants. */
FT_INLINE void group_tile(const ft_linear_job *job, const tile_t *tile, const int count,
                          const int kind) {
    const int parts = num_parts(kind), block = block_bytes(kind);
    const char *x = job->x + tile->row * job->x_steps * 4, *w = tile->weight, *ahead = tile->ahead;
    const float *x_scale = job->x_scale + tile->row * job->groups;
    const int32_t *x_offset = job->x_offset + parts * tile->row * job->groups;
    vf sum[MAX_TILE][2];
    super_numbers super = {0};
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = vf_zero();
    for (int64_t g = 0; g < job->groups; g++, w += block, ahead += tile->ahead_step) {
        if (is_k_kind(kind) && g % FT_SUPER == 0) {
            super = read_super(w, kind);
            w += super_bytes(kind);
        }
        group_numbers numbers;
        read_numbers(w + value_bytes(kind), &super, g, &numbers, kind);
#pragma GCC unroll 18
        for (int line = 0; line < block; line += 64) ft_prefetch(ahead + line);
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++) {
            vf dots[MAX_TILE][2];
            x = part_dots(w, x, has_sum(kind) ? NULL : x_offset + part, part, count, kind, dots);
#pragma GCC unroll 12
            for (int r = 0; r < count; r++) {
                vf row_scale = vf_set1(x_scale[r]), row_sum = vf_set1((float)x_offset[parts * r]);
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
                    sum[r][half] = add_part(sum[r][half], dots[r][half], numbers.scale[part][half],
                                            numbers.min[half], row_scale, row_sum, kind);
            }
        }
        x_scale += count;
        x_offset += parts * count;
    }
    finish_sums(job, tile, sum, count);
}

#define GROUP_TILE(kind, FORM) \
    FT_INLINE void kind##_tile(const ft_linear_job *job, const tile_t *tile, const int count) { \
        group_tile(job, tile, count, FORM); \
    } \
    DEFINE_TILE(kind)

#endif
