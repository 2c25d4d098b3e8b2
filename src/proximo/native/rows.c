/* What training and scoring do to activations row by row: norms, rotary positions and gates, forward and backward.

   The formulas of models/fused.py, each in one pass over memory. Rows (or numbers, where rows do not matter) are shared
   out among threads; what is summed over rows is summed in blocks of a fixed size, which are then added in their order.

   Legend: T rows, D width, H heads, K head width. */
#include "rowwise.h"

#define BLOCK 64 /* rows whose sum is made by one thread */

/* x [T, D], weight [D] -> inverse [T], 1 / sqrt(mean(x^2) + epsilon), and y [T, D], weight * x * inverse. */
EXPORT void norm_rows(const float *x, const float *weight, float epsilon, float *inverse, float *y, int64_t num_rows,
                      int64_t width, int64_t num_threads) {
    int wanted = threads_for(num_rows * width, num_threads);
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        long row = part(num_rows, 1, thread, threads), last = part(num_rows, 1, thread + 1, threads);
        for (; row < last; row++) {
            inverse[row] = inverse_rms(x + row * width, epsilon, width);
            scale_row(x + row * width, inverse[row], weight, y + row * width, width);
        }
    }
}

/* y of `norm_rows` again, from the inverse that it found. */
EXPORT void scale_rows(const float *x, const float *weight, const float *inverse, float *y, int64_t num_rows,
                       int64_t width, int64_t num_threads) {
    int wanted = threads_for(num_rows * width, num_threads);
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        long row = part(num_rows, 1, thread, threads), last = part(num_rows, 1, thread + 1, threads);
        for (; row < last; row++)
            scale_row(x + row * width, inverse[row], weight, y + row * width, width);
    }
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
    return sum_of(a + b) + rest;
}

INLINE void norm_back_row(const int HAS_MORE, const float *gradient, const float *x, const float *weight, float inverse,
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

EXPORT int64_t norm_back_blocks(int64_t num_rows) { return (num_rows + BLOCK - 1) / BLOCK; }

/* From the gradient of y [T, D]: that of x [T, D], plus `more` [T, D] unless it is null, and that of the weight [D].
   `for_x` may be `gradient`. sums [norm_back_blocks(T), D] is overwritten. */
EXPORT void norm_back(const float *gradient, const float *x, const float *weight, const float *inverse, const float *more,
                      float *for_x, float *sums, float *for_weight, int64_t num_rows, int64_t width, int64_t num_threads) {
    int wanted = threads_for(num_rows * width, num_threads);
    long num_blocks = norm_back_blocks(num_rows);
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (long block = part(num_blocks, 1, thread, threads); block < part(num_blocks, 1, thread + 1, threads); block++) {
            long first = block * BLOCK, last = first + BLOCK < num_rows ? first + BLOCK : num_rows;
            float *own = sums + block * width;
            memset(own, 0, 4 * width);
            for (long at = first * width; at < last * width; at += width)
                if (more)
                    norm_back_row(1, gradient + at, x + at, weight, inverse[at / width], more + at, for_x + at, own, width);
                else
                    norm_back_row(0, gradient + at, x + at, weight, inverse[at / width], 0, for_x + at, own, width);
        }
    }
    memset(for_weight, 0, 4 * width);
    for (long block = 0; block < num_blocks; block++)
        for (long i = 0; i < width; i++) for_weight[i] += sums[block * width + i];
}

/* Rotary positions: each head [a, b] becomes [a cos - b sin, b cos + a sin], or turns by the negative angle where
   `sign` is -1 and not 1. Numbers from the beginning of one row (or head) to that of the next are given as `_row` (and
   `_head`); the numbers of a head, and of a row of angles [T, K / 2], lie side by side. `to` may be `from`. */
EXPORT void rotate_rows(const float *from, int64_t from_row, int64_t from_head, float *to, int64_t to_row, int64_t to_head,
                        const float *cosines, const float *sines, int64_t angles_row, float sign, int64_t num_rows,
                        int64_t num_heads, int64_t half, int64_t num_threads) {
    int wanted = threads_for(2 * num_rows * num_heads * half, num_threads);
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        long row = part(num_rows, 1, thread, threads), last = part(num_rows, 1, thread + 1, threads);
        for (; row < last; row++) {
            const float *cosine = cosines + row * angles_row, *sine = sines + row * angles_row;
            for (long head = 0; head < num_heads; head++)
                rotate(from + row * from_row + head * from_head, to + row * to_row + head * to_head, cosine, sine, sign,
                       half);
        }
    }
}

/* silu(gates) * ups, of `count` numbers. */
EXPORT void open_gates(const float *gates, const float *ups, float *opened, int64_t count, int64_t num_threads) {
    int wanted = threads_for(count, num_threads);
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        open_row(gates, ups, opened, part(count, WIDTH, thread, threads), part(count, WIDTH, thread + 1, threads));
    }
}

/* With s = sigmoid(g): silu(g)' = s (1 + g (1 - s)). */
INLINE void open_some_back(const float *gates, const float *ups, float *for_gates, float *for_ups, float *opened,
                           long left) {
    vec gate = take(gates, left), up = take(ups, left), gradient = take(for_gates, left);
    vec share = sigmoid(gate), open = gate * share;
    put(for_ups, open * gradient, left);
    put(for_gates, gradient * up * (share * (1 + gate * (1 - share))), left);
    if (opened) put(opened, open * up, left);
}

/* From the gradient of silu(gates) * ups, in `for_gates`: the gradients of gates, which overwrite it, and of ups, and
   `opened`, what the product was, unless that is null. */
EXPORT void open_gates_back(const float *gates, const float *ups, float *for_gates, float *for_ups, float *opened,
                            int64_t count, int64_t num_threads) {
    int wanted = threads_for(count, num_threads);
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        long i = part(count, WIDTH, thread, threads), last = part(count, WIDTH, thread + 1, threads);
#define AT(array) (array ? array + i : 0)
        for (; i + WIDTH <= last; i += WIDTH)
            open_some_back(gates + i, ups + i, for_gates + i, for_ups + i, AT(opened), WIDTH);
        if (i < last) open_some_back(gates + i, ups + i, for_gates + i, for_ups + i, AT(opened), last - i);
    }
}
