/* Products with bfloat16 weights by AVX512_BF16, which multiplies a pair of inputs at a time. */
#include "dense.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define MIDDLE (BLOCK_ROWS / 2)
#define AHEAD_PAIRS 24 /* of the one in work, the weights that are fetched when all rows are read together */

/* Where a row's sums come from and go to between blocks of inputs; NULL where all inputs are in one. */
typedef struct {
    float *sums; /* [UNIT_ROWS, PANEL_VECTORS * OUTPUTS] */
    int is_first, is_last;
} Tile;

/* Pairs of inputs of one panel, and some rows of inputs. */
typedef struct {
    const uint8_t *weights;
    int64_t weight_stride; /* of a pair of inputs */
    const uint8_t *inputs;
    int64_t input_stride;
    int32_t num_inputs;
    const uint8_t *ahead;  /* weights to fetch, or NULL */
    int64_t ahead_stride;
} Block;

INLINE __m512 add_pairs(__m512 sums, __m512i weights, __m512i inputs) {
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)inputs);
}

/* `later` is the row in the middle of BLOCK_ROWS, so that all rows are addressed with few registers. */
INLINE void step(__m512 sums[BLOCK_ROWS][PANEL_VECTORS], const uint8_t *weights, const uint8_t *inputs,
                 const uint8_t *later, int64_t input_stride, const int rows, const int vectors,
                 const size_t input_bytes) {
    __m512i some[PANEL_VECTORS];
    for (int i = 0; i < vectors; ++i) some[i] = _mm512_loadu_si512(weights + i * VECTOR_BYTES);
    for (int row = 0; row < rows; ++row) {
        int32_t pair = 0;
        memcpy(&pair, row < MIDDLE ? inputs + row * input_stride : later + (row - MIDDLE) * input_stride, input_bytes);
        for (int i = 0; i < vectors; ++i) sums[row][i] = add_pairs(sums[row][i], some[i], _mm512_set1_epi32(pair));
    }
}

INLINE void multiply(__m512 sums[BLOCK_ROWS][PANEL_VECTORS], const Block *block, int32_t from, int32_t end,
                     const uint8_t *ahead, const int rows, const int vectors, const int lines) {
    const uint8_t *weights = block->weights + from * block->weight_stride;
    const uint8_t *inputs = block->inputs + 4 * (int64_t)from, *later = inputs + MIDDLE * block->input_stride;
    __asm__("" : "+r"(later)); /* or the compiler addresses all rows from the first after all */
    for (; from < end; ++from) {
        for (int i = 0; i < lines; ++i) _mm_prefetch((const char *)ahead + i * VECTOR_BYTES, _MM_HINT_T1);
        step(sums, weights, inputs, later, block->input_stride, rows, vectors, 4);
        weights += block->weight_stride;
        inputs += 4;
        later += 4;
        ahead += block->ahead_stride;
    }
}

INLINE void load_sums(__m512 sums[BLOCK_ROWS][PANEL_VECTORS], const Tile *tile, int32_t row, const int rows,
                      const int vectors) {
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < vectors; ++i)
            sums[r][i] = tile->is_first ? _mm512_setzero_ps()
                                        : _mm512_loadu_ps(tile->sums + ((row + r) * PANEL_VECTORS + i) * OUTPUTS);
}

INLINE void store_sums(__m512 sums[BLOCK_ROWS][PANEL_VECTORS], const Tile *tile, int32_t row, const int rows,
                       const int vectors) {
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < vectors; ++i)
            _mm512_storeu_ps(tile->sums + ((row + r) * PANEL_VECTORS + i) * OUTPUTS, sums[r][i]);
}

INLINE uint16_t *output_of(const DenseProduct *product, int32_t vector, int32_t row) {
    return (uint16_t *)product->outputs + (int64_t)row * product->matrix->num_outputs + vector * OUTPUTS;
}

/* Else stores of rows that are far apart would wait for memory, and what follows for them. */
INLINE void fetch_outputs(const DenseProduct *product, int32_t vector, int32_t row, const int rows, const int vectors) {
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < vectors; i += HALF_VECTORS) __builtin_prefetch(output_of(product, vector + i, row + r), 1);
}

INLINE void store_outputs(__m512 sums[BLOCK_ROWS][PANEL_VECTORS], const DenseProduct *product, int32_t vector,
                          int32_t row, const int rows, const int vectors) {
    const DenseMatrix *matrix = product->matrix;
    for (int i = 0; i < vectors; ++i) {
        int32_t output = (vector + i) * OUTPUTS, count = smaller(matrix->num_outputs - output, OUTPUTS);
        __mmask16 mask = (__mmask16)((1u << count) - 1);
        __m512 bias = matrix->bias ? _mm512_maskz_loadu_ps(mask, matrix->bias + output) : _mm512_setzero_ps();
        uint16_t *to = output_of(product, vector + i, row);
        for (int r = 0; r < rows; ++r, to += matrix->num_outputs) {
            __m512 sum = matrix->bias ? _mm512_add_ps(sums[r][i], bias) : sums[r][i];
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh(sum);
            if (count == OUTPUTS) _mm256_storeu_si256((__m256i *)to, rounded);
            else _mm256_mask_storeu_epi16(to, mask, rounded); /* far slower */
        }
    }
}

INLINE void compute_block(const DenseProduct *product, const DenseUnit *unit, const Tile *tile, const Block *block,
                          const uint8_t *next, int32_t row, const int rows, const int vectors) {
    __m512 sums[BLOCK_ROWS][PANEL_VECTORS];
    int32_t pairs = block->num_inputs / 2;
    load_sums(sums, tile, row, rows, vectors);
    if (tile->is_last) fetch_outputs(product, unit->vector, unit->row + row, rows, vectors);
    if (unit->num_rows <= BLOCK_ROWS) { /* each weight is used once: it comes from memory right now */
        int32_t ahead_pairs = smaller(AHEAD_PAIRS, pairs), turn = pairs - ahead_pairs;
        multiply(sums, block, 0, turn, block->weights + ahead_pairs * block->weight_stride, rows, vectors, vectors);
        multiply(sums, block, turn, pairs, next, rows, vectors, vectors);
    } else if (block->ahead == NULL)
        multiply(sums, block, 0, pairs, NULL, rows, vectors, 0);
    else if (unit->num_rows <= 3 * BLOCK_ROWS)
        multiply(sums, block, 0, pairs, block->ahead, rows, vectors, vectors < 2 ? 1 : 2);
    else
        multiply(sums, block, 0, pairs, block->ahead, rows, vectors, 1);
    if (block->num_inputs % 2) {
        const uint8_t *inputs = block->inputs + 4 * (int64_t)pairs, *later = inputs + MIDDLE * block->input_stride;
        step(sums, block->weights + pairs * block->weight_stride, inputs, later, block->input_stride, rows, vectors, 2);
    }
    if (tile->is_last) store_outputs(sums, product, unit->vector, unit->row + row, rows, vectors);
    else store_sums(sums, tile, row, rows, vectors);
}

INLINE void compute_rows(const DenseProduct *product, const DenseUnit *unit, const Tile *tile, const Block *block,
                         const uint8_t *next, int32_t row, const int vectors) {
    switch (unit->num_rows - row) {
    case 1: compute_block(product, unit, tile, block, next, row, 1, vectors); break;
    case 2: compute_block(product, unit, tile, block, next, row, 2, vectors); break;
    case 3: compute_block(product, unit, tile, block, next, row, 3, vectors); break;
    case 4: compute_block(product, unit, tile, block, next, row, 4, vectors); break;
    case 5: compute_block(product, unit, tile, block, next, row, 5, vectors); break;
    default: compute_block(product, unit, tile, block, next, row, 6, vectors); break;
    }
}

static void compute_some(const DenseProduct *product, const DenseUnit *unit, const Tile *tile, const Block *block,
                         const uint8_t *next, int32_t row) {
    switch (unit->num_vectors) {
    case 1: compute_rows(product, unit, tile, block, next, row, 1); break;
    case 2: compute_rows(product, unit, tile, block, next, row, 2); break;
    case 3: compute_rows(product, unit, tile, block, next, row, 3); break;
    default: compute_rows(product, unit, tile, block, next, row, 4); break;
    }
}

static void compute(const DenseProduct *product, const DenseUnit *unit, const DenseUnit *next) {
    const DenseMatrix *matrix = product->matrix;
    const uint8_t *weights = dense_weights_of(matrix, unit->vector);
    const int64_t stride = dense_stride_of(matrix, unit->vector);
    const int32_t lines = unit->num_rows <= 3 * BLOCK_ROWS ? 2 : 1, pairs = num_pairs(matrix);
    float sums[UNIT_ROWS * PANEL_VECTORS * OUTPUTS];
    for (int32_t first = 0; first < pairs; first += BLOCK_PAIRS) {
        Tile tile = {sums, first == 0, first + BLOCK_PAIRS >= pairs};
        Block block = {.weights = weights + first * stride, .weight_stride = stride};
        block.input_stride = product->input_stride;
        block.num_inputs = smaller(2 * BLOCK_PAIRS, matrix->num_inputs - 2 * first);
        const uint8_t *following = block.weights + BLOCK_PAIRS * stride;
        block.ahead_stride = stride;
        if (tile.is_last) {
            following = next->num_vectors > 0 ? dense_weights_of(matrix, next->vector) : block.weights;
            block.ahead_stride = dense_stride_of(matrix, next->vector);
        }
        for (int32_t row = 0; row < unit->num_rows; row += BLOCK_ROWS) {
            int32_t line = row / BLOCK_ROWS * lines;
            block.inputs = product->inputs + (unit->row + row) * product->input_stride + 4 * (int64_t)first;
            block.ahead = line < PANEL_VECTORS ? following + line * VECTOR_BYTES : NULL;
            compute_some(product, unit, &tile, &block, following, row);
        }
    }
}

const DenseKernel dense_avx512_bf16 = {compute};
