/* All kernels in all variants on random shapes, each array in its own allocation of exactly the size that is promised:
 * for the sanitizers of memory and of undefined behaviour. Some numbers are NaN, infinite, huge or zero. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels.h"

typedef void forward_kernel(int64_t, int64_t, int64_t, const int64_t *, int64_t, int64_t, const float *, const float *,
                            const float *, const float *, const float *, float *, float *, float *, float *);
typedef void backward_kernel(int64_t, int64_t, int64_t, const int64_t *, int64_t, const float *, const float *,
                             const float *, const float *, const float *, const float *, const float *, const float *,
                             float *, float *);
typedef int64_t size_function(int64_t, int64_t, const int64_t *);

struct kernel {
    const char *name, *variant;
    forward_kernel *forward;
    backward_kernel *backward;
    size_function *workspace, *kept;
    int covariance, first, last; /* whether it gives covariances, and the nonlinearities it knows */
};

#define DECLARE(kernel, variant)                                                                                       \
    extern forward_kernel kernel##_forward_##variant;                                                                  \
    extern backward_kernel kernel##_backward_##variant;                                                                \
    extern size_function kernel##_workspace_##variant, kernel##_kept_##variant;
#define ENTRY(kernel, variant, covariance, first, last)                                                                \
    {#kernel,         #variant, kernel##_forward_##variant, kernel##_backward_##variant, kernel##_workspace_##variant,  \
     kernel##_kept_##variant, covariance, first, last},
#define DECLARE_ALL(variant) DECLARE(diagonal, variant) DECLARE(factored, variant) DECLARE(full, variant)
#define ENTRIES(variant)                                                                                               \
    ENTRY(diagonal, variant, 0, MPGELU, RELU_EXACT)                                                                    \
    ENTRY(factored, variant, 1, MPGELU, MPGELU) ENTRY(full, variant, 1, RELU_DVI, RELU_EXACT)

DECLARE_ALL(baseline)
#if defined(__x86_64__)
DECLARE_ALL(avx2)
DECLARE_ALL(avx512)
#endif

static const struct kernel kernels[] = {
    ENTRIES(baseline)
#if defined(__x86_64__)
        ENTRIES(avx2) ENTRIES(avx512)
#endif
};

static int64_t whole(int64_t least, int64_t most) { return least + rand() % (most - least + 1); }

/* Numbers of all sizes if `wild`, else of size one. */
static float *numbers(int64_t count, int positive, int wild) {
    static const float strange[] = {0, INFINITY, NAN, 1e30f, 1e-40f, -1e30f, -INFINITY};
    float *made = malloc(sizeof(float) * (count ? count : 1));
    for (int64_t i = 0; i < count; i++) {
        float x = (float)rand() / (float)RAND_MAX * 2 - 1;
        if (wild && rand() % 8 == 0) x = strange[rand() % 7];
        made[i] = positive ? fabsf(x) : x;
    }
    return made;
}

static void run(const struct kernel *k, int wild) {
    int64_t widths[6], models = whole(1, 3), layers = whole(1, 5), rows = whole(0, 2) ? whole(1, 40) : whole(250, 530);
    for (int64_t l = 0; l <= layers; l++) widths[l] = whole(1, rows > 40 ? 5 : 21);
    int64_t size = parameter_count(layers, widths), outputs = widths[layers], kept_size = k->kept(rows, layers, widths);
    int64_t entries = models * rows * outputs * (k->covariance ? outputs : 1), nonlinearity = whole(k->first, k->last);
    float *given[] = {numbers(models * rows * widths[0], 0, wild), numbers(models * rows * widths[0], 1, wild),
                      numbers(models * layers, 1, 0), numbers(models * layers, 1, 0), numbers(models * size, 0, wild)};
    float *mean = numbers(models * rows * outputs, 0, 0), *spread = numbers(entries, 0, 0);
    float *by = numbers(models * size, 0, 0), *kept = numbers(models * kept_size, 0, 0);
    float *none = numbers(0, 0, 0), *room = numbers(k->workspace(rows, layers, widths), 0, 0);
    k->forward(models, rows, layers, widths, nonlinearity, 0, given[0], given[1], given[2], given[3], given[4], mean,
               spread, none, room);
    k->forward(models, rows, layers, widths, nonlinearity, 1, given[0], given[1], given[2], given[3], given[4], mean,
               spread, kept, room);
    k->backward(models, rows, layers, widths, nonlinearity, given[0], given[1], given[2], given[3], given[4], kept, mean,
                spread, by, room);
    float *all[] = {given[0], given[1], given[2], given[3], given[4], mean, spread, by, kept, none, room};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? atoi(arguments[1]) : 100;
    const char *best = kernels_variant();
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        const char *variant = kernels[i].variant;
        if (strcmp(variant, "avx512") == 0 && strcmp(best, "avx512") != 0) continue;
        if (strcmp(variant, "avx2") == 0 && strcmp(best, "baseline") == 0) continue;
        for (int round = 0; round < rounds; round++) run(&kernels[i], round % 2);
        printf("%s %s: %d shapes\n", kernels[i].name, variant, rounds);
    }
    return 0;
}
