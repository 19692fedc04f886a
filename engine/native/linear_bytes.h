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
    int32_t each[OUTPUTS], largest_of[SCALING_LANE + 1] = {0}; /* the largest first */
    memcpy(each, &lanes, sizeof(each));
    for (int i = 0; i < OUTPUTS; ++i)
        for (int rank = 0; rank <= SCALING_LANE; ++rank) {
            const int32_t other = largest_of[rank];
            largest_of[rank] = each[i] > other ? each[i] : other;
            each[i] = each[i] > other ? other : each[i];
        }
    float largest, chosen;
    memcpy(&largest, &largest_of[0], 4);
    memcpy(&chosen, &largest_of[SCALING_LANE], 4);
    if (!(largest > LEAST_RATIO * chosen)) return (uint32_t)largest_of[0];
    float least = largest / LARGEST_TIMES;
    if (chosen < least) chosen = least;
    uint32_t bits;
    memcpy(&bits, &chosen, 4);
    return bits;
}

/* Keeps what these of OUTPUTS numbers have beyond bytes, a bit for each. Gives 0, or 1 when there is no room for it. */
INLINE int keep_whole(Whole *whole, int32_t at, uint32_t exceeding, integers numbers) {
    int32_t each[OUTPUTS];
    memcpy(each, &numbers, sizeof(each));
    for (; exceeding; exceeding &= exceeding - 1) {
        const int i = __builtin_ctz(exceeding), place = 8 * ((at + i) % DEPTH);
        if (whole->count == MOST_WHOLE) return 1;
        const int32_t rest = each[i] - (each[i] > 0 ? BYTE_LARGEST : -BYTE_LARGEST), low = (int8_t)(rest & 255);
        whole->inputs[whole->count] = at + i;
        whole->rests[whole->count] = rest;
        whole->lower[whole->count] = (uint32_t)(low & 255) << place;
        whole->upper[whole->count++] = (uint32_t)((rest - low) / 256 & 255) << place;
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
        const uint32_t exceeding = integers_exceeding(numbers, BYTE_LARGEST);
        if (exceeding) {
            if (keep_whole(whole, at, exceeding, numbers)) return 1;
            numbers = integers_within(numbers, BYTE_LARGEST);
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

/* Adds to the sums of some vectors what the bytes of a row lack. */
INLINE void add_whole(const Whole *whole, const uint8_t *weights, int64_t weight_stride, const int vectors,
                      integers *sums) {
    integers upper[BYTE_VECTORS];
    for (int i = 0; i < vectors; ++i) upper[i] = integers_zero();
    for (int32_t each = 0; each < whole->count; ++each) {
        const int32_t input = whole->inputs[each], rest = whole->rests[each];
        const uint8_t *from = weights + (int64_t)(input / DEPTH) * (OUTPUTS * DEPTH);
        if (rest > MOST_OF_BYTES || rest < -MOST_OF_BYTES) {
            for (int i = 0; i < vectors; ++i) {
                const integers some = bytes_of(bytes_load(from + i * weight_stride), input % DEPTH);
                sums[i] = integers_add(sums[i], integers_mul(some, rest));
            }
            continue;
        }
        const word low = word_load((const int8_t *)&whole->lower[each]);
        const word high = word_load((const int8_t *)&whole->upper[each]);
        for (int i = 0; i < vectors; ++i) {
            const bytes some = bytes_load(from + i * weight_stride);
            sums[i] = dot(sums[i], some, low);
            upper[i] = dot(upper[i], some, high);
        }
    }
    for (int i = 0; i < vectors; ++i) sums[i] = integers_add(sums[i], integers_shifted_left_8(upper[i]));
}

/* What the sums of a row and of some vectors become. */
INLINE void finish_sums(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                        int32_t row, const int vectors, integers *sums) {
    const Whole *whole = &product->rounded.whole[row];
    const floats row_scale = floats_all(product->rounded.scales[row]);
    if (whole->count) add_whole(whole, weights, weight_stride, vectors, sums);
    for (int i = 0; i < vectors; ++i) {
        floats scales = floats_load(product->matrix->scales + (int64_t)(vector + i) * OUTPUTS);
        integers sum = integers_add(sums[i], integers_all(-BYTE_ZERO * whole->sum));
        floats total = floats_mul(floats_from_integers(sum), scales);
        store_outputs(product, row, (vector + i) * OUTPUTS, floats_mul(total, row_scale));
    }
}

INLINE void multiply_bytes(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                           int32_t row, const int vectors, const int rows) {
    const int32_t padded = product->matrix->padded_inputs;
    const int8_t *numbers = product->rounded.numbers + (int64_t)row * padded;
    const int8_t *later = numbers + BYTE_ROWS / 2 * (int64_t)padded;
    const uint8_t *now = weights;
    integers sums[BYTE_VECTORS][BYTE_ROWS], kept[BYTE_ROWS][BYTE_VECTORS];
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
    for (int r = 0; r < rows; ++r) /* so that sums never leave their registers before */
        for (int i = 0; i < vectors; ++i) kept[r][i] = sums[i][r];
    for (int r = 0; r < rows; ++r)
        finish_sums(product, weights, weight_stride, vector, row + r, vectors, kept[r]);
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

#if defined(BYTE_TILES)
#include "linear_tiles.h"
#endif

static void compute_bytes(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                          int32_t vectors, int32_t row, int32_t end_row) {
#if defined(BYTE_TILES)
    if (end_row - row >= FEWEST_TILE_ROWS) {
        compute_tiles(product, weights, weight_stride, vector, vectors, row, end_row);
        return;
    }
#endif
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
