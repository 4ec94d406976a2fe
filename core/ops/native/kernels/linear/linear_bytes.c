/* Tiles for 5-bit and 8-bit weights with a scale per group, in a file of their own so that several
 * files compile in parallel. */
#include "linear_fine.h"

GROUP_TILE(int5_group, FT_LINEAR_INT5_GROUP)
GROUP_TILE(int5_min, FT_LINEAR_INT5_MIN)
GROUP_TILE(int8_group, FT_LINEAR_INT8_GROUP)
