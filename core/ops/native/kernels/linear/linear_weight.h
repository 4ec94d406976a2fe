/* Packed weights of linear layers: kinds, layouts, and reads of them outside a product. */
#ifndef FT_LINEAR_WEIGHT_H
#define FT_LINEAR_WEIGHT_H

#include "common/common.h"

enum {
    FT_LINEAR_FLOAT32 = 0,
    FT_LINEAR_BFLOAT16 = 1,
    FT_LINEAR_INT8 = 2,       /* a scale for each output */
    FT_LINEAR_INT4 = 3,       /* a scale for each output and group */
    FT_LINEAR_INT4_MIN = 4,   /* a scale, and a minimum that is added to every weight */
    FT_LINEAR_INT8_GROUP = 5, /* a scale for each output and group */
    FT_LINEAR_BFLOAT16_WIDE = 6, /* bfloat16, multiplied as float32 */
    FT_LINEAR_INT4_ZERO = 7,  /* a scale, and a zero that is subtracted from every value */
    FT_LINEAR_INT4_K = 8,     /* GGUF's Q4_K: byte scales and minima, factors for 256 columns */
    FT_LINEAR_INT5_K = 9,     /* Q5_K */
    FT_LINEAR_INT6_K = 10,    /* Q6_K: a scale for every 16 columns, no minima */
    FT_LINEAR_IQ4_NL = 11,    /* GGUF's IQ4_NL: 4 bits index a table of 16 values */
    FT_LINEAR_MXFP4 = 12,     /* 4 bits are E2M1, scales are powers of two */
    FT_LINEAR_IQ4_XS = 13,    /* IQ4_NL's table; signed byte scales, a factor for 256 columns */
    FT_LINEAR_INT4_GROUP = 14, /* GGUF's Q4_0: like INT4, with 16-bit activations */
    FT_LINEAR_INT5_GROUP = 15, /* Q5_0: like INT4_GROUP, with 5 bits */
    FT_LINEAR_INT5_MIN = 16,  /* Q5_1: like INT4_MIN, with 5 bits */
};
enum { FT_GROUP = 32, FT_SUPER = 8 }; /* columns of a group; groups of a super-group */

/* A packed weight [out_features, in_features]. Rows of the weight are padded with zeros to whole
 * panels, in_features to whole steps (for grouped kinds, groups). With L = FT_LANES, the layouts are
 *   float32   [panels of 2 L][in_features][2 L]        float
 *   bfloat16  [panels of 2 L][in_features / 2][2 L][2] bf16; the wide kind likewise
 *   int8      [panels of 2 L][in_features / 4][2 L][4] byte, value + 128
 *   int4      [panels of 2 L][in_features / 32] groups: [4][2 L][4] byte, [2 L] fp16 scale; byte b
 *             of quad j holds column 4 j + b in its low half and column 4 j + b + 16 in its high
 *             half, value + 8
 *   int4_min  like int4 without an offset; after the scales [2 L] fp16 minimum
 *   int4_zero like int4_min, with zeros in the place of minima
 *   int4_k    [panels of 2 L][in_features / 256] super-groups: [2 L] fp16 scale, [2 L] fp16
 *             minimum, and 8 groups: [4][2 L][4] byte like int4_min, [2 L] byte scale, [2 L] byte
 *             minimum
 *   int5_k    like int4_k; after the nibbles [2 L][4] byte: bit j of byte b is the fifth bit of column
 *             4 j + b
 *   int6_k    like int4_k without minima; after the nibbles [2][2 L][4] byte: byte b of quad j / 4
 *             has the two high bits of column 4 j + b from bit 2 (j % 4) on; then [2][2 L] signed
 *             byte scale, each for 16 columns
 *   iq4_nl    like int4 without an offset; nibbles are indices into the table of values
 *   mxfp4     like iq4_nl with [2 L] bf16 scale, halved because the table has doubled E2M1 values
 *   iq4_xs    [panels of 2 L][in_features / 256] super-groups: [2 L] fp16 scale, [8][2 L] signed
 *             byte scale, and 8 groups: [4][2 L][4] byte like iq4_nl
 *   int8_group [panels of 2 L][in_features / 32] groups: [8][2 L][4] byte, value + 128, and [2 L]
 *             fp16 scale
 *   int4_group like int4
 *   int5_group like int4, value + 16, with the fifth bits of int5_k before the scales
 *   int5_min  like int4_min, with the fifth bits of int5_k before the scales
 */
typedef struct ft_linear_weight {
    int32_t kind;
    int32_t out_features; /* including `others` */
    int32_t in_features;
    const void *weight;
    const float *scale; /* [out_features, padded to panels] for int8, else NULL */
    const float *bias;  /* [out_features, padded to panels], or NULL */
    int32_t is_rough;   /* int4_min with byte activations, for drafts, which need not be exact */
    int32_t num_own;    /* outputs of this kind */
    const struct ft_linear_weight *others; /* rows of another kind for the next outputs, or NULL */
} ft_linear_weight;

FT_INLINE int ft_is_grouped(const ft_linear_weight *weight) {
    return weight->kind >= FT_LINEAR_INT4 && weight->kind != FT_LINEAR_BFLOAT16_WIDE;
}

/* Whether activations are quantised to 16 bits, not to bytes. For weights that a file holds
 * quantised, activations then lose no more than a rounding to bfloat16 loses. */
FT_INLINE int ft_is_fine(const ft_linear_weight *weight) {
    return ft_is_grouped(weight) && weight->kind != FT_LINEAR_INT4 && !weight->is_rough;
}

/* Write rows of a weight of a grouped kind to out [count, in_features]; a negative number means row
 * 0. Items are rounded to the dtype, multiplied by `factor` and rounded again. */
FT_EXPORT void ft_unpack_rows(const ft_linear_weight *weight, const int64_t *rows, int64_t count,
                              float factor, void *out, int dtype);

/* Quantise a weight of any kind with 8 bits or more to the panels of an INT4_MIN weight, at
 * `out`. */
FT_EXPORT void ft_rough_copy(const ft_linear_weight *weight, void *out);

#endif
