/* The ops of a decoder between its products, row by row: the interface for Python, and the declarations that the files
 * of this folder share.
 *
 * The bits of a row's result are the same with any other rows and any number of threads. Results are rounded to the
 * element where torch rounds them. Strides are in bytes; the elements of a row are contiguous.
 */
#ifndef SPLITSERVE_OPS_H
#define SPLITSERVE_OPS_H

#include <stdint.h>

#define OPS_VERSION 7 /* version of this interface; engine/native/ops_library.py expects the same */

enum Element { FLOAT32, BFLOAT16 };

enum Activation { SILU, GELU_TANH };

/* x += delta * delta_scale, if there is a delta; then output = x / root mean square of x * weight, or output +=
 * that. The sum with x is rounded once. A norm that centers subtracts the mean of x first, and cannot add to the
 * output. */
typedef struct {
    int32_t element;
    int32_t weight_element; /* the same, or FLOAT32 */
    int32_t num_columns;
    int32_t increases;
    int32_t centers;
    float eps;
    float delta_scale;
    const uint8_t *weight;
    uint8_t *x;
    int64_t x_stride;
    const uint8_t *delta;    /* or NULL */
    int64_t delta_stride;
    uint8_t *output;         /* may be x, unless the norm adds to it */
    int64_t output_stride;
} Norm;

/* x += delta; both are contiguous */
typedef struct {
    int32_t element;
    int32_t num_columns;
    uint8_t *x;
    const uint8_t *delta;
} Sum;

/* Rows of num_heads queries, num_kv_heads keys and as many values. Queries and keys are normed, if there are
 * weights, and rotated in place; keys and values are then written to the pool, if there is one. */
typedef struct {
    int32_t element;
    int32_t weight_element; /* the same, or FLOAT32 */
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    float eps;
    const uint8_t *query_weight; /* [head_dim], or NULL */
    const uint8_t *key_weight;
    uint8_t *heads;
    int64_t stride;
    const uint8_t *cosines;      /* [num_rows, head_dim] */
    const uint8_t *signed_sines; /* the first half negated */
    uint8_t *keys;               /* [slots, num_kv_heads, head_dim], or NULL */
    uint8_t *values;
    const int64_t *slots;        /* [num_rows] */
} HeadStore;

/* output [num_rows, num_columns] = activation(gates) * ups; a row has num_columns gates, then num_columns ups */
typedef struct {
    int32_t element;
    int32_t activation;
    int32_t num_columns;
    const uint8_t *gates;
    int64_t stride;
    uint8_t *output;
} Gating;

/* The largest number of each row, as float32, and its first index. NaN counts as the largest. */
typedef struct {
    int32_t element;
    int32_t num_columns;
    const uint8_t *rows;
    int64_t stride;
    float *highest;
    int64_t *places;
} Search;

/* rows = cap * tanh(rows / cap), rounded once */
typedef struct {
    int32_t element;
    int32_t num_columns;
    float cap;
    uint8_t *rows;
    int64_t stride;
} Capping;

typedef struct {
    const uint8_t *rows;
    int64_t num_rows;
} Table;

/* output = the rows of a table with these numbers, each of row_bytes bytes. A run finds both at these places. */
typedef struct {
    const Table *table;
    const int64_t *const *numbers;
    int64_t row_bytes;
    uint8_t *output;
} Gather;

/* How one token is sampled. A token's weight is e^((logit - highest) / temperature), or 0 below FLT_MIN. A token stays
 * if its weight is at least min_p, at least the top_k-th largest, and in the nucleus of the remaining tokens: the
 * likeliest that hold top_p of the mass. Tokens that tie with the last one that stays, stay too. */
typedef struct {
    int64_t row;
    double number; /* in [0, 1): selects the first token at which the cumulative weight exceeds this fraction */
    double temperature;
    double min_p;
    double top_p;  /* 1: off */
    int64_t top_k; /* 0: off */
} Sampling;

/* tokens[i] is the result of samplings[i]. For a row whose highest number is not finite it is the last token, and the
 * mass is NaN. */
typedef struct {
    int32_t element;
    int32_t num_columns;
    const uint8_t *rows;
    int64_t stride;
    const float *highest; /* of each row */
    const Sampling *samplings;
    uint8_t *scratch;     /* ops_sample_bytes for each thread */
    int64_t scratch_bytes;
    int64_t *tokens;
    double *masses;       /* mass of all tokens that stayed */
} SamplingBatch;

#define SAMPLE_CHUNK 512 /* weights added in float32 before the sums continue in double */
#define MOST_GROUP 64  /* weights that a kernel reads at once */

typedef void OpRow(const void *op, int64_t row);

typedef struct {
    OpRow *norm, *sum, *rotate_and_store, *gate, *search, *cap;
    void (*sample)(const SamplingBatch *op, int64_t index, uint8_t *scratch);
} OpsKernel;

extern const OpsKernel ops_plain;
#if defined(__x86_64__)
extern const OpsKernel ops_avx2;
extern const OpsKernel ops_avx512;
#endif

#endif
