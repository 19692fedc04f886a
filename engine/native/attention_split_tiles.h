/* Products of a split by AMX: keys are a left side as they are, since the queries are few. */

/* The queries as right sides: of the heads that are taken at a time [words, 16], behind each other. */
static void pack_queries(const Unit *unit, const Shape *shape, const Scratch *scratch) {
    const int32_t heads = heads_together(shape->group), words = shape->words;
    uint32_t *packed = scratch->packed_queries;
    for (int32_t head = 0; head < unit->num_kv_heads * shape->group; head += heads) {
        const uint8_t *rows[AMX_ROWS];
        for (int32_t i = 0; i < AMX_ROWS; ++i)
            rows[i] = (const uint8_t *)(i < heads ? scratch->queries + (int64_t)(head + i) * words : scratch->zeros);
        for (int32_t at = 0; at < words; at += AMX_WORDS, packed += AMX_WORDS * AMX_WORDS)
            transpose(rows, (int64_t)at * 4, packed);
    }
    WRITTEN();
}

/* scores [key, 16] of 16 keys, the first `heads` columns: to rows of their own. */
INLINE void store_columns(const float *scores, int32_t heads, float *to) {
    for (int32_t head = 0; head < heads; head += 4, to += 4 * TILE_KEYS) {
        vec fours[4];
        for (int j = 0; j < 4; ++j) { /* of keys j, 4 + j, 8 + j and 12 + j */
            const float *from = scores + j * AMX_WORDS + head;
            fours[j] = _mm512_castps128_ps512(_mm_load_ps(from));
            fours[j] = _mm512_insertf32x4(fours[j], _mm_load_ps(from + 4 * AMX_WORDS), 1);
            fours[j] = _mm512_insertf32x4(fours[j], _mm_load_ps(from + 8 * AMX_WORDS), 2);
            fours[j] = _mm512_insertf32x4(fours[j], _mm_load_ps(from + 12 * AMX_WORDS), 3);
        }
        transpose_fours(fours);
        for (int j = 0; j < smaller(4, heads - head); ++j) vec_store(to + j * TILE_KEYS, fours[j]);
    }
}

/* 16 rows, `stride` bytes apart, and their words. */
typedef struct {
    const uint8_t *rows;
    int64_t stride;
} LeftSide;

/* The first 16 of some keys, where they lie if they follow each other in a block, else copied. */
INLINE LeftSide left_side(const Shape *shape, const Scratch *scratch, HeadRows from) {
    if (shape->key_stride && from.rows[AMX_ROWS - 1] - from.rows[0] == (AMX_ROWS - 1) * shape->key_stride)
        return (LeftSide){from.rows[0] + from.offset, shape->key_stride};
    for (int key = 0; key < AMX_ROWS; ++key)
        for (int32_t at = 0; at < shape->words; at += LANES)
            vec_store(scratch->packed_keys + key * shape->words + at,
                      vec_load(from.rows[key] + from.offset + (int64_t)at * 4));
    WRITTEN();
    return (LeftSide){(const uint8_t *)scratch->packed_keys, shape->words * 4};
}

/* Scores of the keys first .. first + count, whose rows are in `from`, for the queries of one key head. */
static void score_keys(const Shape *shape, const Scratch *scratch, int32_t kv_head, int32_t first, int32_t count,
                       HeadRows from) {
    const int32_t words = shape->words, heads = heads_together(shape->group), last = (kv_head + 1) * shape->group;
    for (int32_t key = first; key < first + count; key += AMX_ROWS, from.rows += AMX_ROWS, from.ahead += AMX_ROWS) {
        const LeftSide left = left_side(shape, scratch, from);
        for (int32_t head = kv_head * shape->group; head < last; head += heads) {
            float scores[AMX_ROWS * AMX_WORDS] __attribute__((aligned(64)));
            const uint32_t *queries = scratch->packed_queries + (int64_t)(head / heads) * words * AMX_WORDS;
            _tile_zero(6);
            for (int32_t at = 0; at < words; at += AMX_WORDS) {
                _tile_loadd(7, left.rows + (int64_t)at * 4, left.stride);
                _tile_loadd(5, queries + at * AMX_WORDS, AMX_BYTES);
                _tile_dpbf16ps(6, 7, 5);
                if (head == kv_head * shape->group)
                    for (int i = 0; i < AMX_ROWS; ++i) fetch(from.ahead[i] + from.offset + (int64_t)at * 4, LINE_WORDS * 4);
            }
            _tile_stored(6, scores, AMX_BYTES);
            WRITTEN();
            store_columns(scores, heads, scratch->scores + head * TILE_KEYS + key);
        }
    }
}

/* Adds to the outputs of some heads, from `at` on. */
INLINE void add_values(const Shape *shape, const Number *weights, const uint32_t *values, float *outputs,
                       const int count) {
    const int64_t stride = (int64_t)shape->dim * 4;
    _tile_loadd(0, outputs, stride);
    _tile_loadd(1, outputs + AMX_WORDS, stride);
    if (count > 2) _tile_loadd(2, outputs + 2 * AMX_WORDS, stride);
    if (count > 3) _tile_loadd(3, outputs + 3 * AMX_WORDS, stride);
    _tile_loadd(4, weights, TILE_KEYS * sizeof(Number));
    add_products((const uint8_t *)values, stride, AMX_BYTES, count);
    store_sums(outputs, stride, count);
}

/* Adds the weighted values first .. first + KEYS_TOGETHER, whose rows are in `from`, to the outputs of one key head. */
static void sum_together(const Shape *shape, const Scratch *scratch, int32_t kv_head, int32_t first, HeadRows from) {
    const int32_t dim = shape->dim, heads = heads_together(shape->group), last = (kv_head + 1) * shape->group;
    uint32_t *values = scratch->packed_values;
    for (int32_t key = 0; key < KEYS_TOGETHER; key += 2) {
        pack_pair(from.rows[key] + from.offset, from.rows[key + 1] + from.offset, shape->words, values + key / 2 * dim);
        for (int i = 0; i < 2; ++i) fetch(from.ahead[key + i] + from.offset, (int64_t)dim * 2);
    }
    WRITTEN();
    for (int32_t head = kv_head * shape->group; head < last; head += heads) {
        const Number *weights = scratch->weights + head * TILE_KEYS + first;
        float *outputs = scratch->outputs + (int64_t)head * dim;
        int32_t at = 0;
        for (; at + 4 * AMX_WORDS <= dim; at += 4 * AMX_WORDS)
            add_values(shape, weights, values + at, outputs + at, 4);
        if (at < dim) add_values(shape, weights, values + at, outputs + at, 2);
    }
    WRITTEN();
}

/* Adds the weighted values first .. first + count. */
static void sum_head(const Shape *shape, const Scratch *scratch, int32_t kv_head, int32_t first, int32_t count,
                     HeadRows from) {
    for (int32_t done = 0; done < count; done += KEYS_TOGETHER) {
        sum_together(shape, scratch, kv_head, first + done, from);
        from.rows += KEYS_TOGETHER;
        from.ahead += KEYS_TOGETHER;
    }
}
