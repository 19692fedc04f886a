/* Products of a split by vectors, with keys and values where they lie. */

/* Scores of LANES keys for the queries of `heads` heads. */
INLINE void score_some(const uint32_t *queries, int32_t words, HeadRows from, float *scores, const int heads) {
    vec sums[SPLIT_HEADS][4];
    for (int head = 0; head < heads; ++head)
        for (int i = 0; i < 4; ++i) sums[head][i] = vec_zero();
    for (int32_t at = 0; at < words; at += 4 * FOURS) {
        int64_t offset = from.offset + (int64_t)at * 4;
        vec left[SPLIT_HEADS][FOURS];
        for (int head = 0; head < heads; ++head)
            for (int j = 0; j < FOURS; ++j) left[head][j] = vec_all_fours(queries + head * words + at + 4 * j);
        for (int i = 0; i < 4; ++i) {
            vec right[FOURS];
            load_fours(from.rows + i, offset, right);
            if (at % LINE_WORDS == 0)
                for (int key = i; key < LANES; key += 4) fetch(from.ahead[key] + offset, LINE_WORDS * 4);
            for (int head = 0; head < heads; ++head)
                for (int j = 0; j < FOURS; ++j) sums[head][i] = vec_dot(sums[head][i], left[head][j], right[j]);
        }
    }
    for (int head = 0; head < heads; ++head) vec_store(scores + head * TILE_KEYS, vec_sums_of_fours(sums[head]));
}

/* Scores of the keys first .. first + count, whose rows are in `from`, for the queries of one key head. */
static void score_keys(const Shape *shape, const Scratch *scratch, int32_t kv_head, int32_t first, int32_t count,
                       HeadRows from) {
    int32_t words = shape->words, last = (kv_head + 1) * shape->group;
    for (int32_t key = first; key < first + count; key += LANES, from.rows += LANES, from.ahead += LANES)
        for (int32_t head = kv_head * shape->group; head < last; head += SPLIT_HEADS) {
            const uint32_t *queries = scratch->queries + (int64_t)head * words;
            float *scores = scratch->scores + head * TILE_KEYS + key;
            switch (smaller(SPLIT_HEADS, last - head)) {
            case 1: score_some(queries, words, from, scores, 1); break;
            case 2: score_some(queries, words, from, scores, 2); break;
#if SPLIT_HEADS > 2
            case 3: score_some(queries, words, from, scores, 3); break;
            case 4: score_some(queries, words, from, scores, 4); break;
#endif
            }
        }
}

/* Adds `count` weighted values to `vectors` vectors, from `at` on, of the outputs of `heads` heads. */
INLINE void sum_values(const Number *weights, HeadRows from, int32_t at, int32_t count, float *outputs, int32_t dim,
                       const int heads, const int vectors) {
    int64_t offset = from.offset + at * (int64_t)sizeof(Number);
    vec sums[SPLIT_HEADS][4];
    for (int head = 0; head < heads; ++head)
        for (int i = 0; i < vectors; ++i) sums[head][i] = vec_load(outputs + head * dim + at + i * LANES);
    for (int32_t key = 0; key < count; key += NUMBERS_PER_WORD) {
        vec values[4];
#if PAIRS
        for (int i = 0; i < vectors; i += 2)
            interleave(vec_load(from.rows[key] + offset + i * LANES * 2),
                       vec_load(from.rows[key + 1] + offset + i * LANES * 2), values + i);
#else
        for (int i = 0; i < vectors; ++i) values[i] = vec_load(from.rows[key] + offset + i * LANES * 4);
#endif
        for (int i = 0; i < NUMBERS_PER_WORD; ++i)
            fetch(from.ahead[key + i] + offset, vectors * LANES * (int64_t)sizeof(Number));
        for (int head = 0; head < heads; ++head) {
            vec weight = vec_all_words(weights + head * TILE_KEYS + key);
            for (int i = 0; i < vectors; ++i) sums[head][i] = vec_dot(sums[head][i], weight, values[i]);
        }
    }
    for (int head = 0; head < heads; ++head)
        for (int i = 0; i < vectors; ++i) vec_store(outputs + head * dim + at + i * LANES, sums[head][i]);
}

INLINE void sum_some_heads(const Shape *shape, const Scratch *scratch, int32_t head, int32_t first, int32_t count,
                           HeadRows from, const int heads) {
    const Number *weights = scratch->weights + head * TILE_KEYS + first;
    float *outputs = scratch->outputs + (int64_t)head * shape->dim;
    int32_t at = 0;
    for (; at + 4 * LANES <= shape->dim; at += 4 * LANES)
        sum_values(weights, from, at, count, outputs, shape->dim, heads, 4);
    if (at < shape->dim) sum_values(weights, from, at, count, outputs, shape->dim, heads, 2);
}

/* Adds the weighted values first .. first + count, whose rows are in `from`, to the outputs of one key head. */
static void sum_head(const Shape *shape, const Scratch *scratch, int32_t kv_head, int32_t first, int32_t count,
                     HeadRows from) {
    for (int32_t head = kv_head * shape->group, rest = shape->group; rest > 0; head += SPLIT_HEADS, rest -= SPLIT_HEADS)
        switch (smaller(SPLIT_HEADS, rest)) {
        case 1: sum_some_heads(shape, scratch, head, first, count, from, 1); break;
        case 2: sum_some_heads(shape, scratch, head, first, count, from, 2); break;
#if SPLIT_HEADS > 2
        case 3: sum_some_heads(shape, scratch, head, first, count, from, 3); break;
        case 4: sum_some_heads(shape, scratch, head, first, count, from, 4); break;
#endif
        }
}
