/* Tiles for 4-bit weights with a scale per group, in a file of their own so that several files
 * compile in parallel. */
#include "linear_fine.h"

GROUP_TILE(int4_min, FT_LINEAR_INT4_MIN)
GROUP_TILE(int4_zero, FT_LINEAR_INT4_ZERO)
GROUP_TILE(int4_group, FT_LINEAR_INT4_GROUP)
