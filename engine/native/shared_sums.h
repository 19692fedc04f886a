/* Sums and gathers over the processes of one machine, through memory that all of them map.
 *
 * Each rank has two slots. In a round it writes to one of them, announces that, and reads the slots of the others as
 * soon as they have announced theirs. In the next round it writes to its other slot. It reuses the first slot only when
 * every rank is in the next round, and so has finished reading it.
 */
#ifndef SPLITSERVE_SHARED_SUMS_H
#define SPLITSERVE_SHARED_SUMS_H

#include "work.h"

#define SHARED_SUMS_VERSION 2
#define MOST_RANKS 64

/* One rank's view of the memory, which begins with a cache line for each rank. */
typedef struct {
    uint8_t *memory;
    int32_t peers[MOST_RANKS]; /* a pidfd for each rank, -1 for this one */
    int64_t slot_bytes;        /* a multiple of CACHE_LINE */
    int64_t patience_ns;
    uint64_t round;
    int32_t rank;
    int32_t size;
    int32_t failed; /* the error of the first call that failed; later calls return it at once */
} SharedSums;

EXPORTED int32_t shared_sums_version(void);
EXPORTED int64_t shared_sums_bytes(int32_t size, int64_t slot_bytes);

/* Sums `count` elements over the ranks in rank order, each sum rounded to the element: 0 is float32 and 1 bfloat16.
 * Every rank passes its elements; this rank gets elements `first` to `end` of the sum in `sums`, which may be its
 * input. Returns 0, or -1 if a rank did not come within the patience, or -2 if one has ended; after an error the
 * memory cannot be used. */
EXPORTED int32_t shared_sums_add(SharedSums *sums, const void *given, int64_t count, int32_t element, int64_t first,
                                 int64_t end, void *added);

/* Gathers bytes[rank] bytes of each rank, concatenated. `gathered` may be NULL. Returns the values of
 * shared_sums_add. */
EXPORTED int32_t shared_sums_gather(SharedSums *sums, const void *given, const int64_t *bytes, void *gathered);

/* Appends the sum of rows of num_columns elements over the ranks, in place, to a program; a run after which `failed` is
 * set has computed nothing. Returns 0, or -1 if the program is full. */
EXPORTED int32_t shared_sums_record(Program *program, SharedSums *sums, void *rows, int64_t num_columns,
                                    int32_t element);

#endif
