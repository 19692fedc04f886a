/* Products of groups of rows, each with a matrix of its own, as one operation whose units the threads divide. */
#ifndef SPLITSERVE_GROUPS_H
#define SPLITSERVE_GROUPS_H

#include "work.h"

/* The operation of one group. */
typedef struct {
    Operation operation; /* its kind and data are used */
    int32_t num_rows;
    int32_t first_unit;  /* index of its first unit among those of all groups */
} Part;

/* Parts of one kind, each of whole runs of units_together units. */
typedef struct {
    Part *parts;
    int32_t num_parts;
    void *memory;
} Groups;

/* Allocates at most `most_parts` parts. Returns 0, or -1 if memory is short. */
int32_t groups_open(Groups *groups, int32_t most_parts);
/* The operation of one more group of num_rows rows, at least one, for the caller to fill in. */
Operation *groups_next(Groups *groups, int32_t num_rows);
/* Makes an operation that computes all parts, in any order. */
void groups_describe(Operation *operation, Groups *groups);
void groups_close(Groups *groups);

#endif
