/* The thread pool: workers take pieces of a job from shared counters.
 *
 * A job is one range of tasks, or one range per thread. With its own range, a thread first takes
 * the pieces of that range in order, which suits a stream of weights, and then the remaining pieces
 * of the other ranges.
 *
 * After a job, a worker spins for some tens of microseconds, because the next operation of a step
 * follows at once. Then it sleeps: on two cores, a spinning thread would take time from the event
 * loop. While it spins, it prefetches the matrix that ft_ahead announced: small operations run in
 * one thread, and memory would be idle meanwhile. The caller never waits for a worker that has not
 * entered the job: it does the work itself, closes the job, and waits only for the workers inside
 * it.
 *
 * A thread that is preempted within a piece delays the whole job. If other processes leave too
 * little time for all threads, this happens every few milliseconds, and fewer threads may be
 * faster. So the caller reads from time to time how long the threads ran and how long they waited
 * for a core. If they waited, it tries one thread less, and keeps that number if the thread added
 * little (ft_crew_judge). Where the system does not report these times, all threads take part.
 */
#define _GNU_SOURCE
#include "common.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

enum { MAX_THREADS = 256, SPINS = 1000, CLOSED = 1 << 30 };
enum {
    LINE = 64,
    BURST = 16 * LINE,         /* bytes prefetched between two checks for a job */
    MOST_AHEAD = 256 * 1024, /* bytes that a worker prefetches: half of a second-level cache */
};

/* Nanoseconds, summed over threads, for which they ran, and for which they waited for a core. */
typedef struct {
    int64_t ran, delayed;
} ft_times;

/* The number of threads that take part, and the trial of another number. */
typedef struct {
    int32_t threads;   /* size of the pool, including the caller */
    int32_t active;    /* threads with numbers below this take part */
    int32_t before;    /* during a trial, the former `active`; else 0 */
    int32_t direction; /* the next trial adds (1) or removes (-1) a thread */
    int32_t patience;  /* windows before the next trial */
    int32_t calm;      /* windows since the last trial */
    int64_t rate;      /* thousandths of a core that the threads used before the trial */
} ft_crew;

enum {
    WINDOW = 100000000, /* nanoseconds of jobs that are judged together */
    LEAST_PATIENCE = 2,
    MOST_PATIENCE = 32,
    MOST_DELAY = 250, /* thousandths of a core: waiting that an event loop alone causes */
};

/* Whether the last of `threads` threads adds at least a sixth of the average rate of the others.
 * Rates include the time that threads spin. */
static int is_worth_it(int32_t threads, int64_t rate, int64_t rate_without) {
    return 6 * (rate - rate_without) * (threads - 1) >= rate_without;
}

static int32_t next_trial(const ft_crew *crew, int is_delayed) {
    const int fewer = is_delayed && crew->active > 1, more = crew->active < crew->threads;
    return fewer && (crew->direction < 0 || !more) ? -1 : more;
}

/* Judge a window of jobs that took `span` ns by the `times` of the threads that took part. */
FT_EXPORT void ft_crew_judge(ft_crew *crew, int64_t span, ft_times times) {
    const int64_t rate = times.ran * 1000 / span;
    if (crew->before) {
        const int32_t step = crew->active - crew->before;
        const int is_kept = step > 0 ? is_worth_it(crew->active, rate, crew->rate)
                                     : !is_worth_it(crew->before, crew->rate, rate);
        crew->patience = is_kept ? LEAST_PATIENCE : (int32_t)ft_min(2 * crew->patience, MOST_PATIENCE);
        crew->direction = is_kept ? step : -step;
        if (!is_kept) crew->active = crew->before;
        crew->before = crew->calm = 0;
    } else if (++crew->calm >= crew->patience) {
        crew->before = crew->active;
        crew->rate = rate;
        crew->active += next_trial(crew, times.delayed * 1000 / span > MOST_DELAY);
        if (crew->active == crew->before) crew->before = 0;
    }
}

static int64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

/* Tasks that are taken in order. Each range has a cache line, because every piece writes to it. */
typedef struct {
    _Alignas(64) _Atomic int64_t next; /* first task not yet taken */
    int64_t end;
} range;

/* The arguments of a worker when it starts. */
typedef struct {
    uint64_t seen; /* number of the last job before the worker started */
    int thread;    /* number of the worker; the caller's is 0 */
    _Atomic pid_t id; /* thread id, set by the worker once it runs */
} start;

/* The window of jobs that is judged next. */
typedef struct {
    int64_t span;   /* nanoseconds of its jobs so far */
    ft_times times; /* times of the active threads up to its start */
    pid_t caller;   /* thread id; 0: the window has not started */
} window;

static struct {
    pthread_mutex_t busy;   /* held by the caller whose job runs, and while the pool is resized */
    pthread_mutex_t lock;   /* guards the sleep of workers and of the caller */
    pthread_cond_t wake;    /* signals a new job, or the end */
    pthread_cond_t finished;
    pthread_t workers[MAX_THREADS];
    start starts[MAX_THREADS];
    int num_workers;
    ft_crew crew;         /* like all fields that are not atomic, only the caller uses it */
    window judged;
    _Atomic int active;   /* threads of the present job */
    ft_work work;
    void *context;
    int64_t grain;
    range ranges[MAX_THREADS];
    int num_ranges;
    _Atomic uint64_t job;     /* counts jobs; workers wait for it to change */
    _Atomic(const char *) ahead; /* memory that the next job of ranges reads */
    _Atomic size_t ahead_bytes;
    _Atomic int gate;         /* number of workers inside the job; + CLOSED when none may enter */
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

/* Take the pieces of the thread's own range, then the remaining pieces of the other ranges. */
static void take_pieces(int thread) {
    for (int i = 0; i < pool.num_ranges; i++)
        take_range(&pool.ranges[(thread + i) % pool.num_ranges]);
}

/* Memory [at, end) that a worker has still to prefetch: a part of the announced memory at `of`. */
typedef struct {
    const char *of, *at, *end;
} fetch;

static int fetch_some(fetch *left, int thread) {
    const char *ahead = atomic_load_explicit(&pool.ahead, memory_order_relaxed);
    if (ahead != left->of) {
        /* The size may belong to another announcement: a prefetch beyond the memory is harmless. */
        const size_t bytes = atomic_load_explicit(&pool.ahead_bytes, memory_order_relaxed);
        const size_t own = bytes / (size_t)atomic_load(&pool.active);
        left->of = ahead;
        left->at = ahead + own * (size_t)thread;
        left->end = left->at + (own < MOST_AHEAD ? own : MOST_AHEAD);
    }
    if (left->at >= left->end) return 0;
    for (int i = 0; i < BURST; i += LINE) __builtin_prefetch(left->at + i, 0, 2);
    left->at += BURST;
    return 1;
}

static void await_job(uint64_t seen, int spins, int thread, fetch *left) {
    for (int i = 0; i < spins;) {
        if (atomic_load(&pool.job) != seen) return;
        if (fetch_some(left, thread)) continue;
        RELAX();
        i++;
    }
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.job) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

static void *worker_main(void *argument) {
    start *self = argument;
    atomic_store(&self->id, gettid());
    uint64_t seen = self->seen;
    fetch left = {0};
    for (;;) {
        const int spins = self->thread < atomic_load(&pool.active) ? SPINS : 0;
        await_job(seen, spins, self->thread, &left);
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

/* Add the times of a thread so far, or nothing if the system does not report them. */
static void add_times(ft_times *times, pid_t thread) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", (int)thread);
    FILE *file = fopen(path, "re");
    long long ran, delayed;
    if (file && fscanf(file, "%lld %lld", &ran, &delayed) == 2) {
        times->ran += ran;
        times->delayed += delayed;
    }
    if (file) fclose(file);
}

static void begin_window(pid_t caller) {
    pool.judged = (window){.caller = caller};
    add_times(&pool.judged.times, caller);
    for (int i = 0; i + 1 < pool.crew.active; i++)
        add_times(&pool.judged.times, atomic_load(&pool.starts[i].id));
}

/* Count a job of `span` nanoseconds, and judge the window once it is full. */
static void note_job(int64_t span) {
    pool.judged.span += span;
    if (pool.judged.span < WINDOW) return;
    const window ended = pool.judged;
    const pid_t caller = gettid();
    const int active = pool.crew.active;
    begin_window(caller);
    if (ended.caller != caller) return;
    const ft_times times = {pool.judged.times.ran - ended.times.ran,
                            pool.judged.times.delayed - ended.times.delayed};
    ft_crew_judge(&pool.crew, ended.span, times);
    if (pool.crew.active != active) begin_window(caller);
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
        note_job(now() - began);
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
    close_job();
    note_job(now() - began);
    pthread_mutex_unlock(&pool.busy);
}

void ft_parallel(ft_work work, void *context, int64_t tasks, int64_t grain) {
    run(work, context, tasks, grain, 0);
}

void ft_parallel_ranges(ft_work work, void *context, int64_t tasks, int64_t grain) {
    run(work, context, tasks, grain, 1);
}

void ft_ahead(const void *memory, size_t bytes) {
    atomic_store_explicit(&pool.ahead_bytes, bytes, memory_order_relaxed);
    atomic_store_explicit(&pool.ahead, memory, memory_order_relaxed);
}

int ft_num_threads(void) { return pool.num_workers + 1; }

static void stop_workers(void) {
    atomic_store(&pool.stop, 1);
    announce();
    for (int i = 0; i < pool.num_workers; i++) pthread_join(pool.workers[i], NULL);
    pool.num_workers = 0;
    atomic_store(&pool.stop, 0);
}

/* A forked child has no workers: its jobs run in the caller alone until it calls ft_set_threads. */
static void forget_workers(void) {
    pool.num_workers = 0;
    atomic_store(&pool.gate, CLOSED);
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.finished, NULL);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

/* Resize the pool to `threads` threads, including the caller of a job; 1 means no workers. Waits
 * for a running job. Returns the new number, which is smaller if the system cannot create so
 * many. */
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
            *self = (start){.seen = seen, .thread = pool.num_workers + 1};
            if (pthread_create(worker, NULL, worker_main, self) != 0) break;
            pool.num_workers++;
        }
    }
    const int count = pool.num_workers + 1;
    pool.crew = (ft_crew){
        .threads = count, .active = count, .direction = -1, .patience = LEAST_PATIENCE};
    pool.judged = (window){0};
    pthread_mutex_unlock(&pool.busy);
    return count;
}

/* Scratch memory of a thread, freed when the thread ends. */
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
