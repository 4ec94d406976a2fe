/* Low-rank updates: all A of all adapters in one job, then all B in another.
 *
 * A task of the first is one output of A, for all rows of its adapter; a task of the second is a
 * chunk of the layer's outputs. So each weight is read once, and a row's sums have one order whatever
 * rides beside it.
 */
#include "lora.h"
#include "vector.h"

enum { PIECE = 16384, /* products that make a task worth another thread */
       SUMS = 4, /* of a dot product, so that an addition need not wait for the one before */
       VECS = FT_LORA_CHUNK / FT_WIDTH };

typedef struct {
    const ft_lora_rows *updates;
    int64_t count;
    const char *x;
    char *y;
    float *hidden; /* of each update [num_rows, ranks], one behind the other */
    int dtype;
} lora_job;

static int64_t item_bytes(int dtype) { return dtype == FT_BFLOAT16 ? 2 : 4; }

FT_INLINE float dot(const char *a, const char *x, int64_t width, int dtype) {
    ft_vec sums[SUMS] = {v_set(0.0f), v_set(0.0f), v_set(0.0f), v_set(0.0f)};
    int64_t i = 0;
    for (; i + SUMS * FT_WIDTH <= width; i += SUMS * FT_WIDTH)
        for (int s = 0; s < SUMS; s++) {
            const int64_t at = i + s * FT_WIDTH;
            sums[s] = v_fma(v_get(a, at, FT_WIDTH, dtype), v_get(x, at, FT_WIDTH, dtype), sums[s]);
        }
    for (; i < width; i += FT_WIDTH)
        sums[0] = v_fma(v_get(a, i, width - i, dtype), v_get(x, i, width - i, dtype), sums[0]);
    return v_sum(v_add(v_add(sums[0], sums[1]), v_add(sums[2], sums[3])));
}

/* One output of A for all rows of an update. */
FT_INLINE void read_rows(const lora_job *job, const ft_lora_rows *update, int64_t rank,
                         float *hidden, int dtype) {
    const ft_lora *lora = update->lora;
    const int64_t bytes = lora->in_features * item_bytes(dtype);
    const char *a = (const char *)lora->a + rank * bytes;
    for (int64_t i = 0; i < update->num_rows; i++)
        hidden[i * lora->ranks + rank] =
            dot(a, job->x + update->rows[i] * bytes, lora->in_features, dtype);
}

static void read_some(void *context, int64_t begin, int64_t end) {
    const lora_job *job = context;
    const ft_lora_rows *update = job->updates;
    float *hidden = job->hidden;
    int64_t first = 0;
    for (int64_t task = begin; task < end; task++) {
        while (task - first >= update->lora->ranks) {
            first += update->lora->ranks;
            hidden += update->num_rows * update->lora->ranks;
            update++;
        }
        if (job->dtype == FT_BFLOAT16) read_rows(job, update, task - first, hidden, FT_BFLOAT16);
        else read_rows(job, update, task - first, hidden, FT_FLOAT32);
    }
}

static int64_t num_chunks(const ft_lora_block *block) {
    return ft_ceil_div(block->num_outs, FT_LORA_CHUNK);
}

/* A chunk of a block's outputs for all rows of an update. */
FT_INLINE void add_chunk(const lora_job *job, const ft_lora_rows *update, const float *hidden,
                         const ft_lora_block *block, int64_t chunk, int dtype) {
    const ft_lora *lora = update->lora;
    const int64_t size = FT_LORA_CHUNK * item_bytes(dtype), first = chunk * FT_LORA_CHUNK;
    const char *b = (const char *)block->b + chunk * block->num_ranks * size;
    for (int64_t i = 0; i < update->num_rows; i++) {
        const float *read = hidden + i * lora->ranks + block->first_rank;
        char *y = job->y + (update->rows[i] * lora->out_features + block->first_out) *
                               item_bytes(dtype);
        ft_vec sums[VECS];
        for (int v = 0; v < VECS; v++) sums[v] = v_set(0.0f);
        for (int64_t k = 0; k < block->num_ranks; k++) {
            const ft_vec factor = v_set(read[k]);
            for (int v = 0; v < VECS; v++)
                sums[v] = v_fma(v_get(b + k * size, v * FT_WIDTH, FT_WIDTH, dtype), factor, sums[v]);
        }
        for (int v = 0; v < VECS; v++) {
            const int64_t at = first + v * FT_WIDTH, left = block->num_outs - at;
            if (left > 0) v_put(y, at, v_add(v_get(y, at, left, dtype), sums[v]), left, dtype);
        }
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
    int64_t ranks = 0, chunks = 0, numbers = 0, reads = 0, adds = 0;
    for (int64_t i = 0; i < count; i++) {
        const ft_lora *lora = updates[i].lora;
        ranks += lora->ranks;
        numbers += updates[i].num_rows * lora->ranks;
        reads += updates[i].num_rows * lora->ranks * lora->in_features;
        for (int64_t j = 0; j < lora->num_blocks; j++) {
            chunks += num_chunks(&lora->blocks[j]);
            adds += updates[i].num_rows * lora->blocks[j].num_ranks * lora->blocks[j].num_outs;
        }
    }
    if (!ranks) return 0;
    float *hidden = ft_scratch(FT_SCRATCH_LORA, (size_t)numbers * sizeof *hidden);
    if (!hidden) return -1;
    lora_job job = {updates, count, x, y, hidden, dtype};
    ft_parallel(read_some, &job, ranks, ft_max(1, ranks * PIECE / ft_max(reads, 1)));
    ft_parallel(add_some, &job, chunks, ft_max(1, chunks * PIECE / ft_max(adds, 1)));
    return 0;
}
