/* Products of packed rows with AMX, in place of attention_products.h: tiles of 16 rows and 16 words.
 *
 * A tile of sums adds 16 words of both sides at a time: the sums of first numbers and of second numbers separately,
 * each in order, then both. So a score has the same bits for either side of its key, and a sum of weighted values has
 * the same bits with any other rows. A word of values holds two adjacent keys.
 */

/* Sums are in tiles 0 to 3, with as many rows as tile 4, the left side; tile 5 is a whole right side. Tile 6 holds
 * the sums of a whole left side in tile 7. */
INLINE void set_tiles(int32_t rows) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; ++i) {
        shapes.row_bytes[i] = AMX_BYTES;
        shapes.rows[i] = (uint8_t)(i > 4 ? AMX_ROWS : rows);
    }
    load_shapes(&shapes);
}

/* Tiles 0 to count - 1 += tile 4 times the tiles of a right side, which are `next` bytes apart. */
INLINE void add_products(const uint8_t *right, int64_t stride, int64_t next, const int count) {
    _tile_loadd(5, right, stride);
    _tile_dpbf16ps(0, 4, 5);
    if (count > 1) {
        _tile_loadd(5, right + next, stride);
        _tile_dpbf16ps(1, 4, 5);
    }
    if (count > 2) {
        _tile_loadd(5, right + 2 * next, stride);
        _tile_dpbf16ps(2, 4, 5);
    }
    if (count > 3) {
        _tile_loadd(5, right + 3 * next, stride);
        _tile_dpbf16ps(3, 4, 5);
    }
}

INLINE void zero_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Tiles 0 to count - 1, side by side. */
INLINE void store_sums(float *to, int64_t stride, const int count) {
    _tile_stored(0, to, stride);
    if (count > 1) _tile_stored(1, to + AMX_WORDS, stride);
    if (count > 2) _tile_stored(2, to + 2 * AMX_WORDS, stride);
    if (count > 3) _tile_stored(3, to + 3 * AMX_WORDS, stride);
}

INLINE vec vec_pairs_low(vec a, vec b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
INLINE vec vec_pairs_high(vec a, vec b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

/* Four vectors of 4 x 4 words: in each 128 bits, word j of vector i becomes word i of vector j. */
INLINE void transpose_fours(vec *a) {
    const vec low = _mm512_unpacklo_ps(a[0], a[1]), high = _mm512_unpackhi_ps(a[0], a[1]);
    const vec low2 = _mm512_unpacklo_ps(a[2], a[3]), high2 = _mm512_unpackhi_ps(a[2], a[3]);
    a[0] = vec_pairs_low(low, low2);
    a[1] = vec_pairs_high(low, low2);
    a[2] = vec_pairs_low(high, high2);
    a[3] = vec_pairs_high(high, high2);
}

/* 16 words of each of 16 rows, from `offset` bytes on, as a right side: to [word, row]. */
INLINE void transpose(const uint8_t *const *rows, int64_t offset, uint32_t *to) {
    vec fours[4][4];
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) fours[i][j] = vec_load(rows[4 * i + j] + offset);
        transpose_fours(fours[i]); /* vector j: words j, 4 + j, 8 + j and 12 + j of four rows */
    }
    for (int j = 0; j < 4; ++j) {
        const vec even = _mm512_shuffle_f32x4(fours[0][j], fours[1][j], 0x88);
        const vec odd = _mm512_shuffle_f32x4(fours[0][j], fours[1][j], 0xdd);
        const vec even2 = _mm512_shuffle_f32x4(fours[2][j], fours[3][j], 0x88);
        const vec odd2 = _mm512_shuffle_f32x4(fours[2][j], fours[3][j], 0xdd);
        vec_store(to + j * AMX_WORDS, _mm512_shuffle_f32x4(even, even2, 0x88));
        vec_store(to + (4 + j) * AMX_WORDS, _mm512_shuffle_f32x4(odd, odd2, 0x88));
        vec_store(to + (8 + j) * AMX_WORDS, _mm512_shuffle_f32x4(even, even2, 0xdd));
        vec_store(to + (12 + j) * AMX_WORDS, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
    }
}

/* Rows of scratch->rows first .. end, multiples of 16, as right sides: [row / 16, words, 16]. */
static void pack_keys(const Shape *shape, const Scratch *scratch, int32_t first, int32_t end) {
    for (int32_t key = first; key < end; key += AMX_ROWS)
        for (int32_t at = 0; at < shape->words; at += AMX_WORDS)
            transpose(scratch->rows + key, (int64_t)at * 4,
                      scratch->packed_keys + (int64_t)key * shape->words + at * AMX_ROWS);
}

INLINE void score_tiles(const Shape *shape, const uint32_t *queries, const uint32_t *keys, float *scores,
                        const int count) {
    zero_sums();
    for (int32_t at = 0; at < shape->words; at += AMX_WORDS) {
        _tile_loadd(4, queries + at, shape->words * 4);
        add_products((const uint8_t *)(keys + at * AMX_ROWS), AMX_BYTES, (int64_t)shape->words * AMX_BYTES, count);
    }
    store_sums(scores, TILE_KEYS * 4, count);
}

/* Computes the scores of BLOCK_ROWS rows from `block` on for the packed keys first .. end. */
static void score_block(const Shape *shape, const Scratch *scratch, int32_t block, int32_t first, int32_t end) {
    const uint32_t *queries = scratch->queries + (int64_t)block * shape->words;
    const uint32_t *keys = scratch->packed_keys;
    WRITTEN();
    for (; first + 4 * AMX_ROWS <= end; first += 4 * AMX_ROWS)
        score_tiles(shape, queries, keys + (int64_t)first * shape->words, scratch->scores + first, 4);
    if (first < end) score_tiles(shape, queries, keys + (int64_t)first * shape->words, scratch->scores + first, 2);
}

INLINE void sum_tiles(const Shape *shape, const Scratch *scratch, int32_t first, int32_t end, int32_t at,
                      float *outputs, const float *kept, const float *added, const int count) {
    float sums[BLOCK_ROWS][4 * AMX_WORDS] __attribute__((aligned(64)));
    zero_sums();
    for (int32_t key = first; key < end; key += KEYS_TOGETHER) {
        _tile_loadd(4, scratch->weights + key, TILE_KEYS * sizeof(Number));
        add_products((const uint8_t *)(scratch->packed_values + (int64_t)key * shape->words + at),
                     (int64_t)shape->dim * 4, AMX_BYTES, count);
    }
    store_sums(sums[0], sizeof(sums[0]), count);
    WRITTEN();
    for (int row = 0; row < BLOCK_ROWS; ++row)
        for (int i = 0; i < count; ++i) {
            float *to = outputs + (int64_t)row * shape->dim + i * LANES;
            vec_store(to, vec_merge(vec_load(to), vec_all(kept[row]), vec_load(sums[row] + i * LANES),
                                    vec_all(added[row])));
        }
}

/* Replaces outputs by outputs * kept plus the sums of the weighted values first .. end, times added. */
static void sum_block(const Shape *shape, const Scratch *scratch, int32_t block, int32_t first, int32_t end,
                      const float *kept, const float *added) {
    int32_t at = 0;
    float *outputs = scratch->outputs + (int64_t)block * shape->dim;
    WRITTEN();
    for (; at + 4 * LANES <= shape->dim; at += 4 * LANES)
        sum_tiles(shape, scratch, first, end, at, outputs + at, kept, added, 4);
    if (at < shape->dim) sum_tiles(shape, scratch, first, end, at, outputs + at, kept, added, 2);
}

/* Heads whose queries are computed together for a single row of a request: a divisor of `group`. */
INLINE int32_t heads_together(int32_t group) {
    int32_t heads = smaller(group, AMX_ROWS);
    while (group % heads) --heads;
    return heads;
}
