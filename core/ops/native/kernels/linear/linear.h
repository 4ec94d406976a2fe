/* Linear layers over packed weights: y[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n]. */
#ifndef FT_LINEAR_H
#define FT_LINEAR_H

#include "linear_weight.h"

/* x [rows, in_features] to y [rows, out_features], both dense. x_dtype is that of the weight for
 * float32 and bfloat16 weights (both kinds), either for the quantised kinds. Sums are float32 (or exact), rounded
 * once to y_dtype. Returns 0, or -1 when there is no memory for the quantised rows. */
FT_EXPORT int ft_linear(const ft_linear_weight *weight, const void *x, int x_dtype, int64_t rows,
                        void *y, int y_dtype);

/* Say before a linear layer which one follows it; NULL: none is known. */
void ft_linear_ahead(const ft_linear_weight *next);

/* The same for `count` weights at once, each of rows [firsts[i], firsts[i + 1]) of x and of y; a
 * weight without rows is not read. Bits are those of a call for each. */
int ft_linear_many(const ft_linear_weight *const *weights, const int64_t *firsts, int64_t count,
                   const void *x, int x_dtype, void *y, int y_dtype);

#endif
