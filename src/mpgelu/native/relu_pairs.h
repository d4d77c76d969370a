/* The covariance f(a1, a2, r) of max(x1, 0) and max(x2, 0) for Gaussian x1, x2 with means a1, a2, variances one and
 * correlation r, with its derivatives: exact to the error of quadrature, and the DVI approximation. The torch forms are
 * in rules/relu_pairs.py. */
#ifndef MPGELU_RELU_PAIRS_H
#define MPGELU_RELU_PAIRS_H

#include "normal.h"

#define LOWEST_EXPONENT -60.0f
#define LARGEST_CORRELATION 0.9999999f /* where the slope of the DVI formula is cut off; it is infinite at 1 */
#define INVERSE_2PI 0.1591549431f

/* The mean a of a unit, phi(a) and Phi(a). */
struct unit {
    float ratio, density, below;
};

/* f and its derivatives by a1, a2 and r. */
struct pair {
    float value, by_first, by_second, by_correlation;
};

/* The functions of r below have infinite slopes at |r| = 1, but are smooth in u = tan(asin(r) / 2)
 * = r / (1 + sqrt(1 - r^2)), and are approximated by polynomials in u^2. */
struct angle {
    float cosine, half_tangent, square;
};

INLINE struct angle half_angle(float r) {
    float cosine = sqrtf((1 - r) * (1 + r)), u = r / (1 + cosine);
    return (struct angle){cosine, u, u * u};
}

/* (asin(r) - u) / u */
INLINE float height(float square) {
    return POLYNOMIAL(square, 9.999999651e-01f, -6.666609067e-01f, 3.998407308e-01f, -2.839803084e-01f, 2.124571148e-01f,
                      -1.493183294e-01f, 8.447967149e-02f, -3.158330617e-02f, 5.561715176e-03f);
}

/* The DVI approximation (error up to 1.2e-2): f = r (Phi1 Phi2 + g E / (2 pi)), E = exp(e1 (a1^2 + a2^2) + e2 a1 a2),
 * with g = asin(r) - u, e1 = -u / (2 g), e2 = (asin(r) - r) / (r g). */
INLINE struct pair dvi(struct unit one, struct unit two, float r) {
    struct angle t = half_angle(r);
    float e1 = POLYNOMIAL(t.square, -5.000000051e-01f, -3.333325674e-01f, -2.224077548e-02f, -2.416644087e-02f,
                          7.731160822e-03f, -5.591315973e-03f, 2.055397326e-03f, -4.246592440e-04f);
    float e2 = t.half_tangent * POLYNOMIAL(t.square, 6.666666767e-01f, 3.111096391e-01f, -2.081267349e-03f,
                                           3.255242106e-02f, -1.480018372e-02f, 9.476685492e-03f, -3.651554478e-03f,
                                           7.275983007e-04f);
    float g = t.half_tangent * height(t.square);
    float squares = one.ratio * one.ratio + two.ratio * two.ratio, product = one.ratio * two.ratio;
    float exponent = e1 * squares + e2 * product;
    float weight = INVERSE_2PI * exponential(exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT : exponent);
    float both = one.below * two.below + g * weight;
    /* Derivatives of e1 and e2 by u, then du/dr = 1 / (cos (1 + cos)). */
    float d1 = t.half_tangent * POLYNOMIAL(t.square, -6.666666002e-01f, -8.889847566e-02f, -1.458042960e-01f,
                                           6.620017352e-02f, -6.780867515e-02f, 4.188854318e-02f, -1.852955327e-02f,
                                           3.649773961e-03f);
    float d2 = POLYNOMIAL(t.square, 6.666667635e-01f, 9.333178975e-01f, -1.018762030e-02f, 2.262908007e-01f,
                          -1.279241251e-01f, 9.534450234e-02f, -4.014231771e-02f, 8.572747322e-03f);
    float bend = (t.cosine + g * (d1 * squares + d2 * product)) / (t.cosine * (1 + t.cosine));
    bend = fabsf(r) > LARGEST_CORRELATION ? 0 : bend;
    float tail = r * weight * g;
    return (struct pair){r * both, r * one.density * two.below + tail * (2 * e1 * one.ratio + e2 * two.ratio),
                         r * two.density * one.below + tail * (2 * e1 * two.ratio + e2 * one.ratio),
                         both + r * weight * bend};
}

/* Price's theorem: f = r Phi1 Phi2
 *   + 1/(2 pi) int_0^asin(r) (r - sin t) exp(-(a1^2 + a2^2 - 2 a1 a2 sin t) / (2 cos^2 t)) dt,
 * by 8 Gauss-Legendre nodes (error 2e-6). df/dr is the probability that both units are positive. */
INLINE struct pair exact(struct unit one, struct unit two, float r) {
    static const float nodes[] = {0.019855072f, 0.101666761f, 0.237233795f, 0.408282679f,
                                  0.591717321f, 0.762766205f, 0.898333239f, 0.980144928f};
    static const float weights[] = {0.050614268f, 0.111190517f, 0.156853323f, 0.181341892f,
                                    0.181341892f, 0.156853323f, 0.111190517f, 0.050614268f};
    struct angle t = half_angle(r);
    float angle = t.half_tangent * (1 + height(t.square));
    float squares = one.ratio * one.ratio + two.ratio * two.ratio, product = one.ratio * two.ratio;
    float covariance = 0, both = 0;
    UNROLL
    for (int k = 0; k < 8; k++) {
        float x = angle * nodes[k], xx = x * x;
        float sine = x * POLYNOMIAL(xx, 9.999999947e-01f, -1.666665668e-01f, 8.333025138e-03f, -1.980741866e-04f,
                                    2.601902933e-06f);
        float exponent = (product * sine - 0.5f * squares) / (1 - sine * sine);
        float density = weights[k] * exponential(exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT : exponent);
        covariance += (r - sine) * density;
        both += density;
    }
    angle *= INVERSE_2PI;
    float independent = one.below * two.below;
    both = independent + angle * both;
    /* E[1(x1 > 0) x2+] = a2 P(both) + phi(a2) Phi(b1) + r phi(a1) Phi(b2) */
    float cosine = t.cosine < 1e-6f ? 1e-6f : t.cosine;
    float t1 = two.density * standard_normal(clamp((one.ratio - r * two.ratio) / cosine, 10)).below;
    float t2 = one.density * standard_normal(clamp((two.ratio - r * one.ratio) / cosine, 10)).below;
    return (struct pair){r * independent + angle * covariance,
                         two.ratio * both + t1 + r * t2 - one.below * (two.density + two.ratio * two.below),
                         one.ratio * both + t2 + r * t1 - two.below * (one.density + one.ratio * one.below), both};
}

#endif
