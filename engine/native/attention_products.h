/* Products of packed rows, and how the results of tiles of keys become one.
 *
 * The scores of a tile, its largest, the weights relative to that and the sums of weighted values depend on a row and
 * the tile's keys alone: each sum goes over the depth, or the keys, in their order. The results of tiles are merged in
 * the order of the tiles. So a row has the same bits in a chunk, however long, and alone, in splits.
 */

/* a [rows, depth] times b [depth, vectors], in words. Without `kept` it is put into c; otherwise c becomes c * kept
 * plus the product * added, of each row. */
INLINE void multiply(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, int64_t vector_stride,
                     int32_t depth, float *c, int64_t c_stride, const float *kept, const float *added, const int rows,
                     const int vectors) {
    vec sums[BLOCK_ROWS][BLOCK_VECTORS];
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < vectors; ++i) sums[row][i] = vec_zero();
    for (int32_t at = 0; at < depth; ++at, b += b_stride) {
        vec right[BLOCK_VECTORS];
        for (int i = 0; i < vectors; ++i) right[i] = vec_load(b + i * vector_stride);
        for (int row = 0; row < rows; ++row) {
            vec left = vec_all_words(a + row * a_stride + at);
            for (int i = 0; i < vectors; ++i) sums[row][i] = vec_dot(sums[row][i], left, right[i]);
        }
    }
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < vectors; ++i) {
            float *to = c + row * c_stride + i * LANES;
            vec_store(to, kept ? vec_merge(vec_load(to), vec_all(kept[row]), sums[row][i], vec_all(added[row]))
                               : sums[row][i]);
        }
}

INLINE void multiply_some(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride,
                          int64_t vector_stride, int32_t depth, float *c, int64_t c_stride, const float *kept,
                          const float *added, const int rows, int32_t vectors) {
    switch (vectors) {
    case 1: multiply(a, a_stride, b, b_stride, vector_stride, depth, c, c_stride, kept, added, rows, 1); break;
    case 2: multiply(a, a_stride, b, b_stride, vector_stride, depth, c, c_stride, kept, added, rows, 2); break;
#if BLOCK_VECTORS > 2
    case 3: multiply(a, a_stride, b, b_stride, vector_stride, depth, c, c_stride, kept, added, rows, 3); break;
    case 4: multiply(a, a_stride, b, b_stride, vector_stride, depth, c, c_stride, kept, added, rows, 4); break;
#endif
    }
}

/* Rows of scratch->rows first .. end, multiples of LANES, so that vectors are of a word of LANES keys. */
static void pack_keys(const Shape *shape, const Scratch *scratch, int32_t first, int32_t end) {
    for (int32_t key = first; key < end; key += LANES)
        for (int32_t at = 0; at < shape->words; at += LANES)
            transpose_words(scratch->rows + key, at,
                            scratch->packed_keys + (int64_t)key * shape->words + at * LANES);
}

/* Takes the largest scores and the sums of weights of a tile, of LANES rows, into those of the tiles before. Gives what
 * outputs until now and the tile's are to be multiplied with. */
INLINE void merge_sums(const float *tile_largest, const float *tile_sums, float *largest, float *sums, float *kept,
                       float *added) {
    vec before = vec_load(largest), now = vec_max(vec_load(tile_largest), before); /* in this order a NaN goes */
    vec down = vec_mul(now, vec_all(-1.0f));
    vec keep = vec_exp2(vec_add(before, down)), add = vec_exp2(vec_add(vec_load(tile_largest), down));
    vec_store(sums, vec_merge(vec_load(sums), keep, vec_load(tile_sums), add));
    vec_store(largest, now);
    vec_store(kept, keep);
    vec_store(added, add);
}
