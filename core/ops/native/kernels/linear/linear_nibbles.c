/* Tiles of 4 bits with a scale for each group. A file of their own, so that several are compiled at a time. */
#include "linear_fine.h"

GROUP_TILE(int4_min, FT_LINEAR_INT4_MIN)
GROUP_TILE(int4_zero, FT_LINEAR_INT4_ZERO)
GROUP_TILE(int4_group, FT_LINEAR_INT4_GROUP)
