/* The inputs of a pass on a GPU, and the work items of its attention. All segments must be short
 * ("narrow" in core/ops/triton/attention/tile_schedule.py, which defines the work items).
 *
 * core/ops/triton/graph/input_fields.py defines the fields. All computations are in integers.
 */
#include "common/common.h"

#include <stdlib.h>

enum { ITEM_WORDS = 7 }; /* must be equal to ITEM_WORDS of input_fields.py */
/* Number of words of a draw's controls, indices of two of them, and the kind of draws with top-k or
 * top-p: must be equal to PLACE and CUT of core/sampling/encoded.py. */
enum { CONTROL_WORDS = 8, CONTROL_KIND = 1, CONTROL_ROW = 6, KIND_CUT = 3 };

/* A batch: arrays of core/ops/batch.py's `RaggedBatch`. */
typedef struct {
    int64_t num_rows, num_logits, num_segments, num_pages, num_tails, page_size;
    const int64_t *token_ids, *positions, *slots; /* [num_rows] */
    const int64_t *logit_rows;                    /* [num_logits] */
    const int64_t *starts, *lens, *page_counts, *tail_lens; /* [num_segments] */
    const int64_t *pages, *tails;
} ft_ragged;

/* The fields of a pass's inputs. Each array with one number per row has room for `room` rows. The
 * last three are written for chained passes only. */
typedef struct {
    int64_t room, num_words, num_partials; /* capacities in rows, words, partial sums */
    int32_t *token_ids, *positions, *slots, *logit_rows, *rows_in_tile, *last_seen; /* [room] */
    int32_t *words;    /* [num_words] */
    int32_t *sources;  /* [room] */
    int64_t *controls; /* [room, CONTROL_WORDS] */
    int32_t *cuts;     /* [room] */
} ft_pass_fields;

/* A row of a chained pass: the record of core/ops/chained_rows.py, field by field. */
typedef struct {
    int64_t request;  /* index of its request */
    int64_t token_id; /* 0 if the device takes the token from the pass before */
    int64_t source;   /* index of the token's word in the results of the pass before; -1: none */
    int64_t position; /* position for RoPE */
    int64_t start;    /* number of keys that the row attends to besides its own */
    int64_t slot;
    int64_t num_tails;
    int64_t output_position; /* position of the chosen token in the output; not read here */
} ft_chained_row;

/* Inputs of the attention layers that have the same sliding window. */
typedef struct {
    int64_t window; /* positions; 0: no window */
    int64_t split;  /* positions per split: the part of a context that one item reads */
    int64_t tile_rows;
    int32_t *counts; /* [4] (index in `words`, number) of the narrow items, then of the wide ones */
    int32_t *partials; /* [room] index of a row's first partial sum; -1: no row */
} ft_pass_work;

/* A segment. The array of segments is in the order of the work items. */
typedef struct {
    const int64_t *pages;
    int64_t num_pages, first_page, first_row, first_tail, index;
    int64_t shared; /* leading positions in the same pages as the previous segment's */
} ordered;

static void put(int32_t *to, const int64_t *values, int64_t count, int64_t room, int32_t padding) {
    for (int64_t i = 0; i < count; i++) to[i] = (int32_t)values[i];
    for (int64_t i = count; i < room; i++) to[i] = padding;
}

static int by_number(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int by_pages(const void *a, const void *b) {
    const ordered *x = a, *y = b;
    int64_t both = ft_min(x->num_pages, y->num_pages);
    int differs = memcmp(x->pages, y->pages, both * sizeof *x->pages);
    if (differs) return differs;
    if (x->num_pages != y->num_pages) return x->num_pages < y->num_pages ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

/* Whether two segments have the same page at the end of the first split. */
static int may_share(const ordered *segments, int64_t count, int64_t split, int64_t page_size,
                     int64_t *scratch) {
    int64_t last = (split - 1) / page_size, found = 0;
    for (int64_t i = 0; i < count; i++)
        if (segments[i].num_pages > last) scratch[found++] = segments[i].pages[last];
    qsort(scratch, found, sizeof *scratch, by_number);
    for (int64_t i = 1; i < found; i++)
        if (scratch[i] == scratch[i - 1]) return 1;
    return 0;
}

/* First position of a segment that other segments cannot share: it is in a tail, or the segment
 * computes it in this pass. */
static int64_t own_from(const ft_ragged *batch, const ordered *segment) {
    int64_t start = batch->starts[segment->index];
    int64_t stop = start + batch->lens[segment->index];
    return ft_min(start, stop - batch->tail_lens[segment->index]);
}

/* Sort the segments by their page ids, so that segments with equal first pages are neighbours. */
static void order_by_pages(const ft_ragged *batch, ordered *segments) {
    qsort(segments, batch->num_segments, sizeof *segments, by_pages);
    for (int64_t i = 1; i < batch->num_segments; i++) {
        ordered *mine = segments + i, *before = mine - 1;
        int64_t both = ft_min(mine->num_pages, before->num_pages), common = 0;
        while (common < both && mine->pages[common] == before->pages[common]) common++;
        mine->shared = ft_min(common * batch->page_size,
                              ft_min(own_from(batch, mine), own_from(batch, before)));
    }
}

FT_INLINE int64_t first_split(const ft_pass_work *work, int64_t position) {
    return work->window ? ft_max(0, position - work->window + 1) / work->split : 0;
}

/* Write a work list from word `used` on. Returns the index after its last word, or -1 if the list
 * does not fit. */
static int64_t list_items(const ft_ragged *batch, const ordered *segments, const ft_pass_work *work,
                          const ft_pass_fields *to, int64_t used) {
    int64_t num_partials = 0, num_entries = 0, lowest = INT64_MAX, highest = 0;
    for (int64_t row = 0, segment = 0; segment < batch->num_segments; segment++)
        for (int64_t i = 0; i < batch->lens[segment]; i++, row++) {
            int64_t at = batch->starts[segment] + i, first = first_split(work, at);
            work->partials[row] = (int32_t)num_partials;
            num_partials += at / work->split - first + 1;
            lowest = ft_min(lowest, first);
            highest = ft_max(highest, at / work->split);
        }
    num_entries = num_partials;
    for (int64_t row = batch->num_rows; row < to->room; row++) work->partials[row] = -1;
    if (num_partials > to->num_partials || used + num_entries > to->num_words) return -1;
    int32_t *rows = to->words + used, *item = rows + num_entries, *end = to->words + to->num_words;
    int64_t entry = 0, num_items = 0;
    for (int64_t split = lowest; split <= highest; split++) {
        int64_t last_owner = -2, in_tile = 0;
        for (int64_t owner = 0; owner < batch->num_segments; owner++) {
            const ordered *segment = segments + owner;
            int64_t index = segment->index, start = batch->starts[index];
            int64_t stop = start + batch->lens[index];
            if ((stop - 1) / work->split < split) continue;
            for (int64_t i = 0; i < batch->lens[index]; i++) {
                int64_t at = start + i;
                if (at / work->split < split || first_split(work, at) > split) continue;
                int joins = owner == last_owner || (owner == last_owner + 1 && last_owner >= 0 &&
                                                    segment->shared >= (split + 1) * work->split);
                last_owner = owner;
                in_tile = joins ? in_tile + 1 : 0;
                if (in_tile % work->tile_rows == 0) {
                    if (item + ITEM_WORDS > end) return -1;
                    item[0] = (int32_t)(used + entry);
                    item[1] = 0;
                    item[2] = (int32_t)segment->first_page;
                    item[3] = item[4] = (int32_t)split;
                    item[5] = (int32_t)(stop - batch->tail_lens[index]);
                    item[6] = (int32_t)(batch->num_pages + segment->first_tail);
                    item += ITEM_WORDS;
                    num_items++;
                }
                item[1 - ITEM_WORDS]++;
                rows[entry++] = (int32_t)(segment->first_row + i);
            }
        }
    }
    work->counts[0] = (int32_t)(used + num_entries);
    work->counts[1] = (int32_t)num_items;
    work->counts[2] = (int32_t)(item - to->words);
    work->counts[3] = 0;
    return item - to->words;
}

/* Write the inputs of a pass of short segments, and one work list for each of `works`. Returns the
 * number of words used, or -1 if words or partial sums do not fit or there is no memory. */
FT_EXPORT int64_t ft_fill_pass(const ft_ragged *batch, const ft_pass_work *works, int64_t num_works,
                               const ft_pass_fields *to) {
    int64_t used = batch->num_pages + batch->num_tails, num_segments = batch->num_segments;
    if (used > to->num_words) return -1;
    put(to->token_ids, batch->token_ids, batch->num_rows, to->room, 0);
    put(to->positions, batch->positions, batch->num_rows, to->room, 0);
    put(to->slots, batch->slots, batch->num_rows, to->room, -1);
    put(to->logit_rows, batch->logit_rows, batch->num_logits, to->room, 0);
    put(to->rows_in_tile, NULL, 0, to->room, -1);
    put(to->words, batch->pages, batch->num_pages, batch->num_pages, 0);
    put(to->words + batch->num_pages, batch->tails, batch->num_tails, batch->num_tails, 0);
    ordered *segments = calloc(num_segments, sizeof *segments + sizeof(int64_t));
    if (segments == NULL) return -1;
    int64_t page = 0, row = 0, tail = 0;
    for (int64_t i = 0; i < num_segments; i++) {
        segments[i] = (ordered){batch->pages + page, batch->page_counts[i], page, row, tail, i, 0};
        page += batch->page_counts[i];
        for (int64_t at = 0; at < batch->lens[i]; at++)
            to->last_seen[row++] = (int32_t)(batch->starts[i] + at);
        tail += batch->tail_lens[i];
    }
    for (; row < to->room; row++) to->last_seen[row] = 0;
    int64_t *scratch = (int64_t *)(segments + num_segments);
    if (num_works && may_share(segments, num_segments, works->split, batch->page_size, scratch))
        order_by_pages(batch, segments);
    for (int64_t i = 0; i < num_works && used >= 0; i++)
        used = list_items(batch, segments, works + i, to, used);
    free(segments);
    return used;
}

/* Write the controls of a pass's draws, and list the draws with top-k or top-p. */
static void put_controls(const int64_t *controls, int64_t count, const ft_pass_fields *to) {
    int64_t num_cuts = 0;
    memcpy(to->controls, controls, count * CONTROL_WORDS * sizeof *controls);
    for (int64_t i = 0; i < to->room; i++) {
        to->controls[i * CONTROL_WORDS + CONTROL_ROW] = i < count ? i : -1;
        if (i < count && controls[i * CONTROL_WORDS + CONTROL_KIND] == KIND_CUT)
            to->cuts[num_cuts++] = (int32_t)i;
    }
    for (; num_cuts < to->room; num_cuts++) to->cuts[num_cuts] = -1;
}

/* Write the inputs of a chained pass, as `ft_fill_pass` does for segments of one row with logits.
 *
 * `first_pages` [number of requests + 1]: index in `pages` of each request's first page, and the
 * number of pages. `tails`: slots of the rows' tails, row after row. `controls`: the controls of
 * each row's draw. Returns the number of words used, or -1 if the pass does not fit, there is no
 * memory, or a row has no page. */
FT_EXPORT int64_t ft_fill_chained(const ft_chained_row *rows, int64_t num_rows,
                                  const int64_t *first_pages, const int64_t *pages,
                                  int64_t page_size, const int64_t *tails, const int64_t *controls,
                                  const ft_pass_work *works, int64_t num_works,
                                  const ft_pass_fields *to) {
    if (num_rows > to->room) return -1;
    int64_t num_pages = 0, num_tails = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        num_pages += ft_max(1, ft_ceil_div(rows[i].start + 1 - rows[i].num_tails, page_size));
        num_tails += rows[i].num_tails;
    }
    int64_t *at = malloc((8 * num_rows + num_pages) * sizeof *at);
    if (at == NULL) return -1;
    int64_t *token_ids = at, *positions = at + num_rows, *slots = at + 2 * num_rows;
    int64_t *logit_rows = at + 3 * num_rows, *starts = at + 4 * num_rows, *lens = at + 5 * num_rows;
    int64_t *page_counts = at + 6 * num_rows, *tail_lens = at + 7 * num_rows;
    int64_t *own = at + 8 * num_rows, used = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        const ft_chained_row *row = rows + i;
        int64_t first = first_pages[row->request], count;
        count = ft_max(1, ft_ceil_div(row->start + 1 - row->num_tails, page_size));
        if (count > first_pages[row->request + 1] - first) {
            used = -1;
            break;
        }
        memcpy(own, pages + first, count * sizeof *own);
        own += count;
        token_ids[i] = row->token_id;
        positions[i] = row->position;
        slots[i] = row->slot;
        logit_rows[i] = i;
        starts[i] = row->start;
        lens[i] = 1;
        page_counts[i] = count;
        tail_lens[i] = row->num_tails;
        to->sources[i] = (int32_t)row->source;
    }
    ft_ragged batch = {num_rows, num_rows, num_rows, num_pages, num_tails, page_size, token_ids,
                       positions, slots, logit_rows, starts, lens, page_counts, tail_lens,
                       at + 8 * num_rows, tails};
    if (used == 0) used = ft_fill_pass(&batch, works, num_works, to);
    free(at);
    if (used < 0) return -1;
    for (int64_t i = num_rows; i < to->room; i++) to->sources[i] = -1;
    put_controls(controls, num_rows, to);
    return used;
}
