/* Which queries are computed together: the tasks of a step's attention, the same for all layers
 * and KV heads.
 *
 * A task is a list of parts: rows of one segment each. A long segment's rows make many tasks of
 * one part. Short segments (decode and verify rows) whose first pages are the same become parts of
 * one task, sorted so that every block of keys that some of them share belongs to neighbours. The
 * walk through a task is that through a tree: a block that several parts share is brought once,
 * for all of their queries, and where their pages part, one part goes on after the other.
 *
 * Only blocks that lie wholly before the rows of all sharing segments are shared. So every query
 * still takes the same keys in the same order as if it were alone.
 */
#ifndef FT_ATTENTION_PLAN_H
#define FT_ATTENTION_PLAN_H

#include "decoder/decoder.h"

enum {
    KEYS = 64,    /* of a block; blocks begin at multiples of it */
    QUERIES = 64, /* of a task: rows times the query heads of a KV head */
};

/* Rows of one segment: all of a short one, a piece of a long one. */
struct ft_attend_part {
    int64_t segment;
    int64_t first_row;      /* of the batch */
    int64_t first_position; /* of that row */
    int64_t num_rows;
    int64_t reach;  /* the first position that no row sees */
    int64_t shared; /* keys, whole blocks, in the same pages as those of the part before it; 0 for
                     * the first of a task */
};

/* A step of the walk: a block and the parts that read it. */
typedef struct {
    int64_t lo;          /* position of the block's first key */
    int64_t count;       /* keys that some of their queries see; 0: the walk is over */
    int64_t first, stop; /* parts of the task; all have the pages of the first */
} ft_attend_step;

/* The walk through `num_parts` parts: with a window above 0 without blocks that no part sees. */
ft_attend_step ft_attend_first(const ft_attend_part *parts, int64_t num_parts, int64_t window);
ft_attend_step ft_attend_next(const ft_attend_part *parts, int64_t num_parts, int64_t window,
                              const ft_attend_step *step);

#endif
