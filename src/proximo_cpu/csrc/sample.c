/* One token for each row of logits by an exponential race.

   The formulas of proximo/rollout/noise.py and proximo/rollout/sampling.py: the same draws up to rounding, in two passes
   over a row that stays in the cache.

   Legend: B rows, V vocabulary. */
#include "kernels.h"

/* log(x) of positive normal numbers, within 1e-7 of the larger of 1 and itself: x = 2^n m, and a polynomial in m - 1,
   sqrt(1/2) <= m < sqrt(2) (Cephes, logf). */
INLINE vec log_positive(vec x) {
    ivec n = ((ivec)x - 0x3F3504F3) >> 23;
    vec f = (vec)((uvec)x - ((uvec)n << 23)) - 1.0f, square = f * f, power = __builtin_convertvector(n, vec);
    vec p = broadcast(7.0376836292e-2f);
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    return f + (p * f * square - 2.12194440e-4f * power - 0.5f * square) + 0.693359375f * power;
}

static uint64_t splitmix64(uint64_t key) {
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9u;
    key = (key ^ key >> 27) * 0x94D049BB133111EBu;
    return key ^ key >> 31;
}

/* Standard exponential numbers of tokens whose counter times 0x9E3779B9 is `counter`. */
INLINE vec exponential_noise(uvec counter, uint32_t low, uint32_t high) {
    uvec bits = counter + low;
    bits = (bits ^ bits >> 16) * 0x7FEB352Du + high;
    bits = (bits ^ bits >> 15) * 0x846CA68Bu;
    bits = (bits ^ bits >> 16) & 0x7FFFFFFFu;
    vec below = (__builtin_convertvector((ivec)bits, vec) + 0.5f) * (-0x1p-31f * (1 - 0x1p-24f));
    /* log1p: adds back what 1 + u lost in rounding, so that small draws keep their digits. */
    vec sum = 1.0f + below;
    return -(log_positive(sum) + (below - (sum - 1.0f)) / sum);
}

/* `logits` of one row over temperature, with as many -inf as fill the last vector. */
INLINE vec scaled_at(const float *logits, long at, long count, float temperature) {
    vec value = broadcast(-INFINITY);
    if (at + WIDTH <= count)
        value = load(logits + at);
    else
        for (long i = at; i < count; i++) value[i - at] = logits[i];
    return value / temperature;
}

static void draw(const float *logits, long count, uint64_t key, float temperature, int64_t *token, float *logprob) {
    uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
    vec top = broadcast(-INFINITY), total = {0}, best = broadcast(-1);
    ivec is_nan = {0}, winners = {0}, index;
    uvec counter;
    for (int i = 0; i < WIDTH; i++) {
        index[i] = i;
        counter[i] = (uint32_t)i * 0x9E3779B9u;
    }
    for (long at = 0; at < count; at += WIDTH) {
        vec value = scaled_at(logits, at, count, temperature);
        is_nan |= value != value;
        top = maximum(value, top);
    }
    float largest = reduce_max(top);
    *token = 0;
    *logprob = NAN;
    for (int i = 0; i < WIDTH; i++)
        if (is_nan[i]) return;
    if (!isfinite(largest)) return;
    for (long at = 0; at < count; at += WIDTH) {
        vec below = scaled_at(logits, at, count, temperature) - largest;
        vec weight = exp_or_zero(below);
        total += weight;
        vec race = weight / exponential_noise(counter, low, high);
        ivec ahead = race > best;
        best = blend(ahead, race, best);
        winners = (index & ahead) | (winners & ~ahead);
        index += WIDTH;
        counter += WIDTH * 0x9E3779B9u;
    }
    int lane = 0;
    for (int i = 1; i < WIDTH; i++)
        if (best[i] > best[lane] || (best[i] == best[lane] && winners[i] < winners[lane])) lane = i;
    *token = winners[lane];
    *logprob = logits[*token] / temperature - (logf(reduce_sum(total)) + largest);
}

typedef struct {
    const float *logits;
    const int64_t *streams, *positions;
    float temperature;
    int64_t *tokens;
    float *logprobs;
    int64_t vocabulary;
} Draws;

static void draw_rows(void *work, long row, long last) {
    const Draws *d = work;
    for (; row < last; row++)
        draw(d->logits + row * d->vocabulary, d->vocabulary,
             splitmix64((uint64_t)d->streams[row] + (uint64_t)d->positions[row] * 0x9E3779B97F4A7C15u), d->temperature,
             d->tokens + row, d->logprobs + row);
}

/* logits [B, V] -> tokens [B] and log softmax(logits / temperature) of them [B]; NaN for a row with a NaN or without a
   finite largest logit. `streams` and `positions` [B] say which draw each row makes. */
EXPORT void sample(const float *logits, const int64_t *streams, const int64_t *positions, float temperature,
                   int64_t *tokens, float *logprobs, int64_t num_rows, int64_t vocabulary, int64_t num_threads) {
    Draws all = {logits, streams, positions, temperature, tokens, logprobs, vocabulary};
    parallel_for(draw_rows, &all, num_rows, 1, (int)num_threads);
}
