/* Whole optimiser steps of a network for deterministic inputs: rows of a batch, outputs, loss, gradient, and Adam.
 *
 * The parameters of a network are an optional scale of the inputs of the first linear map, followed by those of plain.c,
 * which takes the scale merged into the weights: W' = W diag(s). A step of a network whose loss or gradient is not finite
 * changes nothing. A call trains one network, so that others can be trained by other threads at the same time.
 */
#include "products.h"

/* Arrays of one network and step. */
struct train_room {
    float *x, *y, *weights;   /* the batch */
    float *outputs, *grad;    /* of the network, and the gradient of the loss by them, (rows, outputs) */
    float *by, *merged;       /* gradient by all parameters; those that plain.c takes */
    float *kept, *workspace;  /* of plain.c */
};

INLINE int64_t count_of(int64_t layers, const int64_t *widths, int64_t features, int64_t cosines, int64_t scaled) {
    int64_t embedding = cosines ? features * cosines * (1 + widths[0] / features) : 0;
    return (scaled ? widths[0] : 0) + embedding + parameter_count(layers, widths);
}

static int64_t arrange_train(int64_t rows, int64_t layers, const int64_t *widths, int64_t features, int64_t cosines,
                             int64_t scaled, float *workspace, struct train_room *room) {
    int64_t size = count_of(layers, widths, features, cosines, scaled), outputs = rows * widths[layers];
    struct room space = {workspace, 0};
    room->x = take(&space, rows * features);
    room->y = take(&space, rows);
    room->weights = take(&space, rows);
    room->outputs = take(&space, outputs);
    room->grad = take(&space, outputs);
    room->by = take(&space, size);
    room->merged = take(&space, size);
    room->kept = take(&space, KERNEL(plain_kept)(rows, layers, widths));
    room->workspace = take(&space, KERNEL(plain_workspace)(rows, layers, widths));
    return space.used;
}

int64_t KERNEL(plain_train_workspace)(int64_t rows, int64_t layers, const int64_t *widths, int64_t features,
                                      int64_t cosines, int64_t scaled) {
    struct train_room room;
    return arrange_train(rows, layers, widths, features, cosines, scaled, NULL, &room);
}

/* The mean of c_b u_b (log 2 pi + h + e^2 exp(-h)) / 2 over rows, with outputs (m, h), e = m - y, and u proportional to
 * exp(beta h) with mean one, which has no gradient; writes the gradient by the outputs. `grad` has room for u, too. */
static float beta_gaussian(int64_t rows, float beta, const struct train_room *room) {
    const float *restrict output = room->outputs, *restrict y = room->y, *restrict weights = room->weights;
    float *restrict grad = room->grad, total = 0, loss = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t r = 0; r < rows; r++) {
        float u = exponential(clamp(beta * clamp(output[2 * r + 1], 27.631021f), 87)); /* variances of 1e-12 to 1e12 */
        grad[2 * r] = u, total += u;
    }
#pragma omp simd reduction(+ : loss)
    for (int64_t r = 0; r < rows; r++) {
        float h = output[2 * r + 1], error = output[2 * r] - y[r], precision = exponential(-clamp(h, 87));
        float weight = weights[r] * grad[2 * r] / total, square = error * error * precision;
        loss += 0.5f * weight * (1.837877066f + h + square);
        grad[2 * r] = weight * error * precision, grad[2 * r + 1] = 0.5f * weight * (1 - square);
    }
    return loss;
}

/* The mean of c_b (h + (nu + 1) log(1 + y^2 exp(-h) / nu)) / 2 over rows, with h = 10 tanh(o / 10) of the output o:
 * minus the log density of residuals y under a Student t distribution with nu degrees of freedom. */
static float student(int64_t rows, float nu, const struct train_room *room) {
    float loss = 0;
    for (int64_t r = 0; r < rows; r++) {
        float bend = tanhf(0.1f * room->outputs[r]), h = 10 * bend, weight = 0.5f * room->weights[r] / (float)rows;
        float square = room->y[r] * room->y[r] * expf(-h) / nu;
        loss += weight * (h + (nu + 1) * log1pf(square));
        room->grad[r] = weight * (1 - bend * bend) * (1 - (nu + 1) * square / (1 + square));
    }
    return loss;
}

/* W' = W diag(s), and everything else as it is. */
static void merge_scale(int64_t width, int64_t after, int64_t embedding, int64_t size, const float *restrict scale,
                        float *restrict merged) {
    memcpy(merged, scale + width, sizeof(float) * (size - width));
    for (int64_t o = 0; o < after; o++)
        for (int64_t j = 0; j < width; j++) merged[embedding + o * width + j] *= scale[j];
}

/* From the gradient by W', that by s and, in place, by W. */
static void split_scale(int64_t width, int64_t after, const float *restrict scale, const float *restrict weight,
                        float *restrict by_scale, float *restrict by_weight) {
    memset(by_scale, 0, sizeof(float) * width);
    for (int64_t o = 0; o < after; o++)
        for (int64_t j = 0; j < width; j++) {
            by_scale[j] += by_weight[o * width + j] * weight[o * width + j];
            by_weight[o * width + j] *= scale[j];
        }
}

/* What a step of Adam needs besides the parameters; `rate` is corrected for the start, as is `root`. */
struct adam {
    float rate, factor, forget, forget_square, root, epsilon, keep;
};

static void adam_step(int64_t count, struct adam s, const float *restrict grad, float *restrict parameter,
                      float *restrict first, float *restrict second) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float g = grad[i] * s.factor;
        first[i] += s.forget * (g - first[i]);
        second[i] += s.forget_square * (g * g - second[i]);
        parameter[i] = s.keep * parameter[i] - s.rate * first[i] / (sqrtf(second[i]) * s.root + s.epsilon);
    }
}

/* One step of all parameters, whose speeds differ by part: scale, embedding, linear maps. */
static void update(int64_t scale, int64_t embedding, int64_t size, int64_t step, const double *rates,
                   const struct optimiser *o, float factor, const float *grad, float *parameter, float *first,
                   float *second) {
    const int64_t ends[] = {scale, scale + embedding, size};
    for (int64_t part = 0, start = 0; part < 3; start = ends[part++]) {
        double rate = rates[part];
        struct adam s = {
            .rate = (float)(rate / (1 - pow(o->beta_1, (double)step))),
            .factor = factor,
            .forget = (float)(1 - o->beta_1),
            .forget_square = (float)(1 - o->beta_2),
            .root = (float)(1 / sqrt(1 - pow(o->beta_2, (double)step))),
            .epsilon = (float)o->epsilon,
            .keep = (float)(1 - rate * o->weight_decay),
        };
        adam_step(ends[part] - start, s, grad + start, parameter + start, first + start, second + start);
    }
}

PLAIN_TRAIN(plain_train) {
    int64_t width = scaled ? widths[0] : 0, size = count_of(layers, widths, features, cosines, scaled);
    int64_t embedding = size - width - parameter_count(layers, widths);
    const struct optimiser *o = (const struct optimiser *)settings;
    struct train_room room;
    arrange_train(rows, layers, widths, features, cosines, scaled, workspace, &room);
    for (int64_t s = 0; s < steps; s++, at += rows, losses++) {
        for (int64_t r = 0; r < rows; r++) {
            memcpy(room.x + r * features, x + at[r] * features, sizeof(float) * features);
            room.y[r] = y[at[r]], room.weights[r] = weights[at[r]];
        }
        const float *used = parameters;
        if (scaled) merge_scale(width, widths[1], embedding, size, parameters, room.merged), used = room.merged;
        KERNEL(plain_forward)
        (1, rows, layers, widths, nonlinearity, features, cosines, 0, 1, room.x, used, room.outputs, room.kept,
         room.workspace);
        float loss = objective == STUDENT ? student(rows, (float)o->shape, &room)
                                          : beta_gaussian(rows, (float)o->shape, &room);
        KERNEL(plain_backward)
        (1, rows, layers, widths, nonlinearity, features, cosines, 0, room.x, used, room.kept, room.grad,
         room.by + width, room.workspace);
        if (scaled)
            split_scale(width, widths[1], parameters, parameters + width + embedding, room.by,
                        room.by + width + embedding);
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += room.by[i] * room.by[i];
        float norm = sqrtf(squares);
        int finite = isfinite(loss) && isfinite(norm);
        *losses = finite ? loss : NAN;
        if (!finite) continue;
        float factor = norm > (float)o->clip ? (float)o->clip / norm : 1;
        update(width, embedding, size, taken + s + 1, rates + 3 * s, o, factor, room.by, parameters, first, second);
    }
}
