/* The kernels for processors of the x86-64 family with AVX-512. */
#if defined(__x86_64__)
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512vl,avx512dq,avx512bw"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512vl,avx512dq,avx512bw")
#endif
#define VARIANT avx512
#define LONG_VECTORS
#include "all.c"
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int no_variant_here; /* ISO C forbids an empty file */
#endif
