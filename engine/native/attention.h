/* Attention over a paged KV pool on CPUs: what Python sees and what the files of this folder share.
 *
 * A plan divides a batch into units that any thread may compute in any order. What it gives for a row depends on that
 * row and its keys alone: it has the same bits in a chunk and by itself, whatever else is in the batch and however many
 * threads run.
 */
#ifndef SPLITSERVE_ATTENTION_H
#define SPLITSERVE_ATTENTION_H

#include <stdint.h>

#define ATTENTION_VERSION 6 /* of everything below; engine/native/library.py expects the same */

#define TILE_KEYS 256   /* keys that are scored at a time; tiles start at multiples of it */
#define TILE_ROWS 192   /* query rows, times heads that share a key, that see one packed tile of keys */

enum Element { FLOAT32, BFLOAT16, FLOAT16, INT8, FP8_E4M3 };

/* Work on key heads: either `num_rows` consecutive query rows of a request over keys that they see, or the single query
 * row of a request over the keys of one tile, a split; a split without keys makes the output of a row whose others are
 * all there. */
typedef struct {
    int32_t request;
    int32_t kv_head;        /* the first of num_kv_heads; of several rows there is one */
    int32_t num_kv_heads;
    int32_t first_row;      /* in the query */
    int32_t num_rows;
    int32_t first_position; /* of the first row in its request: it sees the keys up to itself */
    int32_t first_key;      /* its own keys */
    int32_t end_key;
    int32_t partial;        /* where its result goes, or that of the first of its rows; -1 when that is the output */
    int32_t first_partial;  /* of the splits of the same row and key heads; or where rows find what all keys before
                             * first_key gave, of all heads of the first one: -1 when there are none */
    int32_t num_splits;     /* of that row; 0 where it is not about splits */
} Unit;

struct Kernel;

typedef struct {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;
    int32_t pool_element;
    int32_t query_element;   /* also of the output */
    int64_t plane_bytes;     /* of one block in one layer, K or V alone */
    int64_t data_bytes;      /* of a plane without its scales */
    float score_scale;
    float softcap;           /* scores become softcap * tanh(score / softcap); 0: none */
    int32_t window;          /* 0: none */
    int32_t num_threads;
    int32_t num_units;
    const int32_t *block_tables;
    int64_t table_stride;    /* in elements */
    const Unit *units;
    float *partials;         /* of each split of several, and of rows over some of their keys */
    int64_t partial_floats;
    int32_t *num_finished;   /* splits, one count at each first_partial; zero between calls */
    uint8_t *scratch;        /* scratch_bytes() for each thread */
    int64_t scratch_bytes;
    const struct Kernel *kernel;
} Plan;

/* One layer's call. */
typedef struct {
    const Plan *plan;
    const uint8_t *query;
    int64_t query_stride;    /* bytes between rows; the heads of a row are contiguous */
    const uint8_t *keys;
    const uint8_t *values;
    uint8_t *output;         /* contiguous */
} Call;

typedef struct Kernel {
    void (*attend_rows)(const Call *call, const Unit *unit, uint8_t *scratch);
    void (*attend_split)(const Call *call, const Unit *unit, uint8_t *scratch);
    int64_t (*scratch_bytes)(const Plan *plan);
    int64_t (*partial_floats)(const Plan *plan);
    int32_t takes_float16;
} Kernel;

extern const Kernel attention_plain;
#if defined(__x86_64__)
extern const Kernel attention_avx2;
extern const Kernel attention_avx512;
extern const Kernel attention_avx512_pairs;
extern const Kernel attention_amx; /* empty where the compiler does not know it */
#endif

static inline int64_t ceil_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
static inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

/* The first key that the row at `position` sees. */
static inline int32_t first_seen(const Plan *plan, int32_t position) {
    return plan->window ? larger(0, position + 1 - plan->window) : 0;
}

static inline int32_t element_bytes(int32_t element) {
    return element == FLOAT32 ? 4 : element == BFLOAT16 || element == FLOAT16 ? 2 : 1;
}

/* Of a key (or value) of one key head in the pool. */
static inline int64_t pool_row_bytes(const Plan *plan) {
    return (int64_t)plan->head_dim * element_bytes(plan->pool_element);
}

#endif
