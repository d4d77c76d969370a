/* The parts of an ensemble other than its networks: scaling of features, inputs and outputs of the noise head, and the
 * mixture. The formulas are those of networks/scaling.py, estimators/noise.py and estimators/ensemble.py.
 *
 * The outputs of the networks are (networks, rows, 3): mean, log-variance of the noise, variance of the mean.
 */
#include "normal.h"

#define OUTPUTS 3

INLINE double bounded(double x, double lowest, double highest) {
    return x > highest ? highest : x < lowest ? lowest : x;
}

INLINE double squared(double x) { return x * x; }

INLINE const float *output_of(const float *outputs, int64_t network, int64_t rows, int64_t row) {
    return outputs + (network * rows + row) * OUTPUTS;
}

/* The scaled and limited features (rows, n) and the variance of extrapolation (rows), for raw features x (rows, n).
 * With z = (x - center) / scale, clipped to [-farthest, farthest]:
 *
 *   limited = z / sqrt(1 + (z / limit)^2),    beyond = sum_j (reach log(1 + d_j))^2,
 *
 * d_j the distance of z_j from [lower_j, upper_j]. The settings are limit, reach and farthest. */
void KERNEL(ensemble_features)(int64_t rows, int64_t n, const double *x, const double *center, const double *scale,
                               const double *lower, const double *upper, const double *settings, double *beyond,
                               float *limited) {
    double limit = settings[0], reach = settings[1], farthest = settings[2];
    for (int64_t row = 0; row < rows; row++) {
        double total = 0;
        for (int64_t j = 0; j < n; j++, x++, limited++) {
            double z = bounded((*x - center[j]) / scale[j], -farthest, farthest);
            double distance = lower[j] - z > z - upper[j] ? lower[j] - z : z - upper[j];
            *limited = (float)(z / sqrt(1 + squared(z / limit)));
            total += distance <= 0 ? 0 : squared(reach * log1p(distance));
        }
        beyond[row] = total;
    }
}

/* The scaled and limited inputs of the noise head (folds, rows, n + 3): the features, and mean, logarithm of the
 * standard deviation and half the mean log-variance of the networks of a group. groups (kinds, folds) are the numbers
 * of the networks that form a group. The settings are the smallest and the largest mean, the smallest and the largest
 * log-variance, the smallest standard deviation, and the limit. */
void KERNEL(ensemble_told)(int64_t rows, int64_t n, int64_t kinds, int64_t folds, const int64_t *groups,
                           const float *features, const float *outputs, const float *weights, const float *center,
                           const float *scale, const float *settings, float *told) {
    for (int64_t fold = 0; fold < folds; fold++)
        for (int64_t row = 0; row < rows; row++, told += n + 3) {
            double mean = 0, square = 0, own = 0;
            for (int64_t k = 0; k < kinds; k++) {
                const float *output = output_of(outputs, groups[k * folds + fold], rows, row);
                mean += weights[k] * bounded(output[0], settings[0], settings[1]);
                own += weights[k] * bounded(output[1], settings[2], settings[3]);
            }
            for (int64_t k = 0; k < kinds; k++) {
                const float *output = output_of(outputs, groups[k * folds + fold], rows, row);
                square += weights[k] * squared(bounded(output[0], settings[0], settings[1]) - mean);
            }
            double spread = sqrt(square);
            float of_networks[] = {(float)mean, (float)log(spread < settings[4] ? settings[4] : spread), (float)(own / 2)};
            memcpy(told, features + row * n, sizeof(float) * n);
            memcpy(told + n, of_networks, sizeof of_networks);
            for (int64_t j = 0; j < n + 3; j++) {
                float z = (told[j] - center[j]) / scale[j], ratio = z / settings[5];
                told[j] = z / sqrtf(1 + ratio * ratio);
            }
        }
}

/* The variance of the means of the networks of a kind for one row, with the divisor folds - 1. */
static double between(int64_t rows, int64_t row, int64_t folds, const int64_t *networks, const float *outputs,
                      double lowest, double highest) {
    double mean = 0, square = 0;
    for (int64_t f = 0; f < folds; f++) mean += bounded(*output_of(outputs, networks[f], rows, row), lowest, highest);
    mean /= (double)folds;
    for (int64_t f = 0; f < folds; f++)
        square += squared(bounded(*output_of(outputs, networks[f], rows, row), lowest, highest) - mean);
    return square / (double)(folds - 1);
}

/* The log-variance of the noise (rows) from the outputs `said` of the networks of the head (heads, folds, rows): their
 * bounded average, less the variance that averaging over the networks of a kind removes; see NoiseHead. The settings
 * are log scale, spread, smallest and largest mean, bound of the outputs, and smallest share of the noise. */
void KERNEL(ensemble_noise)(int64_t rows, int64_t kinds, int64_t folds, int64_t heads, const int64_t *groups,
                            const float *said, const float *outputs, const float *weights, const float *settings,
                            float *log_variance) {
    double all = (double)(heads * folds), saved = (1 - 1 / (double)folds) * (1 + squared(settings[1]));
    for (int64_t row = 0; row < rows; row++) {
        double total = 0, taken = 0;
        for (int64_t i = 0; i < heads * folds; i++) total += tanh(said[i * rows + row] / settings[4]);
        double noise = exp(settings[4] * total / all + settings[0]);
        for (int64_t k = 0; folds > 1 && k < kinds; k++)
            taken += squared(weights[k]) * between(rows, row, folds, groups + k * folds, outputs, settings[2], settings[3]);
        double rest = noise - saved * taken, least = settings[5] * noise;
        log_variance[row] = (float)log(rest < least ? least : rest);
    }
}

/* The mixture over all networks and all components of the noise, in the unit of the target: means and variances of its
 * components (rows, networks, errors), its mean, and its epistemic and aleatoric variance (rows). The components of the
 * noise have shares (errors), variances (errors, rows) and offsets (errors, rows). The settings are spread, mean and
 * scale of the target, smallest and largest mean. */
void KERNEL(ensemble_mixture)(int64_t rows, int64_t networks, int64_t errors, const double *weights,
                              const double *settings, const double *beyond, const double *shares,
                              const double *variances, const double *offsets, double *means, double *mixed_variances,
                              double *mean, double *epistemic, double *aleatoric, const float *outputs) {
    double spread = settings[0], shift = settings[1], scale = settings[2], unit = scale * scale;
    for (int64_t row = 0; row < rows; row++) {
        double average = 0, center = 0, known = beyond[row], noise = 0;
        for (int64_t m = 0; m < networks; m++)
            average += weights[m] * bounded(*output_of(outputs, m, rows, row), settings[3], settings[4]);
        for (int64_t m = 0; m < networks; m++, means += errors, mixed_variances += errors) {
            const float *output = output_of(outputs, m, rows, row);
            double moved = average + spread * (bounded(output[0], settings[3], settings[4]) - average);
            center += weights[m] * moved;
            known += weights[m] * (squared(moved - average) + output[2]);
            for (int64_t s = 0; s < errors; s++) {
                means[s] = (moved + offsets[s * rows + row]) * scale + shift;
                mixed_variances[s] = (output[2] + beyond[row] + variances[s * rows + row]) * unit;
            }
        }
        for (int64_t s = 0; s < errors; s++)
            noise += shares[s] * (variances[s * rows + row] + squared(offsets[s * rows + row]));
        mean[row] = center * scale + shift;
        epistemic[row] = known * unit;
        aleatoric[row] = noise * unit;
    }
}
