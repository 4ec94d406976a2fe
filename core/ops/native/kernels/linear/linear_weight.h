/* Packed weights of linear layers: kinds, layouts, and what is read of them outside a product. */
#ifndef FT_LINEAR_WEIGHT_H
#define FT_LINEAR_WEIGHT_H

#include "common/common.h"

enum {
    FT_LINEAR_FLOAT32 = 0,
    FT_LINEAR_BFLOAT16 = 1,
    FT_LINEAR_INT8 = 2,       /* a scale for each output */
    FT_LINEAR_INT4 = 3,       /* a scale for each output and group */
    FT_LINEAR_INT4_MIN = 4,   /* the same, and a minimum that is added to every weight */
    FT_LINEAR_INT8_GROUP = 5, /* a scale for each output and group */
    FT_LINEAR_BFLOAT16_WIDE = 6, /* bfloat16, multiplied as float32 */
    FT_LINEAR_INT4_ZERO = 7,  /* as INT4_MIN, and a zero that is taken from every value */
    FT_LINEAR_INT4_K = 8,     /* GGUF's Q4_K: scales and minima are bytes times those of 256 */
    FT_LINEAR_INT5_K = 9,     /* Q5_K */
    FT_LINEAR_INT6_K = 10,    /* Q6_K: a scale for 16, without minima */
    FT_LINEAR_IQ4_NL = 11,    /* GGUF's IQ4_NL: 4 bits name one of 16 values, a scale for each group */
    FT_LINEAR_MXFP4 = 12,     /* likewise; 4 bits are E2M1, scales are powers of two */
    FT_LINEAR_IQ4_XS = 13,    /* IQ4_NL's values; scales are signed bytes times those of 256 */
    FT_LINEAR_INT4_GROUP = 14, /* GGUF's Q4_0: a scale for each output and group; activations of 16 bits */
    FT_LINEAR_INT5_GROUP = 15, /* Q5_0: the same of 5 bits */
    FT_LINEAR_INT5_MIN = 16,  /* Q5_1: likewise, and a minimum that is added to every weight */
};
enum { FT_GROUP = 32, FT_SUPER = 8 }; /* neighbours along in_features; groups that share numbers */

/* A packed weight [out_features, in_features]. Rows of the weight are padded with zeros to whole
 * panels, in_features to whole steps (of grouped kinds: groups). With L = FT_LANES, the layouts are
 *   float32   [panels of 2 L][in_features][2 L]        float
 *   bfloat16  [panels of 2 L][in_features / 2][2 L][2] bf16; the wide kind likewise
 *   int8      [panels of 2 L][in_features / 4][2 L][4] byte, value + 128
 *   int4      [panels of 2 L][in_features / 32] of a group: [4][2 L][4] byte, [2 L] fp16 scale;
 *             byte b of quad j holds k = 4 j + b in its low half and 16 more in its high half, + 8
 *   int4_min  likewise of 0 to 15 without an offset, and behind the scales [2 L] fp16 minima
 *   int4_zero as int4_min, with zeros in the place of minima
 *   int4_k    [panels of 2 L][in_features / 256] of: [2 L] fp16 scale, [2 L] fp16 minimum, and of each
 *             of 8 groups: [4][2 L][4] byte as int4_min, [2 L] byte scale, [2 L] byte minimum
 *   int5_k    likewise; behind the nibbles [2 L][4] byte, whose bit j is the fifth of value 4 j + b
 *   int6_k    likewise without minima; behind the nibbles [2][2 L][4] byte, of which the two bits from
 *             2 (j % 4) on of byte b of j / 4 are the high ones of value 4 j + b; [2][2 L] signed byte
 *             scales of 16 each
 *   iq4_nl    as int4, its nibbles as they are: numbers of values
 *   mxfp4     likewise, with [2 L] bf16 scale, half of what E2M1's values have: the kernel doubles these
 *   iq4_xs    [panels of 2 L][in_features / 256] of: [2 L] fp16 scale, [8][2 L] signed byte scale, and
 *             of each of 8 groups: [4][2 L][4] byte as iq4_nl
 *   int8_group [panels of 2 L][in_features / 32] of a group: [8][2 L][4] byte, value + 128, and
 *             [2 L] fp16 scale
 *   int4_group as int4
 *   int5_group as int4_group, value + 16, with the fifth bits of int5_k before the scales
 *   int5_min  as int4_min, with these bits before the scales
 */
typedef struct ft_linear_weight {
    int32_t kind;
    int32_t out_features; /* those of `others` included */
    int32_t in_features;
    const void *weight;
    const float *scale; /* [out_features, padded to panels] of int8, else NULL */
    const float *bias;  /* the same shape, or NULL */
    int32_t is_rough;   /* int4_min: activations become bytes, as those of int4, for what need not be exact */
    int32_t num_own;    /* outputs of this kind */
    const struct ft_linear_weight *others; /* rows of another kind, whose outputs lie behind these; or NULL */
} ft_linear_weight;

FT_INLINE int ft_is_grouped(const ft_linear_weight *weight) {
    return weight->kind >= FT_LINEAR_INT4 && weight->kind != FT_LINEAR_BFLOAT16_WIDE;
}

/* Whether activations become numbers of 16 bits, not bytes: weights that a file holds quantised lose
 * nothing more than a bfloat16 activation has lost already. */
FT_INLINE int ft_is_fine(const ft_linear_weight *weight) {
    return ft_is_grouped(weight) && weight->kind != FT_LINEAR_INT4 && !weight->is_rough;
}

/* The rows of a weight of a grouped kind that have these numbers, the first for negative ones:
 * [count, in_features], rounded to the dtype, multiplied by the factor and rounded again. */
FT_EXPORT void ft_unpack_rows(const ft_linear_weight *weight, const int64_t *rows, int64_t count,
                              float factor, void *out, int dtype);

/* `out`: the values of an INT4_MIN weight made from one of 8 bits or more, of any of their kinds. */
FT_EXPORT void ft_rough_copy(const ft_linear_weight *weight, void *out);

#endif
