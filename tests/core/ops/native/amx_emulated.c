/* The matrix unit in plain C, bit by bit as amx.h describes it. For tests: it takes some hundred
 * times as long. What the unit would refuse ends the process here, too, with a line on stderr. */
#include "common/amx.h"

#if defined(FT_AMX_EMULATED)

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <xmmintrin.h>

typedef struct {
    int rows, row_bytes;
    _Alignas(64) uint8_t bytes[AMX_ROWS][AMX_ROW_BYTES];
} tile;

static _Thread_local struct {
    int in_use;
    tile tiles[8];
} unit;

static void refuse(const char *what, int number) {
    fprintf(stderr, "foretoken: the emulated matrix unit refuses %s (tile %d)\n", what, number);
    abort();
}

/* A tile that may be used now. */
static tile *at(int number) {
    if (!unit.in_use) refuse("a tile before its shape is set", number);
    if (number < 0 || number > 7) refuse("a tile that does not exist", number);
    if (unit.tiles[number].rows == 0) refuse("a tile without a shape", number);
    return &unit.tiles[number];
}

void ft_emulated_configure(const ft_amx_shapes *shapes) {
    if (shapes->palette != 1) refuse("any palette but 1", shapes->palette);
    for (int i = 0; i < 8; i++) {
        int rows = shapes->rows[i], row_bytes = shapes->row_bytes[i];
        if (rows > AMX_ROWS || row_bytes > AMX_ROW_BYTES || !rows != !row_bytes)
            refuse("a shape", i);
        unit.tiles[i] = (tile){.rows = rows, .row_bytes = row_bytes};
    }
    unit.in_use = 1;
}

void ft_emulated_release(void) { unit.in_use = 0; }

/* Whether the calling thread has tiles in use. */
FT_EXPORT int ft_amx_in_use(void) { return unit.in_use; }

void ft_emulated_zero(int number) { memset(at(number)->bytes, 0, sizeof unit.tiles[0].bytes); }

void ft_emulated_load(int number, const void *from, int64_t stride) {
    tile *to = at(number);
    for (int row = 0; row < to->rows; row++)
        memcpy(to->bytes[row], (const char *)from + row * stride, (size_t)to->row_bytes);
}

void ft_emulated_store(int number, void *to, int64_t stride) {
    const tile *from = at(number);
    for (int row = 0; row < from->rows; row++)
        memcpy((char *)to + row * stride, from->bytes[row], (size_t)from->row_bytes);
}

static void check_shapes(const tile *c, const tile *a, const tile *b) {
    if (c == a || c == b || a == b) refuse("one tile twice", (int)(c - unit.tiles));
    if (c->rows != a->rows || c->row_bytes != b->row_bytes || a->row_bytes != 4 * b->rows)
        refuse("shapes that do not match", (int)(c - unit.tiles));
}

/* Under the unit's own rules of rounding. Not inlined: compilers move arithmetic past the
 * instruction that sets these rules. */
static void add_products(tile *c, const tile *a, const tile *b) __attribute__((noinline, noclone));

static void add_products(tile *c, const tile *a, const tile *b) {
    float even_b[AMX_ROWS][AMX_COLUMNS], odd_b[AMX_ROWS][AMX_COLUMNS];
    for (int k = 0; k < b->rows; k++)
        for (int n = 0; n < AMX_COLUMNS; n++) {
            bf16 pair[2];
            memcpy(pair, b->bytes[k] + 4 * n, 4);
            even_b[k][n] = ft_from_bf16(pair[0]);
            odd_b[k][n] = ft_from_bf16(pair[1]);
        }
    for (int m = 0; m < a->rows; m++) {
        float even[AMX_COLUMNS] = {0}, odd[AMX_COLUMNS] = {0}, sums[AMX_COLUMNS];
        for (int k = 0; k < b->rows; k++) {
            bf16 pair[2];
            memcpy(pair, a->bytes[m] + 4 * k, 4);
            float even_a = ft_from_bf16(pair[0]), odd_a = ft_from_bf16(pair[1]);
            for (int n = 0; n < AMX_COLUMNS; n++) even[n] = fmaf(even_a, even_b[k][n], even[n]);
            for (int n = 0; n < AMX_COLUMNS; n++) odd[n] = fmaf(odd_a, odd_b[k][n], odd[n]);
        }
        memcpy(sums, c->bytes[m], sizeof sums);
        for (int n = 0; n < AMX_COLUMNS; n++) sums[n] += even[n] + odd[n];
        memcpy(c->bytes[m], sums, (size_t)c->row_bytes);
    }
}

void ft_emulated_dot_bf16(int c, int a, int b) {
    check_shapes(at(c), at(a), at(b));
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0); /* to nearest, no exceptions, what is not normal counts as 0 */
    add_products(at(c), at(a), at(b));
    _mm_setcsr(before);
}

static int32_t widen(uint8_t byte, int is_signed) { return is_signed ? (int8_t)byte : byte; }

void ft_emulated_dot_bytes(int c, int a, int b, int a_signed, int b_signed) {
    tile *sums = at(c);
    const tile *left = at(a), *right = at(b);
    check_shapes(sums, left, right);
    for (int m = 0; m < left->rows; m++)
        for (int n = 0; n < right->row_bytes / 4; n++) {
            uint32_t sum;
            memcpy(&sum, sums->bytes[m] + 4 * n, 4);
            for (int k = 0; k < right->rows; k++)
                for (int i = 0; i < 4; i++)
                    sum += (uint32_t)(widen(left->bytes[m][4 * k + i], a_signed) *
                                      widen(right->bytes[k][4 * n + i], b_signed));
            memcpy(sums->bytes[m] + 4 * n, &sum, 4);
        }
}

#endif
