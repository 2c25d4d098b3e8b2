/* Causal attention over packed sequences, forward and backward, in tiles that stay in the second cache.

   The algorithm is that of FlashAttention-2 (arXiv:2307.08691): an online softmax in the forward pass, and weights that
   are computed again from two numbers per query and head in the backward pass. So no [T, T] matrix is ever stored.

   A row consists of segments. A segment may follow a prefix, an earlier segment that itself follows none: its queries see
   the keys of the prefix, and then their own. One unit of work is a piece of the row (forward: at most BLOCK queries of a
   segment; backward: a prefix with all that follow it, or a segment without prefix), one key head and the query heads that
   share it. Units write disjoint memory, so neither the thread nor the order of units changes a bit. Tiles above the
   diagonal or before the window are skipped; where a tile is partly outside, its weights are zeros.

   A position counts the tokens from where a sequence begins, that is from the first token of its prefix. Blocks of keys
   begin at the first key of the prefix, and anew at the first key of the segment.

   Legend: T packed tokens, H query heads, G key heads, K head width, N pieces, S segments. */
#include "tiles.h"

#define LOWEST -3e38f /* stands for minus infinity, whose difference with itself would be NaN */

EXPORT const int64_t attention_block = BLOCK; /* queries of a forward piece, at most */

typedef struct {
    int64_t begin, end;
    int64_t prefix; /* the segment that it follows; -1 for none */
} Segment;

typedef struct {
    int64_t num_heads, num_key_heads, width, window, num_pieces, num_threads;
    const Segment *segments; /* [S] a prefix comes directly before the segments that follow it */
    const int64_t *pieces;   /* [N, 3] the longest work first; forward: a segment, and its queries from .. to; backward:
                                segments from .. to, and 0 */
    const float *query, *key, *value; /* [H or G, T, K], rows without gaps */
    int64_t query_head, query_token, key_head, key_token, value_head, value_token; /* strides, in numbers */
    float *output;                       /* [T, H, K] */
    float *normalisers;                  /* [T, H, 2] the largest score, and 1 / the sum of exp(score - largest) */
    float *scratch;                      /* `attention_scratch` numbers */
    const float *gradient;               /* [T, H, K] of the output */
    float *of_query, *of_key, *of_value; /* [T, H or G, K] */
    float scaling, softcap; /* c: scores become c tanh(score / c); 0 for no cap */
} Attention;

/* Of one thread. */
typedef struct {
    long wide;                                  /* K, in whole panels */
    float *scores, *score_gradients;                    /* [BLOCK, BLOCK] */
    float *keys_transposed, *values_transposed;         /* panels of BLOCK keys, [K, PANEL] each */
    float *keys, *values, *queries, *gradients; /* panels of K, [BLOCK, PANEL] each */
    float *result, *of_keys, *of_values;        /* [BLOCK, wide] */
} Tiles;

/* A block of queries and keys. Query `row` is at the position of key `row + ahead`; it attends to the keys from `first_key`
   up to, but without, `end_key`. */
typedef struct {
    long num_rows, num_keys, ahead, window;
} Band;

INLINE long first_key(const Band *band, long row) {
    return band->window ? min_long(band->num_keys, max_long(0, row + band->ahead + 1 - band->window)) : 0;
}
INLINE long end_key(const Band *band, long row) { return max_long(0, min_long(band->num_keys, row + band->ahead + 1)); }

static Tiles lay_out_tiles(const Attention *work, float *scratch) {
    Tiles t = {.wide = (work->width + PANEL - 1) / PANEL * PANEL};
    float **squares[] = {&t.scores, &t.score_gradients};
    float **others[] = {&t.keys_transposed, &t.values_transposed, &t.keys,    &t.values,   &t.queries,
                        &t.gradients,   &t.result,        &t.of_keys, &t.of_values};
    for (int i = 0; i < 2; i++, scratch += BLOCK * BLOCK) *squares[i] = scratch;
    for (int i = 0; i < 9; i++, scratch += BLOCK * t.wide) *others[i] = scratch;
    return t;
}

EXPORT int64_t attention_scratch(int64_t width, int64_t num_threads) {
    long wide = (width + PANEL - 1) / PANEL * PANEL;
    return num_threads * BLOCK * (2 * BLOCK + 9 * wide);
}

/* Scores x w' inside the band: x [rows, K], w in turned panels. */
static void score(const Band *band, const float *x, long x_row, const float *turned, long width, float *scores) {
    for (long row = 0; row < band->num_rows; row += ROWS) {
        long rows = min_long(ROWS, band->num_rows - row), end = end_key(band, row + rows - 1);
        for (long key = first_key(band, row) / PANEL * PANEL; key < end; key += PANEL)
            tile_by_rows(rows, key + WIDTH < end ? 2 : 1, x + row * x_row, x_row, turned + key * width, width,
                    scores + row * BLOCK + key, BLOCK, 0);
    }
}

/* y = w b, or y += w b, for each query: w [rows, keys] weights, zero outside the band; b panels of K by key. */
static void sum_over_keys(const Band *band, const float *weights, const float *panels, long width, float *y, long y_row,
                          int add) {
    for (long column = 0; column < width; column += PANEL, panels += BLOCK * PANEL)
        for (long row = 0; row < band->num_rows; row += ROWS) {
            long rows = min_long(ROWS, band->num_rows - row);
            long begin = first_key(band, row), end = end_key(band, row + rows - 1);
            tile_by_rows(rows, column + WIDTH < width ? 2 : 1, weights + row * BLOCK + begin, BLOCK,
                    panels + begin * PANEL,
                    max_long(0, end - begin), y + row * y_row + column, y_row, add);
        }
}

/* The same for each key: y = w' b, or y += w' b, b panels of K by query. */
static void sum_over_queries(const Band *band, const float *weights, const float *panels, long width, float *y,
                             long y_row, int add) {
    for (long column = 0; column < width; column += PANEL, panels += BLOCK * PANEL)
        for (long key = 0; key < band->num_keys; key += ROWS) {
            long keys = min_long(ROWS, band->num_keys - key), begin = max_long(0, key - band->ahead), end = band->num_rows;
            if (band->window) end = min_long(end, key + keys - 1 - band->ahead + band->window);
            tile_by_columns(keys, column + WIDTH < width ? 2 : 1, weights + begin * BLOCK + key, BLOCK,
                       panels + begin * PANEL, max_long(0, end - begin), y + key * y_row + column, y_row, add);
        }
}

INLINE ivec lanes_between(long at, long begin, long end) {
    ivec lanes;
    for (int i = 0; i < WIDTH; i++) lanes[i] = (int32_t)at + i;
    return (lanes >= (int32_t)begin) & (lanes < (int32_t)end);
}

/* The range of weights that is read for a query, in whole vectors. A tile has ROWS queries, so products read up to ROWS - 1
   weights beyond what a query attends to: these must be written too, as zeros. */
INLINE long first_read_key(long begin) { return max_long(0, begin - ROWS + 1) / WIDTH * WIDTH; }
INLINE long last_read_key(const Band *band, long end) { return min_long(band->num_keys, end + ROWS - 1); }

/* tanh, to about 1e-7 of its size: near 0 by the polynomial of Cephes' tanhf, since the other formula subtracts from 1. */
INLINE vec tanh_of(vec u) {
    vec square = u * u, sum = square * -5.70498872745e-3f + 2.06390887954e-2f;
    sum = ((sum * square - 5.37397155531e-2f) * square + 1.33314422036e-1f) * square - 3.33332819422e-1f;
    return blend((u < 0.625f) & (u > -0.625f), u + u * square * sum, 1 - 2 / (1 + exp_clamped(2 * u)));
}

/* Caps the scores of one query that are read for it. */
INLINE void cap_scores(const Band *band, long row, float *scores, float softcap) {
    long first = first_read_key(first_key(band, row)), last = last_read_key(band, end_key(band, row));
    for (long i = first; i < last; i += WIDTH) store(scores + i, softcap * tanh_of(load(scores + i) / softcap));
}

/* Online softmax: turns scores of one query into exp(score - top), and updates the largest score and the sum over all
   blocks so far. Returns the factor by which results of earlier blocks must be multiplied, since their top was lower. */
static float softmax_numerators(const Band *band, long row, float *scores, float *top, float *sum) {
    long begin = first_key(band, row), end = end_key(band, row);
    long first = first_read_key(begin), last = last_read_key(band, end);
    vec largest = broadcast(*top), total = {0};
    for (long i = first; i < last; i += WIDTH) {
        vec x = load(scores + i);
        if (i < begin || i + WIDTH > end) x = blend(lanes_between(i, begin, end), x, broadcast(LOWEST));
        largest = maximum(x, largest);
    }
    float before = *top, now = reduce_max_by_halves(largest);
    for (long i = first; i < last; i += WIDTH) {
        vec weight = exp_clamped(load(scores + i) - now);
        if (i < begin || i + WIDTH > end) weight = blend(lanes_between(i, begin, end), weight, (vec){0});
        store(scores + i, weight);
        total += weight;
    }
    float rescaling = before == now ? 1 : before > LOWEST ? expf(before - now) : 0;
    *top = now;
    *sum = *sum * rescaling + reduce_sum(total);
    return rescaling;
}

/* The keys that the queries of one segment see. */
typedef struct {
    long before, prefix; /* tokens of the prefix, and where it begins in the row */
    long begin, end;     /* the segment itself */
} Keys;

static Keys keys_of(const Attention *work, const Segment *segment) {
    Keys keys = {0, 0, segment->begin, segment->end};
    if (segment->prefix < 0) return keys;
    const Segment *prefix = work->segments + segment->prefix;
    keys.before = prefix->end - prefix->begin, keys.prefix = prefix->begin;
    return keys;
}
/* From a position to an index in the row. */
INLINE long at_position(const Keys *keys, long position) {
    return position < keys->before ? keys->prefix + position : keys->begin + position - keys->before;
}
INLINE long position_of(const Keys *keys, long index) { return keys->before + index - keys->begin; }
/* Where the block ends that begins at a position: after BLOCK keys, or with the prefix. */
INLINE long block_end(const Keys *keys, long position) {
    return position < keys->before ? min_long(keys->before, position + BLOCK) : position + BLOCK;
}
/* Where the block begins in which the first key lies that a query sees. All are positions. */
INLINE long first_block(const Attention *work, const Keys *keys, long query) {
    long first = work->window ? max_long(0, query + 1 - work->window) : 0;
    long origin = first < keys->before ? 0 : keys->before;
    return origin + (first - origin) / BLOCK * BLOCK;
}

/* Prefetches a row that the next tile or the next head will read or write. It lies at another address, which the hardware
   prefetcher cannot predict. */
INLINE void prefetch_row(const int writing, const float *row, long width) {
    for (long i = 0; i < width; i += 16)
        if (writing)
            __builtin_prefetch(row + i, 1, 2);
        else
            __builtin_prefetch(row + i, 0, 2);
}

/* At most BLOCK queries. */
static void attend(const Attention *work, const Tiles *t, long group, const int64_t *piece) {
    Keys seen = keys_of(work, work->segments + piece[0]);
    long from = piece[1], to = piece[2], width = work->width, packed = -1;
    long first = position_of(&seen, from), end = position_of(&seen, to);
    long shared = work->num_heads / work->num_key_heads, last = (group + 1) * shared;
    for (long head = group * shared; head < last; head++) {
        const float *query = work->query + head * work->query_head + from * work->query_token;
        float tops[BLOCK], sums[BLOCK];
        for (long i = 0; i < to - from; i++) tops[i] = LOWEST, sums[i] = 0;
        for (long key = first_block(work, &seen, first), next, add = 0; key < end; key = next, add = 1) {
            next = block_end(&seen, key);
            Band band = {to - from, min_long(next, end) - key, first - key, work->window};
            long at = at_position(&seen, key), more = next < end;
            const float *keys = work->key + group * work->key_head + at * work->key_token;
            const float *values = work->value + group * work->value_head + at * work->value_token;
            if (key != packed) {
                pack_transposed(keys, work->key_token, band.num_keys, width, work->scaling, t->keys_transposed);
                pack(values, work->value_token, band.num_keys, width, t->values);
                packed = key;
            }
            score(&band, query, work->query_token, t->keys_transposed, width, t->scores);
            long step = at_position(&seen, next) - at;
            const float *next_keys = keys + (more ? step * work->key_token : work->key_head);
            const float *next_values = values + (more ? step * work->value_token : work->value_head);
            for (long i = 0; i < band.num_rows; i++) {
                if (!more) prefetch_row(0, query + work->query_head + i * work->query_token, width);
                if (more || head + 1 == last) {
                    prefetch_row(0, next_keys + i * work->key_token, width);
                    prefetch_row(0, next_values + i * work->value_token, width);
                }
                if (!add) prefetch_row(1, work->output + ((from + i) * work->num_heads + head) * width, width);
                if (work->softcap) cap_scores(&band, i, t->scores + i * BLOCK, work->softcap);
                float rescaling = softmax_numerators(&band, i, t->scores + i * BLOCK, tops + i, sums + i);
                if (add && rescaling != 1) scale_row(t->result + i * t->wide, rescaling, t->wide, t->result + i * t->wide, 0);
            }
            sum_over_keys(&band, t->scores, t->values, width, t->result, t->wide, (int)add);
        }
        for (long i = 0; i < to - from; i++) {
            long at = (from + i) * work->num_heads + head;
            work->normalisers[2 * at] = tops[i], work->normalisers[2 * at + 1] = 1 / sums[i];
            scale_row(t->result + i * t->wide, 1 / sums[i], width, work->output + at * width, 0);
        }
    }
}

/* Backward of the softmax. Recomputes the weights p = exp(score - top) * inverse, and turns the gradients dp of the weights
   into those of the scores, p * (dp - delta), where delta = sum p dp; before the cap c, of a score that it has made s, times
   1 - (s / c)^2. The top and the inverse are kept as two numbers: a
   single log-sum-exp would lose as many digits as the top has before the point. */
static void recompute_softmax(const Band *band, long row, float *scores, float *score_gradients, const float *normaliser,
                              float delta, float softcap) {
    if (softcap) cap_scores(band, row, scores, softcap);
    long begin = first_key(band, row), end = end_key(band, row);
    long first = first_read_key(begin), last = last_read_key(band, end);
    for (long i = first; i < last; i += WIDTH) {
        vec score = load(scores + i), weight = exp_clamped(score - normaliser[0]) * normaliser[1];
        vec score_gradient = weight * (load(score_gradients + i) - delta);
        if (softcap) score_gradient *= 1 - (score / softcap) * (score / softcap);
        if (i < begin || i + WIDTH > end) {
            ivec seen = lanes_between(i, begin, end);
            weight = blend(seen, weight, (vec){0}), score_gradient = blend(seen, score_gradient, (vec){0});
        }
        store(scores + i, weight);
        store(score_gradients + i, score_gradient);
    }
}

/* The part of the gradients that comes from the queries of one head from `from` on, at most BLOCK, and the keys from `key`
   on. `add`: to dK and dV of these keys; `again`: to dQ. `more`: the next block is of the same segment and head. */
static void backward_of_block(const Attention *work, const Tiles *t, const Band *band, long head, long from, long key,
                              int add, int again, int more) {
    long width = work->width, row = work->num_heads * width, shared = work->num_heads / work->num_key_heads;
    long group = head / shared, first = (from * work->num_heads + head) * width, next = more ? BLOCK * row : width;
    const float *query = work->query + head * work->query_head + from * work->query_token;
    const float *next_query = query + (more ? BLOCK * work->query_token : work->query_head);
    const float *gradient = work->gradient + first, *output = work->output + first;
    pack(query, work->query_token, band->num_rows, width, t->queries);
    pack(gradient, row, band->num_rows, width, t->gradients);
    score(band, query, work->query_token, t->keys_transposed, width, t->scores);
    /* dp = dO v', with the function that computes scores. */
    score(band, gradient, row, t->values_transposed, width, t->score_gradients);
    for (long i = 0; i < band->num_rows; i++) {
        prefetch_row(0, next_query + i * work->query_token, width);
        prefetch_row(0, gradient + next + i * row, width);
        prefetch_row(0, output + next + i * row, width);
        if (!more && i < band->num_keys && head + 1 == (group + 1) * shared) {
            prefetch_row(0, work->key + (group + 1) * work->key_head + (key + i) * work->key_token, width);
            prefetch_row(0, work->value + (group + 1) * work->value_head + (key + i) * work->value_token, width);
        }
        prefetch_row(1, work->of_query + first + i * row, width);
        if (!add && i < band->num_keys) {
            long at = ((key + i) * work->num_key_heads + group) * width;
            prefetch_row(1, work->of_key + at, width);
            prefetch_row(1, work->of_value + at, width);
        }
        /* sum p dp = dO . o: the dot product with the output needs no pass over all keys. */
        recompute_softmax(band, i, t->scores + i * BLOCK, t->score_gradients + i * BLOCK,
                    work->normalisers + 2 * ((from + i) * work->num_heads + head),
                    dot(gradient + i * row, output + i * row, width), work->softcap);
    }
    /* dV += p' dO, dK += dS' q, dQ += dS k. Scaling is applied once to each sum, not to each weight. */
    sum_over_queries(band, t->scores, t->gradients, width, t->of_values, t->wide, add);
    sum_over_queries(band, t->score_gradients, t->queries, width, t->of_keys, t->wide, add);
    sum_over_keys(band, t->score_gradients, t->keys, width, t->result, t->wide, 0);
    for (long i = 0; i < band->num_rows; i++)
        scale_row(t->result + i * t->wide, work->scaling, width, work->of_query + first + i * row, again);
}

/* dK and dV of the block of keys of `owner` that begins at `key`, and its part of dQ. The queries are those of `owner`
   and of the segments after it up to `end`, which follow it. */
static void backward_of_keys(const Attention *work, const Tiles *t, long group, long owner, long end, long key) {
    const Segment *of = work->segments + owner;
    const float *keys = work->key + group * work->key_head + key * work->key_token;
    const float *values = work->value + group * work->value_head + key * work->value_token;
    long num_keys = min_long(BLOCK, of->end - key), width = work->width;
    long shared = work->num_heads / work->num_key_heads, last = (group + 1) * shared;
    pack_transposed(keys, work->key_token, num_keys, width, work->scaling, t->keys_transposed);
    pack_transposed(values, work->value_token, num_keys, width, 1, t->values_transposed);
    pack(keys, work->key_token, num_keys, width, t->keys);
    for (long head = group * shared, add = 0; head < last; head++)
        for (long reader = owner; reader < end; reader++) {
            Keys seen = keys_of(work, work->segments + reader);
            long position = reader == owner ? position_of(&seen, key) : key - of->begin;
            for (long from = reader == owner ? key : seen.begin; from < seen.end; from += BLOCK, add = 1) {
                long query = position_of(&seen, from), first = first_block(work, &seen, query);
                if (first > position) break;
                Band band = {min_long(BLOCK, seen.end - from), num_keys, query - position, work->window};
                backward_of_block(work, t, &band, head, from, key, (int)add, first < position, from + BLOCK < seen.end);
            }
        }
    for (long i = 0; i < num_keys; i++) {
        long at = ((key + i) * work->num_key_heads + group) * width;
        scale_row(t->of_keys + i * t->wide, work->scaling, width, work->of_key + at, 0);
        scale_row(t->of_values + i * t->wide, 1, width, work->of_value + at, 0);
    }
}

/* Gradients of a segment without prefix and of those that follow it, if there are any. The outer loops run over blocks of
   keys, whose gradients dK and dV are summed over all heads and queries that see them, in the scratch memory, and written
   once. dQ is summed in its place, block of keys after block. One thread computes all of it, so both sums have a fixed
   order; a split over threads would need atomic additions, whose order, and so whose last bits, differ from run to run. */
static void attend_backward(const Attention *work, const Tiles *t, long group, const int64_t *piece) {
    for (long owner = piece[0]; owner < piece[1]; owner++)
        for (long key = work->segments[owner].begin; key < work->segments[owner].end; key += BLOCK)
            backward_of_keys(work, t, group, owner, owner == piece[0] ? piece[1] : owner + 1, key);
}

typedef struct {
    const Attention *work;
    void (*unit)(const Attention *, const Tiles *, long, const int64_t *);
    long next; /* the first unit that no thread has taken; threads take units as they become free */
} Units;

/* Runs on one thread; `thread` selects its part of the scratch memory. */
static void run_units(void *given, long thread, long last) {
    Units *units = given;
    const Attention *work = units->work;
    long count = work->num_pieces * work->num_key_heads;
    if (thread == last) return;
    Tiles tiles = lay_out_tiles(work, work->scratch + thread * attention_scratch(work->width, 1));
    for (long i; (i = __atomic_fetch_add(&units->next, 1, __ATOMIC_RELAXED)) < count;)
        units->unit(work, &tiles, i % work->num_key_heads, work->pieces + i / work->num_key_heads * 3);
}

static void each_unit(const Attention *work, void (*unit)(const Attention *, const Tiles *, long, const int64_t *)) {
    Units units = {work, unit, 0};
    int wanted = (int)min_long(work->num_threads, work->num_pieces * work->num_key_heads);
    parallel_for(run_units, &units, wanted, 1, wanted);
}

EXPORT void attention_forward(const Attention *work) { each_unit(work, attend); }

EXPORT void attention_backward(const Attention *work) { each_unit(work, attend_backward); }
