/* Attention over a paged KV pool on CPUs: the interface for Python, and the declarations that the files of this folder
 * share.
 *
 * A plan divides a batch into units that any thread may compute in any order. The result of a row depends only on the
 * row and its keys: its bits are the same in a chunk and alone, in any batch and with any number of threads.
 */
#ifndef SPLITSERVE_ATTENTION_H
#define SPLITSERVE_ATTENTION_H

#include <stdint.h>

#define ATTENTION_VERSION 7 /* version of this interface; engine/native/library.py expects the same */

#define TILE_KEYS 256   /* keys scored at a time; tiles start at multiples of it */
#define TILE_ROWS 192   /* query rows, times heads that share a key, that attend to one packed tile of keys */

enum Element { FLOAT32, BFLOAT16, FLOAT16, INT8, FP8_E4M3 };

/* Work on key heads: either `num_rows` consecutive query rows of a request over their keys, or the single query row
 * of a request over the keys of one tile, called a split. A split without keys computes the output of a row whose
 * other splits are complete. */
typedef struct {
    int32_t request;
    int32_t kv_head;        /* the first of num_kv_heads; units of several rows have one */
    int32_t num_kv_heads;
    int32_t first_row;      /* index in the query */
    int32_t num_rows;
    int32_t first_position; /* position in the request of the first row, which attends to the keys up to itself */
    int32_t first_key;      /* keys of this unit */
    int32_t end_key;
    int32_t partial;        /* index of the result, for several rows of the first one; -1: the output */
    int32_t first_partial;  /* first partial of the splits of the same row and key heads; or, for several rows, the
                             * partials over all keys before first_key, of all heads of the first row: -1 without any */
    int32_t num_splits;     /* of the row; 0 without splits */
} Unit;

struct Kernel;

typedef struct {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;
    int32_t pool_element;
    int32_t query_element;   /* also the output's */
    int64_t cache_bytes;     /* bytes of one block in one layer, K or V alone */
    int64_t data_bytes;      /* cache_bytes without the scales */
    float score_scale;
    float softcap;           /* scores become softcap * tanh(score / softcap); 0: none */
    int32_t window;          /* 0: none */
    int32_t num_threads;
    int32_t num_units;
    const int32_t *block_tables;
    int64_t table_stride;    /* in elements */
    const Unit *units;
    float *partials;         /* of each of several splits, and of rows over some of their keys */
    int64_t partial_floats;
    int32_t *num_finished;   /* finished splits, one counter at each first_partial; zero between calls */
    uint8_t *scratch;        /* scratch_bytes bytes for each thread */
    int64_t scratch_bytes;
    const struct Kernel *kernel;
} Plan;

/* The call of one layer. */
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
extern const Kernel attention_amx; /* empty if the compiler does not support the variant */
#endif

static inline int64_t ceil_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
static inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

/* The first key that the row at `position` attends to. */
static inline int32_t first_seen(const Plan *plan, int32_t position) {
    return plan->window ? larger(0, position + 1 - plan->window) : 0;
}

static inline int32_t element_bytes(int32_t element) {
    return element == FLOAT32 ? 4 : element == BFLOAT16 || element == FLOAT16 ? 2 : 1;
}

/* Address of a key (or value) of one key head in the pool. */
static inline int64_t pool_row_bytes(const Plan *plan) {
    return (int64_t)plan->head_dim * element_bytes(plan->pool_element);
}

#endif
