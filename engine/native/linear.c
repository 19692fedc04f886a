/* The functions that Python calls for products with quantized weights. */
#include "amx.h"
#include "groups.h"
#include "linear.h"
#include "work.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 64

_Static_assert(sizeof(Product) <= DATA_BYTES, "an operation has no room for it");

EXPORTED int32_t linear_version(void) { return LINEAR_VERSION; }

EXPORTED int64_t linear_matrix_bytes(void) { return sizeof(Matrix); }

/* The kernel of a variant; NULL when this CPU does not have one. */
EXPORTED const LinearKernel *linear_kernel(const char *variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int has_vnni = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                         __builtin_cpu_supports("avx512vnni");
    if (!strcmp(variant, "amx_int8")) return has_vnni && amx_is_there(AMX_INT8) ? &linear_amx : NULL;
    if (!strcmp(variant, "avx512_vnni")) return has_vnni ? &linear_avx512_vnni : NULL;
    if (!strcmp(variant, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &linear_avx2 : NULL;
#endif
    return !strcmp(variant, "plain") ? &linear_plain : NULL;
}

static int32_t begin_rounding(Operation *operation, int32_t num_rows) {
    ((Product *)operation->data)->num_rows = num_rows;
    operation->num_units = num_rows;
    return 0;
}

static void round_rows(const Operation *operation, Units units, int32_t thread) {
    (void)thread;
    const Product *product = (const Product *)operation->data;
    for (int32_t row = units.first; row < units.first + units.count; ++row)
        product->matrix->kernel->round_row(product, row);
}

static int32_t num_tiles(const Product *product) {
    return (int32_t)((num_vectors(product->matrix) + product->tile_vectors - 1) / product->tile_vectors);
}

/* Units are tiles, for each range of rows. */
static int32_t begin(Operation *operation, int32_t num_rows) {
    Product *product = (Product *)operation->data;
    product->num_rows = num_rows;
    int is_wide = num_rows < TILE_ROWS - 1 || product->matrix->input_bits == 8;
    product->tile_vectors = is_wide ? TILE_VECTORS : TILE_VECTORS / 2;
    operation->num_units = num_tiles(product) * ((num_rows + UNIT_ROWS - 1) / UNIT_ROWS);
    return 0;
}

static void compute(const Operation *operation, Units units, int32_t thread) {
    (void)thread;
    const Product *product = (const Product *)operation->data;
    const int32_t tiles = num_tiles(product);
    for (int32_t unit = units.first; unit < units.first + units.count; ++unit) {
        int32_t first_row = unit / tiles * UNIT_ROWS;
        int32_t end_row = first_row + UNIT_ROWS < product->num_rows ? first_row + UNIT_ROWS : product->num_rows;
        product->matrix->kernel->compute(product, unit % tiles, first_row, end_row);
    }
}

static const uint8_t *line(const Operation *operation, int32_t unit, int32_t line) {
    const Product *product = (const Product *)operation->data;
    const Matrix *matrix = product->matrix;
    int64_t vector_bytes = (int64_t)matrix->padded_inputs * OUTPUTS * matrix->weight_bits / 8;
    int64_t first = unit % num_tiles(product) * product->tile_vectors * vector_bytes, at = (int64_t)line * CACHE_LINE;
    /* the vectors of a tile are read side by side */
    int64_t vector = line % product->tile_vectors;
    at = vector * vector_bytes + line / product->tile_vectors * (int64_t)CACHE_LINE;
    return at < (vector + 1) * vector_bytes && first + at < num_vectors(matrix) * vector_bytes
               ? matrix->weights + first + at
               : NULL;
}

static const OperationKind rounding = {begin_rounding, round_rows, NULL}, multiplication = {begin, compute, line};

/* Bytes of a rounded row, and of what is known of it. */
static int64_t rounded_stride(const Matrix *matrix) { return matrix->input_bits / 8 * (int64_t)matrix->padded_inputs; }

static int64_t sums_stride(const Matrix *matrix) {
    return matrix->input_bits == 8 ? (int64_t)sizeof(Whole) : num_groups(matrix) * (int64_t)sizeof(float);
}

static int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Bytes of so many rounded rows. */
EXPORTED int64_t linear_rounded_bytes(const Matrix *matrix, int32_t num_rows) {
    return aligned(num_rows * rounded_stride(matrix)) + aligned(num_rows * sums_stride(matrix)) +
           aligned(num_rows * (int64_t)sizeof(float)) + ALIGNMENT;
}

/* At most num_rows rows, with linear_rounded_bytes of memory for them. */
static Product describe(const Matrix *matrix, int32_t element, const uint8_t *inputs, int64_t input_stride,
                        int32_t num_rows, uint8_t *outputs, uint8_t *memory) {
    uint8_t *numbers = (uint8_t *)aligned((int64_t)memory);
    uint8_t *sums = numbers + aligned(num_rows * rounded_stride(matrix));
    uint8_t *scales = sums + aligned(num_rows * sums_stride(matrix));
    return (Product){.matrix = matrix, .inputs = inputs, .input_stride = input_stride, .outputs = outputs,
                     .element = element, .rounded = {(int8_t *)numbers, (float *)scales, (float *)sums, (Whole *)sums}};
}

static void divide(Operation *first, Operation *second, Product product) {
    first->kind = &rounding;
    second->kind = &multiplication;
    *(Product *)first->data = *(Product *)second->data = product;
}

/* outputs = inputs times the transposed matrix plus bias, by num_threads threads of `parallel` (GOMP_parallel), or by
 * this one alone. Gives 0, or -1 when there is no memory for the rounded rows. */
EXPORTED int32_t linear_multiply(const Matrix *matrix, Parallel *parallel, int32_t num_threads, int32_t element,
                                 const uint8_t *inputs, int64_t input_stride, int32_t num_rows, uint8_t *outputs) {
    if ((int64_t)num_rows * matrix->num_outputs * matrix->num_inputs < SHARED_WORK) num_threads = 1;
    uint8_t *memory = malloc((size_t)linear_rounded_bytes(matrix, num_rows));
    if (memory == NULL) return -1;
    Operation operations[2];
    divide(&operations[0], &operations[1],
           describe(matrix, element, inputs, input_stride, num_rows, outputs, memory));
    run_operations(operations, 2, num_rows, parallel, num_threads);
    free(memory);
    return 0;
}

/* The part of a product for the rows from `start` on, with a matrix of its own. */
static Product part_of(Product product, const Matrix *matrix, int64_t start) {
    product.matrix = matrix;
    product.outputs += start * matrix->num_outputs * (product.element == LINEAR_BFLOAT16 ? 2 : 4);
    product.rounded.numbers += start * rounded_stride(matrix);
    product.rounded.sums += start * num_groups(matrix);
    product.rounded.whole += start;
    product.rounded.scales += start;
    return product;
}

/* The same for groups of rows, one behind the other, each with a matrix of its own, all of one shape, group size and
 * number of bits: the rows of matrix i are those from starts[i] up to starts[i + 1]. */
EXPORTED int32_t linear_multiply_groups(const Matrix *const *matrices, const int32_t *starts, int32_t num_matrices,
                                        Parallel *parallel, int32_t num_threads, int32_t element,
                                        const uint8_t *inputs, int64_t input_stride, uint8_t *outputs) {
    const Matrix *first = matrices[0];
    const int32_t num_rows = starts[num_matrices];
    Operation operations[2];
    Groups groups;
    if (num_rows < 1) return 0;
    if ((int64_t)num_rows * first->num_outputs * first->num_inputs < SHARED_WORK) num_threads = 1;
    uint8_t *memory = malloc((size_t)linear_rounded_bytes(first, num_rows));
    if (memory == NULL) return -1;
    if (groups_open(&groups, num_matrices < num_rows ? num_matrices : num_rows)) {
        free(memory);
        return -1;
    }
    Product product = describe(first, element, inputs, input_stride, num_rows, outputs, memory);
    for (int32_t i = 0; i < num_matrices; ++i) {
        const int32_t count = starts[i + 1] - starts[i];
        if (count < 1) continue;
        Operation *operation = groups_next(&groups, count);
        operation->kind = &multiplication;
        *(Product *)operation->data = part_of(product, matrices[i], starts[i]);
    }
    operations[0].kind = &rounding; /* which depends on what all matrices have in common */
    *(Product *)operations[0].data = product;
    groups_describe(&operations[1], &groups);
    run_operations(operations, 2, num_rows, parallel, num_threads);
    groups_close(&groups);
    free(memory);
    return 0;
}

/* Adds the product to a program, for at most num_rows rows, with linear_rounded_bytes of memory for them. Gives 0, or
 * -1 when the program is full. */
EXPORTED int32_t linear_add(Program *program, const Matrix *matrix, int32_t element, const uint8_t *inputs,
                            int64_t input_stride, int32_t num_rows, uint8_t *outputs, uint8_t *memory) {
    Operation *first = next_operation(program), *second = next_operation(program);
    if (first == NULL || second == NULL) return -1;
    divide(first, second, describe(matrix, element, inputs, input_stride, num_rows, outputs, memory));
    return 0;
}
