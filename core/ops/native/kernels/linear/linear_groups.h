/* Groups of 32 columns of a panel: what they hold, by kind of weight (linear.h has the layouts). */
#ifndef FT_LINEAR_GROUPS_H
#define FT_LINEAR_GROUPS_H

#include "linear_job.h"

enum { STEP_BYTES = PANEL * 4, NEAR = 6144 }; /* NEAR: how far ahead a panel is fetched */

/* Bytes of a group of 32 columns of a panel, by kind: values, then scales, then minima. */
enum {
    INT4_BLOCK = PANEL * 18,
    INT4_MIN_BLOCK = PANEL * 20,
    INT8_GROUP_BLOCK = PANEL * 34,
};

/* Whether groups have bytes for scales, and numbers that 8 of them share stand before these. */
FT_INLINE int is_k_kind(const int kind) {
    return kind >= FT_LINEAR_INT4_K && kind != FT_LINEAR_IQ4_NL && kind != FT_LINEAR_MXFP4;
}

/* Values that 4 bits name, plus 127 or, of E2M1 doubled, 12: what linear_rows.c takes away. */
static const uint8_t iq4_values[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                       128, 140, 152, 165, 180, 196, 216, 240};
static const uint8_t e2m1_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* The values of a kind, or NULL where numbers are values. */
FT_INLINE const uint8_t *values_of(const int kind) {
    if (kind == FT_LINEAR_MXFP4) return e2m1_values;
    return kind == FT_LINEAR_IQ4_NL || kind == FT_LINEAR_IQ4_XS ? iq4_values : NULL;
}

FT_INLINE int block_bytes(const int kind) {
    switch (kind) {
        case FT_LINEAR_INT4:
        case FT_LINEAR_IQ4_NL:
        case FT_LINEAR_MXFP4: return INT4_BLOCK;
        case FT_LINEAR_INT4_MIN:
        case FT_LINEAR_INT4_ZERO: return INT4_MIN_BLOCK;
        case FT_LINEAR_INT8_GROUP: return INT8_GROUP_BLOCK;
        case FT_LINEAR_INT4_K: return PANEL * 18;
        case FT_LINEAR_IQ4_XS: return PANEL * 16;
        case FT_LINEAR_INT5_K:
        case FT_LINEAR_INT6_K: return PANEL * 34;
        default: return STEP_BYTES;
    }
}

/* Bytes of what the groups of a super-group share. */
FT_INLINE int super_bytes(const int kind) {
    if (kind == FT_LINEAR_IQ4_XS) return PANEL * (2 + FT_SUPER);
    return !is_k_kind(kind) ? 0 : kind == FT_LINEAR_INT6_K ? PANEL * 2 : PANEL * 4;
}

/* Whether the values of a group are bytes, not nibbles. */
FT_INLINE int has_bytes(const int kind) {
    return kind == FT_LINEAR_INT8_GROUP || kind == FT_LINEAR_INT5_K || kind == FT_LINEAR_INT6_K;
}

/* Whether a minimum is added to every weight of a group. */
FT_INLINE int has_min(const int kind) {
    return kind == FT_LINEAR_INT4_MIN || kind == FT_LINEAR_INT4_K || kind == FT_LINEAR_INT5_K;
}

/* Quad `j` of the eight of a group, of half a panel whose bytes begin at `w`. */
FT_INLINE vi load_quad(const char *w, const int j, const int kind) {
    if (has_bytes(kind)) return vi_load(w + j * STEP_BYTES);
    vi bytes = vi_load(w + j % 4 * STEP_BYTES);
    vi numbers = j < 4 ? vi_low_nibbles(bytes) : vi_high_nibbles(bytes);
    return values_of(kind) ? vi_lookup(values_of(kind), numbers) : numbers;
}

#endif
