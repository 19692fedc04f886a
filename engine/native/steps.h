/* What a decoder computes between its products, row by row: what Python sees and what the files of this folder share.
 *
 * A row's result has the same bits whatever other rows there are and however many threads run. Results are rounded to
 * the element where torch rounds them. Strides are in bytes; the elements of a row are contiguous.
 */
#ifndef SPLITSERVE_STEPS_H
#define SPLITSERVE_STEPS_H

#include <stdint.h>

#define STEPS_VERSION 5 /* of everything below; engine/native/steps.py expects the same */

enum Element { FLOAT32, BFLOAT16 };

enum Activation { SILU, GELU_TANH };

/* x += delta * delta_scale, where there is one; output = x / root mean square of x * weight, or is increased by that.
 * What is added to x is rounded once. A norm that centers takes the mean of x away first, and does not increase. */
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
    uint8_t *output;         /* may be x, where it is not increased */
    int64_t output_stride;
} Norm;

/* x += delta; both are contiguous */
typedef struct {
    int32_t element;
    int32_t num_columns;
    uint8_t *x;
    const uint8_t *delta;
} Sum;

/* Rows of num_heads queries, num_kv_heads keys and as many values. Queries and keys are normed, where there are
 * weights, and rotated in place; keys and values are then written to the pool, where there is one. */
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
} Placement;

/* output [num_rows, num_columns] = activation(gates) * ups; a row has num_columns gates, then as many ups */
typedef struct {
    int32_t element;
    int32_t activation;
    int32_t num_columns;
    const uint8_t *gates;
    int64_t stride;
    uint8_t *output;
} Gating;

/* The largest number of each row, as float32, and where it is first. Not a number is larger than any. */
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

/* How a token of a row is drawn. A token's weight is e^((logit - highest) / temperature), below FLT_MIN nothing. It
 * stays if it is at least min_p, at least the top_k-th largest, and in the nucleus of what these leave: the likeliest
 * tokens that hold top_p of the mass. What weighs as much as the last one that stays, stays too. */
typedef struct {
    int64_t row;
    double number; /* in [0, 1): the first token is drawn up to which the weights exceed so much of the whole */
    double temperature;
    double min_p;
    double top_p;  /* 1: off */
    int64_t top_k; /* 0: off */
} Draw;

/* tokens[i] is what draws[i] gives. Of a row whose highest is not a finite number it is the last, and the mass is not a
 * number. */
typedef struct {
    int32_t element;
    int32_t num_columns;
    const uint8_t *rows;
    int64_t stride;
    const float *highest; /* of each row */
    const Draw *draws;
    uint8_t *scratch;     /* for each thread steps_draw_bytes */
    int64_t scratch_bytes;
    int64_t *tokens;
    double *masses;       /* of all that stayed */
} Drawing;

#define DRAW_CHUNK 512 /* weights that are added up in float32, before their sums are in double */
#define MOST_GROUP 64  /* weights that a kernel reads at once */

typedef void StepRow(const void *step, int64_t row);

typedef struct {
    StepRow *norm, *sum, *place, *gate, *search, *cap;
    void (*draw)(const Drawing *step, int64_t index, uint8_t *scratch);
} StepKernel;

extern const StepKernel steps_plain;
#if defined(__x86_64__)
extern const StepKernel steps_avx2;
extern const StepKernel steps_avx512;
#endif

#endif
