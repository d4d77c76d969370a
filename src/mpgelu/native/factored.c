/* Exact covariance of MP-GELU networks.
 *
 * All randomness comes from independent sources: the masked inputs of the first linear map, and one for each unit from
 * the masks before each later map. The covariance before a linear map is
 *
 *   C = F diag(d) F^T + diag(r)
 *
 * with the variances d of all earlier sources, factors F (units, sources), and the variances r that the masks before
 * this map add. The map W makes these into new sources: C <- (W F) diag(d) (W F)^T + W diag(r) W^T. MP-GELU, with
 * k = Phi(m / sqrt v), and a mask of mean g and variance n multiply row i of all factors by g k_i, and add
 *
 *   r_i = (g^2 k_i (1 - k_i) + n k_i) (v_i + m_i^2).
 *
 * Only the variances v are needed between the maps; the covariance is computed for the outputs.
 *
 * LANES rows are processed together: every entry is a vector with the entries of LANES rows. The backward pass
 * evaluates the forward pass again, which takes less time than reading its results from memory.
 */
#include "products.h"

/* One linear map with its masked input and its output, for LANES rows. */
struct factored {
    int64_t before, after, sources; /* number of sources before this map, which adds `before` new ones */
    const float *weight, *bias;
    float gain, noise;
    vector *mean, *scale;            /* (before): scale g k of the nonlinearity and the mask before this map */
    vector *factor;                  /* F (before, sources) */
    vector *mean_after, *variance;   /* (after) */
    vector *factor_after;            /* W F (after, sources) */
};

/* The workspace of both passes. Names `by_x` are gradients with respect to x. */
struct factored_room {
    struct factored *maps;
    int64_t sources;
    vector *variances, *by_variances; /* (sources), of all sources; the new ones of map l start at its `sources` */
    vector *by_mean, *by_variance;    /* (after); the forward pass puts the covariance of the outputs in the latter */
    vector *by_factor, *by_factor_after;
    vector *sums;                     /* (parameters), not yet summed over lanes */
    vector *grad;                     /* (outputs, outputs), symmetric gradient by the covariance of the outputs */
};

/* Divides the workspace, and returns its size in floats; with `workspace` NULL it only counts. */
static int64_t arrange_factored(int64_t layers, const int64_t *widths, struct factored *maps, float *workspace,
                                struct factored_room *room) {
    int64_t sources = 0, widest = 0, largest = 0, outputs = widths[layers];
    struct room space = {workspace, 0};
    for (int64_t l = 0; l < layers; l++) {
        int64_t before = widths[l], after = widths[l + 1], wider = larger(before, after);
        maps[l].before = before, maps[l].after = after, maps[l].sources = sources;
        maps[l].mean = take_vectors(&space, before);
        maps[l].scale = take_vectors(&space, before);
        maps[l].factor = take_vectors(&space, before * sources);
        maps[l].mean_after = take_vectors(&space, after);
        maps[l].variance = take_vectors(&space, after);
        maps[l].factor_after = take_vectors(&space, after * sources);
        widest = larger(widest, wider);
        largest = larger(largest, wider * sources);
        sources += before;
    }
    room->maps = maps, room->sources = sources;
    room->variances = take_vectors(&space, sources);
    room->by_variances = take_vectors(&space, sources);
    room->by_mean = take_vectors(&space, widest);
    room->by_variance = take_vectors(&space, larger(widest, outputs * outputs));
    room->by_factor = take_vectors(&space, largest);
    room->by_factor_after = take_vectors(&space, largest);
    room->sums = take_vectors(&space, parameter_count(layers, widths));
    room->grad = take_vectors(&space, outputs * outputs);
    return space.used;
}

int64_t KERNEL(factored_workspace)(int64_t rows, int64_t layers, const int64_t *widths) {
    (void)rows;
    struct factored maps[layers];
    struct factored_room room;
    return arrange_factored(layers, widths, maps, NULL, &room);
}

int64_t KERNEL(factored_kept)(int64_t rows, int64_t layers, const int64_t *widths) {
    (void)rows, (void)layers, (void)widths;
    return 0;
}

/* The linear map: W m + b, W F and, except for the last map, the variances
 * v_o = sum_q d_q (W F)_oq^2 + sum_i r_i W_oi^2. */
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

/* MP-GELU and the mask of the next map: scale the factors, of which W is the part of the sources that this map has
 * added, and set the variances of the new sources. */
static void activate_factored(const struct factored *map, const struct factored *next, vector *variances) {
    int64_t n = next->before, sources = map->sources, before = map->before;
    const float *mean = (const float *)map->mean_after, *variance = (const float *)map->variance;
    float *mean_next = (float *)next->mean, *scale = (float *)next->scale, *added = (float *)(variances + next->sources);
    float gain = next->gain, noise = next->noise;
#pragma omp simd
    for (int64_t i = 0; i < n * LANES; i++) {
        struct gate gate = mpgelu(mean[i], variance[i], gain, noise);
        scale[i] = gate.scale, mean_next[i] = gate.mean, added[i] = gate.added;
    }
    for (int64_t i = 0; i < n; i++) {
        vector *f = next->factor + i * next->sources;
        const vector *before_scaling = map->factor_after + i * sources;
        for (int64_t q = 0; q < sources; q++) f[q] = next->scale[i] * before_scaling[q];
        for (int64_t j = 0; j < before; j++) f[sources + j] = next->scale[i] * map->weight[i * before + j];
    }
}

/* The forward pass of LANES rows, or of fewer. */
static void factored_rows(int64_t layers, struct factored_room room, const float *x_mean, const float *x_variance,
                             int64_t lanes) {
    struct factored *first = &room.maps[0];
    load((float *)first->mean, LANES, x_mean, first->before, lanes);
    load((float *)room.variances, LANES, x_variance, first->before, lanes);
    mask(first->before * LANES, first->gain, first->noise, (float *)first->mean, (float *)room.variances);
    for (int64_t l = 0; l < layers; l++) {
        if (l) activate_factored(&room.maps[l - 1], &room.maps[l], room.variances);
        apply_factored(&room.maps[l], l + 1 == layers, room.variances);
    }
}

/* The covariance (after, after) after a linear map: C_op = sum_q d_q (W F)_oq (W F)_pq + sum_i r_i W_oi W_pi. */
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

/* Sets parameters and masks of all layers of one network; for the layout see `set_diagonal`. */
static void set_factored(int64_t layers, struct factored *maps, const float *parameters, const float *gains,
                         const float *noises) {
    for (int64_t l = 0; l < layers; l++) {
        struct factored *map = &maps[l];
        map->weight = parameters, map->bias = parameters + map->after * map->before;
        map->gain = gains[l], map->noise = noises[l];
        parameters = map->bias + map->after;
    }
}

FORWARD(factored_forward) {
    (void)nonlinearity, (void)keep, (void)kept;
    int64_t inputs = widths[0], outputs = widths[layers], size = parameter_count(layers, widths);
    struct factored maps[layers];
    struct factored_room room;
    arrange_factored(layers, widths, maps, workspace, &room);
    const struct factored *last = &maps[layers - 1];
    for (int64_t model = 0; model < models; model++) {
        set_factored(layers, maps, parameters + model * size, gains + model * layers, noises + model * layers);
        for (int64_t start = 0; start < rows; start += LANES) {
            int64_t lanes = rows - start < LANES ? rows - start : LANES, row = model * rows + start;
            factored_rows(layers, room, x_mean + row * inputs, x_variance + row * inputs, lanes);
            factored_covariance(last, room.variances, room.by_variance);
            store((float *)last->mean_after, LANES, y_mean + row * outputs, outputs, lanes);
            store((float *)room.by_variance, LANES, y_spread + row * outputs * outputs, outputs * outputs, lanes);
        }
    }
}

/* The backward pass of `factored_covariance`, from the symmetric gradient G by the covariance of the outputs:
 *
 *   by (W F) = 2 G (W F) diag(d),   by d_q = sum_op G_op (W F)_oq (W F)_pq,   and the same with W and r.
 *
 * Sets the gradient by the factors, and adds to those by the weights and by the variances of the sources. */
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

/* The same for the variances after an inner map, whose gradient is room.by_variance; adds to the gradient by the
 * factors. */
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

/* The backward pass of W m + b and W F: adds to the gradients by W and b, and sets room.by_mean and room.by_factor to
 * the gradients by m and F. */
static void backward_factored(const struct factored *map, int first, struct factored_room room, vector *by) {
    int64_t before = map->before, after = map->after, sources = map->sources;
    vector *by_bias = by + after * before;
    for (int64_t o = 0; o < after; o++) {
        by_bias[o] += room.by_mean[o];
        for (int64_t i = 0; i < before; i++) by[o * before + i] += room.by_mean[o] * map->mean[i];
    }
    if (first) return; /* there are no factors, and no gradient of the inputs is needed */
    multiply_add_dots(after, before, sources, room.by_factor_after, map->factor, by);
    multiply(before, sources, after, map->weight, 1, before, (const float *)room.by_factor_after,
             (float *)room.by_factor);
    memcpy(map->mean_after, room.by_mean, sizeof(vector) * after); /* no longer needed */
    multiply(before, 1, after, map->weight, 1, before, (const float *)map->mean_after, (float *)room.by_mean);
}

/* The backward pass of `activate_factored`: from the gradients by factors, mean and new variances of the next map to
 * those by factor_after, mean_after and variance of this map; adds to the gradients `by` of the weights of this map. */
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
        struct slopes by = mpgelu_backward(mean[i], variance[i], gain, noise, by_scale[i], by_mean[i], by_added[i]);
        by_mean[i] = by.mean, by_variance[i] = by.variance;
    }
}

BACKWARD(factored_backward) {
    (void)nonlinearity, (void)kept;
    int64_t inputs = widths[0], outputs = widths[layers], size = parameter_count(layers, widths);
    struct factored maps[layers];
    struct factored_room room;
    arrange_factored(layers, widths, maps, workspace, &room);
    for (int64_t model = 0; model < models; model++) {
        set_factored(layers, maps, parameters + model * size, gains + model * layers, noises + model * layers);
        memset(room.sums, 0, sizeof(vector) * size);
        for (int64_t start = 0; start < rows; start += LANES) {
            int64_t lanes = rows - start < LANES ? rows - start : LANES, row = model * rows + start;
            factored_rows(layers, room, x_mean + row * inputs, x_variance + row * inputs, lanes);
            memset(room.by_variances, 0, sizeof(vector) * room.sources);
            load_gradient((float *)room.by_mean, LANES, grad_mean + row * outputs, outputs, lanes);
            load_gradient((float *)room.grad, LANES, grad_spread + row * outputs * outputs, outputs * outputs, lanes);
            symmetrise(outputs, room.grad);
            vector *by = room.sums + size;
            for (int64_t l = layers - 1; l >= 0; l--) {
                const struct factored *map = &maps[l];
                by -= (map->before + 1) * map->after;
                if (l + 1 == layers)
                    backward_covariance(map, room.grad, room, by);
                else
                    backward_variance(map, room, by);
                backward_factored(map, l == 0, room, by);
                if (l) backward_activation(map - 1, map, room, by - (map[-1].before + 1) * map[-1].after);
            }
        }
        for (int64_t i = 0; i < size; i++) by_parameters[model * size + i] = sum_of_lanes(&room.sums[i]);
    }
}
