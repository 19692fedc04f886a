#include "amx.h"
#if defined(__x86_64__) && defined(__linux__) && KNOWS_AMX
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni," \
                                                   "amx-tile,amx-int8"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,amx-tile,amx-int8")
#endif
#define LINEAR_KERNEL linear_amx
#define LINEAR_HEADER "linear_vector_avx512.h"
#define BYTE_TILES
#include "linear_kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#elif defined(__x86_64__)
#include "linear.h"
const LinearKernel linear_amx;
#else
typedef int no_variant_here; /* a file of C must declare something */
#endif
