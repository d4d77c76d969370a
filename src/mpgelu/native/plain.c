/* Outputs of networks for deterministic inputs, without gradients.
 *
 * A network is an optional periodic embedding, x_j -> (x_j, sum_k w_jk cos(2 pi (f_jk x_j + p_jk))), followed by linear
 * maps with SiLU, x / (1 + exp(-x)), or ReLU between them.
 *
 * Arrays are (features, rows), as in diagonal.c. Every row is computed by the same instructions at any position in a
 * block, so that its outputs do not depend on other rows in the batch. A single row has a function of its own.
 */
#include "products.h"

#define PLAIN_BLOCK 64 /* rows, a multiple of LANES: two layers of 128 units and their weights fit the cache */

/* The workspace: values before and after a layer, which are exchanged after each layer. */
struct plain_room {
    float *before, *after; /* (widest, block) */
};

/* Divides the workspace, and returns its size in floats; with `workspace` NULL it only counts. */
static int64_t arrange_plain(int64_t rows, int64_t layers, const int64_t *widths, float *workspace,
                             struct plain_room *room) {
    int64_t width = PADDED(rows < PLAIN_BLOCK ? rows : PLAIN_BLOCK), widest = 0;
    for (int64_t l = 0; l <= layers; l++) widest = larger(widest, widths[l]);
    struct room space = {workspace, 0};
    room->before = take(&space, widest * width);
    room->after = take(&space, widest * width);
    return space.used;
}

int64_t KERNEL(plain_workspace)(int64_t rows, int64_t layers, const int64_t *widths) {
    struct plain_room room;
    return arrange_plain(rows, layers, widths, NULL, &room);
}

/* cos(2 pi t) = sin(2 pi s) with s = 1/4 - |t - round(t)|, |s| <= 1/4, by a polynomial in s. */
INLINE float cosine_of_turns(float t) {
    float whole = t + 12582912.0f; /* 1.5 2^23, as in `exponential` */
    float s = 0.25f - fabsf(t - (whole - 12582912.0f));
    return s * POLYNOMIAL(s * s, 6.283185160e+00f, -4.134165503e+01f, 8.160100406e+01f, -7.654978205e+01f,
                          3.953670408e+01f);
}

/* The periodic embedding: x (features, width) gives (features, 1 + combinations, width), each feature followed by the
 * combinations of its cosines. `frequency` (features, cosines) is followed by phases of the same shape and by weights
 * (features, cosines, combinations). */
static void embed(int64_t features, int64_t cosines, int64_t combinations, int64_t width, const float *restrict frequency,
                  const float *restrict x, float *restrict after) {
    const float *phase = frequency + features * cosines, *weight = phase + features * cosines;
    float cosine[PLAIN_BLOCK];
    for (int64_t j = 0; j < features; j++, x += width) {
        memcpy(after, x, sizeof(float) * width);
        after += width;
        memset(after, 0, sizeof(float) * combinations * width);
        for (int64_t k = j * cosines; k < (j + 1) * cosines; k++) {
#pragma omp simd
            for (int64_t r = 0; r < width; r++) cosine[r] = cosine_of_turns(frequency[k] * x[r] + phase[k]);
            for (int64_t d = 0; d < combinations; d++)
#pragma omp simd
                for (int64_t r = 0; r < width; r++) after[d * width + r] += weight[k * combinations + d] * cosine[r];
        }
        after += combinations * width;
    }
}

/* The nonlinearity, in place; `room` has as many floats. The division is a loop of its own, because in one loop with
 * the exponentials gcc would divide three times, once for each case of `clamp`. */
static void activate_plain(int64_t count, int64_t nonlinearity, float *restrict x, float *restrict room) {
    if (nonlinearity == SILU) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) room[i] = 1 + exponential(-clamp(x[i], 87));
#pragma omp simd
        for (int64_t i = 0; i < count; i++) x[i] /= room[i];
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; i++) x[i] = x[i] < 0 ? 0 : x[i];
}

/* The linear map y = W x + b of x (before, width); returns the position of the parameters of the next layer. */
static const float *apply_plain(int64_t before, int64_t after, int64_t width, const float *weight,
                                const float *restrict x, float *restrict y) {
    const float *bias = weight + after * before;
    for (int64_t o = 0; o < after; o++)
        for (int64_t r = 0; r < width; r++) y[o * width + r] = bias[o];
    multiply_add(after, width, before, weight, before, 1, x, y);
    return bias + after;
}

INLINE void swap(struct plain_room *room) {
    float *after = room->after;
    room->after = room->before, room->before = after;
}

PLAIN(plain_forward) {
    int64_t outputs = widths[layers], combinations = cosines ? widths[0] / features - 1 : 0;
    struct plain_room room;
    arrange_plain(rows, layers, widths, workspace, &room);
    int64_t embedding = features * cosines * (2 + combinations), size = embedding + parameter_count(layers, widths);
    for (int64_t model = 0; model < models; model++, parameters += size, x += step, y += rows * outputs)
        for (int64_t start = 0; start < rows; start += PLAIN_BLOCK) {
            int64_t count = rows - start < PLAIN_BLOCK ? rows - start : PLAIN_BLOCK, width = PADDED(count);
            for (int64_t r = 0; r < count; r += LANES)
                load(room.before + r, width, x + (start + r) * features, features, count - r < LANES ? count - r : LANES);
            if (cosines) {
                embed(features, cosines, combinations, width, parameters, room.before, room.after);
                swap(&room);
            }
            const float *weight = parameters + embedding;
            for (int64_t l = 0; l < layers; l++) {
                weight = apply_plain(widths[l], widths[l + 1], width, weight, room.before, room.after);
                if (l + 1 < layers) activate_plain(widths[l + 1] * width, nonlinearity, room.after, room.before);
                swap(&room);
            }
            for (int64_t r = 0; r < count; r += LANES)
                store(room.before + r, width, y + (start + r) * outputs, outputs, count - r < LANES ? count - r : LANES);
        }
}

/* ---- one row: vectors contain units instead of rows, and weights are (before, after) ---- */

/* As `plain_forward` for one row, whose linear maps are transposed. */
PLAIN(plain_single) {
    (void)rows;
    int64_t outputs = widths[layers], combinations = cosines ? widths[0] / features - 1 : 0;
    struct plain_room room;
    arrange_plain(1, layers, widths, workspace, &room);
    int64_t embedding = features * cosines * (2 + combinations), size = embedding + parameter_count(layers, widths);
    for (int64_t model = 0; model < models; model++, parameters += size, x += step, y += outputs) {
        if (cosines) {
            load(room.after, LANES, x, features, 1);
            embed(features, cosines, combinations, LANES, parameters, room.after, room.before);
            for (int64_t j = 0; j < widths[0]; j++) room.before[j] = room.before[j * LANES];
        } else {
            memcpy(room.before, x, sizeof(float) * features);
        }
        const float *weight = parameters + embedding;
        for (int64_t l = 0; l < layers; l++) {
            int64_t after = widths[l + 1];
            const float *bias = weight + after * widths[l];
            apply_single(widths[l], after, weight, 0, bias, room.before, room.after);
            weight = bias + after;
            if (l + 1 < layers) {
                memset(room.after + after, 0, sizeof(float) * (PADDED(after) - after)); /* only whole vectors */
                activate_plain(PADDED(after), nonlinearity, room.after, room.before);
            }
            swap(&room);
        }
        memcpy(y, room.before, sizeof(float) * outputs);
    }
}
