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

typedef void plain_kernel(int64_t, int64_t, int64_t, const int64_t *, int64_t, int64_t, int64_t, int64_t, int64_t,
                          const float *, const float *, float *, float *, float *);
typedef void plain_gradient(int64_t, int64_t, int64_t, const int64_t *, int64_t, int64_t, int64_t, int64_t, const float *,
                            const float *, const float *, const float *, float *, float *);
typedef void plain_training(int64_t, int64_t, const int64_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, const int64_t *, const double *, const double *, const float *, const float *,
                            const float *, float *, float *, float *, float *, float *);
typedef int64_t training_size(int64_t, int64_t, const int64_t *, int64_t, int64_t, int64_t);
typedef void process_kernel(int64_t, int64_t, int64_t, const double *, const double *, const double *, const double *,
                            const double *, const double *, const double *, double *, float *);
typedef int64_t process_size(int64_t, int64_t);
typedef void quantile_kernel(int64_t, int64_t, int64_t, int64_t, const double *, const double *, const double *,
                             const double *, const double *, const double *, const double *, double *, float *);
typedef void features_kernel(int64_t, int64_t, const double *, const double *, const double *, const double *,
                             const double *, const double *, double *, float *);
typedef void told_kernel(int64_t, int64_t, int64_t, int64_t, const int64_t *, const float *, const float *, const float *,
                         const float *, const float *, const float *, float *);
typedef void noise_kernel(int64_t, int64_t, int64_t, int64_t, const int64_t *, const float *, const float *,
                          const float *, const float *, float *);
typedef void mixture_kernel(int64_t, int64_t, int64_t, const double *, const double *, const double *, const double *,
                            const double *, const double *, double *, double *, double *, double *, double *,
                            const float *);

struct kernel {
    const char *name, *variant;
    forward_kernel *forward, *single; /* the latter for one row, if it has one */
    backward_kernel *backward;
    size_function *workspace, *kept;
    int covariance, first, last; /* whether it gives covariances, and the nonlinearities it knows */
};

#define DECLARE(kernel, variant)                                                                                       \
    extern forward_kernel kernel##_forward_##variant;                                                                  \
    extern backward_kernel kernel##_backward_##variant;                                                                \
    extern size_function kernel##_workspace_##variant, kernel##_kept_##variant;
#define DECLARE_PREDICTING(variant)                                                                                    \
    extern plain_kernel plain_forward_##variant, plain_single_##variant;                                               \
    extern plain_gradient plain_backward_##variant;                                                                    \
    extern size_function plain_workspace_##variant, plain_kept_##variant;                                              \
    extern plain_training plain_train_##variant;                                                                       \
    extern training_size plain_train_workspace_##variant;                                                              \
    extern process_kernel process_forward_##variant;                                                                   \
    extern process_size process_workspace_##variant, mixture_workspace_##variant;                                      \
    extern quantile_kernel mixture_quantiles_##variant;                                                                \
    extern features_kernel ensemble_features_##variant;                                                                \
    extern told_kernel ensemble_told_##variant;                                                                        \
    extern noise_kernel ensemble_noise_##variant;                                                                      \
    extern mixture_kernel ensemble_mixture_##variant;
#define ENTRY(kernel, single, variant, covariance, first, last)                                                        \
    {#kernel,         #variant, kernel##_forward_##variant, single, kernel##_backward_##variant,                       \
     kernel##_workspace_##variant, kernel##_kept_##variant, covariance, first, last},
#define DECLARE_ALL(variant)                                                                                           \
    DECLARE(diagonal, variant) DECLARE(factored, variant) DECLARE(full, variant) DECLARE_PREDICTING(variant)           \
    extern forward_kernel diagonal_single_##variant;
#define ENTRIES(variant)                                                                                               \
    ENTRY(diagonal, diagonal_single_##variant, variant, 0, MPGELU, RELU_EXACT)                                         \
    ENTRY(factored, NULL, variant, 1, MPGELU, MPGELU) ENTRY(full, NULL, variant, 1, RELU_DVI, RELU_EXACT)

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

/* The other kernels: one variant of each. */
struct predicting {
    const char *variant;
    plain_kernel *plain, *single;
    plain_gradient *gradient;
    size_function *plain_workspace, *plain_kept;
    plain_training *train;
    training_size *train_workspace;
    process_kernel *process;
    process_size *process_workspace, *mixture_workspace;
    quantile_kernel *quantiles;
    features_kernel *features;
    told_kernel *told;
    noise_kernel *noise;
    mixture_kernel *mixture;
};

#define PREDICTING(variant)                                                                                            \
    {#variant, plain_forward_##variant, plain_single_##variant, plain_backward_##variant, plain_workspace_##variant,   \
     plain_kept_##variant, plain_train_##variant, plain_train_workspace_##variant, process_forward_##variant,          \
     process_workspace_##variant, mixture_workspace_##variant, mixture_quantiles_##variant, ensemble_features_##variant, \
     ensemble_told_##variant, ensemble_noise_##variant, ensemble_mixture_##variant},

static const struct predicting predicting[] = {
    PREDICTING(baseline)
#if defined(__x86_64__)
        PREDICTING(avx2) PREDICTING(avx512)
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
    if (k->single) {
        free(room);
        room = numbers(k->workspace(1, layers, widths), 0, 0);
        k->single(models, 1, layers, widths, nonlinearity, 0, given[0], given[1], given[2], given[3], given[4], mean,
                  spread, none, room);
    }
    float *all[] = {given[0], given[1], given[2], given[3], given[4], mean, spread, by, kept, none, room};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void run_plain(const struct predicting *k, int wild) {
    int64_t widths[6], models = whole(1, 3), layers = whole(1, 5), rows = whole(1, 150), features = whole(1, 5);
    int64_t cosines = whole(0, 1) * whole(1, 6), combinations = cosines ? whole(1, 3) : 0, shared = whole(0, 1);
    for (int64_t l = 1; l <= layers; l++) widths[l] = whole(1, 21);
    widths[0] = features * (1 + combinations);
    int64_t size = features * cosines * (2 + combinations) + parameter_count(layers, widths);
    float *x = numbers((shared ? 1 : models) * rows * features, 0, wild), *parameters = numbers(models * size, 0, wild);
    float *y = numbers(models * rows * widths[layers], 0, 0), *none = numbers(0, 0, 0), *by = numbers(models * size, 0, 0);
    float *kept = numbers(models * k->plain_kept(rows, layers, widths), 0, 0);
    float *room = numbers(k->plain_workspace(rows, layers, widths), 0, 0);
    int64_t nonlinearity = whole(SILU, RELU), step = shared ? 0 : rows * features;
    k->plain(models, rows, layers, widths, nonlinearity, features, cosines, step, 0, x, parameters, y, none, room);
    k->plain(models, rows, layers, widths, nonlinearity, features, cosines, step, 1, x, parameters, y, kept, room);
    k->gradient(models, rows, layers, widths, nonlinearity, features, cosines, step, x, parameters, kept, y, by, room);
    free(room);
    room = numbers(k->plain_workspace(1, layers, widths), 0, 0);
    k->single(models, 1, layers, widths, nonlinearity, features, cosines, shared ? 0 : features, 0, x, parameters, y,
              none, room);
    free(x), free(parameters), free(y), free(none), free(by), free(kept), free(room);
}

static double *doubles(int64_t count, int wild) {
    float *from = numbers(count, 0, wild);
    double *made = malloc(sizeof(double) * count);
    for (int64_t i = 0; i < count; i++) made[i] = from[i];
    free(from);
    return made;
}

static void run_training(const struct predicting *k, int wild) {
    int64_t widths[6], layers = whole(1, 5), batch = whole(1, 150), all = whole(1, 200);
    int64_t features = whole(1, 5), cosines = whole(0, 1) * whole(1, 6), combinations = cosines ? whole(1, 3) : 0;
    int64_t scaled = whole(0, 1), objective = whole(BETA_GAUSSIAN, STUDENT), steps = whole(1, 4), taken = whole(0, 9);
    for (int64_t l = 1; l <= layers; l++) widths[l] = whole(1, 21);
    widths[0] = features * (1 + combinations), widths[layers] = objective == STUDENT ? 1 : 2;
    int64_t size = scaled * widths[0] + features * cosines * (2 + combinations) + parameter_count(layers, widths);
    int64_t *at = malloc(sizeof(int64_t) * steps * batch);
    for (int64_t i = 0; i < steps * batch; i++) at[i] = whole(0, all - 1);
    double *rates = doubles(3 * steps, 0), settings[] = {objective == STUDENT ? 5 : 0.5, 10, 0.02, 0.9, 0.999, 1e-8};
    float *x = numbers(all * features, 0, wild), *y = numbers(all, 0, wild), *weights = numbers(all, 1, 0);
    float *parameters = numbers(size, 0, wild), *first = numbers(size, 0, 0);
    float *second = numbers(size, 1, 0), *losses = numbers(steps, 0, 0);
    float *room = numbers(k->train_workspace(batch, layers, widths, features, cosines, scaled), 0, 0);
    k->train(batch, layers, widths, whole(SILU, RELU), features, cosines, scaled, objective, steps, taken, at, rates,
             settings, x, y, weights, parameters, first, second, losses, room);
    free(at), free(rates), free(x), free(y), free(weights), free(parameters), free(first), free(second), free(losses);
    free(room);
}

static void run_process(const struct predicting *k, int wild) {
    int64_t rows = whole(1, 20), points = whole(1, 600), n = whole(1, 9);
    int64_t counts[] = {rows * n, points, points * n, n, n, 1, n + 3, rows};
    double *arrays[8];
    for (int i = 0; i < 8; i++) arrays[i] = doubles(counts[i], wild);
    float *room = numbers(k->process_workspace(points, n), 0, 0);
    k->process(rows, points, n, arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], arrays[5], arrays[6], arrays[7],
               room);
    for (int i = 0; i < 8; i++) free(arrays[i]);
    free(room);
}

static void run_quantiles(const struct predicting *k, int wild) {
    int64_t rows = whole(1, 20), count = whole(1, 70), levels = whole(1, 3), shared = whole(0, 1);
    int64_t counts[] = {rows * count, rows * count, shared ? count : rows * count, rows, rows, levels, levels};
    double *arrays[7], *roots = doubles(rows * levels, 0);
    for (int i = 0; i < 7; i++) arrays[i] = doubles(counts[i], wild);
    for (int64_t i = 0; i < rows * count; i++) arrays[1][i] = fabs(arrays[1][i]);
    float *room = numbers(k->mixture_workspace(count, levels), 0, 0);
    k->quantiles(rows, count, levels, shared ? 0 : count, arrays[0], arrays[1], arrays[2], arrays[3], arrays[4],
                 arrays[5], arrays[6], roots, room);
    for (int i = 0; i < 7; i++) free(arrays[i]);
    free(roots), free(room);
}

static void run_ensemble(const struct predicting *k, int wild) {
    int64_t rows = whole(1, 20), n = whole(1, 9), kinds = whole(1, 3), folds = whole(1, 4), heads = whole(1, 3);
    int64_t networks = whole(1, 9), errors = whole(1, 3), groups[12];
    for (int64_t i = 0; i < kinds * folds; i++) groups[i] = whole(0, networks - 1);
    int64_t counts[] = {rows * n, n, n, n, n, 3, rows, networks, 5, errors, errors * rows, errors * rows,
                        rows * networks * errors, rows * networks * errors, rows, rows, rows};
    double *d[17];
    for (int i = 0; i < 17; i++) d[i] = doubles(counts[i], wild);
    int64_t floats[] = {rows * n, networks * rows * 3, kinds, n + 3, n + 3, 6, folds * rows * (n + 3),
                        heads * folds * rows, 6, rows};
    float *f[10];
    for (int i = 0; i < 10; i++) f[i] = numbers(floats[i], 0, wild);
    k->features(rows, n, d[0], d[1], d[2], d[3], d[4], d[5], d[6], f[0]);
    k->told(rows, n, kinds, folds, groups, f[0], f[1], f[2], f[3], f[4], f[5], f[6]);
    k->noise(rows, kinds, folds, heads, groups, f[7], f[1], f[2], f[8], f[9]);
    k->mixture(rows, networks, errors, d[7], d[8], d[6], d[9], d[10], d[11], d[12], d[13], d[14], d[15], d[16], f[1]);
    for (int i = 0; i < 17; i++) free(d[i]);
    for (int i = 0; i < 10; i++) free(f[i]);
}

static int can_run(const char *variant) {
    const char *best = kernels_variant();
    if (strcmp(variant, "avx512") == 0) return strcmp(best, "avx512") == 0;
    return strcmp(variant, "avx2") != 0 || strcmp(best, "baseline") != 0;
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? atoi(arguments[1]) : 100;
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        if (!can_run(kernels[i].variant)) continue;
        for (int round = 0; round < rounds; round++) run(&kernels[i], round % 2);
        printf("%s %s: %d shapes\n", kernels[i].name, kernels[i].variant, rounds);
    }
    for (size_t i = 0; i < sizeof predicting / sizeof *predicting; i++) {
        if (!can_run(predicting[i].variant)) continue;
        for (int round = 0; round < rounds; round++)
            run_plain(&predicting[i], round % 2), run_training(&predicting[i], round % 2),
                run_process(&predicting[i], round % 2), run_quantiles(&predicting[i], round % 2), run_ensemble(&predicting[i], round % 2);
        printf("plain, training, process, mixture, ensemble %s: %d shapes each\n", predicting[i].variant, rounds);
    }
    return 0;
}
