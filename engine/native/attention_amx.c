#include "amx.h"
#include "attention.h"

#if defined(__x86_64__) && defined(__linux__) && KNOWS_AMX
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16," \
                                                   "amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
#endif
#define HAS_BF16
#define KERNEL attention_amx
#define PAIRS 1
#define TILES 1
#define BLOCK_ROWS AMX_ROWS
#define KEYS_TOGETHER (2 * AMX_WORDS)
#define VECTOR_HEADER "vector_avx512.h"
#include "attention_kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#elif defined(__x86_64__)
const Kernel attention_amx;
#endif
