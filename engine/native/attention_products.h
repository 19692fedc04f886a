/* Products of packed rows, and how the results of tiles of keys become one.
 *
 * The scores of a tile, its largest, the weights relative to that and the sums of weighted values depend on a row and
 * the tile's keys alone. A score is four sums, each of every fourth word in their order, of which two and two are added:
 * so four neighbouring words of a key stay together, and rows of the pool need not be transposed. Values are summed in
 * the order of the keys. The results of tiles are merged in the order of the tiles. So a row has the same bits in a
 * chunk, however long, and alone, in splits.
 */

/* a [BLOCK_ROWS, depth] times b [depth, vectors], in words: c becomes c * kept plus the product * added, of each row. */
INLINE void multiply(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, int32_t depth, float *c,
                     int64_t c_stride, const float *kept, const float *added, const int vectors) {
    vec sums[BLOCK_ROWS][BLOCK_VECTORS];
    for (int row = 0; row < BLOCK_ROWS; ++row)
        for (int i = 0; i < vectors; ++i) sums[row][i] = vec_zero();
    for (int32_t at = 0; at < depth; ++at, b += b_stride) {
        vec right[BLOCK_VECTORS];
        for (int i = 0; i < vectors; ++i) right[i] = vec_load(b + i * LANES);
        for (int row = 0; row < BLOCK_ROWS; ++row) {
            vec left = vec_all_words(a + row * a_stride + at);
            for (int i = 0; i < vectors; ++i) sums[row][i] = vec_dot(sums[row][i], left, right[i]);
        }
    }
    for (int row = 0; row < BLOCK_ROWS; ++row)
        for (int i = 0; i < vectors; ++i) {
            float *to = c + row * c_stride + i * LANES;
            vec_store(to, vec_merge(vec_load(to), vec_all(kept[row]), sums[row][i], vec_all(added[row])));
        }
}

/* Rows of scratch->rows first .. end, multiples of LANES, so that vectors are of four words of LANES / 4 keys: of the
 * first of each four keys, then of the second. */
static void pack_keys(const Shape *shape, const Scratch *scratch, int32_t first, int32_t end) {
    for (int32_t key = first; key < end; key += LANES)
        for (int32_t at = 0; at < shape->words; at += 4 * FOURS)
            for (int i = 0; i < 4; ++i) {
                uint32_t *words = scratch->packed_keys + (int64_t)key * shape->words + at * LANES + i * LANES;
                vec fours[FOURS];
                load_fours(scratch->rows + key + i, (int64_t)at * 4, fours);
                for (int j = 0; j < FOURS; ++j) vec_store(words + j * 4 * LANES, fours[j]);
            }
}

/* Of a vector's fours, in the order of pack_keys: their sums are the scores of LANES keys. */
INLINE vec vec_sums_of_fours(const vec *fours) {
    return vec_sums_of_two(vec_sums_of_two(fours[0], fours[1]), vec_sums_of_two(fours[2], fours[3]));
}

/* Scores of LANES packed keys for `rows` queries. */
INLINE void score_packed(const uint32_t *queries, int32_t words, const uint32_t *keys, float *scores, const int rows) {
    vec sums[SCORE_ROWS][4];
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < 4; ++i) sums[row][i] = vec_zero();
    for (int32_t at = 0; at < words; at += 4, keys += 4 * LANES) {
        vec right[4];
        for (int i = 0; i < 4; ++i) right[i] = vec_load(keys + i * LANES);
        for (int row = 0; row < rows; ++row) {
            vec left = vec_all_fours(queries + row * words + at);
            for (int i = 0; i < 4; ++i) sums[row][i] = vec_dot(sums[row][i], left, right[i]);
        }
    }
    for (int row = 0; row < rows; ++row) vec_store(scores + row * TILE_KEYS, vec_sums_of_fours(sums[row]));
}

/* Scores of BLOCK_ROWS rows from `block` on for the packed keys first .. end. */
static void score_block(const Shape *shape, const Scratch *scratch, int32_t block, int32_t first, int32_t end) {
    for (int32_t key = first; key < end; key += LANES)
        for (int32_t row = 0; row < BLOCK_ROWS; row += SCORE_ROWS)
            score_packed(scratch->queries + (int64_t)(block + row) * shape->words, shape->words,
                         scratch->packed_keys + (int64_t)key * shape->words, scratch->scores + row * TILE_KEYS + key,
                         SCORE_ROWS);
}

/* Their outputs become outputs * kept plus the sums of the weighted values first .. end, times added. */
static void sum_block(const Shape *shape, const Scratch *scratch, int32_t block, int32_t first, int32_t end,
                      const float *kept, const float *added) {
    const int64_t stride = TILE_KEYS / NUMBERS_PER_WORD, dim = shape->dim;
    const int32_t depth = (end - first) / NUMBERS_PER_WORD;
    const uint32_t *weights = (const uint32_t *)(scratch->weights + first);
    for (int32_t at = 0; at < dim; at += BLOCK_VECTORS * LANES) {
        const uint32_t *values = scratch->packed_values + (int64_t)first * shape->words + at;
        float *outputs = scratch->outputs + (int64_t)block * dim + at;
        switch (smaller(BLOCK_VECTORS, (shape->dim - at) / LANES)) {
        case 1: multiply(weights, stride, values, dim, depth, outputs, dim, kept, added, 1); break;
        case 2: multiply(weights, stride, values, dim, depth, outputs, dim, kept, added, 2); break;
#if BLOCK_VECTORS > 2
        case 3: multiply(weights, stride, values, dim, depth, outputs, dim, kept, added, 3); break;
        case 4: multiply(weights, stride, values, dim, depth, outputs, dim, kept, added, 4); break;
#endif
        }
    }
}
