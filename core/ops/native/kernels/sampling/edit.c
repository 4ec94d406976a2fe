/* Edits of a row of logits before the temperature, in the order of
 * core/sampling/logits_processors.py. */
#include "row.h"

int ft_is_edited(const ft_sampling *sampling, const ft_path *path) {
    return ft_path_len(path) - sampling->prompt_len < sampling->edited_until;
}

/* Count each token of the path from `start` on in `counts`; ids outside the vocabulary are left
 * out. The entries of other tokens keep arbitrary values. */
static void count_path(const ft_path *path, int64_t start, int64_t vocab, int32_t *counts) {
    int64_t len = ft_path_len(path);
    for (int64_t i = start; i < len; i++) {
        uint64_t id = (uint64_t)ft_path_at(path, i);
        if (id < (uint64_t)vocab) counts[id] = 0;
    }
    for (int64_t i = start; i < len; i++) {
        uint64_t id = (uint64_t)ft_path_at(path, i);
        if (id < (uint64_t)vocab) counts[id]++;
    }
}

/* Return the count of the i-th token of the path and reset it, so that a token is edited once. */
static int32_t take_count(const ft_path *path, int64_t i, int64_t vocab, int32_t *counts) {
    uint64_t id = (uint64_t)ft_path_at(path, i);
    if (id >= (uint64_t)vocab) return 0;
    int32_t count = counts[id];
    counts[id] = 0;
    return count;
}

static void repeat_penalty(float *values, int64_t vocab, float factor, const ft_path *path,
                           int32_t *counts) {
    count_path(path, 0, vocab, counts);
    for (int64_t i = 0; i < ft_path_len(path); i++)
        if (take_count(path, i, vocab, counts)) {
            float *value = &values[ft_path_at(path, i)];
            *value = *value > 0.0f ? *value / factor : *value * factor;
        }
}

static void output_penalty(float *values, int64_t vocab, const ft_sampling *sampling,
                           const ft_path *path, int32_t *counts) {
    count_path(path, sampling->prompt_len, vocab, counts);
    for (int64_t i = sampling->prompt_len; i < ft_path_len(path); i++) {
        int32_t count = take_count(path, i, vocab, counts);
        if (count) {
            float penalty = (float)count * sampling->frequency_penalty;
            values[ft_path_at(path, i)] -= penalty + sampling->presence_penalty;
        }
    }
}

static void ban(float *values, ft_ids ids) {
    for (int64_t i = 0; i < ids.count; i++) values[ids.at[i]] = -INFINITY;
}

static void ban_between(float *values, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) values[i] = -INFINITY;
}

static void ban_others(float *values, int64_t vocab, ft_ids allowed) {
    int64_t next = 0;
    for (int64_t i = 0; i < allowed.count; i++) {
        ban_between(values, next, allowed.at[i]);
        next = allowed.at[i] + 1;
    }
    ban_between(values, next, vocab);
}

/* Whether the path ends with all of a word but its last token. */
static int word_begins(const ft_path *path, const int64_t *word, int64_t len) {
    int64_t start = ft_path_len(path) - (len - 1);
    if (start < 0) return 0;
    for (int64_t i = 0; i < len - 1; i++)
        if (ft_path_at(path, start + i) != word[i]) return 0;
    return 1;
}

static void ban_words(float *values, const ft_sampling *sampling, const ft_path *path) {
    const int64_t *word = sampling->word_ids.at;
    for (int64_t i = 0; i < sampling->word_lens.count; i++) {
        int64_t len = sampling->word_lens.at[i];
        if (word_begins(path, word, len)) values[word[len - 1]] = -INFINITY;
        word += len;
    }
}

static void ban_masked(float *values, int64_t vocab, const uint8_t *mask) {
    for (int64_t i = 0; i < vocab; i++) values[i] = mask[i] ? values[i] : -INFINITY;
}

void ft_edit(float *values, int64_t vocab, const ft_sampling *sampling, const ft_path *path,
             int32_t *counts) {
    for (int64_t i = 0; i < sampling->biased.count; i++)
        values[sampling->biased.at[i]] += sampling->bias[i];
    if (sampling->repetition_penalty != 1.0f)
        repeat_penalty(values, vocab, sampling->repetition_penalty, path, counts);
    if (sampling->frequency_penalty != 0.0f || sampling->presence_penalty != 0.0f)
        output_penalty(values, vocab, sampling, path, counts);
    if (sampling->allowed.at) ban_others(values, vocab, sampling->allowed);
    ban_words(values, sampling, path);
    if (path->mask)
        ban_masked(values, vocab, path->mask);
    else if (ft_path_len(path) - sampling->prompt_len < sampling->min_tokens)
        ban(values, sampling->stops);
}
