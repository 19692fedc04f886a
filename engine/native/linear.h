/* Products with a matrix of 4-bit or 8-bit weights on CPUs: the interface for Python, and the declarations that the
 * linear*.c files share.
 *
 * weight[output, input] = scale * (number - zero), with a scale and a zero for each output and group of inputs. A row
 * of inputs is first rounded to 16 or 8 bits relative to its largest value; then all products are integers. The result
 * of a row depends on the row alone: its bits are the same with any other rows and any number of threads.
 */
#ifndef SPLITSERVE_LINEAR_H
#define SPLITSERVE_LINEAR_H

#include <stdint.h>

#define LINEAR_VERSION 3 /* version of this interface; engine/native/linear_library.py expects the same */

#define OUTPUTS 16     /* outputs of a vector of weights */
#define DEPTH 4        /* inputs of a vector of 8-bit weights; a vector of 4-bit weights has these and the next DEPTH */
#define TILE_VECTORS 4 /* most vectors in one tile */
#define TILE_ROWS 4
#define MOST_WHOLE 16  /* most inputs of a row that exceed a byte */
#define MOST_OF_BYTES 32639
#define UNIT_ROWS 256  /* rows that one thread takes at a time */
#define SHARED_WORK 65536 /* products; less work is done sooner than other threads wake up */

enum LinearElement { LINEAR_FLOAT32, LINEAR_BFLOAT16 };

typedef struct {
    int32_t num_inputs;
    int32_t num_outputs;   /* the last vector may have fewer than OUTPUTS */
    int32_t padded_inputs; /* a multiple of group_size */
    int32_t group_size;    /* a multiple of 16 */
    int32_t weight_bits;   /* 4 or 8 */
    int32_t input_bits;    /* 16; or 8, with 8-bit weights in one group whose zeros are 128 */
    const uint8_t *weights; /* 8 bits: [vectors, padded_inputs / 4, OUTPUTS, 4]; 4 bits: [vectors, padded_inputs / 8,
                             * OUTPUTS, 4] with inputs 0 to 3 of 8 in the lower halves of bytes, 4 to 7 in the upper */
    const float *scales;    /* [vectors, groups, OUTPUTS] */
    const uint8_t *zeros;   /* as the scales */
    const float *bias;      /* [num_outputs] or NULL */
    const struct LinearKernel *kernel;
} Matrix;

/* For a row of 8-bit inputs: the inputs that exceed a byte, with the missing amount, which equals 256 times an upper
 * byte plus a lower one, each at its input's place in DEPTH bytes. Used for at most MOST_OF_BYTES inputs. */
typedef struct {
    int32_t sum; /* of all numbers of the row */
    int32_t count;
    int32_t inputs[MOST_WHOLE];
    int32_t rests[MOST_WHOLE];
    uint32_t lower[MOST_WHOLE];
    uint32_t upper[MOST_WHOLE];
} Whole;

/* Rounded rows of inputs. */
typedef struct {
    int8_t *numbers; /* [rows, planes, padded_inputs]: signed upper and lower bytes, or a single byte */
    float *scales;   /* [rows] */
    float *sums;     /* for 16 bits: [rows, groups], negated sums of the numbers */
    Whole *whole;    /* for 8 bits: [rows] */
} Rounded;

typedef struct {
    const Matrix *matrix;
    const uint8_t *inputs;
    int64_t input_stride; /* bytes */
    uint8_t *outputs;     /* [num_rows, num_outputs], contiguous */
    int32_t num_rows;
    int32_t element;      /* element of inputs and outputs */
    Rounded rounded;
    int32_t tile_vectors;
} Product;

typedef struct LinearKernel {
    void (*round_row)(const Product *product, int32_t row);
    /* Computes the outputs of tile number `tile` for rows first_row .. end_row. */
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
