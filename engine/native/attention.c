/* The functions that Python calls. */
#include "amx.h"
#include "attention.h"
#include "work.h"

#include <stddef.h>
#include <string.h>

/* The units are those of the plan, which may differ in each run. */
typedef struct {
    Call call;
    const Plan *const *plan;
} AttentionData;

_Static_assert(sizeof(AttentionData) <= DATA_BYTES, "an operation has no room for it");

EXPORTED int32_t attention_version(void) { return ATTENTION_VERSION; }

EXPORTED int64_t attention_plan_bytes(void) { return sizeof(Plan); }

EXPORTED int64_t attention_unit_bytes(void) { return sizeof(Unit); }

static int is_runnable(const char *variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(variant, "avx2")) return has_avx2;
    if (!strcmp(variant, "avx512")) return has_avx512;
    int has_pairs = has_avx512 && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(variant, "avx512_bf16")) return has_pairs;
    if (!strcmp(variant, "amx")) return has_pairs && amx_is_there(AMX_BFLOAT16);
#endif
    return !strcmp(variant, "plain");
}

/* Returns the kernel of a variant for these elements; NULL if this CPU or the variant does not support them. */
EXPORTED const Kernel *attention_kernel(const char *variant, int32_t pool_element, int32_t query_element) {
    if (!is_runnable(variant)) return NULL;
    const Kernel *kernel = &attention_plain;
#if defined(__x86_64__)
    int is_narrow = query_element == BFLOAT16 && pool_element != FLOAT32 && pool_element != FLOAT16;
    if (!strcmp(variant, "avx2")) kernel = &attention_avx2;
    if (!strcmp(variant, "avx512")) kernel = &attention_avx512;
    if (!strcmp(variant, "avx512_bf16")) kernel = is_narrow ? &attention_avx512_pairs : &attention_avx512;
    if (!strcmp(variant, "amx")) kernel = is_narrow ? &attention_amx : &attention_avx512;
#endif
    int has_float16 = pool_element == FLOAT16 || query_element == FLOAT16;
    return has_float16 && !kernel->takes_float16 ? NULL : kernel;
}

EXPORTED int64_t attention_scratch_bytes(const Plan *plan) { return plan->kernel->scratch_bytes(plan); }

EXPORTED int64_t attention_partial_floats(const Plan *plan) { return plan->kernel->partial_floats(plan); }

static void put(Unit *units, int64_t capacity, int64_t *num_units, Unit unit) {
    if (*num_units < capacity) units[*num_units] = unit;
    ++*num_units;
}

/* Divides the single row of a request into splits of one tile each. */
static void put_splits(const Plan *plan, Unit unit, Unit *units, int64_t capacity, int64_t *counts) {
    int32_t first = first_seen(plan, unit.first_position), end = unit.first_position + 1;
    unit.num_splits = (end - 1) / TILE_KEYS - first / TILE_KEYS + 1;
    unit.first_partial = (int32_t)counts[1];
    for (int32_t split = 0; split < unit.num_splits; ++split) {
        int32_t tile = (first / TILE_KEYS + split) * TILE_KEYS;
        unit.first_key = larger(first, tile);
        unit.end_key = smaller(end, tile + TILE_KEYS);
        unit.partial = unit.num_splits > 1 ? unit.first_partial + split : -1;
        put(units, capacity, &counts[0], unit);
        counts[2] += (int64_t)unit.num_kv_heads * (unit.end_key - unit.first_key);
    }
    if (unit.num_splits > 1) counts[1] += unit.num_splits;
}

/* Divides the rows of a request into tiles, the last first: they have the most keys, which keeps the end of a call
 * short. */
static void put_rows(const Plan *plan, Unit unit, Unit *units, int64_t capacity, int64_t *counts) {
    int32_t num_rows = unit.num_rows, row = unit.first_row, position = unit.first_position;
    int32_t step = larger(1, TILE_ROWS / (plan->num_heads / plan->num_kv_heads));
    for (int32_t start = (num_rows - 1) / step * step; start >= 0; start -= step) {
        unit.first_row = row + start;
        unit.first_position = position + start;
        unit.num_rows = smaller(step, num_rows - start);
        unit.end_key = unit.first_position + unit.num_rows;
        unit.first_key = first_seen(plan, unit.first_position);
        put(units, capacity, &counts[0], unit);
        counts[2] += (int64_t)unit.num_rows * (unit.end_key - unit.first_key);
    }
}

/* A unit of single rows takes one key head if there would be too few units for all threads, otherwise all key heads. */
static int32_t heads_of_split(const Plan *plan, const int32_t *kv_lengths, int32_t num_requests) {
    int64_t num_tiles = 0;
    for (int32_t request = 0; request < num_requests; ++request) {
        int32_t num_keys = plan->window ? smaller(kv_lengths[request], plan->window) : kv_lengths[request];
        num_tiles += ceil_to(num_keys, TILE_KEYS) / TILE_KEYS;
    }
    return num_tiles < 4 * (int64_t)plan->num_threads ? 1 : plan->num_kv_heads;
}

/* Fills `units` up to `capacity`. Returns in `counts` the numbers of units, of partials and of scores. Chunks come
 * before single rows, whose small units fill the end. */
EXPORTED void attention_units(const Plan *plan, const int32_t *query_starts, const int32_t *kv_lengths,
                           int32_t num_requests, Unit *units, int64_t capacity, int64_t *counts) {
    counts[0] = counts[1] = counts[2] = 0;
    int32_t split_heads = heads_of_split(plan, kv_lengths, num_requests);
    for (int is_single = 0; is_single < 2; ++is_single)
        for (int32_t request = 0; request < num_requests; ++request) {
            int32_t num_rows = query_starts[request + 1] - query_starts[request];
            if (num_rows < 1 || (num_rows == 1) != is_single) continue;
            Unit unit = {.request = request, .first_row = query_starts[request], .num_rows = num_rows,
                         .num_kv_heads = is_single ? split_heads : 1,
                         .first_position = kv_lengths[request] - num_rows, .partial = -1,
                         .first_partial = -1};
            for (; unit.kv_head < plan->num_kv_heads; unit.kv_head += unit.num_kv_heads)
                (is_single ? put_splits : put_rows)(plan, unit, units, capacity, counts);
        }
    counts[2] *= plan->num_heads / plan->num_kv_heads;
}

/* Moves the batch of a decode step, one row for each request, to the next tokens unless `positions` is NULL, and plans
 * it anew in memory for `capacity` units and `max_partials` partials; returns 0 if that is too small. */
EXPORTED int32_t attention_move(Plan *plan, int64_t *positions, int64_t *slots, const int32_t *query_starts,
                                int32_t *kv_lengths, int32_t num_requests, int64_t capacity, int64_t max_partials) {
    for (int32_t request = 0; positions != NULL && request < num_requests; ++request) {
        int64_t position = ++positions[request];
        const int32_t *blocks = plan->block_tables + request * plan->table_stride;
        slots[request] = (int64_t)blocks[position / plan->block_size] * plan->block_size + position % plan->block_size;
        ++kv_lengths[request];
    }
    int64_t counts[3];
    attention_units(plan, query_starts, kv_lengths, num_requests, (Unit *)plan->units, capacity, counts);
    plan->num_units = (int32_t)counts[0];
    return counts[0] <= capacity && counts[1] <= max_partials;
}

static int32_t begin(Operation *operation, int32_t num_rows) {
    (void)num_rows;
    AttentionData *data = (AttentionData *)operation->data;
    data->call.plan = *data->plan;
    operation->num_units = data->call.plan->num_units;
    return 0;
}

static void compute(const Operation *operation, Units units, int32_t thread) {
    const Call *call = &((const AttentionData *)operation->data)->call;
    const Plan *plan = call->plan;
    uint8_t *scratch = plan->scratch + thread * plan->scratch_bytes;
    for (int32_t index = units.first; index < units.first + units.count; ++index) {
        const Unit *unit = plan->units + index;
        (unit->num_splits ? plan->kernel->attend_split : plan->kernel->attend_rows)(call, unit, scratch);
    }
}

static const OperationKind attention = {begin, compute, NULL};

static void describe(Operation *operation, const Plan *const *plan, const uint8_t *query, int64_t query_stride,
                     const uint8_t *keys, const uint8_t *values, uint8_t *output) {
    operation->kind = &attention;
    *(AttentionData *)operation->data =
        (AttentionData){.call = {NULL, query, query_stride, keys, values, output}, .plan = plan};
}

/* Computes the output of all units, with plan->num_threads threads of `parallel` (GOMP_parallel), or this thread
 * alone. */
EXPORTED void attention_attend(const Plan *plan, Parallel *parallel, const uint8_t *query, int64_t query_stride,
                               const uint8_t *keys, const uint8_t *values, uint8_t *output) {
    Operation operation;
    describe(&operation, &plan, query, query_stride, keys, values, output);
    run_operations(&operation, 1, 0, parallel, plan->num_threads);
}

/* Appends attention to a program, with the plan found at `plan` in each run, whose scratch must suffice for all
 * threads of the run. Returns 0, or -1 if the program is full. */
EXPORTED int32_t attention_add(Program *program, const Plan *const *plan, const uint8_t *query, int64_t query_stride,
                               const uint8_t *keys, const uint8_t *values, uint8_t *output) {
    Operation *operation = next_operation(program);
    if (operation == NULL) return -1;
    describe(operation, plan, query, query_stride, keys, values, output);
    return 0;
}
