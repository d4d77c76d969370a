/* The kernels for any processor. */
#define VARIANT baseline
#include "diagonal.c"
#include "factored.c"
#include "full.c"
#include "plain.c"
#include "process.c"
