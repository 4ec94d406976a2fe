/* Number types, the thread pool and scratch memory, shared by all kernels.
 *
 * Invariant: the result bits of a row depend on that row alone, not on the other rows of the batch,
 * their number or the number of threads. So every output element is summed in one fixed order,
 * multiply and add are fused only where an intrinsic asks for it (-ffp-contract=off), and the work
 * of a task follows from its index.
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

/* Round to nearest, ties to even. A NaN stays a NaN and keeps its sign. */
FT_INLINE bf16 ft_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40u);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

FT_INLINE int64_t ft_min(int64_t a, int64_t b) { return a < b ? a : b; }
FT_INLINE int64_t ft_max(int64_t a, int64_t b) { return a > b ? a : b; }
FT_INLINE int64_t ft_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Work on tasks [begin, end) of a job. The caller keeps `context` alive until the job is done. */
typedef void (*ft_work)(void *context, int64_t begin, int64_t end);

/* Run tasks [0, tasks) on the pool in pieces of `grain` tasks; the caller takes part. Returns when
 * all are done. Any thread may take any piece (threads on busy cores take fewer), so a task must
 * not depend on its thread. If the pool is busy (the call comes from a task or a second thread),
 * the caller runs all tasks alone. */
void ft_parallel(ft_work work, void *context, int64_t tasks, int64_t grain);

/* Like ft_parallel, but each thread starts with its own range of neighbouring tasks. This is for
 * tasks that read neighbouring memory: a core then uses the memory that its last task
 * prefetched. */
void ft_parallel_ranges(ft_work work, void *context, int64_t tasks, int64_t grain);

/* Announce the memory that the next call of `ft_parallel_ranges` reads, in equal shares per task,
 * so that waiting threads prefetch some of it. Call it before the job after which they wait. */
void ft_ahead(const void *memory, size_t bytes);

/* Number of threads of the pool, including the caller. */
int ft_num_threads(void);

/* Return at least `bytes` of memory, 64-byte aligned, that belongs to this thread until its next
 * call with the same slot; NULL when there is no memory. Each kind of use has its own slot: */
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
