/* Read bandwidth and matrix rate of the machine, measured for `selftest` and the benchmarks. */
#include "amx.h"
#include "simd.h"

enum { PIECE = 1 << 20 };
#if defined(FT_AMX_EMULATED)
enum { ROUND = 1 };
#else
enum { ROUND = 1000 };
#endif

static void read_pieces(void *context, int64_t begin, int64_t end) {
    const char *p = (const char *)context + begin * PIECE, *stop = p + (end - begin) * PIECE;
    vf a = vf_zero(), b = a, c = a, d = a;
    const int64_t size = (int64_t)sizeof(vf);
    for (; p < stop; p += 4 * size) {
        for (int64_t line = 0; line < 4 * size; line += 64) ft_prefetch(p + 3072 + line);
        a = vf_max(a, vf_load((const float *)p));
        b = vf_max(b, vf_load((const float *)(p + size)));
        c = vf_max(c, vf_load((const float *)(p + 2 * size)));
        d = vf_max(d, vf_load((const float *)(p + 3 * size)));
    }
    float lanes[FT_LANES];
    vf_store(lanes, vf_max(vf_max(a, b), vf_max(c, d)));
    __asm__ volatile("" ::"r"(lanes) : "memory"); /* keeps the compiler from removing the loads */
}

/* Read `bytes` (rounded down to whole MiB) once, on the pool; the caller measures the time. */
FT_EXPORT void ft_read(const void *data, int64_t bytes) {
    ft_parallel(read_pieces, (void *)(uintptr_t)data, bytes / PIECE, 8);
}

#if defined(FT_AMX)

/* Floating point operations of one tile product. A round has 12 products; they go to four sums in
 * turn, so that no product waits for the one before it. */
enum { PRODUCT_OPERATIONS = 2 * AMX_ROWS * AMX_COLUMNS * AMX_ROW_BYTES / 2 };

static void multiply(void *context, int64_t begin, int64_t end) {
    const uint8_t rows[8] = {AMX_ROWS, AMX_ROWS, AMX_ROWS, AMX_ROWS,
                             AMX_ROWS, AMX_ROWS, AMX_ROWS, AMX_ROWS};
    ft_amx_configure(rows);
    for (int64_t round = begin * ROUND; round < end * ROUND; round++) {
#pragma GCC unroll 3
        for (int i = 0; i < 3; i++) {
            AMX_DOT_BF16(0, 4, 6);
            AMX_DOT_BF16(1, 4, 7);
            AMX_DOT_BF16(2, 5, 6);
            AMX_DOT_BF16(3, 5, 7);
        }
    }
    AMX_RELEASE();
    (void)context;
}

#else

enum { PRODUCT_OPERATIONS = 4 * FT_LANES };

static void multiply(void *context, int64_t begin, int64_t end) {
    enum { CHAINS = 12 };
    const vi ones = vi_set1(0x3f803f80), pair = vi_set1(0);
    vf sums[CHAINS];
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sums[i] = vf_set1((float)(begin + i));
    for (int64_t round = begin * ROUND; round < end * ROUND; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sums[i] = vf_dot_bf16(sums[i], ones, pair);
    }
    vf total = vf_zero();
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) total = vf_add(total, sums[i]);
    float lanes[FT_LANES];
    vf_store(lanes, total);
    __asm__ volatile("" ::"r"(lanes) : "memory"); /* keeps the compiler from removing the sums */
    (void)context;
}

#endif

/* Compute `rounds` * ROUND * 12 bf16 dot products from registers, on the pool: products of vectors,
 * or of tiles on a matrix unit. Returns the number of floating point operations; the caller
 * measures the time. */
FT_EXPORT double ft_multiply(int64_t rounds) {
    ft_parallel(multiply, NULL, rounds, 1);
    return (double)rounds * ROUND * 12 * PRODUCT_OPERATIONS;
}
