/* Products of groups of rows, each with a matrix of its own, as one operation: threads divide the units of all. */
#ifndef SPLITSERVE_GROUPS_H
#define SPLITSERVE_GROUPS_H

#include "work.h"

/* The operation of one group. */
typedef struct {
    Operation operation; /* of which the kind and the data count */
    int32_t num_rows;
    int32_t first_unit;  /* among those of all groups */
} Part;

/* Parts of one kind, each of whole runs of its units_together. */
typedef struct {
    Part *parts;
    int32_t num_parts;
    void *memory;
} Groups;

/* Takes memory for at most so many parts. Gives 0, or -1 when there is none. */
int32_t groups_open(Groups *groups, int32_t most_parts);
/* The operation of one more group of num_rows rows, at least one, to be filled in. */
Operation *groups_next(Groups *groups, int32_t num_rows);
/* Makes an operation that computes all parts, in any order. */
void groups_describe(Operation *operation, Groups *groups);
void groups_close(Groups *groups);

#endif
