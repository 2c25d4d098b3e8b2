/* Operations on one row that the layers share: passes over many rows (rows.c) and decoding (decode.c). */
#ifndef PROXIMO_ROWWISE_H
#define PROXIMO_ROWWISE_H

#include "kernels.h"

/* 1 / sqrt(mean(x^2) + epsilon). */
INLINE float inverse_rms(const float *x, float epsilon, long width) {
    vec a = {0}, b = {0}, c = {0}, d = {0};
    long i = 0;
    for (; i + 4 * WIDTH <= width; i += 4 * WIDTH) {
        a += load(x + i) * load(x + i);
        b += load(x + i + WIDTH) * load(x + i + WIDTH);
        c += load(x + i + 2 * WIDTH) * load(x + i + 2 * WIDTH);
        d += load(x + i + 3 * WIDTH) * load(x + i + 3 * WIDTH);
    }
    for (; i + WIDTH <= width; i += WIDTH) a += load(x + i) * load(x + i);
    if (i < width) {
        vec rest = load_tail(x + i, width - i, 0);
        b += rest * rest;
    }
    return 1 / sqrtf(reduce_sum((a + b) + (c + d)) / (float)width + epsilon);
}

INLINE float sum_row(const float *x, long width) {
    vec sums = {0};
    for (long i = 0; i < width; i += WIDTH) sums += load_masked(x + i, width - i);
    return reduce_sum(sums);
}

/* 1 / sqrt(mean((x - mean)^2) + epsilon). */
INLINE float inverse_deviation(const float *x, float mean, float epsilon, long width) {
    vec sums = {0};
    long i = 0;
    for (; i + WIDTH <= width; i += WIDTH) sums += (load(x + i) - mean) * (load(x + i) - mean);
    if (i < width) {
        vec rest = load_tail(x + i, width - i, mean) - mean;
        sums += rest * rest;
    }
    return 1 / sqrtf(reduce_sum(sums) / (float)width + epsilon);
}

/* weight * x * inverse. */
INLINE void scale_row(const float *x, float inverse, const float *weight, float *y, long width) {
    long i = 0;
    for (; i + WIDTH <= width; i += WIDTH) store(y + i, load(x + i) * inverse * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * inverse * weight[i];
}

/* Rotary position embedding of one head: [a, b] becomes [a cos - b sin, b cos + a sin]. A `sign` of -1 instead of 1
   rotates back, which is the gradient. y may be x. */
INLINE void rotate(const float *x, float *y, const float *cosines, const float *sines, float sign, long half) {
    INDEPENDENT
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], sine = sign * sines[i];
        y[i] = a * cosines[i] - b * sine;
        y[i + half] = b * cosines[i] + a * sine;
    }
}

INLINE vec sigmoid(vec x) { return 1 / (1 + exp_clamped(-x)); }

/* SwiGLU, silu(gates) * ups, of a whole vector or of the last `left` numbers. */
INLINE void swiglu_vector(const float *gates, const float *ups, float *opened, long left) {
    vec gate = load_masked(gates, left);
    store_masked(opened, gate * sigmoid(gate) * load_masked(ups, left), left);
}

INLINE void swiglu_row(const float *gates, const float *ups, float *opened, long first, long last) {
    for (; first + WIDTH <= last; first += WIDTH) swiglu_vector(gates + first, ups + first, opened + first, WIDTH);
    if (first < last) swiglu_vector(gates + first, ups + first, opened + first, last - first);
}

#endif
