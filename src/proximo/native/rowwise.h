/* What a row goes through in the layers, both in passes over many rows (rows.c) and in decoding (decode.c). */
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
        vec rest = load_some(x + i, width - i, 0);
        b += rest * rest;
    }
    return 1 / sqrtf(sum_of((a + b) + (c + d)) / (float)width + epsilon);
}

/* weight * x * inverse. */
INLINE void scale_row(const float *x, float inverse, const float *weight, float *y, long width) {
    long i = 0;
    for (; i + WIDTH <= width; i += WIDTH) store(y + i, load(x + i) * inverse * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * inverse * weight[i];
}

/* Rotary positions of one head: [a, b] becomes [a cos - b sin, b cos + a sin], or turns by the negative angle where `sign`
   is -1 and not 1. y may be x. */
INLINE void rotate(const float *x, float *y, const float *cosines, const float *sines, float sign, long half) {
    INDEPENDENT
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], turned = sign * sines[i];
        y[i] = a * cosines[i] - b * turned;
        y[i + half] = b * cosines[i] + a * turned;
    }
}

INLINE vec sigmoid(vec x) { return 1 / (1 + exp_of(-x)); }

/* silu(gates) * ups of `left` numbers, or of a whole vector. */
INLINE void open_some(const float *gates, const float *ups, float *opened, long left) {
    vec gate = take(gates, left);
    put(opened, gate * sigmoid(gate) * take(ups, left), left);
}

INLINE void open_row(const float *gates, const float *ups, float *opened, long first, long last) {
    for (; first + WIDTH <= last; first += WIDTH) open_some(gates + first, ups + first, opened + first, WIDTH);
    if (first < last) open_some(gates + first, ups + first, opened + first, last - first);
}

#endif
