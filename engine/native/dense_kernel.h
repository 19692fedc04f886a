/* One kernel, for one kind of vector; included by each variant, which names it DENSE_KERNEL.
 *
 * A vector of weights has a word of 32 bits for each of OUTPUTS outputs: a float32, or two adjacent bfloat16. With
 * PAIRS these are multiplied and summed at once; otherwise they, and first a block's inputs, are converted to float32.
 */
#include "dense.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define FP8_UNIT 1.0f /* for conversions that are not used here, as are powers */
#define exp2_fraction(f) (f)
#include VECTOR_HEADER

#define PARTS (OUTPUTS / LANES)     /* machine vectors in a vector of weights */
#define SUMS (TILE_VECTORS * PARTS) /* rows whose sums stay in registers */
#define MIDDLE (TILE_ROWS / 2)
#define AHEAD_WORDS 24 /* of the unit's weights, fetched when all rows are read together */
#define WORDS_READ(element) (!PAIRS && (element) == DENSE_BFLOAT16 ? 2 : 1) /* of inputs, for one of weights */

_Static_assert(UNIT_ROWS % BLOCK_ROWS == 0, "a unit has no room for whole blocks");

/* The memory of a row's sums between blocks of inputs. */
typedef struct {
    float *sums; /* [UNIT_ROWS, PANEL_VECTORS * OUTPUTS] */
    int is_first, is_last;
} Tile;

/* Words of inputs of one panel, and at most TILE_ROWS rows of inputs. */
typedef struct {
    const uint8_t *weights;
    int64_t weight_stride; /* of a word of inputs */
    const uint8_t *inputs;
    int64_t input_stride;
    int32_t num_rows;
    int32_t num_words;
    int32_t has_rest;      /* the last word has two bytes */
    const uint8_t *ahead;  /* weights to fetch, or NULL */
    int64_t ahead_stride;
} Block;

INLINE vec word_of(const uint8_t *from, const size_t num_bytes) {
    uint32_t word = 0;
    if (num_bytes == 4) return vec_all_words(from);
    memcpy(&word, from, num_bytes);
    return vec_all_words(&word);
}

/* `later` is the row in the middle of TILE_ROWS, so that all rows are addressed with few registers. */
INLINE void step(vec sums[TILE_ROWS][SUMS], const uint8_t *weights, const uint8_t *inputs, const uint8_t *later,
                 int64_t input_stride, const int element, const int rows, const int vectors, const size_t num_bytes) {
    vec some[SUMS];
    for (int i = 0; i < vectors * PARTS; ++i) some[i] = vec_load(weights + i * LANES * 4);
    for (int row = 0; row < rows; ++row) {
        const uint8_t *from = row < MIDDLE ? inputs + row * input_stride : later + (row - MIDDLE) * input_stride;
        vec input = word_of(from, num_bytes);
#if PAIRS
        for (int i = 0; i < vectors * PARTS; ++i) sums[row][i] = vec_dot_pairs(sums[row][i], some[i], input);
#else
        if (element == DENSE_FLOAT32) {
            for (int i = 0; i < vectors * PARTS; ++i) sums[row][i] = vec_fma(some[i], input, sums[row][i]);
            continue;
        }
        vec second = word_of(from + 4, num_bytes);
        for (int i = 0; i < vectors * PARTS; ++i) {
            sums[row][i] = vec_fma(vec_first_of_pairs(some[i]), input, sums[row][i]);
            sums[row][i] = vec_fma(vec_second_of_pairs(some[i]), second, sums[row][i]);
        }
#endif
    }
}

INLINE void multiply(vec sums[TILE_ROWS][SUMS], const Block *block, int32_t from, int32_t end, const uint8_t *ahead,
                     const int element, const int rows, const int vectors, const int lines, const int is_near) {
    const uint8_t *weights = block->weights + from * block->weight_stride;
    const uint8_t *inputs = block->inputs + 4 * WORDS_READ(element) * (int64_t)from;
    const uint8_t *later = inputs + MIDDLE * block->input_stride;
    __asm__("" : "+r"(later)); /* otherwise the compiler addresses all rows from the first */
    for (; from < end; ++from) {
        for (int i = 0; i < lines; ++i) {
            if (is_near) __builtin_prefetch(ahead + i * VECTOR_BYTES, 0, 3);
            else __builtin_prefetch(ahead + i * VECTOR_BYTES, 0, 2);
        }
        step(sums, weights, inputs, later, block->input_stride, element, rows, vectors, 4);
        weights += block->weight_stride;
        inputs += 4 * WORDS_READ(element);
        later += 4 * WORDS_READ(element);
        ahead += block->ahead_stride;
    }
}

INLINE float *sums_of(const Tile *tile, int32_t row, int32_t vector) {
    return tile->sums + (row * PANEL_VECTORS + vector) * OUTPUTS;
}

INLINE uint8_t *output_of(const DenseProduct *product, int32_t vector, int32_t row, const int element) {
    return product->outputs +
           ((int64_t)row * product->matrix->num_outputs + vector * OUTPUTS) * element_bytes(element);
}

/* Otherwise stores to distant rows would wait for memory, and so would the work that follows. */
INLINE void fetch_outputs(const DenseProduct *product, int32_t vector, int32_t row, const int element, const int rows,
                          const int vectors) {
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < vectors; i += VECTOR_BYTES / OUTPUTS / element_bytes(element))
            __builtin_prefetch(output_of(product, vector + i, row + r, element), 1);
}

INLINE void put(const vec *sums, uint8_t *to, const int element) {
    for (int part = 0; part < PARTS; ++part, to += LANES * element_bytes(element)) {
        if (element == DENSE_BFLOAT16) vec_to_bfloat16(to, sums[part]);
        else vec_store(to, sums[part]);
    }
}

INLINE void store_outputs(vec sums[TILE_ROWS][SUMS], const DenseProduct *product, int32_t vector, int32_t row,
                          const int element, const int rows, const int vectors) {
    const DenseMatrix *matrix = product->matrix;
    for (int i = 0; i < vectors; ++i) {
        int32_t output = (vector + i) * OUTPUTS, count = smaller(matrix->num_outputs - output, OUTPUTS);
        float bias[OUTPUTS] = {0};
        if (matrix->bias) memcpy(bias, matrix->bias + output, (size_t)count * 4);
        uint8_t *to = output_of(product, vector + i, row, element), rest[OUTPUTS * 4];
        for (int r = 0; r < rows; ++r, to += (int64_t)matrix->num_outputs * element_bytes(element)) {
            vec *sum = sums[r] + i * PARTS;
            for (int part = 0; matrix->bias && part < PARTS; ++part)
                sum[part] = vec_add(sum[part], vec_load(bias + part * LANES));
            if (count == OUTPUTS) {
                put(sum, to, element);
            } else {
                put(sum, rest, element);
                memcpy(to, rest, (size_t)(count * element_bytes(element)));
            }
        }
    }
}

/* Computes at most TILE_VECTORS vectors of the unit, from number `first` on. */
INLINE void compute_block(const DenseProduct *product, const DenseUnit *unit, const Tile *tile, const Block *block,
                          const uint8_t *next, int32_t row, int32_t first, const int element, const int rows,
                          const int vectors) {
    vec sums[TILE_ROWS][SUMS];
    int32_t words = block->num_words;
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < vectors * PARTS; ++i)
            sums[r][i] = tile->is_first ? vec_zero() : vec_load(sums_of(tile, row + r, first) + i * LANES);
    if (tile->is_last) fetch_outputs(product, unit->vector + first, unit->row + row, element, rows, vectors);
    if (unit->num_rows <= TILE_ROWS) { /* each weight is used once, directly from memory */
        const int32_t ahead_words = smaller(AHEAD_WORDS, words), turn = words - ahead_words;
        /* Into the nearest cache, so that a line is waited for once: 2 rows of 135M weights take 8.4 ms, not 11.1. The
         * loads of one row are far ahead themselves, and more work a line leaves time enough: both lose by it, five
         * rows with two threads. */
        const int is_near = PAIRS && rows > 1 && rows < 5;
        multiply(sums, block, 0, turn, block->weights + ahead_words * block->weight_stride, element, rows, vectors,
                 vectors, is_near);
        multiply(sums, block, turn, words, next, element, rows, vectors, vectors, is_near);
    } else if (block->ahead == NULL)
        multiply(sums, block, 0, words, NULL, element, rows, vectors, 0, 0);
    else if (unit->num_rows <= 3 * TILE_ROWS)
        multiply(sums, block, 0, words, block->ahead, element, rows, vectors, vectors < 2 ? 1 : 2, 0);
    else
        multiply(sums, block, 0, words, block->ahead, element, rows, vectors, 1, 0);
    if (block->has_rest) {
        const uint8_t *inputs = block->inputs + 4 * (int64_t)words;
        step(sums, block->weights + words * block->weight_stride, inputs, inputs + MIDDLE * block->input_stride,
             block->input_stride, element, rows, vectors, 2);
    }
    if (tile->is_last) store_outputs(sums, product, unit->vector + first, unit->row + row, element, rows, vectors);
    for (int r = 0; !tile->is_last && r < rows; ++r)
        for (int i = 0; i < vectors * PARTS; ++i) vec_store(sums_of(tile, row + r, first) + i * LANES, sums[r][i]);
}

INLINE void compute_rows(const DenseProduct *product, const DenseUnit *unit, const Tile *tile, const Block *block,
                         const uint8_t *next, int32_t row, int32_t first, const int element, const int vectors) {
    switch (block->num_rows) {
    case 1: compute_block(product, unit, tile, block, next, row, first, element, 1, vectors); break;
    case 2: compute_block(product, unit, tile, block, next, row, first, element, 2, vectors); break;
    case 3: compute_block(product, unit, tile, block, next, row, first, element, 3, vectors); break;
    case 4: compute_block(product, unit, tile, block, next, row, first, element, 4, vectors); break;
    case 5: compute_block(product, unit, tile, block, next, row, first, element, 5, vectors); break;
    case 6: compute_block(product, unit, tile, block, next, row, first, element, 6, vectors); break;
    }
}

INLINE void compute_some(const DenseProduct *product, const DenseUnit *unit, const Tile *tile, const Block *whole,
                         const uint8_t *next, int32_t row, const int element) {
    Block block = *whole;
    for (int32_t first = 0; first < unit->num_vectors; first += TILE_VECTORS) {
        switch (smaller(TILE_VECTORS, unit->num_vectors - first)) {
        case 1: compute_rows(product, unit, tile, &block, next, row, first, element, 1); break;
#if TILE_VECTORS > 1
        case 2: compute_rows(product, unit, tile, &block, next, row, first, element, 2); break;
        case 3: compute_rows(product, unit, tile, &block, next, row, first, element, 3); break;
        case 4: compute_rows(product, unit, tile, &block, next, row, first, element, 4); break;
#endif
        }
        block.weights += TILE_VECTORS * VECTOR_BYTES;
        next += TILE_VECTORS * VECTOR_BYTES;
    }
}

#if !PAIRS
/* Converts the inputs of a block of rows to float32, with a zero behind an odd number of inputs. */
static void widen(Block *block, int32_t num_rows, int32_t count, float *wide) {
    for (int32_t row = 0; row < num_rows; ++row) {
        const uint8_t *from = block->inputs + row * block->input_stride;
        float *to = wide + row * 2 * BLOCK_WORDS;
        for (int32_t at = 0; at < count; at += LANES) {
            uint16_t some[LANES] = {0};
            memcpy(some, from + 2 * at, (size_t)smaller(LANES, count - at) * 2);
            vec_store(to + at, vec_from_bfloat16(some));
        }
    }
    block->inputs = (const uint8_t *)wide;
    block->input_stride = 2 * BLOCK_WORDS * (int64_t)sizeof(float);
}
#endif

/* Of so many that are left. Where the last block fetches weights too it shares rows evenly with the one before: one row
 * alone is done before memory has given them (7 rows of 135M weights: 11.5 ms as 4 and 3, 20.1 as 6 and 1). */
INLINE int32_t rows_together(int32_t left, const int last_fetches) {
    return last_fetches && left > TILE_ROWS && left < 2 * TILE_ROWS ? (left + 1) / 2 : smaller(left, TILE_ROWS);
}

INLINE void compute_as(const DenseProduct *product, const DenseUnit *unit, const DenseUnit *next, const int element) {
    const DenseMatrix *matrix = product->matrix;
    const uint8_t *weights = dense_weights_of(matrix, unit->vector);
    const int64_t stride = dense_stride_of(matrix, unit->vector);
    const int32_t lines = unit->num_rows <= 3 * TILE_ROWS ? 2 : 1, words = num_words(matrix);
    float sums[UNIT_ROWS * PANEL_VECTORS * OUTPUTS];
#if !PAIRS
    float wide[TILE_ROWS * 2 * BLOCK_WORDS];
#endif
    for (int32_t first = 0; first < words; first += BLOCK_WORDS) {
        Tile tile = {sums, first == 0, first + BLOCK_WORDS >= words};
        Block block = {.weights = weights + first * stride, .weight_stride = stride};
        int32_t count = smaller(BLOCK_WORDS * 4 / element_bytes(element),
                                matrix->num_inputs - first * 4 / element_bytes(element));
        block.has_rest = PAIRS && count % 2;
        block.num_words = smaller(BLOCK_WORDS, words - first) - block.has_rest;
        const uint8_t *following = block.weights + BLOCK_WORDS * stride;
        block.ahead_stride = stride;
        if (tile.is_last) {
            following = next->num_vectors > 0 ? dense_weights_of(matrix, next->vector) : block.weights;
            block.ahead_stride = dense_stride_of(matrix, next->vector);
        }
        for (int32_t row = 0, line = 0; row < unit->num_rows; row += block.num_rows, line += lines) {
            block.num_rows = rows_together(unit->num_rows - row, line + lines < PANEL_VECTORS);
            block.inputs = product->inputs + (unit->row + row) * product->input_stride + 4 * (int64_t)first;
            block.input_stride = product->input_stride;
            block.ahead = line < PANEL_VECTORS ? following + line * VECTOR_BYTES : NULL;
#if !PAIRS
            if (element == DENSE_BFLOAT16) widen(&block, block.num_rows, count, wide);
#endif
            compute_some(product, unit, &tile, &block, following, row, element);
        }
    }
}

static void compute(const DenseProduct *product, const DenseUnit *unit, const DenseUnit *next) {
#if PAIRS
    compute_as(product, unit, next, DENSE_BFLOAT16);
#else
    if (product->matrix->element == DENSE_BFLOAT16) compute_as(product, unit, next, DENSE_BFLOAT16);
    else compute_as(product, unit, next, DENSE_FLOAT32);
#endif
}

const DenseKernel DENSE_KERNEL = {compute, BLOCK_ROWS};
