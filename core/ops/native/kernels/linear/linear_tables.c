/* Tiles for 4-bit indices into a table of values, in a file of their own so that several files
 * compile in parallel. */
#include "linear_fine.h"

GROUP_TILE(iq4_nl, FT_LINEAR_IQ4_NL)
GROUP_TILE(mxfp4, FT_LINEAR_MXFP4)
GROUP_TILE(iq4_xs, FT_LINEAR_IQ4_XS)
