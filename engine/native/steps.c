/* The functions that Python calls. */
#include "steps.h"
#include "work.h"

#include <stddef.h>
#include <string.h>

/* Its units are rows. */
typedef struct {
    union {
        StepRow *compute;
        const StepKernel *kernel; /* of a drawing */
    };
    int64_t num_slots; /* of a placement */
    union {
        Norm norm;
        Sum sum;
        Placement placement;
        Gating gating;
        Search search;
        Capping capping;
        Drawing drawing;
    } step;
} StepData;

_Static_assert(sizeof(StepData) <= DATA_BYTES, "an operation has no room for it");

EXPORTED int32_t steps_version(void) { return STEPS_VERSION; }

EXPORTED int64_t steps_norm_bytes(void) { return sizeof(Norm); }

EXPORTED int64_t steps_placement_bytes(void) { return sizeof(Placement); }

EXPORTED int64_t steps_drawing_bytes(void) { return sizeof(Drawing); }

/* NULL when this CPU does not have the variant. */
EXPORTED const StepKernel *steps_kernel(const char *variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(variant, "avx2")) return has_avx2 ? &steps_avx2 : NULL;
    if (!strcmp(variant, "avx512")) return has_avx512 ? &steps_avx512 : NULL;
#endif
    return strcmp(variant, "plain") ? NULL : &steps_plain;
}

static int32_t begin(Operation *operation, int32_t num_rows) {
    operation->num_units = num_rows;
    return 0;
}

/* Gives 1 when a slot is not in the pool. */
static int32_t begin_placement(Operation *operation, int32_t num_rows) {
    const StepData *data = (const StepData *)operation->data;
    const Placement *placement = &data->step.placement;
    for (int32_t row = 0; placement->keys != NULL && row < num_rows; ++row)
        if (placement->slots[row] < 0 || placement->slots[row] >= data->num_slots) return 1;
    return begin(operation, num_rows);
}

static void compute(const Operation *operation, Units units, int32_t thread) {
    (void)thread;
    const StepData *data = (const StepData *)operation->data;
    for (int32_t row = units.first; row < units.first + units.count; ++row) data->compute(&data->step, row);
}

static void compute_draws(const Operation *operation, Units units, int32_t thread) {
    const StepData *data = (const StepData *)operation->data;
    const Drawing *step = &data->step.drawing;
    for (int32_t index = units.first; index < units.first + units.count; ++index)
        data->kernel->draw(step, index, step->scratch + thread * step->scratch_bytes);
}

static const OperationKind rows_alone = {begin, compute, NULL}, rows_into_slots = {begin_placement, compute, NULL};
static const OperationKind drawn_rows = {begin, compute_draws, NULL};

static void describe_norm(Operation *operation, const StepKernel *kernel, const Norm *step) {
    operation->kind = &rows_alone;
    *(StepData *)operation->data = (StepData){.compute = kernel->norm, .step.norm = *step};
}

static void describe_place(Operation *operation, const StepKernel *kernel, const Placement *step, int64_t num_slots) {
    operation->kind = &rows_into_slots;
    *(StepData *)operation->data = (StepData){.compute = kernel->place, .num_slots = num_slots, .step.placement = *step};
}

static void describe_gate(Operation *operation, const StepKernel *kernel, Gating step) {
    operation->kind = &rows_alone;
    *(StepData *)operation->data = (StepData){.compute = kernel->gate, .step.gating = step};
}

static void describe_cap(Operation *operation, const StepKernel *kernel, Capping step) {
    operation->kind = &rows_alone;
    *(StepData *)operation->data = (StepData){.compute = kernel->cap, .step.capping = step};
}

static void describe_search(Operation *operation, const StepKernel *kernel, Search step) {
    operation->kind = &rows_alone;
    *(StepData *)operation->data = (StepData){.compute = kernel->search, .step.search = step};
}

/* All rows by num_threads threads of `parallel` (GOMP_parallel), or by this one alone. */
EXPORTED void steps_norm(const StepKernel *kernel, Parallel *parallel, int32_t num_threads, const Norm *step,
                         int32_t num_rows) {
    Operation operation;
    describe_norm(&operation, kernel, step);
    run_operations(&operation, 1, num_rows, parallel, num_threads);
}

/* Gives 1, and changes nothing, when a slot is not among num_slots. */
EXPORTED int32_t steps_place(const StepKernel *kernel, Parallel *parallel, int32_t num_threads,
                             const Placement *placement, int32_t num_rows, int64_t num_slots) {
    Operation operation;
    describe_place(&operation, kernel, placement, num_slots);
    return run_operations(&operation, 1, num_rows, parallel, num_threads);
}

EXPORTED void steps_gate(const StepKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t element,
                         int32_t activation, int32_t num_rows, int32_t num_columns, const uint8_t *gates,
                         int64_t stride, uint8_t *output) {
    Operation operation;
    describe_gate(&operation, kernel, (Gating){element, activation, num_columns, gates, stride, output});
    run_operations(&operation, 1, num_rows, parallel, num_threads);
}

EXPORTED void steps_cap(const StepKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t element,
                        int32_t num_rows, int32_t num_columns, uint8_t *rows, int64_t stride, float cap) {
    Operation operation;
    describe_cap(&operation, kernel, (Capping){element, num_columns, cap, rows, stride});
    run_operations(&operation, 1, num_rows, parallel, num_threads);
}

EXPORTED void steps_search(const StepKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t element,
                           int32_t num_rows, int32_t num_columns, const uint8_t *rows, int64_t stride, float *highest,
                           int64_t *places) {
    Operation operation;
    describe_search(&operation, kernel, (Search){element, num_columns, rows, stride, highest, places});
    run_operations(&operation, 1, num_rows, parallel, num_threads);
}

/* Memory that a thread needs to draw from rows of so many columns: masses, weights, candidates and maxima of chunks. */
EXPORTED int64_t steps_draw_bytes(int64_t num_columns) {
    int64_t num_chunks = (num_columns + DRAW_CHUNK - 1) / DRAW_CHUNK;
    int64_t bytes = num_chunks * 8 + 2 * num_chunks * DRAW_CHUNK * 4 + (num_chunks + 2 * MOST_GROUP) * 4;
    return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

EXPORTED void steps_draw(const StepKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t num_draws,
                         const Drawing *step) {
    Operation operation = {.kind = &drawn_rows};
    *(StepData *)operation.data = (StepData){.kernel = kernel, .step.drawing = *step};
    run_operations(&operation, 1, num_draws, parallel, num_threads);
}

/* Add a step to a program, which gives the rows. Give 0, or -1 when the program is full. */
EXPORTED int32_t steps_add_norm(Program *program, const StepKernel *kernel, const Norm *step) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe_norm(operation, kernel, step);
    return 0;
}

EXPORTED int32_t steps_add_sum(Program *program, const StepKernel *kernel, int32_t element, int32_t num_columns,
                               uint8_t *x, const uint8_t *delta) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    operation->kind = &rows_alone;
    Sum step = {element, num_columns, x, delta};
    *(StepData *)operation->data = (StepData){.compute = kernel->sum, .step.sum = step};
    return 0;
}

EXPORTED int32_t steps_add_place(Program *program, const StepKernel *kernel, const Placement *placement,
                                 int64_t num_slots) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe_place(operation, kernel, placement, num_slots);
    return 0;
}

EXPORTED int32_t steps_add_gate(Program *program, const StepKernel *kernel, int32_t element, int32_t activation,
                                int32_t num_columns, const uint8_t *gates, int64_t stride, uint8_t *output) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe_gate(operation, kernel, (Gating){element, activation, num_columns, gates, stride, output});
    return 0;
}

EXPORTED int32_t steps_add_cap(Program *program, const StepKernel *kernel, int32_t element, int32_t num_columns,
                               uint8_t *rows, int64_t stride, float cap) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe_cap(operation, kernel, (Capping){element, num_columns, cap, rows, stride});
    return 0;
}

EXPORTED int32_t steps_add_search(Program *program, const StepKernel *kernel, int32_t element, int32_t num_columns,
                                  const uint8_t *rows, int64_t stride, float *highest, int64_t *places) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe_search(operation, kernel, (Search){element, num_columns, rows, stride, highest, places});
    return 0;
}
