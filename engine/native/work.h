/* How threads divide work: operations in a row, each of units that any thread may compute in any order.
 *
 * A thread takes the units of its own queue, then what is left in the queues of others. The units of an operation are
 * begun when all those before are complete. So nobody waits for a thread that comes late, or not at all: only for
 * units that one has begun. Who waits fetches the weights that it needs next.
 */
#ifndef SPLITSERVE_WORK_H
#define SPLITSERVE_WORK_H

#include <stdatomic.h>
#include <stdint.h>

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

#define CACHE_LINE 64
#define MOST_QUEUES 16  /* more threads share them */
#define DATA_BYTES 192  /* of an operation's own */

/* GOMP_parallel */
typedef void Parallel(void (*worker)(void *), void *data, unsigned num_threads, unsigned flags);

typedef struct {
    int32_t first;
    int32_t count; /* 0: nothing is left */
    int32_t next;  /* what is probably computed next, or -1 */
} Units;

typedef struct Operation Operation;

typedef struct {
    /* Sets how many units there are for so many rows. Gives 0; otherwise nothing at all is computed. */
    int32_t (*begin)(Operation *operation, int32_t num_rows);
    /* `thread` is less than the number of threads. */
    void (*compute)(const Operation *operation, Units units, int32_t thread);
    /* A line of the weights of a unit, to be fetched; NULL after the last. No function where there are no weights. */
    const uint8_t *(*line)(const Operation *operation, int32_t unit, int32_t line);
} OperationKind;

typedef struct {
    _Alignas(CACHE_LINE) atomic_int next;
    int32_t end;
} Queue;

struct Operation {
    const OperationKind *kind;
    const Operation *later; /* the next one with weights, or NULL */
    int32_t num_units;
    int32_t units_together; /* so many are taken at once, as long as there are plenty */
    _Alignas(CACHE_LINE) atomic_int num_done;
    Queue queues[MOST_QUEUES];
    _Alignas(CACHE_LINE) uint8_t data[DATA_BYTES];
};

/* Computes the operations in their order, by num_threads threads of `parallel`, or by this one alone. Gives 0; or what
 * an operation gave that cannot begin, and then nothing is computed. */
int32_t run_operations(Operation *operations, int32_t num_operations, int32_t num_rows, Parallel *parallel,
                       int32_t num_threads);

/* Operations that are run again and again. */
typedef struct {
    int32_t num_operations;
    int32_t capacity;
    _Alignas(CACHE_LINE) Operation operations[];
} Program;

/* The next operation of a program, to be filled in; NULL when it is full. */
Operation *next_operation(Program *program);

#endif
