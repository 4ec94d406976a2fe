/* Tasks of attention: which rows take their keys together, and the order of their blocks. */
#include "attention_plan.h"

#include <stdlib.h>

/* Products that make a task worth another thread: some microseconds. A thread that had nothing to do for
 * longer would sleep, and be woken for the matrix behind attention. */
enum { LEAST_WORK = 1 << 14 };

/* -- shared blocks ---------------------------------------------------------------------------- */

/* A short segment, and the pages of its keys that may be shared. */
typedef struct {
    const char *pages;
    size_t bytes;
    int64_t segment;
} sharer;

/* Keys of the whole blocks before a segment's rows and before its tail. */
static int64_t whole_blocks(const ft_batch *batch, int64_t segment) {
    return ft_min(batch->starts[segment], batch->tail_from[segment]) / KEYS * KEYS;
}

static sharer find_sharer(const ft_batch *batch, int64_t page_size, int64_t segment) {
    const int64_t *pages = batch->page_table + segment * batch->max_pages;
    int64_t count = ft_ceil_div(whole_blocks(batch, segment), page_size);
    return (sharer){(const char *)pages, (size_t)count * sizeof *pages, segment};
}

/* By their bytes: any order does that puts equal beginnings beside each other. */
static int by_pages(const void *first, const void *second) {
    const sharer *a = first, *b = second;
    int order = memcmp(a->pages, b->pages, a->bytes < b->bytes ? a->bytes : b->bytes);
    if (order != 0) return order;
    if (a->bytes != b->bytes) return a->bytes < b->bytes ? -1 : 1;
    return a->segment < b->segment ? -1 : 1;
}

/* Keys, whole blocks, that two segments have in the same pages and before their rows. */
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
    int64_t most_rows; /* of a task */
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
        /* Layers that are not mutual see less: the blocks behind add exact zeros. */
        .reach = batch->reaches ? batch->reaches[row + num_rows - 1] : first + num_rows,
        .shared = shared,
    };
}

/* Long segments become tasks of one part each, short ones wait to be sorted. */
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

/* Sharers as parts beside each other; returns how many rows they have. */
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

/* Where the task that begins at `first` stops: where nothing is shared, or where it is full. Then
 * rather somewhat earlier, where less is shared: what is, the next task brings again. */
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

/* Tasks of the parts from `first` on, of at most `most_rows` rows. */
static void cut_tasks(builder *build, int64_t first, int64_t most_rows) {
    while (first < build->num_parts) {
        build->firsts[build->num_tasks++] = first;
        build->parts[first].shared = 0;
        first = find_stop(build, first, most_rows);
    }
}

/* Long segments first: what remains to the end of a job should be small. Sharers are not put into
 * fewer tasks than there are threads. */
static void build_tasks(builder *build, int64_t num_kv_heads) {
    sift_segments(build);
    int64_t first = build->num_parts, rows = line_up(build);
    int64_t threads = ft_num_threads();
    int64_t most_rows = ft_min(build->most_rows, ft_ceil_div(rows * num_kv_heads, threads));
    cut_tasks(build, first, most_rows);
    build->firsts[build->num_tasks] = build->num_parts;
}

/* What a plan points to: with `memory` where it lies there, else how many bytes it takes. */
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

/* How many tasks of a KV head make a piece that is worth another thread. */
static int64_t find_grain(const builder *build, int64_t head_products) {
    const ft_batch *batch = build->batch;
    int64_t keys = 0;
    for (int64_t i = 0; i < batch->num_segments; i++)
        keys += batch->lens[i] * (batch->starts[i] + batch->lens[i]);
    int64_t work = ft_max(1, keys * head_products / build->num_tasks); /* of a task */
    return ft_max(1, LEAST_WORK / work);
}

/* Shares of a KV head's query heads where its tasks are fewer than the threads. Only of latents, which
 * all heads read: their keys take as long to turn as a few heads to score. */
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

/* The first block of which a part's first row sees something. */
static int64_t first_seen(const ft_attend_part *part, int64_t window) {
    int64_t seen = window > 0 ? ft_max(0, part->first_position + 1 - window) : 0;
    return seen / KEYS * KEYS;
}

/* The parts that share the block at `lo` with part `first`, or, where none of them sees it, the first
 * block after it that some do: the farther, the fewer share. */
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

/* The first part's next block; after its last one, the next part's first that is not done. */
ft_attend_step ft_attend_next(const ft_attend_part *parts, int64_t num_parts, int64_t window,
                              const ft_attend_step *step) {
    const ft_attend_part *part = &parts[step->first];
    int64_t lo = step->lo + KEYS, next = step->first + 1;
    if (lo < part->reach)
        return find_step(parts, num_parts, window, step->first, lo);
    if (next < num_parts) return find_step(parts, num_parts, window, next, parts[next].shared);
    return (ft_attend_step){0};
}

/* Blocks of keys that attention over a batch brings from the pages, for a share of a KV head, each counted
 * as often as it is brought; -1 when there is no memory. Computes nothing else. */
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
