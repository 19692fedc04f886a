/* Many query rows of one request: tiles of keys and values are packed once for all rows and heads that attend to
 * them. */

static void pack_values(const Shape *shape, const Scratch *scratch, int32_t first, int32_t end) {
    for (int32_t key = first; key < end; key += NUMBERS_PER_WORD) {
        uint32_t *words = scratch->packed_values + (int64_t)key * shape->words;
#if PAIRS
        pack_pair(scratch->rows[key], scratch->rows[key + 1], shape->words, words);
#else
        memcpy(words, scratch->rows[key], (size_t)shape->words * 4);
#endif
    }
}

/* Packs the keys and values of the tile that starts at key `tile`, as far as the unit attends to them, surrounded by
 * zeros up to multiples of KEYS_TOGETHER. */
static void pack_tile(const Call *call, const Unit *unit, const Shape *shape, const Scratch *scratch, int32_t tile) {
    int32_t first_key = larger(tile, unit->first_key), end_key = smaller(unit->end_key, tile + TILE_KEYS);
    int32_t first = first_key - tile, start = first / KEYS_TOGETHER * KEYS_TOGETHER;
    int32_t end = end_key - tile, padded = (int32_t)ceil_to(end, KEYS_TOGETHER);
    float *scales[] = {scratch->key_scales, scratch->value_scales};
    const uint8_t *caches[] = {call->keys, call->values};
    for (int is_value = 0; is_value < 2; ++is_value) {
        for (int32_t i = start; i < first; ++i) scratch->rows[i] = (const uint8_t *)scratch->zeros;
        for (int32_t i = start; i < first; ++i) scales[is_value][i] = 0.0f;
        find_rows(call->plan, unit->request, unit->kv_head, first_key, end_key, caches[is_value], scratch->pool_rows);
        find_scales(call->plan, unit->request, unit->kv_head, first_key, end_key, caches[is_value],
                    scales[is_value] + first);
        number_rows(call->plan, shape, scratch, scratch->pool_rows, 0, end - first, scratch->rows + first);
        for (int32_t i = end; i < padded; ++i) scratch->rows[i] = (const uint8_t *)scratch->zeros;
        (is_value ? pack_values : pack_keys)(shape, scratch, start, padded);
    }
}

/* Masks, in one row's scores of a tile, the columns first .. end that the row does not attend to. */
static void hide(const Plan *plan, const Unit *unit, const Shape *shape, int32_t row, int32_t tile, int32_t first,
                 int32_t end, float *scores) {
    int32_t position = unit->first_position + smaller(row, unit->num_rows * shape->group - 1) / shape->group;
    int32_t first_column = smaller(end, first_seen(plan, position) - tile);
    int32_t end_column = larger(first, position + 1 - tile);
    for (int32_t i = first; i < first_column; ++i) scores[i] = -INFINITY;
    for (int32_t i = end_column; i < end; ++i) scores[i] = -INFINITY;
}

/* Computes the weights of BLOCK_ROWS rows from their scores in columns first .. end of the tile that starts at key
 * `tile`. Returns the factors of the outputs before, and of the tile's outputs. */
static void weigh_block(const Plan *plan, const Unit *unit, const Shape *shape, const Scratch *scratch, int32_t block,
                        int32_t tile, int32_t first, int32_t end, float *kept, float *added) {
    const float *value_scales = plan->cache_bytes > plan->data_bytes ? scratch->value_scales : NULL;
    float largest[LANES], sums[LANES] = {0};
    if (value_scales) scale_columns(scratch->scores, BLOCK_ROWS, first, end, scratch->key_scales);
    cap_scores(plan, scratch->scores, BLOCK_ROWS, first, end);
    for (int32_t row = BLOCK_ROWS; row < LANES; ++row) largest[row] = LOWEST;
    for (int32_t row = 0; row < BLOCK_ROWS; ++row) {
        float *scores = scratch->scores + row * TILE_KEYS;
        hide(plan, unit, shape, block + row, tile, first, end, scores);
        largest[row] = larger_of(LOWEST, top_of(scores, first, end) * shape->scale);
        sums[row] = weigh(scores, scratch->weights + row * TILE_KEYS, first, end, shape->scale, largest[row],
                          value_scales);
    }
    merge_sums(largest, sums, scratch->largest + block, scratch->sums + block, kept, added);
}

/* Computes one block of rows over the packed tile: only the columns that some row attends to. */
static void attend_block(const Plan *plan, const Unit *unit, const Shape *shape, const Scratch *scratch, int32_t block,
                         int32_t tile) {
    int32_t last = smaller(block + BLOCK_ROWS, unit->num_rows * shape->group) - 1;
    int32_t first_position = unit->first_position + block / shape->group;
    int32_t last_position = unit->first_position + last / shape->group;
    int32_t first = larger(0, first_seen(plan, first_position) - tile) / KEYS_TOGETHER * KEYS_TOGETHER;
    int32_t end = (int32_t)ceil_to(smaller(TILE_KEYS, last_position + 1 - tile), KEYS_TOGETHER);
    if (first >= end) return;
    score_block(shape, scratch, block, first, end);
    float kept[LANES], added[LANES];
    weigh_block(plan, unit, shape, scratch, block, tile, first, end, kept, added);
    sum_block(shape, scratch, block, first, end, kept, added);
}

/* Copies between a unit's rows and partials, one per row from `partial` on, with all heads as in a split's result. */
static void copy_partials(const Call *call, const Unit *unit, const Shape *shape, const Scratch *scratch,
                          int32_t partial, int is_result) {
    const Plan *plan = call->plan;
    int32_t group = shape->group, head = unit->kv_head * group, dim = shape->dim;
    size_t num_bytes[] = {(size_t)(group * dim) * sizeof(float), (size_t)group * sizeof(float),
                          (size_t)group * sizeof(float)};
    for (int32_t row = 0; row < unit->num_rows; ++row) {
        float *there = plan->partials + ((int64_t)partial + row) * plan->partial_floats;
        float *largest = there + (int64_t)plan->num_heads * dim;
        float *theirs[] = {there + (int64_t)head * dim, largest + head, largest + plan->num_heads + head};
        float *ours[] = {scratch->outputs + (int64_t)row * group * dim, scratch->largest + row * group,
                         scratch->sums + row * group};
        for (int i = 0; i < 3; ++i)
            memcpy(is_result ? theirs[i] : ours[i], is_result ? ours[i] : theirs[i], num_bytes[i]);
    }
}

static void attend_rows(const Call *call, const Unit *unit, uint8_t *memory) {
    const Plan *plan = call->plan;
    Shape shape = shape_of(plan);
    Scratch scratch;
    lay_out(&scratch, &shape, memory);
    int32_t num_rows = unit->num_rows * shape.group, padded = (int32_t)ceil_to(num_rows, BLOCK_ROWS);
    memset(scratch.zeros, 0, (size_t)shape.words * 4);
    read_queries(call, unit, &shape, scratch.queries);
    memset(scratch.queries + (int64_t)num_rows * shape.words, 0, (size_t)(padded - num_rows) * (size_t)shape.words * 4);
    memset(scratch.outputs, 0, (size_t)padded * (size_t)shape.dim * 4);
    for (int32_t row = 0; row < padded + LANES; ++row) scratch.largest[row] = LOWEST;
    memset(scratch.sums, 0, (size_t)(padded + LANES) * 4);
    if (unit->first_partial >= 0) copy_partials(call, unit, &shape, &scratch, unit->first_partial, 0);
    for (int32_t tile = unit->first_key / TILE_KEYS * TILE_KEYS; tile < unit->end_key; tile += TILE_KEYS) {
        pack_tile(call, unit, &shape, &scratch, tile);
        for (int32_t block = 0; block < padded; block += BLOCK_ROWS)
            attend_block(plan, unit, &shape, &scratch, block, tile);
    }
    if (unit->partial >= 0) {
        copy_partials(call, unit, &shape, &scratch, unit->partial, 1);
        return;
    }
    for (int32_t row = 0; row < num_rows; ++row)
        write_output(call, unit->first_row + row / shape.group, unit->kv_head * shape.group + row % shape.group,
                     scratch.outputs + (int64_t)row * shape.dim, scratch.sums[row]);
}
