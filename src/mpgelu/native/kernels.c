/* Fused float32 loops for the rules with a nonlinearity.
 *
 * Every function works on contiguous arrays of `rows` independent rows. Loops carry no branch on data, so that the
 * compiler turns them into vector instructions. A comparison keeps its second branch for NaN, which therefore stays
 * NaN and is seen by whoever checks the loss. The plain torch rules are the reference for every formula.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#define LARGEST_RATIO 13.02586233f        /* |m / s| beyond which both tails are zero */
#define SMALLEST_TAIL 1.175494351e-37f    /* what is below counts as zero: keeps away from denormal numbers */
#define SMALLEST_VARIANCE 3.569976931e-29f
#define LOWEST_EXPONENT -60.0f
#define LARGEST_CORRELATION 0.9999999f    /* where the slope of the DVI formula is cut off; it is infinite at 1 */
#define INVERSE_2PI 0.1591549431f

/* Horner's rule; the coefficients start with the constant. */
#define POLYNOMIAL(x, ...) polynomial(x, (const float[]){__VA_ARGS__}, sizeof((const float[]){__VA_ARGS__}) / 4)

INLINE float polynomial(float x, const float *coefficients, int count) {
    float value = coefficients[count - 1];
#pragma GCC unroll 16
    for (int k = count - 2; k >= 0; k--) value = value * x + coefficients[k];
    return value;
}

/* exp(x) for -87 < x < 88: 2^n exp(x - n ln 2). */
INLINE float exponential(float x) {
    float n = rintf(x * 1.44269504f);
    float rest = x - n * 0.693147181f;
    float value = POLYNOMIAL(rest, 1.000000072f, 9.999996917e-01f, 4.999889455e-01f, 1.666757565e-01f, 4.191541724e-02f,
                             8.297605925e-03f);
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
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

/* m / s, bounded; without a variance its limit. */
INLINE float standardised(float mean, float variance) {
    float limit = mean > 0 ? LARGEST_RATIO : mean < 0 ? -LARGEST_RATIO : mean;
    float ratio = clamp(mean / standard_deviation(variance), LARGEST_RATIO);
    return variance < SMALLEST_VARIANCE ? limit : ratio;
}

INLINE float is_positive(float variance) { return variance < SMALLEST_VARIANCE ? 0.0f : 1.0f; }

/* ---- MP-GELU: k = Phi(m / s) ---- */

/* k, k m, k (1 - k)(v + m^2) */
void mpgelu_mask(int64_t count, const float *restrict mean, const float *restrict variance, float *restrict keep,
                 float *restrict mean_after, float *restrict added) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float m = mean[i], v = variance[i];
        struct normal p = standard_normal(standardised(m, v));
        keep[i] = p.below;
        mean_after[i] = p.below * m;
        added[i] = p.below * p.above * v + (p.below * m) * (p.above * m);
    }
}

/* dk/dm = phi / s and dk/dv = -phi a / (2 v); what multiplies dk is gathered with phi in it, so that the zero of a
 * far tail meets no overflow. */
void mpgelu_mask_backward(int64_t count, const float *restrict mean, const float *restrict variance,
                          const float *restrict grad_keep, const float *restrict grad_mean,
                          const float *restrict grad_added, float *restrict by_mean, float *restrict by_variance) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float m = mean[i], v = variance[i], s = standard_deviation(v);
        float a = standardised(m, v);
        struct normal p = standard_normal(a);
        float noise = p.below * p.above, slope = p.density * m;
        float by_keep = p.density * grad_keep[i] + slope * grad_mean[i] +
                        (p.above - p.below) * (p.density * v + slope * m) * grad_added[i];
        by_mean[i] = by_keep / s + p.below * grad_mean[i] + 2 * noise * m * grad_added[i];
        by_variance[i] = -0.5f * is_positive(v) * (by_keep / s) * (a / s) + noise * grad_added[i];
    }
}

/* k m, k v + k (1 - k) m^2 */
void mpgelu_diagonal(int64_t count, const float *restrict mean, const float *restrict variance,
                     float *restrict mean_after, float *restrict variance_after) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float m = mean[i], v = variance[i];
        struct normal p = standard_normal(standardised(m, v));
        mean_after[i] = p.below * m;
        variance_after[i] = p.below * v + (p.below * m) * (p.above * m);
    }
}

void mpgelu_diagonal_backward(int64_t count, const float *restrict mean, const float *restrict variance,
                              const float *restrict grad_mean, const float *restrict grad_variance,
                              float *restrict by_mean, float *restrict by_variance) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float m = mean[i], v = variance[i], s = standard_deviation(v);
        float a = standardised(m, v);
        struct normal p = standard_normal(a);
        float slope = p.density * m;
        float by_keep = slope * grad_mean[i] + (p.density * v + (p.above - p.below) * slope * m) * grad_variance[i];
        by_mean[i] = by_keep / s + p.below * grad_mean[i] + 2 * p.below * p.above * m * grad_variance[i];
        by_variance[i] = -0.5f * is_positive(v) * (by_keep / s) * (a / s) + p.below * grad_variance[i];
    }
}

/* ---- Marginal variance of per-row blocks: sum_r variance_r factor_ri^2 ---- */

void contract(int64_t rows, int64_t rank, int64_t n, const float *restrict variance, const float *restrict factor,
              float *restrict marginal) {
    for (int64_t row = 0; row < rows; row++, variance += rank, factor += rank * n, marginal += n) {
        memset(marginal, 0, n * sizeof(float));
        for (int64_t r = 0; r < rank; r++) {
            float v = variance[r];
            const float *f = factor + r * n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) marginal[i] += v * f[i] * f[i];
        }
    }
}

void contract_backward(int64_t rows, int64_t rank, int64_t n, const float *restrict variance,
                       const float *restrict factor, const float *restrict grad, float *restrict by_variance,
                       float *restrict by_factor) {
    for (int64_t row = 0; row < rows; row++, variance += rank, by_variance += rank, grad += n)
        for (int64_t r = 0; r < rank; r++, factor += n, by_factor += n) {
            float twice = 2 * variance[r], sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < n; i++) {
                float part = grad[i] * factor[i];
                sum += part * factor[i];
                by_factor[i] = twice * part;
            }
            by_variance[r] = sum;
        }
}

/* ---- Covariance of per-row blocks with few units: sum_r variance_r factor_ri factor_rj ---- */

void gram(int64_t rows, int64_t rank, int64_t n, const float *restrict variance, const float *restrict factor,
          float *restrict covariance) {
    for (int64_t row = 0; row < rows; row++, variance += rank, factor += rank * n, covariance += n * n)
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = i; j < n; j++) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t r = 0; r < rank; r++) sum += variance[r] * factor[r * n + i] * factor[r * n + j];
                covariance[i * n + j] = covariance[j * n + i] = sum;
            }
}

void gram_backward(int64_t rows, int64_t rank, int64_t n, const float *restrict variance,
                   const float *restrict factor, const float *restrict grad, float *restrict by_variance,
                   float *restrict by_factor) {
    for (int64_t row = 0; row < rows; row++, variance += rank, by_variance += rank, grad += n * n)
        for (int64_t r = 0; r < rank; r++, factor += n, by_factor += n) {
            float sum = 0;
            for (int64_t i = 0; i < n; i++) {
                float both = 0;
                for (int64_t j = 0; j < n; j++) both += (grad[i * n + j] + grad[j * n + i]) * factor[j];
                by_factor[i] = variance[r] * both;
                sum += 0.5f * both * factor[i];
            }
            by_variance[r] = sum;
        }
}

/* ---- Small matrix products of each row: left (a, n) times right (b, n) transposed ---- */

void products(int64_t rows, int64_t a, int64_t b, int64_t n, const float *restrict left, const float *restrict right,
              float *restrict product) {
    for (int64_t row = 0; row < rows; row++, right += b * n)
        for (int64_t r = 0; r < a; r++, left += n)
            for (int64_t p = 0; p < b; p++) {
                const float *other = right + p * n;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < n; i++) sum += left[i] * other[i];
                *product++ = sum;
            }
}

void products_backward(int64_t rows, int64_t a, int64_t b, int64_t n, const float *restrict left,
                       const float *restrict right, const float *restrict grad, float *restrict by_left,
                       float *restrict by_right) {
    for (int64_t row = 0; row < rows; row++, right += b * n, by_right += b * n) {
        memset(by_right, 0, b * n * sizeof(float));
        for (int64_t r = 0; r < a; r++, left += n, by_left += n, grad += b) {
            memset(by_left, 0, n * sizeof(float));
            for (int64_t p = 0; p < b; p++) {
                float g = grad[p];
                const float *other = right + p * n;
                float *by_other = by_right + p * n;
#pragma omp simd
                for (int64_t i = 0; i < n; i++) {
                    by_left[i] += g * other[i];
                    by_other[i] += g * left[i];
                }
            }
        }
    }
}

/* ---- ReLU: marginals ---- */

/* SR(a) = phi + a Phi = SR(-|a|) + max(a, 0);  mean s SR(a);  variance v F(a), F = Phi - SR(a) SR(-a),
 * F' = 2 SR(a) (1 - Phi) */
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

void relu_diagonal(int64_t count, const float *restrict mean, const float *restrict variance,
                   float *restrict mean_after, float *restrict variance_after) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        struct marginal u = rectify(mean[i], variance[i]);
        mean_after[i] = rectified_mean(u, mean[i], variance[i]);
        variance_after[i] = variance[i] * u.variance;
    }
}

void relu_diagonal_backward(int64_t count, const float *restrict mean, const float *restrict variance,
                            const float *restrict grad_mean, const float *restrict grad_variance,
                            float *restrict by_mean, float *restrict by_variance) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        struct marginal u = rectify(mean[i], variance[i]);
        by_mean[i] = u.below * grad_mean[i] + variance[i] / u.stddev * u.slope * grad_variance[i];
        by_variance[i] = u.variance * grad_variance[i] +
                         0.5f * is_positive(variance[i]) *
                             (u.density / u.stddev * grad_mean[i] - u.ratio * u.slope * grad_variance[i]);
    }
}

/* ---- ReLU: covariance f(a1, a2, r) of two units of variance one ---- */

struct unit {
    float ratio, density, below;
};

struct pair {
    float value, by_first, by_second, by_correlation;
};

/* Functions of the correlation are smooth in u = tan(asin(r) / 2) = r / (1 + sqrt(1 - r^2)): polynomials in u^2. */
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

/* DVI: r (Phi1 Phi2 + g E / (2 pi)), E = exp(e1 (a1^2 + a2^2) + e2 a1 a2), with g = asin(r) - u, e1 = -u / (2 g),
 * e2 = (asin(r) - r) / (r g). */
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

/* Price's theorem: r Phi1 Phi2 + 1/(2 pi) int_0^asin(r) (r - sin t) exp(-(a1^2 + a2^2 - 2 a1 a2 sin t)/(2 cos^2 t)) dt
 * by Gauss-Legendre; df/dr is the probability that both are positive. */
INLINE struct pair exact(struct unit one, struct unit two, float r) {
    static const float nodes[] = {0.019855072f, 0.101666761f, 0.237233795f, 0.408282679f,
                                  0.591717321f, 0.762766205f, 0.898333239f, 0.980144928f};
    static const float weights[] = {0.050614268f, 0.111190517f, 0.156853323f, 0.181341892f,
                                    0.181341892f, 0.156853323f, 0.111190517f, 0.050614268f};
    struct angle t = half_angle(r);
    float angle = t.half_tangent * (1 + height(t.square));
    float squares = one.ratio * one.ratio + two.ratio * two.ratio, product = one.ratio * two.ratio;
    float covariance = 0, both = 0;
#pragma GCC unroll 8
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

typedef struct pair pair_rule(struct unit, struct unit, float);

/* ---- ReLU: full covariance. Eight rows are treated at once, so that a vector holds one pair of eight rows. ---- */

#define LANES 8

typedef float vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define ODD(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define FRONT(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define BACK(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15)

/* The 8 x 8 transpose of lines that start at from[0..7], into lines that start at to[0..7]. */
INLINE void transpose(const float *const *from, float *const *to) {
    vector r[8], t[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) r[k] = *(const vector *)from[k];
#pragma GCC unroll 4
    for (int k = 0; k < 8; k += 2) t[k] = LOW(r[k], r[k + 1]), t[k + 1] = HIGH(r[k], r[k + 1]);
#pragma GCC unroll 2
    for (int k = 0; k < 8; k += 4) {
        r[k] = EVEN(t[k], t[k + 2]), r[k + 1] = ODD(t[k], t[k + 2]);
        r[k + 2] = EVEN(t[k + 1], t[k + 3]), r[k + 3] = ODD(t[k + 1], t[k + 3]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        *(vector *)to[k] = FRONT(r[k], r[k + 4]);
        *(vector *)to[k + 4] = BACK(r[k], r[k + 4]);
    }
}

/* tile[j][lane] = source[lane][j] for j < count; lanes beyond the last row repeat it. */
static void load(float *restrict tile, const float *restrict source, int64_t count, int64_t lanes) {
    const float *from[LANES];
    for (int l = 0; l < LANES; l++) from[l] = source + (l < lanes ? l : lanes - 1) * count;
    int64_t j = 0;
    for (; j + 8 <= count; j += 8) {
        float *to[8];
        for (int k = 0; k < 8; k++) to[k] = tile + (j + k) * LANES;
        transpose(from, to);
        for (int l = 0; l < LANES; l++) from[l] += 8;
    }
    for (int k = 0; k < count - j; k++)
        for (int l = 0; l < LANES; l++) tile[(j + k) * LANES + l] = from[l][k];
}

static void store(const float *restrict tile, float *restrict target, int64_t count, int64_t lanes) {
    int64_t j = 0;
    for (; lanes == LANES && j + 8 <= count; j += 8) {
        const float *from[8];
        float *to[LANES];
        for (int k = 0; k < 8; k++) from[k] = tile + (j + k) * LANES, to[k] = target + k * count + j;
        transpose(from, to);
    }
    for (; j < count; j++)
        for (int l = 0; l < lanes; l++) target[l * count + j] = tile[j * LANES + l];
}

/* Tiles (n, LANES) and matrices of tiles (n, n, LANES) in a workspace of 10 n + 2 n n times LANES. */
struct workspace {
    float *ratio, *stddev, *density, *below, *mean, *variance, *by_mean, *by_stddev, *grad_mean, *grad_variance,
        *covariance, *grad;
};

INLINE struct workspace split(float *start, int64_t n) {
    float *tile[11];
    for (int k = 0; k < 11; k++) tile[k] = start + k * n * LANES;
    return (struct workspace){tile[0], tile[1], tile[2], tile[3], tile[4],  tile[5],
                              tile[6], tile[7], tile[8], tile[9], tile[10], tile[10] + n * n * LANES};
}

INLINE struct unit unit_at(struct workspace w, int64_t k) {
    return (struct unit){w.ratio[k], w.density[k], w.below[k]};
}

INLINE void copy_diagonal(float *restrict to, int64_t to_step, const float *restrict from, int64_t from_step,
                          int64_t n) {
    for (int64_t i = 0; i < n; i++) memcpy(to + i * to_step * LANES, from + i * from_step * LANES, LANES * 4);
}

/* c_ij = s_i s_j f(a_i, a_j, C_ij / (s_i s_j)), in place of w.mean and w.covariance */
INLINE void relu_tile(int64_t n, struct workspace w, pair_rule *rule) {
    copy_diagonal(w.variance, 1, w.covariance, n + 1, n);
#pragma omp simd
    for (int64_t k = 0; k < n * LANES; k++) {
        struct marginal x = rectify(w.mean[k], w.variance[k]);
        w.ratio[k] = x.ratio, w.stddev[k] = x.stddev, w.density[k] = x.density, w.below[k] = x.below;
        w.mean[k] = rectified_mean(x, w.mean[k], w.variance[k]);
        w.variance[k] *= x.variance;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = i + 1; j < n; j++) {
            float *upper = w.covariance + (i * n + j) * LANES, *lower = w.covariance + (j * n + i) * LANES;
#pragma omp simd
            for (int64_t l = 0; l < LANES; l++) {
                int64_t one = i * LANES + l, two = j * LANES + l;
                float scale = w.stddev[one] * w.stddev[two], correlation = clamp(upper[l] / scale, 1);
                upper[l] = lower[l] = scale * rule(unit_at(w, one), unit_at(w, two), correlation).value;
            }
        }
    copy_diagonal(w.covariance, n + 1, w.variance, 1, n);
}

/* With c = s1 s2 f: dc/dC = f_r, dc/ds1 = s2 (f - r f_r), dc/dm1 = s2 f_1; a correlation that was clamped is constant.
 * A pair's gradient is shared evenly by C_ij and C_ji. From w.grad_mean and w.grad, in place of w.mean and
 * w.covariance. */
INLINE void relu_tile_backward(int64_t n, struct workspace w, pair_rule *rule) {
    copy_diagonal(w.variance, 1, w.covariance, n + 1, n);
#pragma omp simd
    for (int64_t k = 0; k < n * LANES; k++) {
        struct marginal x = rectify(w.mean[k], w.variance[k]);
        w.ratio[k] = x.ratio, w.stddev[k] = x.stddev, w.density[k] = x.density, w.below[k] = x.below;
        w.by_mean[k] = w.by_stddev[k] = 0;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = i + 1; j < n; j++) {
            int64_t above = (i * n + j) * LANES, beneath = (j * n + i) * LANES;
#pragma omp simd
            for (int64_t l = 0; l < LANES; l++) {
                int64_t one = i * LANES + l, two = j * LANES + l;
                float s1 = w.stddev[one], s2 = w.stddev[two], g = w.grad[above + l] + w.grad[beneath + l];
                float correlation = w.covariance[above + l] / (s1 * s2), r = clamp(correlation, 1);
                struct pair f = rule(unit_at(w, one), unit_at(w, two), r);
                float by_correlation = correlation == r ? f.by_correlation : 0;
                float by_scale = g * (f.value - r * by_correlation);
                w.covariance[above + l] = w.covariance[beneath + l] = 0.5f * g * by_correlation;
                w.by_mean[one] += g * s2 * f.by_first;
                w.by_mean[two] += g * s1 * f.by_second;
                w.by_stddev[one] += s2 * by_scale;
                w.by_stddev[two] += s1 * by_scale;
            }
        }
    copy_diagonal(w.grad_variance, 1, w.grad, n + 1, n);
#pragma omp simd
    for (int64_t k = 0; k < n * LANES; k++) {
        float m = w.mean[k], v = w.variance[k];
        struct marginal x = rectify(m, v);
        float pairs = fabsf(x.ratio) < LARGEST_RATIO ? w.by_mean[k] : 0;
        w.mean[k] = x.below * w.grad_mean[k] + v / x.stddev * x.slope * w.grad_variance[k] + pairs;
        w.variance[k] = x.variance * w.grad_variance[k] +
                        0.5f * is_positive(v) *
                            ((x.density * w.grad_mean[k] + w.by_stddev[k] - x.ratio * pairs) / x.stddev -
                             x.ratio * x.slope * w.grad_variance[k]);
    }
    copy_diagonal(w.covariance, n + 1, w.variance, 1, n);
}

typedef void tile_rule(int64_t n, struct workspace w);

static void relu_full(int64_t rows, int64_t n, const float *mean, const float *covariance, float *mean_after,
                      float *covariance_after, float *start, tile_rule *rule) {
    struct workspace w = split(start, n);
    for (int64_t row = 0; row < rows; row += LANES) {
        int64_t lanes = rows - row < LANES ? rows - row : LANES;
        load(w.mean, mean + row * n, n, lanes);
        load(w.covariance, covariance + row * n * n, n * n, lanes);
        rule(n, w);
        store(w.mean, mean_after + row * n, n, lanes);
        store(w.covariance, covariance_after + row * n * n, n * n, lanes);
    }
}

static void relu_full_backward(int64_t rows, int64_t n, const float *mean, const float *covariance,
                               const float *grad_mean, const float *grad_covariance, float *by_mean,
                               float *by_covariance, float *start, tile_rule *rule) {
    struct workspace w = split(start, n);
    for (int64_t row = 0; row < rows; row += LANES) {
        int64_t lanes = rows - row < LANES ? rows - row : LANES;
        load(w.mean, mean + row * n, n, lanes);
        load(w.covariance, covariance + row * n * n, n * n, lanes);
        load(w.grad_mean, grad_mean + row * n, n, lanes);
        load(w.grad, grad_covariance + row * n * n, n * n, lanes);
        rule(n, w);
        store(w.mean, by_mean + row * n, n, lanes);
        store(w.covariance, by_covariance + row * n * n, n * n, lanes);
    }
}

#define RELU_FULL(name)                                                                                              \
    static void relu_tile_##name(int64_t n, struct workspace w) { relu_tile(n, w, name); }                           \
    static void relu_tile_##name##_backward(int64_t n, struct workspace w) { relu_tile_backward(n, w, name); }       \
    void relu_full_##name(int64_t rows, int64_t n, const float *mean, const float *covariance, float *mean_after,    \
                          float *covariance_after, float *workspace) {                                               \
        relu_full(rows, n, mean, covariance, mean_after, covariance_after, workspace, relu_tile_##name);             \
    }                                                                                                                \
    void relu_full_##name##_backward(int64_t rows, int64_t n, const float *mean, const float *covariance,            \
                                     const float *grad_mean, const float *grad_covariance, float *by_mean,           \
                                     float *by_covariance, float *workspace) {                                       \
        relu_full_backward(rows, n, mean, covariance, grad_mean, grad_covariance, by_mean, by_covariance, workspace, \
                           relu_tile_##name##_backward);                                                             \
    }

RELU_FULL(dvi)
RELU_FULL(exact)
