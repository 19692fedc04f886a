/* A single query row over the keys of one tile: each key and value is read once, from where it lies in the pool. All
 * key heads of a unit are taken for some keys before the next keys, since that is the order of memory. */

#define STEP_KEYS 32  /* so many keys are taken of one head before those of the next; a multiple of LANES */
#define AHEAD_KEYS 32 /* what is asked of memory is needed so many keys later */

/* Scores of `count` packed keys, from column `first` on, for the queries of `heads` heads. */
INLINE void score_heads(const Shape *shape, const Scratch *scratch, int32_t head, int32_t first, int32_t count,
                        const int heads) {
    for (int32_t key = 0; key < count; key += BLOCK_VECTORS * LANES)
        multiply_some(scratch->queries + (int64_t)head * shape->words, shape->words,
                      scratch->packed_keys + (int64_t)key * shape->words, LANES, (int64_t)shape->words * LANES,
                      shape->words, scratch->scores + head * TILE_KEYS + first + key, TILE_KEYS, NULL, NULL, heads,
                      smaller(BLOCK_VECTORS, (int32_t)ceil_to(count - key, LANES) / LANES));
}

/* Scores of `count` keys, whose numbers are in scratch->rows, for the queries of one key head. */
static void score_keys(const Shape *shape, const Scratch *scratch, int32_t kv_head, int32_t first, int32_t count) {
    pack_keys(shape, scratch, 0, (int32_t)ceil_to(count, LANES));
    for (int32_t head = kv_head * shape->group, rest = shape->group; rest > 0; head += BLOCK_ROWS, rest -= BLOCK_ROWS)
        switch (smaller(BLOCK_ROWS, rest)) {
        case 1: score_heads(shape, scratch, head, first, count, 1); break;
        case 2: score_heads(shape, scratch, head, first, count, 2); break;
        case 3: score_heads(shape, scratch, head, first, count, 3); break;
        case 4: score_heads(shape, scratch, head, first, count, 4); break;
#if BLOCK_ROWS > 4
        case 5: score_heads(shape, scratch, head, first, count, 5); break;
        case 6: score_heads(shape, scratch, head, first, count, 6); break;
#endif
        }
}

/* Adds `count` weighted values to `vectors` vectors, from `at` on, of the outputs of `heads` heads. */
INLINE void sum_values(const Number *weights, const uint32_t *const *rows, int32_t at, int32_t count, float *outputs,
                       int32_t dim, const int heads, const int vectors) {
    vec sums[VALUE_HEADS][4];
    for (int head = 0; head < heads; ++head)
        for (int i = 0; i < vectors; ++i) sums[head][i] = vec_load(outputs + head * dim + at + i * LANES);
    for (int32_t key = 0; key < count; key += NUMBERS_PER_WORD) {
        vec values[4];
#if PAIRS
        for (int i = 0; i < vectors; i += 2)
            interleave(vec_load(rows[key] + at / 2 + i * LANES / 2), vec_load(rows[key + 1] + at / 2 + i * LANES / 2),
                       values + i);
#else
        for (int i = 0; i < vectors; ++i) values[i] = vec_load(rows[key] + at + i * LANES);
#endif
        for (int head = 0; head < heads; ++head) {
            vec weight = vec_all_words(weights + head * TILE_KEYS + key);
            for (int i = 0; i < vectors; ++i) sums[head][i] = vec_dot(sums[head][i], weight, values[i]);
        }
    }
    for (int head = 0; head < heads; ++head)
        for (int i = 0; i < vectors; ++i) vec_store(outputs + head * dim + at + i * LANES, sums[head][i]);
}

INLINE void sum_some_heads(const Shape *shape, const Scratch *scratch, int32_t head, int32_t first, int32_t count,
                           const int heads) {
    const Number *weights = scratch->weights + head * TILE_KEYS + first;
    float *outputs = scratch->outputs + (int64_t)head * shape->dim;
    int32_t at = 0;
    for (; at + 4 * LANES <= shape->dim; at += 4 * LANES)
        sum_values(weights, scratch->rows, at, count, outputs, shape->dim, heads, 4);
    if (at < shape->dim) sum_values(weights, scratch->rows, at, count, outputs, shape->dim, heads, 2);
}

/* Adds `count` weighted values, whose numbers are in scratch->rows, to the outputs of one key head. */
static void sum_head(const Shape *shape, const Scratch *scratch, int32_t kv_head, int32_t first, int32_t count) {
    for (int32_t head = kv_head * shape->group, rest = shape->group; rest > 0; head += VALUE_HEADS, rest -= VALUE_HEADS)
        switch (smaller(VALUE_HEADS, rest)) {
        case 1: sum_some_heads(shape, scratch, head, first, count, 1); break;
        case 2: sum_some_heads(shape, scratch, head, first, count, 2); break;
#if VALUE_HEADS > 2
        case 3: sum_some_heads(shape, scratch, head, first, count, 3); break;
        case 4: sum_some_heads(shape, scratch, head, first, count, 4); break;
#endif
        }
}

/* Fetches the rows first .. end of the keys of a tile; those beyond its `count` keys are those of its values. */
static void fetch_rows(const Scratch *scratch, int32_t count, int32_t first, int32_t end, int64_t num_bytes) {
    for (int32_t i = first; i < smaller(end, 2 * count); ++i)
        fetch(i < count ? scratch->key_rows[i] : scratch->value_rows[i - count], num_bytes);
}

/* The scores of `count` keys, and after that (is_value) the sums of their values: in the order of memory. */
static void attend_keys(const Plan *plan, const Unit *unit, const Shape *shape, const Scratch *scratch, int32_t count,
                        int is_value) {
    int64_t row_bytes = (int64_t)plan->head_dim * element_bytes(plan->pool_element);
    const uint8_t *const *from = is_value ? scratch->value_rows : scratch->key_rows;
    for (int32_t key = 0; key < count; key += STEP_KEYS) {
        int32_t ahead = key + AHEAD_KEYS + (is_value ? count : 0), step = smaller(STEP_KEYS, count - key);
        fetch_rows(scratch, count, ahead, ahead + STEP_KEYS, row_bytes * unit->num_kv_heads);
        for (int32_t kv_head = 0; kv_head < unit->num_kv_heads; ++kv_head) {
            number_rows(plan, shape, scratch, from + key, kv_head * row_bytes, step, scratch->rows);
            (is_value ? sum_head : score_keys)(shape, scratch, kv_head, key, step);
        }
    }
}

/* One head's output from the splits of a row, in the order of the tiles. */
static void combine_head(const Call *call, const Unit *unit, const Shape *shape, int32_t head, float *outputs) {
    int32_t num_heads = unit->num_kv_heads * shape->group;
    int64_t stride = call->plan->partial_floats, largest_at = num_heads * (int64_t)shape->dim;
    const float *partial = call->plan->partials + unit->first_partial * stride;
    float largest[LANES] = {LOWEST}, sums[LANES] = {0}, kept[LANES], added[LANES];
    memset(outputs, 0, (size_t)shape->dim * sizeof(float));
    for (int32_t i = 0; i < unit->num_splits; ++i, partial += stride) {
        float tile_largest[LANES] = {partial[largest_at + head]};
        float tile_sums[LANES] = {partial[largest_at + num_heads + head]};
        merge_sums(tile_largest, tile_sums, largest, sums, kept, added);
        for (int32_t at = 0; at < shape->dim; at += LANES)
            vec_store(outputs + at, vec_merge(vec_load(outputs + at), vec_all(kept[0]),
                                              vec_load(partial + head * shape->dim + at), vec_all(added[0])));
    }
    write_output(call, unit->first_row, unit->kv_head * shape->group + head, outputs, sums[0]);
}

/* Puts a split's result aside; whoever finishes the last split of a row makes its output. */
static void finish_split(const Call *call, const Unit *unit, const Shape *shape, const Scratch *scratch) {
    int32_t num_heads = unit->num_kv_heads * shape->group;
    if (unit->partial < 0) {
        for (int32_t head = 0; head < num_heads; ++head)
            write_output(call, unit->first_row, unit->kv_head * shape->group + head,
                         scratch->outputs + head * shape->dim, scratch->sums[head]);
        return;
    }
    float *partial = call->plan->partials + unit->partial * call->plan->partial_floats;
    size_t num_outputs = (size_t)num_heads * (size_t)shape->dim;
    memcpy(partial, scratch->outputs, num_outputs * sizeof(float));
    memcpy(partial + num_outputs, scratch->largest, (size_t)num_heads * sizeof(float));
    memcpy(partial + num_outputs + num_heads, scratch->sums, (size_t)num_heads * sizeof(float));
    atomic_int *num_finished = (atomic_int *)call->plan->num_finished + unit->first_partial;
    if (atomic_fetch_add(num_finished, 1) + 1 < unit->num_splits) return;
    atomic_store(num_finished, 0);
    for (int32_t head = 0; head < num_heads; ++head) combine_head(call, unit, shape, head, scratch->outputs);
}

/* Weights of the scores of one key head, of which the row sees the columns first .. end. */
static void weigh_head(const Call *call, const Unit *unit, const Shape *shape, const Scratch *scratch, int32_t kv_head,
                       int32_t first, int32_t end) {
    const Plan *plan = call->plan;
    int32_t padded = (int32_t)ceil_to(end, LANES), head = kv_head * shape->group;
    float *scales = plan->plane_bytes > plan->data_bytes ? scratch->value_scales : NULL;
    if (scales) {
        for (int32_t i = 0; i < first; ++i) scratch->key_scales[i] = scales[i] = 0.0f;
        find_scales(plan, unit->request, unit->kv_head + kv_head, unit->first_key, unit->end_key, call->keys,
                    scratch->key_scales + first);
        find_scales(plan, unit->request, unit->kv_head + kv_head, unit->first_key, unit->end_key, call->values,
                    scales + first);
        scale_columns(scratch->scores + head * TILE_KEYS, shape->group, 0, padded, scratch->key_scales);
    }
    cap_scores(plan, scratch->scores + head * TILE_KEYS, shape->group, 0, padded);
    for (int32_t last = head + shape->group; head < last; ++head) {
        float *scores = scratch->scores + head * TILE_KEYS;
        for (int32_t i = 0; i < first; ++i) scores[i] = -INFINITY;
        for (int32_t i = end; i < padded; ++i) scores[i] = -INFINITY;
        scratch->largest[head] = larger_of(LOWEST, top_of(scores, 0, padded) * shape->scale);
        scratch->sums[head] = weigh(scores, scratch->weights + head * TILE_KEYS, 0, padded, shape->scale,
                                    scratch->largest[head], scales);
    }
}

/* Columns start at a multiple of LANES in the tile, as those of a chunk do: so each key has its place in the sums. */
static void attend_split(const Call *call, const Unit *unit, uint8_t *memory) {
    const Plan *plan = call->plan;
    Shape shape = shape_of(plan);
    Scratch scratch;
    lay_out(&scratch, &shape, memory);
    int32_t first = unit->first_key % TILE_KEYS % LANES, end = first + unit->end_key - unit->first_key;
    size_t num_heads = (size_t)unit->num_kv_heads * (size_t)shape.group;
    memset(scratch.zeros, 0, (size_t)shape.words * 4);
    memset(scratch.outputs, 0, num_heads * (size_t)shape.dim * 4);
    read_queries(call, unit, &shape, scratch.queries);
    find_rows(plan, unit->request, unit->kv_head, unit->first_key, unit->end_key, call->keys, scratch.key_rows + first);
    for (int32_t i = 0; i < first; ++i) scratch.key_rows[i] = scratch.key_rows[first]; /* of weight 0 */
    for (int32_t i = 0; i < end; ++i) scratch.value_rows[i] = scratch.key_rows[i] + (call->values - call->keys);
    attend_keys(plan, unit, &shape, &scratch, end, 0);
    for (int32_t kv_head = 0; kv_head < unit->num_kv_heads; ++kv_head)
        weigh_head(call, unit, &shape, &scratch, kv_head, first, end);
    attend_keys(plan, unit, &shape, &scratch, end, 1);
    finish_split(call, unit, &shape, &scratch);
}
