/* Loading of rows into vectors, and products of matrices whose entries are vectors.
 *
 * A vector contains the same quantity of LANES rows. A matrix (m, n) of vectors is m n LANES floats, row by row.
 */
#ifndef MPGELU_PRODUCTS_H
#define MPGELU_PRODUCTS_H

#include "normal.h"

typedef float vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#ifdef LONG_VECTORS /* of a processor that multiplies 16 floats at once */
typedef float long_vector __attribute__((vector_size(64), aligned(4), may_alias));
#endif

/* Transposes `lanes` rows of `count` numbers: tile[j][lane] = source[lane][j] for j < count. Lanes without a row repeat
 * the last row, so that they cause no floating-point exceptions. `width` is the distance of consecutive j in floats. */
INLINE void load(float *restrict tile, int64_t width, const float *restrict source, int64_t count, int64_t lanes) {
    for (int64_t l = 0; l < LANES; l++) {
        const float *from = source + (l < lanes ? l : lanes - 1) * count;
        for (int64_t j = 0; j < count; j++) tile[j * width + l] = from[j];
    }
}

/* The same for gradients, which are zero in lanes without a row, so that these do not contribute to sums over lanes. */
INLINE void load_gradient(float *restrict tile, int64_t width, const float *restrict source, int64_t count,
                          int64_t lanes) {
    load(tile, width, source, count, lanes);
    for (int64_t j = 0; j < count; j++)
        for (int64_t l = lanes; l < LANES; l++) tile[j * width + l] = 0;
}

/* The inverse of `load`, for the lanes with a row. */
INLINE void store(const float *restrict tile, int64_t width, float *restrict target, int64_t count, int64_t lanes) {
    for (int64_t l = 0; l < lanes; l++)
        for (int64_t j = 0; j < count; j++) target[l * count + j] = tile[j * width + l];
}

INLINE vector *take_vectors(struct room *room, int64_t count) { return (vector *)take(room, count * LANES); }

INLINE float sum_of_lanes(const vector *v) { /* a pointer: by value, vectors wider than the registers change the ABI */
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += (*v)[l];
    return sum;
}

/* C += A B for a tile C of ROWS x COUNT vectors of a TYPE, accumulated in registers: the compiler unrolls all loops but
 * that over k. Entries of A are scalars with strides a_row and a_column; rows of B and C have n floats. An entry of C is
 * the same sum in the same order for any tile, so that its bits do not depend on the width of vectors. */
#define TILE(name, ROWS, COUNT, TYPE)                                                                                  \
    static inline void name(int64_t n, int64_t k, const float *restrict a, int64_t a_row, int64_t a_column,            \
                            const float *restrict b, float *restrict c) {                                              \
        const int64_t size = sizeof(TYPE) / sizeof(float);                                                             \
        TYPE sum[ROWS * COUNT];                                                                                        \
        UNROLL for (int t = 0; t < ROWS * COUNT; t++) sum[t] = *(const TYPE *)(c + t / COUNT * n + t % COUNT * size);  \
        for (int64_t p = 0; p < k; p++)                                                                                \
            UNROLL for (int t = 0; t < ROWS * COUNT; t++)                                                              \
                sum[t] += a[t / COUNT * a_row + p * a_column] * *(const TYPE *)(b + p * n + t % COUNT * size);         \
        UNROLL for (int t = 0; t < ROWS * COUNT; t++) *(TYPE *)(c + t / COUNT * n + t % COUNT * size) = sum[t];        \
    }

/* Tiles of one to six rows. */
typedef void tile(int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b, float *c);
#define TILES(name, COUNT, TYPE)                                                                                       \
    TILE(name##_1, 1, COUNT, TYPE) TILE(name##_2, 2, COUNT, TYPE) TILE(name##_3, 3, COUNT, TYPE)                       \
    TILE(name##_4, 4, COUNT, TYPE) TILE(name##_5, 5, COUNT, TYPE) TILE(name##_6, 6, COUNT, TYPE)                       \
    static tile *const name##_tiles[] = {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6};

TILES(narrow, 1, vector)
#ifdef LONG_VECTORS
TILES(wide, 1, long_vector)
TILES(widest, 2, long_vector)
#else
TILES(wide, 2, vector)
#endif

/* The columns of C += A B that one tile is wide, in blocks of at most six rows of almost equal height. */
INLINE void column(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,
                   float *c, tile *const *tiles) {
    for (int64_t i = 0, blocks = (m + 5) / 6; blocks > 0; blocks--) {
        int64_t rows = (m - i + blocks - 1) / blocks;
        tiles[rows - 1](n, k, a + i * a_row, a_row, a_column, b, c + i * n);
        i += rows;
    }
}

/* C (m x n) += A (m x k) B (k x n) for n a multiple of LANES. A is transposed if its strides are exchanged. */
static inline void multiply_add(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,
                         const float *b, float *c) {
    int64_t j = 0;
#ifdef LONG_VECTORS
    for (; j + 4 * LANES <= n; j += 4 * LANES) column(m, n, k, a, a_row, a_column, b + j, c + j, widest_tiles);
#endif
    for (; j + 2 * LANES <= n; j += 2 * LANES) column(m, n, k, a, a_row, a_column, b + j, c + j, wide_tiles);
    if (j < n) column(m, n, k, a, a_row, a_column, b + j, c + j, narrow_tiles);
}

/* C (m x n) += A (m x k) B^T (n x k) for matrices of vectors, lane by lane, accumulated in registers as in TILE. */
#define DOT_TILE(name, ROWS, COLUMNS)                                                                                  \
    INLINE void name(int64_t n, int64_t k, const vector *restrict a, const vector *restrict b, vector *restrict c) {   \
        vector sum[ROWS * COLUMNS];                                                                                    \
        UNROLL for (int t = 0; t < ROWS * COLUMNS; t++) sum[t] = c[t / COLUMNS * n + t % COLUMNS];    \
        for (int64_t p = 0; p < k; p++)                                                                                \
            UNROLL for (int t = 0; t < ROWS * COLUMNS; t++)                                          \
                sum[t] += a[t / COLUMNS * k + p] * b[t % COLUMNS * k + p];                                             \
        UNROLL for (int t = 0; t < ROWS * COLUMNS; t++) c[t / COLUMNS * n + t % COLUMNS] = sum[t];    \
    }

DOT_TILE(dot_tile_5x2, 5, 2)
DOT_TILE(dot_tile_1x2, 1, 2)
DOT_TILE(dot_tile_1x1, 1, 1)

static inline void multiply_add_dots(int64_t m, int64_t n, int64_t k, const vector *a, const vector *b, vector *c) {
    int64_t j = 0, i;
    for (; j + 2 <= n; j += 2) {
        for (i = 0; i + 5 <= m; i += 5) dot_tile_5x2(n, k, a + i * k, b + j * k, c + i * n + j);
        for (; i < m; i++) dot_tile_1x2(n, k, a + i * k, b + j * k, c + i * n + j);
    }
    for (i = 0; j < n && i < m; i++) dot_tile_1x1(n, k, a + i * k, b + j * k, c + i * n + j);
}

/* C = A B for scalar A (m x k), and B (k x n) and C (m x n) of vectors. */
INLINE void multiply(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,
                     float *c) {
    memset(c, 0, sizeof(float) * m * n * LANES);
    multiply_add(m, n * LANES, k, a, a_row, a_column, b, c);
}

/* ---- products with a single column: vectors contain units instead of rows, and weights are (before, after) ---- */

#define UNITS 8 /* vectors of units at a time */

INLINE void some_of(const float *from, int64_t count, vector *found) {
    memset(found, 0, sizeof(vector));
    for (int64_t l = 0; l < count; l++) (*found)[l] = from[l];
}

/* sum += x w, or x w^2 if `squared`. */
INLINE void add_weights(float x, const vector *weight, int squared, vector *sum) {
    if (squared) *sum += x * (*weight * *weight);
    else *sum += x * *weight;
}

/* LANES units, or all of fewer: then what is beyond them is read as long as it is there, and not used. */
INLINE void add_units(int64_t before, int64_t after, int64_t count, const float *restrict weight, int squared,
                      const float *restrict x, vector *sum) {
    int64_t p = 0;
    for (; p < before && (count == LANES || p * after + LANES <= (before + 1) * after); p++)
        add_weights(x[p], (const vector *)(weight + p * after), squared, sum);
    for (; p < before; p++) {
        vector some;
        some_of(weight + p * after, count, &some);
        add_weights(x[p], &some, squared, sum);
    }
}

/* y = W x + b, or (W * W) x + b if `squared`, with the sums in the order of `multiply_add`, and as whole vectors, so
 * that a row has the same bits alone and among others. The biases follow the weights in memory; NULL stands for zeros. */
INLINE void apply_single(int64_t before, int64_t after, const float *restrict weight, int squared,
                         const float *restrict bias, const float *restrict x, float *restrict y) {
    int64_t o = 0;
    for (; o + UNITS * LANES <= after; o += UNITS * LANES) {
        vector sum[UNITS] = {{0}};
        if (bias)
            UNROLL for (int t = 0; t < UNITS; t++) sum[t] = *(const vector *)(bias + o + t * LANES);
        for (int64_t p = 0; p < before; p++)
            UNROLL for (int t = 0; t < UNITS; t++)
                add_weights(x[p], (const vector *)(weight + p * after + o + t * LANES), squared, &sum[t]);
        UNROLL for (int t = 0; t < UNITS; t++) *(vector *)(y + o + t * LANES) = sum[t];
    }
    for (; o < after; o += LANES) {
        o = after < LANES || o + LANES <= after ? o : after - LANES; /* the last ones once more */
        int64_t count = after < LANES ? after : LANES;
        vector sum = {0};
        if (bias) some_of(bias + o, count, &sum);
        add_units(before, after, count, weight + o, squared, x, &sum);
        memcpy(y + o, &sum, sizeof(float) * count);
    }
}

/* G <- (G + G^T) / 2 for a matrix of vectors. */
INLINE void symmetrise(int64_t n, vector *g) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = i + 1; j < n; j++) g[i * n + j] = g[j * n + i] = 0.5f * (g[i * n + j] + g[j * n + i]);
}

/* The mask of mean g and variance n before the first layer, in place: m <- g m and v <- g^2 v + n (v + m^2). */
INLINE void mask(int64_t count, float gain, float noise, float *restrict mean, float *restrict variance) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float m = mean[i];
        variance[i] = (gain * gain + noise) * variance[i] + noise * m * m;
        mean[i] = gain * m;
    }
}

#endif
