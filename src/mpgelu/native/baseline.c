/* The kernels for any processor. */
#define VARIANT baseline
#include "all.c"
