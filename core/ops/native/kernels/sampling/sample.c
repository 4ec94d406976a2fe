/* The choice of tokens: the best logit, or the Gumbel argmax of the tokens that the cuts keep.
 *
 * The noise of a token needs two logarithms, but few tokens can win. The leading bits of a token's
 * hash bound its noise from above; only if it could beat the best so far is its noise computed.
 */
#include "sample.h"
#include "row.h"

#include <stdatomic.h>

#define GOLDEN 0x9e3779b97f4a7c15u
#define ODD_1 0xbf58476d1ce4e5b9u
#define ODD_2 0x94d049bb133111ebu
#define LN2 0.69314718f

enum { FT_MOST = 8 }; /* greatest number of best tokens of a row */
enum { PIECE = 16384 }; /* logits that make a task worth another thread */

/* A walk down a draft tree. It chooses a token, goes to the node that has this token, chooses the
 * token after that node, and so on. It ends where no child has the chosen token. The first token
 * follows the request's tokens and `tail`, which is empty if there are nodes. The logits for the
 * token after node n are n + 1 rows after the logits for the first token. */
struct ft_walk {
    const ft_sampling *sampling;
    int64_t first;     /* row of the first token, in the logits and in the output */
    int64_t num_nodes; /* the walk has num_nodes + 1 rows; chosen tokens fill the first ones */
    const int64_t *tokens; /* tokens of the request */
    int64_t num_tokens;
    int64_t draft;   /* index in `drafts` of the first node's id, or of the tail */
    int64_t parents; /* index in `drafts` of the first node's parent; -1: nodes are a chain */
    int64_t tail_len;
    const uint8_t *mask;
};

typedef struct {
    const float *logits; /* [rows, vocab] */
    int64_t vocab;
    const int64_t *hashes; /* [vocab] the part of the noise that depends on the id alone */
    const ft_walk *walks;
    const int64_t *drafts;
    int64_t *tokens;     /* [rows] out: a token or FT_NOT_FINITE, FT_ALL_BANNED */
    int64_t *num_results; /* [walks] out: number of tokens written; an error counts as one */
    int64_t num_best;    /* 0: choose one token per row; else best tokens of each walk's only row */
    float *scores;       /* [rows, num_best] out; `tokens` then has this shape, too */
    atomic_int failed;   /* set when a thread has no memory */
} choose_job;

typedef struct {
    float *values; /* [vocab] an edited row */
    int32_t *counts; /* [vocab] */
    ft_cut_space cut;
} row_space;

/* -- the best --------------------------------------------------------------------------------- */

/* Return the greatest value of a row, or NaN if the row has a NaN. Values are compared as integers:
 * an integer maximum may be taken in any order, so the compiler can vectorise it. */
static float find_top(const float *values, int64_t vocab) {
    int32_t most = INT32_MIN, widest = 0;
    for (int64_t i = 0; i < vocab; i++) {
        int32_t bits = (int32_t)ft_float_bits(values[i]);
        int32_t width = bits & 0x7fffffff, rank = bits ^ ((bits >> 31) & 0x7fffffff);
        most = rank > most ? rank : most;
        widest = width > widest ? width : widest;
    }
    if (widest > 0x7f800000) return NAN;
    int32_t bits = most ^ ((most >> 31) & 0x7fffffff);
    float top;
    memcpy(&top, &bits, 4);
    return top;
}

static int64_t find_id(const ft_row *row) {
    int64_t at = 0;
    for (; at + FT_BLOCK <= row->vocab; at += FT_BLOCK) {
        int found = 0;
        for (int i = 0; i < FT_BLOCK; i++) found |= row->values[at + i] == row->top;
        if (found) break;
    }
    while (row->values[at] != row->top) at++;
    return at;
}

/* -- the Gumbel argmax ------------------------------------------------------------------------ */

static uint64_t mix(uint64_t word) {
    word = (word ^ (word >> 30)) * ODD_1;
    word = (word ^ (word >> 27)) * ODD_2;
    return word ^ (word >> 31);
}

/* The key of a position's noise; see `stream_keys` of core/sampling/gumbel.py. */
static uint64_t noise_key(uint64_t noise_start, int64_t position) {
    return mix(noise_start + GOLDEN * (uint64_t)(position + 1));
}

FT_INLINE uint64_t noise_word(int64_t hash, uint64_t key) {
    uint64_t word = ((uint64_t)hash ^ key) * ODD_1;
    return (word ^ (word >> 32)) * ODD_2;
}

/* -log(-log(u)), where the magnitude of the signed word is 1 - u in units of 2**-63. */
static float gumbel(uint64_t word) {
    float rest = fabsf((float)(int64_t)word) * 0x1p-63f;
    rest = fminf(fmaxf(rest, 0x1p-63f), 1.0f - 0x1p-24f);
    return (float)-log(-log1p(-(double)rest));
}

/* Upper bounds of noise + `scaled`, minus BOUND_OFFSET, up to rounding, which SLACK covers. They
 * use -log(-log(u)) <= -log(1 - u). The leading 32 bits of 1 - u, rounded down, become a float,
 * whose bit pattern is a linear interpolation of its base-2 logarithm, and so never too great. */
FT_INLINE void bound_block(const float *scaled, const int64_t *hashes, uint64_t key, int64_t count,
                           float *bounds) {
    int32_t leading[FT_BLOCK];
    for (int64_t i = 0; i < count; i++)
        leading[i] = (int32_t)(noise_word(hashes[i], key) >> 32);
    for (int64_t i = 0; i < count; i++) {
        float magnitude = (float)(leading[i] ^ (leading[i] >> 31));
        bounds[i] = scaled[i] - (float)(int32_t)ft_float_bits(magnitude) * (LN2 * 0x1p-23f);
    }
}

#define BOUND_OFFSET (LN2 * 158.0f) /* 127, the exponent bias, + 31 for units of 2**-31 */
#define SLACK 1e-3f

/* The best tokens so far, usually one: by falling score, among equal scores by rising id. */
typedef struct {
    uint64_t key;
    const int64_t *hashes;
    int64_t width;           /* number of tokens kept */
    float scores[FT_MOST];   /* -inf for a missing token */
    int64_t ids[FT_MOST];
} gumbel_argmax;

/* The least score that is kept. */
FT_INLINE float least_kept(const gumbel_argmax *argmax) { return argmax->scores[argmax->width - 1]; }

static void keep(gumbel_argmax *argmax, float score, int64_t id) {
    int64_t at = argmax->width - 1;
    float *scores = argmax->scores;
    if (score < scores[at] || (score == scores[at] && id >= argmax->ids[at])) return;
    for (; at > 0 && (score > scores[at - 1] || (score == scores[at - 1] && id < argmax->ids[at - 1]));
         at--) {
        scores[at] = scores[at - 1];
        argmax->ids[at] = argmax->ids[at - 1];
    }
    scores[at] = score;
    argmax->ids[at] = id;
}

static gumbel_argmax begin_argmax(uint64_t key, const int64_t *hashes, int64_t width,
                                  int64_t vocab) {
    gumbel_argmax argmax = {.key = key, .hashes = hashes, .width = width};
    for (int64_t i = 0; i < width; i++) {
        argmax.scores[i] = -INFINITY;
        argmax.ids[i] = vocab;
    }
    return argmax;
}

static void enter(gumbel_argmax *argmax, const ft_row *row, int64_t id) {
    float scaled = (row->values[id] - row->top) / row->temperature;
    keep(argmax, gumbel(noise_word(argmax->hashes[id], argmax->key)) + scaled, id);
}

/* Enter the tokens of a block. `scaled` [FT_BLOCK] may be off by rounding; -inf leaves a token
 * out. */
static void enter_block(gumbel_argmax *argmax, const ft_row *row, int64_t at, const float *scaled) {
    float bounds[FT_BLOCK], needed = least_kept(argmax) - BOUND_OFFSET - SLACK;
    int64_t count = ft_min(FT_BLOCK, row->vocab - at);
    if (count == FT_BLOCK)
        bound_block(scaled, argmax->hashes + at, argmax->key, FT_BLOCK, bounds);
    else
        bound_block(scaled, argmax->hashes + at, argmax->key, count, bounds);
    for (int64_t i = count; i < FT_BLOCK; i++) bounds[i] = -INFINITY;
    int any = 0;
    for (int i = 0; i < FT_BLOCK; i++) any |= bounds[i] >= needed;
    if (!any) return;
    for (int64_t i = 0; i < count; i++)
        if (bounds[i] >= needed && scaled[i] > -INFINITY) {
            enter(argmax, row, at + i);
            needed = least_kept(argmax) - BOUND_OFFSET - SLACK;
        }
}

static void enter_all(gumbel_argmax *argmax, const ft_row *row) {
    float scaled[FT_BLOCK], factor = 1.0f / row->temperature;
    /* Entering the best logit first leaves few tokens that could beat it. With width > 1, the loop
     * below would enter it a second time. */
    if (argmax->width == 1) enter(argmax, row, find_id(row));
    for (int64_t at = 0; at < row->vocab; at += FT_BLOCK) {
        const float *values = row->values + at;
        int64_t count = ft_min(FT_BLOCK, row->vocab - at);
        if (count == FT_BLOCK)
            for (int i = 0; i < FT_BLOCK; i++) scaled[i] = (values[i] - row->top) * factor;
        else
            for (int64_t i = 0; i < count; i++) scaled[i] = (values[i] - row->top) * factor;
        enter_block(argmax, row, at, scaled);
    }
}

/* Set the tokens that the cuts remove to -inf; `*ties` tokens with the last key may still stay. */
FT_INLINE void drop_others(float *scaled, const uint32_t *keys, uint32_t last, int64_t *ties) {
    int num_ties = 0;
    for (int i = 0; i < FT_BLOCK; i++) {
        num_ties += keys[i] == last;
        scaled[i] = keys[i] <= last ? scaled[i] : -INFINITY;
    }
    if (num_ties <= *ties) {
        *ties -= num_ties;
        return;
    }
    for (int i = 0; i < FT_BLOCK; i++)
        if (keys[i] == last && (*ties)-- <= 0) scaled[i] = -INFINITY;
}

static void enter_kept(gumbel_argmax *argmax, const ft_row *row, ft_kept kept) {
    float scaled[FT_BLOCK];
    uint32_t keys[FT_BLOCK];
    int64_t ties = kept.ties;
    for (int64_t at = 0; at < row->vocab; at += FT_BLOCK) {
        ft_scaled_block(row, at, scaled);
        ft_keys_block(scaled, keys);
        if (!ft_any_within(keys, kept.key)) continue;
        drop_others(scaled, keys, kept.key, &ties);
        enter_block(argmax, row, at, scaled);
    }
}

/* -- a row ------------------------------------------------------------------------------------ */

/* Enter the best logits of a row, without noise. */
static void enter_greedy(gumbel_argmax *argmax, const ft_row *row) {
    for (int64_t at = 0; at < row->vocab; at += FT_BLOCK) {
        int64_t stop = ft_min(row->vocab, at + FT_BLOCK);
        float top = row->values[at];
        for (int64_t i = at + 1; i < stop; i++) top = fmaxf(top, row->values[i]);
        if (top <= least_kept(argmax)) continue;
        for (int64_t i = at; i < stop; i++) keep(argmax, row->values[i], i);
    }
}

/* Return the `width` best tokens of a row, the best first. */
static gumbel_argmax find_argmax(const choose_job *job, ft_row *row, const ft_sampling *sampling,
                                 int64_t position, const row_space *space, int64_t width) {
    uint64_t key = noise_key(sampling->noise_start, position);
    gumbel_argmax argmax = begin_argmax(key, job->hashes, width, row->vocab);
    if (sampling->kind == FT_GREEDY) {
        enter_greedy(&argmax, row);
        return argmax;
    }
    row->temperature = (float)sampling->temperature;
    if (sampling->kind > FT_SAMPLED)
        enter_kept(&argmax, row, ft_cut(row, sampling, &space->cut));
    else
        enter_all(&argmax, row);
    return argmax;
}

static int64_t draw(const choose_job *job, ft_row *row, const ft_sampling *sampling, int64_t position,
                    const row_space *space) {
    if (sampling->kind == FT_GREEDY) return find_id(row);
    return find_argmax(job, row, sampling, position, space, 1).ids[0];
}

/* Check and edit logits to the row `found`. Returns 0, or an error in place of a token. */
static int64_t process(const choose_job *job, const float *logits, const ft_sampling *sampling,
                       const ft_path *path, const row_space *space, ft_row *found) {
    ft_row row = {logits, job->vocab, find_top(logits, job->vocab), 1.0f};
    if (!isfinite(row.top)) return FT_NOT_FINITE;
    if (ft_is_edited(sampling, path)) {
        memcpy(space->values, logits, (size_t)job->vocab * sizeof *logits);
        ft_edit(space->values, job->vocab, sampling, path, space->counts);
        row.values = space->values;
        row.top = find_top(space->values, job->vocab);
        if (!isfinite(row.top)) return FT_ALL_BANNED;
    }
    *found = row;
    return 0;
}

static int64_t choose(const choose_job *job, const float *logits, const ft_sampling *sampling,
                      const ft_path *path, const row_space *space) {
    ft_row row;
    int64_t error = process(job, logits, sampling, path, space, &row);
    if (error) return error;
    return draw(job, &row, sampling, ft_path_len(path) - sampling->prompt_len, space);
}

/* The child of `node` that has this token, or -1. */
static int64_t find_child(const choose_job *job, const ft_walk *walk, int64_t node, int64_t token) {
    const int64_t *draft = job->drafts + walk->draft;
    int64_t next = node + 1;
    if (token < 0) return -1;
    if (walk->parents < 0) return next < walk->num_nodes && draft[next] == token ? next : -1;
    const int64_t *parents = job->drafts + walk->parents;
    for (; next < walk->num_nodes; next++)
        if (parents[next] == node && draft[next] == token) return next;
    return -1;
}

static void walk_draft(choose_job *job, int64_t index, const row_space *space) {
    const ft_walk *walk = &job->walks[index];
    int64_t *tokens = job->tokens + walk->first, node = -1, count = 0;
    /* With a draft, the tail is the tokens that the walk has chosen so far. */
    const int64_t *tail = walk->num_nodes ? tokens : job->drafts + walk->draft;
    ft_path path = {walk->tokens, walk->num_tokens, tail, walk->tail_len, walk->mask};
    do {
        const float *logits = job->logits + (walk->first + 1 + node) * job->vocab;
        path.tail_len = walk->tail_len + count;
        tokens[count] = choose(job, logits, walk->sampling, &path, space);
        node = find_child(job, walk, node, tokens[count++]);
    } while (node >= 0);
    job->num_results[index] = count;
}

/* Find the best tokens of a walk's only row; their number goes to `num_results`. */
static void find_best(choose_job *job, int64_t index, const row_space *space) {
    const ft_walk *walk = &job->walks[index];
    int64_t *tokens = job->tokens + walk->first * job->num_best, count = 0;
    float *scores = job->scores + walk->first * job->num_best;
    const int64_t *tail = job->drafts + walk->draft;
    ft_path path = {walk->tokens, walk->num_tokens, tail, walk->tail_len, walk->mask};
    ft_row row;
    int64_t position = ft_path_len(&path) - walk->sampling->prompt_len;
    const float *logits = job->logits + walk->first * job->vocab;
    int64_t error = process(job, logits, walk->sampling, &path, space, &row);
    if (error) {
        tokens[0] = error;
        job->num_results[index] = 1;
        return;
    }
    gumbel_argmax found = find_argmax(job, &row, walk->sampling, position, space, job->num_best);
    for (; count < job->num_best && isfinite(found.scores[count]); count++) {
        tokens[count] = found.ids[count];
        scores[count] = found.scores[count];
    }
    job->num_results[index] = count;
}

static int find_space(int64_t vocab, row_space *space) {
    int64_t width = ft_ceil_div(vocab, FT_BLOCK) * FT_BLOCK + FT_BLOCK, bytes = width * 4;
    char *memory = ft_scratch(FT_SCRATCH_SAMPLE, (size_t)(4 * bytes + FT_BINS * 8));
    if (!memory) return -1;
    space->values = (float *)memory;
    space->counts = (int32_t *)(memory + bytes);
    space->cut.keys = (uint32_t *)(memory + 2 * bytes);
    space->cut.masses = (float *)(memory + 3 * bytes);
    space->cut.bins = (int64_t *)(memory + 4 * bytes);
    return 0;
}

static void choose_piece(void *context, int64_t begin, int64_t end) {
    choose_job *job = context;
    row_space space;
    if (find_space(job->vocab, &space)) {
        atomic_store(&job->failed, 1);
        return;
    }
    for (int64_t index = begin; index < end; index++) {
        if (job->num_best)
            find_best(job, index, &space);
        else
            walk_draft(job, index, &space);
    }
}

static int run(choose_job *job, int64_t num_walks) {
    ft_parallel(choose_piece, job, num_walks, ft_max(1, PIECE / ft_max(job->vocab, 1)));
    return atomic_load(&job->failed) ? -1 : 0;
}

/* Choose the tokens of all walks. Returns 0, or -1 when there is no memory. */
FT_EXPORT int ft_choose(const float *logits, int64_t vocab, const int64_t *hashes,
                        const ft_walk *walks, int64_t num_walks, const int64_t *drafts,
                        int64_t *tokens, int64_t *num_results) {
    choose_job job = {logits, vocab, hashes, walks, drafts, tokens, num_results, 0, NULL, 0};
    return run(&job, num_walks);
}

int ft_best(const float *logits, int64_t vocab, const int64_t *hashes,
            const ft_walk *walks, int64_t num_walks, const int64_t *drafts, int64_t num_best,
            int64_t *tokens, float *scores, int64_t *counts) {
    choose_job job = {logits, vocab, hashes, walks, drafts, tokens, counts, num_best, scores, 0};
    return run(&job, num_walks);
}
