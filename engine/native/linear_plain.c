#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC optimize("O2") /* -O3 takes 20 s, for CPUs of x86 without AVX2 alone */
#endif
#define LINEAR_KERNEL linear_plain
#define LINEAR_HEADER "linear_vector_plain.h"
#include "linear_kernel.h"
