#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define LINEAR_KERNEL linear_avx2
#define LINEAR_HEADER "linear_vector_avx2.h"
#include "linear_kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int no_variant_here; /* a file of C must declare something */
#endif
