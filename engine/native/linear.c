/* The functions that Python calls for products with quantized weights. */
#include "linear.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#include <windows.h>
#define EXPORTED __declspec(dllexport)
#define YIELD SwitchToThread
#else
#include <sched.h>
#define EXPORTED __attribute__((visibility("default")))
#define YIELD sched_yield
#endif

#define ALIGNMENT 64
#define ROWS_AT_ONCE 8

typedef void Parallel(void (*worker)(void *), void *data, unsigned num_threads, unsigned flags);

typedef struct {
    const Product *product;
    atomic_int next_row;
    atomic_int num_rounded;
    atomic_int next_unit;
} Run;

EXPORTED int32_t linear_version(void) { return LINEAR_VERSION; }

EXPORTED int64_t linear_matrix_bytes(void) { return sizeof(Matrix); }

/* The kernel of a variant; NULL when this CPU does not have one. */
EXPORTED const LinearKernel *linear_kernel(const char *variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(variant, "avx512_vnni"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512vnni")
                   ? &linear_avx512_vnni
                   : NULL;
    if (!strcmp(variant, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &linear_avx2 : NULL;
#endif
    return !strcmp(variant, "plain") ? &linear_plain : NULL;
}

/* In one go with the rest, so that threads meet once. Nobody waits for a thread that comes late, only for rows that
 * one has begun. */
static void round_rows(Run *run) {
    const Product *product = run->product;
    for (int row; (row = atomic_fetch_add(&run->next_row, ROWS_AT_ONCE)) < product->num_rows;) {
        int32_t end = row + ROWS_AT_ONCE < product->num_rows ? row + ROWS_AT_ONCE : product->num_rows;
        for (int32_t each = row; each < end; ++each) product->matrix->kernel->round_row(product, each);
        atomic_fetch_add(&run->num_rounded, end - row);
    }
    while (atomic_load(&run->num_rounded) < product->num_rows) YIELD();
}

static void compute(void *data) {
    Run *run = data;
    const Product *product = run->product;
    const Matrix *matrix = product->matrix;
    round_rows(run);
    int32_t tiles = (int32_t)((num_vectors(matrix) + product->tile_vectors - 1) / product->tile_vectors);
    int32_t num_units = tiles * ((product->num_rows + UNIT_ROWS - 1) / UNIT_ROWS);
    for (int unit; (unit = atomic_fetch_add(&run->next_unit, 1)) < num_units;) {
        int32_t first_row = unit / tiles * UNIT_ROWS;
        int32_t end_row = first_row + UNIT_ROWS < product->num_rows ? first_row + UNIT_ROWS : product->num_rows;
        matrix->kernel->compute(product, unit % tiles, first_row, end_row);
    }
}

static int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* outputs = inputs times the transposed matrix plus bias, by num_threads threads of `parallel` (GOMP_parallel), or by
 * this one alone. Gives 0, or -1 when there is no memory for the rounded rows. */
EXPORTED int32_t linear_multiply(const Matrix *matrix, Parallel *parallel, int32_t num_threads, int32_t element,
                                 const uint8_t *inputs, int64_t input_stride, int32_t num_rows, uint8_t *outputs) {
    int64_t products = (int64_t)num_rows * matrix->num_outputs * matrix->num_inputs;
    if (parallel == NULL || products < SHARED_WORK) num_threads = 1;
    int64_t number_bytes = aligned((int64_t)num_rows * PLANES * matrix->padded_inputs);
    int64_t sum_bytes = aligned(num_rows * num_groups(matrix) * (int64_t)sizeof(float));
    int64_t scale_bytes = aligned(num_rows * (int64_t)sizeof(float));
    uint8_t *memory = malloc((size_t)(number_bytes + sum_bytes + scale_bytes + ALIGNMENT));
    if (memory == NULL) return -1;
    uint8_t *start = (uint8_t *)aligned((int64_t)memory);
    Product product = {matrix, inputs, input_stride, outputs, num_rows, element,
                       {(int8_t *)start, (float *)(start + number_bytes), (float *)(start + number_bytes + sum_bytes)},
                       num_rows < TILE_ROWS - 1 ? TILE_VECTORS : TILE_VECTORS / 2};
    Run run = {.product = &product};
    if (num_threads > 1)
        parallel(compute, &run, (unsigned)num_threads, 0);
    else
        compute(&run);
    free(memory);
    return 0;
}
