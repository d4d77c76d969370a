/* Functions of the normal distribution, and the nonlinearities of one unit with the mask after them. Exponential,
 * density and tails are polynomials that compilers can vectorise; their errors are a few units of float32 rounding. */
#ifndef MPGELU_NORMAL_H
#define MPGELU_NORMAL_H

#include "kernels.h"

#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define LARGEST_RATIO 13.02586233f        /* bound of |m / s|, where the tails are zero in float32 */
#define SMALLEST_TAIL 1.175494351e-37f    /* smaller values are set to zero, to avoid slow denormal numbers */
#define SMALLEST_VARIANCE 3.569976931e-29f

/* Horner's rule for 2 to 14 coefficients, which start with the constant. It is written out by macros because clang does
 * not vectorise loops whose body contains an array or another loop. */
#define POLYNOMIAL(x, ...)                                                                                             \
    CHOSEN(__VA_ARGS__, HORNER_14, HORNER_13, HORNER_12, HORNER_11, HORNER_10, HORNER_9, HORNER_8, HORNER_7, HORNER_6, \
           HORNER_5, HORNER_4, HORNER_3, HORNER_2, )                                                                   \
    (x, __VA_ARGS__)
#define CHOSEN(a, b, c, d, e, f, g, h, i, j, k, l, m, n, chosen, ...) chosen
#define HORNER_1(x, a) (a)
#define HORNER_2(x, a, ...) ((a) + (x) * HORNER_1(x, __VA_ARGS__))
#define HORNER_3(x, a, ...) ((a) + (x) * HORNER_2(x, __VA_ARGS__))
#define HORNER_4(x, a, ...) ((a) + (x) * HORNER_3(x, __VA_ARGS__))
#define HORNER_5(x, a, ...) ((a) + (x) * HORNER_4(x, __VA_ARGS__))
#define HORNER_6(x, a, ...) ((a) + (x) * HORNER_5(x, __VA_ARGS__))
#define HORNER_7(x, a, ...) ((a) + (x) * HORNER_6(x, __VA_ARGS__))
#define HORNER_8(x, a, ...) ((a) + (x) * HORNER_7(x, __VA_ARGS__))
#define HORNER_9(x, a, ...) ((a) + (x) * HORNER_8(x, __VA_ARGS__))
#define HORNER_10(x, a, ...) ((a) + (x) * HORNER_9(x, __VA_ARGS__))
#define HORNER_11(x, a, ...) ((a) + (x) * HORNER_10(x, __VA_ARGS__))
#define HORNER_12(x, a, ...) ((a) + (x) * HORNER_11(x, __VA_ARGS__))
#define HORNER_13(x, a, ...) ((a) + (x) * HORNER_12(x, __VA_ARGS__))
#define HORNER_14(x, a, ...) ((a) + (x) * HORNER_13(x, __VA_ARGS__))

/* exp(x) for -87 < x < 88: 2^n exp(x - n ln 2). */
INLINE float exponential(float x) {
    float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 2^23: the sum is rounded to n, which is in its lowest bits */
    float n = shifted - 12582912.0f;
    float rest = x - n * 0.693147181f;
    float value = POLYNOMIAL(rest, 1.000000072f, 9.999996917e-01f, 4.999889455e-01f, 1.666757565e-01f, 4.191541724e-02f,
                             8.297605925e-03f);
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return value * power;
}

/* exp(-r) for r >= 0 in double precision; exp(-700) for larger r. */
INLINE double decay(double r) {
    double x = r > 700 ? -700 : -r;
    double shifted = x * 1.4426950408889634 + 6755399441055744.0; /* 1.5 2^52, as in `exponential` */
    double n = shifted - 6755399441055744.0;
    double rest = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
    double value = POLYNOMIAL(rest, 1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040,
                                     1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600,
                                     1.0 / 6227020800);
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return value * power;
}

/* Standard normal density, the probabilities below and above a, and the ramp SR(-|a|) = phi - |a| Phi(-|a|), each
 * accurate in its own tail. */
struct normal {
    float density, below, above, ramp;
};

INLINE struct normal standard_normal(float a) {
    float x = fabsf(a);
    float density = 0.3989422804f * exponential(-0.5f * x * x);
    density = density <= SMALLEST_TAIL ? 0 : density;
    /* Tail and ramp over density are polynomials in t = 1 / (1 + 0.3 |a|), times t and t^2. */
    float t = 1 / (1 + 0.3f * x);
    float tail = density * t * POLYNOMIAL(t, 3.000093157e-01f, 2.997353871e-01f, 2.762148369e-01f, 1.969550338e-01f,
                                          2.397622613e-01f, -1.968365316e-01f, 4.781490779e-01f, -5.701896695e-01f,
                                          2.810749698e-01f, -5.156054835e-02f);
    float ramp = density * t * t * POLYNOMIAL(t, 8.997233294e-02f, 1.804674895e-01f, 2.430706330e-01f, 2.637678352e-01f,
                                              2.751107654e-01f, -1.863642203e-01f, 7.888029856e-01f, -1.196420771e+00f,
                                              6.810379231e-01f, -1.394450141e-01f);
    tail = tail <= SMALLEST_TAIL ? 0 : tail;
    ramp = ramp <= SMALLEST_TAIL ? 0 : ramp;
    float rest = 1 - tail;
    return (struct normal){density, a < 0 ? tail : rest, a < 0 ? rest : tail, ramp};
}

INLINE float clamp(float x, float bound) {
    x = x > bound ? bound : x;
    return x < -bound ? -bound : x;
}

INLINE float standard_deviation(float variance) {
    return sqrtf(variance < SMALLEST_VARIANCE ? SMALLEST_VARIANCE : variance);
}

/* The ratio m / s, bounded; for a variance of zero its limit, the bound with the sign of m. */
INLINE float standardised(float mean, float variance) {
    float limit = mean > 0 ? LARGEST_RATIO : mean < 0 ? -LARGEST_RATIO : mean;
    float ratio = clamp(mean / standard_deviation(variance), LARGEST_RATIO);
    return variance < SMALLEST_VARIANCE ? limit : ratio;
}

INLINE float is_positive(float variance) { return variance < SMALLEST_VARIANCE ? 0.0f : 1.0f; }

/* ---- MP-GELU, k = Phi(m / s), and the mask after it ---- */

/* For a unit of mean m and variance v, MP-GELU and a mask of mean g and variance n give: `scale` g k, the factor of the
 * fluctuations; `mean` g k m; and `added` (g^2 k (1 - k) + n k)(v + m^2), the independent variance. The variance after
 * both is scale^2 v + added. */
struct gate {
    float scale, mean, added;
};

INLINE struct gate mpgelu(float m, float v, float gain, float noise) {
    struct normal p = standard_normal(standardised(m, v));
    float share = gain * gain * p.above + noise;
    return (struct gate){gain * p.below, gain * p.below * m, share * (p.below * v + (p.below * m) * m)};
}

/* Derivatives with respect to mean and variance. */
struct slopes {
    float mean, variance;
};

/* The gradient by m and v from those by scale, mean and added, with dk/dm = phi / s and dk/dv = -phi a / (2 v). The
 * factors of dk are multiplied by phi first, so that a tail of zero is not multiplied by an infinite number. */
INLINE struct slopes mpgelu_backward(float m, float v, float gain, float noise, float by_scale, float by_mean,
                                     float by_added) {
    float s = standard_deviation(v), a = standardised(m, v);
    struct normal p = standard_normal(a);
    float slope = p.density * m, g = gain * by_mean;
    float share = gain * gain * p.below * p.above + noise * p.below;
    float by_keep = slope * g + p.density * gain * by_scale +
                    (gain * gain * (p.above - p.below) + noise) * (p.density * v + slope * m) * by_added;
    return (struct slopes){by_keep / s + p.below * g + 2 * share * m * by_added,
                           -0.5f * is_positive(v) * (by_keep / s) * (a / s) + share * by_added};
}

/* ---- ReLU: marginals ---- */

/* With SR(a) = phi(a) + a Phi(a) = SR(-|a|) + max(a, 0): the mean after ReLU is s SR(a), the variance v F(a) with
 * F = Phi - SR(a) SR(-a) and F' = 2 SR(a) (1 - Phi). Here `ramp` is SR(-|a|), `variance` F and `slope` F'. */
struct marginal {
    float ratio, stddev, density, below, ramp, variance, slope;
};

INLINE struct marginal rectify(float m, float v) {
    float s = standard_deviation(v), a = standardised(m, v);
    struct normal p = standard_normal(a);
    float variance = p.below - p.ramp * (p.ramp + fabsf(a)), slope = 2 * p.above * (p.ramp + (a > 0 ? a : 0));
    return (struct marginal){a, s, p.density, p.below, p.ramp, variance, slope};
}

INLINE float rectified_mean(struct marginal u, float m, float v) {
    return (m > 0 ? m : 0) + (v > 0 ? u.stddev : 0) * u.ramp;
}

INLINE struct slopes relu_backward(float m, float v, float by_mean, float by_variance) {
    struct marginal u = rectify(m, v);
    return (struct slopes){
        u.below * by_mean + v / u.stddev * u.slope * by_variance,
        u.variance * by_variance +
            0.5f * is_positive(v) * (u.density / u.stddev * by_mean - u.ratio * u.slope * by_variance)};
}

#endif
