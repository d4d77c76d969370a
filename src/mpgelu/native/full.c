/* ReLU networks with full covariance matrices, forward and back.
 *
 * Eight rows are treated at once, a vector holding the same entry of eight rows, from the input to the output: what is
 * between stays in the cache, and a product of a weight matrix with covariances is one with `n * LANES` columns. The
 * backward pass keeps nothing from the forward one but repeats it, which costs less than fetching it from memory.
 */

/* C (m x n) += A (m x k) B (k x n), all three of vectors: summed in registers, as in TILE. */
#define VECTOR_TILE(name, ROWS, COLUMNS)                                                                               \
    INLINE void name(int64_t n, int64_t k, const vector *restrict a, const vector *restrict b, vector *restrict c) {   \
        vector sum[ROWS * COLUMNS];                                                                                    \
        _Pragma("GCC unroll 16") for (int t = 0; t < ROWS * COLUMNS; t++) sum[t] = c[t / COLUMNS * n + t % COLUMNS];    \
        for (int64_t p = 0; p < k; p++)                                                                                \
            _Pragma("GCC unroll 16") for (int t = 0; t < ROWS * COLUMNS; t++)                                          \
                sum[t] += a[t / COLUMNS * k + p] * b[p * n + t % COLUMNS];                                             \
        _Pragma("GCC unroll 16") for (int t = 0; t < ROWS * COLUMNS; t++) c[t / COLUMNS * n + t % COLUMNS] = sum[t];    \
    }

VECTOR_TILE(vector_tile_5x2, 5, 2)
VECTOR_TILE(vector_tile_1x2, 1, 2)
VECTOR_TILE(vector_tile_1x1, 1, 1)

static void multiply_add_lanes(int64_t m, int64_t n, int64_t k, const float *a_start, const float *b_start,
                               float *c_start) {
    const vector *a = (const vector *)a_start, *b = (const vector *)b_start;
    vector *c = (vector *)c_start;
    int64_t j = 0, i;
    for (; j + 2 <= n; j += 2) {
        for (i = 0; i + 5 <= m; i += 5) vector_tile_5x2(n, k, a + i * k, b + j, c + i * n + j);
        for (; i < m; i++) vector_tile_1x2(n, k, a + i * k, b + j, c + i * n + j);
    }
    for (i = 0; j < n && i < m; i++) vector_tile_1x1(n, k, a + i * k, b + j, c + i * n + j);
}

/* C = W B or, with the strides exchanged, W^T B: a weight matrix times a matrix of tiles. */
INLINE void multiply(int64_t m, int64_t n, int64_t k, const float *w, int64_t w_row, int64_t w_column, const float *b,
                     float *c) {
    memset(c, 0, sizeof(float) * m * n * LANES);
    multiply_add(m, n * LANES, k, w, w_row, w_column, b, c);
}

/* The same where C is symmetric: the upper triangle is computed, and mirrored. */
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

static void transpose_tiles(int64_t m, int64_t n, const float *from, float *to) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            *(vector *)(to + (j * m + i) * LANES) = *(const vector *)(from + (i * n + j) * LANES);
}

static tile_rule *const forward_rules[] = {[RELU_DVI] = relu_tile_dvi, [RELU_EXACT] = relu_tile_exact};
static tile_rule *const backward_rules[] = {[RELU_DVI] = relu_tile_dvi_backward,
                                            [RELU_EXACT] = relu_tile_exact_backward};

/* What goes into a linear map, after its mask, and what comes out, for eight rows. Inputs of the network are
 * independent: the first covariance is a line of variances. */
struct linear {
    int64_t before, after;
    const float *weight, *bias;
    float gain, noise;
    float *mean, *covariance, *mean_after, *covariance_after;
};

/* Room for eight rows of one network. Inputs may be many: nothing is of the size of their square. */
struct room {
    struct linear *linears;
    struct workspace w;
    float *product, *transposed;
};

static struct room arrange(int64_t layers, const int64_t *widths, struct linear *linears, float *workspace) {
    int64_t widest = 0, largest = 0;
    for (int64_t l = 0; l < layers; l++) {
        int64_t before = widths[l], after = widths[l + 1];
        widest = after > widest ? after : widest;
        largest = before * after > largest ? before * after : largest;
        linears[l] = (struct linear){
            .before = before,
            .after = after,
            .mean = take(&workspace, before * LANES),
            .covariance = take(&workspace, (l == 0 ? 1 : before) * before * LANES),
            .mean_after = take(&workspace, after * LANES),
            .covariance_after = take(&workspace, after * after * LANES),
        };
    }
    largest = widest * widest > largest ? widest * widest : largest;
    return (struct room){linears, split(take(&workspace, (10 + 2 * widest) * widest * LANES), widest),
                         take(&workspace, largest * LANES), take(&workspace, largest * LANES)};
}

static void set_parameters(int64_t layers, struct linear *linears, const float *parameters, const float *gains,
                           const float *noises) {
    for (int64_t l = 0; l < layers; l++) {
        struct linear *linear = &linears[l];
        linear->weight = parameters, linear->bias = parameters + linear->after * linear->before;
        linear->gain = gains[l], linear->noise = noises[l];
        parameters = linear->bias + linear->after;
    }
}

/* W m + b and W C W^T */
static void apply(const struct linear *linear, int first, struct room room) {
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

/* The inputs of eight rows are in the first layer's mean and covariance; fills in everything after them. */
static void forward_tile(int64_t layers, int64_t nonlinearity, struct room room) {
    struct linear *first = &room.linears[0];
    mask(first->before * LANES, first->gain, first->noise, first->mean, first->covariance);
    for (int64_t l = 0;; l++) {
        struct linear *linear = &room.linears[l], *next = linear + 1;
        apply(linear, l == 0, room);
        if (l + 1 == layers) return;
        int64_t n = linear->after;
        memcpy(next->mean, linear->mean_after, sizeof(float) * n * LANES);
        memcpy(next->covariance, linear->covariance_after, sizeof(float) * n * n * LANES);
        struct workspace w = room.w;
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

/* As perceptron; y_covariance: (models, rows, outputs, outputs). The workspace is what `arrange` takes. */
void perceptron_full(int64_t models, int64_t rows, int64_t layers, const int64_t *widths, int64_t nonlinearity,
                     const float *x_mean, const float *x_variance, const float *gains, const float *noises,
                     const float *parameters, float *y_mean, float *y_covariance, float *workspace) {
    int64_t inputs = widths[0], outputs = widths[layers], size = parameter_count(layers, widths);
    struct linear linears[layers];
    struct room room = arrange(layers, widths, linears, workspace);
    for (int64_t model = 0; model < models; model++) {
        set_parameters(layers, linears, parameters + model * size, gains + model * layers, noises + model * layers);
        for (int64_t start = 0; start < rows; start += LANES) {
            int64_t lanes = rows - start < LANES ? rows - start : LANES, row = model * rows + start;
            load(linears[0].mean, x_mean + row * inputs, inputs, lanes);
            load(linears[0].covariance, x_variance + row * inputs, inputs, lanes);
            forward_tile(layers, nonlinearity, room);
            store(linears[layers - 1].mean_after, y_mean + row * outputs, outputs, lanes);
            store(linears[layers - 1].covariance_after, y_covariance + row * outputs * outputs, outputs * outputs,
                  lanes);
        }
    }
}

static void load_gradient(float *tile, const float *source, int64_t count, int64_t lanes) {
    load(tile, source, count, lanes);
    for (int64_t j = 0; j < count; j++)
        for (int64_t l = lanes; l < LANES; l++) tile[j * LANES + l] = 0;
}

/* Gradients of one layer's parameters are added to by_weight, a tile for each parameter; those of what went into its
 * linear map replace w.grad_mean and w.grad, unless it is the first.
 *
 * With G symmetric: by W is 2 G W C + g m^T, by C is W^T G W. */
static void backward_linear(const struct linear *linear, int first, struct room room, float *by_weight) {
    int64_t before = linear->before, after = linear->after;
    float *grad_mean = room.w.grad_mean, *grad = room.w.grad, *product = room.product;
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
    multiply_add_lanes(after, before, before, product, linear->covariance, by_weight);
}

/* The workspace has room for eight gradients of each parameter beside what the forward pass needs. */
void perceptron_full_backward(int64_t models, int64_t rows, int64_t layers, const int64_t *widths,
                              int64_t nonlinearity, const float *x_mean, const float *x_variance, const float *gains,
                              const float *noises, const float *parameters, const float *grad_mean,
                              const float *grad_covariance, float *by_parameters, float *workspace) {
    int64_t inputs = widths[0], outputs = widths[layers], size = parameter_count(layers, widths);
    struct linear linears[layers];
    float *sums = take(&workspace, size * LANES);
    struct room room = arrange(layers, widths, linears, workspace);
    struct workspace w = room.w;
    for (int64_t model = 0; model < models; model++) {
        set_parameters(layers, linears, parameters + model * size, gains + model * layers, noises + model * layers);
        memset(sums, 0, sizeof(float) * size * LANES);
        for (int64_t start = 0; start < rows; start += LANES) {
            int64_t lanes = rows - start < LANES ? rows - start : LANES, row = model * rows + start;
            load(linears[0].mean, x_mean + row * inputs, inputs, lanes);
            load(linears[0].covariance, x_variance + row * inputs, inputs, lanes);
            forward_tile(layers, nonlinearity, room);
            load_gradient(w.grad_mean, grad_mean + row * outputs, outputs, lanes);
            load_gradient(room.product, grad_covariance + row * outputs * outputs, outputs * outputs, lanes);
            transpose_tiles(outputs, outputs, room.product, w.grad);
            for (int64_t i = 0; i < outputs * outputs * LANES; i++) w.grad[i] = 0.5f * (w.grad[i] + room.product[i]);
            float *end = sums + size * LANES;
            for (int64_t l = layers - 1;; l--) {
                struct linear *linear = &linears[l], *previous = linear - 1;
                int64_t n = linear->before;
                end -= (n + 1) * linear->after * LANES;
                backward_linear(linear, l == 0, room, end);
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
        float *by = by_parameters + model * size;
        for (int64_t i = 0; i < size; i++) {
            float sum = 0;
            for (int l = 0; l < LANES; l++) sum += sums[i * LANES + l];
            by[i] = sum;
        }
    }
}
