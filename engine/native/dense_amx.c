/* Products with bfloat16 weights by AMX: tiles of 16 rows, 16 words of inputs and 16 outputs.
 *
 * A tile of weights is 16 words of one vector as they are packed. The sums of a block stay in tiles over all inputs, a
 * word after the other, whatever the number of rows.
 */
#include "amx.h"
#include "dense.h"

#if defined(__x86_64__) && defined(__linux__) && KNOWS_AMX
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16," \
                                                   "amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
#endif
#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define FP8_UNIT 1.0f /* of conversions that are not used here, as are powers */
#define exp2_fraction(f) (f)
#define HAS_BF16
#include "vector_avx512.h"

#define AHEAD_TILES 2 /* of the one in work, the weights that are fetched */

_Static_assert(UNIT_ROWS % (2 * AMX_ROWS) == 0, "a unit has no room for whole blocks");

/* Some rows of inputs against some vectors of a panel. */
typedef struct {
    const uint8_t *inputs;
    int64_t input_stride;
    const uint8_t *weights;
    int64_t weight_stride; /* of a word of inputs */
    int32_t num_tiles;     /* of whole words, in the direction of inputs */
    int32_t rest_bytes;    /* of a row of inputs behind them */
    const uint8_t *ahead;  /* weights to fetch after these, or NULL: these have been fetched before */
    int64_t ahead_stride;
} Block;

/* A tile of weights, before it is needed. */
INLINE void fetch(const uint8_t *weights, int64_t stride) {
    for (int word = 0; word < AMX_WORDS; ++word) __builtin_prefetch(weights + word * stride);
}

/* Meanwhile the tiles at `ahead` are fetched, if it is not NULL. */
INLINE void multiply_tile(const uint8_t *inputs, int64_t input_stride, const uint8_t *weights, int64_t weight_stride,
                          const uint8_t *ahead, int64_t ahead_stride, const int row_tiles, const int vectors) {
    _tile_loadd(4, inputs, input_stride);
    if (row_tiles == 2) _tile_loadd(5, inputs + AMX_ROWS * input_stride, input_stride);
    _tile_loadd(6, weights, weight_stride);
    if (ahead) fetch(ahead, ahead_stride);
    _tile_dpbf16ps(0, 4, 6);
    if (row_tiles == 2) _tile_dpbf16ps(1, 5, 6);
    if (vectors > 1) {
        _tile_loadd(7, weights + VECTOR_BYTES, weight_stride);
        if (ahead) fetch(ahead + VECTOR_BYTES, ahead_stride);
        _tile_dpbf16ps(2, 4, 7);
        if (row_tiles == 2) _tile_dpbf16ps(3, 5, 7);
    }
    if (vectors > 2) {
        _tile_loadd(6, weights + 2 * VECTOR_BYTES, weight_stride);
        if (ahead) fetch(ahead + 2 * VECTOR_BYTES, ahead_stride);
        _tile_dpbf16ps(1, 4, 6);
    }
    if (vectors > 3) {
        _tile_loadd(7, weights + 3 * VECTOR_BYTES, weight_stride);
        if (ahead) fetch(ahead + 3 * VECTOR_BYTES, ahead_stride);
        _tile_dpbf16ps(3, 4, 7);
    }
}

/* The last words, which fill no tile, with zeros behind them. */
INLINE void multiply_rest(const Block *block, const int32_t num_rows, const int row_tiles, const int vectors) {
    uint8_t inputs[2 * AMX_ROWS * AMX_BYTES] = {0}, weights[AMX_WORDS * PANEL_VECTORS * VECTOR_BYTES] = {0};
    const int64_t at = (int64_t)block->num_tiles * AMX_WORDS;
    const int32_t words = (block->rest_bytes + 3) / 4;
    for (int32_t row = 0; row < num_rows; ++row)
        memcpy(inputs + row * AMX_BYTES, block->inputs + row * block->input_stride + at * 4, (size_t)block->rest_bytes);
    for (int32_t word = 0; word < words; ++word)
        memcpy(weights + word * PANEL_VECTORS * VECTOR_BYTES, block->weights + (at + word) * block->weight_stride,
               (size_t)vectors * VECTOR_BYTES);
    WRITTEN();
    multiply_tile(inputs, AMX_BYTES, weights, PANEL_VECTORS * VECTOR_BYTES, NULL, 0, row_tiles, vectors);
}

/* Of one tile of rows. A row's are written together: they are in one line of the cache, and the next row's far away. */
INLINE void store_outputs(const float *const *sums, const DenseProduct *product, int32_t row, int32_t vector,
                          int32_t num_rows, const int vectors) {
    const DenseMatrix *matrix = product->matrix;
    const int32_t first = vector * OUTPUTS, count = smaller(matrix->num_outputs - first, vectors * OUTPUTS);
    float bias[PANEL_VECTORS * OUTPUTS] = {0};
    if (matrix->bias) memcpy(bias, matrix->bias + first, (size_t)count * 4);
    uint8_t *to = product->outputs + ((int64_t)row * matrix->num_outputs + first) * 2, rest[PANEL_VECTORS * OUTPUTS * 2];
    for (int32_t r = 0; r < num_rows; ++r, to += (int64_t)matrix->num_outputs * 2) {
        uint8_t *written = count == vectors * OUTPUTS ? to : rest;
        __m256i halves[PANEL_VECTORS] = {0}; /* of a line */
        for (int i = 0; i < vectors; ++i) {
            vec sum = vec_load(sums[i] + r * OUTPUTS);
            if (matrix->bias) sum = vec_add(sum, vec_load(bias + i * OUTPUTS));
            halves[i] = (__m256i)_mm512_cvtneps_pbh(sum);
        }
        for (int i = 0; i < vectors; i += 2) {
            uint8_t *to_pair = written + i * OUTPUTS * 2;
            if (i + 1 < vectors)
                _mm512_storeu_si512(to_pair, _mm512_inserti64x4(_mm512_castsi256_si512(halves[i]), halves[i + 1], 1));
            else _mm256_storeu_si256((__m256i *)to_pair, halves[i]);
        }
        if (written == rest) memcpy(to, rest, (size_t)count * 2);
    }
}

INLINE void compute_block(const DenseProduct *product, const Block *block, int32_t row, int32_t num_rows,
                          int32_t vector, const int row_tiles, const int vectors) {
    float sums[4][AMX_ROWS * OUTPUTS] __attribute__((aligned(64)));
    const int64_t step = AMX_WORDS * block->weight_stride;
    const int32_t own_tiles = block->ahead ? block->num_tiles - AHEAD_TILES : 0;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int32_t tile = 0; tile < block->num_tiles; ++tile) {
        const uint8_t *weights = block->weights + tile * step, *ahead = weights + AHEAD_TILES * step;
        int64_t ahead_stride = block->weight_stride;
        if (tile >= own_tiles) {
            ahead_stride = block->ahead_stride;
            ahead = block->ahead ? block->ahead + (tile - own_tiles) * AMX_WORDS * ahead_stride : NULL;
        }
        multiply_tile(block->inputs + tile * AMX_BYTES, block->input_stride, weights, block->weight_stride, ahead,
                      ahead_stride, row_tiles, vectors);
    }
    if (block->rest_bytes) multiply_rest(block, num_rows, row_tiles, vectors);
    _tile_stored(0, sums[0], AMX_BYTES);
    _tile_stored(1, sums[1], AMX_BYTES);
    _tile_stored(2, sums[2], AMX_BYTES);
    _tile_stored(3, sums[3], AMX_BYTES);
    const float *of_first[4] = {sums[0], sums[2], sums[1], sums[3]}, *of_second[2] = {sums[1], sums[3]};
    store_outputs(of_first, product, row, vector, smaller(num_rows, AMX_ROWS), vectors);
    if (row_tiles == 2) store_outputs(of_second, product, row + AMX_ROWS, vector, num_rows - AMX_ROWS, vectors);
}

static void compute(const DenseProduct *product, const DenseUnit *unit, const DenseUnit *next) {
    const DenseMatrix *matrix = product->matrix;
    const int32_t row_bytes = matrix->num_inputs * 2, num_tiles = row_bytes / AMX_BYTES;
    Block block = {.input_stride = product->input_stride,
                   .weight_stride = dense_stride_of(matrix, unit->vector),
                   .num_tiles = num_tiles,
                   .rest_bytes = row_bytes - num_tiles * AMX_BYTES};
    int32_t shaped_rows = 0;
    for (int32_t done = 0; done < unit->num_rows; done += 2 * AMX_ROWS) {
        const int32_t row = unit->row + done, num_rows = smaller(unit->num_rows - done, 2 * AMX_ROWS);
        const int row_tiles = num_rows > AMX_ROWS ? 2 : 1, together = row_tiles == 2 ? 2 : 4;
        if (num_rows != shaped_rows) shape_tiles(num_rows);
        shaped_rows = num_rows;
        block.inputs = product->inputs + row * product->input_stride;
        for (int32_t first = 0; first < unit->num_vectors; first += together) {
            const int32_t vector = unit->vector + first, vectors = smaller(unit->num_vectors - first, together);
            block.weights = dense_weights_of(matrix, vector);
            block.ahead = NULL;
            if (done == 0 && num_tiles > AHEAD_TILES) {
                const int is_last = first + vectors >= unit->num_vectors && next->num_vectors > 0;
                block.ahead = is_last ? dense_weights_of(matrix, next->vector) : block.weights + vectors * VECTOR_BYTES;
                block.ahead_stride = is_last ? dense_stride_of(matrix, next->vector) : block.weight_stride;
            }
            switch (row_tiles * 4 + vectors) {
            case 5: compute_block(product, &block, row, num_rows, vector, 1, 1); break;
            case 6: compute_block(product, &block, row, num_rows, vector, 1, 2); break;
            case 7: compute_block(product, &block, row, num_rows, vector, 1, 3); break;
            case 8: compute_block(product, &block, row, num_rows, vector, 1, 4); break;
            case 9: compute_block(product, &block, row, num_rows, vector, 2, 1); break;
            case 10: compute_block(product, &block, row, num_rows, vector, 2, 2); break;
            }
        }
    }
    _tile_release();
}

const DenseKernel dense_amx = {compute, 2 * AMX_ROWS};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#elif defined(__x86_64__)
const DenseKernel dense_amx;
#endif
