/* Common parts of the AMX kernels: tiles of 16 rows of 64 bytes. */
#ifndef SPLITSERVE_AMX_H
#define SPLITSERVE_AMX_H

#include <stdint.h>

/* Compilers that support these tiles. */
#if defined(__clang__)
#define KNOWS_AMX (__clang_major__ >= 12)
#else
#define KNOWS_AMX (__GNUC__ >= 11)
#endif

#define AMX_ROWS 16
#define AMX_WORDS 16
#define AMX_BYTES (AMX_WORDS * 4) /* of a row */
#define AMX_BFLOAT16 22           /* cpuid bits of the products that a CPU supports */
#define AMX_INT8 25

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* Earlier writes are in memory: compilers may not know that a tile is loaded from there. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

/* _tile_loadconfig, which some compilers take for a read of the first bytes alone, leaving the rest unwritten. */
static inline void load_shapes(const TileShapes *shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(*shapes)); }

/* For at most two tiles of rows. Sums are in tiles 0 to 3, inputs in 4 and 5, weights in 6 and 7; a second tile of
 * rows uses the odd tiles of the first six. It takes as long as six tiles' products. */
static inline void shape_tiles(int32_t num_rows) {
    const int32_t second_rows = num_rows - AMX_ROWS, first_rows = second_rows > 0 ? AMX_ROWS : num_rows;
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; ++i) {
        int is_second = second_rows > 0 && i % 2;
        shapes.row_bytes[i] = AMX_BYTES;
        shapes.rows[i] = (uint8_t)(i > 5 ? AMX_WORDS : is_second ? second_rows : first_rows);
    }
    load_shapes(&shapes);
}

/* Returns whether this CPU has tiles with such products, and Linux lets this process use them. */
int amx_is_there(int product);

#endif
