/* How threads go through operations, and the programs that Python makes of them. */
#include "work.h"

#include <stddef.h>

#if defined(_WIN32)
#include <windows.h>
#define YIELD SwitchToThread
#else
#include <sched.h>
#define YIELD sched_yield
#endif

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE __builtin_ia32_pause
#else
#define PAUSE() ((void)0)
#endif

#define MOST_SPINS 4096  /* before a thread that waits lets others have its core */
#define MOST_LINES 2048  /* that are fetched ahead: they fit into the cache of one core */
#define LINES_AT_ONCE 8

typedef struct {
    Operation *operations;
    int32_t num_operations;
    int32_t num_queues;
    atomic_int next_thread;
} Run;

/* What one thread has fetched of the weights that it needs next. */
typedef struct {
    const Operation *operation;
    int32_t num_lines;
} Fetched;

static int32_t first_of(const Operation *operation, int32_t queue, int32_t num_queues) {
    return (int32_t)((int64_t)operation->num_units * queue / num_queues);
}

static Units claim(const Operation *operation, Queue *queue, int is_only) {
    int32_t together = operation->units_together, count;
    int at = atomic_load_explicit(&queue->next, memory_order_relaxed);
    do {
        int32_t left = queue->end - at;
        if (left <= 0) return (Units){0, 0, -1};
        count = at % together == 0 && left >= (is_only ? together : 2 * together) ? together : 1;
    } while (!atomic_compare_exchange_weak_explicit(&queue->next, &at, at + count, memory_order_relaxed,
                                                    memory_order_relaxed));
    return (Units){at, count, at + count < queue->end ? at + count : -1};
}

static void compute(const Run *run, Operation *operation, int32_t thread) {
    int32_t num_done = 0;
    for (int32_t i = 0; i < run->num_queues; ++i) {
        Queue *queue = &operation->queues[(thread + i) % run->num_queues];
        for (Units units; (units = claim(operation, queue, run->num_queues == 1)).count > 0; num_done += units.count)
            operation->kind->compute(operation, units, thread);
    }
    if (num_done > 0) atomic_fetch_add_explicit(&operation->num_done, num_done, memory_order_acq_rel);
}

static int is_complete(const Operation *operation) {
    return atomic_load_explicit((atomic_int *)&operation->num_done, memory_order_acquire) == operation->num_units;
}

/* Gives 0 when enough is fetched. */
static int fetch_some(const Run *run, const Operation *operation, int32_t thread, Fetched *fetched) {
    if (operation == NULL) return 0;
    if (fetched->operation != operation) *fetched = (Fetched){operation, 0};
    int32_t unit = first_of(operation, thread % run->num_queues, run->num_queues);
    for (int i = 0; i < LINES_AT_ONCE; ++i) {
        if (fetched->num_lines >= MOST_LINES) return 0;
        const uint8_t *line = operation->kind->line(operation, unit, fetched->num_lines++);
        if (line == NULL) fetched->num_lines = MOST_LINES;
        else __builtin_prefetch(line, 0, 2);
    }
    return 1;
}

static void wait_for(const Run *run, const Operation *operation, int32_t thread, Fetched *fetched) {
    for (int num_spins = 0; !is_complete(operation);) {
        if (fetch_some(run, operation->later, thread, fetched)) continue;
        if (num_spins++ < MOST_SPINS) PAUSE();
        else YIELD();
    }
}

static void work(void *data) {
    Run *run = data;
    int32_t thread = atomic_fetch_add(&run->next_thread, 1);
    Fetched fetched = {NULL, 0};
    for (int32_t i = 0; i < run->num_operations; ++i) {
        compute(run, &run->operations[i], thread);
        if (i + 1 < run->num_operations) wait_for(run, &run->operations[i], thread, &fetched);
    }
}

static int32_t begin(Run *run, int32_t num_rows) {
    const Operation *later = NULL;
    for (int32_t i = run->num_operations - 1; i >= 0; --i) {
        Operation *operation = &run->operations[i];
        operation->later = later;
        if (operation->kind->line != NULL) later = operation;
        operation->units_together = 1;
        int32_t failed = operation->kind->begin(operation, num_rows);
        if (failed) return failed;
        atomic_store_explicit(&operation->num_done, 0, memory_order_relaxed);
        for (int32_t queue = 0; queue < run->num_queues; ++queue) {
            atomic_store_explicit(&operation->queues[queue].next, first_of(operation, queue, run->num_queues),
                                  memory_order_relaxed);
            operation->queues[queue].end = first_of(operation, queue + 1, run->num_queues);
        }
    }
    return 0;
}

int32_t run_operations(Operation *operations, int32_t num_operations, int32_t num_rows, Parallel *parallel,
                       int32_t num_threads) {
    if (parallel == NULL || num_threads < 1) num_threads = 1;
    Run run = {operations, num_operations, num_threads < MOST_QUEUES ? num_threads : MOST_QUEUES, 0};
    int32_t failed = begin(&run, num_rows);
    if (failed) return failed;
    if (num_threads > 1)
        parallel(work, &run, (unsigned)num_threads, 0);
    else
        work(&run);
    return 0;
}

Operation *next_operation(Program *program) {
    return program->num_operations < program->capacity ? &program->operations[program->num_operations++] : NULL;
}

EXPORTED int64_t program_bytes(int32_t capacity) {
    return (int64_t)sizeof(Program) + capacity * (int64_t)sizeof(Operation);
}

/* Makes an empty program of memory that starts at a multiple of CACHE_LINE. */
EXPORTED void program_start(Program *program, int32_t capacity) {
    program->num_operations = 0;
    program->capacity = capacity;
}

/* Gives 0; or what an operation gave that cannot begin, and then nothing is computed. */
EXPORTED int32_t program_run(Program *program, Parallel *parallel, int32_t num_threads, int32_t num_rows) {
    return run_operations(program->operations, program->num_operations, num_rows, parallel, num_threads);
}
