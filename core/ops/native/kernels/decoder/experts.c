/* Experts: rows are sorted by expert, and each expert computes its rows; tasks are panels of the
 * experts' weights. */
#include "experts.h"
#include "common/vector.h"

enum { PIECE = 64 };      /* rows of a routing task */
enum { ON_OTHER_RANK = -1 }; /* index of a row whose expert is on another rank */

/* -- routing ---------------------------------------------------------------------------------- */

/* The inputs and outputs of a routing job. */
typedef struct {
    const ft_experts *experts;
    const float *logits; /* [rows, num_experts] */
    float *weights;      /* [rows, top_k] */
    int32_t *chosen;     /* [rows, top_k], best first */
} routing_job;

static float exp_one(float x) {
    float at[FT_WIDTH];
    v_store(at, v_exp(v_set(x)));
    return at[0];
}

static float sigmoid_one(float x) { return 1.0f / (exp_one(-x) + 1.0f); }

static void softmax(const float *logits, float *out, int64_t count) {
    float top = logits[0], total = 0.0f;
    for (int64_t i = 1; i < count; i++) top = logits[i] > top ? logits[i] : top;
    for (int64_t i = 0; i < count; i += FT_WIDTH)
        v_store_n(out + i, v_exp(v_sub(v_load_n(logits + i, count - i), v_set(top))), count - i);
    for (int64_t i = 0; i < count; i++) total += out[i];
    for (int64_t i = 0; i < count; i++) out[i] /= total;
}

/* Index of the greatest of `count` values that is not taken, the first of equal ones. If the first
 * value that is not taken is NaN, its index. */
static int64_t best_of(const float *values, const uint8_t *taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

/* Mark the experts of all groups but the best as taken, so that none of them is chosen. */
static void leave_groups(const ft_routing *routing, const float *choice, uint8_t *taken) {
    float judged[FT_MAX_EXPERTS];
    uint8_t kept[FT_MAX_EXPERTS] = {0};
    int64_t size = routing->num_experts / routing->num_groups;
    for (int64_t group = 0; group < routing->num_groups; group++) {
        const float *of = choice + group * size;
        uint8_t seen[FT_MAX_EXPERTS] = {0};
        int64_t best = best_of(of, seen, size);
        judged[group] = of[best];
        if (!routing->groups_by_two || size < 2) continue;
        seen[best] = 1;
        judged[group] += of[best_of(of, seen, size)];
    }
    for (int64_t i = 0; i < routing->kept_groups; i++)
        kept[best_of(judged, kept, routing->num_groups)] = 1;
    for (int64_t i = 0; i < routing->num_experts; i++) taken[i] = !kept[i / size];
}

static void route_row(const routing_job *job, int64_t row) {
    const ft_routing *routing = &job->experts->routing;
    const float *bias = job->experts->choice_bias;
    int64_t count = routing->num_experts, top_k = routing->top_k;
    const float *logits = job->logits + row * count;
    float *weights = job->weights + row * top_k, total = 0.0f;
    int32_t *chosen = job->chosen + row * top_k;
    float scores[FT_MAX_EXPERTS], choice[FT_MAX_EXPERTS];
    uint8_t taken[FT_MAX_EXPERTS] = {0};
    if (routing->of_chosen) memcpy(scores, logits, (size_t)count * 4);
    else if (routing->is_sigmoid) for (int64_t i = 0; i < count; i++) scores[i] = sigmoid_one(logits[i]);
    else softmax(logits, scores, count);
    for (int64_t i = 0; i < count; i++) choice[i] = scores[i] + (bias ? bias[i] : 0.0f);
    if (routing->num_groups > 1) leave_groups(routing, choice, taken);
    for (int64_t k = 0; k < top_k; k++) {
        chosen[k] = (int32_t)best_of(choice, taken, count);
        taken[chosen[k]] = 1;
        weights[k] = scores[chosen[k]];
    }
    if (routing->of_chosen && routing->is_sigmoid)
        for (int64_t k = 0; k < top_k; k++) weights[k] = sigmoid_one(weights[k]);
    else if (routing->of_chosen) softmax(weights, weights, top_k);
    if (routing->renorms) {
        for (int64_t k = 0; k < top_k; k++) total += weights[k];
        for (int64_t k = 0; k < top_k; k++) weights[k] /= total + routing->least;
    }
    for (int64_t k = 0; k < top_k; k++) weights[k] *= routing->factor;
    const float *factors = job->experts->factors;
    for (int64_t k = 0; factors && k < top_k; k++) weights[k] *= factors[chosen[k]];
}

static void route_piece(void *context, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) route_row(context, row);
}

/* -- sorting and adding up -------------------------------------------------------------------- */

/* The working memory of a call. */
typedef struct {
    float *logits, *weights, *gate;
    int32_t *chosen;
    int64_t *firsts;    /* [num_experts + 1] where each expert's rows begin */
    int64_t *indices;    /* [rows, top_k] index in x and y of each row and expert */
    char *x, *y;        /* [rows * top_k, hidden], sorted by expert */
    char *wide, *narrow; /* sorted by expert: inputs and outputs of the activation */
    char *shared;       /* [rows, hidden] */
} experts_space;

typedef struct {
    const ft_experts *experts;
    experts_space space;
    const char *x;
    char *out;
    int64_t rows, hidden;
    int dtype;
} experts_job;

static void sort_rows(const experts_job *job) {
    const ft_routing *routing = &job->experts->routing;
    const experts_space *space = &job->space;
    const ft_linear_weight *const *here = job->experts->first;
    const int32_t *chosen = space->chosen;
    int64_t count = job->rows * routing->top_k, *firsts = space->firsts;
    memset(firsts, 0, (size_t)(routing->num_experts + 1) * sizeof *firsts);
    for (int64_t i = 0; i < count; i++) firsts[chosen[i] + 1] += here[chosen[i]] != NULL;
    for (int64_t i = 0; i < routing->num_experts; i++) firsts[i + 1] += firsts[i];
    for (int64_t i = 0; i < count; i++)
        space->indices[i] = here[chosen[i]] ? firsts[chosen[i]]++ : ON_OTHER_RANK;
    for (int64_t i = routing->num_experts; i > 0; i--) firsts[i] = firsts[i - 1];
    firsts[0] = 0;
}

/* Copy each row to the memory of each of its experts. */
static void scatter_piece(void *context, int64_t begin, int64_t end) {
    const experts_job *job = context;
    int64_t top_k = job->experts->routing.top_k;
    int64_t bytes = job->hidden * (job->dtype == FT_BFLOAT16 ? 2 : 4);
    for (int64_t i = begin * top_k; i < end * top_k; i++)
        if (job->space.indices[i] != ON_OTHER_RANK)
            memcpy(job->space.x + job->space.indices[i] * bytes, job->x + i / top_k * bytes,
                   (size_t)bytes);
}

FT_INLINE void add_up_row(const experts_job *job, int64_t row, int dtype) {
    const experts_space *space = &job->space;
    int64_t top_k = job->experts->routing.top_k, width = job->hidden;
    const int64_t *indices = space->indices + row * top_k;
    const float *weights = space->weights + row * top_k;
    int64_t bytes = width * (dtype == FT_BFLOAT16 ? 2 : 4);
    int has_shared = job->experts->shared.first != NULL;
    ft_vec gate = v_set(job->experts->shared_gate ? sigmoid_one(space->gate[row]) : 1.0f);
    for (int64_t i = 0; i < width; i += FT_WIDTH) {
        ft_vec sum = v_set(0.0f);
        for (int64_t k = 0; k < top_k; k++) {
            if (indices[k] == ON_OTHER_RANK) continue;
            ft_vec value = v_get(space->y + indices[k] * bytes, i, width - i, dtype);
            sum = v_add(sum, v_mul(value, v_set(weights[k])));
        }
        if (has_shared) {
            ft_vec value = v_get(space->shared + row * bytes, i, width - i, dtype);
            sum = v_add(sum, v_mul(value, gate));
        }
        v_put(job->out + row * bytes, i, sum, width - i, dtype);
    }
}

static void add_up_piece(void *context, int64_t begin, int64_t end) {
    const experts_job *job = context;
    for (int64_t row = begin; row < end; row++)
        if (job->dtype == FT_BFLOAT16)
            add_up_row(job, row, FT_BFLOAT16);
        else
            add_up_row(job, row, FT_FLOAT32);
}

/* -- the call --------------------------------------------------------------------------------- */

static void *take(char **memory, int64_t bytes) {
    void *taken = *memory;
    *memory += ft_ceil_div(bytes, 64) * 64;
    return taken;
}

/* Number of the first expert on this rank; all experts have the same shapes. */
static int64_t first_local(const ft_experts *experts) {
    int64_t number = 0;
    while (!experts->first[number]) number++;
    return number;
}

/* Place the arrays of a call in `memory`. Returns their size in bytes, also if `memory` is NULL. */
static int64_t lay_out(const ft_experts *experts, int64_t rows, int64_t hidden, int64_t item,
                       char *memory, experts_space *space) {
    const ft_routing *routing = &experts->routing;
    const ft_mlp *shared = &experts->shared;
    int64_t one = first_local(experts), pairs = rows * routing->top_k;
    int64_t wide = experts->first[one]->out_features;
    int64_t narrow = experts->second[one]->in_features, wider = pairs * wide, narrower = pairs * narrow;
    if (shared->first) {
        wider = ft_max(wider, rows * shared->first->out_features);
        narrower = ft_max(narrower, rows * shared->second->in_features);
    }
    char *at = memory;
    space->logits = take(&at, rows * routing->num_experts * 4);
    space->weights = take(&at, pairs * 4);
    space->gate = take(&at, rows * 4);
    space->chosen = take(&at, pairs * 4);
    space->firsts = take(&at, (routing->num_experts + 1) * 8);
    space->indices = take(&at, pairs * 8);
    space->x = take(&at, pairs * hidden * item);
    space->y = take(&at, pairs * hidden * item);
    space->wide = take(&at, wider * item);
    space->narrow = take(&at, narrower * item);
    space->shared = take(&at, shared->first ? rows * hidden * item : 0);
    return at - memory;
}

static int run_shared(const experts_job *job) {
    const ft_experts *experts = job->experts;
    const experts_space *space = &job->space;
    const ft_mlp *mlp = &experts->shared;
    int dtype = job->dtype;
    if (!mlp->first) return 0;
    if (ft_linear(mlp->first, job->x, dtype, job->rows, space->wide, dtype)) return -1;
    ft_activate_rows(space->wide, space->narrow, job->rows, mlp->second->in_features,
                     &mlp->activation, dtype);
    if (ft_linear(mlp->second, space->narrow, dtype, job->rows, space->shared, dtype)) return -1;
    if (!experts->shared_gate) return 0;
    return ft_linear(experts->shared_gate, job->x, dtype, job->rows, space->gate, FT_FLOAT32);
}

static int run_chosen(experts_job *job) {
    const ft_experts *experts = job->experts;
    const experts_space *space = &job->space;
    int64_t count = experts->routing.num_experts;
    int dtype = job->dtype;
    sort_rows(job);
    int64_t pairs = space->firsts[count];
    if (!pairs) return 0;
    ft_parallel(scatter_piece, job, job->rows, PIECE);
    if (ft_linear_many(experts->first, space->firsts, count, space->x, dtype, space->wide, dtype))
        return -1;
    ft_activate_rows(space->wide, space->narrow, pairs,
                     experts->second[first_local(experts)]->in_features,
                     &experts->activation, dtype);
    return ft_linear_many(experts->second, space->firsts, count, space->narrow, dtype, space->y,
                          dtype);
}

int ft_run_experts(const ft_experts *experts, const void *routed_by, const void *x, void *out,
                   int64_t rows, int dtype) {
    if (rows <= 0) return 0;
    int64_t hidden = experts->router->in_features, item = dtype == FT_BFLOAT16 ? 2 : 4;
    experts_job job = {.experts = experts, .x = x, .out = out, .rows = rows, .hidden = hidden,
                       .dtype = dtype};
    int64_t bytes = lay_out(experts, rows, hidden, item, NULL, &job.space);
    char *memory = ft_scratch(FT_SCRATCH_EXPERTS, (size_t)bytes);
    if (!memory) return -1;
    lay_out(experts, rows, hidden, item, memory, &job.space);
    if (ft_linear(experts->router, routed_by, dtype, rows, job.space.logits, FT_FLOAT32)) return -1;
    routing_job routing = {experts, job.space.logits, job.space.weights, job.space.chosen};
    ft_parallel(route_piece, &routing, rows, PIECE);
    if (run_chosen(&job) || run_shared(&job)) return -1;
    ft_parallel(add_up_piece, &job, rows, ft_max(1, 8192 / hidden));
    return 0;
}

FT_EXPORT int ft_mixture(const ft_experts *experts, const void *routed_by, const void *x, void *out,
                         int64_t rows, int dtype) {
    return ft_run_experts(experts, routed_by, x, out, rows, dtype);
}
