/* MP-GELU networks with exact covariance, forward and back, for training; perceptron_exact is faster for few rows.
 *
 * All randomness comes from independent sources: the masked inputs of the first linear map, and what the masks before
 * each later one add. The covariance before a linear map is F diag(d) F^T + diag(r): d the variances of all sources so
 * far, r those of the new ones, which this map makes into sources. Eight rows are treated at once, a vector holding the
 * same entry of eight rows; as in full.c the backward pass repeats the forward one.
 */

/* C (m x n) += A (m x k) B^T (n x k), all three of vectors: summed in registers, as in TILE. */
#define DOT_TILE(name, ROWS, COLUMNS)                                                                                  \
    INLINE void name(int64_t n, int64_t k, const vector *restrict a, const vector *restrict b, vector *restrict c) {   \
        vector sum[ROWS * COLUMNS];                                                                                    \
        _Pragma("GCC unroll 16") for (int t = 0; t < ROWS * COLUMNS; t++) sum[t] = c[t / COLUMNS * n + t % COLUMNS];    \
        for (int64_t p = 0; p < k; p++)                                                                                \
            _Pragma("GCC unroll 16") for (int t = 0; t < ROWS * COLUMNS; t++)                                          \
                sum[t] += a[t / COLUMNS * k + p] * b[t % COLUMNS * k + p];                                             \
        _Pragma("GCC unroll 16") for (int t = 0; t < ROWS * COLUMNS; t++) c[t / COLUMNS * n + t % COLUMNS] = sum[t];    \
    }

DOT_TILE(dot_tile_5x2, 5, 2)
DOT_TILE(dot_tile_1x2, 1, 2)
DOT_TILE(dot_tile_1x1, 1, 1)

static void multiply_add_dots(int64_t m, int64_t n, int64_t k, const vector *a, const vector *b, vector *c) {
    int64_t j = 0, i;
    for (; j + 2 <= n; j += 2) {
        for (i = 0; i + 5 <= m; i += 5) dot_tile_5x2(n, k, a + i * k, b + j * k, c + i * n + j);
        for (; i < m; i++) dot_tile_1x2(n, k, a + i * k, b + j * k, c + i * n + j);
    }
    for (i = 0; j < n && i < m; i++) dot_tile_1x1(n, k, a + i * k, b + j * k, c + i * n + j);
}

/* One linear map: what goes in, after its mask, and what comes out. */
struct factored {
    int64_t before, after, sources; /* sources: how many there are before this map adds `before` new ones */
    const float *weight, *bias;
    float gain, noise;
    vector *mean, *scale;            /* (before): scale is what multiplied the factors on their way from the last map */
    vector *factor;                  /* F (before, sources) */
    vector *mean_after, *variance;   /* (after) */
    vector *factor_after;            /* W F (after, sources) */
};

struct factored_room {
    struct factored *maps;
    vector *variances, *by_variances; /* of all sources; those of map l start at its `sources` */
    vector *by_mean, *by_variance;    /* gradients by what comes out of a map; of its covariance, for the last */
    vector *by_factor, *by_factor_after;
};

static vector *take_vectors(float **workspace, int64_t count) { return (vector *)take(workspace, count * LANES); }

static struct factored_room arrange_factored(int64_t layers, const int64_t *widths, struct factored *maps,
                                             float *workspace) {
    int64_t sources = 0, widest = 0, largest = 0, outputs = widths[layers];
    for (int64_t l = 0; l < layers; l++) {
        int64_t before = widths[l], after = widths[l + 1], wider = before > after ? before : after;
        maps[l] = (struct factored){
            .before = before,
            .after = after,
            .sources = sources,
            .mean = take_vectors(&workspace, before),
            .scale = take_vectors(&workspace, before),
            .factor = take_vectors(&workspace, before * sources),
            .mean_after = take_vectors(&workspace, after),
            .variance = take_vectors(&workspace, after),
            .factor_after = take_vectors(&workspace, after * sources),
        };
        widest = wider > widest ? wider : widest;
        largest = wider * sources > largest ? wider * sources : largest;
        sources += before;
    }
    int64_t covariance = outputs * outputs > widest ? outputs * outputs : widest;
    return (struct factored_room){
        maps,
        take_vectors(&workspace, sources),
        take_vectors(&workspace, sources),
        take_vectors(&workspace, widest),
        take_vectors(&workspace, covariance),
        take_vectors(&workspace, largest),
        take_vectors(&workspace, largest),
    };
}

/* W m + b, W F, and the variances but for the last map */
static void apply_factored(const struct factored *map, int last, const vector *variances) {
    int64_t before = map->before, after = map->after, sources = map->sources;
    for (int64_t o = 0; o < after; o++) map->mean_after[o] = map->bias[o] + (vector){0};
    multiply_add(after, LANES, before, map->weight, before, 1, (const float *)map->mean, (float *)map->mean_after);
    if (sources)
        multiply(after, sources, before, map->weight, before, 1, (const float *)map->factor, (float *)map->factor_after);
    for (int64_t o = 0; !last && o < after; o++) {
        vector sum = {0};
        const vector *f = map->factor_after + o * sources;
        const float *w = map->weight + o * before;
        for (int64_t q = 0; q < sources; q++) sum += variances[q] * f[q] * f[q];
        for (int64_t i = 0; i < before; i++) sum += w[i] * w[i] * variances[sources + i];
        map->variance[o] = sum;
    }
}

/* MP-GELU and the next map's mask: k = Phi(m / s), the mean times g k, the factors times g k, and new sources of
 * variance (v + m^2) (g^2 k (1 - k) + n k). */
static void activate_factored(const struct factored *map, const struct factored *next, vector *variances) {
    int64_t n = next->before, sources = map->sources, before = map->before;
    const float *mean = (const float *)map->mean_after, *variance = (const float *)map->variance;
    float *mean_next = (float *)next->mean, *scale = (float *)next->scale, *added = (float *)(variances + next->sources);
    float gain = next->gain, noise = next->noise;
#pragma omp simd
    for (int64_t i = 0; i < n * LANES; i++) {
        float m = mean[i], v = variance[i];
        struct normal p = standard_normal(standardised(m, v));
        float share = gain * gain * p.above + noise;
        scale[i] = gain * p.below;
        mean_next[i] = gain * p.below * m;
        added[i] = share * (p.below * v + (p.below * m) * m);
    }
    for (int64_t i = 0; i < n; i++) {
        vector *f = next->factor + i * next->sources;
        const vector *before_scaling = map->factor_after + i * sources;
        for (int64_t q = 0; q < sources; q++) f[q] = next->scale[i] * before_scaling[q];
        for (int64_t j = 0; j < before; j++) f[sources + j] = next->scale[i] * map->weight[i * before + j];
    }
}

static void factored_forward(int64_t layers, struct factored_room room, const float *x_mean, const float *x_variance,
                             int64_t lanes) {
    struct factored *first = &room.maps[0];
    load((float *)first->mean, x_mean, first->before, lanes);
    load((float *)room.variances, x_variance, first->before, lanes);
    mask(first->before * LANES, first->gain, first->noise, (float *)first->mean, (float *)room.variances);
    for (int64_t l = 0; l < layers; l++) {
        if (l) activate_factored(&room.maps[l - 1], &room.maps[l], room.variances);
        apply_factored(&room.maps[l], l + 1 == layers, room.variances);
    }
}

/* sum_q d_q F_oq F_pq + sum_i r_i W_oi W_pi */
static void factored_covariance(const struct factored *map, const vector *variances, vector *covariance) {
    int64_t before = map->before, after = map->after, sources = map->sources;
    for (int64_t o = 0; o < after; o++)
        for (int64_t p = o; p < after; p++) {
            vector sum = {0};
            const vector *f = map->factor_after + o * sources, *h = map->factor_after + p * sources;
            for (int64_t q = 0; q < sources; q++) sum += variances[q] * f[q] * h[q];
            for (int64_t i = 0; i < before; i++)
                sum += map->weight[o * before + i] * map->weight[p * before + i] * variances[sources + i];
            covariance[o * after + p] = covariance[p * after + o] = sum;
        }
}

static void set_factored(int64_t layers, struct factored *maps, const float *parameters, const float *gains,
                         const float *noises) {
    for (int64_t l = 0; l < layers; l++) {
        struct factored *map = &maps[l];
        map->weight = parameters, map->bias = parameters + map->after * map->before;
        map->gain = gains[l], map->noise = noises[l];
        parameters = map->bias + map->after;
    }
}

/* As perceptron; y_covariance: (models, rows, outputs, outputs). The workspace is what `arrange_factored` takes. */
void perceptron_factored(int64_t models, int64_t rows, int64_t layers, const int64_t *widths, const float *x_mean,
                         const float *x_variance, const float *gains, const float *noises, const float *parameters,
                         float *y_mean, float *y_covariance, float *workspace) {
    int64_t inputs = widths[0], outputs = widths[layers], size = parameter_count(layers, widths);
    struct factored maps[layers];
    struct factored_room room = arrange_factored(layers, widths, maps, workspace);
    const struct factored *last = &maps[layers - 1];
    for (int64_t model = 0; model < models; model++) {
        set_factored(layers, maps, parameters + model * size, gains + model * layers, noises + model * layers);
        for (int64_t start = 0; start < rows; start += LANES) {
            int64_t lanes = rows - start < LANES ? rows - start : LANES, row = model * rows + start;
            factored_forward(layers, room, x_mean + row * inputs, x_variance + row * inputs, lanes);
            factored_covariance(last, room.variances, room.by_variance);
            store((float *)last->mean_after, y_mean + row * outputs, outputs, lanes);
            store((float *)room.by_variance, y_covariance + row * outputs * outputs, outputs * outputs, lanes);
        }
    }
}

/* From the symmetric gradient G of the outputs' covariance: by F is 2 G F diag(d), by d_q sum G_op F_oq F_pq, and the
 * same of W and r. Gradients of the last map's factors and weights are set and added to. */
static void backward_covariance(const struct factored *map, const vector *grad, struct factored_room room, vector *by) {
    int64_t before = map->before, after = map->after, sources = map->sources;
    const vector *variances = room.variances, *new = variances + sources;
    for (int64_t o = 0; o < after; o++) {
        const vector *f = map->factor_after + o * sources, *g = grad + o * after;
        for (int64_t q = 0; q < sources; q++) {
            vector sum = {0};
            for (int64_t p = 0; p < after; p++) sum += g[p] * map->factor_after[p * sources + q];
            room.by_factor_after[o * sources + q] = 2 * variances[q] * sum;
            room.by_variances[q] += f[q] * sum;
        }
        for (int64_t i = 0; i < before; i++) {
            vector sum = {0};
            for (int64_t p = 0; p < after; p++) sum += g[p] * map->weight[p * before + i];
            by[o * before + i] += 2 * new[i] * sum;
            room.by_variances[sources + i] += map->weight[o * before + i] * sum;
        }
    }
}

/* The same where only variances came out, with gradient room.by_variance: added to that of the factors. */
static void backward_variance(const struct factored *map, struct factored_room room, vector *by) {
    int64_t before = map->before, after = map->after, sources = map->sources;
    const vector *variances = room.variances, *new = variances + sources;
    for (int64_t o = 0; o < after; o++) {
        const vector *f = map->factor_after + o * sources, g = room.by_variance[o];
        const float *w = map->weight + o * before;
        for (int64_t q = 0; q < sources; q++) {
            vector gf = g * f[q];
            room.by_factor_after[o * sources + q] += 2 * variances[q] * gf;
            room.by_variances[q] += gf * f[q];
        }
        for (int64_t i = 0; i < before; i++) {
            by[o * before + i] += 2 * w[i] * g * new[i];
            room.by_variances[sources + i] += w[i] * w[i] * g;
        }
    }
}

/* Through W m + b and W F: room.by_mean and room.by_factor become gradients by m and F. */
static void backward_factored(const struct factored *map, int first, struct factored_room room, vector *by) {
    int64_t before = map->before, after = map->after, sources = map->sources;
    vector *by_bias = by + after * before;
    for (int64_t o = 0; o < after; o++) {
        by_bias[o] += room.by_mean[o];
        for (int64_t i = 0; i < before; i++) by[o * before + i] += room.by_mean[o] * map->mean[i];
    }
    if (first) return; /* there are no factors yet, and the inputs need no gradient */
    multiply_add_dots(after, before, sources, room.by_factor_after, map->factor, by);
    multiply(before, sources, after, map->weight, 1, before, (const float *)room.by_factor_after,
             (float *)room.by_factor);
    memcpy(map->mean_after, room.by_mean, sizeof(vector) * after); /* no longer needed */
    multiply(before, 1, after, map->weight, 1, before, (const float *)map->mean_after, (float *)room.by_mean);
}

/* Back through a mask and MP-GELU to what came out of the map before; `by` are the gradients of that map's weights.
 * What multiplies dk is gathered with the density in it, as in mpgelu_mask_backward. */
static void backward_activation(const struct factored *map, const struct factored *next, struct factored_room room,
                                vector *by) {
    int64_t n = next->before, sources = map->sources, before = map->before;
    for (int64_t i = 0; i < n; i++) {
        const vector *g = room.by_factor + i * next->sources, *f = map->factor_after + i * sources;
        vector by_scale = {0}, scale = next->scale[i];
        for (int64_t q = 0; q < sources; q++) {
            by_scale += g[q] * f[q];
            room.by_factor_after[i * sources + q] = scale * g[q];
        }
        for (int64_t j = 0; j < before; j++) {
            by_scale += g[sources + j] * map->weight[i * before + j];
            by[i * before + j] += scale * g[sources + j];
        }
        next->scale[i] = by_scale;
    }
    const float *mean = (const float *)map->mean_after, *variance = (const float *)map->variance;
    const float *by_scale = (const float *)next->scale, *by_added = (const float *)(room.by_variances + next->sources);
    float *by_mean = (float *)room.by_mean, *by_variance = (float *)room.by_variance;
    float gain = next->gain, noise = next->noise;
#pragma omp simd
    for (int64_t i = 0; i < n * LANES; i++) {
        float m = mean[i], v = variance[i], s = standard_deviation(v), a = standardised(m, v);
        struct normal p = standard_normal(a);
        float slope = p.density * m, g = gain * by_mean[i];
        float share = gain * gain * p.below * p.above + noise * p.below;
        float by_keep = slope * g + p.density * gain * by_scale[i] +
                        (gain * gain * (p.above - p.below) + noise) * (p.density * v + slope * m) * by_added[i];
        by_mean[i] = by_keep / s + p.below * g + 2 * share * m * by_added[i];
        by_variance[i] = -0.5f * is_positive(v) * (by_keep / s) * (a / s) + share * by_added[i];
    }
}

/* The workspace has room for eight gradients of each parameter beside what the forward pass needs. */
void perceptron_factored_backward(int64_t models, int64_t rows, int64_t layers, const int64_t *widths,
                                  const float *x_mean, const float *x_variance, const float *gains,
                                  const float *noises, const float *parameters, const float *grad_mean,
                                  const float *grad_covariance, float *by_parameters, float *workspace) {
    int64_t inputs = widths[0], outputs = widths[layers], size = parameter_count(layers, widths), sources = 0;
    for (int64_t l = 0; l < layers; l++) sources += widths[l];
    struct factored maps[layers];
    vector *sums = take_vectors(&workspace, size), *grad = take_vectors(&workspace, 2 * outputs * outputs);
    vector *transposed = grad + outputs * outputs;
    struct factored_room room = arrange_factored(layers, widths, maps, workspace);
    for (int64_t model = 0; model < models; model++) {
        set_factored(layers, maps, parameters + model * size, gains + model * layers, noises + model * layers);
        memset(sums, 0, sizeof(vector) * size);
        for (int64_t start = 0; start < rows; start += LANES) {
            int64_t lanes = rows - start < LANES ? rows - start : LANES, row = model * rows + start;
            factored_forward(layers, room, x_mean + row * inputs, x_variance + row * inputs, lanes);
            memset(room.by_variances, 0, sizeof(vector) * sources);
            load_gradient((float *)room.by_mean, grad_mean + row * outputs, outputs, lanes);
            load_gradient((float *)grad, grad_covariance + row * outputs * outputs, outputs * outputs, lanes);
            transpose_tiles(outputs, outputs, (const float *)grad, (float *)transposed);
            for (int64_t i = 0; i < outputs * outputs; i++) grad[i] = 0.5f * (grad[i] + transposed[i]);
            vector *by = sums + size;
            for (int64_t l = layers - 1; l >= 0; l--) {
                const struct factored *map = &maps[l];
                by -= (map->before + 1) * map->after;
                if (l + 1 == layers)
                    backward_covariance(map, grad, room, by);
                else
                    backward_variance(map, room, by);
                backward_factored(map, l == 0, room, by);
                if (l) backward_activation(map - 1, map, room, by - (map[-1].before + 1) * map[-1].after);
            }
        }
        for (int64_t i = 0; i < size; i++) {
            float sum = 0;
            for (int l = 0; l < LANES; l++) sum += sums[i][l];
            by_parameters[model * size + i] = sum;
        }
    }
}
