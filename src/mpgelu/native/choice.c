/* Functions that exist once, not for every instruction set: the variant for this processor, and the numbers of
 * nonlinearities and objectives. */
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

int64_t kernels_number(const char *name) {
    static const struct {
        const char *name;
        int64_t number;
    } known[] = {{"mpgelu", MPGELU}, {"relu_dvi", RELU_DVI}, {"relu_exact", RELU_EXACT}, {"silu", SILU}, {"relu", RELU},
                 {"beta_gaussian", BETA_GAUSSIAN}, {"student", STUDENT}};
    for (size_t k = 0; k < sizeof known / sizeof *known; k++)
        if (strcmp(name, known[k].name) == 0) return known[k].number;
    return -1;
}
