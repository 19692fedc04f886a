#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define DENSE_KERNEL dense_avx2
#define PAIRS 0
#define TILE_ROWS 6
#define TILE_VECTORS 1
#define VECTOR_HEADER "vector_avx2.h"
#include "dense_kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int no_variant_here; /* a file of C must declare something */
#endif
