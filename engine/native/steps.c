/* The functions that Python calls. */
#include "steps.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

#define MOST_PARTS 256

typedef void Parallel(void (*worker)(void *), void *data, unsigned num_threads, unsigned flags);

typedef struct {
    StepRow *compute;
    const void *step;
    int64_t num_rows;
    int32_t num_parts;
    atomic_int next_part;
} Run;

EXPORTED int32_t steps_version(void) { return STEPS_VERSION; }

EXPORTED int64_t steps_placement_bytes(void) { return sizeof(Placement); }

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

static void work(void *data) {
    Run *run = data;
    for (int part; (part = atomic_fetch_add(&run->next_part, 1)) < run->num_parts;) {
        int64_t end = run->num_rows * (part + 1) / run->num_parts;
        for (int64_t row = run->num_rows * part / run->num_parts; row < end; ++row) run->compute(run->step, row);
    }
}

/* All rows by num_threads threads of `parallel` (GOMP_parallel), or by this one alone. */
static void run_rows(StepRow *compute, const void *step, int64_t num_rows, Parallel *parallel, int32_t num_threads) {
    Run run = {.compute = compute, .step = step, .num_rows = num_rows, .num_parts = 1};
    if (parallel == NULL || num_threads < 2) {
        work(&run);
        return;
    }
    run.num_parts = num_threads < MOST_PARTS ? num_threads : MOST_PARTS;
    parallel(work, &run, (unsigned)run.num_parts, 0);
}

EXPORTED void steps_norm(const StepKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t element,
                         int64_t num_rows, int32_t num_columns, float eps, const uint8_t *weight, uint8_t *x,
                         int64_t x_stride, const uint8_t *delta, int64_t delta_stride, uint8_t *output) {
    Norm step = {element, num_columns, eps, weight, x, x_stride, delta, delta_stride, output};
    run_rows(kernel->norm, &step, num_rows, parallel, num_threads);
}

/* Gives 1, and changes nothing, when a slot is not among num_slots. */
EXPORTED int32_t steps_place(const StepKernel *kernel, Parallel *parallel, int32_t num_threads,
                             const Placement *placement, int64_t num_rows, int64_t num_slots) {
    for (int64_t row = 0; placement->keys != NULL && row < num_rows; ++row)
        if (placement->slots[row] < 0 || placement->slots[row] >= num_slots) return 1;
    run_rows(kernel->place, placement, num_rows, parallel, num_threads);
    return 0;
}

EXPORTED void steps_gate(const StepKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t element,
                         int64_t num_rows, int32_t num_columns, const uint8_t *gates, int64_t stride,
                         uint8_t *output) {
    Gating step = {element, num_columns, gates, stride, output};
    run_rows(kernel->gate, &step, num_rows, parallel, num_threads);
}

EXPORTED void steps_search(const StepKernel *kernel, Parallel *parallel, int32_t num_threads, int32_t element,
                           int64_t num_rows, int32_t num_columns, const uint8_t *rows, int64_t stride, float *highest,
                           int64_t *places) {
    Search step = {element, num_columns, rows, stride, highest, places};
    run_rows(kernel->search, &step, num_rows, parallel, num_threads);
}
