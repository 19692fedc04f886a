/* The functions that Python calls. */
#include "ops.h"
#include "work.h"

#include <stddef.h>
#include <string.h>

/* Its units are rows. */
typedef struct {
    union {
        OpRow *compute;
        const OpsKernel *kernel; /* of a batch */
    };
    int64_t num_slots; /* of a store */
    const int64_t *const *slots; /* where a run of a program finds the slots of its store */
    union {
        Norm norm;
        Sum sum;
        HeadStore store;
        Gating gating;
        Search search;
        Capping capping;
        Gather gather;
        SamplingBatch batch;
    } op;
} OpData;

_Static_assert(sizeof(OpData) <= DATA_BYTES, "an operation has no room for it");

EXPORTED int32_t ops_version(void) { return OPS_VERSION; }

EXPORTED int64_t ops_norm_bytes(void) { return sizeof(Norm); }

EXPORTED int64_t ops_head_store_bytes(void) { return sizeof(HeadStore); }

EXPORTED int64_t ops_sampling_batch_bytes(void) { return sizeof(SamplingBatch); }

/* NULL when this CPU does not have the variant. */
EXPORTED const OpsKernel *ops_kernel(const char *variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(variant, "avx2")) return has_avx2 ? &ops_avx2 : NULL;
    if (!strcmp(variant, "avx512")) return has_avx512 ? &ops_avx512 : NULL;
#endif
    return strcmp(variant, "plain") ? NULL : &ops_plain;
}

static int32_t begin(Operation *operation, int32_t num_rows) {
    operation->num_units = num_rows;
    return 0;
}

/* Gives 1 when a slot is not in the pool. */
static int32_t begin_store(Operation *operation, int32_t num_rows) {
    OpData *data = (OpData *)operation->data;
    HeadStore *store = &data->op.store;
    if (data->slots != NULL) store->slots = *data->slots;
    for (int32_t row = 0; store->keys != NULL && row < num_rows; ++row)
        if (store->slots[row] < 0 || store->slots[row] >= data->num_slots) return 1;
    return begin(operation, num_rows);
}

/* Gives 1 when the table does not have one of the rows. */
static int32_t begin_gather(Operation *operation, int32_t num_rows) {
    const Gather *op = &((const OpData *)operation->data)->op.gather;
    for (int32_t row = 0; row < num_rows; ++row)
        if ((*op->numbers)[row] < 0 || (*op->numbers)[row] >= op->table->num_rows) return 1;
    return begin(operation, num_rows);
}

static void gather_row(const void *gather, int64_t row) {
    const Gather *op = gather;
    memcpy(op->output + row * op->row_bytes, op->table->rows + (*op->numbers)[row] * op->row_bytes,
           (size_t)op->row_bytes);
}

static void compute(const Operation *operation, Units units, int32_t thread) {
    (void)thread;
    const OpData *data = (const OpData *)operation->data;
    for (int32_t row = units.first; row < units.first + units.count; ++row) data->compute(&data->op, row);
}

static void compute_samplings(const Operation *operation, Units units, int32_t thread) {
    const OpData *data = (const OpData *)operation->data;
    const SamplingBatch *op = &data->op.batch;
    for (int32_t index = units.first; index < units.first + units.count; ++index)
        data->kernel->sample(op, index, op->scratch + thread * op->scratch_bytes);
}

static const OperationKind rows_alone = {begin, compute, NULL}, rows_into_slots = {begin_store, compute, NULL};
static const OperationKind gathered_rows = {begin_gather, compute, NULL};
static const OperationKind sampled_rows = {begin, compute_samplings, NULL};

static void describe_norm(Operation *operation, const OpsKernel *kernel, const Norm *op) {
    operation->kind = &rows_alone;
    *(OpData *)operation->data = (OpData){.compute = kernel->norm, .op.norm = *op};
}

static void describe_store(Operation *operation, const OpsKernel *kernel, const HeadStore *op, int64_t num_slots) {
    operation->kind = &rows_into_slots;
    *(OpData *)operation->data = (OpData){.compute = kernel->rotate_and_store, .num_slots = num_slots, .op.store = *op};
}

static void describe_gate(Operation *operation, const OpsKernel *kernel, Gating op) {
    operation->kind = &rows_alone;
    *(OpData *)operation->data = (OpData){.compute = kernel->gate, .op.gating = op};
}

static void describe_cap(Operation *operation, const OpsKernel *kernel, Capping op) {
    operation->kind = &rows_alone;
    *(OpData *)operation->data = (OpData){.compute = kernel->cap, .op.capping = op};
}

static void describe_search(Operation *operation, const OpsKernel *kernel, Search op) {
    operation->kind = &rows_alone;
    *(OpData *)operation->data = (OpData){.compute = kernel->search, .op.search = op};
}

/* All rows by num_threads threads of `parallel` (GOMP_parallel), or by this one alone. */
EXPORTED void ops_norm(const OpsKernel *kernel, Parallel *parallel, int32_t num_threads, const Norm *op,
                         int32_t num_rows) {
    Operation operation;
    describe_norm(&operation, kernel, op);
    run_operations(&operation, 1, num_rows, parallel, num_threads);
}

/* Gives 1, and changes nothing, when a slot is not among num_slots. */
EXPORTED int32_t ops_rotate_and_store(const OpsKernel *kernel, Parallel *parallel, int32_t num_threads,
                             const HeadStore *store, int32_t num_rows, int64_t num_slots) {
    Operation operation;
    describe_store(&operation, kernel, store, num_slots);
    return run_operations(&operation, 1, num_rows, parallel, num_threads);
}

EXPORTED void ops_gate(const OpsKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t element,
                         int32_t activation, int32_t num_rows, int32_t num_columns, const uint8_t *gates,
                         int64_t stride, uint8_t *output) {
    Operation operation;
    describe_gate(&operation, kernel, (Gating){element, activation, num_columns, gates, stride, output});
    run_operations(&operation, 1, num_rows, parallel, num_threads);
}

EXPORTED void ops_cap(const OpsKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t element,
                        int32_t num_rows, int32_t num_columns, uint8_t *rows, int64_t stride, float cap) {
    Operation operation;
    describe_cap(&operation, kernel, (Capping){element, num_columns, cap, rows, stride});
    run_operations(&operation, 1, num_rows, parallel, num_threads);
}

EXPORTED void ops_search(const OpsKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t element,
                           int32_t num_rows, int32_t num_columns, const uint8_t *rows, int64_t stride, float *highest,
                           int64_t *places) {
    Operation operation;
    describe_search(&operation, kernel, (Search){element, num_columns, rows, stride, highest, places});
    run_operations(&operation, 1, num_rows, parallel, num_threads);
}

/* Memory that a thread needs to sample from rows of so many columns: masses, weights, candidates and maxima of chunks. */
EXPORTED int64_t ops_sample_bytes(int64_t num_columns) {
    int64_t num_chunks = (num_columns + SAMPLE_CHUNK - 1) / SAMPLE_CHUNK;
    int64_t bytes = num_chunks * 8 + 2 * num_chunks * SAMPLE_CHUNK * 4 + (num_chunks + 2 * MOST_GROUP) * 4;
    return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

EXPORTED void ops_sample(const OpsKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t num_samplings,
                         const SamplingBatch *op) {
    Operation operation = {.kind = &sampled_rows};
    *(OpData *)operation.data = (OpData){.kernel = kernel, .op.batch = *op};
    run_operations(&operation, 1, num_samplings, parallel, num_threads);
}

/* Add a op to a program, which gives the rows. Give 0, or -1 when the program is full. */
EXPORTED int32_t ops_add_norm(Program *program, const OpsKernel *kernel, const Norm *op) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe_norm(operation, kernel, op);
    return 0;
}

EXPORTED int32_t ops_add_sum(Program *program, const OpsKernel *kernel, int32_t element, int32_t num_columns,
                               uint8_t *x, const uint8_t *delta) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    operation->kind = &rows_alone;
    Sum op = {element, num_columns, x, delta};
    *(OpData *)operation->data = (OpData){.compute = kernel->sum, .op.sum = op};
    return 0;
}

/* Each run finds its slots at `slots`. */
EXPORTED int32_t ops_add_rotate_and_store(Program *program, const OpsKernel *kernel, const HeadStore *store,
                                 int64_t num_slots, const int64_t *const *slots) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe_store(operation, kernel, store, num_slots);
    ((OpData *)operation->data)->slots = slots;
    return 0;
}

EXPORTED int32_t ops_add_gather(Program *program, const Table *table, const int64_t *const *numbers, int64_t row_bytes,
                                uint8_t *output) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    operation->kind = &gathered_rows;
    Gather op = {table, numbers, row_bytes, output};
    *(OpData *)operation->data = (OpData){.compute = gather_row, .op.gather = op};
    return 0;
}

EXPORTED int32_t ops_add_gate(Program *program, const OpsKernel *kernel, int32_t element, int32_t activation,
                                int32_t num_columns, const uint8_t *gates, int64_t stride, uint8_t *output) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe_gate(operation, kernel, (Gating){element, activation, num_columns, gates, stride, output});
    return 0;
}

EXPORTED int32_t ops_add_cap(Program *program, const OpsKernel *kernel, int32_t element, int32_t num_columns,
                               uint8_t *rows, int64_t stride, float cap) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe_cap(operation, kernel, (Capping){element, num_columns, cap, rows, stride});
    return 0;
}

EXPORTED int32_t ops_add_search(Program *program, const OpsKernel *kernel, int32_t element, int32_t num_columns,
                                  const uint8_t *rows, int64_t stride, float *highest, int64_t *places) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe_search(operation, kernel, (Search){element, num_columns, rows, stride, highest, places});
    return 0;
}
