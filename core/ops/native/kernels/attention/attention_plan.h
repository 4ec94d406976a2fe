/* The tasks of a step's attention, which say what queries are computed together. They are the same
 * for all layers and KV heads.
 *
 * A task is a list of parts, and a part is rows of one segment. The rows of a long segment make
 * many tasks of one part. Short segments (decode and verify rows) with the same first pages become
 * parts of one task, sorted so that parts that share a block of keys are neighbours. The walk
 * through a task is a walk through a tree: a block that several parts share is loaded once for all
 * of their queries, and where their pages differ, the parts follow one after the other.
 *
 * Only blocks that lie wholly before the rows of all sharing segments are shared. So every query
 * reads the same keys in the same order as it would alone.
 */
#ifndef FT_ATTENTION_PLAN_H
#define FT_ATTENTION_PLAN_H

#include "decoder/decoder.h"

enum {
    KEYS = 64,    /* keys of a block; blocks start at multiples of it */
    QUERIES = 64, /* most queries of a task: rows times query heads of a KV head */
};

/* Rows of one segment: all of a short one, a piece of a long one. */
struct ft_attend_part {
    int64_t segment;
    int64_t first_row;      /* row in the batch */
    int64_t first_position; /* position of that row */
    int64_t num_rows;
    int64_t reach;  /* the first position that no row sees */
    int64_t shared; /* keys, in whole blocks, that have the same pages as in the part before; 0 for
                     * the first part of a task */
};

/* A step of the walk: a block and the parts that read it. */
typedef struct {
    int64_t lo;          /* position of the block's first key */
    int64_t count;       /* keys that at least one query of the parts sees; 0: the walk is over */
    int64_t first, stop; /* parts [first, stop) of the task, which share the block */
} ft_attend_step;

/* Return the first step of the walk through `num_parts` parts, or the step after `step`. A window
 * above 0 leaves out the blocks that no part sees. */
ft_attend_step ft_attend_first(const ft_attend_part *parts, int64_t num_parts, int64_t window);
ft_attend_step ft_attend_next(const ft_attend_part *parts, int64_t num_parts, int64_t window,
                              const ft_attend_step *step);

#endif
