/* Row-wise operations of training and scoring: RMS norm, rotary positions and SwiGLU, forward and backward.

   The formulas of fused_functions.py, each in one pass over memory. Threads share the rows (or the numbers, where rows do
   not matter). Sums over rows are made in blocks of a fixed size, which are then added in order: the number of threads
   changes no bit.

   Legend: T rows, D width, H heads, K head width. */
#include "rowwise.h"

#define BLOCK 64 /* rows whose sum is made by one thread */

typedef struct {
    const float *x, *weight;
    float epsilon, *inverse, *y;
    long width;
} Norm;

static void norm_range(void *work, long row, long last) {
    const Norm *n = work;
    for (; row < last; row++) {
        n->inverse[row] = inverse_rms(n->x + row * n->width, n->epsilon, n->width);
        scale_row(n->x + row * n->width, n->inverse[row], n->weight, n->y + row * n->width, n->width);
    }
}

/* x [T, D], weight [D] -> inverse [T], 1 / sqrt(mean(x^2) + epsilon), and y [T, D], weight * x * inverse. */
EXPORT void norm_rows(const float *x, const float *weight, float epsilon, float *inverse, float *y, int64_t num_rows,
                      int64_t width, int64_t num_threads) {
    Norm all = {x, weight, epsilon, inverse, y, width};
    parallel_for(norm_range, &all, num_rows, 1, threads_for(num_rows * width, num_threads));
}

typedef struct {
    const float *x, *weight, *inverse;
    float *y;
    long width;
} Scale;

static void scale_range(void *work, long row, long last) {
    const Scale *s = work;
    for (; row < last; row++) scale_row(s->x + row * s->width, s->inverse[row], s->weight, s->y + row * s->width, s->width);
}

/* Recomputes y of `norm_rows` from its `inverse`. */
EXPORT void scale_rows(const float *x, const float *weight, const float *inverse, float *y, int64_t num_rows,
                       int64_t width, int64_t num_threads) {
    Scale all = {x, weight, inverse, y, width};
    parallel_for(scale_range, &all, num_rows, 1, threads_for(num_rows * width, num_threads));
}

/* Adds inverse * gradient * x to `sums` and returns the sum of weight * gradient * x. */
INLINE float sum_products(const float *gradient, const float *x, const float *weight, float inverse, float *sums,
                          long width) {
    vec a = {0}, b = {0};
    long i = 0;
    for (; i + 2 * WIDTH <= width; i += 2 * WIDTH) {
        vec first = load(gradient + i) * load(x + i), second = load(gradient + i + WIDTH) * load(x + i + WIDTH);
        a += first * load(weight + i);
        b += second * load(weight + i + WIDTH);
        store(sums + i, load(sums + i) + first * inverse);
        store(sums + i + WIDTH, load(sums + i + WIDTH) + second * inverse);
    }
    float rest = 0;
    for (; i < width; i++) {
        float product = gradient[i] * x[i];
        rest += product * weight[i];
        sums[i] += product * inverse;
    }
    return reduce_sum(a + b) + rest;
}

INLINE void norm_row_backward(const int HAS_MORE, const float *gradient, const float *x, const float *weight, float inverse,
                          const float *more, float *for_x, float *sums, long width) {
    float along = -inverse * inverse * inverse / (float)width * sum_products(gradient, x, weight, inverse, sums, width);
    long i = 0;
    for (; i + WIDTH <= width; i += WIDTH) {
        vec found = load(gradient + i) * load(weight + i) * inverse + load(x + i) * along;
        if (HAS_MORE) found += load(more + i);
        store(for_x + i, found);
    }
    for (; i < width; i++) {
        float found = gradient[i] * weight[i] * inverse + x[i] * along;
        for_x[i] = HAS_MORE ? found + more[i] : found;
    }
}

EXPORT int64_t norm_backward_blocks(int64_t num_rows) { return (num_rows + BLOCK - 1) / BLOCK; }

typedef struct {
    const float *gradient, *x, *weight, *inverse, *more;
    float *for_x, *sums;
    long num_rows, width;
} NormBackward;

static void norm_block_range_backward(void *work, long block, long last_block) {
    const NormBackward *n = work;
    long width = n->width;
    for (; block < last_block; block++) {
        long first = block * BLOCK, last = first + BLOCK < n->num_rows ? first + BLOCK : n->num_rows;
        float *own = n->sums + block * width;
        memset(own, 0, 4 * width);
        for (long row = first, at = first * width; row < last; row++, at += width)
            if (n->more)
                norm_row_backward(1, n->gradient + at, n->x + at, n->weight, n->inverse[row], n->more + at, n->for_x + at, own,
                              width);
            else
                norm_row_backward(0, n->gradient + at, n->x + at, n->weight, n->inverse[row], 0, n->for_x + at, own, width);
    }
}

/* From the gradient of y [T, D]: that of x [T, D], plus `more` [T, D] unless it is null, and that of the weight [D].
   `for_x` may be `gradient`. sums [norm_backward_blocks(T), D] is overwritten. */
EXPORT void norm_backward(const float *gradient, const float *x, const float *weight, const float *inverse, const float *more,
                      float *for_x, float *sums, float *for_weight, int64_t num_rows, int64_t width, int64_t num_threads) {
    NormBackward all = {gradient, x, weight, inverse, more, for_x, sums, num_rows, width};
    long num_blocks = norm_backward_blocks(num_rows);
    parallel_for(norm_block_range_backward, &all, num_blocks, 1, threads_for(num_rows * width, num_threads));
    memset(for_weight, 0, 4 * width);
    for (long block = 0; block < num_blocks; block++)
        for (long i = 0; i < width; i++) for_weight[i] += sums[block * width + i];
}

typedef struct {
    const float *from;
    long from_row, from_head;
    float *to;
    long to_row, to_head;
    const float *cosines, *sines;
    long angles_row;
    float sign;
    long num_heads, half;
} Rotation;

static void rotate_range(void *work, long row, long last) {
    const Rotation *r = work;
    for (; row < last; row++) {
        const float *cosine = r->cosines + row * r->angles_row, *sine = r->sines + row * r->angles_row;
        for (long head = 0; head < r->num_heads; head++)
            rotate(r->from + row * r->from_row + head * r->from_head, r->to + row * r->to_row + head * r->to_head, cosine,
                   sine, r->sign, r->half);
    }
}

/* Rotary position embedding: each head [a, b] becomes [a cos - b sin, b cos + a sin]. A `sign` of -1 instead of 1 rotates
   back. `_row` and `_head` are strides in numbers; the numbers of a head, and of a row of angles [T, K / 2], are
   contiguous. `to` may be `from`. */
EXPORT void rotate_rows(const float *from, int64_t from_row, int64_t from_head, float *to, int64_t to_row, int64_t to_head,
                        const float *cosines, const float *sines, int64_t angles_row, float sign, int64_t num_rows,
                        int64_t num_heads, int64_t half, int64_t num_threads) {
    Rotation all = {from, from_row, from_head, to, to_row, to_head, cosines, sines, angles_row, sign, num_heads, half};
    parallel_for(rotate_range, &all, num_rows, 1, threads_for(2 * num_rows * num_heads * half, num_threads));
}

typedef struct {
    long kind;
    const float *gates, *ups;
    float *opened;
} Activate;

static void activate_range(void *work, long first, long last) {
    const Activate *a = work;
    activate(a->kind, a->gates, a->ups, a->opened, first, last);
}

/* a(gates) * ups, or a(gates) where `ups` is null, of `count` numbers. `kind`: an activation of rowwise.h. */
EXPORT void activate_rows(int64_t kind, const float *gates, const float *ups, float *opened, int64_t count,
                          int64_t num_threads) {
    Activate all = {kind, gates, ups, opened};
    parallel_for(activate_range, &all, count, WIDTH, threads_for(count, num_threads));
}

/* a(x), and its derivative. With s = sigmoid: (x s(x))' = s (1 + x (1 - s)), and of GELU, whose s is that of 2 u,
   s + x s (1 - s) (2 u)'. */
INLINE vec activated_with_slope(const int kind, vec x, vec *slope) {
    if (kind == RELU) {
        *slope = blend(x > 0, broadcast(1), x * 0); /* NaN stays NaN */
        return blend(x < 0, (vec){0}, x);
    }
    vec inner = x;
    if (kind == GELU_TANH) inner = GELU_SCALE * (x + GELU_CUBE * x * x * x);
    vec share = sigmoid(inner), open = x * share;
    if (kind == SILU)
        *slope = share * (1 + x * (1 - share));
    else
        *slope = share + open * (1 - share) * (GELU_SCALE * (1 + 3 * GELU_CUBE * x * x));
    return open;
}

typedef struct {
    long kind;
    const float *gates, *ups;
    float *for_gates, *for_ups, *opened;
} ActivateBackward;

INLINE void activate_vector_backward(const int kind, const ActivateBackward *a, long i, long left) {
    vec slope, gradient = load_masked(a->for_gates + i, left);
    vec open = activated_with_slope(kind, load_masked(a->gates + i, left), &slope);
    if (a->ups) {
        vec up = load_masked(a->ups + i, left);
        store_masked(a->for_ups + i, open * gradient, left);
        gradient *= up;
        open *= up;
    }
    store_masked(a->for_gates + i, gradient * slope, left);
    if (a->opened) store_masked(a->opened + i, open, left);
}

INLINE void activate_kind_backward(const int kind, const ActivateBackward *a, long i, long last) {
    for (; i < last; i += WIDTH) activate_vector_backward(kind, a, i, last - i < WIDTH ? last - i : WIDTH);
}

static void activate_range_backward(void *work, long first, long last) {
    const ActivateBackward *a = work;
    if (a->kind == SILU)
        activate_kind_backward(SILU, a, first, last);
    else if (a->kind == GELU_TANH)
        activate_kind_backward(GELU_TANH, a, first, last);
    else
        activate_kind_backward(RELU, a, first, last);
}

/* Takes the gradient of a(gates) * ups in `for_gates`, and overwrites it with that of the gates. Also writes the gradient
   of ups, unless they are null, and the product itself, unless `opened` is null. */
EXPORT void activate_rows_backward(int64_t kind, const float *gates, const float *ups, float *for_gates, float *for_ups,
                                   float *opened, int64_t count, int64_t num_threads) {
    ActivateBackward all = {kind, gates, ups, for_gates, for_ups, opened};
    parallel_for(activate_range_backward, &all, count, WIDTH, threads_for(count, num_threads));
}
