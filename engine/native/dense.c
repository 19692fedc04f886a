/* The functions that Python calls for products with bfloat16 weights. */
#include "dense.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

#define HALVES 2 /* of a panel */
#define PAIR_BYTES 4
#define LINE_PAIRS 16

typedef void Parallel(void (*worker)(void *), void *data, unsigned num_threads, unsigned flags);

typedef struct {
    const DenseProduct *product;
    int32_t num_threads;
    int32_t range_rows; /* of a unit */
    int32_t num_ranges;
    int32_t end;        /* of halves of panels, counted for each range of rows */
    atomic_int next;    /* of them */
} Run;

EXPORTED int32_t dense_version(void) { return DENSE_VERSION; }

EXPORTED int64_t dense_matrix_bytes(void) { return sizeof(DenseMatrix); }

/* The kernel of a variant; NULL when this CPU does not have one. */
EXPORTED const DenseKernel *dense_kernel(const char *variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(variant, "avx512_bf16"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16")
                   ? &dense_avx512_bf16
                   : NULL;
#endif
    (void)variant;
    return NULL;
}

/* Some pairs of inputs of one panel. They are read a line of the cache at a time. */
static void pack_pairs(const uint8_t *rows, int64_t row_bytes, int32_t num_rows, int32_t num_pairs, int32_t width,
                       uint8_t *packed) {
    for (int32_t i = 0; i < num_rows; ++i)
        for (int32_t pair = 0; pair < num_pairs; ++pair)
            memcpy(packed + (pair * width + i) * PAIR_BYTES, rows + i * row_bytes + pair * PAIR_BYTES, PAIR_BYTES);
}

/* The weights of a matrix [num_outputs, num_inputs], whose rows are row_bytes apart, as a DenseMatrix has them. */
EXPORTED void dense_pack(const uint8_t *weights, int64_t row_bytes, int32_t num_outputs, int32_t num_inputs,
                         uint8_t *packed) {
    const int32_t whole_pairs = num_inputs / 2;
    for (int32_t output = 0; output < num_outputs; output += PANEL_VECTORS * OUTPUTS) {
        int32_t held = smaller(num_outputs - output, PANEL_VECTORS * OUTPUTS);
        int32_t width = (held + OUTPUTS - 1) / OUTPUTS * OUTPUTS;
        int64_t panel_bytes = (int64_t)((num_inputs + 1) / 2) * width * PAIR_BYTES;
        const uint8_t *rows = weights + output * row_bytes;
        if (held < width || num_inputs % 2) memset(packed, 0, (size_t)panel_bytes);
        for (int32_t pair = 0; pair < whole_pairs; pair += LINE_PAIRS)
            pack_pairs(rows + pair * PAIR_BYTES, row_bytes, held, smaller(LINE_PAIRS, whole_pairs - pair), width,
                       packed + (int64_t)pair * width * PAIR_BYTES);
        for (int32_t i = 0; num_inputs % 2 && i < held; ++i)
            memcpy(packed + ((int64_t)whole_pairs * width + i) * PAIR_BYTES,
                   rows + i * row_bytes + whole_pairs * PAIR_BYTES, PAIR_BYTES / 2);
        packed += panel_bytes;
    }
}

/* Panels are claimed whole, and by halves where few are left, so that threads end together. */
static DenseUnit claim(Run *run) {
    const DenseProduct *product = run->product;
    int at = atomic_load(&run->next), count;
    do {
        if (at >= run->end) return (DenseUnit){0};
        count = run->num_threads == 1 || run->end - at > HALVES * run->num_threads ? HALVES : 1;
    } while (!atomic_compare_exchange_weak(&run->next, &at, at + count));
    int32_t panel = at / HALVES / run->num_ranges, range = at / HALVES % run->num_ranges;
    DenseUnit unit = {.vector = panel * PANEL_VECTORS + at % HALVES * HALF_VECTORS, .row = range * run->range_rows};
    unit.num_vectors = smaller(count * HALF_VECTORS, num_vectors(product->matrix) - unit.vector);
    unit.num_rows = smaller(run->range_rows, product->num_rows - unit.row);
    return unit.num_vectors > 0 ? unit : claim(run); /* the last panel may have one half */
}

static void compute(void *data) {
    Run *run = data;
    const DenseKernel *kernel = run->product->matrix->kernel;
    for (DenseUnit unit = claim(run), next; unit.num_vectors > 0; unit = next) {
        next = claim(run);
        kernel->compute(run->product, &unit, &next);
    }
}

/* outputs = inputs times the transposed matrix plus bias, by num_threads threads of `parallel` (GOMP_parallel), or by
 * this one alone. Inputs and outputs are bfloat16. */
EXPORTED void dense_multiply(const DenseMatrix *matrix, Parallel *parallel, int32_t num_threads, const uint8_t *inputs,
                             int64_t input_stride, int32_t num_rows, uint8_t *outputs) {
    if (num_rows < 1) return;
    if (parallel == NULL || (int64_t)num_rows * matrix->num_outputs * matrix->num_inputs < SHARED_WORK) num_threads = 1;
    DenseProduct product = {matrix, inputs, input_stride, outputs, num_rows};
    int32_t num_ranges = (num_rows + UNIT_ROWS - 1) / UNIT_ROWS;
    int32_t blocks = (num_rows + num_ranges * BLOCK_ROWS - 1) / (num_ranges * BLOCK_ROWS);
    int32_t num_panels = (num_vectors(matrix) + PANEL_VECTORS - 1) / PANEL_VECTORS;
    Run run = {&product, num_threads, blocks * BLOCK_ROWS, num_ranges, num_panels * num_ranges * HALVES, 0};
    if (num_threads > 1)
        parallel(compute, &run, (unsigned)num_threads, 0);
    else
        compute(&run);
}
