#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif
#define HAS_BF16
#define DENSE_KERNEL dense_avx512_bf16
#define PAIRS 1
#define TILE_ROWS 6
#define TILE_VECTORS 4
#define VECTOR_HEADER "vector_avx512.h"
#include "dense_kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int no_variant_here; /* a file of C must declare something */
#endif
