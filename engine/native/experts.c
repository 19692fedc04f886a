/* The ops of a mixture of experts between its products: the choice of experts for each row, and the sum of their
 * outputs.
 *
 * A row's results depend on that row alone. All arithmetic is float32.
 */
#define INLINE static inline __attribute__((always_inline))
#define FP8_UNIT 1.0f /* for conversions that are not used here */

/* 2^f on [0, 1) to 9e-8, exactly 1 at 0 */
#define exp2_fraction(f)                                                                                              \
    vec_fma(f, vec_fma(f, vec_fma(f, vec_fma(f, vec_fma(f, vec_all(1.867130496e-3f), vec_all(9.017029415e-3f)),       \
                                             vec_all(5.579991376e-2f)),                                               \
                                  vec_all(2.401644500e-1f)),                                                          \
                       vec_all(6.931513118e-1f)),                                                                     \
            vec_all(1.0f))

#include "work.h"

#include <math.h>
#include <string.h>

#include "vector_plain.h"

#define EXPERTS_VERSION 1 /* engine/native/ops_library.py expects the same */
#define MOST_EXPERTS 1024 /* as in serving_core/model_files/differences.py */
#define CHUNK 256         /* columns added at a time */
#define LOG2_E 1.44269504088896340736f
#define TAKEN -1.0f       /* replaces the power of a chosen expert; powers are never below 0 */

enum ExpertsElement { EXPERTS_FLOAT32, EXPERTS_BFLOAT16 };

typedef struct {
    int32_t element;
    int32_t num_experts;
    int32_t num_chosen;
    int32_t is_normalized; /* whether the weights of a row sum to 1 */
    const uint8_t *logits; /* [rows, num_experts] */
    int32_t *chosen;       /* [rows, num_chosen], the likeliest first; of equal ones, the lowest number */
    float *weights;        /* the same */
} Routing;

typedef struct {
    int32_t element;
    int32_t num_columns;
    int32_t num_chosen;
    const uint8_t *rows;          /* [places, num_columns] */
    const int64_t *places;        /* [outputs, num_chosen] */
    const float *weights;         /* the same */
    const uint8_t *shared;        /* [outputs, num_columns], or NULL */
    const uint8_t *shared_logits; /* [outputs] */
    uint8_t *outputs;
} Mixing;

_Static_assert(sizeof(Routing) <= DATA_BYTES && sizeof(Mixing) <= DATA_BYTES, "an operation has no room for it");

EXPORTED int32_t experts_version(void) { return EXPERTS_VERSION; }

INLINE int64_t bytes_of(int32_t element) { return element == EXPERTS_BFLOAT16 ? 2 : 4; }

INLINE vec vec_from(int32_t element, const uint8_t *from) {
    return element == EXPERTS_BFLOAT16 ? vec_from_bfloat16(from) : vec_load(from);
}

/* Elements of a row of `count` elements from `at` on, with `fill` beyond the end. */
INLINE vec read(int32_t element, const uint8_t *row, int32_t at, int32_t count, float fill) {
    row += at * bytes_of(element);
    if (at + LANES <= count) return vec_from(element, row);
    uint8_t rest[4 * LANES] = {0};
    memcpy(rest, row, (size_t)((count - at) * bytes_of(element)));
    vec some = vec_from(element, rest);
    for (int i = count - at; i < LANES; ++i) some[i] = fill;
    return some;
}

INLINE void write(int32_t element, uint8_t *row, int32_t at, int32_t count, vec a) {
    uint8_t rest[4 * LANES];
    if (element == EXPERTS_BFLOAT16) vec_to_bfloat16(rest, a);
    else vec_store(rest, a);
    int32_t held = count - at < LANES ? count - at : LANES;
    memcpy(row + at * bytes_of(element), rest, (size_t)(held * bytes_of(element)));
}

/* Computes e^(x - largest) of a row's logits; returns their sum, which is NaN if one of them is. */
static float powers_of(const Routing *step, const uint8_t *logits, float *powers) {
    const int32_t count = step->num_experts;
    vec largest = vec_all(-INFINITY), sums = vec_zero();
    for (int32_t at = 0; at < count; at += LANES)
        largest = vec_max(largest, read(step->element, logits, at, count, -INFINITY));
    vec top = vec_all(vec_max_of(largest));
    for (int32_t at = 0; at < count; at += LANES) {
        vec x = read(step->element, logits, at, count, -INFINITY);
        vec power = vec_exp2(vec_mul(x - top, vec_all(LOG2_E)));
        vec_store(powers + at, power);
        sums = vec_add(sums, power);
    }
    return vec_sum_of(sums);
}

static int32_t likeliest(const float *powers, int32_t count) {
    int32_t best = -1;
    for (int32_t i = 0; i < count; ++i)
        if (powers[i] != TAKEN && (best < 0 || powers[i] > powers[best])) best = i;
    return best;
}

static void route(const Routing *step, int64_t row) {
    float powers[MOST_EXPERTS + LANES], total = 0.0f;
    int32_t *chosen = step->chosen + row * step->num_chosen;
    float *weights = step->weights + row * step->num_chosen;
    float sum = powers_of(step, step->logits + row * step->num_experts * bytes_of(step->element), powers);
    for (int32_t i = 0; i < step->num_chosen; ++i) {
        chosen[i] = likeliest(powers, step->num_experts);
        weights[i] = powers[chosen[i]] / sum;
        total += weights[i];
        powers[chosen[i]] = TAKEN;
    }
    for (int32_t i = 0; step->is_normalized && i < step->num_chosen; ++i) weights[i] /= total;
}

/* Adds columns at .. at + CHUNK of a row times its weight. */
INLINE void add_rows(int32_t element, float *sums, const uint8_t *row, int32_t at, int32_t count, float weight) {
    for (int32_t i = 0; i < CHUNK && at + i < count; i += LANES) {
        vec product = vec_mul(read(element, row, at + i, count, 0.0f), vec_all(weight));
        vec_store(sums + i, vec_add(vec_load(sums + i), product));
    }
}

static float sigmoid(float x) {
    float power = vec_exp2(vec_all(-LOG2_E * fabsf(x)))[0]; /* e^-|x| does not overflow */
    return x < 0.0f ? power / (1.0f + power) : 1.0f / (1.0f + power);
}

INLINE void mix_as(int32_t element, const Mixing *step, int64_t row) {
    const int32_t count = step->num_columns;
    const int64_t row_bytes = count * bytes_of(element);
    const int64_t *places = step->places + row * step->num_chosen;
    const float *weights = step->weights + row * step->num_chosen;
    float open = 0.0f;
    if (step->shared != NULL)
        open = sigmoid(read(element, step->shared_logits + row * bytes_of(element), 0, 1, 0.0f)[0]);
    for (int32_t at = 0; at < count; at += CHUNK) {
        float sums[CHUNK] = {0};
        for (int32_t i = 0; i < step->num_chosen; ++i)
            add_rows(element, sums, step->rows + places[i] * row_bytes, at, count, weights[i]);
        if (step->shared != NULL) add_rows(element, sums, step->shared + row * row_bytes, at, count, open);
        for (int32_t i = 0; i < CHUNK && at + i < count; i += LANES)
            write(element, step->outputs + row * row_bytes, at + i, count, vec_load(sums + i));
    }
}

static void mix(const Mixing *step, int64_t row) {
    if (step->element == EXPERTS_BFLOAT16) mix_as(EXPERTS_BFLOAT16, step, row);
    else mix_as(EXPERTS_FLOAT32, step, row);
}

static int32_t begin(Operation *operation, int32_t num_rows) {
    operation->num_units = num_rows;
    return 0;
}

static void compute_routing(const Operation *operation, Units units, int32_t thread) {
    (void)thread;
    for (int32_t row = units.first; row < units.first + units.count; ++row)
        route((const Routing *)operation->data, row);
}

static void compute_mixing(const Operation *operation, Units units, int32_t thread) {
    (void)thread;
    for (int32_t row = units.first; row < units.first + units.count; ++row) mix((const Mixing *)operation->data, row);
}

static const OperationKind routing = {begin, compute_routing, NULL}, mixing = {begin, compute_mixing, NULL};

/* Sorts the choices of all rows by expert, then by row: `tokens` holds the row of each, `places` the place of each
 * choice; the choices for expert e are starts[e] up to starts[e + 1]. */
static void sort(const Routing *step, int32_t num_rows, int64_t *tokens, int32_t *starts, int64_t *places) {
    const int64_t count = (int64_t)num_rows * step->num_chosen;
    int32_t next[MOST_EXPERTS] = {0};
    for (int64_t i = 0; i < count; ++i) ++next[step->chosen[i]];
    starts[0] = 0;
    for (int32_t expert = 0; expert < step->num_experts; ++expert) {
        starts[expert + 1] = starts[expert] + next[expert];
        next[expert] = starts[expert];
    }
    for (int64_t i = 0; i < count; ++i) {
        places[i] = next[step->chosen[i]]++;
        tokens[places[i]] = i / step->num_chosen;
    }
}

/* Routes to at most MOST_EXPERTS experts, with num_threads threads of `parallel` (GOMP_parallel), or this thread
 * alone. */
EXPORTED void experts_route(Parallel *parallel, int32_t num_threads, int32_t element, int32_t num_rows,
                            int32_t num_experts, int32_t num_chosen, int32_t is_normalized, const uint8_t *logits,
                            int32_t *chosen, int64_t *tokens, int32_t *starts, int64_t *places, float *weights) {
    Operation operation = {.kind = &routing};
    Routing step = {element, num_experts, num_chosen, is_normalized, logits, chosen, weights};
    *(Routing *)operation.data = step;
    run_operations(&operation, 1, num_rows, parallel, num_threads);
    sort(&step, num_rows, tokens, starts, places);
}

/* outputs[row] = the sum of rows[places[row, i]] * weights[row, i], plus shared[row] * sigmoid(shared_logits[row])
 * if there is a shared expert. */
EXPORTED void experts_mix(Parallel *parallel, int32_t num_threads, int32_t element, int32_t num_rows,
                          int32_t num_columns, int32_t num_chosen, const uint8_t *rows, const int64_t *places,
                          const float *weights, const uint8_t *shared, const uint8_t *shared_logits,
                          uint8_t *outputs) {
    Operation operation = {.kind = &mixing};
    *(Mixing *)operation.data =
        (Mixing){element, num_columns, num_chosen, rows, places, weights, shared, shared_logits, outputs};
    run_operations(&operation, 1, num_rows, parallel, num_threads);
}
