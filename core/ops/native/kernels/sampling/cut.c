/* top-k, min-p and top-p without sorting: a radix select finds the worst key that stays.
 *
 * Every token weighs 1 (top-k) or its probability mass (top-p). A histogram of the keys' leading
 * bits finds the bin in which the weight reaches its limit, and only the tokens of that bin go on
 * to the next bits. Tokens that are certainly beyond the limit, nearly all of a row, are left out
 * first.
 */
#include "row.h"
#include "common/simd.h"

enum { FIRST_SHIFT = 20, DIGIT = 10 };

/* exp(value) * unit for values <= 0, where `unit` is a power of two; 0 for values below -87.
 * Relative error below 2e-7, exact at 0. The polynomial is a minimax fit on [-ln2 / 2, ln2 / 2]. */
static void masses_block(const float *restrict values, float unit, float *restrict out) {
    for (int i = 0; i < FT_BLOCK; i++) {
        float x = values[i] < -87.0f ? -87.0f : values[i];
        float power = fmaf(x, 1.44269504f, 12582912.0f); /* adding 1.5 * 2**23 rounds */
        uint32_t shift = ft_float_bits(power) << 23;     /* the integer, in the exponent's bits */
        power -= 12582912.0f;
        float rest = fmaf(power, -0.693359375f, x); /* ln 2 in two parts */
        rest = fmaf(power, 2.12194440e-4f, rest);
        float sum = fmaf(0x1.0fa7d8p-7f, rest, 0x1.573adp-5f);
        sum = fmaf(sum, rest, 0x1.555a6ep-3f);
        sum = fmaf(sum, rest, 0x1.fffdc4p-2f);
        sum = fmaf(sum, rest, 0x1.fffff6p-1f);
        sum = fmaf(sum, rest, 1.0f);
        uint32_t bits = ft_float_bits(sum) + shift;
        float result;
        memcpy(&result, &bits, 4);
        out[i] = values[i] < -87.0f ? 0.0f : result * unit;
    }
}

/* Masses are summed as integers; this unit keeps the sum of a whole row below 2**62. */
static float mass_unit(int64_t vocab) {
    int bits = 64 - __builtin_clzll((uint64_t)vocab);
    return ldexpf(1.0f, 62 - bits);
}

static int64_t mass_of(const ft_row *row, uint32_t key) {
    float scaled[FT_BLOCK] = {0}, masses[FT_BLOCK];
    memcpy(scaled, &key, 4);
    scaled[0] = -scaled[0];
    masses_block(scaled, mass_unit(row->vocab), masses);
    return (int64_t)masses[0];
}

/* Mass of all keys up to `most`. */
static int64_t total_mass(const ft_row *row, uint32_t most) {
    float scaled[FT_BLOCK], masses[FT_BLOCK], unit = mass_unit(row->vocab);
    uint32_t keys[FT_BLOCK];
    int64_t total = 0;
    for (int64_t at = 0; at < row->vocab; at += FT_BLOCK) {
        ft_scaled_block(row, at, scaled);
        ft_keys_block(scaled, keys);
        if (!ft_any_within(keys, most)) continue;
        masses_block(scaled, unit, masses);
        for (int i = 0; i < FT_BLOCK; i++) total += (int64_t)(keys[i] <= most ? masses[i] : 0.0f);
    }
    return total;
}

/* Keep the keys from `least` to `most`, and their masses unless NULL, in place and in order.
 * Returns the number of kept keys. */
FT_INLINE int64_t narrow(uint32_t *keys, float *masses, int64_t count, uint32_t least,
                         uint32_t most) {
    int64_t kept = 0, i = 0;
#if defined(FT_AVX512)
    __m512i low = _mm512_set1_epi32((int)least), span = _mm512_set1_epi32((int)(most - least));
    for (; i + 16 <= count; i += 16) {
        __m512i some = _mm512_loadu_si512(keys + i);
        __mmask16 fits = _mm512_cmple_epu32_mask(_mm512_sub_epi32(some, low), span);
        /* Storing all sixteen is safe: the keys after the kept ones were read already. */
        _mm512_storeu_si512(keys + kept, _mm512_maskz_compress_epi32(fits, some));
        if (masses) {
            __m512 their = _mm512_maskz_compress_ps(fits, _mm512_loadu_ps(masses + i));
            _mm512_storeu_ps(masses + kept, their);
        }
        kept += __builtin_popcount(fits);
    }
#endif
    for (; i < count; i++) { /* without a branch, which would often be mispredicted */
        int fits = keys[i] - least <= most - least;
        keys[kept] = keys[i];
        if (masses) masses[kept] = masses[i];
        kept += fits;
    }
    return kept;
}

/* List the keys up to `most` in the order of their ids. Returns their number. */
static int64_t list_keys(const ft_row *row, uint32_t most, uint32_t *keys) {
    float scaled[FT_BLOCK];
    int64_t count = 0;
    for (int64_t at = 0; at < row->vocab; at += FT_BLOCK) {
        ft_scaled_block(row, at, scaled);
        ft_keys_block(scaled, keys + count);
        if (ft_any_within(keys + count, most))
            count += narrow(keys + count, NULL, FT_BLOCK, 0, most);
    }
    return count;
}

/* Compute the masses of `count` listed keys. Masses after them, up to the end of the block, are
 * meaningless. */
static void weigh_keys(const ft_row *row, int64_t count, const ft_cut_space *space) {
    float scaled[FT_BLOCK], unit = mass_unit(row->vocab);
    for (int64_t at = 0; at < count; at += FT_BLOCK) {
        for (int i = 0; i < FT_BLOCK; i++) {
            uint32_t bits = space->keys[at + i] | 0x80000000u;
            memcpy(&scaled[i], &bits, 4);
        }
        masses_block(scaled, unit, space->masses + at);
    }
}

/* Return the first digit at which the weight reaches `*limit`, or -1 if it never does. Reduces
 * `*limit` by the weight of the digits before. */
static int64_t find_digit(const ft_cut_space *space, int64_t count, int shift, uint32_t digits,
                          int weighs, int64_t *limit) {
    int64_t *bins = space->bins;
    memset(bins, 0, (digits + 1) * sizeof *bins);
    if (weighs)
        for (int64_t i = 0; i < count; i++)
            bins[(space->keys[i] >> shift) & digits] += (int64_t)space->masses[i];
    else
        for (int64_t i = 0; i < count; i++) bins[(space->keys[i] >> shift) & digits]++;
    for (int64_t digit = 0; digit <= digits; digit++) {
        if (bins[digit] >= *limit) return digit;
        *limit -= bins[digit];
    }
    return -1;
}

typedef struct {
    ft_kept kept;
    int64_t num_ties; /* tokens with the key `kept.key`, kept or not */
} selection;

/* Find the keys that stay: from the best on, as long as the weight before them is below `limit`.
 * Returns 0 if all stay. */
static int select_keys(const ft_cut_space *space, int64_t count, int weighs, int64_t limit,
                       selection *found) {
    uint32_t key = 0, digits = FT_BINS - 1;
    for (int shift = FIRST_SHIFT; shift >= 0; shift -= DIGIT) {
        int64_t digit = find_digit(space, count, shift, digits, weighs, &limit);
        if (digit < 0) return 0;
        key |= (uint32_t)digit << shift;
        float *masses = weighs ? space->masses : NULL;
        count = narrow(space->keys, masses, count, key, key + ((1u << shift) - 1));
        digits = (1u << DIGIT) - 1;
    }
    int64_t each = weighs ? (int64_t)space->masses[0] : 1;
    found->kept = (ft_kept){key, ft_ceil_div(limit, each)};
    found->num_ties = count;
    return 1;
}

/* Return a key that is certainly not better than the top_k-th: the top_k-th of the best keys of the
 * blocks. */
static uint32_t bound_top_k(const ft_row *row, int64_t top_k, const ft_cut_space *space) {
    int64_t num_blocks = 0;
    float scaled[FT_BLOCK];
    for (int64_t at = 0; at < row->vocab; at += FT_BLOCK) {
        ft_scaled_block(row, at, scaled);
        uint32_t least = UINT32_MAX;
        for (int i = 0; i < FT_BLOCK; i++) {
            uint32_t key = ft_key(scaled[i]);
            least = key < least ? key : least;
        }
        space->keys[num_blocks++] = least;
    }
    selection found;
    return select_keys(space, num_blocks, 0, top_k, &found) ? found.kept.key : UINT32_MAX;
}

/* Return a key beyond which top-p keeps no token: a worse one weighs less than 1 / vocab of the
 * mass that top-p leaves out. */
static uint32_t bound_top_p(const ft_row *row, int64_t left_out) {
    double share = (double)left_out / (double)row->vocab / mass_unit(row->vocab);
    return share > 0.0 ? ft_key((float)(log(share) - 1e-5)) : UINT32_MAX;
}

static void cut_top_k(const ft_row *row, int64_t top_k, const ft_cut_space *space, selection *now) {
    uint32_t most = bound_top_k(row, top_k, space);
    select_keys(space, list_keys(row, most, space->keys), 0, top_k, now);
}

static void cut_top_p(const ft_row *row, double top_p, const ft_cut_space *space, selection *now) {
    uint32_t most = now->kept.key;
    int64_t total = total_mass(row, most), surplus = now->num_ties - now->kept.ties;
    if (surplus > 0) total -= surplus * mass_of(row, most);
    int64_t limit = (int64_t)ceil((double)total * top_p);
    uint32_t bound = bound_top_p(row, total - limit);
    int64_t count = list_keys(row, bound < most ? bound : most, space->keys);
    weigh_keys(row, count, space);
    selection found;
    if (!select_keys(space, count, 1, limit, &found)) return;
    if (found.kept.key == most) found.kept.ties = ft_min(found.kept.ties, now->kept.ties);
    *now = found;
}

ft_kept ft_cut(const ft_row *row, const ft_sampling *sampling, const ft_cut_space *space) {
    selection now = {{ft_key(-INFINITY), FT_ALL_TIES}, 0};
    if (sampling->top_k > 0 && sampling->top_k < row->vocab)
        cut_top_k(row, sampling->top_k, space, &now);
    uint32_t min_p_key = ft_key((float)sampling->min_p_logit);
    if (min_p_key < now.kept.key) now = (selection){{min_p_key, FT_ALL_TIES}, 0};
    if (sampling->top_p < 1.0) cut_top_p(row, sampling->top_p, space, &now);
    return now.kept;
}
