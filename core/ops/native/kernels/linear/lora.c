/* Low-rank updates: one job for the A matrices of all adapters, then one for their B matrices.
 *
 * A task of the first job is some outputs of A for all rows of its adapter; a task of the second is
 * a chunk of the layer's outputs. So each weight is read once, and the sums of a row have the same
 * order whatever other rows there are.
 */
#include "lora.h"
#include "common/vector.h"

enum { PIECE = 16384, /* products that make a task worth another thread */
       VECS = FT_LORA_CHUNK / FT_WIDTH };
/* Number of outputs of A, and of rows, that share each load and its widening. */
#if defined(FT_AVX512) || defined(FT_AVX2)
enum { TILE = 4 };
#else
enum { TILE = 1 }; /* without vector units, larger tiles would only add code */
#endif

typedef struct {
    const ft_lora_rows *updates;
    int64_t count;
    const char *x;
    char *y;
    float *hidden; /* [num_rows, ranks] for each update, one after the other */
    int dtype;
} lora_job;

static int64_t item_bytes(int dtype) { return dtype == FT_BFLOAT16 ? 2 : 4; }

/* Add sixteen products, or the first n, to each of the sums [rows][ranks] of a tile. */
FT_INLINE void add_products(ft_vec sums[TILE][TILE], const char *const *x, const int rows,
                            const char *const *a, const int ranks, int64_t at, int64_t n,
                            int dtype) {
    ft_vec values[TILE];
#pragma GCC unroll 4
    for (int k = 0; k < ranks; k++) values[k] = v_get(a[k], at, n, dtype);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const ft_vec value = v_get(x[r], at, n, dtype);
#pragma GCC unroll 4
        for (int k = 0; k < ranks; k++) sums[r][k] = v_fma(values[k], value, sums[r][k]);
    }
}

/* Compute `ranks` outputs of A for `rows` rows (both constants) to out [rows, stride]. Each output
 * is summed on its own, in the order of the inputs. */
FT_INLINE void dot_tile(const char *const *x, const int rows, const char *const *a, const int ranks,
                        int64_t width, float *out, int64_t stride, int dtype) {
    ft_vec sums[TILE][TILE];
    const int64_t whole = width / FT_WIDTH * FT_WIDTH;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int k = 0; k < ranks; k++) sums[r][k] = v_set(0.0f);
    for (int64_t at = 0; at < whole; at += FT_WIDTH)
        add_products(sums, x, rows, a, ranks, at, FT_WIDTH, dtype);
    if (whole < width) add_products(sums, x, rows, a, ranks, whole, width - whole, dtype);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int k = 0; k < ranks; k++) out[r * stride + k] = v_sum(sums[r][k]);
}

/* Compute outputs [first, first + ranks) of A for all rows of an update. */
FT_INLINE void read_rows(const lora_job *job, const ft_lora_rows *update, int64_t first,
                         const int ranks, float *hidden, int dtype) {
    const ft_lora *lora = update->lora;
    const int64_t width = lora->in_features, bytes = width * item_bytes(dtype);
    const char *a[TILE], *x[TILE];
    for (int k = 0; k < ranks; k++) a[k] = (const char *)lora->a + (first + k) * bytes;
    for (int64_t i = 0; i < update->num_rows;) {
        const int64_t count = update->num_rows - i >= TILE ? TILE : 1;
        for (int64_t r = 0; r < count; r++) x[r] = job->x + update->rows[i + r] * bytes;
        float *out = hidden + i * lora->ranks + first;
        if (count == TILE) dot_tile(x, TILE, a, ranks, width, out, lora->ranks, dtype);
        else dot_tile(x, 1, a, ranks, width, out, lora->ranks, dtype);
        i += count;
    }
}

FT_INLINE void read_tile(const lora_job *job, const ft_lora_rows *update, int64_t tile,
                         float *hidden, int dtype) {
    const int64_t first = tile * TILE, left = update->lora->ranks - first;
    if (left >= TILE) {
        read_rows(job, update, first, TILE, hidden, dtype);
        return;
    }
    for (int64_t k = 0; k < left; k++) read_rows(job, update, first + k, 1, hidden, dtype);
}

static int64_t num_tiles(const ft_lora *lora) { return ft_ceil_div(lora->ranks, TILE); }

static void read_some(void *context, int64_t begin, int64_t end) {
    const lora_job *job = context;
    const ft_lora_rows *update = job->updates;
    float *hidden = job->hidden;
    int64_t first = 0;
    for (int64_t task = begin; task < end; task++) {
        while (task - first >= num_tiles(update->lora)) {
            first += num_tiles(update->lora);
            hidden += update->num_rows * update->lora->ranks;
            update++;
        }
        if (job->dtype == FT_BFLOAT16) read_tile(job, update, task - first, hidden, FT_BFLOAT16);
        else read_tile(job, update, task - first, hidden, FT_FLOAT32);
    }
}

static int64_t num_chunks(const ft_lora_block *block) {
    return ft_ceil_div(block->num_outs, FT_LORA_CHUNK);
}

/* Add a chunk of a block to the outputs of `rows` rows (a constant). `b`: the chunk of B; `read`:
 * the outputs of A of each row; `y`: the outputs of each row from the block's first on. */
FT_INLINE void add_tile(const ft_lora_block *block, const char *b, const float *const *read,
                        char *const *y, const int rows, int64_t first, int dtype) {
    ft_vec sums[TILE][VECS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[r][v] = v_set(0.0f);
    for (int64_t k = 0; k < block->num_ranks; k++, b += FT_LORA_CHUNK * item_bytes(dtype)) {
        ft_vec values[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) values[v] = v_get(b, v * FT_WIDTH, FT_WIDTH, dtype);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const ft_vec factor = v_set(read[r][k]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sums[r][v] = v_fma(values[v], factor, sums[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
            const int64_t at = first + v * FT_WIDTH, left = block->num_outs - at;
            if (left > 0) v_put(y[r], at, v_add(v_get(y[r], at, left, dtype), sums[r][v]), left, dtype);
        }
}

/* Add a chunk of a block to the outputs of all rows of an update. */
FT_INLINE void add_chunk(const lora_job *job, const ft_lora_rows *update, const float *hidden,
                         const ft_lora_block *block, int64_t chunk, int dtype) {
    const ft_lora *lora = update->lora;
    const int64_t item = item_bytes(dtype), first = chunk * FT_LORA_CHUNK;
    const char *b = (const char *)block->b + first * block->num_ranks * item;
    for (int64_t i = 0; i < update->num_rows;) {
        const int64_t count = update->num_rows - i >= TILE ? TILE : 1;
        const float *read[TILE];
        char *y[TILE];
        for (int64_t r = 0; r < count; r++) {
            read[r] = hidden + (i + r) * lora->ranks + block->first_rank;
            y[r] = job->y + (update->rows[i + r] * lora->out_features + block->first_out) * item;
        }
        if (count == TILE) add_tile(block, b, read, y, TILE, first, dtype);
        else add_tile(block, b, read, y, 1, first, dtype);
        i += count;
    }
}

static void add_some(void *context, int64_t begin, int64_t end) {
    const lora_job *job = context;
    const ft_lora_rows *update = job->updates;
    const ft_lora_block *block = update->lora->blocks;
    const float *hidden = job->hidden;
    int64_t first = 0;
    for (int64_t task = begin; task < end; task++) {
        while (task - first >= num_chunks(block)) {
            first += num_chunks(block);
            if (++block == update->lora->blocks + update->lora->num_blocks) {
                hidden += update->num_rows * update->lora->ranks;
                block = (++update)->lora->blocks;
            }
        }
        if (job->dtype == FT_BFLOAT16)
            add_chunk(job, update, hidden, block, task - first, FT_BFLOAT16);
        else
            add_chunk(job, update, hidden, block, task - first, FT_FLOAT32);
    }
}

int ft_add_lora(const ft_lora_rows *updates, int64_t count, const void *x, void *y, int dtype) {
    int64_t tiles = 0, chunks = 0, numbers = 0, reads = 0, adds = 0;
    for (int64_t i = 0; i < count; i++) {
        const ft_lora *lora = updates[i].lora;
        tiles += num_tiles(lora);
        numbers += updates[i].num_rows * lora->ranks;
        reads += updates[i].num_rows * lora->ranks * lora->in_features;
        for (int64_t j = 0; j < lora->num_blocks; j++) {
            chunks += num_chunks(&lora->blocks[j]);
            adds += updates[i].num_rows * lora->blocks[j].num_ranks * lora->blocks[j].num_outs;
        }
    }
    if (!tiles) return 0;
    float *hidden = ft_scratch(FT_SCRATCH_LORA, (size_t)numbers * sizeof *hidden);
    if (!hidden) return -1;
    lora_job job = {updates, count, x, y, hidden, dtype};
    ft_parallel(read_some, &job, tiles, ft_max(1, tiles * PIECE / ft_max(reads, 1)));
    ft_parallel(add_some, &job, chunks, ft_max(1, chunks * PIECE / ft_max(adds, 1)));
    return 0;
}
