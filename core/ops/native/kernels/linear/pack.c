/* Packing of weight rows into panels, and unpacking. Rows are the blocks of a mapped GGUF file, or
 * values with scales in separate arrays.
 *
 * Every form is read one group of a row at a time into a group_t, and every kind is written from a
 * group_t; so a form and a kind take one function each. Nothing is rounded.
 */
#include "linear_groups.h"

/* Layouts of rows before they are packed. Layouts of GGUF files have ggml's numbers. */
enum {
    FORM_Q4_0 = 2,
    FORM_Q4_1 = 3,
    FORM_Q5_0 = 6,
    FORM_Q5_1 = 7,
    FORM_Q8_0 = 8,
    FORM_Q4_K = 12,
    FORM_Q5_K = 13,
    FORM_Q6_K = 14,
    FORM_IQ4_NL = 20,
    FORM_IQ4_XS = 23,
    FORM_MXFP4 = 39,
    FORM_APART = 64, /* values as signed bytes, scales and minima in separate arrays */
    FORM_PLAIN = 65, /* float32 or bfloat16 items, or signed bytes for int8 */
};

/* Rows to pack. */
typedef struct {
    int32_t form;
    const char *const *rows; /* address of each row; NULL: rows are at `data` */
    const char *data;        /* first row; the next one is row_bytes after it */
    int64_t row_bytes;
    /* FORM_APART: numbers of each group or super-group, row by row; NULL if the kind has none. */
    const char *scale, *minimum, *factor, *min_factor;
} ft_source;

typedef struct {
    const ft_source *source;
    int32_t kind;
    int64_t num_rows, first_row; /* rows of the source; index of the first in the weight */
    int64_t in_features;
    char *out;
} pack_job;

/* A group of a row, with the values that a panel stores. */
typedef struct {
    uint8_t values[FT_GROUP];
    uint16_t numbers[2]; /* scale, and minimum or zero, for kinds that store them in 16 bits */
    uint8_t bytes[2];    /* scale and minimum for kinds that store bytes; two scales for int6_k */
} group_t;

/* ---- blocks of a file: group `g` of a row ---- */

static uint16_t half_at(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

static uint32_t word_at(const uint8_t *at) { return half_at(at) | (uint32_t)half_at(at + 2) << 16; }

/* Unpack the low halves of 16 bytes, then the high halves. This writes words because put_group
 * reads words, which would stall on bytes that were just written one by one. */
FT_INLINE void take_nibbles(const uint8_t *from, uint8_t *values) {
    const uint64_t mask = 0x0f0f0f0f0f0f0f0full;
    for (int i = 0; i < FT_GROUP / 2; i += 8) {
        uint64_t bytes, low, high;
        memcpy(&bytes, from + i, 8);
        low = bytes & mask;
        high = bytes >> 4 & mask;
        memcpy(values + i, &low, 8);
        memcpy(values + i + FT_GROUP / 2, &high, 8);
    }
}

/* Add the fifth bit of each value. */
FT_INLINE void add_fifths(const uint8_t *from, uint8_t *values) {
    const uint32_t bits = word_at(from);
    for (int i = 0; i < FT_GROUP; i++) values[i] |= (bits >> i & 1u) << 4;
}

/* Unpack the low halves of 32 bytes, or the high halves. */
FT_INLINE void take_half(const uint8_t *from, int is_high, uint8_t *values) {
    for (int i = 0; i < FT_GROUP; i++) values[i] = is_high ? from[i] >> 4 : from[i] & 15;
}

/* Unpack the 6-bit scale and minimum of group `at` from the 12 bytes that hold eight of each. */
FT_INLINE void take_k_scales(const uint8_t *packed, int64_t at, uint8_t *bytes) {
    if (at < 4) {
        bytes[0] = packed[at] & 63;
        bytes[1] = packed[at + 4] & 63;
    } else {
        bytes[0] = (packed[at + 4] & 15) | packed[at - 4] >> 6 << 4;
        bytes[1] = packed[at + 4] >> 4 | packed[at] >> 6 << 4;
    }
}

/* Half of the power of two with this biased exponent, as bf16. The table of E2M1 has doubled
 * values, because these are integers. */
FT_INLINE uint16_t half_of_power(uint8_t exponent) {
    return exponent < 2 ? (uint16_t)(32 << exponent) : (uint16_t)((exponent - 1) << 7);
}

FT_INLINE void read_q6_k(const uint8_t *block, int64_t at, group_t *out) {
    const uint8_t *low = block + 64 * (at / 4) + 32 * (at % 2);
    const uint8_t *high = block + 128 + 32 * (at / 4);
    take_half(low, at % 4 / 2, out->values);
    for (int i = 0; i < FT_GROUP; i++) out->values[i] |= (high[i] >> 2 * (at % 4) & 3) << 4;
    memcpy(out->bytes, block + 192 + 2 * at, 2);
}

FT_INLINE void read_q5_k(const uint8_t *block, int64_t at, group_t *out) {
    take_half(block + 48 + 32 * (at / 2), at % 2, out->values);
    for (int i = 0; i < FT_GROUP; i++) out->values[i] |= (block[16 + i] >> at & 1) << 4;
    take_k_scales(block + 4, at, out->bytes);
}

FT_INLINE void read_block(const uint8_t *row, int64_t g, const int form, group_t *out) {
    const int64_t super = g / FT_SUPER, at = g % FT_SUPER;
    const uint8_t *block;
    switch (form) {
        case FORM_Q4_0:
        case FORM_IQ4_NL:
            block = row + 18 * g;
            out->numbers[0] = half_at(block);
            take_nibbles(block + 2, out->values);
            return;
        case FORM_Q4_1:
            block = row + 20 * g;
            out->numbers[0] = half_at(block);
            out->numbers[1] = half_at(block + 2);
            take_nibbles(block + 4, out->values);
            return;
        case FORM_Q5_0:
            block = row + 22 * g;
            out->numbers[0] = half_at(block);
            take_nibbles(block + 6, out->values);
            add_fifths(block + 2, out->values);
            return;
        case FORM_Q5_1:
            block = row + 24 * g;
            out->numbers[0] = half_at(block);
            out->numbers[1] = half_at(block + 2);
            take_nibbles(block + 8, out->values);
            add_fifths(block + 4, out->values);
            return;
        case FORM_Q8_0:
            block = row + 34 * g;
            out->numbers[0] = half_at(block);
            for (int i = 0; i < FT_GROUP; i++) out->values[i] = block[2 + i] ^ 128;
            return;
        case FORM_Q4_K:
            block = row + 144 * super;
            take_half(block + 16 + 32 * (at / 2), at % 2, out->values);
            take_k_scales(block + 4, at, out->bytes);
            return;
        case FORM_Q5_K: read_q5_k(row + 176 * super, at, out); return;
        case FORM_Q6_K: read_q6_k(row + 210 * super, at, out); return;
        case FORM_IQ4_XS: take_nibbles(row + 136 * super + 8 + 16 * at, out->values); return;
        default:
            block = row + 17 * g;
            out->numbers[0] = half_of_power(block[0]);
            take_nibbles(block + 1, out->values);
    }
}

/* Read the numbers that the groups of a super-group share: one or two factors, and for iq4_xs the
 * eight scales. */
FT_INLINE void read_super(const uint8_t *row, int64_t super, const int form, uint16_t *factors,
                          uint8_t *scales) {
    const uint8_t *block;
    switch (form) {
        case FORM_Q4_K:
        case FORM_Q5_K:
            block = row + (form == FORM_Q4_K ? 144 : 176) * super;
            factors[0] = half_at(block);
            factors[1] = half_at(block + 2);
            return;
        case FORM_Q6_K: factors[0] = half_at(row + 210 * super + 208); return;
        case FORM_IQ4_XS:
            block = row + 136 * super;
            factors[0] = half_at(block);
            for (int i = 0; i < FT_SUPER; i++) {
                const int low = block[4 + i / 2] >> 4 * (i % 2) & 15;
                const int high = half_at(block + 2) >> 2 * i & 3;
                scales[i] = (uint8_t)((low | high << 4) - 32);
            }
    }
}

/* ---- values and numbers apart ---- */

static const char *row_at(const ft_source *source, int64_t row) {
    return source->rows ? source->rows[row] : source->data + row * source->row_bytes;
}

/* Address of the number for group `g` of a row in [rows, groups] numbers of `size` bytes. */
static const char *numbers_of(const char *numbers, int64_t row, int64_t groups, int64_t g,
                              int64_t size) {
    return numbers + (row * groups + g) * size;
}

static void read_apart(const pack_job *job, int64_t row, int64_t g, group_t *out) {
    const ft_source *source = job->source;
    const uint8_t *values = (const uint8_t *)row_at(source, row) + g * FT_GROUP;
    /* Kinds with a table store the indices themselves. */
    const int offset = values_of(job->kind) ? 0 : value_offset(job->kind);
    const int64_t groups = ft_ceil_div(job->in_features, FT_GROUP);
    const int size = job->kind == FT_LINEAR_INT4_K || job->kind == FT_LINEAR_INT5_K ? 1 : 2;
    for (int i = 0; i < FT_GROUP; i++) out->values[i] = (uint8_t)(values[i] + offset);
    if (job->kind == FT_LINEAR_IQ4_XS) return;
    void *to = is_k_kind(job->kind) ? (void *)out->bytes : (void *)out->numbers;
    memcpy(to, numbers_of(source->scale, row, groups, g, size), (size_t)size);
    if (source->minimum)
        memcpy((char *)to + size, numbers_of(source->minimum, row, groups, g, size), (size_t)size);
}

static void read_super_apart(const pack_job *job, int64_t row, int64_t super, uint16_t *factors,
                             uint8_t *scales) {
    const ft_source *source = job->source;
    const int64_t groups = ft_ceil_div(job->in_features, FT_GROUP), supers = groups / FT_SUPER;
    memcpy(factors, numbers_of(source->factor, row, supers, super, 2), 2);
    if (source->min_factor)
        memcpy(factors + 1, numbers_of(source->min_factor, row, supers, super, 2), 2);
    if (job->kind == FT_LINEAR_IQ4_XS)
        memcpy(scales, numbers_of(source->scale, row, groups, super * FT_SUPER, 1), FT_SUPER);
}

/* ---- panels ---- */

static void put_word(char *values, int64_t place, int lane, uint32_t word) {
    memcpy(values + (place * PANEL + lane) * 4, &word, 4);
}

/* Write a group of the row in `lane` to a panel. */
FT_INLINE void put_group(const group_t *group, char *at, int lane, const int kind) {
    const int bits = value_bits(kind);
    uint32_t quads[FT_GROUP / 4];
    memcpy(quads, group->values, sizeof quads);
    if (bits == 8) {
        for (int j = 0; j < 8; j++) put_word(at, j, lane, quads[j]);
    } else {
        for (int j = 0; j < 4; j++)
            put_word(at, j, lane, (quads[j] & 0x0f0f0f0fu) | (quads[j + 4] & 0x0f0f0f0fu) << 4);
    }
    if (bits == 5) {
        uint32_t fifth = 0;
        for (int j = 0; j < 8; j++) fifth |= (quads[j] >> 4 & 0x01010101u) << j;
        put_word(at, 4, lane, fifth);
    } else if (bits == 6) {
        uint32_t high[2] = {0, 0};
        for (int j = 0; j < 8; j++) high[j / 4] |= (quads[j] >> 4 & 0x03030303u) << 2 * (j % 4);
        put_word(at, 4, lane, high[0]);
        put_word(at, 5, lane, high[1]);
    }
    char *numbers = at + value_bytes(kind);
    const int count = number_bytes(kind) / PANEL, size = is_k_kind(kind) ? 1 : 2;
    for (int i = 0; i < count / size; i++) {
        const char *from = size == 1 ? (const char *)group->bytes + i
                                     : (const char *)(group->numbers + i);
        memcpy(numbers + (i * PANEL + lane) * size, from, (size_t)size);
    }
}

FT_INLINE void put_super(const uint16_t *factors, const uint8_t *scales, char *at, int lane,
                         const int kind) {
    memcpy(at + 2 * lane, factors, 2);
    if (has_min(kind)) memcpy(at + 2 * (PANEL + lane), factors + 1, 2);
    if (kind == FT_LINEAR_IQ4_XS)
        for (int i = 0; i < FT_SUPER; i++) at[PANEL * 2 + i * PANEL + lane] = (char)scales[i];
}

/* Pack rows [begin, end) of the source, which are in one panel. `form` and `kind` are constants. */
FT_INLINE void pack_rows(const pack_job *job, char *panel, int64_t begin, int64_t end,
                         const int form, const int kind) {
    const ft_source *source = job->source;
    const int64_t groups = ft_ceil_div(job->in_features, FT_GROUP);
    const int first = (int)((job->first_row + begin) % PANEL);
    for (int64_t g = 0; g < groups; g++) {
        char *at = panel + group_at(kind, g);
        for (int64_t r = begin; r < end; r++) {
            const uint8_t *row = (const uint8_t *)row_at(source, r);
            const int lane = first + (int)(r - begin);
            if (super_bytes(kind) && g % FT_SUPER == 0) {
                uint16_t factors[2] = {0, 0};
                uint8_t scales[FT_SUPER];
                if (form == FORM_APART) read_super_apart(job, r, g / FT_SUPER, factors, scales);
                else read_super(row, g / FT_SUPER, form, factors, scales);
                put_super(factors, scales, panel + super_at(kind, g / FT_SUPER), lane, kind);
            }
            group_t group;
            if (form == FORM_APART) read_apart(job, r, g, &group);
            else read_block(row, g, form, &group);
            put_group(&group, at, lane, kind);
        }
    }
}

/* Pack rows of words of four bytes: a float32, two bfloat16 or four bytes, with zeros after the
 * last column. */
static void pack_plain(const pack_job *job, char *panel, int64_t begin, int64_t end) {
    enum { TOGETHER = 16 };
    const ft_source *source = job->source;
    const int64_t bytes = job->in_features * 4 / step_columns(job->kind), words = bytes / 4;
    const uint32_t flip = job->kind == FT_LINEAR_INT8 ? 0x80808080u : 0;
    const int first = (int)((job->first_row + begin) % PANEL);
    for (int64_t word = 0; word < ft_ceil_div(bytes, 4); word += TOGETHER)
        for (int64_t r = begin; r < end; r++) {
            const char *row = row_at(source, r) + word * 4;
            uint32_t some[TOGETHER] = {0};
            const int64_t count = ft_min(TOGETHER, words - word);
            memcpy(some, row, (size_t)ft_min(TOGETHER * 4, bytes - word * 4));
            for (int64_t i = 0; i < count; i++)
                put_word(panel, word + i, first + (int)(r - begin), some[i] ^ flip);
            if (count < TOGETHER && bytes % 4)
                put_word(panel, word + count, first + (int)(r - begin), some[count] ^ flip);
        }
}

/* The pairs of a form and its kind; each gets a loop of its own. */
#define PAIRS(EACH) \
    EACH(FORM_Q4_0, FT_LINEAR_INT4_GROUP) \
    EACH(FORM_Q4_1, FT_LINEAR_INT4_MIN) \
    EACH(FORM_Q5_0, FT_LINEAR_INT5_GROUP) \
    EACH(FORM_Q5_1, FT_LINEAR_INT5_MIN) \
    EACH(FORM_Q8_0, FT_LINEAR_INT8_GROUP) \
    EACH(FORM_Q4_K, FT_LINEAR_INT4_K) \
    EACH(FORM_Q5_K, FT_LINEAR_INT5_K) \
    EACH(FORM_Q6_K, FT_LINEAR_INT6_K) \
    EACH(FORM_IQ4_NL, FT_LINEAR_IQ4_NL) \
    EACH(FORM_IQ4_XS, FT_LINEAR_IQ4_XS) \
    EACH(FORM_MXFP4, FT_LINEAR_MXFP4)

#define DEFINE_PACKER(form, kind) \
    static void pack_##form(const pack_job *job, char *panel, int64_t begin, int64_t end) { \
        pack_rows(job, panel, begin, end, form, kind); \
    }
PAIRS(DEFINE_PACKER)

static void pack_some(const pack_job *job, char *panel, int64_t begin, int64_t end) {
#define RUN_PACKER(form, kind) \
    case form: pack_##form(job, panel, begin, end); break;
    switch (job->source->form) {
        PAIRS(RUN_PACKER)
        case FORM_PLAIN: pack_plain(job, panel, begin, end); break;
        default: pack_rows(job, panel, begin, end, FORM_APART, job->kind);
    }
}

static void pack_panels(void *context, int64_t begin, int64_t end) {
    const pack_job *job = context;
    const int64_t bytes = panel_bytes(job->kind, job->in_features);
    const int64_t stop = job->first_row + job->num_rows;
    for (int64_t panel = begin + job->first_row / PANEL; panel < end + job->first_row / PANEL;
         panel++) {
        const int64_t first = ft_max(panel * PANEL, job->first_row);
        const int64_t last = ft_min((panel + 1) * PANEL, stop);
        pack_some(job, job->out + panel * bytes, first - job->first_row, last - job->first_row);
    }
}

/* Pack a source to rows [first_row, first_row + num_rows) of a weight of `kind`. Its panels at
 * `out` must be zeros before the first call. For a source of blocks, `kind` must be the kind of its
 * form. */
FT_EXPORT void ft_pack(int32_t kind, const ft_source *source, int64_t num_rows, int64_t first_row,
                       int64_t in_features, void *out) {
    pack_job job = {source, kind, num_rows, first_row, in_features, out};
    const int64_t stop = ft_ceil_div(first_row + num_rows, PANEL);
    ft_parallel(pack_panels, &job, stop - first_row / PANEL, 1);
}

/* Return the bytes of a panel of 2 * FT_LANES outputs. */
FT_EXPORT int64_t ft_panel_bytes(int32_t kind, int64_t in_features) {
    return panel_bytes(kind, in_features);
}

/* ---- unpacking of rows, for embeddings ---- */

typedef struct {
    const ft_linear_weight *weight;
    const int64_t *rows;
    float factor;
    char *out;
    int dtype;
} unpack_job;

/* The numbers of one output's group: a scale for each half of the group, and a minimum or zero. */
typedef struct {
    float scale[2], min;
} row_numbers;

static float fp16_at(const char *at) {
    float lanes[FT_LANES];
    uint16_t halves[FT_LANES] = {0};
    memcpy(halves, at, 2);
    vf_store(lanes, vf_load_fp16(halves));
    return lanes[0];
}

static row_numbers numbers_at(const char *panel, int64_t g, int lane, const int kind) {
    const char *at = panel + group_at(kind, g) + value_bytes(kind);
    const char *super = panel + super_at(kind, g / FT_SUPER);
    row_numbers out = {{0.0f, 0.0f}, 0.0f};
    if (kind == FT_LINEAR_IQ4_XS) {
        const int8_t byte = (int8_t)super[PANEL * 2 + g % FT_SUPER * PANEL + lane];
        out.scale[0] = out.scale[1] = fp16_at(super + 2 * lane) * (float)byte;
    } else if (kind == FT_LINEAR_INT6_K) {
        for (int part = 0; part < 2; part++)
            out.scale[part] = fp16_at(super + 2 * lane) * (float)(int8_t)at[part * PANEL + lane];
    } else if (is_k_kind(kind)) {
        out.scale[0] = out.scale[1] = fp16_at(super + 2 * lane) * (float)(uint8_t)at[lane];
        out.min = -(fp16_at(super + 2 * (PANEL + lane)) * (float)(uint8_t)at[PANEL + lane]);
    } else {
        bf16 wide;
        memcpy(&wide, at + 2 * lane, 2);
        out.scale[0] = kind == FT_LINEAR_MXFP4 ? ft_from_bf16(wide) : fp16_at(at + 2 * lane);
        out.scale[1] = out.scale[0];
        if (number_bytes(kind) > PANEL * 2) out.min = fp16_at(at + 2 * (PANEL + lane));
    }
    return out;
}

static uint32_t word_of(const char *group, int64_t place, int lane) {
    uint32_t word;
    memcpy(&word, group + (place * PANEL + lane) * 4, 4);
    return word;
}

/* Read the stored values of a group of one output. */
static void values_at(const char *group, int lane, const int kind, uint8_t *values) {
    const int bits = value_bits(kind);
    for (int j = 0; j < FT_GROUP / 4; j++) {
        uint32_t word = word_of(group, bits == 8 ? j : j % 4, lane);
        if (bits < 8) word = word >> (j < 4 ? 0 : 4) & 0x0f0f0f0fu;
        if (bits == 5) word |= (word_of(group, 4, lane) >> j & 0x01010101u) << 4;
        if (bits == 6) word |= (word_of(group, 4 + j / 4, lane) >> 2 * (j % 4) & 0x03030303u) << 4;
        memcpy(values + 4 * j, &word, 4);
    }
    if (values_of(kind))
        for (int i = 0; i < FT_GROUP; i++) values[i] = values_of(kind)[values[i]];
}

static void unpack_row(const unpack_job *job, int64_t index) {
    const ft_linear_weight *weight = job->weight;
    const int kind = weight->kind, offset = value_offset(kind);
    const int64_t row = ft_max(job->rows[index], 0), width = weight->in_features;
    const char *panel = (const char *)weight->weight + row / PANEL * panel_bytes(kind, width);
    const int lane = (int)(row % PANEL);
    for (int64_t g = 0; g * FT_GROUP < width; g++) {
        uint8_t values[FT_GROUP];
        values_at(panel + group_at(kind, g), lane, kind, values);
        const row_numbers numbers = numbers_at(panel, g, lane, kind);
        const int64_t first = index * width + g * FT_GROUP;
        for (int64_t i = 0; i < ft_min(FT_GROUP, width - g * FT_GROUP); i++) {
            const float scale = numbers.scale[i / (FT_GROUP / 2)];
            float value = (float)((int)values[i] - offset);
            if (kind == FT_LINEAR_INT4_ZERO) value = (value - numbers.min) * scale;
            else value = value * scale + numbers.min;
            if (job->dtype == FT_FLOAT32) {
                ((float *)job->out)[first + i] = value * job->factor;
                continue;
            }
            value = ft_from_bf16(ft_to_bf16(value)) * job->factor;
            ((bf16 *)job->out)[first + i] = ft_to_bf16(value);
        }
    }
}

static void unpack_some(void *context, int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; index++) unpack_row(context, index);
}

void ft_unpack_rows(const ft_linear_weight *weight, const int64_t *rows, int64_t count,
                    float factor, void *out, int dtype) {
    unpack_job job = {weight, rows, factor, out, dtype};
    ft_parallel(unpack_some, &job, count, 4);
}
