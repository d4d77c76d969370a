/* Diagonal moments through whole perceptrons, many of the same shape one after the other, and back.
 *
 * A layer is a mask (mean g m, variance g^2 v + n (v + m^2)), a linear map (W m + b, W^2 v) and, but for the last one,
 * MP-GELU or ReLU. Small networks spend their time between operations; here everything between input and output, and all
 * weights of one network, stay in the cache. Rows of matrices are padded with zeros to whole vectors.
 */

#define FEW_ROWS 4
#define PADDED(n) (((n) + LANES - 1) / LANES * LANES)

/* C (ROWS x VECTORS vectors) += A B, summed in registers: the compiler unrolls everything but the loop over k. */
#define TILE(name, ROWS, VECTORS)                                                                                      \
    static void name(int64_t n, int64_t k, const float *restrict a, int64_t a_row, int64_t a_column,                   \
                     const float *restrict b, float *restrict c) {                                                     \
        vector sum[ROWS * VECTORS];                                                                                    \
        _Pragma("GCC unroll 16") for (int t = 0; t < ROWS * VECTORS; t++)                                              \
            sum[t] = *(const vector *)(c + t / VECTORS * n + t % VECTORS * LANES);                                     \
        for (int64_t p = 0; p < k; p++)                                                                                \
            _Pragma("GCC unroll 16") for (int t = 0; t < ROWS * VECTORS; t++)                                          \
                sum[t] += a[t / VECTORS * a_row + p * a_column] * *(const vector *)(b + p * n + t % VECTORS * LANES);   \
        _Pragma("GCC unroll 16") for (int t = 0; t < ROWS * VECTORS; t++)                                              \
            *(vector *)(c + t / VECTORS * n + t % VECTORS * LANES) = sum[t];                                           \
    }

#define TILES(rows) TILE(tile_##rows##x1, rows, 1) TILE(tile_##rows##x2, rows, 2)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)

typedef void tile(int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b, float *c);
static tile *const narrow_tiles[] = {tile_1x1, tile_2x1, tile_3x1, tile_4x1, tile_5x1, tile_6x1};
static tile *const wide_tiles[] = {tile_1x2, tile_2x2, tile_3x2, tile_4x2, tile_5x2, tile_6x2};

/* A few vectors wide column of the product, in blocks of at most six rows, as equal as can be. */
INLINE void column(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,
                   float *c, tile *const *tiles) {
    for (int64_t i = 0, blocks = (m + 5) / 6; blocks > 0; blocks--) {
        int64_t rows = (m - i + blocks - 1) / blocks;
        tiles[rows - 1](n, k, a + i * a_row, a_row, a_column, b, c + i * n);
        i += rows;
    }
}

/* C (m x n) += A (m x k) B (k x n), n a whole number of vectors; A may be transposed by its strides. */
static void multiply_add(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,
                         const float *b, float *c) {
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) column(m, n, k, a, a_row, a_column, b + j, c + j, wide_tiles);
    if (j < n) column(m, n, k, a, a_row, a_column, b + j, c + j, narrow_tiles);
}

/* The nonlinearity between the linear maps. */
enum nonlinearity { MPGELU, RELU_DVI, RELU_EXACT };

/* Where the parts of one network begin in its parameters, and in what the forward pass keeps for the backward one. */
INLINE int64_t parameter_count(int64_t layers, const int64_t *widths) {
    int64_t count = 0;
    for (int64_t l = 0; l < layers; l++) count += (widths[l] + 1) * widths[l + 1];
    return count;
}

INLINE int64_t kept_count(int64_t layers, const int64_t *widths, int64_t rows) {
    int64_t count = 0; /* for each layer: mean and variance of the masked input, and of the linear map's output */
    for (int64_t l = 0; l < layers; l++) count += 2 * rows * (PADDED(widths[l]) + PADDED(widths[l + 1]));
    return count;
}

static void pad(int64_t rows, int64_t n, const float *restrict source, float *restrict target) {
    int64_t padded = PADDED(n);
    memset(target, 0, sizeof(float) * rows * padded);
    for (int64_t i = 0; i < rows; i++) memcpy(target + i * padded, source + i * n, sizeof(float) * n);
}

static void unpad(int64_t rows, int64_t n, const float *restrict source, float *restrict target) {
    for (int64_t i = 0; i < rows; i++) memcpy(target + i * n, source + i * PADDED(n), sizeof(float) * n);
}

/* g m and g^2 v + n (v + m^2), in place */
static void mask(int64_t count, float gain, float noise, float *restrict mean, float *restrict variance) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float m = mean[i];
        variance[i] = (gain * gain + noise) * variance[i] + noise * m * m;
        mean[i] = gain * m;
    }
}

/* W m + b and W^2 v for a few rows, where transposing the weights first would cost more than it saves. */
static void linear_few(int64_t rows, int64_t before, int64_t after, const float *weight, const float *in_mean,
                       const float *in_variance, float *restrict mean, float *restrict variance) {
    const float *bias = weight + after * before;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t o = 0; o < after; o++) {
            const float *m = in_mean + row * PADDED(before), *v = in_variance + row * PADDED(before);
            const float *w = weight + o * before;
            float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum, squares)
            for (int64_t i = 0; i < before; i++) sum += w[i] * m[i], squares += w[i] * w[i] * v[i];
            mean[row * PADDED(after) + o] = sum + bias[o];
            variance[row * PADDED(after) + o] = squares;
        }
}

/* The same for many rows; the workspace holds the weights and their squares, transposed and padded. */
static void linear_many(int64_t rows, int64_t before, int64_t after, const float *weight, const float *in_mean,
                        const float *in_variance, float *restrict mean, float *restrict variance, float *workspace) {
    int64_t padded = PADDED(after);
    float *transposed = workspace, *squares = workspace + before * padded;
    memset(workspace, 0, sizeof(float) * 2 * before * padded);
    for (int64_t o = 0; o < after; o++)
        for (int64_t i = 0; i < before; i++) {
            float w = weight[o * before + i];
            transposed[i * padded + o] = w;
            squares[i * padded + o] = w * w;
        }
    for (int64_t row = 0; row < rows; row++)
        memcpy(mean + row * padded, weight + after * before, sizeof(float) * after);
    multiply_add(rows, padded, before, in_mean, PADDED(before), 1, transposed, mean);
    multiply_add(rows, padded, before, in_variance, PADDED(before), 1, squares, variance);
}

/* x: mean and variance (models, rows, widths[0]); gains, noises: (models, layers); parameters: (models, all weights,
 * each followed by its biases); kept: (models, kept_count), or for one model where nothing is to be kept; y: mean and variance (models, rows, widths[layers]).
 * The workspace holds two weight matrices, transposed and padded, and their biases. */
void perceptron(int64_t models, int64_t rows, int64_t layers, const int64_t *widths, int64_t nonlinearity,
                int64_t keep, const float *x_mean, const float *x_variance, const float *gains, const float *noises,
                const float *parameters, float *y_mean, float *y_variance, float *kept, float *workspace) {
    int64_t inputs = widths[0], outputs = widths[layers], size = kept_count(layers, widths, rows);
    int64_t parameter_size = parameter_count(layers, widths);
    for (int64_t model = 0; model < models; model++) {
        const float *weight = parameters + model * parameter_size;
        float *in_mean = kept + (keep ? model * size : 0), *in_variance = in_mean + rows * PADDED(inputs);
        pad(rows, inputs, x_mean + model * rows * inputs, in_mean);
        pad(rows, inputs, x_variance + model * rows * inputs, in_variance);
        for (int64_t l = 0; l < layers; l++) {
            int64_t before = widths[l], after = widths[l + 1], padded = PADDED(after);
            float *mean = in_variance + rows * PADDED(before), *variance = mean + rows * padded;
            mask(rows * PADDED(before), gains[model * layers + l], noises[model * layers + l], in_mean, in_variance);
            memset(mean, 0, sizeof(float) * 2 * rows * padded);
            if (rows <= FEW_ROWS)
                linear_few(rows, before, after, weight, in_mean, in_variance, mean, variance);
            else
                linear_many(rows, before, after, weight, in_mean, in_variance, mean, variance, workspace);
            if (l + 1 < layers) {
                in_mean = variance + rows * padded;
                in_variance = in_mean + rows * padded;
                if (nonlinearity == MPGELU)
                    mpgelu_diagonal(rows * padded, mean, variance, in_mean, in_variance);
                else
                    relu_diagonal(rows * padded, mean, variance, in_mean, in_variance);
            } else {
                unpad(rows, outputs, mean, y_mean + model * rows * outputs);
                unpad(rows, outputs, variance, y_variance + model * rows * outputs);
            }
            weight += (before + 1) * after;
        }
    }
}

/* Gradients of the parameters from those of the outputs; by_parameters has the layout of the parameters. The workspace
 * holds two padded weight matrices of the largest layer, their gradients, and four gradients of the widest rows. */
void perceptron_backward(int64_t models, int64_t rows, int64_t layers, const int64_t *widths, int64_t nonlinearity,
                         const float *gains, const float *noises, const float *parameters, const float *kept,
                         const float *grad_mean, const float *grad_variance, float *by_parameters, float *workspace) {
    int64_t outputs = widths[layers], size = kept_count(layers, widths, rows);
    int64_t parameter_size = parameter_count(layers, widths), largest = 0, widest = 0;
    for (int64_t l = 0; l < layers; l++) {
        int64_t entries = widths[l + 1] * PADDED(widths[l]);
        largest = entries > largest ? entries : largest;
    }
    for (int64_t l = 0; l <= layers; l++) widest = PADDED(widths[l]) > widest ? PADDED(widths[l]) : widest;
    float *padded_weight = workspace, *squares = padded_weight + largest;
    float *by_weight = squares + largest, *by_squares = by_weight + largest;
    float *out_mean = by_squares + largest, *out_variance = out_mean + rows * widest;
    float *in_grad_mean = out_variance + rows * widest, *in_grad_variance = in_grad_mean + rows * widest;
    for (int64_t model = 0; model < models; model++) {
        const float *end = parameters + (model + 1) * parameter_size, *kept_end = kept + (model + 1) * size;
        float *by_end = by_parameters + (model + 1) * parameter_size;
        pad(rows, outputs, grad_mean + model * rows * outputs, out_mean);
        pad(rows, outputs, grad_variance + model * rows * outputs, out_variance);
        for (int64_t l = layers - 1; l >= 0; l--) {
            int64_t before = widths[l], after = widths[l + 1], padded = PADDED(before), after_padded = PADDED(after);
            const float *weight = end - (before + 1) * after;
            float *by_start = by_end - (before + 1) * after;
            const float *in_mean = kept_end - 2 * rows * (padded + after_padded), *in_variance = in_mean + rows * padded;
            memset(by_weight, 0, sizeof(float) * after * padded);
            memset(by_squares, 0, sizeof(float) * after * padded);
            multiply_add(after, padded, rows, out_mean, 1, after_padded, in_mean, by_weight);
            multiply_add(after, padded, rows, out_variance, 1, after_padded, in_variance, by_squares);
            for (int64_t o = 0; o < after; o++)
                for (int64_t i = 0; i < before; i++)
                    by_start[o * before + i] =
                        by_weight[o * padded + i] + 2 * weight[o * before + i] * by_squares[o * padded + i];
            float *by_bias = by_start + after * before;
            memset(by_bias, 0, sizeof(float) * after);
            for (int64_t row = 0; row < rows; row++)
                for (int64_t o = 0; o < after; o++) by_bias[o] += out_mean[row * after_padded + o];
            end = weight, by_end = by_start, kept_end = in_mean;
            if (l == 0) break;
            pad(after, before, weight, padded_weight);
            for (int64_t i = 0; i < after * padded; i++) squares[i] = padded_weight[i] * padded_weight[i];
            memset(in_grad_mean, 0, sizeof(float) * rows * padded);
            memset(in_grad_variance, 0, sizeof(float) * rows * padded);
            multiply_add(rows, padded, after, out_mean, after_padded, 1, padded_weight, in_grad_mean);
            multiply_add(rows, padded, after, out_variance, after_padded, 1, squares, in_grad_variance);
            float gain = gains[model * layers + l], noise = noises[model * layers + l];
            for (int64_t i = 0; i < rows * padded; i++) {
                in_grad_mean[i] = gain * in_grad_mean[i] + 2 * noise / gain * in_mean[i] * in_grad_variance[i];
                in_grad_variance[i] *= gain * gain + noise;
            }
            const float *pre_variance = in_mean - rows * padded, *pre_mean = pre_variance - rows * padded;
            if (nonlinearity == MPGELU)
                mpgelu_diagonal_backward(rows * padded, pre_mean, pre_variance, in_grad_mean, in_grad_variance,
                                         out_mean, out_variance);
            else
                relu_diagonal_backward(rows * padded, pre_mean, pre_variance, in_grad_mean, in_grad_variance, out_mean,
                                       out_variance);
        }
    }
}

/* ---- The same networks with exact covariance, forward only ----
 *
 * The covariance is a sum over blocks of independent sources, as in FactoredMoments: block b was made by linear map b
 * from what was independent between the units before it. A block starts shared by all rows (factor: the transposed
 * weights); from the next map on each row has its own, because the masks between scale each row differently. A few rows
 * are treated at a time. Outputs are few, so the last map is done the other way round: first the masks times its weights.
 */

#define EXACT_ROWS 16

struct block {
    int64_t rank;
    float *variance; /* (rows, PADDED(rank)) */
    float *factor;   /* (rank, rows, n) once each row has its own, (rank, n) while shared; n is padded */
    int shared;
};

/* Factor times gain: (rank, rows, n) into `target`, which may be the factor itself if it is not shared. */
static void scale_factor(const struct block *block, int64_t rows, int64_t n, const float *gain, float *target) {
    for (int64_t q = 0; q < block->rank; q++)
        for (int64_t row = 0; row < rows; row++) {
            const float *source = block->factor + (block->shared ? q : q * rows + row) * n, *g = gain + row * n;
            float *to = target + (q * rows + row) * n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) to[i] = source[i] * g[i];
        }
}

/* Sum over sources of d F^2: what a block adds to the variances (rows, n). */
static void add_variance(const struct block *block, int64_t rows, int64_t n, float *restrict variance) {
    for (int64_t q = 0; q < block->rank; q++)
        for (int64_t row = 0; row < rows; row++) {
            float d = block->variance[row * PADDED(block->rank) + q];
            const float *f = block->factor + (q * rows + row) * n;
            float *v = variance + row * n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) v[i] += d * f[i] * f[i];
        }
}

/* F^T diag(gain) w for one output of weights w: (rows, PADDED(rank)). `rows_of_weights` are those of the map that made a
 * shared block, (n, PADDED(rank)); `scaled` has room for (rows, n). */
static void project(const struct block *block, int64_t rows, int64_t n, const float *gain, const float *w,
                    const float *rows_of_weights, float *scaled, float *restrict result) {
    int64_t rank = PADDED(block->rank);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < n; i++) scaled[row * n + i] = gain[row * n + i] * w[i];
    memset(result, 0, sizeof(float) * rows * rank);
    if (block->shared) {
        multiply_add(rows, rank, n, scaled, n, 1, rows_of_weights, result);
        return;
    }
    for (int64_t q = 0; q < block->rank; q++)
        for (int64_t row = 0; row < rows; row++) {
            const float *f = block->factor + (q * rows + row) * n, *u = scaled + row * n;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < n; i++) sum += f[i] * u[i];
            result[row * rank + q] = sum;
        }
}

static float *take(float **workspace, int64_t count) {
    float *start = *workspace;
    *workspace += count;
    return start;
}

/* One network, at most EXACT_ROWS rows. */
static void perceptron_exact_rows(int64_t rows, int64_t layers, const int64_t *widths, const float *x_mean,
                                  const float *x_variance, const float *gains, const float *noises, const float *weight,
                                  float *y_mean, float *y_covariance, float *workspace) {
    int64_t widest = 0, outputs = widths[layers];
    for (int64_t l = 0; l <= layers; l++) widest = PADDED(widths[l]) > widest ? PADDED(widths[l]) : widest;
    int64_t row_count = rows * widest, largest = 0, scaled_count = widest * outputs;
    for (int64_t l = 0; l < layers; l++) {
        int64_t entries = PADDED(widths[l]) * PADDED(widths[l + 1]);
        largest = entries > largest ? entries : largest;
        for (int64_t k = l; k <= layers; k++) {
            entries = PADDED(widths[l]) * PADDED(widths[k]);
            scaled_count = entries > scaled_count ? entries : scaled_count;
        }
    }
    float *mean = take(&workspace, row_count), *variance = take(&workspace, row_count);
    float *residual = take(&workspace, row_count), *gain = take(&workspace, row_count);
    float *next_mean = take(&workspace, row_count), *next_variance = take(&workspace, row_count);
    float *scaled = take(&workspace, row_count), *squares = take(&workspace, largest);
    float *weight_rows = take(&workspace, largest), *factors = take(&workspace, rows * scaled_count);
    struct block blocks[layers];
    float *stores[layers], *transposed[layers];
    for (int64_t b = 0; b < layers; b++) {
        int64_t rank = PADDED(widths[b]), size = 0;
        for (int64_t l = b; l <= layers; l++) size = rank * PADDED(widths[l]) > size ? rank * PADDED(widths[l]) : size;
        blocks[b].variance = take(&workspace, rows * rank);
        transposed[b] = take(&workspace, rank * PADDED(widths[b + 1]));
        stores[b] = take(&workspace, rows * size);
    }
    pad(rows, widths[0], x_mean, mean);
    pad(rows, widths[0], x_variance, residual);
    memcpy(variance, residual, sizeof(float) * rows * PADDED(widths[0]));
    for (int64_t i = 0; i < rows * PADDED(widths[0]); i++) gain[i] = 1;
    for (int64_t l = 0;; l++) {
        int64_t before = widths[l], after = widths[l + 1], n = PADDED(before), padded = PADDED(after);
        float g = gains[l], noise = noises[l];
        for (int64_t i = 0; i < rows * n; i++) { /* the mask before the linear map */
            residual[i] = g * g * residual[i] + noise * (variance[i] + mean[i] * mean[i]);
            mean[i] *= g;
            gain[i] *= g;
        }
        memset(transposed[l], 0, sizeof(float) * before * padded);
        for (int64_t o = 0; o < after; o++)
            for (int64_t i = 0; i < before; i++) transposed[l][i * padded + o] = weight[o * before + i];
        const float *bias = weight + after * before;
        memset(next_mean, 0, sizeof(float) * rows * padded);
        for (int64_t row = 0; row < rows; row++) memcpy(next_mean + row * padded, bias, sizeof(float) * after);
        multiply_add(rows, padded, before, mean, n, 1, transposed[l], next_mean);
        if (l + 1 == layers) break;
        for (int64_t b = 0; b < l; b++) {
            scale_factor(&blocks[b], rows, n, gain, factors);
            memset(stores[b], 0, sizeof(float) * blocks[b].rank * rows * padded);
            multiply_add(blocks[b].rank * rows, padded, before, factors, n, 1, transposed[l], stores[b]);
            blocks[b].factor = stores[b];
            blocks[b].shared = 0;
        }
        blocks[l] = (struct block){before, blocks[l].variance, transposed[l], 1};
        memcpy(blocks[l].variance, residual, sizeof(float) * rows * n);
        for (int64_t i = 0; i < before * padded; i++) squares[i] = transposed[l][i] * transposed[l][i];
        memset(next_variance, 0, sizeof(float) * rows * padded);
        multiply_add(rows, padded, before, residual, n, 1, squares, next_variance);
        for (int64_t b = 0; b < l; b++) add_variance(&blocks[b], rows, padded, next_variance);
        /* MP-GELU: nothing is independent after a linear map, so that the residual is what the mask adds. */
        mpgelu_mask(rows * padded, next_mean, next_variance, gain, mean, residual);
        for (int64_t i = 0; i < rows * padded; i++) variance[i] = gain[i] * gain[i] * next_variance[i] + residual[i];
        if (l + 2 == layers) { /* rows of the weights, for the last map */
            pad(after, before, weight, weight_rows);
            memset(weight_rows + after * n, 0, sizeof(float) * (padded - after) * n);
        }
        weight = bias + after;
    }
    int64_t before = widths[layers - 1], n = PADDED(before), last = layers - 1;
    unpad(rows, outputs, next_mean, y_mean);
    memset(y_covariance, 0, sizeof(float) * rows * outputs * outputs);
    pad(outputs, before, weight, squares);
    for (int64_t b = 0; b <= last; b++) {
        int64_t rank = b == last ? n : PADDED(blocks[b].rank);
        const float *d = b == last ? residual : blocks[b].variance;
        for (int64_t o = 0; b < last && o < outputs; o++)
            project(&blocks[b], rows, n, gain, squares + o * n, weight_rows, scaled, factors + o * row_count);
        for (int64_t o = 0; o < outputs; o++)
            for (int64_t p = o; p < outputs; p++)
                for (int64_t row = 0; row < rows; row++) {
                    const float *f = b < last ? factors + o * row_count + row * rank : squares + o * n;
                    const float *h = b < last ? factors + p * row_count + row * rank : squares + p * n;
                    const float *v = d + row * rank;
                    float sum = 0;
#pragma omp simd reduction(+ : sum)
                    for (int64_t q = 0; q < rank; q++) sum += v[q] * f[q] * h[q];
                    float *covariance = y_covariance + row * outputs * outputs;
                    covariance[o * outputs + p] += sum;
                    if (p != o) covariance[p * outputs + o] += sum;
                }
    }
}

/* As perceptron; y_covariance: (models, rows, outputs, outputs). */
void perceptron_exact(int64_t models, int64_t rows, int64_t layers, const int64_t *widths, const float *x_mean,
                      const float *x_variance, const float *gains, const float *noises, const float *parameters,
                      float *y_mean, float *y_covariance, float *workspace) {
    int64_t inputs = widths[0], outputs = widths[layers], size = parameter_count(layers, widths);
    for (int64_t model = 0; model < models; model++)
        for (int64_t start = 0; start < rows; start += EXACT_ROWS) {
            int64_t count = rows - start < EXACT_ROWS ? rows - start : EXACT_ROWS, row = model * rows + start;
            perceptron_exact_rows(count, layers, widths, x_mean + row * inputs, x_variance + row * inputs,
                                  gains + model * layers, noises + model * layers, parameters + model * size,
                                  y_mean + row * outputs, y_covariance + row * outputs * outputs, workspace);
        }
}
