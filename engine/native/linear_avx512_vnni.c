#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#define LINEAR_KERNEL linear_avx512_vnni
#define LINEAR_HEADER "linear_vector_avx512.h"
#include "linear_kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int no_variant_here; /* a file of C must declare something */
#endif
