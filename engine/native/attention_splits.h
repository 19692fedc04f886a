/* A single query row over the keys of one tile. Each key and value is read once, in place in the pool. All key heads
 * of a unit are computed for some keys before the next keys, in the order of memory. */

#define STEP_KEYS 32 /* keys of one head computed before those of the next head; a multiple of KEYS_TOGETHER */

/* Rows of one key head, and others of the same length that are fetched meanwhile, little by little: memory accepts
 * few requests at a time, and further ones wait. */
typedef struct {
    const uint8_t *const *rows;
    const uint8_t *const *ahead;
    int64_t offset; /* bytes in all of them */
} HeadRows;

#if TILES
#include "attention_split_tiles.h"
#else
#include "attention_split_products.h"
#endif

/* Collects the rows of the pool that a split reads: `first` keys that it skips, its own keys up to a multiple of
 * KEYS_TOGETHER, as many values, then the first rows of the next unit. Returns the number of each. */
static int32_t find_all_rows(const Call *call, const Unit *unit, const Scratch *scratch, int32_t first) {
    const Plan *plan = call->plan;
    const uint8_t **rows = scratch->pool_rows;
    int32_t end = first + unit->end_key - unit->first_key, count = (int32_t)ceil_to(end, KEYS_TOGETHER);
    find_rows(plan, unit->request, unit->kv_head, unit->first_key, unit->end_key, call->keys, rows + first);
    for (int32_t i = first; i < end; ++i) rows[count + i] = rows[i] + (call->values - call->keys);
    for (int is_value = 0; is_value < 2; ++is_value, rows += count) {
        for (int32_t i = 0; i < first; ++i) rows[i] = (const uint8_t *)scratch->zeros;
        for (int32_t i = end; i < count; ++i) rows[i] = (const uint8_t *)scratch->zeros;
    }
    const Unit *next = unit + 1;
    int32_t num_ahead = 0;
    if (next < plan->units + plan->num_units) {
        num_ahead = smaller(AHEAD_KEYS, next->end_key - next->first_key);
        find_rows(plan, next->request, next->kv_head, next->first_key, next->first_key + num_ahead, call->keys, rows);
    }
    for (; num_ahead < AHEAD_KEYS; ++num_ahead) rows[num_ahead] = (const uint8_t *)scratch->zeros;
    return count;
}

/* The numbers of one key head in `count` rows of the pool, which are `ahead` of the fetched rows. */
INLINE HeadRows head_rows(const Plan *plan, const Shape *shape, const Scratch *scratch, const uint8_t *const *from,
                          int64_t offset, int32_t count) {
    const uint8_t *const *ahead = from + AHEAD_KEYS;
    if (shape->is_direct) return (HeadRows){from, ahead, offset};
    for (int32_t i = 0; i < count; ++i) fetch(ahead[i] + offset, pool_row_bytes(plan));
    number_rows(plan, shape, scratch, from, offset, count, scratch->rows);
    return (HeadRows){scratch->rows, scratch->rows, 0};
}

/* Computes the scores of `count` keys, or with is_value the sums of their values, in the order of memory. */
static void attend_keys(const Plan *plan, const Unit *unit, const Shape *shape, const Scratch *scratch, int32_t count,
                        int is_value) {
    int64_t row_bytes = pool_row_bytes(plan);
    const uint8_t *const *from = scratch->pool_rows + (is_value ? count : 0);
    for (int32_t key = 0; key < count; key += STEP_KEYS) {
        int32_t step = smaller(STEP_KEYS, count - key);
        for (int32_t kv_head = 0; kv_head < unit->num_kv_heads; ++kv_head) {
            HeadRows rows = head_rows(plan, shape, scratch, from + key, kv_head * row_bytes, step);
            (is_value ? sum_head : score_keys)(shape, scratch, kv_head, key, step, rows);
        }
    }
}

/* Merges one head's output from the splits of a row, in the order of the tiles. */
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

/* Computes the output of a row whose splits are all complete. */
static void combine(const Call *call, const Unit *unit, const Shape *shape, const Scratch *scratch) {
    atomic_store((atomic_int *)call->plan->num_finished + unit->first_partial, 0);
    for (int32_t head = 0; head < unit->num_kv_heads * shape->group; ++head)
        combine_head(call, unit, shape, head, scratch->outputs);
}

/* Stores a split's result; the thread that finishes the last split of a row computes its output. */
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
    if (atomic_fetch_add(num_finished, 1) + 1 == unit->num_splits) combine(call, unit, shape, scratch);
}

/* Computes the weights of the scores of one key head, of which the row attends to columns first .. end. */
static void weigh_head(const Call *call, const Unit *unit, const Shape *shape, const Scratch *scratch, int32_t kv_head,
                       int32_t first, int32_t end) {
    const Plan *plan = call->plan;
    int32_t padded = (int32_t)ceil_to(end, KEYS_TOGETHER), head = kv_head * shape->group;
    float *scales = plan->cache_bytes > plan->data_bytes ? scratch->value_scales : NULL;
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

/* Columns start at a multiple of KEYS_TOGETHER in the tile, like those of a chunk, so that each key has a fixed
 * place in the sums. */
static void attend_split(const Call *call, const Unit *unit, uint8_t *memory) {
    const Plan *plan = call->plan;
    Shape shape = shape_of(plan);
    Scratch scratch;
    lay_out(&scratch, &shape, memory);
    if (unit->first_key == unit->end_key) {
        combine(call, unit, &shape, &scratch);
        return;
    }
    int32_t first = unit->first_key % TILE_KEYS % KEYS_TOGETHER, end = first + unit->end_key - unit->first_key;
    size_t num_heads = (size_t)unit->num_kv_heads * (size_t)shape.group;
    memset(scratch.zeros, 0, (size_t)unit->num_kv_heads * (size_t)shape.words * 4);
    memset(scratch.outputs, 0, num_heads * (size_t)shape.dim * 4);
    read_queries(call, unit, &shape, scratch.queries);
#if TILES
    pack_queries(unit, &shape, &scratch);
#endif
    int32_t count = find_all_rows(call, unit, &scratch, first);
    attend_keys(plan, unit, &shape, &scratch, count, 0);
    for (int32_t kv_head = 0; kv_head < unit->num_kv_heads; ++kv_head)
        weigh_head(call, unit, &shape, &scratch, kv_head, first, end);
    attend_keys(plan, unit, &shape, &scratch, count, 1);
    finish_split(call, unit, &shape, &scratch);
}
