/* Paged attention in place, for decode, verify and prefill rows alike.
 *
 * A task is the rows of one segment, or of several segments that share pages, and one KV head with
 * the query heads that read it: at most QUERIES queries. Keys are read in blocks of 64 at absolute
 * positions, in the order of the plan's walk, so a query adds the same numbers in the same order
 * whatever other queries are in its task.
 *
 * The keys of a block are transposed once for all queries that read it, so that sixteen keys lie
 * side by side. A score is then one running sum over the head's dimensions, for any number of
 * queries.
 */
#include "attention_queries.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* Set the row, position and reach of each query. Returns the number of queries. */
static int64_t line_up_queries(const attend_task *task, attend_space *space) {
    const int64_t *reaches = task->job->rule->is_mutual ? task->job->batch->reaches : NULL;
    int64_t query = 0;
    for (int64_t i = 0; i < task->num_parts; i++) {
        const ft_attend_part *part = &task->parts[i];
        space->first_query[i] = query;
        for (int64_t at = 0; at < part->num_rows * task->group; at++, query++) {
            space->rows[query] = part->first_row + at / task->group;
            space->positions[query] = part->first_position + at / task->group;
            space->reaches[query] =
                reaches ? reaches[space->rows[query]] : space->positions[query] + 1;
        }
    }
    space->first_query[task->num_parts] = query;
    return query;
}

/* Index of a query in the vectors [num_rows, num_heads] of q and of out. */
static int64_t vector_index(const attend_task *task, const attend_space *space, int64_t query) {
    int64_t head = task->first + query % task->group;
    return space->rows[query] * task->job->heads->num_heads + head;
}

static void begin_task(const attend_task *task, attend_space *space) {
    const ft_heads *heads = task->job->heads;
    int64_t num_queries = line_up_queries(task, space);
    int widens = heads->dtype == FT_BFLOAT16 && !uses_dot(heads);
    for (int64_t i = 0; i < num_queries; i++) {
        int64_t at = vector_index(task, space, i) * task->dim;
        const char *query = task->job->q + at * item_size(heads);
        float *wide = space->wide + i * task->dim;
        const float *sinks = task->job->rule->sinks;
        space->max_score[i] = sinks ? sinks[task->first + i % task->group] : HIDDEN;
        v_store(space->exp_sums[i], v_set(0.0f));
        space->exp_sums[i][0] = sinks ? 1.0f : 0.0f;
        if (is_scaled(task)) {
            pack_query(space, i, query, task->dim, heads->dtype == FT_BFLOAT16);
            continue;
        }
        if (widens)
            for (int64_t d = 0; d < task->dim; d += FT_WIDTH)
                v_store_n(wide + d, v_get(query, d, task->dim - d, 1), task->dim - d);
        space->queries[i] = widens ? (const void *)wide : query;
#if defined(FT_AMX)
        if (uses_amx(task)) pack_pairs(task, space, i, query);
#endif
    }
#if defined(FT_AMX)
    if (uses_amx(task)) set_shapes(num_queries);
#endif
    memset(space->acc, 0, (size_t)(num_queries * task->padded) * 4);
}

static void end_task(const attend_task *task, const attend_space *space) {
    int is_bf16 = task->job->heads->dtype == FT_BFLOAT16;
    for (int64_t i = 0; i < space->first_query[task->num_parts]; i++) {
        int64_t dim = task->value_dim, at = vector_index(task, space, i) * dim;
        ft_vec exp_sum = v_set(v_sum(v_load(space->exp_sums[i])));
        for (int64_t d = 0; d < dim; d += FT_WIDTH) {
            ft_vec sum = v_load(space->acc + i * task->padded + d);
            v_put(task->job->out, at + d, v_div(sum, exp_sum), dim - d, is_bf16);
        }
    }
}

/* Add a step's block to its queries. `rows` are its keys, `next_rows` the keys of the next step. */
static void attend_block(const attend_task *task, attend_space *space, const ft_attend_step *step,
                         const char **rows, const char *const *next_rows) {
    int64_t first = space->first_query[step->first], stop = space->first_query[step->stop];
    /* The first queries may see no key of the block. */
    while (first < stop && space->reaches[first] <= step->lo) first++;
    if (first == stop) return;
    if (is_scaled(task)) {
        load_scales(task, space, step);
        load_key_bytes(task, space, rows, step->count);
    } else {
        load_keys(task, space, rows, step->count);
    }
    score_all(task, space, first, stop);
    for (int64_t i = first; i < stop; i++) weigh_seen(task, space, i, step->lo);
    if (is_scaled(task))
        load_value_bytes(task, space, rows, next_rows, step->count);
    else
        load_values(task, space, rows, next_rows, step->count);
    gather_all(task, space, first, stop, filled_keys(task, step->count));
}

static void attend_one(const attend_task *task, attend_space *space) {
    int64_t window = task->job->rule->window;
    begin_task(task, space);
    ft_attend_step step = ft_attend_first(task->parts, task->num_parts, window);
    find_keys(task, &step, space->key_rows[0]);
    for (int now = 0; step.count > 0; now = 1 - now) {
        ft_attend_step next = ft_attend_next(task->parts, task->num_parts, window, &step);
        find_keys(task, &next, space->key_rows[1 - now]);
        attend_block(task, space, &step, space->key_rows[now], space->key_rows[1 - now]);
        step = next;
    }
    end_task(task, space);
}

/* Return the task at `index` of [tasks of the plan, KV heads, shares]. */
static attend_task find_task(const attend_job *job, int64_t index) {
    const ft_heads *heads = job->heads;
    int64_t shares = job->plan->num_shares, of_task = heads->num_kv_heads * shares;
    const int64_t *firsts = job->plan->firsts + index / of_task;
    int64_t head = index % of_task / shares, share = index % shares;
    int64_t group = heads->num_heads / heads->num_kv_heads;
    int64_t first = group * share / shares, stop = group * (share + 1) / shares;
    return (attend_task){
        .job = job,
        .parts = job->plan->parts + firsts[0],
        .num_parts = firsts[1] - firsts[0],
        .head = head,
        .first = head * group + first,
        .group = stop - first,
        .dim = heads->head_dim,
        .value_dim = ft_value_dim(heads),
        .padded = ft_ceil_div(ft_value_dim(heads), 16) * 16,
    };
}

/* 0x8040 flushes subnormal numbers to 0 (FTZ and DAZ), which the bf16 dot products do anyway. */
static void attend_piece(void *context, int64_t begin, int64_t end) {
    attend_job *job = context;
    attend_space *space = ft_scratch(FT_SCRATCH_ATTENTION, sizeof *space);
    if (!space) {
        job->failed = 1;
        return;
    }
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
#endif
    for (int64_t index = begin; index < end; index++) {
        attend_task task = find_task(job, index);
        attend_one(&task, space);
    }
#if defined(FT_AMX)
    AMX_RELEASE();
#endif
#if defined(__x86_64__)
    _mm_setcsr(before);
#endif
}

int ft_attend(const void *q, void *out, const ft_attend_plan *plan, const ft_batch *batch,
              const ft_kv *kv, const ft_heads *heads, int64_t layer, const ft_rule *rule) {
    attend_job job = {q, out, plan, batch, kv, heads, layer, rule, 0};
    int64_t tasks = plan->num_tasks * heads->num_kv_heads * plan->num_shares;
    ft_parallel(attend_piece, &job, tasks, plan->grain);
    return job.failed ? -1 : 0;
}

FT_EXPORT int ft_attention(const void *q, void *out, const ft_batch *batch, const ft_kv *kv,
                           const ft_heads *heads, int64_t layer, const ft_rule *rule) {
    ft_attend_plan plan;
    ft_part part = {batch, kv, heads};
    if (ft_plan_attention(&part, 1, &plan)) return -1;
    return ft_attend(q, out, &plan, batch, kv, heads, layer, rule);
}
