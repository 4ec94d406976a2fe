/* The rows of a step, laid out from a record of each request.
 *
 * All computations are in integers, so one build serves every CPU. With a GPU, kernels/host is
 * compiled without the other folders. core/ops/batch.py (`build_batch`) defines the results.
 */
#include "common/common.h"

/* One request: the record of core/ops/rows/row_table.py, field by field. */
typedef struct {
    int64_t start; /* position of the first pending token */
    int64_t num_pending;
    int64_t num_drafted; /* nodes of the draft, whose rows follow the pending tokens' */
    int64_t num_logits;  /* logits are computed for this many last rows */
    int64_t num_pages;
    int64_t num_spare; /* spare pages, for the nodes that are not in the trunk */
    int64_t is_tree;   /* whether the draft has parents; else it is a chain */
} ft_requested;

/* The arrays of a batch, line by line: [num_rows], [num_logits], [num_segments], and two lists. */
typedef struct {
    int64_t *positions, *slots;
    int64_t *logit_rows;
    int64_t *starts, *lens, *first_rows, *page_counts, *tail_lens;
    int64_t *tails, *pages;
} ft_arrays;

static ft_arrays arrays_of(int64_t *at, int64_t num_rows, int64_t num_logits, int64_t num_segments,
                           int64_t max_tails) {
    ft_arrays to = {.positions = at, .slots = at + num_rows, .logit_rows = at + 2 * num_rows};
    to.starts = to.logit_rows + num_logits;
    to.lens = to.starts + num_segments;
    to.first_rows = to.lens + num_segments;
    to.page_counts = to.first_rows + num_segments;
    to.tail_lens = to.page_counts + num_segments;
    to.tails = to.tail_lens + num_segments;
    to.pages = to.tails + max_tails;
    return to;
}

FT_INLINE int64_t slot_of(const int64_t *pages, int64_t index, int64_t page_size) {
    return pages[index / page_size] * page_size + index % page_size;
}

/* Number of nodes in the trunk: the first nodes, each a child of the node before it. */
static int64_t trunk_len(const ft_requested *request, const int64_t *parents) {
    if (!request->is_tree) return request->num_drafted;
    int64_t len = 0;
    while (len < request->num_drafted && parents[len] == len - 1) len++;
    return len;
}

/* Add a segment and its pages. Its last `num_tails` positions are not in pages. */
static int add_segment(ft_arrays *to, int64_t segment, int64_t start, int64_t len, int64_t first_row,
                       int64_t num_tails, const ft_requested *request, const int64_t *pages,
                       int64_t page_size) {
    int64_t count = ft_ceil_div(start + len - num_tails, page_size);
    if (count > request->num_pages) return -1;
    to->starts[segment] = start;
    to->lens[segment] = len;
    to->first_rows[segment] = first_row;
    to->page_counts[segment] = count;
    to->tail_lens[segment] = num_tails;
    memcpy(to->pages, pages, count * sizeof *pages);
    to->pages += count;
    return 0;
}

/* Lay out the requests. `pages`, `spare` and `parents` are lists of all requests, one after the
 * other. The arrays of the batch are written from `at` on. Returns the number of pages in them, or
 * -1 for a row without a page. */
FT_EXPORT int64_t ft_lay_out(const ft_requested *requests, int64_t num_requests, int64_t page_size,
                             const int64_t *pages, const int64_t *spare, const int64_t *parents,
                             int64_t *at, int64_t num_rows, int64_t num_logits,
                             int64_t num_segments, int64_t max_tails) {
    ft_arrays to = arrays_of(at, num_rows, num_logits, num_segments, max_tails);
    const int64_t *first_page = to.pages;
    int64_t row = 0, segment = 0;
    for (const ft_requested *request = requests; request < requests + num_requests; request++) {
        int64_t stop = request->start + request->num_pending, num_drafted = request->num_drafted;
        int64_t trunk = trunk_len(request, parents), len = request->num_pending + trunk;
        if (add_segment(&to, segment++, request->start, len, row, 0, request, pages, page_size))
            return -1;
        int64_t last_row = row + request->num_pending + num_drafted;
        for (int64_t i = last_row - request->num_logits; i < last_row; i++) *to.logit_rows++ = i;
        for (int64_t position = request->start; position < stop + trunk; position++, row++) {
            to.positions[row] = position;
            to.slots[row] = slot_of(pages, position, page_size);
        }
        for (int64_t first = trunk, end; first < num_drafted; first = end) {
            for (end = first + 1; end < num_drafted && parents[end] == end - 1;) end++;
            /* Ancestors of the run's first node in the draft: all, and the ones after the trunk. */
            int64_t depth = 0, ancestors = 0;
            for (int64_t node = parents[first]; node >= 0; node = parents[node]) {
                depth++;
                ancestors += node >= trunk;
            }
            if (end - trunk > request->num_spare * page_size) return -1;
            int64_t *tail = to.tails + ancestors, num_tails = ancestors + end - first;
            for (int64_t node = parents[first]; node >= trunk; node = parents[node])
                *--tail = slot_of(spare, node - trunk, page_size);
            if (add_segment(&to, segment++, stop + depth, end - first, row, num_tails, request,
                            pages, page_size))
                return -1;
            for (int64_t node = first; node < end; node++, row++) {
                to.positions[row] = stop + depth + node - first;
                to.slots[row] = slot_of(spare, node - trunk, page_size);
                to.tails[ancestors + node - first] = to.slots[row];
            }
            to.tails += num_tails;
        }
        pages += request->num_pages;
        spare += request->num_spare;
        if (request->is_tree) parents += num_drafted;
    }
    return to.pages - first_page;
}
