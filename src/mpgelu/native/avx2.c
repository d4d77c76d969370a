/* The kernels for processors of the x86-64 family with AVX2 and FMA. */
#if defined(__x86_64__)
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define VARIANT avx2
#include "all.c"
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int no_variant_here; /* ISO C forbids an empty file */
#endif
