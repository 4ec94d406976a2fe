/* The thread pool: workers take pieces of a job from shared counters.
 *
 * A job is one range of tasks, or a range for each thread: then a thread takes the pieces of its own
 * range one after the other, as a stream of weights wants it, and afterwards what is left of others.
 *
 * After a job a worker spins for some tens of microseconds, as the next operation of a step follows
 * at once, and then sleeps: beside an event loop on two cores, a spinning thread steals its time.
 * The caller never waits for a worker that has not come yet: it does the work itself, closes the
 * job, and waits for those inside only.
 *
 * A worker that the system takes off its core within a piece holds up the whole job. Where other
 * processes leave too little for all threads, that happens in every few milliseconds, and fewer
 * threads are faster than many that wait for each other. So the caller counts how long it waits, and
 * leaves workers out, one after the other, while that is much of the time (ft_crew_note).
 */
#define _GNU_SOURCE
#include "common.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

enum { MAX_THREADS = 256, SPINS = 1000, CLOSED = 1 << 30 };

/* How many threads take part, and the time that is judged. All times in nanoseconds. */
typedef struct {
    int32_t threads;  /* there are so many, the caller included */
    int32_t active;   /* those with smaller numbers take part */
    int32_t patience; /* windows without long waits before one more is tried */
    int32_t calm;     /* such windows since the last change */
    int64_t span, waited; /* of the window that is filled now */
} ft_crew;

enum {
    LONG_WAIT = 100000,  /* of a caller: longer than a piece, but for those of the largest models */
    WINDOW = 20000000,   /* of jobs, after which they are judged */
    LEAST_PATIENCE = 4,  /* windows */
    MOST_PATIENCE = 64,
};

/* Takes note of a job that took `span`, of which the caller waited `waited` for others at the end. */
FT_EXPORT void ft_crew_note(ft_crew *crew, int64_t span, int64_t waited) {
    crew->span += span;
    if (waited >= LONG_WAIT) crew->waited += waited;
    if (crew->span < WINDOW) return;
    const int held_up = crew->waited > crew->span / 4;
    crew->span = crew->waited = 0;
    crew->calm = held_up ? 0 : crew->calm + 1;
    if (held_up && crew->active > 1) {
        crew->active--;
        crew->patience = (int32_t)ft_min(2 * crew->patience, MOST_PATIENCE);
    } else if (crew->calm >= crew->patience && crew->active < crew->threads) {
        crew->active++;
        crew->calm = 0;
    } else if (crew->calm >= MOST_PATIENCE) {
        crew->patience = LEAST_PATIENCE;
    }
}

static int64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

/* Tasks that are taken in order. On a cache line of its own: every piece writes to it. */
typedef struct {
    _Alignas(64) _Atomic int64_t next; /* first task not yet taken */
    int64_t end;
} range;

/* The arguments of a worker when it starts. */
typedef struct {
    uint64_t seen; /* the last job before it */
    int thread;    /* its number; the caller's is 0 */
} start;

static struct {
    pthread_mutex_t busy;   /* held by the caller whose job runs, and while the pool is resized */
    pthread_mutex_t lock;   /* guards the sleep of workers and of the caller */
    pthread_cond_t wake;    /* a new job, or the end */
    pthread_cond_t finished;
    pthread_t workers[MAX_THREADS];
    start starts[MAX_THREADS];
    int num_workers;
    ft_crew crew;         /* the caller's, as all here but what is atomic */
    _Atomic int active;   /* threads of the present job */
    ft_work work;
    void *context;
    int64_t grain;
    range ranges[MAX_THREADS];
    int num_ranges;
    _Atomic uint64_t job;     /* counts jobs; workers wait for it to change */
    _Atomic int gate;         /* workers inside the job; + CLOSED when none may enter */
    _Atomic int stop;
} pool = {
    .busy = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .finished = PTHREAD_COND_INITIALIZER,
    .gate = CLOSED,
};

static void take_range(range *from) {
    for (;;) {
        int64_t begin = atomic_fetch_add(&from->next, pool.grain);
        if (begin >= from->end) return;
        pool.work(pool.context, begin, ft_min(begin + pool.grain, from->end));
    }
}

/* The thread's own range, then those of the others. */
static void take_pieces(int thread) {
    for (int i = 0; i < pool.num_ranges; i++)
        take_range(&pool.ranges[(thread + i) % pool.num_ranges]);
}

static void await_job(uint64_t seen, int spins) {
    for (int i = 0; i < spins; i++) {
        if (atomic_load(&pool.job) != seen) return;
        RELAX();
    }
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.job) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

static void *worker_main(void *argument) {
    const start *self = argument;
    uint64_t seen = self->seen;
    for (;;) {
        await_job(seen, self->thread < atomic_load(&pool.active) ? SPINS : 0);
        seen = atomic_load(&pool.job);
        if (atomic_load(&pool.stop)) return NULL;
        if (self->thread >= atomic_load(&pool.active)) continue;
        if (!(atomic_fetch_add(&pool.gate, 1) & CLOSED)) take_pieces(self->thread);
        if (atomic_fetch_sub(&pool.gate, 1) == CLOSED + 1) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.finished);
            pthread_mutex_unlock(&pool.lock);
        }
    }
}

static void announce(void) {
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.job, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
}

static void close_job(void) {
    atomic_fetch_or(&pool.gate, CLOSED);
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load(&pool.gate) == CLOSED) return;
        RELAX();
    }
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.gate) != CLOSED) pthread_cond_wait(&pool.finished, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

static void cut_ranges(int64_t tasks, int num_ranges) {
    pool.num_ranges = num_ranges;
    for (int i = 0; i < num_ranges; i++) {
        atomic_store(&pool.ranges[i].next, tasks * i / num_ranges);
        pool.ranges[i].end = tasks * (i + 1) / num_ranges;
    }
}

static void run(ft_work work, void *context, int64_t tasks, int64_t grain, int has_ranges) {
    if (tasks <= 0) return;
    if (tasks <= grain || pthread_mutex_trylock(&pool.busy) != 0) {
        work(context, 0, tasks);
        return;
    }
    if (pool.num_workers == 0) {
        pthread_mutex_unlock(&pool.busy);
        work(context, 0, tasks);
        return;
    }
    const int64_t began = now();
    if (pool.crew.active == 1) {
        work(context, 0, tasks);
        ft_crew_note(&pool.crew, now() - began, 0);
        pthread_mutex_unlock(&pool.busy);
        return;
    }
    pool.work = work;
    pool.context = context;
    pool.grain = grain;
    cut_ranges(tasks, has_ranges ? pool.crew.active : 1);
    atomic_store(&pool.active, pool.crew.active);
    atomic_fetch_and(&pool.gate, ~CLOSED);
    announce();
    take_pieces(0);
    const int64_t alone = now();
    close_job();
    const int64_t ended = now();
    ft_crew_note(&pool.crew, ended - began, ended - alone);
    pthread_mutex_unlock(&pool.busy);
}

void ft_parallel(ft_work work, void *context, int64_t tasks, int64_t grain) {
    run(work, context, tasks, grain, 0);
}

void ft_parallel_ranges(ft_work work, void *context, int64_t tasks, int64_t grain) {
    run(work, context, tasks, grain, 1);
}

int ft_num_threads(void) { return pool.num_workers + 1; }

static void stop_workers(void) {
    atomic_store(&pool.stop, 1);
    announce();
    for (int i = 0; i < pool.num_workers; i++) pthread_join(pool.workers[i], NULL);
    pool.num_workers = 0;
    atomic_store(&pool.stop, 0);
}

/* A forked child has no workers; its first jobs run in the caller alone. */
static void forget_workers(void) {
    pool.num_workers = 0;
    atomic_store(&pool.gate, CLOSED);
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.finished, NULL);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

/* Resize the pool to `threads`, the caller of a job included; 1 means no pool. Returns how many
 * there are now: fewer when the system gives no more. Waits for a running job. */
FT_EXPORT int ft_set_threads(int threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&pool.busy);
    int wanted = (int)ft_min(ft_max(threads, 1), MAX_THREADS) - 1;
    if (wanted != pool.num_workers) {
        stop_workers();
        uint64_t seen = atomic_load(&pool.job);
        while (pool.num_workers < wanted) {
            pthread_t *worker = &pool.workers[pool.num_workers];
            start *self = &pool.starts[pool.num_workers];
            *self = (start){seen, pool.num_workers + 1};
            if (pthread_create(worker, NULL, worker_main, self) != 0) break;
            pool.num_workers++;
        }
    }
    const int count = pool.num_workers + 1;
    pool.crew = (ft_crew){.threads = count, .active = count, .patience = LEAST_PATIENCE};
    pthread_mutex_unlock(&pool.busy);
    return count;
}

/* Memory of a thread, given back when it ends. */
struct arena {
    void *data[FT_SCRATCH_SLOTS];
    size_t bytes[FT_SCRATCH_SLOTS];
};
static pthread_key_t arena_key;
static pthread_once_t arena_once = PTHREAD_ONCE_INIT;

static void free_arena(void *value) {
    struct arena *arena = value;
    for (int i = 0; i < FT_SCRATCH_SLOTS; i++) free(arena->data[i]);
    free(arena);
}

static void make_arena_key(void) { pthread_key_create(&arena_key, free_arena); }

void *ft_scratch(int slot, size_t bytes) {
    pthread_once(&arena_once, make_arena_key);
    struct arena *arena = pthread_getspecific(arena_key);
    if (!arena) {
        arena = calloc(1, sizeof *arena);
        if (!arena) return NULL;
        pthread_setspecific(arena_key, arena);
    }
    if (arena->bytes[slot] < bytes) {
        size_t rounded = (bytes + 4095) / 4096 * 4096;
        free(arena->data[slot]);
        arena->data[slot] = aligned_alloc(64, rounded);
        arena->bytes[slot] = arena->data[slot] ? rounded : 0;
    }
    return arena->data[slot];
}
