#define OPS_KERNEL ops_plain
#define VECTOR_HEADER "vector_plain.h"
#include "ops_kernel.h"
