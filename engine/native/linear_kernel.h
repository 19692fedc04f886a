/* One kernel for products with quantized weights; included by each variant, which names it LINEAR_KERNEL. */
#include "linear.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Of the header: floats and integers (OUTPUTS of either), bytes (OUTPUTS * DEPTH weights), word (DEPTH inputs for all
 * outputs); and `dot`, which adds to each of OUTPUTS sums the DEPTH products of its weights and the inputs. */
#define INFINITE_BITS 0x7f800000u /* magnitudes from here on are infinite or NaN */
#include LINEAR_HEADER

#define AHEAD_BYTES 2048 /* the weights fetched meanwhile, for each vector of a tile */
#define PLANES 2         /* bytes of an input of 16 bits */
#define LARGEST 32512.0f /* so that upper bytes reach 127 */

INLINE floats load_inputs(const uint8_t *from, int32_t element, int32_t count) {
    uint8_t rest[OUTPUTS * 4] = {0};
    if (count < OUTPUTS) {
        if (count > 0) memcpy(rest, from, (size_t)count * (element == LINEAR_BFLOAT16 ? 2 : 4));
        from = rest;
    }
    return element == LINEAR_BFLOAT16 ? floats_from_bfloat16(from) : floats_load(from);
}

/* The bits of the largest magnitude of every OUTPUTS-th input. */
INLINE integers largest_inputs(const Product *product, int32_t row, const int32_t element) {
    const uint8_t *inputs = product->inputs + row * product->input_stride;
    const int32_t num_inputs = product->matrix->num_inputs, bytes = element == LINEAR_BFLOAT16 ? 2 : 4;
    integers largest = integers_zero();
    for (int32_t at = 0; at < num_inputs; at += OUTPUTS) {
        floats some = load_inputs(inputs + at * bytes, element, num_inputs - at);
        largest = integers_max(largest, magnitude_bits(some));
    }
    return largest;
}

INLINE void round_inputs(const Product *product, int32_t row, const int32_t element) {
    const Matrix *matrix = product->matrix;
    const uint8_t *inputs = product->inputs + row * product->input_stride;
    const int32_t bytes = element == LINEAR_BFLOAT16 ? 2 : 4, padded = matrix->padded_inputs;
    uint32_t bits = (uint32_t)integers_max_of(largest_inputs(product, row, element));
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    float inverse = LARGEST / magnitude;
    if (!(inverse <= 3e38f)) inverse = 0.0f; /* all zeros, or numbers so small that they count as 0 */
    product->rounded.scales[row] = bits < INFINITE_BITS ? (inverse > 0.0f ? magnitude / LARGEST : 0.0f) : NAN;
    if (bits >= INFINITE_BITS) inverse = 0.0f;

    int8_t *upper = product->rounded.numbers + (int64_t)row * PLANES * padded;
    float *sums = product->rounded.sums + row * num_groups(matrix);
    for (int32_t at = 0; at < padded; ++sums) {
        integers sum = integers_zero();
        for (int32_t end = at + matrix->group_size; at < end; at += OUTPUTS) {
            floats some = load_inputs(inputs + at * bytes, element, matrix->num_inputs - at);
            integers numbers = integers_rounded(floats_mul(some, floats_all(inverse)));
            if (bits >= INFINITE_BITS) numbers = integers_zero();
            sum = integers_add(sum, numbers);
            store_low_bytes(upper + at, integers_shifted_right_8(integers_add(numbers, integers_all(128))));
            store_low_bytes(upper + padded + at, numbers);
        }
        *sums = -(float)integers_sum_of(sum);
    }
}

INLINE void store_outputs(const Product *product, int32_t row, int32_t output, floats sums) {
    const Matrix *matrix = product->matrix;
    int32_t count = matrix->num_outputs - output < OUTPUTS ? matrix->num_outputs - output : OUTPUTS;
    int32_t bytes = product->element == LINEAR_BFLOAT16 ? 2 : 4;
    uint8_t *to = product->outputs + ((int64_t)row * matrix->num_outputs + output) * bytes;
    uint8_t whole[OUTPUTS * 4];
    if (matrix->bias) {
        float bias[OUTPUTS] = {0};
        memcpy(bias, matrix->bias + output, (size_t)count * 4);
        sums = floats_add(sums, floats_load(bias));
    }
    uint8_t *target = count == OUTPUTS ? to : whole;
    if (product->element == LINEAR_BFLOAT16) floats_to_bfloat16(target, sums);
    else floats_store(target, sums);
    if (target == whole) memcpy(to, whole, (size_t)count * bytes);
}

#include "linear_bytes.h"

static void round_row(const Product *product, int32_t row) {
    int is_bfloat16 = product->element == LINEAR_BFLOAT16, is_bytes = product->matrix->input_bits == 8;
    if (is_bytes && is_bfloat16) round_row_to_bytes(product, row, LINEAR_BFLOAT16);
    else if (is_bytes) round_row_to_bytes(product, row, LINEAR_FLOAT32);
    else if (is_bfloat16) round_inputs(product, row, LINEAR_BFLOAT16);
    else round_inputs(product, row, LINEAR_FLOAT32);
}

/* Computes `vectors` vectors of outputs for `rows` rows. With `halves` the weights have 4 bits, else 8. */
INLINE void multiply_tile(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                          int32_t row, const int vectors, const int rows, const int halves) {
    const Matrix *matrix = product->matrix;
    const int32_t padded = matrix->padded_inputs;
    const int64_t groups = num_groups(matrix), number_stride = (int64_t)padded * PLANES;
    const int8_t *numbers = product->rounded.numbers + row * number_stride;
    const float *input_sums = product->rounded.sums + row * groups;
    const float *scales = matrix->scales + vector * groups * OUTPUTS;
    const uint8_t *zeros = matrix->zeros + vector * groups * OUTPUTS;
    const int32_t turn = padded - AHEAD_BYTES / (halves ? OUTPUTS / 2 : OUTPUTS);
    floats totals[TILE_VECTORS][TILE_ROWS];
    for (int i = 0; i < vectors; ++i)
        for (int r = 0; r < rows; ++r) totals[i][r] = floats_all(0.0f);
    for (int32_t group = 0, at = 0; group < groups; ++group) {
        integers upper[TILE_VECTORS][TILE_ROWS], lower[TILE_VECTORS][TILE_ROWS];
        for (int i = 0; i < vectors; ++i)
            for (int r = 0; r < rows; ++r) upper[i][r] = lower[i][r] = integers_zero();
        for (int32_t end = at + matrix->group_size; at < end;) {
            bytes first[TILE_VECTORS], second[TILE_VECTORS];
            /* at the end of a vector, the weights of the next tile */
            const int64_t ahead = AHEAD_BYTES + (at < turn ? 0 : (vectors - 1) * weight_stride);
            for (int i = 0; i < vectors; ++i) {
                const uint8_t *from = weights + i * weight_stride + (int64_t)at * (halves ? OUTPUTS / 2 : OUTPUTS);
                first[i] = bytes_load(from);
                __builtin_prefetch(from + ahead, 0, 2);
                if (halves) {
                    second[i] = upper_halves(first[i]);
                    first[i] = lower_halves(first[i]);
                }
            }
            for (int r = 0; r < rows; ++r) {
                const int8_t *from = numbers + r * number_stride + at;
                word inputs = word_load(from);
                for (int i = 0; i < vectors; ++i) upper[i][r] = dot(upper[i][r], first[i], inputs);
                if (halves) {
                    inputs = word_load(from + DEPTH);
                    for (int i = 0; i < vectors; ++i) upper[i][r] = dot(upper[i][r], second[i], inputs);
                }
                inputs = word_load(from + padded);
                for (int i = 0; i < vectors; ++i) lower[i][r] = dot(lower[i][r], first[i], inputs);
                if (halves) {
                    inputs = word_load(from + padded + DEPTH);
                    for (int i = 0; i < vectors; ++i) lower[i][r] = dot(lower[i][r], second[i], inputs);
                }
            }
            at += halves ? 2 * DEPTH : DEPTH;
        }
        for (int i = 0; i < vectors; ++i) {
            floats scale = floats_load(scales + (i * groups + group) * OUTPUTS);
            floats zero = floats_from_bytes(zeros + (i * groups + group) * OUTPUTS);
            for (int r = 0; r < rows; ++r) {
                floats sum = floats_fma(floats_from_integers(upper[i][r]), floats_all(256.0f),
                                        floats_from_integers(lower[i][r]));
                sum = floats_fma(zero, floats_all(input_sums[r * groups + group]), sum);
                totals[i][r] = floats_fma(scale, sum, totals[i][r]);
            }
        }
    }
    for (int i = 0; i < vectors; ++i)
        for (int r = 0; r < rows; ++r)
            store_outputs(product, row + r, (vector + i) * OUTPUTS,
                          floats_mul(totals[i][r], floats_all(product->rounded.scales[row + r])));
}

INLINE int32_t multiply_rows(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                             int32_t row, int32_t left, const int vectors, const int halves) {
    if (vectors <= TILE_VECTORS / 2 && left >= 4) {
        multiply_tile(product, weights, weight_stride, vector, row, vectors, 4, halves);
        return 4;
    }
    if (left >= 2) {
        multiply_tile(product, weights, weight_stride, vector, row, vectors, 2, halves);
        return 2;
    }
    multiply_tile(product, weights, weight_stride, vector, row, vectors, 1, halves);
    return 1;
}

INLINE void compute_rows(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                         int32_t vectors, int32_t row, int32_t end_row, const int halves) {
    while (row < end_row) {
        int32_t left = end_row - row;
        switch (vectors) {
        case 1: row += multiply_rows(product, weights, weight_stride, vector, row, left, 1, halves); break;
        case 2: row += multiply_rows(product, weights, weight_stride, vector, row, left, 2, halves); break;
        case 3: row += multiply_rows(product, weights, weight_stride, vector, row, left, 3, halves); break;
        default: row += multiply_rows(product, weights, weight_stride, vector, row, left, 4, halves); break;
        }
    }
}

static void compute(const Product *product, int32_t tile, int32_t first_row, int32_t end_row) {
    const Matrix *matrix = product->matrix;
    int32_t vector = tile * product->tile_vectors, vectors = (int32_t)num_vectors(matrix) - vector;
    if (vectors > product->tile_vectors) vectors = product->tile_vectors;
    int halves = matrix->weight_bits == 4;
    int64_t stride = (int64_t)matrix->padded_inputs * (halves ? OUTPUTS / 2 : OUTPUTS);
    const uint8_t *weights = matrix->weights + vector * stride;
    if (matrix->input_bits == 8) compute_bytes(product, weights, stride, vector, vectors, first_row, end_row);
    else if (halves) compute_rows(product, weights, stride, vector, vectors, first_row, end_row, 1);
    else compute_rows(product, weights, stride, vector, vectors, first_row, end_row, 0);
}

const LinearKernel LINEAR_KERNEL = {round_row, compute};
