/* Diagonal moments through perceptrons: means and variances, without correlations.
 *
 * For a layer with weights W, bias b, and a mask of mean g and variance n before it, the rules are
 *
 *   mask           m <- g m,          v <- g^2 v + n (v + m^2)
 *   linear map     m <- W m + b,      v <- (W * W) v
 *   MP-GELU        m <- k m,          v <- k^2 v + k (1 - k) (v + m^2),   k = Phi(m / sqrt v)
 *   ReLU           m <- s SR(a),      v <- v (Phi(a) - SR(a) SR(-a)),     a = m / s, s = sqrt v
 *
 * with SR(a) = phi(a) + a Phi(a).
 *
 * A nonlinearity and the mask of the next layer are one loop. Arrays are (features, rows), so that a linear map is a
 * matrix product with the weights in their own layout, and the vector instructions run over rows. A block of rows
 * passes through all layers before the next block starts, so that its values stay in the cache.
 *
 * The backward pass reads the moments before and after each linear map, which the forward pass has kept.
 */
#include "products.h"

#define BLOCK 256 /* rows, a multiple of LANES */
#define BRIEF_BLOCK 64 /* rows if nothing is kept for a backward pass: two layers of 128 units fit the cache */
#define BAND 20 /* units whose gradients are computed together, so that they fit the cache for layers of any width */

/* One layer of one network for a block of rows. The arrays have `width` columns, the number of rows rounded up to a
 * multiple of LANES; additional columns repeat the last row. */
struct diagonal {
    int64_t before, after, width;
    const float *weight, *bias;
    float gain, noise;
    float *mean, *variance;             /* (before, width), after the mask */
    float *mean_after, *variance_after; /* (after, width) */
};

/* Sets sizes, parameters and masks of all layers of one network. The parameters of a layer are its weights
 * (after, before), row by row, followed by its biases (after); those of the next layer follow immediately. */
static void set_diagonal(int64_t layers, const int64_t *widths, int64_t rows, struct diagonal *maps,
                         const float *parameters, const float *gains, const float *noises) {
    for (int64_t l = 0; l < layers; l++) {
        int64_t before = widths[l], after = widths[l + 1];
        maps[l].before = before, maps[l].after = after, maps[l].width = PADDED(rows);
        maps[l].weight = parameters, maps[l].bias = parameters + after * before;
        maps[l].gain = gains[l], maps[l].noise = noises[l];
        parameters = maps[l].bias + after;
    }
}

/* Sets the arrays of all layers to consecutive parts of `kept`, which has `diagonal_kept` floats. */
static void place_diagonal(int64_t layers, struct diagonal *maps, float *kept) {
    for (int64_t l = 0; l < layers; l++) {
        struct diagonal *map = &maps[l];
        map->mean = kept, map->variance = map->mean + map->before * map->width;
        map->mean_after = map->variance + map->before * map->width;
        map->variance_after = map->mean_after + map->after * map->width;
        kept = map->variance_after + map->after * map->width;
    }
}

/* Mean and variance before and after each linear map, for all rows of a block. */
int64_t KERNEL(diagonal_kept)(int64_t rows, int64_t layers, const int64_t *widths) {
    int64_t features = 0;
    for (int64_t l = 0; l < layers; l++) features += widths[l] + widths[l + 1];
    return 2 * PADDED(rows) * features;
}

/* The workspace of both passes, for one block of rows. */
struct diagonal_room {
    float *kept;                   /* moments of one block, if the caller does not keep them */
    float *squares;                /* (after, before), squared weights of a layer; transposed in the backward pass */
    vector *lanes;                 /* (BAND, before), gradients of the weights, not yet summed over lanes */
    float *grad_mean, *grad_variance, *grad_mean_before, *grad_variance_before; /* (widest, width) */
    float *single[4]; /* (widest) each: moments of one row before and after a linear map */
};

/* Divides the workspace, and returns its size in floats; with `workspace` NULL it only counts. */
static int64_t arrange_diagonal(int64_t rows, int64_t layers, const int64_t *widths, float *workspace,
                                struct diagonal_room *room) {
    int64_t block = rows < BLOCK ? rows : BLOCK, widest = widths[0], largest = 0, broadest = 0;
    for (int64_t l = 0; l < layers; l++) {
        widest = larger(widest, widths[l + 1]);
        broadest = larger(broadest, widths[l]);
        largest = larger(largest, widths[l] * widths[l + 1]);
    }
    struct room space = {workspace, 0};
    room->kept = take(&space, KERNEL(diagonal_kept)(block, layers, widths));
    room->squares = take(&space, largest);
    room->lanes = take_vectors(&space, BAND * broadest);
    room->grad_mean = take(&space, widest * PADDED(block));
    room->grad_variance = take(&space, widest * PADDED(block));
    room->grad_mean_before = take(&space, widest * PADDED(block));
    room->grad_variance_before = take(&space, widest * PADDED(block));
    for (int i = 0; i < 4; i++) room->single[i] = take(&space, PADDED(widest));
    return space.used;
}

int64_t KERNEL(diagonal_workspace)(int64_t rows, int64_t layers, const int64_t *widths) {
    struct diagonal_room room;
    return arrange_diagonal(rows, layers, widths, NULL, &room);
}

static void square(const struct diagonal *map, float *restrict squares) {
    for (int64_t i = 0; i < map->after * map->before; i++) squares[i] = map->weight[i] * map->weight[i];
}

/* The linear map: mean_after = W m + b and variance_after = (W * W) v. */
static void apply_diagonal(const struct diagonal *map, float *squares) {
    int64_t before = map->before, after = map->after, width = map->width;
    for (int64_t o = 0; o < after; o++)
        for (int64_t r = 0; r < width; r++) map->mean_after[o * width + r] = map->bias[o];
    memset(map->variance_after, 0, sizeof(float) * after * width);
    square(map, squares);
    multiply_add(after, width, before, map->weight, before, 1, map->mean, map->mean_after);
    multiply_add(after, width, before, squares, before, 1, map->variance, map->variance_after);
}

/* The nonlinearity of this layer and the mask of the next one: (mean_after, variance_after) of the map gives
 * (mean, variance) of the next map. */
static void activate_diagonal(const struct diagonal *map, int64_t nonlinearity) {
    const struct diagonal *next = map + 1;
    const float *restrict mean = map->mean_after, *restrict variance = map->variance_after;
    float *restrict mean_next = next->mean, *restrict variance_next = next->variance;
    float gain = next->gain, noise = next->noise;
    int64_t count = map->after * map->width;
    if (nonlinearity == MPGELU) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            struct gate gate = mpgelu(mean[i], variance[i], gain, noise);
            mean_next[i] = gate.mean;
            variance_next[i] = gate.scale * gate.scale * variance[i] + gate.added;
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        struct marginal u = rectify(mean[i], variance[i]);
        float m = rectified_mean(u, mean[i], variance[i]);
        mean_next[i] = gain * m;
        variance_next[i] = (gain * gain + noise) * (variance[i] * u.variance) + noise * m * m;
    }
}

/* The backward pass of `activate_diagonal`: from the gradients with respect to mean and variance of the next map, to
 * those with respect to mean_after and variance_after of this map; all arrays are (after, width). */
static void activate_diagonal_backward(const struct diagonal *map, int64_t nonlinearity, const float *restrict grad_mean,
                                       const float *restrict grad_variance, float *restrict by_mean,
                                       float *restrict by_variance) {
    const float *restrict mean = map->mean_after, *restrict variance = map->variance_after;
    float gain = map[1].gain, noise = map[1].noise;
    int64_t count = map->after * map->width;
    if (nonlinearity == MPGELU) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            float m = mean[i], v = variance[i], g = grad_variance[i], scale = mpgelu(m, v, gain, noise).scale;
            struct slopes by = mpgelu_backward(m, v, gain, noise, 2 * scale * v * g, grad_mean[i], g);
            by_mean[i] = by.mean;
            by_variance[i] = by.variance + scale * scale * g;
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float m = mean[i], v = variance[i], g = grad_variance[i], after = rectified_mean(rectify(m, v), m, v);
        struct slopes by = relu_backward(m, v, gain * grad_mean[i] + 2 * noise * after * g, (gain * gain + noise) * g);
        by_mean[i] = by.mean;
        by_variance[i] = by.variance;
    }
}

FORWARD(diagonal_forward) {
    int64_t inputs = widths[0], outputs = widths[layers], size = parameter_count(layers, widths);
    struct diagonal maps[layers];
    const struct diagonal *last = &maps[layers - 1];
    struct diagonal_room room;
    arrange_diagonal(rows, layers, widths, workspace, &room);
    int64_t block = keep ? BLOCK : BRIEF_BLOCK;
    for (int64_t model = 0; model < models; model++)
        for (int64_t start = 0; start < rows; start += block) {
            int64_t count = rows - start < block ? rows - start : block, row = model * rows + start;
            set_diagonal(layers, widths, count, maps, parameters + model * size, gains + model * layers,
                         noises + model * layers);
            place_diagonal(layers, maps, keep ? kept : room.kept);
            if (keep) kept += KERNEL(diagonal_kept)(count, layers, widths);
            for (int64_t r = 0; r < count; r += LANES) {
                int64_t lanes = count - r < LANES ? count - r : LANES;
                load(maps[0].mean + r, maps[0].width, x_mean + (row + r) * inputs, inputs, lanes);
                load(maps[0].variance + r, maps[0].width, x_variance + (row + r) * inputs, inputs, lanes);
            }
            mask(inputs * maps[0].width, maps[0].gain, maps[0].noise, maps[0].mean, maps[0].variance);
            for (int64_t l = 0; l < layers; l++) {
                apply_diagonal(&maps[l], room.squares);
                if (l + 1 < layers) activate_diagonal(&maps[l], nonlinearity);
            }
            for (int64_t r = 0; r < count; r += LANES) {
                int64_t lanes = count - r < LANES ? count - r : LANES;
                store(last->mean_after + r, last->width, y_mean + (row + r) * outputs, outputs, lanes);
                store(last->variance_after + r, last->width, y_spread + (row + r) * outputs, outputs, lanes);
            }
        }
}

/* Sets the moments of the units beyond `count` to zeros, so that loops over units take only whole vectors. */
static void pad_single(int64_t count, float *mean, float *variance) {
    memset(mean + count, 0, sizeof(float) * (PADDED(count) - count));
    memset(variance + count, 0, sizeof(float) * (PADDED(count) - count));
}

/* As `diagonal_forward` for one row, whose linear maps are transposed. */
FORWARD(diagonal_single) {
    (void)rows, (void)keep, (void)kept;
    int64_t inputs = widths[0], outputs = widths[layers];
    struct diagonal_room room;
    arrange_diagonal(1, layers, widths, workspace, &room);
    float *mean = room.single[0], *variance = room.single[1];
    float *mean_after = room.single[2], *variance_after = room.single[3];
    for (int64_t model = 0; model < models; model++, gains += layers, noises += layers) {
        memcpy(mean, x_mean + model * inputs, sizeof(float) * inputs);
        memcpy(variance, x_variance + model * inputs, sizeof(float) * inputs);
        pad_single(inputs, mean, variance);
        mask(PADDED(inputs), gains[0], noises[0], mean, variance);
        for (int64_t l = 0; l < layers; l++) {
            int64_t before = widths[l], after = widths[l + 1];
            const float *bias = parameters + after * before;
            apply_single(before, after, parameters, 0, bias, mean, mean_after);
            apply_single(before, after, parameters, 1, NULL, variance, variance_after);
            parameters = bias + after;
            if (l + 1 < layers) {
                pad_single(after, mean_after, variance_after);
                struct diagonal maps[] = {
                    {.after = PADDED(after), .width = 1, .mean_after = mean_after, .variance_after = variance_after},
                    {.gain = gains[l + 1], .noise = noises[l + 1], .mean = mean, .variance = variance}};
                activate_diagonal(maps, nonlinearity);
            }
        }
        memcpy(y_mean + model * outputs, mean_after, sizeof(float) * outputs);
        memcpy(y_spread + model * outputs, variance_after, sizeof(float) * outputs);
    }
}

/* Adds the gradients of weights and biases of a layer to `by`. With the gradients G by mean_after and H by
 * variance_after, (after, rows) each:
 *
 *   by W = G m^T + 2 W * (H v^T),     by b = sum of G over rows */
static void weights_backward(const struct diagonal *map, const struct diagonal_room *room, float *by) {
    int64_t before = map->before, after = map->after, vectors = map->width / LANES;
    const vector *grad_mean = (const vector *)room->grad_mean, *grad_variance = (const vector *)room->grad_variance;
    for (int64_t start = 0; start < after; start += BAND) {
        int64_t units = after - start < BAND ? after - start : BAND, count = units * before;
        const float *weight = map->weight + start * before;
        memset(room->lanes, 0, sizeof(vector) * count);
        multiply_add_dots(units, before, vectors, grad_mean + start * vectors, (const vector *)map->mean, room->lanes);
        for (int64_t i = 0; i < count; i++) by[start * before + i] += sum_of_lanes(&room->lanes[i]);
        memset(room->lanes, 0, sizeof(vector) * count);
        multiply_add_dots(units, before, vectors, grad_variance + start * vectors, (const vector *)map->variance,
                          room->lanes);
        for (int64_t i = 0; i < count; i++) by[start * before + i] += 2 * weight[i] * sum_of_lanes(&room->lanes[i]);
    }
    for (int64_t o = 0; o < after; o++) {
        vector sum = {0};
        for (int64_t r = 0; r < vectors; r++) sum += grad_mean[o * vectors + r];
        by[after * before + o] += sum_of_lanes(&sum);
    }
}

/* The transpose of W, so that products with it read consecutive memory; strided reads of a wide layer miss the cache.
 */
static void transpose(const struct diagonal *map, float *restrict transposed) {
    int64_t before = map->before, after = map->after;
    for (int64_t start = 0; start < after; start += LANES) {
        int64_t end = start + LANES < after ? start + LANES : after;
        for (int64_t i = 0; i < before; i++)
            for (int64_t o = start; o < end; o++) transposed[i * after + o] = map->weight[o * before + i];
    }
}

BACKWARD(diagonal_backward) {
    (void)x_mean, (void)x_variance; /* the masked inputs are among the kept arrays */
    int64_t outputs = widths[layers], size = parameter_count(layers, widths);
    struct diagonal maps[layers];
    struct diagonal_room room;
    arrange_diagonal(rows, layers, widths, workspace, &room);
    memset(by_parameters, 0, sizeof(float) * models * size);
    for (int64_t model = 0; model < models; model++)
        for (int64_t start = 0; start < rows; start += BLOCK) {
            int64_t count = rows - start < BLOCK ? rows - start : BLOCK, row = model * rows + start;
            set_diagonal(layers, widths, count, maps, parameters + model * size, gains + model * layers,
                         noises + model * layers);
            place_diagonal(layers, maps, (float *)kept);
            kept += KERNEL(diagonal_kept)(count, layers, widths);
            int64_t width = maps[0].width;
            for (int64_t r = 0; r < count; r += LANES) {
                int64_t lanes = count - r < LANES ? count - r : LANES;
                load_gradient(room.grad_mean + r, width, grad_mean + (row + r) * outputs, outputs, lanes);
                load_gradient(room.grad_variance + r, width, grad_spread + (row + r) * outputs, outputs, lanes);
            }
            for (int64_t l = layers - 1; l >= 0; l--) {
                const struct diagonal *map = &maps[l];
                weights_backward(map, &room, by_parameters + model * size + (map->weight - maps[0].weight));
                if (l == 0) break;
                int64_t before = map->before, after = map->after;
                transpose(map, room.squares);
                multiply(before, width / LANES, after, room.squares, after, 1, room.grad_mean, room.grad_mean_before);
                for (int64_t i = 0; i < before * after; i++) room.squares[i] *= room.squares[i];
                multiply(before, width / LANES, after, room.squares, after, 1, room.grad_variance,
                         room.grad_variance_before);
                activate_diagonal_backward(map - 1, nonlinearity, room.grad_mean_before, room.grad_variance_before,
                                           room.grad_mean, room.grad_variance);
            }
        }
}
