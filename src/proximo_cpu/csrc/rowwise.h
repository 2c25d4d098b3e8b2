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

/* Activations: x * sigmoid(x), the tanh form of GELU, max(x, 0). */
enum { SILU, GELU_TANH, RELU };

/* x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), with 2 u = GELU_SCALE * (x + GELU_CUBE * x^3). */
#define GELU_SCALE 1.5957691216f
#define GELU_CUBE 0.044715f

/* `kind` is a constant of each call. NaN stays NaN. */
INLINE vec activated(const int kind, vec x) {
    if (kind == SILU) return x * sigmoid(x);
    if (kind == RELU) return blend(x < 0, (vec){0}, x);
    return x * sigmoid(GELU_SCALE * (x + GELU_CUBE * x * x * x));
}

/* a(gates) * ups, or a(gates) without ups, of a whole vector or of the last `left` numbers. */
INLINE void activate_vector(const int kind, const int has_ups, const float *gates, const float *ups, float *to, long left) {
    vec found = activated(kind, load_masked(gates, left));
    if (has_ups) found *= load_masked(ups, left);
    store_masked(to, found, left);
}

INLINE void activate_kind(const int kind, const int has_ups, const float *gates, const float *ups, float *to, long first,
                          long last) {
    for (; first + WIDTH <= last; first += WIDTH)
        activate_vector(kind, has_ups, gates + first, has_ups ? ups + first : 0, to + first, WIDTH);
    if (first < last)
        activate_vector(kind, has_ups, gates + first, has_ups ? ups + first : 0, to + first, last - first);
}

/* The same of the numbers from `first` to `last`; `ups` may be null, and `to` may be `gates`. */
static void activate(long kind, const float *gates, const float *ups, float *to, long first, long last) {
#define OF_KIND(kind) \
    ups ? activate_kind(kind, 1, gates, ups, to, first, last) : activate_kind(kind, 0, gates, ups, to, first, last)
    if (kind == SILU)
        OF_KIND(SILU);
    else if (kind == GELU_TANH)
        OF_KIND(GELU_TANH);
    else
        OF_KIND(RELU);
#undef OF_KIND
}

#endif
