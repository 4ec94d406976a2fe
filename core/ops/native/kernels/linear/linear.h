/* Linear layers over packed weights: y[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n]. */
#ifndef FT_LINEAR_H
#define FT_LINEAR_H

#include "linear_weight.h"

/* Compute y [rows, out_features] from x [rows, in_features], both dense. For float32 and both
 * kinds of bfloat16 weights, x_dtype must be the dtype of the weight; quantised kinds take
 * either. Sums are float32 or exact, and are rounded once, to y_dtype. Returns 0, or -1 when
 * there is no memory. */
FT_EXPORT int ft_linear(const ft_linear_weight *weight, const void *x, int x_dtype, int64_t rows,
                        void *y, int y_dtype);

/* Announce, before a linear layer runs, the weight of the next one, which waiting threads prefetch;
 * NULL: it is not known. */
void ft_linear_ahead(const ft_linear_weight *next);

/* Like ft_linear, for `count` weights at once: weight i has rows [firsts[i], firsts[i + 1]) of x
 * and of y. A weight without rows is not read. Results have the same bits as separate calls. */
int ft_linear_many(const ft_linear_weight *const *weights, const int64_t *firsts, int64_t count,
                   const void *x, int x_dtype, void *y, int y_dtype);

#endif
