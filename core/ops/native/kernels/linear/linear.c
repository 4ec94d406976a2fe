/* Linear layers: one kernel for one row and for a prefill chunk, bits included.
 *
 * A vector holds neighbouring outputs, and activations are broadcast along it. So every output is
 * one chain of additions over k, in the order of k, and no reduction across lanes exists. A tile
 * of rows shares each load of the weights; how many rows are in it changes no output.
 *
 * The weights stream once from memory. The first tile of a panel prefetches a little ahead; where
 * more tiles follow, each of them fetches its share of the next panel into the second-level cache.
 */
#include "linear_words.h"

#if defined(FT_AVX512)
enum { MAX_TILE = 12 }; /* rows; 24 sums, two weights and a broadcast in 32 registers */
#else
enum { MAX_TILE = 6 }; /* 12 sums, two weights, a broadcast and a product in 16 registers */
#endif

/* Where a tile lies, and what it prefetches. */
typedef struct {
    const char *weight;
    const char *ahead;
    int64_t ahead_step; /* bytes */
    int64_t row;
    int64_t column;
} tile_t;

/* ---- results ---- */

static void store_tail(const ft_linear_job *job, int64_t at, int64_t count, vf value) {
    float wide[FT_LANES];
    vf_store(wide, value);
    for (int64_t i = 0; i < count; i++) {
        if (job->y_dtype == FT_BFLOAT16) ((bf16 *)job->y)[at + i] = ft_to_bf16(wide[i]);
        else ((float *)job->y)[at + i] = wide[i];
    }
}

/* Half a panel, of which perhaps some outputs do not exist. */
FT_INLINE void finish_half(const ft_linear_job *job, int64_t row, int64_t column,
                           const float *sums) {
    const int64_t at = row * job->weight->out_features + column;
    const int64_t left = job->weight->out_features - column;
    vf value = vf_load(sums);
    if (job->weight->bias) value = vf_add(value, vf_load(job->weight->bias + column));
    if (left < FT_LANES) store_tail(job, at, ft_max(left, 0), value);
    else if (job->y_dtype == FT_BFLOAT16) vf_store_bf16((bf16 *)job->y + at, value);
    else vf_store((float *)job->y + at, value);
}

/* Not inlined into every tile: there are four dozen of them. */
__attribute__((noinline)) void ft_finish_rows(const ft_linear_job *job, int64_t row,
                                              int64_t column, const float *sums, int64_t count) {
    for (int64_t r = 0; r < count; r++, sums += PANEL) {
        finish_half(job, row + r, column, sums);
        finish_half(job, row + r, column + FT_LANES, sums + FT_LANES);
    }
}

FT_INLINE void finish_sums(const ft_linear_job *job, const tile_t *tile, vf sum[][2],
                           const int count) {
    float out[MAX_TILE][PANEL];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) {
        vf_store(out[r], sum[r][0]);
        vf_store(out[r] + FT_LANES, sum[r][1]);
    }
    ft_finish_rows(job, tile->row, tile->column, out[0], count);
}

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

/* Products in float32, for CPUs on which those of bf16 pairs take longer. x is widened already. */
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

/* 4 bits and activations of bytes, so small that the sums of a group need few bits. `min_added`: a
 * minimum is added to every weight, else an offset is taken away. */
FT_INLINE void nibble_tile(const ft_linear_job *job, const tile_t *tile, const int count,
                           const int min_added) {
    const int block = min_added ? INT4_MIN_BLOCK : INT4_BLOCK;
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
            /* The offset is the group's sum where a minimum is added. */
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

#if !defined(FT_WORDS)
/* The dot products of a row with a group, or with half of it: sums of the low bytes of activations, and
 * 256 times those of the high ones. `first` is where the sums begin. */
FT_INLINE void group_dots(const vi *left, const vi *right, const char *x, const int count,
                          const int begin, const int end, const vi first, vf *out) {
    vi dots[2][2] = {{first, first}, {vi_zero(), vi_zero()}}; /* low, high */
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
#pragma GCC unroll 8
        for (int j = begin; j < end; j++) {
            vi quad = vi_broadcast(x + 4 * ((part * 8 + j) * count));
            dots[part][0] = vi_dot_u8s8(dots[part][0], left[j], quad);
            dots[part][1] = vi_dot_u8s8(dots[part][1], right[j], quad);
        }
    }
    out[0] = vf_fma(vf_from_vi(dots[1][0]), vf_set1(256.0f), vf_from_vi(dots[0][0]));
    out[1] = vf_fma(vf_from_vi(dots[1][1]), vf_set1(256.0f), vf_from_vi(dots[0][1]));
}

/* Weights with a scale for each group of 32; `kind` is a constant, too. Activations are numbers of 16
 * bits as two bytes, high and low, each with sums of its own. */
FT_INLINE void group_tile(const ft_linear_job *job, const tile_t *tile, const int count,
                          const int kind) {
    const int is_int8 = has_bytes(kind), min_added = has_min(kind);
    const int has_zero = kind == FT_LINEAR_INT4_ZERO, is_k = is_k_kind(kind);
    const int is_xs = kind == FT_LINEAR_IQ4_XS;
    const int block = block_bytes(kind);
    const char *x = job->x + tile->row * job->x_steps * 4, *w = tile->weight, *ahead = tile->ahead;
    const float *x_scale = job->x_scale + tile->row * job->groups;
    const int32_t *x_offset = job->x_offset + tile->row * job->groups;
    vf sum[MAX_TILE][2];
    vf super[2] = {vf_zero(), vf_zero()}, super_min[2] = {vf_zero(), vf_zero()};
    const char *xs_scales = NULL;
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = vf_zero();
    for (int64_t g = 0; g < job->groups; g++, w += block, ahead += tile->ahead_step) {
        if (is_k && g % FT_SUPER == 0) {
            const uint16_t *numbers = (const uint16_t *)w;
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                super[half] = vf_load_fp16(numbers + half * FT_LANES);
                if (min_added) super_min[half] = vf_load_fp16(numbers + PANEL + half * FT_LANES);
            }
            xs_scales = w + PANEL * 2;
            w += super_bytes(kind);
        }
        vi left[8], right[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            left[j] = load_quad(w, j, kind);
            right[j] = load_quad(w + STEP_BYTES / 2, j, kind);
        }
        const char *numbers = w + (is_int8 ? 8 : 4) * STEP_BYTES;
        vf scale[2], min[2] = {vf_zero(), vf_zero()};
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            if (is_xs) {
                const char *bytes = xs_scales + g % FT_SUPER * PANEL + half * FT_LANES;
                scale[half] = vf_mul(super[half], vf_load_int8(bytes));
            } else if (is_k) {
                const char *bytes = numbers + half * FT_LANES;
                scale[half] = vf_mul(super[half], vf_load_uint8(bytes));
                vf taken = vf_mul(super_min[half], vf_load_uint8(bytes + PANEL));
                min[half] = vf_mul(taken, vf_set1(-1.0f));
            } else {
                const uint16_t *halves = (const uint16_t *)numbers + half * FT_LANES;
                scale[half] = kind == FT_LINEAR_MXFP4 ? vf_load_bf16(halves) : vf_load_fp16(halves);
                if (min_added || has_zero) min[half] = vf_load_fp16(halves + PANEL);
            }
        }
#pragma GCC unroll 18
        for (int line = 0; line < block; line += 64) ft_prefetch(ahead + line);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            vf dots[2];
            /* The offset is the group's sum where it is needed as such. */
            const vi first = min_added || has_zero ? vi_zero() : vi_set1(x_offset[r]);
            group_dots(left, right, x + 4 * r, count, 0, 8, first, dots);
            vf row_scale = vf_set1(x_scale[r]), row_sum = vf_set1((float)x_offset[r]);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                if (has_zero) /* all of them are whole numbers */
                    dots[half] = vf_fma(min[half], vf_set1(-(float)x_offset[r]), dots[half]);
                sum[r][half] = vf_fma(dots[half], vf_mul(scale[half], row_scale), sum[r][half]);
                if (min_added) sum[r][half] = vf_fma(min[half], vf_mul(row_sum, row_scale), sum[r][half]);
            }
        }
        x += 2 * FT_GROUP * count;
        x_scale += count;
        x_offset += count;
    }
    finish_sums(job, tile, sum, count);
}

/* Q6_K: two halves of a group have scales of their own, and two offsets. */
FT_INLINE void int6_k_tile(const ft_linear_job *job, const tile_t *tile, const int count) {
    const int block = block_bytes(FT_LINEAR_INT6_K);
    const char *x = job->x + tile->row * job->x_steps * 4, *w = tile->weight, *ahead = tile->ahead;
    const float *x_scale = job->x_scale + tile->row * job->groups;
    const int32_t *x_offset = job->x_offset + 2 * tile->row * job->groups;
    vf sum[MAX_TILE][2], super[2] = {vf_zero(), vf_zero()};
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = vf_zero();
    for (int64_t g = 0; g < job->groups; g++, w += block, ahead += tile->ahead_step) {
        if (g % FT_SUPER == 0) {
            super[0] = vf_load_fp16((const uint16_t *)w);
            super[1] = vf_load_fp16((const uint16_t *)w + FT_LANES);
            w += super_bytes(FT_LINEAR_INT6_K);
        }
        vi left[8], right[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            left[j] = load_quad(w, j, FT_LINEAR_INT6_K);
            right[j] = load_quad(w + STEP_BYTES / 2, j, FT_LINEAR_INT6_K);
        }
        const char *bytes = w + 8 * STEP_BYTES;
        vf scale[2][2]; /* by part of the group, by half of the panel */
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            scale[part][0] = vf_mul(super[0], vf_load_int8(bytes + part * PANEL));
            scale[part][1] = vf_mul(super[1], vf_load_int8(bytes + part * PANEL + FT_LANES));
        }
#pragma GCC unroll 18
        for (int line = 0; line < block; line += 64) ft_prefetch(ahead + line);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            vf row_scale = vf_set1(x_scale[r]);
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                vf dots[2];
                const vi first = vi_set1(x_offset[2 * r + part]);
                group_dots(left, right, x + 4 * r, count, 4 * part, 4 * part + 4, first, dots);
                sum[r][0] = vf_fma(dots[0], vf_mul(scale[part][0], row_scale), sum[r][0]);
                sum[r][1] = vf_fma(dots[1], vf_mul(scale[part][1], row_scale), sum[r][1]);
            }
        }
        x += 2 * FT_GROUP * count;
        x_scale += count;
        x_offset += 2 * count;
    }
    finish_sums(job, tile, sum, count);
}

#define GROUP_TILE(kind, FORM) \
    FT_INLINE void kind##_tile(const ft_linear_job *job, const tile_t *tile, const int count) { \
        group_tile(job, tile, count, FORM); \
    }
GROUP_TILE(int4_min, FT_LINEAR_INT4_MIN)
GROUP_TILE(int8_group, FT_LINEAR_INT8_GROUP)
GROUP_TILE(int4_zero, FT_LINEAR_INT4_ZERO)
GROUP_TILE(int4_k, FT_LINEAR_INT4_K)
GROUP_TILE(int5_k, FT_LINEAR_INT5_K)
GROUP_TILE(iq4_nl, FT_LINEAR_IQ4_NL)
GROUP_TILE(mxfp4, FT_LINEAR_MXFP4)
GROUP_TILE(iq4_xs, FT_LINEAR_IQ4_XS)
#endif

#define CASE(kind, n) \
    case n: kind##_tile(job, tile, n); break;
#if defined(FT_AVX512)
#define MORE_CASES(kind) \
    CASE(kind, 7) CASE(kind, 8) CASE(kind, 9) \
    CASE(kind, 10) CASE(kind, 11) CASE(kind, 12)
#else
#define MORE_CASES(kind)
#endif
#define DEFINE_TILE(kind) \
    static void run_##kind(const ft_linear_job *job, const tile_t *tile, int64_t count) { \
        switch (count) { \
            CASE(kind, 1) CASE(kind, 2) CASE(kind, 3) \
            CASE(kind, 4) CASE(kind, 5) CASE(kind, 6) MORE_CASES(kind) \
        } \
    }
DEFINE_TILE(float32)
DEFINE_TILE(bfloat16)
DEFINE_TILE(bfloat16_wide)
DEFINE_TILE(int8)
DEFINE_TILE(int4)
DEFINE_TILE(rough)
#if !defined(FT_WORDS)
DEFINE_TILE(int4_min)
DEFINE_TILE(int8_group)
DEFINE_TILE(int4_zero)
DEFINE_TILE(int4_k)
DEFINE_TILE(int5_k)
DEFINE_TILE(int6_k)
DEFINE_TILE(iq4_nl)
DEFINE_TILE(mxfp4)
DEFINE_TILE(iq4_xs)
#endif

static void run_tile(const ft_linear_job *job, const tile_t *tile, int64_t count) {
    if (job->weight->is_rough) {
        run_rough(job, tile, count);
        return;
    }
    switch (job->weight->kind) {
        case FT_LINEAR_FLOAT32: run_float32(job, tile, count); break;
        case FT_LINEAR_BFLOAT16: run_bfloat16(job, tile, count); break;
        case FT_LINEAR_BFLOAT16_WIDE: run_bfloat16_wide(job, tile, count); break;
        case FT_LINEAR_INT8: run_int8(job, tile, count); break;
        case FT_LINEAR_INT4: run_int4(job, tile, count); break;
#if !defined(FT_WORDS)
        case FT_LINEAR_INT4_MIN: run_int4_min(job, tile, count); break;
        case FT_LINEAR_INT8_GROUP: run_int8_group(job, tile, count); break;
        case FT_LINEAR_INT4_ZERO: run_int4_zero(job, tile, count); break;
        case FT_LINEAR_INT4_K: run_int4_k(job, tile, count); break;
        case FT_LINEAR_INT5_K: run_int5_k(job, tile, count); break;
        case FT_LINEAR_INT6_K: run_int6_k(job, tile, count); break;
        case FT_LINEAR_IQ4_NL: run_iq4_nl(job, tile, count); break;
        case FT_LINEAR_MXFP4: run_mxfp4(job, tile, count); break;
        default: run_iq4_xs(job, tile, count);
#endif
    }
}

static void run_panels(void *context, int64_t begin, int64_t end) {
    const ft_linear_job *job = context;
    const int64_t share = job->panel_bytes / job->tiles;
    for (int64_t panel = begin; panel < end; panel++) {
        const char *weight = (const char *)job->weight->weight + panel * job->panel_bytes;
#if defined(FT_WORDS)
        if (ft_is_fine(job->weight)) {
            run_words_panel(job, weight, panel * PANEL);
            continue;
        }
#endif
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

/* 32-bit groups of a row of x; int8 rows end at a vector, their weights do not. */
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

/* The job of a weight for at least one row. */
static ft_linear_job make_job(const ft_linear_weight *weight, int64_t rows, void *y, int y_dtype) {
    /* By kind: columns of the weight in a step. */
    static const int per_step[] = {1, 2, 4, FT_GROUP, FT_GROUP, FT_GROUP, 2,
                                   FT_GROUP, FT_GROUP, FT_GROUP, FT_GROUP,
                                   FT_GROUP, FT_GROUP, FT_GROUP};
    ft_linear_job job = {.weight = weight, .rows = rows, .y = y, .y_dtype = y_dtype};
    job.tiles = ft_ceil_div(rows, MAX_TILE);
    job.tile_rows = ft_ceil_div(rows, job.tiles);
    job.tiles = ft_ceil_div(rows, job.tile_rows);
    job.steps = ft_ceil_div(weight->in_features, per_step[weight->kind]);
    job.x_steps = words_of_row(weight);
    job.groups = ft_is_grouped(weight) ? job.steps : 1;
    job.panel_bytes = job.steps * block_bytes(weight->kind) +
                      ft_ceil_div(job.steps, FT_SUPER) * super_bytes(weight->kind);
    return job;
}

/* Pieces large enough to stream, small enough that a slow core holds nobody up. */
static int64_t grain_of(int64_t panels) {
    return ft_max(1, panels / (8 * ft_num_threads()));
}

int ft_linear(const ft_linear_weight *weight, const void *x, int x_dtype, int64_t rows, void *y,
              int y_dtype) {
    if (rows <= 0) return 0;
    ft_linear_job job = make_job(weight, rows, y, y_dtype);
#if defined(FT_AMX)
    if (ft_amx_suits(weight, rows)) return ft_amx_linear(&job, x, x_dtype);
#endif
    if (ft_prepare_rows(&job, x, x_dtype) != 0) return -1;
    const int64_t panels = ft_ceil_div(weight->out_features, PANEL);
    ft_parallel_ranges(run_panels, &job, panels, grain_of(panels));
    return 0;
}

void ft_linear_ahead(const ft_linear_weight *next) {
    if (!next) {
        ft_ahead(NULL, 0);
        return;
    }
    const int64_t panels = ft_ceil_div(next->out_features, PANEL);
    ft_ahead(next->weight, (size_t)(panels * make_job(next, 1, NULL, 0).panel_bytes));
}

/* ---- many weights in one call ---- */

/* A job, its rows, and where its panels and its prepared rows begin among those of all. */
typedef struct {
    ft_linear_job job;
    const char *x;
    int64_t first_panel;
    size_t prepared_at;
} one_of_many;

typedef struct {
    one_of_many *all;
    int64_t count;
    char *prepared;
    int x_dtype;
} many_jobs;

static void prepare_some(void *context, int64_t begin, int64_t end) {
    const many_jobs *jobs = context;
    for (int64_t i = begin; i < end; i++) {
        one_of_many *one = &jobs->all[i];
        ft_prepare_rows_in(&one->job, one->x, jobs->x_dtype, jobs->prepared + one->prepared_at);
    }
}

/* Panels of all jobs, one job's behind the other's. */
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

int ft_linear_many(const ft_linear_weight *const *weights, const int64_t *firsts, int64_t count,
                   const void *x, int x_dtype, void *y, int y_dtype) {
    const int64_t x_size = x_dtype == FT_BFLOAT16 ? 2 : 4, y_size = y_dtype == FT_BFLOAT16 ? 2 : 4;
    one_of_many *all = ft_scratch(FT_SCRATCH_JOBS, (size_t)count * sizeof *all);
    if (!all) return -1;
    many_jobs jobs = {.all = all, .x_dtype = x_dtype};
    int64_t panels = 0;
    size_t prepared = 0;
    for (int64_t i = 0; i < count; i++) {
        const ft_linear_weight *weight = weights[i];
        const int64_t rows = firsts[i + 1] - firsts[i];
        if (rows == 0) continue;
        const char *from = (const char *)x + firsts[i] * weight->in_features * x_size;
        char *to = (char *)y + firsts[i] * weight->out_features * y_size;
#if defined(FT_AMX)
        if (ft_amx_suits(weight, rows)) {
            if (ft_linear(weight, from, x_dtype, rows, to, y_dtype)) return -1;
            continue;
        }
#endif
        one_of_many *one = &all[jobs.count++];
        *one = (one_of_many){make_job(weight, rows, to, y_dtype), from, panels, prepared};
        panels += ft_ceil_div(weight->out_features, PANEL);
        prepared += (ft_prepared_bytes(&one->job) + 63) / 64 * 64;
    }
    if (prepared) jobs.prepared = ft_scratch(FT_SCRATCH_LINEAR, prepared);
    if (prepared && !jobs.prepared) return -1;
    ft_parallel(prepare_some, &jobs, jobs.count, ft_max(1, jobs.count / (4 * ft_num_threads())));
    ft_parallel_ranges(run_some, &jobs, panels, grain_of(panels));
    return 0;
}

/* Outputs of a panel: L of the layouts in linear.h. */
FT_EXPORT int ft_lanes(void) { return FT_LANES; }

/* Rows of a full tile: one more than a multiple of them costs a step more than those before it. */
FT_EXPORT int ft_tile_rows(void) {
#if defined(FT_AMX)
    return AMX_ROWS;
#else
    return MAX_TILE;
#endif
}
