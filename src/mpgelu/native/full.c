/* Full covariance matrices through ReLU networks.
 *
 *   mask           m <- g m,        C <- g^2 C + n diag(v + m^2),   v = diag C
 *   linear map     m <- W m + b,    C <- W C W^T
 *   ReLU           m <- s SR(a),    C_ij <- s_i s_j f(a_i, a_j, C_ij / (s_i s_j)),   a = m / s, s = sqrt v
 *
 * with the function f of pairs in relu_pairs.h, exact to quadrature error or the DVI approximation; the diagonal of C
 * after ReLU is the exact variance.
 *
 * LANES rows are processed together from input to output: every entry is a vector with the entries of LANES rows, so
 * that intermediate results stay in the cache and a product of weights and covariances has n LANES columns. The
 * backward pass evaluates the forward pass again, which takes less time than reading its results from memory.
 */
#include "products.h"
#include "relu_pairs.h"

/* C = W B, or W^T B with exchanged strides, for a symmetric result C (n x n): the upper triangle is computed in pairs
 * of columns, and copied to the lower one. */
static void multiply_symmetric(int64_t n, int64_t k, const float *w, int64_t w_row, int64_t w_column, const float *b,
                               float *c) {
    int64_t width = n * LANES;
    memset(c, 0, sizeof(float) * n * width);
    for (int64_t j = 0; j < n; j += 2)
        column(j + 2 < n ? j + 2 : n, width, k, w, w_row, w_column, b + j * LANES, c + j * LANES,
               j + 2 <= n ? wide_tiles : narrow_tiles);
    for (int64_t i = 1; i < n; i++)
        for (int64_t j = 0; j < i; j++)
            *(vector *)(c + i * width + j * LANES) = *(const vector *)(c + j * width + i * LANES);
}

/* The transpose (n, m) of a matrix (m, n) of vectors. */
static void transpose_tiles(int64_t m, int64_t n, const float *from, float *to) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            *(vector *)(to + (j * m + i) * LANES) = *(const vector *)(from + (i * n + j) * LANES);
}

/* One linear map with its masked input and its output, for LANES rows. The inputs of the network are independent, so
 * that the covariance before the first map consists of the variances only. */
struct linear {
    int64_t before, after;
    const float *weight, *bias;
    float gain, noise;
    float *mean, *covariance, *mean_after, *covariance_after;
};

/* The workspace for LANES rows of one network; no array has the square of the number of inputs as its size. The arrays
 * of the first line are (widest, LANES), except `grad`, (widest, widest, LANES). `mean` and `covariance` point to those
 * of the layer in work. `sums` are the gradients of the parameters, not yet summed over lanes. */
struct full_room {
    float *ratio, *stddev, *density, *below, *variance, *by_mean, *by_stddev, *grad_mean, *grad_variance, *grad;
    float *mean, *covariance;
    float *product, *transposed, *sums;
};

/* Divides the workspace, and returns its size in floats; with `workspace` NULL it only counts. */
static int64_t arrange_full(int64_t layers, const int64_t *widths, struct linear *linears, float *workspace,
                            struct full_room *w) {
    int64_t widest = 0, largest = 0;
    struct room space = {workspace, 0};
    for (int64_t l = 0; l < layers; l++) {
        int64_t before = widths[l], after = widths[l + 1];
        widest = larger(widest, after);
        largest = larger(largest, before * after);
        linears[l].before = before, linears[l].after = after;
        linears[l].mean = take(&space, before * LANES);
        linears[l].covariance = take(&space, (l == 0 ? 1 : before) * before * LANES);
        linears[l].mean_after = take(&space, after * LANES);
        linears[l].covariance_after = take(&space, after * after * LANES);
    }
    float **const vectors[] = {&w->ratio,   &w->stddev,    &w->density,   &w->below,        &w->variance,
                               &w->by_mean, &w->by_stddev, &w->grad_mean, &w->grad_variance};
    for (size_t k = 0; k < sizeof vectors / sizeof *vectors; k++) *vectors[k] = take(&space, widest * LANES);
    largest = larger(largest, widest * widest);
    w->grad = take(&space, widest * widest * LANES);
    w->product = take(&space, largest * LANES);
    w->transposed = take(&space, largest * LANES);
    w->sums = take(&space, parameter_count(layers, widths) * LANES);
    w->mean = w->covariance = NULL;
    return space.used;
}

int64_t KERNEL(full_workspace)(int64_t rows, int64_t layers, const int64_t *widths) {
    (void)rows;
    struct linear linears[layers];
    struct full_room room;
    return arrange_full(layers, widths, linears, NULL, &room);
}

int64_t KERNEL(full_kept)(int64_t rows, int64_t layers, const int64_t *widths) {
    (void)rows, (void)layers, (void)widths;
    return 0;
}

typedef struct pair pair_rule(struct unit, struct unit, float);

INLINE struct unit unit_at(struct full_room w, int64_t k) {
    return (struct unit){w.ratio[k], w.density[k], w.below[k]};
}

/* Copies n vectors with strides, such as the diagonal of an n x n matrix, whose stride is n + 1. */
INLINE void copy_diagonal(float *restrict to, int64_t to_step, const float *restrict from, int64_t from_step,
                          int64_t n) {
    for (int64_t i = 0; i < n; i++) memcpy(to + i * to_step * LANES, from + i * from_step * LANES, LANES * 4);
}

/* ReLU of w.mean (n) and w.covariance (n, n), in place. */
INLINE void relu_tile(int64_t n, struct full_room w, pair_rule *rule) {
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

/* The backward pass of `relu_tile`: from w.grad_mean and w.grad to gradients that replace w.mean and w.covariance. With
 * c = s1 s2 f(a1, a2, r) and r = C12 / (s1 s2):
 *
 *   dc/dC12 = f_r,    dc/ds1 = s2 (f - r f_r) at fixed a,    dc/dm1 = s2 f_1.
 *
 * A correlation that was clamped to [-1, 1] has no derivative. The gradient of a pair is divided equally between C12
 * and C21. */
INLINE void relu_tile_backward(int64_t n, struct full_room w, pair_rule *rule) {
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

typedef void tile_rule(int64_t n, struct full_room w);

static void relu_dvi(int64_t n, struct full_room w) { relu_tile(n, w, dvi); }
static void relu_exact(int64_t n, struct full_room w) { relu_tile(n, w, exact); }
static void relu_dvi_backward(int64_t n, struct full_room w) { relu_tile_backward(n, w, dvi); }
static void relu_exact_backward(int64_t n, struct full_room w) { relu_tile_backward(n, w, exact); }

static tile_rule *const forward_rules[] = {[RELU_DVI] = relu_dvi, [RELU_EXACT] = relu_exact};
static tile_rule *const backward_rules[] = {[RELU_DVI] = relu_dvi_backward, [RELU_EXACT] = relu_exact_backward};

/* Sets parameters and masks of all layers of one network; for the layout see `set_diagonal`. */
static void set_parameters(int64_t layers, struct linear *linears, const float *parameters, const float *gains,
                           const float *noises) {
    for (int64_t l = 0; l < layers; l++) {
        struct linear *linear = &linears[l];
        linear->weight = parameters, linear->bias = parameters + linear->after * linear->before;
        linear->gain = gains[l], linear->noise = noises[l];
        parameters = linear->bias + linear->after;
    }
}

/* The linear map: W m + b, and W C W^T as the product of W with (W C)^T. */
static void apply(const struct linear *linear, int first, struct full_room room) {
    int64_t before = linear->before, after = linear->after;
    for (int64_t o = 0; o < after; o++)
        for (int l = 0; l < LANES; l++) linear->mean_after[o * LANES + l] = linear->bias[o];
    multiply_add(after, LANES, before, linear->weight, before, 1, linear->mean, linear->mean_after);
    if (first) {
        for (int64_t i = 0; i < before; i++)
            for (int64_t o = 0; o < after; o++)
                *(vector *)(room.transposed + (i * after + o) * LANES) =
                    linear->weight[o * before + i] * *(const vector *)(linear->covariance + i * LANES);
    } else {
        multiply(after, before, before, linear->weight, before, 1, linear->covariance, room.product);
        transpose_tiles(after, before, room.product, room.transposed);
    }
    multiply_symmetric(after, before, linear->weight, before, 1, room.transposed, linear->covariance_after);
}

/* The forward pass of LANES rows, whose inputs are in mean and covariance of the first map. */
static void forward_tile(int64_t layers, int64_t nonlinearity, struct linear *linears, struct full_room room) {
    struct linear *first = &linears[0];
    mask(first->before * LANES, first->gain, first->noise, first->mean, first->covariance);
    for (int64_t l = 0;; l++) {
        struct linear *linear = &linears[l], *next = linear + 1;
        apply(linear, l == 0, room);
        if (l + 1 == layers) return;
        int64_t n = linear->after;
        memcpy(next->mean, linear->mean_after, sizeof(float) * n * LANES);
        memcpy(next->covariance, linear->covariance_after, sizeof(float) * n * n * LANES);
        struct full_room w = room;
        w.mean = next->mean, w.covariance = next->covariance;
        forward_rules[nonlinearity](n, w);
        for (int64_t i = 0; i < n; i++)
            for (int l = 0; l < LANES; l++) {
                float m = w.mean[i * LANES + l], v = w.covariance[i * (n + 1) * LANES + l];
                w.variance[i * LANES + l] = (next->gain * next->gain + next->noise) * v + next->noise * m * m;
            }
        for (int64_t i = 0; i < n * LANES; i++) w.mean[i] *= next->gain;
        for (int64_t i = 0; i < n * n * LANES; i++) w.covariance[i] *= next->gain * next->gain;
        copy_diagonal(w.covariance, n + 1, w.variance, 1, n);
    }
}

FORWARD(full_forward) {
    (void)keep, (void)kept;
    int64_t inputs = widths[0], outputs = widths[layers], size = parameter_count(layers, widths);
    struct linear linears[layers];
    struct full_room room;
    arrange_full(layers, widths, linears, workspace, &room);
    const struct linear *last = &linears[layers - 1];
    for (int64_t model = 0; model < models; model++) {
        set_parameters(layers, linears, parameters + model * size, gains + model * layers, noises + model * layers);
        for (int64_t start = 0; start < rows; start += LANES) {
            int64_t lanes = rows - start < LANES ? rows - start : LANES, row = model * rows + start;
            load(linears[0].mean, LANES, x_mean + row * inputs, inputs, lanes);
            load(linears[0].covariance, LANES, x_variance + row * inputs, inputs, lanes);
            forward_tile(layers, nonlinearity, linears, room);
            store(last->mean_after, LANES, y_mean + row * outputs, outputs, lanes);
            store(last->covariance_after, LANES, y_spread + row * outputs * outputs, outputs * outputs, lanes);
        }
    }
}

/* The backward pass of a linear map, from the gradients g = w.grad_mean and G = w.grad (symmetric) by its output:
 *
 *   by W = 2 G W C + g m^T,   by b = g,   by C = W^T G W,   by m = W^T g.
 *
 * Adds the gradients of the parameters to by_weight; those of the input replace w.grad_mean and w.grad, except for the
 * first map, whose inputs need none. */
static void backward_linear(const struct linear *linear, int first, struct full_room room, float *by_weight) {
    int64_t before = linear->before, after = linear->after;
    float *grad_mean = room.grad_mean, *grad = room.grad, *product = room.product;
    multiply(before, after, after, linear->weight, 1, before, grad, room.transposed);
    transpose_tiles(before, after, room.transposed, product); /* G W */
    const vector *g = (const vector *)grad_mean, *m = (const vector *)linear->mean;
    vector *by = (vector *)by_weight, *by_bias = by + after * before;
    for (int64_t o = 0; o < after; o++) {
        by_bias[o] += g[o];
        for (int64_t i = 0; i < before; i++) by[o * before + i] += g[o] * m[i];
    }
    if (first) {
        const vector *variance = (const vector *)linear->covariance, *half = (const vector *)product;
        for (int64_t o = 0; o < after; o++)
            for (int64_t i = 0; i < before; i++) by[o * before + i] += 2 * half[o * before + i] * variance[i];
        return;
    }
    memcpy(room.transposed, grad_mean, sizeof(float) * after * LANES);
    multiply(before, 1, after, linear->weight, 1, before, room.transposed, grad_mean);
    multiply_symmetric(before, after, linear->weight, 1, before, product, grad);
    for (int64_t i = 0; i < after * before * LANES; i++) product[i] *= 2;
    multiply_add_dots(after, before, before, (const vector *)product, (const vector *)linear->covariance, by); /* C = C^T */
}

BACKWARD(full_backward) {
    (void)kept;
    int64_t inputs = widths[0], outputs = widths[layers], size = parameter_count(layers, widths);
    struct linear linears[layers];
    struct full_room w;
    arrange_full(layers, widths, linears, workspace, &w);
    for (int64_t model = 0; model < models; model++) {
        set_parameters(layers, linears, parameters + model * size, gains + model * layers, noises + model * layers);
        memset(w.sums, 0, sizeof(float) * size * LANES);
        for (int64_t start = 0; start < rows; start += LANES) {
            int64_t lanes = rows - start < LANES ? rows - start : LANES, row = model * rows + start;
            load(linears[0].mean, LANES, x_mean + row * inputs, inputs, lanes);
            load(linears[0].covariance, LANES, x_variance + row * inputs, inputs, lanes);
            forward_tile(layers, nonlinearity, linears, w);
            load_gradient(w.grad_mean, LANES, grad_mean + row * outputs, outputs, lanes);
            load_gradient(w.grad, LANES, grad_spread + row * outputs * outputs, outputs * outputs, lanes);
            symmetrise(outputs, (vector *)w.grad);
            float *end = w.sums + size * LANES;
            for (int64_t l = layers - 1;; l--) {
                struct linear *linear = &linears[l], *previous = linear - 1;
                int64_t n = linear->before;
                end -= (n + 1) * linear->after * LANES;
                backward_linear(linear, l == 0, w, end);
                if (l == 0) break;
                float gain = linear->gain, noise = linear->noise;
                for (int64_t i = 0; i < n; i++)
                    for (int k = 0; k < LANES; k++) {
                        float *g = &w.grad[i * (n + 1) * LANES + k], m = linear->mean[i * LANES + k];
                        w.grad_mean[i * LANES + k] = gain * w.grad_mean[i * LANES + k] + 2 * noise / gain * m * *g;
                        w.variance[i * LANES + k] = (gain * gain + noise) * *g;
                    }
                for (int64_t i = 0; i < n * n * LANES; i++) w.grad[i] *= gain * gain;
                copy_diagonal(w.grad, n + 1, w.variance, 1, n);
                w.mean = previous->mean_after, w.covariance = previous->covariance_after;
                backward_rules[nonlinearity](n, w);
                memcpy(w.grad_mean, w.mean, sizeof(float) * n * LANES);
                memcpy(w.grad, w.covariance, sizeof(float) * n * n * LANES);
            }
        }
        const vector *sums = (const vector *)w.sums;
        for (int64_t i = 0; i < size; i++) by_parameters[model * size + i] = sum_of_lanes(&sums[i]);
    }
}
