#define KERNEL attention_plain
#define PAIRS 0
#define VECTOR_HEADER "vector_plain.h"
#include "attention_kernel.h"
