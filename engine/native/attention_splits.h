/* A single query row over the keys of one tile: each key and value is read once, from where it lies in the pool. All
 * key heads of a unit are taken for some keys before the next keys, since that is the order of memory. */

#define STEP_KEYS 32  /* so many keys are taken of one head before those of the next */
#define AHEAD_KEYS 32 /* what is asked of memory is needed so many keys later */

/* Scores of GROUP_KEYS keys for `heads` queries. */
INLINE void score_group(const uint32_t *queries, const uint32_t *const *rows, int32_t words, float *scores,
                        const int heads) {
    vec sums[GROUP_HEADS][GROUP_KEYS];
    for (int head = 0; head < heads; ++head)
        for (int i = 0; i < GROUP_KEYS; ++i) sums[head][i] = vec_zero();
    for (int32_t at = 0; at < words; at += LANES) {
        vec query[GROUP_HEADS];
        for (int head = 0; head < heads; ++head) query[head] = vec_load(queries + head * words + at);
        for (int i = 0; i < GROUP_KEYS; ++i) {
            vec key = vec_load(rows[i] + at);
            for (int head = 0; head < heads; ++head) sums[head][i] = vec_dot(sums[head][i], query[head], key);
        }
    }
    for (int head = 0; head < heads; ++head) store_sums(scores + head * TILE_KEYS, sums[head]);
}

/* Scores of `count` keys, whose numbers are in scratch->rows, for the queries of one key head. */
static void score_keys(const Shape *shape, const Scratch *scratch, int32_t kv_head, int32_t first, int32_t count) {
    const uint32_t *queries = scratch->queries + (int64_t)kv_head * shape->group * shape->words;
    float *scores = scratch->scores + kv_head * shape->group * TILE_KEYS + first;
    for (int32_t key = 0; key < count; key += GROUP_KEYS)
        for (int32_t head = 0; head < shape->group; head += GROUP_HEADS) {
            const uint32_t *some = queries + (int64_t)head * shape->words;
            const uint32_t *const *rows = scratch->rows + key;
            float *to = scores + head * TILE_KEYS + key;
            switch (smaller(GROUP_HEADS, shape->group - head)) {
            case 1: score_group(some, rows, shape->words, to, 1); break;
            case 2: score_group(some, rows, shape->words, to, 2); break;
#if GROUP_HEADS > 2
            case 3: score_group(some, rows, shape->words, to, 3); break;
#endif
            }
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

/* The scores of a tile's keys, and after that (is_value) the sums of its values: in the order of memory. */
static void attend_keys(const Plan *plan, const Unit *unit, const Shape *shape, const Scratch *scratch, int is_value) {
    int32_t count = unit->end_key - unit->first_key;
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

/* The outputs of a row from its splits, always in the same order. */
static void combine(const Call *call, const Unit *unit, const Shape *shape, float *outputs) {
    int32_t num_heads = unit->num_kv_heads * shape->group, largest_at = num_heads * shape->dim;
    int64_t stride = call->plan->partial_floats;
    const float *partials = call->plan->partials + unit->first_partial * stride;
    for (int32_t head = 0; head < num_heads; ++head) {
        float largest = LOWEST, sum = 0.0f;
        for (int32_t i = 0; i < unit->num_splits; ++i)
            largest = larger_of(largest, partials[i * stride + largest_at + head]);
        memset(outputs, 0, (size_t)shape->dim * sizeof(float));
        for (int32_t i = 0; i < unit->num_splits; ++i) {
            const float *partial = partials + i * stride;
            float shrink = exp2_of(partial[largest_at + head] - largest);
            sum += shrink * partial[largest_at + num_heads + head];
            for (int32_t at = 0; at < shape->dim; at += LANES) {
                vec values = vec_load(partial + head * shape->dim + at);
                vec_store(outputs + at, vec_fma(vec_all(shrink), values, vec_load(outputs + at)));
            }
        }
        write_output(call, unit->first_row, unit->kv_head * shape->group + head, outputs, sum);
    }
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
    combine(call, unit, shape, scratch->outputs);
}

/* Weights of the scores of one key head. */
static void weigh_head(const Call *call, const Unit *unit, const Shape *shape, const Scratch *scratch,
                       int32_t kv_head) {
    int32_t count = unit->end_key - unit->first_key, padded = (int32_t)ceil_to(count, LANES);
    int32_t first = kv_head * shape->group, at = kv_head * (TILE_KEYS + LANES);
    int is_quantized = call->plan->plane_bytes > call->plan->data_bytes;
    if (is_quantized) {
        find_scales(call->plan, unit->request, unit->kv_head + kv_head, unit->first_key, unit->end_key, call->keys,
                    scratch->key_scales + at);
        find_scales(call->plan, unit->request, unit->kv_head + kv_head, unit->first_key, unit->end_key, call->values,
                    scratch->value_scales + at);
        scale_columns(scratch->scores + first * TILE_KEYS, shape->group, 0, padded, scratch->key_scales + at);
    }
    for (int32_t head = first; head < first + shape->group; ++head) {
        float *scores = scratch->scores + head * TILE_KEYS;
        for (int32_t i = count; i < padded; ++i) scores[i] = -INFINITY;
        scratch->largest[head] = larger_of(LOWEST, top_of(scores, 0, padded) * shape->scale);
        scratch->sums[head] = weigh(scores, scratch->weights + head * TILE_KEYS, 0, padded, shape->scale,
                                    scratch->largest[head], is_quantized ? scratch->value_scales + at : NULL);
    }
}

static void attend_split(const Call *call, const Unit *unit, uint8_t *memory) {
    Shape shape = shape_of(call->plan);
    Scratch scratch;
    lay_out(&scratch, &shape, memory);
    size_t num_heads = (size_t)unit->num_kv_heads * (size_t)shape.group;
    memset(scratch.zeros, 0, (size_t)shape.words * 4);
    memset(scratch.outputs, 0, num_heads * (size_t)shape.dim * 4);
    read_queries(call, unit, &shape, scratch.queries);
    find_rows(call->plan, unit->request, unit->kv_head, unit->first_key, unit->end_key, call->keys, scratch.key_rows);
    for (int32_t i = 0; i < unit->end_key - unit->first_key; ++i)
        scratch.value_rows[i] = scratch.key_rows[i] + (call->values - call->keys);
    attend_keys(call->plan, unit, &shape, &scratch, 0);
    for (int32_t kv_head = 0; kv_head < unit->num_kv_heads; ++kv_head)
        weigh_head(call, unit, &shape, &scratch, kv_head);
    attend_keys(call->plan, unit, &shape, &scratch, 1);
    finish_split(call, unit, &shape, &scratch);
}
