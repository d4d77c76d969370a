/* Quantiles of one-dimensional Gaussian mixtures in double precision.
 *
 * The equation F(y) = q is solved on the scale g = Phi^-1(F), on which the distribution function of a Gaussian is a
 * straight line, by Halley's method with bisection as a safeguard, as in predictive/quantiles.py. Roots that are not
 * found are NaN, and are left to that module.
 */
#include "normal.h"

#define FREE_STEPS 8          /* steps after which every second one is a bisection */
#define MOST_STEPS 64
#define STEP_ERROR 1e-12      /* largest error of a root after its last step, in standard deviations */
#define ROUNDING 1e-6         /* margin of the initial bounds, in standard deviations */
#define NORMAL_DENSITY 0.39894228040143267794
#define SMALL_DIFFERENCE 1e-3 /* (F - q) / phi below which three terms of the series of Phi^-1 are accurate */

/* The components of a mixture: means, 1 / stddev, and weights that sum to one. */
struct gaussians {
    int64_t count;
    const double *means, *inverse, *weights;
};

/* The distribution function F(y), the density p(y), and -p'(y) / p(y). */
struct place {
    double below, density, bend;
};

/* The upper tail probability of a standard normal variable at x >= 0, given `power` = exp(-x^2 / 2): power t P(t) with
 * a polynomial P in t = 3 / (3 + x); the error is below 5e-16. It is a function because compilers do not vectorise
 * loops whose body contains arrays. */
INLINE double tail_of(double x, double power) {
    double t = 3 / (3 + x);
    double t2 = t * t, t4 = t2 * t2, t10 = t4 * t4 * t2;
    double low = POLYNOMIAL(t, 0.13298085724249709, 0.13297719622272292, 0.11826570686073194,
                                   0.08802131208500286, 0.05378210569038863, -0.01366976778851525,
                                   0.07355921482007892, -0.2896681255372131, 0.5679059524950176,
                                   -0.8938115835085363);
    double high = POLYNOMIAL(t, 0.9195238906343289, -0.24300397378260882, -0.8102875040930854,
                                    1.4145681426957994, -1.2350524131109282, 0.6753826485748536,
                                    -0.23523210032428493, 0.04822234272903171, -0.004463901905282136);
    return power * t * (low + t10 * high);
}

/* F(y), p(y) and -p'(y) / p(y) as sums over the components. */
static struct place place_at(const struct gaussians *of, double y) {
    const double *restrict means = of->means, *restrict inverse = of->inverse, *restrict weights = of->weights;
    double below = 0, density = 0, bend = 0;
#pragma omp simd reduction(+ : below, density, bend)
    for (int64_t k = 0; k < of->count; k++) {
        double a = (y - means[k]) * inverse[k], power = decay(0.5 * a * a), tail = tail_of(fabs(a), power);
        double term = weights[k] * inverse[k] * power;
        below += weights[k] * (a < 0 ? tail : 1 - tail);
        density += term;
        bend += term * a * inverse[k];
    }
    return (struct place){below, NORMAL_DENSITY * density, bend / density};
}

/* The standard normal quantile of 0 < q < 1 to seven digits, by PPND7 of Wichura (1988), algorithm AS 241. */
static double rough_quantile(double q) {
    double centred = q - 0.5, r = 0.180625 - centred * centred;
    if (r >= 0)
        return centred * POLYNOMIAL(r, 3.3871327179, 50.434271938, 159.29113202, 59.109374720) /
               POLYNOMIAL(r, 1.0, 17.895169469, 78.757757664, 67.187563600);
    r = sqrt(-log(centred < 0 ? q : 1 - q));
    double found = r <= 5 ? POLYNOMIAL(r - 1.6, 1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103) /
                                POLYNOMIAL(r - 1.6, 1.0, 0.73700164250, 0.12021132975)
                          : POLYNOMIAL(r - 5, 6.6579051150, 3.0812263860, 0.42868294337, 0.017337203997) /
                                POLYNOMIAL(r - 5, 1.0, 0.24197894225, 0.012258202635);
    return centred < 0 ? -found : found;
}

/* Halley's step for g(y) = z with g = Phi^-1(F), and the slope g'; the next iterate is y minus the step:
 *
 *   d = (g - z) / g',    step = d / (1 - d g'' / (2 g')),    g' = p / phi(g),    g'' / g' = g g' + p' / p. */
struct halley {
    double step, slope;
};

static struct halley halley_at(struct place at, double excess, double z) {
    double part = excess / (NORMAL_DENSITY * exp(-0.5 * z * z));
    double difference = fabs(part) < SMALL_DIFFERENCE
                            ? part * POLYNOMIAL(part, 1.0, 0.5 * z, (1 + 2 * z * z) / 6)
                            : rough_quantile(at.below) - z;
    double g = z + difference, slope = at.density / (NORMAL_DENSITY * exp(-0.5 * g * g)), d = difference / slope;
    double divisor = 1 - 0.5 * d * (g * slope - at.bend);
    divisor = divisor > 2 ? 2 : divisor;
    return (struct halley){d / (divisor < 0.5 ? 0.5 : divisor), slope};
}

/* The root of F(y) = q, with z = Phi^-1(q); NaN if it is not found in 64 steps, as between point masses. It lies
 * between the smallest and the largest quantile of the components. Steps beyond the current bounds, and every second
 * step after the first eight, are replaced by bisections. */
static double mixture_root(const struct gaussians *of, double mean, double stddev, double q, double z) {
    double lower = INFINITY, upper = -INFINITY, narrowest = 0;
    for (int64_t k = 0; k < of->count; k++) {
        double own = of->means[k] + z / of->inverse[k];
        lower = own < lower ? own : lower;
        upper = own > upper ? own : upper;
        narrowest = of->inverse[k] > narrowest ? of->inverse[k] : narrowest;
    }
    lower -= ROUNDING * stddev, upper += ROUNDING * stddev;
    double y = mean + stddev * z;
    if (!(lower < y && y < upper)) y = lower + 0.5 * (upper - lower);
    for (int number = 0; number < MOST_STEPS && isfinite(y); number++) {
        struct place at = place_at(of, y);
        double excess = at.below - q;
        if (excess < 0) lower = y;
        else upper = y;
        struct halley by = halley_at(at, excess, z);
        double ratio = by.step * narrowest, next = y - by.step;
        if (fabs(by.step) * ratio * ratio * by.slope <= STEP_ERROR && lower <= next && next <= upper) return next;
        int free = lower < next && next < upper && (number < FREE_STEPS || number % 2);
        y = free ? next : lower + 0.5 * (upper - lower);
    }
    return NAN;
}

/* 1 / stddev of the components of one row. */
int64_t KERNEL(mixture_workspace)(int64_t count, int64_t levels) {
    (void)levels;
    struct room space = {NULL, 0};
    take_doubles(&space, count);
    return space.used;
}

void KERNEL(mixture_quantiles)(int64_t rows, int64_t count, int64_t levels, int64_t step, const double *means,
                               const double *variances, const double *weights, const double *mean, const double *stddev,
                               const double *q, const double *standard, double *roots, float *workspace) {
    struct room space = {workspace, 0};
    double *inverse = take_doubles(&space, count);
    for (int64_t row = 0; row < rows; row++, means += count, variances += count, weights += step) {
#pragma omp simd
        for (int64_t k = 0; k < count; k++) inverse[k] = 1 / sqrt(variances[k]);
        struct gaussians of = {count, means, inverse, weights};
        for (int64_t l = 0; l < levels; l++)
            roots[row * levels + l] = mixture_root(&of, mean[row], stddev[row], q[l], standard[l]);
    }
}
