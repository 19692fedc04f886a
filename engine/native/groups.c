#include "groups.h"

#include <stddef.h>
#include <stdlib.h>

static Groups *groups_of(const Operation *operation) { return *(Groups *const *)operation->data; }

/* That of a unit of all. */
static const Part *part_of(const Operation *operation, int32_t unit) {
    const Groups *groups = groups_of(operation);
    const Part *part = groups->parts + groups->num_parts - 1;
    while (part->first_unit > unit) --part;
    return part;
}

static int32_t begin(Operation *operation, int32_t num_rows) {
    (void)num_rows; /* of all groups together */
    Groups *groups = groups_of(operation);
    operation->num_units = 0;
    for (int32_t i = 0; i < groups->num_parts; ++i) {
        Part *part = &groups->parts[i];
        part->first_unit = operation->num_units;
        part->operation.units_together = 1;
        int32_t failed = part->operation.kind->begin(&part->operation, part->num_rows);
        if (failed) return failed;
        operation->num_units += part->operation.num_units;
        operation->units_together = part->operation.units_together;
    }
    return 0;
}

static void compute(const Operation *operation, Units units, int32_t thread) {
    const Part *part = part_of(operation, units.first);
    int32_t next = units.next - part->first_unit, is_of_part = units.next >= 0 && next < part->operation.num_units;
    Units own = {units.first - part->first_unit, units.count, is_of_part ? next : -1};
    part->operation.kind->compute(&part->operation, own, thread);
}

static const uint8_t *line(const Operation *operation, int32_t unit, int32_t line) {
    const Part *part = part_of(operation, unit);
    return part->operation.kind->line(&part->operation, unit - part->first_unit, line);
}

static const OperationKind all_parts = {begin, compute, line};

int32_t groups_open(Groups *groups, int32_t most_parts) {
    groups->num_parts = 0;
    groups->memory = malloc((size_t)most_parts * sizeof(Part) + CACHE_LINE);
    if (groups->memory == NULL) return -1;
    groups->parts = (Part *)(((uintptr_t)groups->memory + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    return 0;
}

Operation *groups_next(Groups *groups, int32_t num_rows) {
    Part *part = &groups->parts[groups->num_parts++];
    part->num_rows = num_rows;
    return &part->operation;
}

void groups_describe(Operation *operation, Groups *groups) {
    operation->kind = &all_parts;
    *(Groups **)operation->data = groups;
}

void groups_close(Groups *groups) { free(groups->memory); }
