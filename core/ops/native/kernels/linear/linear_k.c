/* Tiles for GGUF's K types, in a file of their own so that several files compile in parallel. */
#include "linear_fine.h"

GROUP_TILE(int4_k, FT_LINEAR_INT4_K)
GROUP_TILE(int5_k, FT_LINEAR_INT5_K)
GROUP_TILE(int6_k, FT_LINEAR_INT6_K)
