/* Products with a matrix of 4-bit or 8-bit weights on CPUs: what Python sees and what the linear*.c files share.
 *
 * weight[output, input] = scale * (number - zero), with a scale and a zero for each output and group of inputs.
 * A row of inputs is first rounded to 16 or 8 bits of its own largest; then all products are of integers. What a row
 * gives depends on itself alone: it has the same bits whatever the other rows are and however many threads run.
 */
#ifndef SPLITSERVE_LINEAR_H
#define SPLITSERVE_LINEAR_H

#include <stdint.h>

#define LINEAR_VERSION 3 /* of everything below; engine/native/linear_library.py expects the same */

#define OUTPUTS 16     /* of a vector of weights */
#define DEPTH 4        /* inputs of a vector of 8-bit weights; one of 4-bit weights has these and the next DEPTH */
#define TILE_VECTORS 4 /* at most, in one tile */
#define TILE_ROWS 4
#define MOST_WHOLE 16  /* inputs of a row that exceed bytes */
#define MOST_OF_BYTES 32639
#define UNIT_ROWS 256  /* rows that one thread takes at a time */
#define SHARED_WORK 65536 /* products; what is less is done sooner than other threads are woken */

enum LinearElement { LINEAR_FLOAT32, LINEAR_BFLOAT16 };

typedef struct {
    int32_t num_inputs;
    int32_t num_outputs;   /* of which the last vector may have fewer than OUTPUTS */
    int32_t padded_inputs; /* a multiple of group_size */
    int32_t group_size;    /* a multiple of 16 */
    int32_t weight_bits;   /* 4 or 8 */
    int32_t input_bits;    /* 16; or 8, with 8-bit weights in one group whose zeros are 128 */
    const uint8_t *weights; /* 8 bits: [vectors, padded_inputs / 4, OUTPUTS, 4]; 4 bits: [vectors, padded_inputs / 8,
                             * OUTPUTS, 4] with inputs 0 to 3 of 8 in the lower halves of bytes, 4 to 7 in the upper */
    const float *scales;    /* [vectors, groups, OUTPUTS] */
    const uint8_t *zeros;   /* the same */
    const float *bias;      /* [num_outputs] or NULL */
    const struct LinearKernel *kernel;
} Matrix;

/* Of a row of inputs of 8 bits: those that exceed them, with what the bytes lack. That is also 256 times an upper byte
 * plus a lower one, each in the place that its input has in DEPTH bytes, if it is at most MOST_OF_BYTES. */
typedef struct {
    int32_t sum; /* of all the row's numbers */
    int32_t count;
    int32_t inputs[MOST_WHOLE];
    int32_t rests[MOST_WHOLE];
    uint32_t lower[MOST_WHOLE];
    uint32_t upper[MOST_WHOLE];
} Whole;

/* Rows of inputs, rounded. */
typedef struct {
    int8_t *numbers; /* [rows, planes, padded_inputs]: upper and lower bytes, both with a sign; or the one */
    float *scales;   /* [rows] */
    float *sums;     /* of 16 bits: [rows, groups] of the numbers, negative */
    Whole *whole;    /* of 8 bits: [rows] */
} Rounded;

typedef struct {
    const Matrix *matrix;
    const uint8_t *inputs;
    int64_t input_stride; /* bytes */
    uint8_t *outputs;     /* [num_rows, num_outputs], contiguous */
    int32_t num_rows;
    int32_t element;      /* of inputs and outputs */
    Rounded rounded;
    int32_t tile_vectors;
} Product;

typedef struct LinearKernel {
    void (*round_row)(const Product *product, int32_t row);
    /* Outputs of tile number `tile` of rows first_row .. end_row. */
    void (*compute)(const Product *product, int32_t tile, int32_t first_row, int32_t end_row);
} LinearKernel;

extern const LinearKernel linear_plain;
#if defined(__x86_64__)
extern const LinearKernel linear_avx2;
extern const LinearKernel linear_avx512_vnni;
extern const LinearKernel linear_amx;
#endif

static inline int64_t num_groups(const Matrix *matrix) { return matrix->padded_inputs / matrix->group_size; }
static inline int64_t num_vectors(const Matrix *matrix) { return (matrix->num_outputs + OUTPUTS - 1) / OUTPUTS; }

#endif
