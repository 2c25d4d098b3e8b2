/* Causal attention over packed sequences, forward and backward, in tiles that stay in the second cache.

   One unit of work is a piece of one sequence (forward: some of its queries; backward: all of it) with one key head and
   the query heads that share it. It writes what no other unit does, so that who computes it, and when, changes no bit.

   Tiles are products of rows of numbers, each spread over a vector, with panels: parts of two vectors of the rows of a
   matrix, panel after panel. What lies above the diagonal or before the window is left out, but for the numbers that
   share a tile with others.

   Legend: T packed tokens, H query heads, G key heads, K head width, N pieces. */
#include "tiles.h"

#define LOWEST -3e38f /* a score below all: minus infinity less itself would be NaN */

EXPORT const int64_t attention_block = BLOCK; /* queries of a forward piece, at most */

typedef struct {
    int64_t num_heads, num_key_heads, width, window, num_pieces, num_threads;
    const int64_t *pieces; /* [N, 3] where a sequence begins, and its queries from .. to; the longest work first */
    const float *query, *key, *value; /* [H or G, T, K], rows without gaps */
    int64_t query_head, query_token, key_head, key_token, value_head, value_token; /* strides, in numbers */
    float *output;                       /* [T, H, K] */
    float *normalisers;                  /* [T, H, 2] the largest score, and 1 / the sum of exp(score - largest) */
    float *scratch;                      /* `attention_scratch` numbers */
    const float *gradient;               /* [T, H, K] of the output */
    float *of_query, *of_key, *of_value; /* [T, H or G, K] */
    float scaling;
} Attention;

/* Of one thread. */
typedef struct {
    long wide;                                  /* K, in whole panels */
    float *scores, *changes;                    /* [BLOCK, BLOCK] */
    float *keys_turned, *values_turned;         /* panels of BLOCK keys, [K, PANEL] each */
    float *keys, *values, *queries, *gradients; /* panels of K, [BLOCK, PANEL] each */
    float *result, *of_keys, *of_values;        /* [BLOCK, wide] */
} Tiles;

/* A tile in which query `row` is the key `row + ahead`, and sees those from `low` up to, and without, `high`. */
typedef struct {
    long num_rows, num_keys, ahead, window;
} Band;

INLINE long low(const Band *band, long row) {
    return band->window ? smaller(band->num_keys, greater(0, row + band->ahead + 1 - band->window)) : 0;
}
INLINE long high(const Band *band, long row) { return greater(0, smaller(band->num_keys, row + band->ahead + 1)); }

static Tiles tiles_of(const Attention *work, float *scratch) {
    Tiles t = {.wide = (work->width + PANEL - 1) / PANEL * PANEL};
    float **squares[] = {&t.scores, &t.changes};
    float **others[] = {&t.keys_turned, &t.values_turned, &t.keys,    &t.values,   &t.queries,
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
        long rows = smaller(ROWS, band->num_rows - row), end = high(band, row + rows - 1);
        for (long key = low(band, row) / PANEL * PANEL; key < end; key += PANEL)
            by_rows(rows, key + WIDTH < end ? 2 : 1, x + row * x_row, x_row, turned + key * width, width,
                    scores + row * BLOCK + key, BLOCK, 0);
    }
}

/* y = w b, or y += w b, for each query: w [rows, keys] weights, zero outside the band; b panels of K by key. */
static void sum_over_keys(const Band *band, const float *weights, const float *panels, long width, float *y, long y_row,
                          int add) {
    for (long column = 0; column < width; column += PANEL, panels += BLOCK * PANEL)
        for (long row = 0; row < band->num_rows; row += ROWS) {
            long rows = smaller(ROWS, band->num_rows - row), begin = low(band, row), end = high(band, row + rows - 1);
            by_rows(rows, column + WIDTH < width ? 2 : 1, weights + row * BLOCK + begin, BLOCK, panels + begin * PANEL,
                    greater(0, end - begin), y + row * y_row + column, y_row, add);
        }
}

/* The same for each key: y = w' b, or y += w' b, b panels of K by query. */
static void sum_over_queries(const Band *band, const float *weights, const float *panels, long width, float *y,
                             long y_row, int add) {
    for (long column = 0; column < width; column += PANEL, panels += BLOCK * PANEL)
        for (long key = 0; key < band->num_keys; key += ROWS) {
            long keys = smaller(ROWS, band->num_keys - key), begin = greater(0, key - band->ahead), end = band->num_rows;
            if (band->window) end = smaller(end, key + keys - 1 - band->ahead + band->window);
            by_columns(keys, column + WIDTH < width ? 2 : 1, weights + begin * BLOCK + key, BLOCK,
                       panels + begin * PANEL, greater(0, end - begin), y + key * y_row + column, y_row, add);
        }
}

INLINE ivec between(long at, long begin, long end) {
    ivec places;
    for (int i = 0; i < WIDTH; i++) places[i] = (int32_t)at + i;
    return (places >= (int32_t)begin) & (places < (int32_t)end);
}

/* Where the weights of a query are read: up to ROWS - 1 beyond what it sees, with its neighbours. In whole vectors. */
INLINE long first_read(long begin) { return greater(0, begin - ROWS + 1) / WIDTH * WIDTH; }
INLINE long last_read(const Band *band, long end) { return smaller(band->num_keys, end + ROWS - 1); }

/* Scores of one query to weights exp(score - top), with the top and the sum of all seen so far; what the sums before
   have to be multiplied with. */
static float weigh(const Band *band, long row, float *scores, float *top, float *sum) {
    long begin = low(band, row), end = high(band, row), first = first_read(begin), last = last_read(band, end);
    vec largest = spread(*top), total = {0};
    for (long i = first; i < last; i += WIDTH) {
        vec x = load(scores + i);
        if (i < begin || i + WIDTH > end) x = pick(between(i, begin, end), x, spread(LOWEST));
        largest = larger(x, largest);
    }
    float before = *top, now = top_of(largest);
    for (long i = first; i < last; i += WIDTH) {
        vec weight = exp_of(load(scores + i) - now);
        if (i < begin || i + WIDTH > end) weight = pick(between(i, begin, end), weight, (vec){0});
        store(scores + i, weight);
        total += weight;
    }
    float fade = before == now ? 1 : before > LOWEST ? expf(before - now) : 0;
    *top = now;
    *sum = *sum * fade + sum_of(total);
    return fade;
}

/* The block, counted from where the sequence begins, in which the first key is that a query sees. */
INLINE long first_block(const Attention *work, long begin, long query) {
    long first = work->window ? greater(begin, query + 1 - work->window) : begin;
    return begin + (first - begin) / BLOCK * BLOCK;
}

/* Asks for a row to be read or written soon: the next tile's are elsewhere, or the next head's, and nothing else would
   foresee them. */
INLINE void foresee(const int writing, const float *row, long width) {
    for (long i = 0; i < width; i += 16)
        if (writing)
            __builtin_prefetch(row + i, 1, 2);
        else
            __builtin_prefetch(row + i, 0, 2);
}

/* At most BLOCK queries. */
static void attend(const Attention *work, const Tiles *t, long group, const int64_t *piece) {
    long begin = piece[0], from = piece[1], to = piece[2], width = work->width, packed = -1;
    long shared = work->num_heads / work->num_key_heads, last = (group + 1) * shared;
    for (long head = group * shared; head < last; head++) {
        const float *query = work->query + head * work->query_head + from * work->query_token;
        float tops[BLOCK], sums[BLOCK];
        for (long i = 0; i < to - from; i++) tops[i] = LOWEST, sums[i] = 0;
        for (long key = first_block(work, begin, from), add = 0; key < to; key += BLOCK, add = 1) {
            Band band = {to - from, smaller(BLOCK, to - key), from - key, work->window};
            const float *keys = work->key + group * work->key_head + key * work->key_token;
            const float *values = work->value + group * work->value_head + key * work->value_token;
            if (key != packed) {
                turn(keys, work->key_token, band.num_keys, width, work->scaling, t->keys_turned);
                pack(values, work->value_token, band.num_keys, width, t->values);
                packed = key;
            }
            score(&band, query, work->query_token, t->keys_turned, width, t->scores);
            int more = key + BLOCK < to;
            const float *next_keys = keys + (more ? BLOCK * work->key_token : work->key_head);
            const float *next_values = values + (more ? BLOCK * work->value_token : work->value_head);
            for (long i = 0; i < band.num_rows; i++) {
                if (!more) foresee(0, query + work->query_head + i * work->query_token, width);
                if (more || head + 1 == last) {
                    foresee(0, next_keys + i * work->key_token, width);
                    foresee(0, next_values + i * work->value_token, width);
                }
                if (!add) foresee(1, work->output + ((from + i) * work->num_heads + head) * width, width);
                float fade = weigh(&band, i, t->scores + i * BLOCK, tops + i, sums + i);
                if (add && fade != 1) scale_row(t->result + i * t->wide, fade, t->wide, t->result + i * t->wide, 0);
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

/* Weights p = exp(score - top) * inverse, and p * (change - along): the gradients of the scores. The logarithm of the sum
   in one number with the top would be less exact, by as much as the top is large. */
static void weigh_again(const Band *band, long row, float *scores, float *changes, const float *normaliser, float along) {
    long begin = low(band, row), end = high(band, row), first = first_read(begin), last = last_read(band, end);
    for (long i = first; i < last; i += WIDTH) {
        vec weight = exp_of(load(scores + i) - normaliser[0]) * normaliser[1];
        vec change = weight * (load(changes + i) - along);
        if (i < begin || i + WIDTH > end) {
            ivec seen = between(i, begin, end);
            weight = pick(seen, weight, (vec){0}), change = pick(seen, change, (vec){0});
        }
        store(scores + i, weight);
        store(changes + i, change);
    }
}

/* A whole sequence: the sums of keys and values over queries, and of a query over blocks of keys, have one order. */
static void attend_back(const Attention *work, const Tiles *t, long group, const int64_t *piece) {
    long begin = piece[0], end = piece[2], width = work->width, row = work->num_heads * width;
    long shared = work->num_heads / work->num_key_heads, last = (group + 1) * shared;
    for (long key = begin; key < end; key += BLOCK) {
        const float *keys = work->key + group * work->key_head + key * work->key_token;
        const float *values = work->value + group * work->value_head + key * work->value_token;
        long num_keys = smaller(BLOCK, end - key);
        turn(keys, work->key_token, num_keys, width, work->scaling, t->keys_turned);
        turn(values, work->value_token, num_keys, width, 1, t->values_turned);
        pack(keys, work->key_token, num_keys, width, t->keys);
        for (long head = group * shared, add = 0; head < last; head++)
            for (long from = key; from < end && first_block(work, begin, from) <= key; from += BLOCK, add = 1) {
                Band band = {smaller(BLOCK, end - from), num_keys, from - key, work->window};
                const float *query = work->query + head * work->query_head + from * work->query_token;
                long first = (from * work->num_heads + head) * width;
                const float *gradient = work->gradient + first, *output = work->output + first;
                pack(query, work->query_token, band.num_rows, width, t->queries);
                pack(gradient, row, band.num_rows, width, t->gradients);
                score(&band, query, work->query_token, t->keys_turned, width, t->scores);
                score(&band, gradient, row, t->values_turned, width, t->changes);
                int more = from + BLOCK < end;
                const float *next_query = query + (more ? BLOCK * work->query_token : work->query_head);
                long next = more ? BLOCK * row : width;
                for (long i = 0; i < band.num_rows; i++) {
                    foresee(0, next_query + i * work->query_token, width);
                    foresee(0, gradient + next + i * row, width);
                    foresee(0, output + next + i * row, width);
                    if (!more && i < num_keys && head + 1 == last) {
                        foresee(0, keys + work->key_head + i * work->key_token, width);
                        foresee(0, values + work->value_head + i * work->value_token, width);
                    }
                    foresee(1, work->of_query + first + i * row, width);
                    if (!add && i < num_keys) {
                        long at = ((key + i) * work->num_key_heads + group) * width;
                        foresee(1, work->of_key + at, width);
                        foresee(1, work->of_value + at, width);
                    }
                    weigh_again(&band, i, t->scores + i * BLOCK, t->changes + i * BLOCK,
                                work->normalisers + 2 * ((from + i) * work->num_heads + head),
                                dot(gradient + i * row, output + i * row, width));
                }
                sum_over_queries(&band, t->scores, t->gradients, width, t->of_values, t->wide, (int)add);
                sum_over_queries(&band, t->changes, t->queries, width, t->of_keys, t->wide, (int)add);
                sum_over_keys(&band, t->changes, t->keys, width, t->result, t->wide, 0);
                int again = first_block(work, begin, from) < key;
                for (long i = 0; i < band.num_rows; i++)
                    scale_row(t->result + i * t->wide, work->scaling, width, work->of_query + first + i * row, again);
            }
        for (long i = 0; i < num_keys; i++) {
            long at = ((key + i) * work->num_key_heads + group) * width;
            scale_row(t->of_keys + i * t->wide, work->scaling, width, work->of_key + at, 0);
            scale_row(t->of_values + i * t->wide, 1, width, work->of_value + at, 0);
        }
    }
}

typedef struct {
    const Attention *work;
    void (*unit)(const Attention *, const Tiles *, long, const int64_t *);
    long next; /* the first unit that nobody has begun */
} Units;

/* One thread, and which: its part of the scratch numbers. */
static void run_units(void *given, long thread, long last) {
    Units *units = given;
    const Attention *work = units->work;
    long count = work->num_pieces * work->num_key_heads;
    if (thread == last) return;
    Tiles tiles = tiles_of(work, work->scratch + thread * attention_scratch(work->width, 1));
    for (long i; (i = __atomic_fetch_add(&units->next, 1, __ATOMIC_RELAXED)) < count;)
        units->unit(work, &tiles, i % work->num_key_heads, work->pieces + i / work->num_key_heads * 3);
}

static void each_unit(const Attention *work, void (*unit)(const Attention *, const Tiles *, long, const int64_t *)) {
    Units units = {work, unit, 0};
    int wanted = (int)smaller(work->num_threads, work->num_pieces * work->num_key_heads);
    share_out(run_units, &units, wanted, 1, wanted);
}

EXPORT void attention_forward(const Attention *work) { each_unit(work, attend); }

EXPORT void attention_backward(const Attention *work) { each_unit(work, attend_back); }
