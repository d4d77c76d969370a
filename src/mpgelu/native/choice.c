/* Functions that exist once, not for every instruction set: the variant for this processor, and the numbers of
 * nonlinearities. */
#include "kernels.h"

const char *kernels_variant(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "baseline";
}

int64_t kernels_nonlinearity(const char *name) {
    static const char *const names[] = {[MPGELU] = "mpgelu", [RELU_DVI] = "relu_dvi", [RELU_EXACT] = "relu_exact",
                                        [SILU] = "silu", [RELU] = "relu"};
    for (int64_t k = 0; k < (int64_t)(sizeof names / sizeof *names); k++)
        if (strcmp(name, names[k]) == 0) return k;
    return -1;
}
