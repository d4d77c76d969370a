/* The interface of the kernels: moments of many perceptrons of the same shape, and gradients of their parameters, in
 * float32.
 *
 * A network is a sequence of layers: a mask (mean g m, variance g^2 v + n (v + m^2)), a linear map and, except for the
 * last layer, a nonlinearity. There are four kernels of networks:
 *
 *   plain      outputs for deterministic inputs, without masks; SiLU or ReLU
 *   diagonal   variances only; MP-GELU or ReLU
 *   factored   exact covariance of MP-GELU networks, as a sum over independent sources
 *   full       dense covariance matrices of ReLU networks
 *
 * Each has a forward and a backward function, which for the last three have one signature, compiled once for every
 * instruction set (KERNEL names them), and functions that return the numbers of floats that it keeps and needs as a
 * workspace. All arrays are contiguous:
 *
 *   widths       (layers + 1), features before the first layer and after each
 *   x_*          (models, rows, widths[0]), mean and variance of independent inputs
 *   gains        (models, layers), g; noises the same, n
 *   parameters   (models, parameter_count), the weights (after, before) of each layer followed by its biases
 *   y_mean       (models, rows, outputs); y_spread the same, or with covariances (models, rows, outputs, outputs)
 *   kept         (models, kept), from forward to backward; not touched if `keep` is 0
 *   workspace    (workspace), of unknown content; one for each thread
 *
 * Loops have no branches on values, so that compilers vectorise them. Comparisons are written such that they select NaN
 * if an operand is NaN; it is thus propagated to the loss, where training detects it. The torch rules are the reference
 * of every formula, and tests compare the kernels with them.
 */
#ifndef MPGELU_KERNELS_H
#define MPGELU_KERNELS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#ifndef VARIANT
#define VARIANT baseline
#endif
#define JOINED_(name, variant) name##_##variant
#define JOINED(name, variant) JOINED_(name, variant)
#define KERNEL(name) JOINED(name, VARIANT)

#define FARTHEST 8.0 /* standard deviations beyond which a feature of a Gaussian process counts as being there */
#define LANES 8 /* rows that one vector holds */
#define PADDED(n) (((n) + LANES - 1) / LANES * LANES)

enum nonlinearity { MPGELU, RELU_DVI, RELU_EXACT, SILU, RELU };

enum objective { BETA_GAUSSIAN, STUDENT };

#define FORWARD(name)                                                                                                  \
    EXPORT void KERNEL(name)(int64_t models, int64_t rows, int64_t layers, const int64_t *widths,                      \
                             int64_t nonlinearity, int64_t keep, const float *x_mean, const float *x_variance,         \
                             const float *gains, const float *noises, const float *parameters, float *y_mean,          \
                             float *y_spread, float *kept, float *workspace)

#define BACKWARD(name)                                                                                                 \
    EXPORT void KERNEL(name)(int64_t models, int64_t rows, int64_t layers, const int64_t *widths,                      \
                             int64_t nonlinearity, const float *x_mean, const float *x_variance, const float *gains,   \
                             const float *noises, const float *parameters, const float *kept, const float *grad_mean,  \
                             const float *grad_spread, float *by_parameters, float *workspace)

/* Networks for deterministic inputs. If `cosines` is not zero, the parameters of a model begin with those of the periodic
 * embedding: frequencies (features, cosines), in cycles per unit, phases of the same shape, in cycles, and weights of the
 * cosines (features, cosines, widths[0] / features - 1). The inputs x are (models, rows, features) with a distance of
 * `step` floats between models, which is zero for shared inputs. */
#define PLAIN_SIZES                                                                                                    \
    int64_t models, int64_t rows, int64_t layers, const int64_t *widths, int64_t nonlinearity, int64_t features,       \
        int64_t cosines, int64_t step
#define PLAIN_FORWARD(name)                                                                                            \
    EXPORT void KERNEL(name)(PLAIN_SIZES, int64_t keep, const float *x, const float *parameters, float *y, float *kept, \
                             float *workspace)
#define PLAIN_BACKWARD(name)                                                                                           \
    EXPORT void KERNEL(name)(PLAIN_SIZES, const float *x, const float *parameters, const float *kept,                  \
                             const float *grad, float *by_parameters, float *workspace)

/* Steps of Adam of one network, `steps` of them after `taken` earlier ones, with batches of `rows` rows: `at` (steps, rows)
 * of the data x (all, features), y (all), weights (all). If `scaled` is not zero, the parameters begin with the scale
 * (widths[0]) of the inputs of the first linear map. They are changed in place, like the moments of Adam `first` and
 * `second`, which have their layout. The rates (steps, 3) are those of scale, embedding and linear maps; `settings` are a
 * struct optimiser. The losses (steps) are NaN for steps that were left out. */
struct optimiser {
    double shape; /* beta of BETA_GAUSSIAN, degrees of freedom of STUDENT */
    double clip;  /* largest norm of the gradient */
    double weight_decay, beta_1, beta_2, epsilon;
};

#define PLAIN_TRAIN(name)                                                                                              \
    EXPORT void KERNEL(name)(int64_t rows, int64_t layers, const int64_t *widths, int64_t nonlinearity,                \
                             int64_t features, int64_t cosines, int64_t scaled, int64_t objective, int64_t steps,      \
                             int64_t taken, const int64_t *at, const double *rates, const double *settings,            \
                             const float *x, const float *y, const float *weights, float *parameters, float *first,    \
                             float *second, float *losses, float *workspace)

PLAIN_TRAIN(plain_train);
PLAIN_FORWARD(plain_forward);
PLAIN_FORWARD(plain_single); /* for one row; weights of linear maps are (before, after), and nothing is kept */
PLAIN_BACKWARD(plain_backward);
FORWARD(diagonal_forward);
FORWARD(diagonal_single); /* for one row; weights of linear maps are (before, after), and nothing is kept */
BACKWARD(diagonal_backward);
FORWARD(factored_forward);
BACKWARD(factored_backward);
FORWARD(full_forward);
BACKWARD(full_backward);

/* The posterior mean (rows) of a Gaussian process for limited features (rows, n): weights alpha (points), standardised
 * training rows `at` (points, n), center and scale (n), limit (1), kernel (n + 3). The workspace has
 * `process_workspace` floats and is aligned to 8 bytes. */
#define PROCESS(name)                                                                                                  \
    EXPORT void KERNEL(name)(int64_t rows, int64_t points, int64_t n, const double *limited, const double *alpha,      \
                             const double *at, const double *center, const double *scale, const double *limit,         \
                             const double *kernel, double *mean, float *workspace)

PROCESS(process_forward);
EXPORT int64_t KERNEL(process_workspace)(int64_t points, int64_t n);

/* Quantiles (rows, levels) of Gaussian mixtures with means and variances (rows, count); NaN for those that are not
 * found. The weights have a distance of `step` numbers between rows, which is zero for shared weights. Further
 * arguments are mean and standard deviation of each mixture (rows), and probabilities with their standard normal
 * quantiles (levels). The workspace has `mixture_workspace` floats and is aligned to 8 bytes. */
EXPORT void KERNEL(mixture_quantiles)(int64_t rows, int64_t count, int64_t levels, int64_t step, const double *means,
                                      const double *variances, const double *weights, const double *mean,
                                      const double *stddev, const double *q, const double *standard, double *roots,
                                      float *workspace);
EXPORT int64_t KERNEL(mixture_workspace)(int64_t count, int64_t levels);

/* The parts of an ensemble other than its networks; ensemble.c documents formulas and arrays. */
EXPORT void KERNEL(ensemble_features)(int64_t rows, int64_t n, const double *x, const double *center, const double *scale,
                                      const double *lower, const double *upper, const double *settings, double *beyond,
                                      float *limited);
EXPORT void KERNEL(ensemble_told)(int64_t rows, int64_t n, int64_t kinds, int64_t folds, const int64_t *groups,
                                  const float *features, const float *outputs, const float *weights, const float *center,
                                  const float *scale, const float *settings, float *told);
EXPORT void KERNEL(ensemble_noise)(int64_t rows, int64_t kinds, int64_t folds, int64_t heads, const int64_t *groups,
                                   const float *said, const float *outputs, const float *weights, const float *settings,
                                   float *log_variance);
EXPORT void KERNEL(ensemble_mixture)(int64_t rows, int64_t networks, int64_t errors, const double *weights,
                                     const double *settings, const double *beyond, const double *shares,
                                     const double *variances, const double *offsets, double *means,
                                     double *mixed_variances, double *mean, double *epistemic, double *aleatoric,
                                     const float *outputs);

/* The number of floats of the workspace, for both passes, and of the array that is kept for each model. */
EXPORT int64_t KERNEL(plain_workspace)(int64_t rows, int64_t layers, const int64_t *widths);
EXPORT int64_t KERNEL(plain_kept)(int64_t rows, int64_t layers, const int64_t *widths);
EXPORT int64_t KERNEL(plain_train_workspace)(int64_t rows, int64_t layers, const int64_t *widths, int64_t features,
                                             int64_t cosines, int64_t scaled);
EXPORT int64_t KERNEL(diagonal_workspace)(int64_t rows, int64_t layers, const int64_t *widths);
EXPORT int64_t KERNEL(diagonal_kept)(int64_t rows, int64_t layers, const int64_t *widths);
EXPORT int64_t KERNEL(factored_workspace)(int64_t rows, int64_t layers, const int64_t *widths);
EXPORT int64_t KERNEL(factored_kept)(int64_t rows, int64_t layers, const int64_t *widths);
EXPORT int64_t KERNEL(full_workspace)(int64_t rows, int64_t layers, const int64_t *widths);
EXPORT int64_t KERNEL(full_kept)(int64_t rows, int64_t layers, const int64_t *widths);

/* The variant for this processor: "avx512", "avx2" or "baseline". */
EXPORT const char *kernels_variant(void);

/* The number of a nonlinearity called "mpgelu", "relu_dvi", "relu_exact", "silu" or "relu", or of an objective called
 * "beta_gaussian" or "student"; -1 for any other name. */
EXPORT int64_t kernels_number(const char *name);

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t parameter_count(int64_t layers, const int64_t *widths) {
    int64_t count = 0;
    for (int64_t l = 0; l < layers; l++) count += (widths[l] + 1) * widths[l + 1];
    return count;
}

/* A workspace, and how much of it is in use. Without a start it only counts, so that the function that divides a
 * workspace also determines its size. */
struct room {
    float *start;
    int64_t used;
};

INLINE float *take(struct room *room, int64_t count) {
    float *taken = room->start ? room->start + room->used : NULL;
    room->used += count;
    return taken;
}

INLINE double *take_doubles(struct room *room, int64_t count) { return (double *)take(room, 2 * count); }

#endif
