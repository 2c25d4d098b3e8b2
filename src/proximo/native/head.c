/* What the head of a language model says about given tokens, from scores that are there. The formulas of models/heads.py.

   A row of scores is read twice, the second time from a cache. A score of minus infinity has no share in anything. NaN or
   infinity among scores makes all that is said of their row NaN, and so do scores that are all minus infinity.

   Legend: C rows, V vocabulary; z scores, p = softmax(z). */
#include "kernels.h"

#define PIECE 1024 /* numbers whose sum is made in float32; the sums of pieces are added in float64 */

/* The largest number; NaN are passed over, and are met again in the sums. */
static float top_of(const float *row, long count) {
    vec a = spread(-INFINITY), b = a;
    long i = 0;
    for (; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
        a = larger(load(row + i), a);
        b = larger(load(row + i + WIDTH), b);
    }
    for (; i + WIDTH <= count; i += WIDTH) a = larger(load(row + i), a);
    if (i < count) b = larger(load_some(row + i, count - i, -INFINITY), b);
    return largest_of(larger(a, b));
}

typedef struct {
    double shares, moment; /* sums of e^x and of x e^x, x = z - top */
} Sums;

INLINE void add_shares(const int MOMENT, vec x, vec *shares, vec *moment) {
    vec share = exp_up_to_88(x);
    *shares += share;
    if (MOMENT) *moment += share * if_shared(x);
}

INLINE Sums sums_of_row(const int MOMENT, const float *row, float top, long count) {
    Sums sums = {0, 0};
    for (long from = 0; from < count; from += PIECE) {
        long last = from + PIECE < count ? from + PIECE : count, i = from;
        vec a = {0}, b = {0}, of_a = {0}, of_b = {0};
        for (; i + 2 * WIDTH <= last; i += 2 * WIDTH) {
            add_shares(MOMENT, load(row + i) - top, &a, &of_a);
            add_shares(MOMENT, load(row + i + WIDTH) - top, &b, &of_b);
        }
        for (; i + WIDTH <= last; i += WIDTH) add_shares(MOMENT, load(row + i) - top, &a, &of_a);
        if (i < last) add_shares(MOMENT, load_some(row + i, last - i, -INFINITY) - top, &b, &of_b);
        sums.shares += sum_of(a + b);
        if (MOMENT) sums.moment += sum_of(of_a + of_b);
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
} Judged;

static void judge_rows(void *work, long i, long last) {
    const Judged *j = work;
    for (; i < last; i++) {
        const float *row = j->scores + i * j->vocabulary;
        float top = top_of(row, j->vocabulary);
        Sums sums = j->entropies ? sums_of_row(1, row, top, j->vocabulary) : sums_of_row(0, row, top, j->vocabulary);
        double above = log(sums.shares);
        j->normalisers[i] = (float)(top + above);
        j->logprobs[i] = (float)(((double)row[j->targets[i]] - top) - above);
        if (j->entropies) j->entropies[i] = (float)(above - sums.moment / sums.shares);
    }
}

/* scores [C, V], targets [C] -> log sum exp z, log p of the target and, unless null, the entropy -sum p log p: [C] each.
   Returns 1, with nothing done, where a target is no token. */
EXPORT int score_tokens(const float *scores, const int64_t *targets, float *normalisers, float *logprobs, float *entropies,
                        int64_t num_rows, int64_t vocabulary, int64_t num_threads) {
    if (is_outside(targets, num_rows, vocabulary)) return 1;
    Judged all = {scores, targets, normalisers, logprobs, entropies, vocabulary};
    share_out(judge_rows, &all, num_rows, 1, threads_for(num_rows * vocabulary, num_threads));
    return 0;
}

/* factor p, or p ((log p + entropy) slope + factor). */
INLINE void score_some_back(const int ENTROPY, float *row, float normaliser, float entropy, float slope, float factor,
                            long left) {
    vec x = take(row, left) - normaliser, share = exp_up_to_88(x);
    if (ENTROPY)
        put(row, share * ((if_shared(x) + entropy) * slope + factor), left);
    else
        put(row, share * factor, left);
}

INLINE void score_row_back(const int ENTROPY, float *row, float normaliser, float entropy, float slope, float factor,
                           long count) {
    long j = 0;
    for (; j + WIDTH <= count; j += WIDTH) score_some_back(ENTROPY, row + j, normaliser, entropy, slope, factor, WIDTH);
    if (j < count) score_some_back(ENTROPY, row + j, normaliser, entropy, slope, factor, count - j);
}

typedef struct {
    float *scores;
    const int64_t *targets;
    const float *normalisers, *entropies, *of_logprobs, *of_entropies;
    long vocabulary;
} JudgedBack;

static void judge_rows_back(void *work, long i, long last) {
    const JudgedBack *j = work;
    for (; i < last; i++) {
        float *row = j->scores + i * j->vocabulary, normaliser = j->normalisers[i];
        if (j->of_entropies)
            score_row_back(1, row, normaliser, j->entropies[i], -j->of_entropies[i], -j->of_logprobs[i], j->vocabulary);
        else
            score_row_back(0, row, normaliser, 0, 0, -j->of_logprobs[i], j->vocabulary);
        row[j->targets[i]] += j->of_logprobs[i];
    }
}

/* From the gradients of log p and, unless null, of the entropies H: that of z, in place of the scores [C, V],
   [j = t] g - p_j g - p_j (log p_j + H) g', with the normalisers and entropies of `score_tokens`. Returns as it does. */
EXPORT int score_tokens_back(float *scores, const int64_t *targets, const float *normalisers, const float *entropies,
                             const float *of_logprobs, const float *of_entropies, int64_t num_rows, int64_t vocabulary,
                             int64_t num_threads) {
    if (is_outside(targets, num_rows, vocabulary)) return 1;
    JudgedBack all = {scores, targets, normalisers, entropies, of_logprobs, of_entropies, vocabulary};
    share_out(judge_rows_back, &all, num_rows, 1, threads_for(num_rows * vocabulary, num_threads));
    return 0;
}
