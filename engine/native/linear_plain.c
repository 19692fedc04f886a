#define LINEAR_KERNEL linear_plain
#define LINEAR_HEADER "linear_vector_plain.h"
#include "linear_kernel.h"
