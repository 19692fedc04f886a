#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define OPS_KERNEL ops_avx512
#define VECTOR_HEADER "vector_avx512.h"
#include "ops_kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int no_variant_here; /* a file of C must declare something */
#endif
