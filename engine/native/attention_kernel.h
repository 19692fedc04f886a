/* One kernel, for one kind of vector; included by each variant, which names it KERNEL.
 *
 * All products take words of 32 bits: a float32, or with PAIRS two adjacent bfloat16 whose products are summed at once.
 * Other elements are converted when they are read. Head dimensions are padded with zeros to `dim`.
 */
#include "attention.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define FP8_UNIT 0x1p120f /* factor by which the bits of an e4m3, read as a float32, are too small */

/* 2^f on [0, 1), exactly 1 at 0; to 9e-5 where bfloat16 follows, else to 9e-8. */
#if PAIRS
#define exp2_fraction(f)                                                                                              \
    vec_fma(f, vec_fma(f, vec_fma(f, vec_all(7.706706866e-2f), vec_all(2.276449618e-1f)), vec_all(6.951167932e-1f)),  \
            vec_all(1.0f))
#else
#define exp2_fraction(f)                                                                                              \
    vec_fma(f, vec_fma(f, vec_fma(f, vec_fma(f, vec_fma(f, vec_all(1.867130496e-3f), vec_all(9.017029415e-3f)),       \
                                             vec_all(5.579991376e-2f)),                                               \
                                  vec_all(2.401644500e-1f)),                                                          \
                       vec_all(6.931513118e-1f)),                                                                     \
            vec_all(1.0f))
#endif

#include VECTOR_HEADER

#include "vector_tanh.h"

#if PAIRS
typedef uint16_t Number; /* the element of products */
#define NUMBER BFLOAT16
#define NUMBERS_PER_WORD 2
INLINE vec vec_dot(vec sum, vec a, vec b) { return vec_dot_pairs(sum, a, b); }
INLINE void vec_store_numbers(Number *to, vec a) { vec_to_bfloat16(to, a); }
#else
typedef float Number;
#define NUMBER FLOAT32
#define NUMBERS_PER_WORD 1
INLINE vec vec_dot(vec sum, vec a, vec b) { return vec_fma(a, b, sum); }
INLINE void vec_store_numbers(Number *to, vec a) { vec_store(to, a); }
#endif

/* a * of_a + b * of_b, rounded in this order */
INLINE vec vec_merge(vec a, vec of_a, vec b, vec of_b) { return vec_fma(b, of_b, vec_mul(a, of_a)); }

#ifndef KEYS_TOGETHER
#define KEYS_TOGETHER LANES /* keys of a tile are padded to a multiple of it, counted from the tile's first key */
#endif

#define LOG2_E 1.44269504088896340736f
#define LINE_WORDS 16 /* of memory, and of a cache */
#define AHEAD_KEYS 48 /* distance, in keys, between a fetch from memory and its use */
#define LOWEST -1e30f /* less than any scaled score; unlike with -INFINITY, differences from it are numbers */

typedef struct {
    int32_t group;     /* query heads that share a key head */
    int32_t dim;       /* padded head width */
    int32_t words;     /* of a row of dim numbers */
    int32_t is_direct; /* whether the pool's own rows can be used */
#if TILES
    int64_t key_stride; /* bytes between keys, if a left side that starts at a multiple of its rows is in a block; or 0 */
#endif
    int32_t tile_rows;
    int32_t num_heads;
    float scale;       /* factor of scores, including the cap, whose exponentials are powers of 2 */
} Shape;

INLINE Shape shape_of(const Plan *plan) {
    Shape shape = {.group = plan->num_heads / plan->num_kv_heads};
    shape.dim = (int32_t)ceil_to(plan->head_dim, 2 * LANES);
    shape.words = shape.dim / NUMBERS_PER_WORD;
    shape.is_direct = plan->pool_element == NUMBER && plan->head_dim == shape.dim;
#if TILES
    if (shape.is_direct && plan->block_size % AMX_ROWS == 0)
        shape.key_stride = plan->num_kv_heads * pool_row_bytes(plan);
#endif
    shape.num_heads = plan->num_heads;
    shape.tile_rows = (int32_t)ceil_to(larger(TILE_ROWS, plan->num_heads), BLOCK_ROWS);
    shape.scale = plan->softcap > 0.0f ? LOG2_E : plan->score_scale * LOG2_E;
    return shape;
}

typedef struct {
    uint32_t *zeros;                 /* [num_kv_heads, words], of a token */
    const uint8_t **pool_rows;       /* [2 * TILE_KEYS + AHEAD_KEYS] in the order in which they are read */
    const uint8_t **rows;            /* [TILE_KEYS + LANES] of numbers */
    float *key_scales;               /* [TILE_KEYS + KEYS_TOGETHER] of a quantized pool */
    float *value_scales;
    uint32_t *converted;             /* [TILE_KEYS, words] */
    uint32_t *packed_keys;           /* [TILE_KEYS / LANES, words / 4, 4, LANES] */
    uint32_t *packed_values;         /* [TILE_KEYS / NUMBERS_PER_WORD, dim] */
    uint32_t *queries;               /* [tile_rows, words] */
#if TILES
    uint32_t *packed_queries;        /* [num_heads, words, 16] at most, of a split */
#endif
    float *scores;                   /* [num_heads or BLOCK_ROWS, TILE_KEYS] */
    Number *weights;                 /* the same size, exponentials of scores */
    float *largest;                  /* [tile_rows + LANES], scaled score, or LOWEST */
    float *sums;                     /* [tile_rows + LANES] of weights */
    float *outputs;                  /* [tile_rows, dim] */
} Scratch;

INLINE void *carve(uint8_t *memory, int64_t *used, int64_t num_bytes) {
    void *part = memory ? memory + *used : NULL;
    *used += ceil_to(num_bytes, 64);
    return part;
}

/* Sets the parts of a thread's memory; returns its size. */
static int64_t lay_out(Scratch *scratch, const Shape *shape, uint8_t *memory) {
    int64_t used = 0, row_bytes = 4 * (int64_t)shape->words, rows = shape->tile_rows;
    int64_t score_rows = larger(shape->num_heads, BLOCK_ROWS);
    int64_t scales_bytes = 4 * (TILE_KEYS + KEYS_TOGETHER);
    scratch->zeros = carve(memory, &used, row_bytes * shape->num_heads / shape->group);
    scratch->pool_rows = carve(memory, &used, (2 * TILE_KEYS + AHEAD_KEYS) * sizeof(void *));
    scratch->rows = carve(memory, &used, (TILE_KEYS + LANES) * sizeof(void *));
    scratch->key_scales = carve(memory, &used, scales_bytes);
    scratch->value_scales = carve(memory, &used, scales_bytes);
    scratch->converted = carve(memory, &used, TILE_KEYS * row_bytes);
    scratch->packed_keys = carve(memory, &used, TILE_KEYS * row_bytes);
    scratch->packed_values = carve(memory, &used, TILE_KEYS * row_bytes);
    scratch->queries = carve(memory, &used, rows * row_bytes);
#if TILES
    scratch->packed_queries = carve(memory, &used, shape->num_heads * row_bytes * AMX_WORDS);
#endif
    scratch->scores = carve(memory, &used, score_rows * TILE_KEYS * 4);
    scratch->weights = carve(memory, &used, score_rows * TILE_KEYS * (int64_t)sizeof(Number));
    scratch->largest = carve(memory, &used, (rows + LANES) * 4);
    scratch->sums = carve(memory, &used, (rows + LANES) * 4);
    scratch->outputs = carve(memory, &used, rows * shape->dim * 4);
    return used;
}

static int64_t scratch_bytes(const Plan *plan) {
    Shape shape = shape_of(plan);
    Scratch scratch;
    return lay_out(&scratch, &shape, NULL);
}

/* A split's result: for each head the output before the division, then the largest scores, then the sums. */
static int64_t partial_floats(const Plan *plan) {
    Shape shape = shape_of(plan);
    return (int64_t)plan->num_heads * (shape.dim + 2);
}

#include "attention_rows.h"

#if TILES
#include "attention_tiles.h"
#else
#include "attention_products.h"
#endif

#include "attention_splits.h"

#include "attention_chunks.h"

#if TILES
static void attend_rows_in_tiles(const Call *call, const Unit *unit, uint8_t *scratch) {
    set_tiles(BLOCK_ROWS);
    attend_rows(call, unit, scratch);
    _tile_release();
}

static void attend_split_in_tiles(const Call *call, const Unit *unit, uint8_t *scratch) {
    set_tiles(heads_together(call->plan->num_heads / call->plan->num_kv_heads));
    attend_split(call, unit, scratch);
    _tile_release();
}

const Kernel KERNEL = {attend_rows_in_tiles, attend_split_in_tiles, scratch_bytes, partial_floats, HAS_FLOAT16};
#else
const Kernel KERNEL = {attend_rows, attend_split, scratch_bytes, partial_floats, HAS_FLOAT16};
#endif
