/* A 4-bit copy of a weight of 8 bits or more, for drafts, which need not be exact.
 *
 * Each group of a row gets 16 levels from its least to its greatest weight. Scale and minimum are
 * rounded to float16 first, so that the values compensate for this. A search for a narrower range
 * reduced the error for normally distributed weights only from 0.078 to 0.076, in five times the
 * time.
 */
#include "linear_groups.h"

typedef struct {
    const ft_linear_weight *weight;
    char *out;
} copy_job;

/* Round to the nearest float16, ties to even. */
static uint16_t to_fp16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    if (magnitude >= 65520.0f) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x1p-14f) { /* a multiple of 2^-24; adding 2^23 rounds to an integer */
        magnitude = magnitude * 0x1p24f + 0x1p23f;
        memcpy(&bits, &magnitude, 4);
        return (uint16_t)(sign | (bits & 0x7ffu));
    }
    return (uint16_t)(sign | (((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - (112u << 10)));
}

/* Read a column from quads of bytes: (byte - 128) * scale for each output. */
static void read_bytes(const char *quads, int64_t column, const float *scales, float *out) {
    const uint8_t *quad = (const uint8_t *)quads + column / 4 * 4 * PANEL + column % 4;
    for (int n = 0; n < PANEL; n++) out[n] = (float)((int)quad[4 * n] - 128) * scales[n];
}

/* Read columns [first, first + FT_GROUP) of a panel, with zeros after the last column. `scales`:
 * one for each output of an int8 panel. */
static void read_group(const ft_linear_weight *weight, const char *panel, int64_t first,
                       const float *scales, float columns[FT_GROUP][PANEL]) {
    /* `group` and `of_group` are used for INT8_GROUP only. */
    const char *group = panel + group_at(FT_LINEAR_INT8_GROUP, first / FT_GROUP);
    float of_group[PANEL];
    if (weight->kind == FT_LINEAR_INT8_GROUP)
        for (int n = 0; n < PANEL; n += FT_LANES)
            vf_store(of_group + n,
                     vf_load_fp16((const uint16_t *)(group + value_bytes(FT_LINEAR_INT8_GROUP)) + n));
    for (int k = 0; k < FT_GROUP; k++) {
        const int64_t column = first + k;
        float *out = columns[k];
        if (column >= weight->in_features) {
            memset(out, 0, PANEL * sizeof(float));
        } else if (weight->kind == FT_LINEAR_FLOAT32) {
            memcpy(out, panel + column * PANEL * (int64_t)sizeof(float), PANEL * sizeof(float));
        } else if (weight->kind == FT_LINEAR_INT8) {
            read_bytes(panel, column, scales, out);
        } else if (weight->kind == FT_LINEAR_INT8_GROUP) {
            read_bytes(group, k, of_group, out);
        } else {
            const char *pairs = panel + column / 2 * PANEL * 4;
            for (int n = 0; n < PANEL; n += FT_LANES) {
                const vi pair = vi_load(pairs + 4 * n);
                vf_store(out + n, column % 2 ? vf_odd_bf16(pair) : vf_even_bf16(pair));
            }
        }
    }
}

FT_INLINE vf smaller(vf a, vf b) {
    const vf minus = vf_set1(-1.0f);
    return vf_mul(vf_max(vf_mul(a, minus), vf_mul(b, minus)), minus);
}

/* Round a group of half a panel to 4 bits. */
static void round_half(const float *columns, uint32_t *values, uint16_t *scales, uint16_t *minima) {
    vf low = vf_load(columns), high = low;
    for (int k = 1; k < FT_GROUP; k++) {
        const vf column = vf_load(columns + k * PANEL);
        low = smaller(low, column);
        high = vf_max(high, column);
    }
    float numbers[FT_LANES];
    vf_store(numbers, low);
    for (int n = 0; n < FT_LANES; n++) minima[n] = to_fp16(numbers[n]);
    low = vf_mul(vf_load_fp16(minima), vf_set1(-1.0f));
    vf_store(numbers, vf_mul(vf_add(high, low), vf_set1(1.0f / 15.0f)));
    for (int n = 0; n < FT_LANES; n++) scales[n] = to_fp16(numbers[n]);
    vf_store(numbers, vf_load_fp16(scales));
    for (int n = 0; n < FT_LANES; n++) numbers[n] = numbers[n] > 0.0f ? 1.0f / numbers[n] : 0.0f;
    const vf for_one = vf_load(numbers);
    /* Adding 2^23 rounds to the nearest integer, ties to even. */
    const vf most = vf_set1(15.0f), none = vf_set1(0.0f), whole = vf_set1(0x1p23f);
    for (int quad = 0; quad < FT_GROUP / 8; quad++) {
        uint32_t bytes[FT_LANES] = {0};
        for (int part = 0; part < 8; part++) {
            const int k = quad * 4 + part % 4 + part / 4 * (FT_GROUP / 2);
            const int shift = part % 4 * 8 + part / 4 * 4;
            vf level = vf_mul(vf_add(vf_load(columns + k * PANEL), low), for_one);
            level = vf_max(smaller(level, most), none);
            float sums[FT_LANES];
            uint32_t bits[FT_LANES];
            vf_store(sums, vf_add(level, whole));
            memcpy(bits, sums, sizeof bits);
            for (int n = 0; n < FT_LANES; n++) bytes[n] |= (bits[n] & 15u) << shift;
        }
        memcpy(values + quad * PANEL, bytes, sizeof bytes);
    }
}

static void round_group(float columns[FT_GROUP][PANEL], char *out) {
    uint16_t *scales = (uint16_t *)(out + value_bytes(FT_LINEAR_INT4_MIN));
    for (int n = 0; n < PANEL; n += FT_LANES)
        round_half(columns[0] + n, (uint32_t *)out + n, scales + n, scales + PANEL + n);
}

static void copy_panels(void *context, int64_t begin, int64_t end) {
    const copy_job *job = context;
    const ft_linear_weight *weight = job->weight;
    const int64_t groups = ft_ceil_div(weight->in_features, FT_GROUP);
    const int64_t bytes = panel_bytes(weight->kind, weight->in_features);
    float columns[FT_GROUP][PANEL];
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t group = 0; group < groups; group++) {
            read_group(weight, (const char *)weight->weight + panel * bytes, group * FT_GROUP,
                       weight->scale ? weight->scale + panel * PANEL : NULL, columns);
            round_group(columns,
                        job->out + (panel * groups + group) * block_bytes(FT_LINEAR_INT4_MIN));
        }
}

void ft_rough_copy(const ft_linear_weight *weight, void *out) {
    copy_job job = {weight, out};
    ft_parallel(copy_panels, &job, ft_ceil_div(weight->num_own, PANEL), 1);
}
