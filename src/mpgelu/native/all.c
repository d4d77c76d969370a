/* All kernels, as one variant: the files that include this one define VARIANT. */
#include "diagonal.c"
#include "ensemble.c"
#include "factored.c"
#include "full.c"
#include "mixture.c"
#include "plain.c"
#include "process.c"
#include "train.c"
