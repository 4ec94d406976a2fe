/* Tiles of 5 and of 8 bits with a scale for each group. A file of their own, so that several are compiled at a time. */
#include "linear_fine.h"

GROUP_TILE(int5_group, FT_LINEAR_INT5_GROUP)
GROUP_TILE(int5_min, FT_LINEAR_INT5_MIN)
GROUP_TILE(int8_group, FT_LINEAR_INT8_GROUP)
