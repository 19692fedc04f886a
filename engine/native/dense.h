/* Products with a matrix of float32 or bfloat16 weights on CPUs: what Python sees and what the dense*.c files share.
 *
 * Sums are of float32, over the inputs in their order. What a row gives depends on itself alone: it has the same bits
 * whatever the other rows are and however many threads run.
 */
#ifndef SPLITSERVE_DENSE_H
#define SPLITSERVE_DENSE_H

#include <stdint.h>

#define DENSE_VERSION 3 /* of everything below; engine/native/linear.py expects the same */

#define OUTPUTS 16          /* of a vector of weights, each with a word of inputs */
#define VECTOR_BYTES 64
#define PANEL_VECTORS 4     /* the last panel may have fewer */
#define HALF_VECTORS 2
#define BLOCK_ROWS 6        /* of kernels by vectors: a multiple of the rows whose sums stay in registers */
#define UNIT_ROWS 192       /* that one thread takes at a time; a multiple of any kernel's block_rows */
#define GROUP_BYTES 524288  /* of weights that stay in the cache, beside a unit's inputs, for all ranges of rows */
#define BLOCK_WORDS 1024    /* whose weights in a panel, 256 KiB, stay in the cache for all rows of a unit */
#define SHARED_WORK 262144  /* products; what is less is done sooner than other threads are woken */

enum DenseElement { DENSE_FLOAT32, DENSE_BFLOAT16 };

/* A word of inputs is one of float32, or a pair of bfloat16. */
typedef struct {
    int32_t num_inputs;
    int32_t num_outputs;    /* of which the last vector may have fewer than OUTPUTS */
    int32_t element;        /* of weights, inputs and outputs */
    const uint8_t *weights; /* [panels, words of inputs, PANEL_VECTORS, OUTPUTS], zeros after the last of either */
    const float *bias;      /* [num_outputs] or NULL */
    const struct DenseKernel *kernel;
} DenseMatrix;

typedef struct {
    const DenseMatrix *matrix;
    const uint8_t *inputs;
    int64_t input_stride; /* bytes */
    uint8_t *outputs;     /* [num_rows, num_outputs], contiguous */
    int32_t num_rows;
} DenseProduct;

/* At most PANEL_VECTORS vectors of one panel, and at most UNIT_ROWS rows. */
typedef struct {
    int32_t vector;
    int32_t num_vectors; /* 0: nothing is left to do */
    int32_t row;
    int32_t num_rows;
} DenseUnit;

typedef struct DenseKernel {
    /* The outputs of a unit. Meanwhile the weights of the next one are fetched. */
    void (*compute)(const DenseProduct *product, const DenseUnit *unit, const DenseUnit *next);
    int32_t block_rows; /* of which each unit has a multiple, but the last */
} DenseKernel;

#if defined(__x86_64__)
extern const DenseKernel dense_avx2;
extern const DenseKernel dense_avx512;
extern const DenseKernel dense_avx512_bf16;
extern const DenseKernel dense_amx;
#endif

static inline int32_t element_bytes(int32_t element) { return element == DENSE_BFLOAT16 ? 2 : 4; }
static inline int32_t num_words(const DenseMatrix *matrix) {
    return (matrix->num_inputs * element_bytes(matrix->element) + 3) / 4;
}
static inline int32_t num_vectors(const DenseMatrix *matrix) { return (matrix->num_outputs + OUTPUTS - 1) / OUTPUTS; }
static inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

/* Bytes between words of inputs in the panel of a vector. */
static inline int64_t dense_stride_of(const DenseMatrix *matrix, int32_t vector) {
    int32_t panel = vector / PANEL_VECTORS * PANEL_VECTORS;
    return smaller(PANEL_VECTORS, num_vectors(matrix) - panel) * VECTOR_BYTES;
}

/* Of its first word of inputs. */
static inline const uint8_t *dense_weights_of(const DenseMatrix *matrix, int32_t vector) {
    int64_t panel = vector / PANEL_VECTORS * PANEL_VECTORS;
    return matrix->weights + (panel * num_words(matrix) + vector % PANEL_VECTORS) * VECTOR_BYTES;
}

#endif
