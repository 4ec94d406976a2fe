/* Sizes, offsets and values of a panel's groups of 32 columns, by kind of weight (linear_weight.h
 * has the layouts). */
#ifndef FT_LINEAR_GROUPS_H
#define FT_LINEAR_GROUPS_H

#include "linear_job.h"

enum { STEP_BYTES = PANEL * 4, NEAR = 6144 }; /* NEAR: prefetch distance in bytes */

/* Whether scales of groups are bytes, times factors that 8 groups share and that precede them. */
FT_INLINE int is_k_kind(const int kind) {
    return kind == FT_LINEAR_INT4_K || kind == FT_LINEAR_INT5_K || kind == FT_LINEAR_INT6_K ||
           kind == FT_LINEAR_IQ4_XS;
}

/* Tables of values by 4-bit index, plus 127, or plus 12 for doubled E2M1 values; linear_rows.c
 * subtracts these offsets. */
static const uint8_t iq4_values[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                       128, 140, 152, 165, 180, 196, 216, 240};
static const uint8_t e2m1_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* The table of a kind, or NULL where stored numbers are the values. */
FT_INLINE const uint8_t *values_of(const int kind) {
    if (kind == FT_LINEAR_MXFP4) return e2m1_values;
    return kind == FT_LINEAR_IQ4_NL || kind == FT_LINEAR_IQ4_XS ? iq4_values : NULL;
}

/* Bits of a value of a grouped kind. */
FT_INLINE int value_bits(const int kind) {
    switch (kind) {
        case FT_LINEAR_INT8_GROUP: return 8;
        case FT_LINEAR_INT6_K: return 6;
        case FT_LINEAR_INT5_K:
        case FT_LINEAR_INT5_GROUP:
        case FT_LINEAR_INT5_MIN: return 5;
        default: return 4;
    }
}

/* Bytes of the values of a panel's group, and of the scales and minima after them (grouped
 * kinds). */
FT_INLINE int value_bytes(const int kind) { return value_bits(kind) * STEP_BYTES; }

FT_INLINE int number_bytes(const int kind) {
    switch (kind) {
        case FT_LINEAR_IQ4_XS: return 0;
        case FT_LINEAR_INT4_MIN:
        case FT_LINEAR_INT4_ZERO:
        case FT_LINEAR_INT5_MIN: return PANEL * 4;
        default: return PANEL * 2;
    }
}

/* Bytes of a step of a panel. */
FT_INLINE int block_bytes(const int kind) {
    switch (kind) {
        case FT_LINEAR_FLOAT32:
        case FT_LINEAR_BFLOAT16:
        case FT_LINEAR_BFLOAT16_WIDE:
        case FT_LINEAR_INT8: return STEP_BYTES;
        default: return value_bytes(kind) + number_bytes(kind);
    }
}

/* Bytes of the numbers that the groups of a super-group share. */
FT_INLINE int super_bytes(const int kind) {
    if (kind == FT_LINEAR_IQ4_XS) return PANEL * (2 + FT_SUPER);
    return !is_k_kind(kind) ? 0 : kind == FT_LINEAR_INT6_K ? PANEL * 2 : PANEL * 4;
}

/* Columns of the weight in a step. */
FT_INLINE int step_columns(const int kind) {
    switch (kind) {
        case FT_LINEAR_FLOAT32: return 1;
        case FT_LINEAR_BFLOAT16:
        case FT_LINEAR_BFLOAT16_WIDE: return 2;
        case FT_LINEAR_INT8: return 4;
        default: return FT_GROUP;
    }
}

FT_INLINE int64_t panel_bytes(const int kind, int64_t in_features) {
    const int64_t steps = ft_ceil_div(in_features, step_columns(kind));
    return steps * block_bytes(kind) + ft_ceil_div(steps, FT_SUPER) * super_bytes(kind);
}

/* Offset in a panel, in bytes, of group `g`, and of the numbers that a super-group shares. */
FT_INLINE int64_t group_at(const int kind, int64_t g) {
    return g * block_bytes(kind) + (g / FT_SUPER + 1) * super_bytes(kind);
}
FT_INLINE int64_t super_at(const int kind, int64_t super) {
    return super * (FT_SUPER * block_bytes(kind) + super_bytes(kind));
}

/* Whether a minimum is added to every weight of a group. */
FT_INLINE int has_min(const int kind) {
    return kind == FT_LINEAR_INT4_MIN || kind == FT_LINEAR_INT4_K || kind == FT_LINEAR_INT5_K ||
           kind == FT_LINEAR_INT5_MIN;
}

/* Offset of stored values over the weight's own, which linear_rows.c subtracts from sums. */
FT_INLINE int value_offset(const int kind) {
    switch (kind) {
        case FT_LINEAR_INT8:
        case FT_LINEAR_INT8_GROUP: return 128;
        case FT_LINEAR_INT4:
        case FT_LINEAR_INT4_GROUP: return 8;
        case FT_LINEAR_INT5_GROUP: return 16;
        case FT_LINEAR_INT6_K: return 32;
        case FT_LINEAR_IQ4_NL:
        case FT_LINEAR_IQ4_XS: return 127;
        case FT_LINEAR_MXFP4: return 12;
        default: return 0;
    }
}

/* Load quad `j` (0 to 7) of a group, for the half of a panel whose bytes begin at `w`. */
FT_INLINE vi load_quad(const char *w, const int j, const int kind) {
    const int bits = value_bits(kind);
    if (bits == 8) return vi_load(w + j * STEP_BYTES);
    vi bytes = vi_load(w + j % 4 * STEP_BYTES);
    vi numbers = j < 4 ? vi_low_nibbles(bytes) : vi_high_nibbles(bytes);
    if (bits == 5) {
        vi fifth = vi_moved(vi_load(w + 4 * STEP_BYTES), 4 - j);
        return vi_or(numbers, vi_and(fifth, vi_set1(0x10101010)));
    }
    if (bits == 6) {
        vi high = vi_moved(vi_load(w + (4 + j / 4) * STEP_BYTES), 4 - 2 * (j % 4));
        return vi_or(numbers, vi_and(high, vi_set1(0x30303030)));
    }
    return values_of(kind) ? vi_lookup(values_of(kind), numbers) : numbers;
}

#endif
