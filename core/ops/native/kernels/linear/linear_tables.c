/* Tiles of 4 bits that are numbers of values. A file of their own, so that several are compiled at a time. */
#include "linear_fine.h"

GROUP_TILE(iq4_nl, FT_LINEAR_IQ4_NL)
GROUP_TILE(mxfp4, FT_LINEAR_MXFP4)
GROUP_TILE(iq4_xs, FT_LINEAR_IQ4_XS)
