/* The posterior mean of a Gaussian process in double precision. With the kernel of estimators/gaussian_process.py,
 *
 *   m(x) = a^2 sum_i alpha_i (1 + r_i + r_i^2 / 3) exp(-r_i) + b^2 sum_i alpha_i (1 + x . x_i / n),
 *   r_i^2 = 5 sum_j ((x_j - x_ij) / l_j)^2.
 *
 * The linear part is a product with sum_i alpha_i x_i, which is computed once for all rows.
 */
#include "products.h"

#define POINTS_AT_ONCE 256 /* points whose distances fit the cache */

struct process_room {
    double *scaled;  /* (n, points), features of the points divided by the length scales */
    double *inverse; /* (n), 1 / length scale */
    double *slope;   /* (n), sum_i alpha_i x_i of the linear kernel */
    double *x;       /* (n), a standardised row */
};

static int64_t arrange_process(int64_t points, int64_t n, float *workspace, struct process_room *room) {
    struct room space = {workspace, 0};
    room->scaled = take_doubles(&space, n * points);
    room->inverse = take_doubles(&space, n);
    room->slope = take_doubles(&space, n);
    room->x = take_doubles(&space, n);
    return space.used;
}

int64_t KERNEL(process_workspace)(int64_t points, int64_t n) {
    struct process_room room;
    return arrange_process(points, n, NULL, &room);
}

/* The Matern part of order 5/2 for one row, without its amplitude: sum_i alpha_i (1 + r_i + r_i^2 / 3) exp(-r_i). */
static double matern(int64_t points, int64_t n, const double *restrict alpha, const struct process_room *room) {
    double total = 0, squares[POINTS_AT_ONCE];
    for (int64_t start = 0; start < points; start += POINTS_AT_ONCE) {
        int64_t count = points - start < POINTS_AT_ONCE ? points - start : POINTS_AT_ONCE;
        memset(squares, 0, sizeof squares);
        for (int64_t j = 0; j < n; j++) {
            const double *restrict at = room->scaled + j * points + start;
            double u = room->x[j] * room->inverse[j];
#pragma omp simd
            for (int64_t i = 0; i < count; i++) squares[i] += (u - at[i]) * (u - at[i]);
        }
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < count; i++) {
            double square = squares[i] < 1e-12 ? 1e-12 : squares[i], r = sqrt(5 * square);
            total += alpha[start + i] * (1 + r + r * r / 3) * decay(r);
        }
    }
    return total;
}

PROCESS(process_forward) {
    struct process_room room;
    arrange_process(points, n, workspace, &room);
    double level = 0, amplitude = exp(2 * kernel[n]), steepness = exp(2 * kernel[n + 2]);
    for (int64_t j = 0; j < n; j++) room.inverse[j] = exp(-kernel[j]), room.slope[j] = 0;
    for (int64_t i = 0; i < points; i++) {
        level += alpha[i];
        for (int64_t j = 0; j < n; j++) {
            room.scaled[j * points + i] = at[i * n + j] * room.inverse[j];
            room.slope[j] += alpha[i] * at[i * n + j];
        }
    }
    for (int64_t row = 0; row < rows; row++, limited += n) {
        double linear = 0;
        for (int64_t j = 0; j < n; j++) {
            double z = limited[j] / *limit, inside = 1 - z * z;
            double x = (limited[j] / sqrt(inside < 1e-6 ? 1e-6 : inside) - center[j]) / scale[j];
            x = x > FARTHEST ? FARTHEST : x, x = x < -FARTHEST ? -FARTHEST : x;
            room.x[j] = x;
            linear += x * room.slope[j];
        }
        mean[row] = amplitude * matern(points, n, alpha, &room) + steepness * (level + linear / (double)n);
    }
}
