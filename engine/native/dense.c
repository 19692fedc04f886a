/* The functions that Python calls for products with float32 and bfloat16 weights. */
#include "amx.h"
#include "dense.h"
#include "groups.h"
#include "work.h"

#include <stddef.h>
#include <string.h>

#define HALVES 2 /* of a panel */
#define WORD_BYTES 4
#define LINE_WORDS 16
#define WORDS_AHEAD 24 /* that are fetched while a row is read: each is in another line */
#define SHARED_READS 32768 /* weights; fewer are read sooner than other threads are woken */

/* Its units are halves of panels, for each range of rows: of a group of panels, whose weights stay in the cache, all
 * of one range after the other. */
typedef struct {
    DenseProduct product;
    int32_t range_rows;
    int32_t num_ranges;
    int32_t num_panels;
    int32_t group_panels;
} DenseData;

/* Its units are rows. */
typedef struct {
    const DenseMatrix *matrix;
    const int64_t *const *outputs; /* where a run finds them */
    uint8_t *rows; /* [outputs, num_inputs], contiguous */
} DenseRows;

_Static_assert(sizeof(DenseData) <= DATA_BYTES, "an operation has no room for it");

EXPORTED int32_t dense_version(void) { return DENSE_VERSION; }

EXPORTED int64_t dense_matrix_bytes(void) { return sizeof(DenseMatrix); }

/* The kernel of a variant for these elements; NULL when this CPU does not have one. */
EXPORTED const DenseKernel *dense_kernel(const char *variant, int32_t element) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(variant, "avx2")) return has_avx2 ? &dense_avx2 : NULL;
    if (!strcmp(variant, "avx512")) return has_avx512 ? &dense_avx512 : NULL;
    int has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(variant, "avx512_bf16") && has_bf16)
        return element == DENSE_BFLOAT16 ? &dense_avx512_bf16 : &dense_avx512;
    if (!strcmp(variant, "amx") && has_bf16 && amx_is_there(AMX_BFLOAT16))
        return element == DENSE_BFLOAT16 ? &dense_amx : &dense_avx512;
#endif
    (void)variant;
    (void)element;
    return NULL;
}

/* Some words of inputs of one panel. They are read a line of the cache at a time. */
static void pack_words(const uint8_t *rows, int64_t row_bytes, int32_t num_rows, int32_t num_words, int32_t width,
                       uint8_t *packed) {
    for (int32_t i = 0; i < num_rows; ++i)
        for (int32_t word = 0; word < num_words; ++word)
            memcpy(packed + (word * width + i) * WORD_BYTES, rows + i * row_bytes + word * WORD_BYTES, WORD_BYTES);
}

/* The weights of a matrix [num_outputs, num_inputs], whose rows are row_bytes apart, as a DenseMatrix has them. */
EXPORTED void dense_pack(const uint8_t *weights, int64_t row_bytes, int32_t num_outputs, int32_t num_inputs,
                         int32_t element, uint8_t *packed) {
    const int32_t input_bytes = num_inputs * element_bytes(element), words = input_bytes / WORD_BYTES;
    const int32_t rest = input_bytes % WORD_BYTES;
    for (int32_t output = 0; output < num_outputs; output += PANEL_VECTORS * OUTPUTS) {
        int32_t held = smaller(num_outputs - output, PANEL_VECTORS * OUTPUTS);
        int32_t width = (held + OUTPUTS - 1) / OUTPUTS * OUTPUTS;
        int64_t panel_bytes = (int64_t)(words + (rest > 0)) * width * WORD_BYTES;
        const uint8_t *rows = weights + output * row_bytes;
        if (held < width || rest) memset(packed, 0, (size_t)panel_bytes);
        for (int32_t word = 0; word < words; word += LINE_WORDS)
            pack_words(rows + word * WORD_BYTES, row_bytes, held, smaller(LINE_WORDS, words - word), width,
                       packed + (int64_t)word * width * WORD_BYTES);
        for (int32_t i = 0; rest && i < held; ++i)
            memcpy(packed + ((int64_t)words * width + i) * WORD_BYTES, rows + i * row_bytes + words * WORD_BYTES,
                   (size_t)rest);
        packed += panel_bytes;
    }
}

static DenseUnit unit_of(const DenseData *data, int32_t first, int32_t count) {
    const int32_t at = first / HALVES, group = at / (data->group_panels * data->num_ranges) * data->group_panels;
    const int32_t held = smaller(data->group_panels, data->num_panels - group), behind = at - group * data->num_ranges;
    const int32_t panel = group + behind % held, range = behind / held;
    DenseUnit unit = {.vector = panel * PANEL_VECTORS + first % HALVES * HALF_VECTORS, .row = range * data->range_rows};
    unit.num_vectors = smaller(count * HALF_VECTORS, num_vectors(data->product.matrix) - unit.vector);
    unit.num_rows = smaller(data->range_rows, data->product.num_rows - unit.row);
    return unit;
}

static int32_t begin(Operation *operation, int32_t num_rows) {
    DenseData *data = (DenseData *)operation->data;
    const int64_t panel_bytes = (int64_t)num_words(data->product.matrix) * PANEL_VECTORS * VECTOR_BYTES;
    const int32_t block_rows = data->product.matrix->kernel->block_rows;
    data->product.num_rows = num_rows;
    data->num_ranges = (num_rows + UNIT_ROWS - 1) / UNIT_ROWS;
    data->range_rows = (num_rows + data->num_ranges * block_rows - 1) / (data->num_ranges * block_rows) * block_rows;
    data->num_panels = (num_vectors(data->product.matrix) + PANEL_VECTORS - 1) / PANEL_VECTORS;
    data->group_panels = panel_bytes < GROUP_BYTES ? (int32_t)(GROUP_BYTES / panel_bytes) : 1;
    operation->num_units = data->num_panels * data->num_ranges * HALVES;
    operation->units_together = HALVES;
    return 0;
}

static void compute(const Operation *operation, Units units, int32_t thread) {
    (void)thread;
    const DenseData *data = (const DenseData *)operation->data;
    DenseUnit unit = unit_of(data, units.first, units.count), next = {0};
    if (units.next >= 0) next = unit_of(data, units.next, 1);
    /* the last panel may have one half */
    if (unit.num_vectors > 0) data->product.matrix->kernel->compute(&data->product, &unit, &next);
}

static const uint8_t *line(const Operation *operation, int32_t unit, int32_t line) {
    const DenseData *data = (const DenseData *)operation->data;
    const DenseMatrix *matrix = data->product.matrix;
    DenseUnit first = unit_of(data, unit, 1);
    int32_t lines = smaller(first.num_vectors, HALF_VECTORS);
    if (lines < 1 || line >= lines * num_words(matrix)) return NULL;
    return dense_weights_of(matrix, first.vector) + line / lines * dense_stride_of(matrix, first.vector) +
           line % lines * VECTOR_BYTES;
}

static const OperationKind dense_product = {begin, compute, line};

static void describe(Operation *operation, const DenseMatrix *matrix, const uint8_t *inputs, int64_t input_stride,
                     uint8_t *outputs) {
    operation->kind = &dense_product;
    *(DenseData *)operation->data = (DenseData){.product = {matrix, inputs, input_stride, outputs, 0}};
}

/* outputs = inputs times the transposed matrix plus bias, by num_threads threads of `parallel` (GOMP_parallel), or by
 * this one alone. Inputs and outputs are of the matrix's element. */
EXPORTED void dense_multiply(const DenseMatrix *matrix, Parallel *parallel, int32_t num_threads, const uint8_t *inputs,
                             int64_t input_stride, int32_t num_rows, uint8_t *outputs) {
    if (num_rows < 1) return;
    if ((int64_t)num_rows * matrix->num_outputs * matrix->num_inputs < SHARED_WORK) num_threads = 1;
    Operation operation;
    describe(&operation, matrix, inputs, input_stride, outputs);
    run_operations(&operation, 1, num_rows, parallel, num_threads);
}

/* The same for groups of rows, one behind the other, each with a matrix of its own, all of one shape and element:
 * the rows of matrix i are those from starts[i] up to starts[i + 1]. Gives 0, or -1 when there is no memory. */
EXPORTED int32_t dense_multiply_groups(const DenseMatrix *const *matrices, const int32_t *starts, int32_t num_groups,
                                       Parallel *parallel, int32_t num_threads, const uint8_t *inputs,
                                       int64_t input_stride, uint8_t *outputs) {
    const DenseMatrix *first = matrices[0];
    const int32_t num_rows = starts[num_groups];
    const int64_t output_stride = (int64_t)first->num_outputs * element_bytes(first->element);
    Operation operation;
    Groups groups;
    if (num_rows < 1) return 0;
    if ((int64_t)num_rows * first->num_outputs * first->num_inputs < SHARED_WORK) num_threads = 1;
    if (groups_open(&groups, smaller(num_groups, num_rows))) return -1;
    for (int32_t i = 0; i < num_groups; ++i) {
        const int32_t start = starts[i], count = starts[i + 1] - start;
        if (count > 0)
            describe(groups_next(&groups, count), matrices[i], inputs + start * input_stride, input_stride,
                     outputs + start * output_stride);
    }
    groups_describe(&operation, &groups);
    run_operations(&operation, 1, num_rows, parallel, num_threads);
    groups_close(&groups);
    return 0;
}

/* Gives 1 when the matrix does not have one of the outputs. */
static int32_t begin_rows(Operation *operation, int32_t num_rows) {
    const DenseRows *data = (const DenseRows *)operation->data;
    for (int32_t row = 0; row < num_rows; ++row)
        if ((*data->outputs)[row] < 0 || (*data->outputs)[row] >= data->matrix->num_outputs) return 1;
    operation->num_units = num_rows;
    return 0;
}

static void read_rows(const Operation *operation, Units units, int32_t thread) {
    (void)thread;
    const DenseRows *data = (const DenseRows *)operation->data;
    const int32_t row_bytes = data->matrix->num_inputs * element_bytes(data->matrix->element);
    for (int32_t row = units.first; row < units.first + units.count; ++row) {
        const int32_t output = (int32_t)(*data->outputs)[row], vector = output / OUTPUTS;
        const int64_t stride = dense_stride_of(data->matrix, vector);
        const uint8_t *weights = dense_weights_of(data->matrix, vector) + output % OUTPUTS * WORD_BYTES;
        uint8_t *read = data->rows + (int64_t)row * row_bytes, *const end = read + row_bytes;
        for (; end - read >= WORD_BYTES; read += WORD_BYTES, weights += stride) {
            __builtin_prefetch(weights + WORDS_AHEAD * stride);
            memcpy(read, weights, WORD_BYTES);
        }
        if (read < end) memcpy(read, weights, (size_t)(end - read));
    }
}

static const OperationKind dense_rows_read = {begin_rows, read_rows, NULL};

/* The weights of each of these outputs. Gives 1, and reads nothing, when the matrix does not have one of them. */
EXPORTED int32_t dense_rows(const DenseMatrix *matrix, Parallel *parallel, int32_t num_threads, const int64_t *outputs,
                            int32_t num_rows, uint8_t *rows) {
    Operation operation = {.kind = &dense_rows_read};
    if (num_rows < 1) return 0;
    if ((int64_t)num_rows * matrix->num_inputs < SHARED_READS) num_threads = 1;
    *(DenseRows *)operation.data = (DenseRows){matrix, &outputs, rows};
    return run_operations(&operation, 1, num_rows, parallel, num_threads);
}

/* Adds the product to a program, which gives the rows. Gives 0, or -1 when the program is full. */
EXPORTED int32_t dense_add(Program *program, const DenseMatrix *matrix, const uint8_t *inputs, int64_t input_stride,
                           uint8_t *outputs) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe(operation, matrix, inputs, input_stride, outputs);
    return 0;
}

/* The same for the weights of the outputs that each run finds at `outputs`. */
EXPORTED int32_t dense_add_rows(Program *program, const DenseMatrix *matrix, const int64_t *const *outputs,
                                uint8_t *rows) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    operation->kind = &dense_rows_read;
    *(DenseRows *)operation->data = (DenseRows){matrix, outputs, rows};
    return 0;
}
