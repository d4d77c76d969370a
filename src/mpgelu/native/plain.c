/* Outputs of networks for deterministic inputs, and gradients of their parameters.
 *
 * A network is an optional periodic embedding, x_j -> (x_j, sum_k w_jk cos(2 pi (f_jk x_j + p_jk))), followed by linear
 * maps with SiLU, x / (1 + exp(-x)), or ReLU between them.
 *
 * Arrays are (features, rows), as in diagonal.c. Every row is computed by the same instructions at any position in a
 * block, so that its outputs do not depend on other rows in the batch. A single row has a function of its own.
 *
 * The backward pass reads the inputs of each linear map and the slopes of each nonlinearity, which the forward pass has
 * kept; cosines and sines are computed again.
 */
#include "products.h"

#define PLAIN_BLOCK 64 /* rows, a multiple of LANES: two layers of 128 units and their weights fit the cache */

/* The workspace of both passes. */
struct plain_room {
    float *before, *after; /* (widest, block): values, or gradients, before and after a layer */
    float *rows;           /* inputs of a layer (block, before), as rows */
    float *sums;           /* gradients of the weights of all layers (after, before) */
};

/* Divides the workspace, and returns its size in floats; with `workspace` NULL it only counts. Dimensions called `before`
 * are rounded up to whole vectors. */
static int64_t arrange_plain(int64_t rows, int64_t layers, const int64_t *widths, float *workspace,
                             struct plain_room *room) {
    int64_t width = PADDED(rows < PLAIN_BLOCK ? rows : PLAIN_BLOCK), widest = 0, broadest = 0, all = 0;
    for (int64_t l = 0; l < layers; l++) {
        broadest = larger(broadest, PADDED(widths[l]));
        all += widths[l + 1] * PADDED(widths[l]);
    }
    for (int64_t l = 0; l <= layers; l++) widest = larger(widest, widths[l]);
    struct room space = {workspace, 0};
    room->before = take(&space, widest * width);
    room->after = take(&space, widest * width);
    room->rows = take(&space, broadest * width);
    room->sums = take(&space, all);
    return space.used;
}

int64_t KERNEL(plain_workspace)(int64_t rows, int64_t layers, const int64_t *widths) {
    struct plain_room room;
    return arrange_plain(rows, layers, widths, NULL, &room);
}

/* The inputs of each linear map and, except for the first one, the slopes of the nonlinearity before it; (features,
 * rows) for each block of rows. */
int64_t KERNEL(plain_kept)(int64_t rows, int64_t layers, const int64_t *widths) {
    int64_t features = widths[0];
    for (int64_t l = 1; l < layers; l++) features += 2 * widths[l];
    return PADDED(rows) * features;
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

/* The same, with the slopes s + y (1 - s) in place of `room`, where y = s x. */
static void activate_keeping(int64_t count, int64_t nonlinearity, float *restrict x, float *restrict slope) {
    if (nonlinearity == SILU) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) slope[i] = 1 + exponential(-clamp(x[i], 87));
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            float y = x[i] / slope[i], s = 1 / slope[i];
            x[i] = y, slope[i] = s + y * (1 - s);
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; i++) slope[i] = x[i] <= 0 ? 0 : 1, x[i] = x[i] < 0 ? 0 : x[i];
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

/* Loads a block of rows. */
static void load_block(int64_t features, int64_t count, const float *x, float *block) {
    for (int64_t r = 0; r < count; r += LANES)
        load(block + r, PADDED(count), x + r * features, features, count - r < LANES ? count - r : LANES);
}

PLAIN_FORWARD(plain_forward) {
    int64_t outputs = widths[layers], combinations = cosines ? widths[0] / features - 1 : 0;
    struct plain_room room;
    arrange_plain(rows, layers, widths, workspace, &room);
    int64_t embedding = features * cosines * (2 + combinations), size = embedding + parameter_count(layers, widths);
    for (int64_t model = 0; model < models; model++, parameters += size, x += step, y += rows * outputs)
        for (int64_t start = 0; start < rows; start += PLAIN_BLOCK) {
            int64_t count = rows - start < PLAIN_BLOCK ? rows - start : PLAIN_BLOCK, width = PADDED(count);
            float *before = keep ? kept : room.before, *after = room.after;
            load_block(features, count, x + start * features, cosines ? after : before);
            if (cosines) embed(features, cosines, combinations, width, parameters, after, before);
            const float *weight = parameters + embedding;
            for (int64_t l = 0; l < layers; l++) {
                int64_t units = widths[l + 1] * width;
                if (keep) after = l + 1 < layers ? before + widths[l] * width * (l ? 2 : 1) : room.after;
                weight = apply_plain(widths[l], widths[l + 1], width, weight, before, after);
                if (l + 1 < layers && keep) activate_keeping(units, nonlinearity, after, after + units);
                if (l + 1 < layers && !keep) activate_plain(units, nonlinearity, after, before);
                float *free = before;
                before = after, after = free;
            }
            for (int64_t r = 0; r < count; r += LANES)
                store(before + r, width, y + (start + r) * outputs, outputs, count - r < LANES ? count - r : LANES);
            if (keep) kept += KERNEL(plain_kept)(count, layers, widths);
        }
}

/* ---- gradients ---- */

/* Adds the gradients of the embedding, from those by its results, (features, 1 + combinations, width):
 *
 *   by w_jkd = sum_r cos_jk g_jd,   by p_jk = sum_r q_jk,   by f_jk = sum_r q_jk x_j,
 *
 * with q_jk = -2 pi sin_jk sum_d w_jkd g_jd. Gradients have the layout of the parameters. */
static void embed_backward(int64_t features, int64_t cosines, int64_t combinations, int64_t width,
                           const float *restrict frequency, const float *restrict x, const float *restrict grad,
                           float *restrict by_frequency) {
    int64_t all = features * cosines;
    const float *phase = frequency + all, *weight = phase + all;
    float *by_phase = by_frequency + all, *by_weight = by_phase + all;
    float slope[PLAIN_BLOCK], cosine[PLAIN_BLOCK], mixed[PLAIN_BLOCK];
    for (int64_t j = 0; j < features; j++, x += width, grad += (1 + combinations) * width)
        for (int64_t k = j * cosines; k < (j + 1) * cosines; k++) {
#pragma omp simd
            for (int64_t r = 0; r < width; r++) {
                float turns = frequency[k] * x[r] + phase[k];
                cosine[r] = cosine_of_turns(turns);
                slope[r] = -6.283185307f * cosine_of_turns(turns - 0.25f);
                mixed[r] = 0;
            }
            for (int64_t d = 0; d < combinations; d++) {
                const float *g = grad + (1 + d) * width;
                float sum = 0, w = weight[k * combinations + d];
#pragma omp simd reduction(+ : sum)
                for (int64_t r = 0; r < width; r++) sum += cosine[r] * g[r], mixed[r] += w * g[r];
                by_weight[k * combinations + d] += sum;
            }
            float sum = 0, moment = 0;
#pragma omp simd reduction(+ : sum, moment)
            for (int64_t r = 0; r < width; r++) {
                float q = slope[r] * mixed[r];
                sum += q, moment += q * x[r];
            }
            by_phase[k] += sum, by_frequency[k] += moment;
        }
}

#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t places __attribute__((vector_size(LANES * 4)));
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

/* The transpose of LANES x LANES floats, in three rounds that exchange single floats, pairs and halves of vectors. */
INLINE void transpose_vectors(const float *from, int64_t from_step, float *to, int64_t to_step) {
    vector a[LANES], b[LANES];
    UNROLL for (int i = 0; i < LANES; i++) a[i] = *(const vector *)(from + i * from_step);
    UNROLL for (int i = 0; i < LANES; i += 2) {
        b[i] = SHUFFLED(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[i + 1] = SHUFFLED(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    UNROLL for (int i = 0; i < LANES; i += 4)
        UNROLL for (int j = i; j < i + 2; j++) {
            a[j] = SHUFFLED(b[j], b[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[j + 2] = SHUFFLED(b[j], b[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    UNROLL for (int i = 0; i < LANES / 2; i++) {
        *(vector *)(to + i * to_step) = SHUFFLED(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(vector *)(to + (i + 4) * to_step) = SHUFFLED(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* The transpose (width, PADDED(count)) of a matrix (count, width), filled by zeros; the width is one of whole vectors. */
static void transpose_block(int64_t count, int64_t width, const float *restrict from, float *restrict to) {
    int64_t length = PADDED(count), i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t r = 0; r < width; r += LANES) transpose_vectors(from + i * width + r, width, to + r * length + i, length);
    for (; i < length; i++)
        for (int64_t r = 0; r < width; r++) to[r * length + i] = i < count ? from[i * width + r] : 0;
}

/* With the gradient G by the results of a linear map, (after, width), and its inputs X, (before, width):
 *
 *   by W = G X^T,     by b = sum of G over rows,     by X = W^T G
 *
 * The first is added to `sums` and the second to `by_bias`; the third is written to room->before, if wanted. */
static void apply_backward(int64_t before, int64_t after, int64_t width, const float *weight, const float *x,
                           const struct plain_room *room, float *sums, float *by_bias, int wanted) {
    const float *grad = room->after;
    transpose_block(before, width, x, room->rows);
    multiply_add(after, PADDED(before), width, grad, width, 1, room->rows, sums);
    for (int64_t o = 0; o < after; o++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t r = 0; r < width; r++) sum += grad[o * width + r];
        by_bias[o] += sum;
    }
    if (!wanted) return;
    memset(room->before, 0, sizeof(float) * before * width);
    multiply_add(before, width, after, weight, 1, before, grad, room->before);
}

PLAIN_BACKWARD(plain_backward) {
    (void)nonlinearity; /* its slopes are among the kept arrays */
    int64_t outputs = widths[layers], combinations = cosines ? widths[0] / features - 1 : 0, all = 0;
    struct plain_room room;
    arrange_plain(rows, layers, widths, workspace, &room);
    int64_t embedding = features * cosines * (2 + combinations), size = embedding + parameter_count(layers, widths);
    for (int64_t l = 0; l < layers; l++) all += widths[l + 1] * PADDED(widths[l]);
    memset(by_parameters, 0, sizeof(float) * models * size);
    for (int64_t model = 0; model < models; model++, x += step, grad += rows * outputs) {
        memset(room.sums, 0, sizeof(float) * all);
        for (int64_t start = 0; start < rows; start += PLAIN_BLOCK) {
            int64_t count = rows - start < PLAIN_BLOCK ? rows - start : PLAIN_BLOCK, width = PADDED(count);
            for (int64_t r = 0; r < count; r += LANES)
                load_gradient(room.after + r, width, grad + (start + r) * outputs, outputs,
                              count - r < LANES ? count - r : LANES);
            kept += KERNEL(plain_kept)(count, layers, widths);
            const float *end = kept, *weight = parameters + size;
            float *by = by_parameters + size, *sums = room.sums + all;
            for (int64_t l = layers - 1; l >= 0; l--) {
                int64_t before = widths[l], after = widths[l + 1];
                const float *inputs = end - (l ? 2 : 1) * before * width, *slope = inputs + before * width;
                weight -= (before + 1) * after, by -= (before + 1) * after, sums -= after * PADDED(before), end = inputs;
                apply_backward(before, after, width, weight, inputs, &room, sums, by + before * after, l || cosines);
#pragma omp simd
                for (int64_t i = 0; i < (l ? before * width : 0); i++) room.after[i] = slope[i] * room.before[i];
            }
            if (!cosines) continue;
            load_block(features, count, x + start * features, room.after);
            embed_backward(features, cosines, combinations, width, parameters, room.after, room.before, by_parameters);
        }
        float *by = by_parameters + embedding;
        const float *sums = room.sums;
        for (int64_t l = 0; l < layers; by += (widths[l] + 1) * widths[l + 1], l++)
            for (int64_t o = 0; o < widths[l + 1]; o++, sums += PADDED(widths[l]))
                memcpy(by + o * widths[l], sums, sizeof(float) * widths[l]);
        parameters += size, by_parameters += size;
    }
}

/* ---- one row: vectors contain units instead of rows, and weights are (before, after) ---- */

/* As `plain_forward` for one row, whose linear maps are transposed. */
PLAIN_FORWARD(plain_single) {
    (void)rows, (void)keep, (void)kept;
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
            float *free = room.before;
            room.before = room.after, room.after = free;
        }
        memcpy(y, room.before, sizeof(float) * outputs);
    }
}
