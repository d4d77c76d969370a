/* The kernels for any processor. */
#define VARIANT baseline
#include "diagonal.c"
#include "ensemble.c"
#include "factored.c"
#include "full.c"
#include "mixture.c"
#include "plain.c"
#include "process.c"
