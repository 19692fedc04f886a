/* Rows of queries, keys, values and outputs: where they lie, and between their own element and numbers. */

INLINE vec vec_from(int32_t element, const void *from) {
    switch (element) {
    case BFLOAT16: return vec_from_bfloat16(from);
#if HAS_FLOAT16
    case FLOAT16: return vec_from_float16(from);
#endif
    case INT8: return vec_from_int8(from);
    case FP8_E4M3: return vec_from_fp8(from);
    default: return vec_load(from);
    }
}

INLINE void vec_to(int32_t element, void *to, vec a) {
    switch (element) {
    case BFLOAT16: vec_to_bfloat16(to, a); break;
#if HAS_FLOAT16
    case FLOAT16: vec_to_float16(to, a); break;
#endif
    default: vec_store(to, a);
    }
}

INLINE void convert(Number *to, const uint8_t *from, int32_t count, const int32_t element) {
    int32_t size = element_bytes(element), done = 0;
    for (; done + LANES <= count; done += LANES) vec_store_numbers(to + done, vec_from(element, from + done * size));
    if (done < count) {
        uint8_t rest[4 * LANES] = {0};
        memcpy(rest, from + done * size, (size_t)((count - done) * size));
        vec_store_numbers(to + done, vec_from(element, rest));
    }
}

/* One row of `count` elements as numbers, with zeros up to `dim`. Never reads beyond its end. */
static void read_row(Number *to, const uint8_t *from, int32_t element, int32_t count, int32_t dim) {
    switch (element) { /* each with a loop of its own */
    case NUMBER: memcpy(to, from, (size_t)count * sizeof(Number)); break;
#if !PAIRS
    case BFLOAT16: convert(to, from, count, BFLOAT16); break;
#endif
    case INT8: convert(to, from, count, INT8); break;
    case FP8_E4M3: convert(to, from, count, FP8_E4M3); break;
    default: convert(to, from, count, element);
    }
    if (count < dim) memset(to + count, 0, (size_t)(dim - count) * sizeof(Number));
}

/* One row of outputs: sums of weighted values over the sum of the weights. */
static void write_output(const Call *call, int64_t row, int32_t head, const float *values, float sum) {
    const Plan *plan = call->plan;
    int32_t size = element_bytes(plan->query_element), count = plan->head_dim, done = 0;
    uint8_t *to = call->output + (row * plan->num_heads + head) * count * size;
    vec inverse = vec_all(1.0f / sum);
    for (; done + LANES <= count; done += LANES)
        vec_to(plan->query_element, to + done * size, vec_mul(vec_load(values + done), inverse));
    if (done < count) {
        uint8_t rest[4 * LANES];
        vec_to(plan->query_element, rest, vec_mul(vec_load(values + done), inverse));
        memcpy(to + done * size, rest, (size_t)((count - done) * size));
    }
}

/* The queries of a unit: [num_rows, num_kv_heads * group, words]. */
static void read_queries(const Call *call, const Unit *unit, const Shape *shape, uint32_t *queries) {
    const Plan *plan = call->plan;
    int64_t head_bytes = (int64_t)plan->head_dim * element_bytes(plan->query_element);
    for (int32_t row = 0; row < unit->num_rows; ++row)
        for (int32_t head = 0; head < unit->num_kv_heads * shape->group; ++head, queries += shape->words) {
            const uint8_t *from = call->query + (unit->first_row + row) * call->query_stride +
                                  (unit->kv_head * shape->group + head) * head_bytes;
            read_row((Number *)queries, from, plan->query_element, plan->head_dim, shape->dim);
        }
}

/* Where the keys (or values) first_key .. end_key of a key head lie in `caches`. */
static void find_rows(const Plan *plan, int32_t request, int32_t kv_head, int32_t first_key, int32_t end_key,
                      const uint8_t *caches, const uint8_t **rows) {
    const int32_t *table = plan->block_tables + request * plan->table_stride;
    int64_t row_bytes = pool_row_bytes(plan);
    int64_t token_bytes = row_bytes * plan->num_kv_heads;
    int32_t block = first_key / plan->block_size, offset = first_key % plan->block_size;
    for (int32_t key = first_key; key < end_key; ++block, offset = 0) {
        const uint8_t *row = caches + table[block] * plan->cache_bytes + offset * token_bytes + kv_head * row_bytes;
        int32_t count = smaller(plan->block_size - offset, end_key - key);
        for (int32_t i = 0; i < count; ++i) *rows++ = row + i * token_bytes;
        key += count;
    }
}

/* The scales of the keys (or values) first_key .. end_key of a key head, when the pool has them, and zeros up to the
 * next multiple of KEYS_TOGETHER. */
static void find_scales(const Plan *plan, int32_t request, int32_t kv_head, int32_t first_key, int32_t end_key,
                        const uint8_t *caches, float *scales) {
    if (plan->cache_bytes == plan->data_bytes) return;
    const int32_t *table = plan->block_tables + request * plan->table_stride;
    int32_t block = first_key / plan->block_size, end = (block + 1) * plan->block_size;
    for (int32_t key = first_key; key < end_key; ++block, end += plan->block_size) {
        float scale;
        memcpy(&scale, caches + table[block] * plan->cache_bytes + plan->data_bytes + kv_head * 4, 4);
        for (; key < smaller(end, end_key); ++key) *scales++ = scale;
    }
    for (int i = 0; i < KEYS_TOGETHER; ++i) *scales++ = 0.0f;
}

/* Asks memory for a part of a row. Into the second cache: more such requests can be under way than into the first, by a
 * factor of two in what scattered blocks yield. */
INLINE void fetch(const uint8_t *row, int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
}

/* `count` rows of the pool, from `offset` bytes on, as rows of numbers; then rows of zeros up to the next multiple of
 * LANES. Those that must be converted are in scratch->converted until the next call. */
static void number_rows(const Plan *plan, const Shape *shape, const Scratch *scratch, const uint8_t *const *from,
                        int64_t offset, int32_t count, const uint8_t **rows) {
    if (shape->is_direct)
        for (int32_t i = 0; i < count; ++i) rows[i] = from[i] + offset;
    else
        for (int32_t i = 0; i < count; ++i) {
            uint32_t *row = scratch->converted + (int64_t)i * shape->words;
            read_row((Number *)row, from[i] + offset, plan->pool_element, plan->head_dim, shape->dim);
            rows[i] = (const uint8_t *)row;
        }
    for (int32_t i = count; i < ceil_to(count, LANES); ++i) rows[i] = (const uint8_t *)scratch->zeros;
}

#if PAIRS
/* Two neighbouring rows of values, side by side: `words` words of each become as many pairs of both. */
INLINE void pack_pair(const uint8_t *first, const uint8_t *second, int32_t words, uint32_t *to) {
    for (int32_t at = 0; at < words; at += LANES) {
        vec pairs[2];
        interleave(vec_load(first + at * 4), vec_load(second + at * 4), pairs);
        vec_store(to + 2 * at, pairs[0]);
        vec_store(to + 2 * at + LANES, pairs[1]);
    }
}
#endif

/* scores [num_rows, TILE_KEYS] times the scale of each key; value scales are taken into the weights likewise. */
static void scale_columns(float *scores, int32_t num_rows, int32_t first, int32_t end, const float *scales) {
    for (int32_t row = 0; row < num_rows; ++row)
        for (int32_t i = first; i < end; i += LANES) {
            float *at = scores + row * TILE_KEYS + i;
            vec_store(at, vec_mul(vec_load(at), vec_load(scales + i)));
        }
}

/* scores [num_rows, TILE_KEYS] in columns first .. end, scaled and capped, where the plan has a cap. */
static void cap_scores(const Plan *plan, float *scores, int32_t num_rows, int32_t first, int32_t end) {
    if (plan->softcap <= 0.0f) return;
    vec cap = vec_all(plan->softcap), factor = vec_all(plan->score_scale / plan->softcap);
    for (int32_t row = 0; row < num_rows; ++row)
        for (int32_t i = first; i < end; i += LANES) {
            float *at = scores + row * TILE_KEYS + i;
            vec_store(at, vec_mul(cap, vec_tanh(vec_mul(vec_load(at), factor))));
        }
}

INLINE float larger_of(float a, float b) { return b > a ? b : a; } /* a, if b is not a number */

/* The largest score in [first, end), multiples of LANES. */
INLINE float top_of(const float *scores, int32_t first, int32_t end) {
    vec top = vec_load(scores + first);
    for (int32_t i = first + LANES; i < end; i += LANES) top = vec_max(top, vec_load(scores + i));
    return vec_max_of(top);
}

/* Makes weights of the scores in [first, end): 2^(score * scale - largest), then times the scales of the values. Gives
 * their sum, without those scales. */
INLINE float weigh(const float *scores, Number *weights, int32_t first, int32_t end, float scale, float largest,
                   const float *value_scales) {
    vec shift = vec_all(-largest), factor = vec_all(scale), sum = vec_zero();
    for (int32_t i = first; i < end; i += LANES) {
        vec weight = vec_exp2(vec_fma(vec_load(scores + i), factor, shift));
        sum = vec_add(sum, weight);
        vec_store_numbers(weights + i, value_scales ? vec_mul(weight, vec_load(value_scales + i)) : weight);
    }
    return vec_sum_of(sum);
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
