/* One kernel, for one kind of vector; included by each variant, which names it OPS_KERNEL.
 *
 * Numbers are float32 between reading and writing. Vectors beyond the end of a row are read and written in part.
 */
#include "ops.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define FP8_UNIT 1.0f /* of conversions that are not used here */

/* 2^f on [0, 1) to 9e-8, exactly 1 at 0 */
#define exp2_fraction(f)                                                                                              \
    vec_fma(f, vec_fma(f, vec_fma(f, vec_fma(f, vec_fma(f, vec_all(1.867130496e-3f), vec_all(9.017029415e-3f)),       \
                                             vec_all(5.579991376e-2f)),                                               \
                                  vec_all(2.401644500e-1f)),                                                          \
                       vec_all(6.931513118e-1f)),                                                                     \
            vec_all(1.0f))

#include VECTOR_HEADER

#include "vector_tanh.h"

#define LOG2_E 1.44269504088896340736f
#define NUM_SUMS 4       /* that do not wait for each other */
#define SEARCH_CHUNK 512 /* elements among which the first of the largest is sought one by one */

INLINE int64_t bytes_of(int32_t element) { return element == BFLOAT16 ? 2 : 4; }

INLINE vec vec_from(int32_t element, const uint8_t *from) {
    return element == BFLOAT16 ? vec_from_bfloat16(from) : vec_load(from);
}

INLINE void vec_to(int32_t element, uint8_t *to, vec a) {
    if (element == BFLOAT16) vec_to_bfloat16(to, a);
    else vec_store(to, a);
}

/* What writing and reading it again makes of it. */
INLINE vec vec_rounded(int32_t element, vec a) {
    uint8_t written[4 * LANES];
    if (element == FLOAT32) return a;
    vec_to(element, written, a);
    return vec_from(element, written);
}

/* The vector at element `at` of a row of `count`, with zeros beyond the end. */
INLINE vec read(int32_t element, const uint8_t *row, int32_t at, int32_t count) {
    row += at * bytes_of(element);
    if (at + LANES <= count) return vec_from(element, row);
    uint8_t rest[4 * LANES] = {0};
    memcpy(rest, row, (size_t)((count - at) * bytes_of(element)));
    return vec_from(element, rest);
}

INLINE void write(int32_t element, uint8_t *row, int32_t at, int32_t count, vec a) {
    row += at * bytes_of(element);
    if (at + LANES <= count) {
        vec_to(element, row, a);
        return;
    }
    uint8_t rest[4 * LANES];
    vec_to(element, rest, a);
    memcpy(row, rest, (size_t)((count - at) * bytes_of(element)));
}

/* Calls `vector(..., at, end)` for each vector of a row of `count`. `end` is `at + LANES` but where the row ends, so
 * that no other vector has to ask. */
#define FOR_EACH_VECTOR(count, vector, ...)                                                                           \
    do {                                                                                                              \
        int32_t at = 0;                                                                                               \
        for (; at + LANES <= (count); at += LANES) vector(__VA_ARGS__, at, at + LANES);                               \
        if (at < (count)) vector(__VA_ARGS__, at, count);                                                             \
    } while (0)

/* The vector of x, to which `delta` is added first if there is one. */
INLINE vec summed(int32_t element, uint8_t *x, const uint8_t *delta, vec delta_scale, int32_t at, int32_t end) {
    vec a = read(element, x, at, end);
    if (delta == NULL) return a;
    a = vec_rounded(element, vec_fma(read(element, delta, at, end), delta_scale, a));
    write(element, x, at, end, a);
    return a;
}

INLINE void add_squares(int32_t element, uint8_t *x, const uint8_t *delta, vec delta_scale, vec *sums, int32_t at,
                        int32_t end) {
    vec a = summed(element, x, delta, delta_scale, at, end);
    sums[at / LANES % NUM_SUMS] = vec_fma(a, a, sums[at / LANES % NUM_SUMS]);
}

INLINE void add_elements(int32_t element, uint8_t *x, const uint8_t *delta, vec delta_scale, vec *sums, int32_t at,
                         int32_t end) {
    vec a = summed(element, x, delta, delta_scale, at, end);
    sums[at / LANES % NUM_SUMS] = vec_add(sums[at / LANES % NUM_SUMS], a);
}

INLINE float total_of(const vec *sums) {
    return vec_sum_of(vec_add(vec_add(sums[0], sums[1]), vec_add(sums[2], sums[3])));
}

/* One over the root mean square of x, to which `delta` is added first if there is one. */
INLINE vec inverse_of(int32_t element, uint8_t *x, const uint8_t *delta, float delta_scale, float eps, int32_t count) {
    vec sums[NUM_SUMS], scale = vec_all(delta_scale);
    for (int i = 0; i < NUM_SUMS; ++i) sums[i] = vec_zero();
    if (delta == NULL) FOR_EACH_VECTOR(count, add_squares, element, x, NULL, scale, sums);
    else FOR_EACH_VECTOR(count, add_squares, element, x, delta, scale, sums);
    return vec_all(1.0f / sqrtf(total_of(sums) / (float)count + eps));
}

INLINE vec normed(int32_t element, int32_t weight_element, const uint8_t *x, const uint8_t *weight, vec inverse,
                  int32_t at, int32_t end) {
    return vec_mul(vec_mul(read(element, x, at, end), inverse), read(weight_element, weight, at, end));
}

INLINE void write_normed(int32_t element, int32_t weight_element, uint8_t *output, const uint8_t *x,
                         const uint8_t *weight, vec inverse, int32_t at, int32_t end) {
    write(element, output, at, end, normed(element, weight_element, x, weight, inverse, at, end));
}

INLINE void add_normed(int32_t element, int32_t weight_element, uint8_t *output, const uint8_t *x,
                       const uint8_t *weight, vec inverse, int32_t at, int32_t end) {
    vec a = vec_rounded(element, normed(element, weight_element, x, weight, inverse, at, end));
    write(element, output, at, end, vec_add(read(element, output, at, end), a));
}

/* x - mean, and 0 beyond the end */
INLINE vec centered(int32_t element, const uint8_t *x, vec negated_mean, int32_t at, int32_t end) {
    vec a = vec_add(read(element, x, at, end), negated_mean);
    if (at + LANES <= end) return a;
    float all[LANES], kept[LANES] = {0};
    vec_store(all, a);
    memcpy(kept, all, (size_t)(end - at) * sizeof(float));
    return vec_load(kept);
}

INLINE void add_centered_squares(int32_t element, const uint8_t *x, vec negated_mean, vec *sums, int32_t at,
                                 int32_t end) {
    vec a = centered(element, x, negated_mean, at, end);
    sums[at / LANES % NUM_SUMS] = vec_fma(a, a, sums[at / LANES % NUM_SUMS]);
}

INLINE void write_centered(int32_t element, int32_t weight_element, uint8_t *output, const uint8_t *x,
                           const uint8_t *weight, vec negated_mean, vec inverse, int32_t at, int32_t end) {
    vec a = vec_mul(centered(element, x, negated_mean, at, end), inverse);
    write(element, output, at, end, vec_mul(a, read(weight_element, weight, at, end)));
}

INLINE void center_as(int32_t element, int32_t weight_element, const Norm *op, uint8_t *output, uint8_t *x,
                      const uint8_t *delta) {
    int32_t count = op->num_columns;
    vec sums[NUM_SUMS], squares[NUM_SUMS], scale = vec_all(op->delta_scale);
    for (int i = 0; i < NUM_SUMS; ++i) sums[i] = squares[i] = vec_zero();
    FOR_EACH_VECTOR(count, add_elements, element, x, delta, scale, sums);
    vec negated_mean = vec_all(-total_of(sums) / (float)count);
    FOR_EACH_VECTOR(count, add_centered_squares, element, x, negated_mean, squares);
    vec inverse = vec_all(1.0f / sqrtf(total_of(squares) / (float)count + op->eps));
    FOR_EACH_VECTOR(count, write_centered, element, weight_element, output, x, op->weight, negated_mean, inverse);
}

INLINE void norm_as(int32_t element, int32_t weight_element, const Norm *op, int64_t row) {
    int32_t count = op->num_columns;
    uint8_t *x = op->x + row * op->x_stride, *output = op->output + row * op->output_stride;
    const uint8_t *delta = op->delta == NULL ? NULL : op->delta + row * op->delta_stride;
    if (op->centers) {
        center_as(element, weight_element, op, output, x, delta);
        return;
    }
    vec inverse = inverse_of(element, x, delta, op->delta_scale, op->eps, count);
    if (op->increases) FOR_EACH_VECTOR(count, add_normed, element, weight_element, output, x, op->weight, inverse);
    else FOR_EACH_VECTOR(count, write_normed, element, weight_element, output, x, op->weight, inverse);
}

static void norm(const void *data, int64_t row) {
    const Norm *op = data;
    if (op->element == FLOAT32) norm_as(FLOAT32, FLOAT32, op, row);
    else if (op->weight_element == FLOAT32) norm_as(BFLOAT16, FLOAT32, op, row);
    else norm_as(BFLOAT16, BFLOAT16, op, row);
}

INLINE void add_up(int32_t element, uint8_t *x, const uint8_t *delta, int32_t at, int32_t end) {
    write(element, x, at, end, vec_add(read(element, x, at, end), read(element, delta, at, end)));
}

INLINE void sum_as(int32_t element, const Sum *op, int64_t row) {
    int64_t row_bytes = op->num_columns * bytes_of(element);
    uint8_t *x = op->x + row * row_bytes;
    const uint8_t *delta = op->delta + row * row_bytes;
    FOR_EACH_VECTOR(op->num_columns, add_up, element, x, delta);
}

static void sum(const void *op, int64_t row) {
    if (((const Sum *)op)->element == BFLOAT16) sum_as(BFLOAT16, op, row);
    else sum_as(FLOAT32, op, row);
}

INLINE void turn_pairs(int32_t element, uint8_t *head, const uint8_t *cosines, const uint8_t *signed_sines,
                       int64_t half_bytes, int32_t at, int32_t end) {
    vec first = read(element, head, at, end), second = read(element, head + half_bytes, at, end);
    vec kept = vec_rounded(element, vec_mul(first, read(element, cosines, at, end)));
    vec other_kept = vec_rounded(element, vec_mul(second, read(element, cosines + half_bytes, at, end)));
    write(element, head, at, end, vec_fma(second, read(element, signed_sines, at, end), kept));
    write(element, head + half_bytes, at, end,
          vec_fma(first, read(element, signed_sines + half_bytes, at, end), other_kept));
}

/* Turns the pairs of a head, which are half a head apart. */
INLINE void turn(int32_t element, uint8_t *head, const uint8_t *cosines, const uint8_t *signed_sines, int32_t half) {
    FOR_EACH_VECTOR(half, turn_pairs, element, head, cosines, signed_sines, half * bytes_of(element));
}

INLINE void norm_head(int32_t element, int32_t weight_element, uint8_t *head, const uint8_t *weight, float eps,
                      int32_t count) {
    vec inverse = inverse_of(element, head, NULL, 1.0f, eps, count);
    FOR_EACH_VECTOR(count, write_normed, element, weight_element, head, head, weight, inverse);
}

INLINE void rotate_and_store_as(int32_t element, int32_t weight_element, const HeadStore *op, int64_t row) {
    int32_t head_dim = op->head_dim, num_rotated = op->num_heads + op->num_kv_heads;
    int64_t head_bytes = head_dim * bytes_of(element), token_bytes = op->num_kv_heads * head_bytes;
    uint8_t *heads = op->heads + row * op->stride;
    for (int32_t head = 0; head < num_rotated; ++head) {
        uint8_t *at = heads + head * head_bytes;
        const uint8_t *weight = head < op->num_heads ? op->query_weight : op->key_weight;
        if (weight != NULL) norm_head(element, weight_element, at, weight, op->eps, head_dim);
        turn(element, at, op->cosines + row * head_bytes, op->signed_sines + row * head_bytes, head_dim / 2);
    }
    if (op->keys == NULL) return;
    memcpy(op->keys + op->slots[row] * token_bytes, heads + op->num_heads * head_bytes, (size_t)token_bytes);
    memcpy(op->values + op->slots[row] * token_bytes, heads + num_rotated * head_bytes, (size_t)token_bytes);
}

static void rotate_and_store(const void *data, int64_t row) {
    const HeadStore *op = data;
    if (op->element == FLOAT32) rotate_and_store_as(FLOAT32, FLOAT32, op, row);
    else if (op->weight_element == FLOAT32) rotate_and_store_as(BFLOAT16, FLOAT32, op, row);
    else rotate_and_store_as(BFLOAT16, BFLOAT16, op, row);
}

/* x / (1 + e^-z), where z is x, or 2 sqrt(2 / pi) (x + 0.044715 x^3): so that it is x (1 + tanh(z / 2)) / 2. z has the
 * sign of x, and e^-|z| does not overflow. */
INLINE vec activated(int32_t activation, vec x) {
    vec negated = vec_mul(x, vec_all(-1.0f)), magnitude = vec_max(x, negated);
    if (activation == GELU_TANH)
        magnitude = vec_mul(magnitude, vec_fma(vec_mul(x, x), vec_all(0.0713548162726f), vec_all(1.5957691216057f)));
    vec power = vec_exp2(vec_mul(magnitude, vec_all(-LOG2_E)));
    vec positive = vec_max(x, vec_zero()), negative = vec_max(negated, vec_zero());
    return (positive - negative * power) / (power + vec_all(1.0f));
}

INLINE void write_gated(int32_t element, int32_t activation, uint8_t *output, const uint8_t *gates, const uint8_t *ups,
                        int32_t at, int32_t end) {
    vec gate = vec_rounded(element, activated(activation, read(element, gates, at, end)));
    write(element, output, at, end, vec_mul(gate, read(element, ups, at, end)));
}

INLINE void gate_as(int32_t element, int32_t activation, const Gating *op, int64_t row) {
    int32_t count = op->num_columns;
    const uint8_t *gates = op->gates + row * op->stride, *ups = gates + count * bytes_of(element);
    uint8_t *output = op->output + row * count * bytes_of(element);
    FOR_EACH_VECTOR(count, write_gated, element, activation, output, gates, ups);
}

INLINE void gate_with(int32_t activation, const Gating *op, int64_t row) {
    if (op->element == BFLOAT16) gate_as(BFLOAT16, activation, op, row);
    else gate_as(FLOAT32, activation, op, row);
}

static void gate(const void *data, int64_t row) {
    const Gating *op = data;
    if (op->activation == GELU_TANH) gate_with(GELU_TANH, op, row);
    else gate_with(SILU, op, row);
}

INLINE void write_capped(int32_t element, uint8_t *row, vec cap, vec inverse, int32_t at, int32_t end) {
    write(element, row, at, end, vec_mul(cap, vec_tanh(vec_mul(read(element, row, at, end), inverse))));
}

INLINE void cap_as(int32_t element, const Capping *op, int64_t row) {
    vec cap = vec_all(op->cap), inverse = vec_all(1.0f / op->cap);
    FOR_EACH_VECTOR(op->num_columns, write_capped, element, op->rows + row * op->stride, cap, inverse);
}

static void cap(const void *op, int64_t row) {
    if (((const Capping *)op)->element == BFLOAT16) cap_as(BFLOAT16, op, row);
    else cap_as(FLOAT32, op, row);
}

/* Finds the largest of a row by integers in the order of the numbers: both zeros are the same, and not a number, whose
 * magnitude is above that of the infinite, is above all. */
#define DEFINE_SEARCH(name, Integer, sign_shift, infinite, highest_order)                                             \
    INLINE Integer order_of_##name(Integer bits) {                                                                    \
        Integer sign = (Integer)(bits >> sign_shift), magnitude = (Integer)(bits & highest_order);                    \
        return magnitude > infinite ? highest_order : (Integer)((magnitude ^ sign) - sign);                           \
    }                                                                                                                 \
    INLINE int64_t name(const uint8_t *row, int64_t count) {                                                          \
        const Integer *bits = (const Integer *)row;                                                                   \
        Integer highest = order_of_##name(bits[0]);                                                                   \
        int64_t place = 0;                                                                                            \
        for (int64_t first = 0; first < count; first += SEARCH_CHUNK) {                                               \
            const Integer *chunk = bits + first;                                                                      \
            int64_t num = count - first < SEARCH_CHUNK ? count - first : SEARCH_CHUNK;                                \
            Integer top = (Integer)-highest_order, largest = 0;                                                       \
            for (int64_t at = 0; at < num; ++at) {                                                                    \
                Integer sign = (Integer)(chunk[at] >> sign_shift), magnitude = (Integer)(chunk[at] & highest_order);  \
                Integer order = (Integer)((magnitude ^ sign) - sign);                                                 \
                top = order > top ? order : top;                                                                      \
                largest = magnitude > largest ? magnitude : largest;                                                  \
            }                                                                                                         \
            if (largest > infinite) top = highest_order;                                                              \
            if (top > highest) {                                                                                      \
                highest = top;                                                                                        \
                place = first;                                                                                        \
            }                                                                                                         \
        }                                                                                                             \
        while (order_of_##name(bits[place]) != highest) ++place;                                                      \
        return place;                                                                                                 \
    }

DEFINE_SEARCH(search_bfloat16, int16_t, 15, 0x7f80, INT16_MAX)
DEFINE_SEARCH(search_float32, int32_t, 31, 0x7f800000, INT32_MAX)

static void search(const void *data, int64_t row) {
    const Search *op = data;
    const uint8_t *numbers = op->rows + row * op->stride;
    int64_t place;
    uint32_t bits;
    if (op->element == BFLOAT16) {
        place = search_bfloat16(numbers, op->num_columns);
        bits = (uint32_t)((const uint16_t *)numbers)[place] << 16;
    } else {
        place = search_float32(numbers, op->num_columns);
        bits = ((const uint32_t *)numbers)[place];
    }
    memcpy(&op->highest[row], &bits, 4);
    op->places[row] = place;
}

#include "ops_sampling.h"

const OpsKernel OPS_KERNEL = {norm, sum, rotate_and_store, gate, search, cap, sample};
