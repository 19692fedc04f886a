/* Products of bytes with bytes by AMX: tiles of 16 rows, 64 inputs and 16 outputs; part of linear_kernel.h. A tile of
 * weights is 16 words of one vector as they are packed. Sums are whole numbers here as they are elsewhere.
 */
#define FEWEST_TILE_ROWS 8 /* fewer have their sums sooner by vectors */

/* Some rows of inputs against some vectors. */
typedef struct {
    const int8_t *inputs;
    int64_t input_stride;
    const uint8_t *weights;
    int64_t weight_stride; /* of vectors */
} TileBlock;

INLINE void add_tiles(TileBlock block, const int row_tiles, const int vectors) {
    _tile_loadd(4, block.inputs, block.input_stride);
    if (row_tiles == 2) _tile_loadd(5, block.inputs + AMX_ROWS * block.input_stride, block.input_stride);
    _tile_loadd(6, block.weights, AMX_BYTES);
    _tile_dpbsud(0, 4, 6);
    if (row_tiles == 2) _tile_dpbsud(1, 5, 6);
    if (vectors > 1) {
        _tile_loadd(7, block.weights + block.weight_stride, AMX_BYTES);
        _tile_dpbsud(2, 4, 7);
        if (row_tiles == 2) _tile_dpbsud(3, 5, 7);
    }
    if (vectors > 2) {
        _tile_loadd(6, block.weights + 2 * block.weight_stride, AMX_BYTES);
        _tile_dpbsud(1, 4, 6);
    }
    if (vectors > 3) {
        _tile_loadd(7, block.weights + 3 * block.weight_stride, AMX_BYTES);
        _tile_dpbsud(3, 4, 7);
    }
}

/* The last inputs, which fill no tile, with zeros behind them. */
INLINE void add_rest(TileBlock block, int32_t count, int32_t num_rows, const int row_tiles, const int vectors) {
    int8_t inputs[2 * AMX_ROWS * AMX_BYTES] = {0};
    uint8_t weights[TILE_VECTORS * AMX_WORDS * AMX_BYTES] = {0};
    const TileBlock rest = {inputs, AMX_BYTES, weights, AMX_WORDS * AMX_BYTES};
    for (int32_t r = 0; r < num_rows; ++r)
        memcpy(inputs + r * AMX_BYTES, block.inputs + r * block.input_stride, (size_t)count);
    for (int i = 0; i < vectors; ++i)
        memcpy(weights + i * rest.weight_stride, block.weights + i * block.weight_stride, (size_t)count * OUTPUTS);
    WRITTEN();
    add_tiles(rest, row_tiles, vectors);
}

/* The sums over all inputs: of vector i and row tile t at sums[2 * i + t], or at sums[i] where there is one row tile. */
INLINE void sum_tiles(TileBlock block, int32_t padded, int32_t num_rows, const int row_tiles, const int vectors,
                      int32_t sums[][AMX_ROWS * OUTPUTS]) {
    const int32_t whole = padded / AMX_BYTES * AMX_BYTES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int32_t at = 0; at < whole; at += AMX_BYTES) {
        add_tiles(block, row_tiles, vectors);
        block.inputs += AMX_BYTES;
        block.weights += AMX_BYTES * OUTPUTS;
    }
    if (whole < padded) add_rest(block, padded - whole, num_rows, row_tiles, vectors);
    _tile_stored(0, sums[0], AMX_BYTES);
    _tile_stored(1, sums[row_tiles == 2 ? 1 : 2], AMX_BYTES);
    _tile_stored(2, sums[row_tiles == 2 ? 2 : 1], AMX_BYTES);
    _tile_stored(3, sums[3], AMX_BYTES);
}

INLINE void compute_tile_block(const Product *product, const TileBlock *block, int32_t vector, int32_t row,
                               int32_t num_rows, const int row_tiles, const int vectors) {
    int32_t sums[2 * TILE_VECTORS][AMX_ROWS * OUTPUTS] __attribute__((aligned(64)));
    const int32_t padded = product->matrix->padded_inputs;
    TileBlock part = *block;
    if (row_tiles == 1 || vectors <= 2) sum_tiles(part, padded, num_rows, row_tiles, vectors, sums);
    else {
        sum_tiles(part, padded, num_rows, 2, 2, sums);
        part.weights += 2 * part.weight_stride;
        sum_tiles(part, padded, num_rows, 2, vectors - 2, sums + 4);
    }
    for (int32_t r = 0; r < num_rows; ++r) {
        integers of_row[TILE_VECTORS];
        for (int i = 0; i < vectors; ++i)
            of_row[i] = integers_load(sums[row_tiles * i + r / AMX_ROWS] + r % AMX_ROWS * OUTPUTS);
        finish_sums(product, block->weights, block->weight_stride, vector, row + r, vectors, of_row);
    }
}

static void compute_tiles(const Product *product, const uint8_t *weights, int64_t weight_stride, int32_t vector,
                          int32_t vectors, int32_t row, int32_t end_row) {
    const int64_t padded = product->matrix->padded_inputs;
    int32_t shaped_rows = 0;
    for (; row < end_row; row += 2 * AMX_ROWS) {
        const int32_t num_rows = end_row - row < 2 * AMX_ROWS ? end_row - row : 2 * AMX_ROWS;
        const TileBlock block = {product->rounded.numbers + row * padded, padded, weights, weight_stride};
        if (num_rows != shaped_rows) shape_tiles(num_rows);
        shaped_rows = num_rows;
        switch ((num_rows > AMX_ROWS) * TILE_VECTORS + vectors) {
        case 1: compute_tile_block(product, &block, vector, row, num_rows, 1, 1); break;
        case 2: compute_tile_block(product, &block, vector, row, num_rows, 1, 2); break;
        case 3: compute_tile_block(product, &block, vector, row, num_rows, 1, 3); break;
        case 4: compute_tile_block(product, &block, vector, row, num_rows, 1, 4); break;
        case 5: compute_tile_block(product, &block, vector, row, num_rows, 2, 1); break;
        case 6: compute_tile_block(product, &block, vector, row, num_rows, 2, 2); break;
        case 7: compute_tile_block(product, &block, vector, row, num_rows, 2, 3); break;
        case 8: compute_tile_block(product, &block, vector, row, num_rows, 2, 4); break;
        }
    }
    _tile_release();
}
