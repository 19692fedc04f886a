#define STEP_KERNEL steps_plain
#define VECTOR_HEADER "attention_vector_plain.h"
#include "steps_kernel.h"
