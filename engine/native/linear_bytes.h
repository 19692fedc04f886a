/* Products of bytes with bytes; part of linear_kernel.h. Of matrices with one group whose zeros are all BYTE_ZERO.
 *
 * The largest inputs of a row, where they stand out, are kept whole beside the bytes: else all others would be rounded
 * to few steps. Every sum is exact in 32 bits, and two products of float32 follow in this order: the sum, times the
 * output's scale, times the row's. So all variants give the same bits.
 */
#define BYTE_ZERO 128
#define BYTE_LARGEST 127
#define LARGEST_TIMES 4096.0f /* a byte, a whole input is at most: so that sums do not exceed 32 bits */

/* A row's scale is that of its input at this place, if each of OUTPUTS lanes tells its largest. */
#define SCALING_LANE 4
#define LEAST_RATIO 1.5f /* of the largest of all to that one */

/* The header may say how many sums stay in its registers. */
#if !defined(BYTE_ROWS)
#define BYTE_ROWS 2
#define BYTE_VECTORS 2
#endif

/* The bits of what an input of BYTE_LARGEST stands for. */
static uint32_t scaling_bits(integers lanes) {
    int32_t each[OUTPUTS];
    memcpy(each, &lanes, sizeof(each));
    for (int i = 0; i <= SCALING_LANE; ++i)
        for (int other = i + 1; other < OUTPUTS; ++other)
            if (each[other] > each[i]) {
                int32_t larger = each[other];
                each[other] = each[i];
                each[i] = larger;
            }
    float largest, chosen;
    memcpy(&largest, &each[0], 4);
    memcpy(&chosen, &each[SCALING_LANE], 4);
    if (!(largest > LEAST_RATIO * chosen)) return (uint32_t)each[0];
    float least = largest / LARGEST_TIMES;
    if (chosen < least) chosen = least;
    uint32_t bits;
    memcpy(&bits, &chosen, 4);
    return bits;
}

/* Takes what exceeds bytes away from OUTPUTS numbers. Gives 0, or 1 when there is no room for it. */
static int keep_whole(Whole *whole, int32_t at, int32_t numbers[OUTPUTS]) {
    for (int i = 0; i < OUTPUTS; ++i) {
        int32_t byte = numbers[i] > BYTE_LARGEST ? BYTE_LARGEST : numbers[i] < -BYTE_LARGEST ? -BYTE_LARGEST : numbers[i];
        if (byte == numbers[i]) continue;
        if (whole->count == MOST_WHOLE) return 1;
        whole->inputs[whole->count] = at + i;
        whole->rests[whole->count++] = numbers[i] - byte;
        numbers[i] = byte;
    }
    return 0;
}

/* Gives 0, or 1 when more inputs exceed bytes than there is room for. */
INLINE int round_to_bytes(const Product *product, int32_t row, const int32_t element, float inverse) {
    const Matrix *matrix = product->matrix;
    const uint8_t *inputs = product->inputs + row * product->input_stride;
    const int32_t bytes = element == LINEAR_BFLOAT16 ? 2 : 4, padded = matrix->padded_inputs;
    Whole *whole = &product->rounded.whole[row];
    integers sum = integers_zero();
    whole->count = 0;
    for (int32_t at = 0; at < padded; at += OUTPUTS) {
        floats some = load_inputs(inputs + at * bytes, element, matrix->num_inputs - at);
        integers numbers = integers_rounded(floats_mul(some, floats_all(inverse)));
        sum = integers_add(sum, numbers);
        if (integers_exceed(numbers, BYTE_LARGEST)) {
            int32_t each[OUTPUTS];
            memcpy(each, &numbers, sizeof(each));
            if (keep_whole(whole, at, each)) return 1;
            memcpy(&numbers, each, sizeof(each));
        }
        store_low_bytes(product->rounded.numbers + (int64_t)row * padded + at, numbers);
    }
    whole->sum = integers_sum_of(sum);
    return 0;
}

INLINE void round_row_to_bytes(const Product *product, int32_t row, const int32_t element) {
    integers lanes = largest_inputs(product, row, element);
    uint32_t most = (uint32_t)integers_max_of(lanes), bits = most < INFINITE_BITS ? scaling_bits(lanes) : most;
    for (;; bits = most) {
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        float inverse = BYTE_LARGEST / magnitude;
        if (!(inverse <= 3e38f)) inverse = 0.0f; /* of nothing but zeros, or numbers so small that they count as 0 */
        product->rounded.scales[row] = inverse > 0.0f ? magnitude / BYTE_LARGEST : 0.0f;
        if (bits < INFINITE_BITS && !round_to_bytes(product, row, element, inverse)) return;
        if (bits == most) break;
    }
    product->rounded.scales[row] = NAN;
    product->rounded.whole[row].count = product->rounded.whole[row].sum = 0;
    memset(product->rounded.numbers + (int64_t)row * product->matrix->padded_inputs, 0,
           (size_t)product->matrix->padded_inputs);
}

static void finish_bytes(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                         int32_t row, int vectors, int rows, const integers sums[BYTE_VECTORS][BYTE_ROWS]) {
    for (int r = 0; r < rows; ++r) {
        const Whole *whole = &product->rounded.whole[row + r];
        for (int i = 0; i < vectors; ++i) {
            integers sum = integers_add(sums[i][r], integers_all(-BYTE_ZERO * whole->sum));
            for (int32_t each = 0; each < whole->count; ++each) {
                const int32_t input = whole->inputs[each];
                bytes some = bytes_load(weights + i * weight_stride + (int64_t)(input / DEPTH) * (OUTPUTS * DEPTH));
                sum = integers_add(sum, integers_mul(bytes_of(some, input % DEPTH), whole->rests[each]));
            }
            floats scale = floats_load(product->matrix->scales + (int64_t)(vector + i) * OUTPUTS);
            floats total = floats_mul(floats_from_integers(sum), scale);
            total = floats_mul(total, floats_all(product->rounded.scales[row + r]));
            store_outputs(product, row + r, (vector + i) * OUTPUTS, total);
        }
    }
}

INLINE void multiply_bytes(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                           int32_t row, const int vectors, const int rows) {
    const int32_t padded = product->matrix->padded_inputs;
    const int8_t *numbers = product->rounded.numbers + (int64_t)row * padded;
    const int8_t *later = numbers + BYTE_ROWS / 2 * (int64_t)padded;
    const uint8_t *now = weights;
    integers sums[BYTE_VECTORS][BYTE_ROWS], kept[BYTE_VECTORS][BYTE_ROWS];
    __asm__("" : "+r"(later)); /* or the compiler addresses all rows from the first after all */
    for (int i = 0; i < vectors; ++i)
        for (int r = 0; r < rows; ++r) sums[i][r] = integers_zero();
    for (int32_t at = 0; at < padded; at += DEPTH, now += OUTPUTS * DEPTH) {
        bytes some[BYTE_VECTORS];
        for (int i = 0; i < vectors; ++i) {
            some[i] = bytes_load(now + i * weight_stride);
            if (rows <= 2) __builtin_prefetch(now + i * weight_stride + AHEAD_BYTES, 0, 2);
        }
        for (int r = 0; r < rows; ++r) {
            const int8_t *from = r < BYTE_ROWS / 2 ? numbers + r * padded : later + (r - BYTE_ROWS / 2) * padded;
            word inputs = word_load(from + at);
            for (int i = 0; i < vectors; ++i) sums[i][r] = dot(sums[i][r], some[i], inputs);
        }
    }
    for (int i = 0; i < vectors; ++i) /* so that sums never leave their registers before */
        for (int r = 0; r < rows; ++r) kept[i][r] = sums[i][r];
    finish_bytes(product, weights, weight_stride, vector, row, vectors, rows, (const integers(*)[BYTE_ROWS])kept);
}

INLINE void compute_byte_rows(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                              int32_t row, int32_t end_row, const int vectors) {
    for (; row + BYTE_ROWS <= end_row; row += BYTE_ROWS)
        multiply_bytes(product, weights, weight_stride, vector, row, vectors, BYTE_ROWS);
    switch (end_row - row) {
    case 1: multiply_bytes(product, weights, weight_stride, vector, row, vectors, 1); break;
#if BYTE_ROWS > 2
    case 2: multiply_bytes(product, weights, weight_stride, vector, row, vectors, 2); break;
    case 3: multiply_bytes(product, weights, weight_stride, vector, row, vectors, 3); break;
    case 4: multiply_bytes(product, weights, weight_stride, vector, row, vectors, 4); break;
    case 5: multiply_bytes(product, weights, weight_stride, vector, row, vectors, 5); break;
#endif
    }
}

static void compute_bytes(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                          int32_t vectors, int32_t row, int32_t end_row) {
    for (; vectors > 0; vectors -= BYTE_VECTORS, vector += BYTE_VECTORS, weights += BYTE_VECTORS * weight_stride) {
        switch (vectors < BYTE_VECTORS ? vectors : BYTE_VECTORS) {
        case 1: compute_byte_rows(product, weights, weight_stride, vector, row, end_row, 1); break;
        case 2: compute_byte_rows(product, weights, weight_stride, vector, row, end_row, 2); break;
#if BYTE_VECTORS > 2
        case 3: compute_byte_rows(product, weights, weight_stride, vector, row, end_row, 3); break;
        case 4: compute_byte_rows(product, weights, weight_stride, vector, row, end_row, 4); break;
#endif
        }
    }
}
