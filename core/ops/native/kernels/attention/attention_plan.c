/* The plan of attention: the rows that read their keys together, and the order of the blocks. */
#include "attention_plan.h"

#include <stdlib.h>

/* Products that make a task worth another thread: some microseconds of work. A thread that is idle
 * for longer goes to sleep, and must be woken for the matrix after attention. */
enum { LEAST_WORK = 1 << 14 };

/* -- shared blocks ---------------------------------------------------------------------------- */

/* A short segment, and the pages of its keys that may be shared. */
typedef struct {
    const char *pages;
    size_t bytes;
    int64_t segment;
} sharer;

/* Number of keys in the whole blocks before a segment's rows and before its tail. */
static int64_t whole_blocks(const ft_batch *batch, int64_t segment) {
    return ft_min(batch->starts[segment], batch->tail_from[segment]) / KEYS * KEYS;
}

static sharer find_sharer(const ft_batch *batch, int64_t page_size, int64_t segment) {
    const int64_t *pages = batch->page_table + segment * batch->max_pages;
    int64_t count = ft_ceil_div(whole_blocks(batch, segment), page_size);
    return (sharer){(const char *)pages, (size_t)count * sizeof *pages, segment};
}

/* Compare the bytes of the page ids. Any order will do in which equal prefixes are neighbours. */
static int by_pages(const void *first, const void *second) {
    const sharer *a = first, *b = second;
    int order = memcmp(a->pages, b->pages, a->bytes < b->bytes ? a->bytes : b->bytes);
    if (order != 0) return order;
    if (a->bytes != b->bytes) return a->bytes < b->bytes ? -1 : 1;
    return a->segment < b->segment ? -1 : 1;
}

/* Number of keys, in whole blocks before their rows, that two segments have in the same pages. */
static int64_t count_shared(const ft_batch *batch, int64_t page_size, const sharer *a,
                            const sharer *b) {
    const int64_t *a_pages = (const int64_t *)a->pages, *b_pages = (const int64_t *)b->pages;
    int64_t most = (int64_t)((a->bytes < b->bytes ? a->bytes : b->bytes) / sizeof *a_pages);
    int64_t same = 0;
    while (same < most && a_pages[same] == b_pages[same]) same++;
    int64_t before = ft_min(whole_blocks(batch, a->segment), whole_blocks(batch, b->segment));
    return ft_min(before, same * page_size / KEYS * KEYS);
}

/* -- tasks ------------------------------------------------------------------------------------ */

typedef struct {
    const ft_batch *batch;
    int64_t page_size;
    int64_t most_rows; /* most rows of a task */
    sharer *sharers;
    int64_t num_sharers;
    ft_attend_part *parts;
    int64_t num_parts;
    int64_t *firsts;
    int64_t num_tasks;
} builder;

static void add_part(builder *build, int64_t segment, int64_t skipped, int64_t shared) {
    const ft_batch *batch = build->batch;
    int64_t first = batch->starts[segment] + skipped, row = batch->first_rows[segment] + skipped;
    int64_t num_rows = ft_min(build->most_rows, batch->lens[segment] - skipped);
    build->parts[build->num_parts++] = (ft_attend_part){
        .segment = segment,
        .first_row = row,
        .first_position = first,
        .num_rows = num_rows,
        /* Rows of layers that are not mutual see fewer keys; hidden keys add exact zeros. */
        .reach = batch->reaches ? batch->reaches[row + num_rows - 1] : first + num_rows,
        .shared = shared,
    };
}

/* Cut long segments into tasks of one part, and collect short segments as sharers. */
static void sift_segments(builder *build) {
    const ft_batch *batch = build->batch;
    for (int64_t segment = 0; segment < batch->num_segments; segment++) {
        if (batch->lens[segment] <= build->most_rows) {
            sharer *next = &build->sharers[build->num_sharers++];
            *next = find_sharer(batch, build->page_size, segment);
            continue;
        }
        for (int64_t at = 0; at < batch->lens[segment]; at += build->most_rows) {
            build->firsts[build->num_tasks++] = build->num_parts;
            add_part(build, segment, at, 0);
        }
    }
}

/* Sort the sharers and add them as parts. Returns the number of their rows. */
static int64_t line_up(builder *build) {
    int64_t rows = 0;
    const sharer *sharers = build->sharers;
    qsort(build->sharers, (size_t)build->num_sharers, sizeof *sharers, by_pages);
    for (int64_t i = 0; i < build->num_sharers; i++) {
        int64_t shared = 0;
        if (i) shared = count_shared(build->batch, build->page_size, &sharers[i - 1], &sharers[i]);
        add_part(build, sharers[i].segment, 0, shared);
        rows += build->batch->lens[sharers[i].segment];
    }
    return rows;
}

/* Return the end of the task that starts at part `first`: the first part that shares no keys with
 * the part before it, or that exceeds the rows of a task. In the second case, end the task in its
 * last half, at the part that shares least, because the next task loads the shared keys again. */
static int64_t find_stop(const builder *build, int64_t first, int64_t most_rows) {
    const ft_attend_part *parts = build->parts;
    int64_t stop = first + 1, rows = parts[first].num_rows;
    for (; stop < build->num_parts && parts[stop].shared > 0; stop++) {
        rows += parts[stop].num_rows;
        if (rows > most_rows) break;
    }
    if (stop == build->num_parts || parts[stop].shared == 0) return stop;
    int64_t best = stop;
    for (int64_t at = stop - 1; at > (first + stop) / 2; at--)
        if (parts[at].shared < parts[best].shared) best = at;
    return best;
}

/* Cut the parts from `first` on into tasks of at most `most_rows` rows, or of one part. */
static void cut_tasks(builder *build, int64_t first, int64_t most_rows) {
    while (first < build->num_parts) {
        build->firsts[build->num_tasks++] = first;
        build->parts[first].shared = 0;
        first = find_stop(build, first, most_rows);
    }
}

/* Long segments come first, so that the last pieces of a job are small. Sharers are cut into enough
 * tasks for all threads. */
static void build_tasks(builder *build, int64_t num_kv_heads) {
    sift_segments(build);
    int64_t first = build->num_parts, rows = line_up(build);
    int64_t threads = ft_num_threads();
    int64_t most_rows = ft_min(build->most_rows, ft_ceil_div(rows * num_kv_heads, threads));
    cut_tasks(build, first, most_rows);
    build->firsts[build->num_tasks] = build->num_parts;
}

/* Place the arrays of a plan in `memory`. Returns their size in bytes, also if `memory` is NULL. */
static size_t lay_out(builder *build, char *memory) {
    int64_t most = 0, segments = build->batch->num_segments;
    for (int64_t i = 0; i < segments; i++)
        most += ft_ceil_div(build->batch->lens[i], build->most_rows);
    size_t parts = (size_t)most * sizeof *build->parts;
    size_t firsts = (size_t)(most + 1) * sizeof *build->firsts;
    build->parts = (ft_attend_part *)memory;
    build->firsts = (int64_t *)(memory + parts);
    build->sharers = (sharer *)(memory + parts + firsts);
    return parts + firsts + (size_t)segments * sizeof *build->sharers;
}

/* Number of tasks that make a piece worth another thread. */
static int64_t find_grain(const builder *build, int64_t head_products) {
    const ft_batch *batch = build->batch;
    int64_t keys = 0;
    for (int64_t i = 0; i < batch->num_segments; i++)
        keys += batch->lens[i] * (batch->starts[i] + batch->lens[i]);
    int64_t work = ft_max(1, keys * head_products / build->num_tasks); /* products of a task */
    return ft_max(1, LEAST_WORK / work);
}

/* Return the number of shares of a KV head's query heads: more than `shares` if latent attention
 * has fewer tasks than threads. One KV head serves all its query heads, so transposing the keys
 * again for each share takes only as long as scoring a few heads. */
static int64_t more_shares(const builder *build, const ft_heads *heads, int64_t shares) {
    if (!heads->rank) return shares;
    int64_t wanted = ft_ceil_div(ft_num_threads(), build->num_tasks * heads->num_kv_heads);
    return ft_min(ft_max(shares, wanted), heads->num_heads / heads->num_kv_heads);
}

int ft_plan_attention(const ft_part *parts, int64_t count, ft_attend_plan *plans) {
    builder builds[FT_MAX_PARTS];
    int64_t groups[FT_MAX_PARTS], shares[FT_MAX_PARTS];
    size_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        groups[i] = parts[i].heads->num_heads / parts[i].heads->num_kv_heads;
        shares[i] = ft_ceil_div(groups[i], QUERIES);
        builds[i] = (builder){.batch = parts[i].batch, .page_size = parts[i].kv->page_size};
        builds[i].most_rows = QUERIES / ft_ceil_div(groups[i], shares[i]);
        bytes += lay_out(&builds[i], NULL);
    }
    char *memory = ft_scratch(FT_SCRATCH_ATTENTION_PLAN, bytes);
    if (!memory) return -1;
    for (int64_t i = 0; i < count; i++) {
        builder *build = &builds[i];
        memory += lay_out(build, memory);
        build_tasks(build, parts[i].heads->num_kv_heads * shares[i]);
        int64_t num_shares = more_shares(build, parts[i].heads, shares[i]);
        int64_t grain = find_grain(build, groups[i] / num_shares * parts[i].heads->head_dim);
        plans[i] = (ft_attend_plan){build->parts, build->firsts, build->num_tasks, num_shares, grain};
    }
    return 0;
}

/* -- the walk --------------------------------------------------------------------------------- */

/* Position of the first block that a part's first row sees. */
static int64_t first_seen(const ft_attend_part *part, int64_t window) {
    int64_t seen = window > 0 ? ft_max(0, part->first_position + 1 - window) : 0;
    return seen / KEYS * KEYS;
}

/* Return the block at `lo` and the parts that share it with part `first`. If none of them sees that
 * block, return the next block that one of them sees, which fewer parts may share. */
static ft_attend_step find_step(const ft_attend_part *parts, int64_t num_parts, int64_t window,
                                int64_t first, int64_t lo) {
    for (;;) {
        int64_t seen = first_seen(&parts[first], window), stop = first + 1;
        for (; stop < num_parts && parts[stop].shared > lo; stop++)
            seen = ft_min(seen, first_seen(&parts[stop], window));
        if (seen <= lo) {
            return (ft_attend_step){lo, ft_min(KEYS, parts[first].reach - lo), first, stop};
        }
        lo = seen;
    }
}

ft_attend_step ft_attend_first(const ft_attend_part *parts, int64_t num_parts, int64_t window) {
    return find_step(parts, num_parts, window, 0, 0);
}

/* Go to the first part's next block. After its last block, go to the next part's first block that
 * was not shared with it. */
ft_attend_step ft_attend_next(const ft_attend_part *parts, int64_t num_parts, int64_t window,
                              const ft_attend_step *step) {
    const ft_attend_part *part = &parts[step->first];
    int64_t lo = step->lo + KEYS, next = step->first + 1;
    if (lo < part->reach)
        return find_step(parts, num_parts, window, step->first, lo);
    if (next < num_parts) return find_step(parts, num_parts, window, next, parts[next].shared);
    return (ft_attend_step){0};
}

/* Return how many loads of key blocks attention over a batch takes for one share of a KV head; -1
 * when there is no memory. Computes no attention. */
FT_EXPORT int64_t ft_attention_blocks(const ft_batch *batch, const ft_kv *kv,
                                      const ft_heads *heads, int64_t window) {
    ft_attend_plan plan;
    ft_part part = {batch, kv, heads};
    if (ft_plan_attention(&part, 1, &plan)) return -1;
    int64_t blocks = 0;
    for (int64_t task = 0; task < plan.num_tasks; task++) {
        const ft_attend_part *parts = plan.parts + plan.firsts[task];
        int64_t num_parts = plan.firsts[task + 1] - plan.firsts[task];
        ft_attend_step step = ft_attend_first(parts, num_parts, window);
        for (; step.count > 0; blocks++) step = ft_attend_next(parts, num_parts, window, &step);
    }
    return blocks;
}
