/* Products with a matrix of float32 or bfloat16 weights on CPUs: the interface for Python, and the declarations that
 * the dense*.c files share.
 *
 * Sums are float32, over the inputs in order. The result of a row depends on the row alone: its bits are the same with
 * any other rows and any number of threads.
 */
#ifndef SPLITSERVE_DENSE_H
#define SPLITSERVE_DENSE_H

#include <stdint.h>

#define DENSE_VERSION 4 /* version of this interface; engine/native/linear.py expects the same */

#define OUTPUTS 16          /* outputs of a vector of weights, each with a word of inputs */
#define VECTOR_BYTES 64
#define PANEL_VECTORS 4     /* the last panel may have fewer */
#define HALF_VECTORS 2
#define BLOCK_ROWS 6        /* for vector kernels: a multiple of the rows whose sums stay in registers */
#define UNIT_ROWS 192       /* rows that one thread takes at a time; a multiple of every kernel's block_rows */
#define GROUP_BYTES 524288  /* bytes of weights that stay in the cache, beside a unit's inputs, for all ranges of
                             * rows */
#define BLOCK_WORDS 1024    /* inputs whose weights in a panel, 256 KiB, stay in the cache for all rows of a unit */
#define SHARED_WORK 262144  /* products; less work is done sooner than other threads wake up */

enum DenseElement { DENSE_FLOAT32, DENSE_BFLOAT16 };

/* A word of inputs is one float32, or a pair of bfloat16. */
typedef struct {
    int32_t num_inputs;
    int32_t num_outputs;    /* the last vector may have fewer than OUTPUTS */
    int32_t element;        /* element of weights, inputs and outputs */
    const uint8_t *weights; /* [panels, words of inputs, PANEL_VECTORS, OUTPUTS], zero-padded */
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
    int32_t num_vectors; /* 0: no work is left */
    int32_t row;
    int32_t num_rows;
} DenseUnit;

typedef struct DenseKernel {
    /* Computes the outputs of a unit while fetching the weights of the next one. */
    void (*compute)(const DenseProduct *product, const DenseUnit *unit, const DenseUnit *next);
    int32_t block_rows; /* every unit but the last has a multiple of this */
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

/* Bytes between words of inputs in the vector's panel. */
static inline int64_t dense_stride_of(const DenseMatrix *matrix, int32_t vector) {
    int32_t panel = vector / PANEL_VECTORS * PANEL_VECTORS;
    return smaller(PANEL_VECTORS, num_vectors(matrix) - panel) * VECTOR_BYTES;
}

/* Address of the vector's first word of inputs. */
static inline const uint8_t *dense_weights_of(const DenseMatrix *matrix, int32_t vector) {
    int64_t panel = vector / PANEL_VECTORS * PANEL_VECTORS;
    return matrix->weights + (panel * num_words(matrix) + vector % PANEL_VECTORS) * VECTOR_BYTES;
}

#endif
