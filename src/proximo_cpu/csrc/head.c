/* Statistics of the log-softmax: log-probs of given tokens, entropy, and their gradients.

   The formulas of proximo/models/heads.py.

   A row of scores is read twice, the second time from a cache. A score of minus infinity contributes nothing. A row with
   NaN or plus infinity, or with minus infinity alone, gives NaN in all its results.

   Legend: C rows, V vocabulary; z scores, p = softmax(z). */
#include "kernels.h"

#define PIECE 1024 /* numbers whose sum is made in float32; the sums of pieces are added in float64 */

/* The largest number. NaN is skipped here; it makes the sums below NaN. */
static float row_max(const float *row, long count) {
    vec a = broadcast(-INFINITY), b = a;
    long i = 0;
    for (; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
        a = maximum(load(row + i), a);
        b = maximum(load(row + i + WIDTH), b);
    }
    for (; i + WIDTH <= count; i += WIDTH) a = maximum(load(row + i), a);
    if (i < count) b = maximum(load_tail(row + i, count - i, -INFINITY), b);
    return reduce_max(maximum(a, b));
}

typedef struct {
    double shares, moment; /* sums of e^x and of x e^x, x = z - top */
} Sums;

INLINE void add_exponentials(const int MOMENT, vec x, vec *shares, vec *moment) {
    vec share = exp_or_zero(x);
    *shares += share;
    if (MOMENT) *moment += share * zero_if_no_share(x);
}

INLINE Sums sums_of_row(const int MOMENT, const float *row, float top, long count) {
    Sums sums = {0, 0};
    for (long from = 0; from < count; from += PIECE) {
        long last = from + PIECE < count ? from + PIECE : count, i = from;
        vec a = {0}, b = {0}, of_a = {0}, of_b = {0};
        for (; i + 2 * WIDTH <= last; i += 2 * WIDTH) {
            add_exponentials(MOMENT, load(row + i) - top, &a, &of_a);
            add_exponentials(MOMENT, load(row + i + WIDTH) - top, &b, &of_b);
        }
        for (; i + WIDTH <= last; i += WIDTH) add_exponentials(MOMENT, load(row + i) - top, &a, &of_a);
        if (i < last) add_exponentials(MOMENT, load_tail(row + i, last - i, -INFINITY) - top, &b, &of_b);
        sums.shares += reduce_sum(a + b);
        if (MOMENT) sums.moment += reduce_sum(of_a + of_b);
    }
    return sums;
}

static int is_outside(const int64_t *targets, long num_rows, long vocabulary) {
    for (long row = 0; row < num_rows; row++)
        if (targets[row] < 0 || targets[row] >= vocabulary) return 1;
    return 0;
}

typedef struct {
    const float *scores;
    const int64_t *targets;
    float *normalisers, *logprobs, *entropies;
    long vocabulary;
} TokenStatistics;

static void token_statistics_range(void *work, long i, long last) {
    const TokenStatistics *j = work;
    for (; i < last; i++) {
        const float *row = j->scores + i * j->vocabulary;
        float top = row_max(row, j->vocabulary);
        Sums sums = j->entropies ? sums_of_row(1, row, top, j->vocabulary) : sums_of_row(0, row, top, j->vocabulary);
        double above = log(sums.shares);
        j->normalisers[i] = (float)(top + above);
        j->logprobs[i] = (float)(((double)row[j->targets[i]] - top) - above);
        if (j->entropies) j->entropies[i] = (float)(above - sums.moment / sums.shares);
    }
}

/* scores [C, V], targets [C] -> log sum exp z, log p of the target and, unless null, the entropy -sum p log p: [C] each.
   Returns 1, with nothing done, where a target is no token. */
EXPORT int token_statistics(const float *scores, const int64_t *targets, float *normalisers, float *logprobs,
                            float *entropies, int64_t num_rows, int64_t vocabulary, int64_t num_threads) {
    if (is_outside(targets, num_rows, vocabulary)) return 1;
    TokenStatistics all = {scores, targets, normalisers, logprobs, entropies, vocabulary};
    parallel_for(token_statistics_range, &all, num_rows, 1, threads_for(num_rows * vocabulary, num_threads));
    return 0;
}

/* factor p, or p ((log p + entropy) slope + factor). */
INLINE void scores_vector_backward(const int ENTROPY, float *row, float normaliser, float entropy, float slope,
                                   float factor, long left) {
    vec x = load_masked(row, left) - normaliser, share = exp_or_zero(x);
    if (ENTROPY)
        store_masked(row, share * ((zero_if_no_share(x) + entropy) * slope + factor), left);
    else
        store_masked(row, share * factor, left);
}

INLINE void scores_row_backward(const int ENTROPY, float *row, float normaliser, float entropy, float slope,
                                float factor, long count) {
    long j = 0;
    for (; j + WIDTH <= count; j += WIDTH)
        scores_vector_backward(ENTROPY, row + j, normaliser, entropy, slope, factor, WIDTH);
    if (j < count) scores_vector_backward(ENTROPY, row + j, normaliser, entropy, slope, factor, count - j);
}

typedef struct {
    float *scores;
    const int64_t *targets;
    const float *normalisers, *entropies, *of_logprobs, *of_entropies;
    long vocabulary;
} TokenStatisticsBackward;

static void token_statistics_range_backward(void *work, long i, long last) {
    const TokenStatisticsBackward *j = work;
    for (; i < last; i++) {
        float *row = j->scores + i * j->vocabulary, normaliser = j->normalisers[i];
        if (j->of_entropies)
            scores_row_backward(1, row, normaliser, j->entropies[i], -j->of_entropies[i], -j->of_logprobs[i], j->vocabulary);
        else
            scores_row_backward(0, row, normaliser, 0, 0, -j->of_logprobs[i], j->vocabulary);
        row[j->targets[i]] += j->of_logprobs[i];
    }
}

/* From the gradients of log p and, unless null, of the entropies H: that of z, in place of the scores [C, V],
   [j = t] g - p_j g - p_j (log p_j + H) g', with the normalisers and entropies of `token_statistics`. Returns as it does. */
EXPORT int token_statistics_backward(float *scores, const int64_t *targets, const float *normalisers,
                                     const float *entropies, const float *of_logprobs, const float *of_entropies, int64_t num_rows, int64_t vocabulary,
                             int64_t num_threads) {
    if (is_outside(targets, num_rows, vocabulary)) return 1;
    TokenStatisticsBackward all = {scores, targets, normalisers, entropies, of_logprobs, of_entropies, vocabulary};
    parallel_for(token_statistics_range_backward, &all, num_rows, 1, threads_for(num_rows * vocabulary, num_threads));
    return 0;
}
