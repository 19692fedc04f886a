/* Sums and gathers over the processes of one machine, through memory that all of them have mapped.
 *
 * Each rank has two slots. In a round it writes to one of them, says so, and reads the slots of the others as soon as
 * they have said so. In the next round it writes to its other slot; to the first one not before every rank is in the
 * next round, and so is done with reading it.
 */
#ifndef SPLITSERVE_SHARED_SUMS_H
#define SPLITSERVE_SHARED_SUMS_H

#include "work.h"

#define SHARED_SUMS_VERSION 1
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
} SharedSums;

EXPORTED int32_t shared_sums_version(void);
EXPORTED int64_t shared_sums_bytes(int32_t size, int64_t slot_bytes);

/* Sums of `count` elements over the ranks, added up in their order, each sum rounded to the element: 0 is float32 and 1
 * bfloat16. Every rank gives its elements; this one gets those from `first` to `end`, at `sums`, which may be where they
 * were given. Gives 0; or, and the memory is of no use then, -1 when a rank has not come within the patience, and
 * -2 when one has ended. */
EXPORTED int32_t shared_sums_add(SharedSums *sums, const void *given, int64_t count, int32_t element, int64_t first,
                                 int64_t end, void *added);

/* What each rank gives, bytes[rank] of it, one behind the other. `gathered` may be NULL. Gives what shared_sums_add
 * gives. */
EXPORTED int32_t shared_sums_gather(SharedSums *sums, const void *given, const int64_t *bytes, void *gathered);

#endif
