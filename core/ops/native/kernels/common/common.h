/* What every kernel shares: number types, the thread pool, scratch memory.
 *
 * Law: a row's result bits depend on that row alone, not on the rows beside it, their number or
 * the number of threads. So every output element is summed in one fixed order, products are fused
 * only where an intrinsic says so (-ffp-contract=off), and a task's work follows from its index.
 */
#ifndef FT_COMMON_H
#define FT_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FT_EXPORT __attribute__((visibility("default")))
#define FT_INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

enum { FT_FLOAT32 = 0, FT_BFLOAT16 = 1 }; /* dtype of activations */

FT_INLINE float ft_from_bf16(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

/* Round to nearest, ties to even. A NaN keeps its sign and stays one. */
FT_INLINE bf16 ft_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40u);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

FT_INLINE int64_t ft_min(int64_t a, int64_t b) { return a < b ? a : b; }
FT_INLINE int64_t ft_max(int64_t a, int64_t b) { return a > b ? a : b; }
FT_INLINE int64_t ft_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Work on tasks [begin, end) of a job. `context` is the caller's, alive until the job is done. */
typedef void (*ft_work)(void *context, int64_t begin, int64_t end);

/* Run tasks [0, tasks) on the pool in pieces of `grain`, the caller taking part; returns when all
 * are done. Which thread takes a piece is left to chance (a core that is busy with something else
 * takes fewer), so a task must not depend on its thread. A call while the pool is busy, as from a
 * task or a second thread, runs in the caller alone. */
void ft_parallel(ft_work work, void *context, int64_t tasks, int64_t grain);

/* The same, but each thread begins with a range of its own of neighbouring tasks, for tasks that
 * read neighbouring memory: what one of them fetches ahead is then used by the same core. */
void ft_parallel_ranges(ft_work work, void *context, int64_t tasks, int64_t grain);

/* Say what the next call of `ft_parallel_ranges` reads, evenly by task: threads that wait for it fetch
 * some of it. To be said before the job behind which they wait. */
void ft_ahead(const void *memory, size_t bytes);

/* Threads of the pool, the caller included. */
int ft_num_threads(void);

/* At least `bytes` of memory of this thread's own, 64-byte aligned, kept until its next call with
 * the same slot. NULL when there is no memory. Which slot is whose: */
enum {
    FT_SCRATCH_LINEAR,
    FT_SCRATCH_AMX,
    FT_SCRATCH_ATTENTION,
    FT_SCRATCH_ATTENTION_PLAN,
    FT_SCRATCH_STEP,
    FT_SCRATCH_PASS,
    FT_SCRATCH_EXPERTS,
    FT_SCRATCH_JOBS,
    FT_SCRATCH_SAMPLE,
    FT_SCRATCH_STATE,
    FT_SCRATCH_LATENT,
    FT_SCRATCH_LORA,
    FT_SCRATCH_UPDATES,
    FT_SCRATCH_SLOTS
};
void *ft_scratch(int slot, size_t bytes);

#endif
