/* Division of work over threads: a sequence of operations, each of units that any thread may compute in any order.
 *
 * A thread takes the units of its own queue, then those left in the queues of others. The units of an operation begin
 * when all units of the operation before are complete. So no thread waits for a thread that comes late, or not at all,
 * but only for units already begun. A waiting thread fetches the weights that it needs next.
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
#define MOST_QUEUES 16  /* further threads share queues */
#define DATA_BYTES 192  /* an operation's own arguments */

/* GOMP_parallel */
typedef void Parallel(void (*worker)(void *), void *data, unsigned num_threads, unsigned flags);

typedef struct {
    int32_t first;
    int32_t count; /* 0: no work is left */
    int32_t next;  /* the probable next unit, or -1 */
} Units;

typedef struct Operation Operation;

typedef struct {
    /* Sets the number of units for num_rows rows. Returns 0; otherwise no operation is computed. */
    int32_t (*begin)(Operation *operation, int32_t num_rows);
    /* `thread` is less than the number of threads. */
    void (*compute)(const Operation *operation, Units units, int32_t thread);
    /* The address of a line of a unit's weights to fetch; NULL after the last. No function for an operation without
     * weights. */
    const uint8_t *(*line)(const Operation *operation, int32_t unit, int32_t line);
} OperationKind;

typedef struct {
    _Alignas(CACHE_LINE) atomic_int next;
    int32_t end;
} Queue;

struct Operation {
    const OperationKind *kind;
    const Operation *later; /* the next operation with weights, or NULL */
    int32_t num_units;
    int32_t units_together; /* units taken at once while there are plenty */
    _Alignas(CACHE_LINE) atomic_int num_done;
    Queue queues[MOST_QUEUES];
    _Alignas(CACHE_LINE) uint8_t data[DATA_BYTES];
};

/* Computes the operations in order, with num_threads threads of `parallel`, or with this thread alone. Returns 0; or
 * the error of an operation that cannot begin, with nothing computed. */
int32_t run_operations(Operation *operations, int32_t num_operations, int32_t num_rows, Parallel *parallel,
                       int32_t num_threads);

/* A program: operations that run repeatedly. */
typedef struct {
    int32_t num_operations;
    int32_t capacity;
    _Alignas(CACHE_LINE) Operation operations[];
} Program;

/* The next operation of a program, for the caller to fill in; NULL if the program is full. */
Operation *next_operation(Program *program);

#endif
