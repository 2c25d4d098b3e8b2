/* One more token for each row through the layers of Llama, Mistral and Qwen2, and logits from a few rows.

   The formulas of models/cpu/decoding.py. All layers run in one parallel region. Threads divide the columns of a product,
   or the rows and heads of attention, and meet at a barrier between stages.

   Legend: B rows, D width, H query heads, G key heads, K head width, F width of the gated layer. */
#include "rowwise.h"

typedef struct {
    const float *first_norm, *query, *query_bias, *key, *key_bias, *value, *value_bias, *output, *second_norm, *gate, *up,
        *down;
    float first_epsilon, second_epsilon, scaling;
    int64_t window; /* tokens that a token sees, itself included; 0 for all */
} Layer;

typedef struct {
    int64_t num_layers, width, num_heads, num_key_heads, head_width, gated_width;
    const float *last_norm;
    float last_epsilon;
    const Layer *layers;
} Model;

typedef struct {
    int64_t num_rows, num_threads, capacity;
    const int64_t *positions;        /* [B] */
    const float *cosines, *sines;    /* [B, K / 2] */
    float *const *keys, *const *values; /* of each layer, [rows, G, capacity, K] */
    float *hidden;                   /* [B, D]: embeddings in, hidden states after the last norm out */
    float *scratch;                  /* `scratch_size` numbers */
} Pass;

/* Buffers between the stages. */
typedef struct {
    float *normed, *heads, *attended, *gates, *ups, *scores;
    long heads_row, scores_row;
} Scratch;

static long padded(long count) { return (count + 15) / 16 * 16; }

static Scratch lay_out_scratch(const Model *model, const Pass *pass) {
    long rows = pass->num_rows, heads = model->num_heads * model->head_width;
    Scratch s;
    s.heads_row = heads + 2 * model->num_key_heads * model->head_width;
    s.scores_row = padded(pass->capacity);
    s.normed = pass->scratch;
    s.heads = s.normed + padded(rows * model->width);
    s.attended = s.heads + padded(rows * s.heads_row);
    s.gates = s.attended + padded(rows * heads);
    s.ups = s.gates + padded(rows * model->gated_width);
    s.scores = s.ups + padded(rows * model->gated_width);
    return s;
}

EXPORT int64_t scratch_size(const Model *model, const Pass *pass) {
    Scratch s = lay_out_scratch(model, pass);
    return s.scores - pass->scratch + pass->num_threads * model->num_heads / model->num_key_heads * s.scores_row;
}

/* w * x / sqrt(mean(x^2) + epsilon) of each row. */
static void norm(const float *x, float *y, const float *weight, float epsilon, long width, long first, long last) {
    for (long at = first * width; at < last * width; at += width)
        scale_row(x + at, inverse_rms(x + at, epsilon, width), weight, y + at, width);
}

/* The columns from `first` to `last` of x w' + bias. */
static void linear(const float *x, long x_row, long num_rows, const float *w, const float *bias, long inputs, long first,
                   long last, float *y, long y_row) {
    for (long row = 0; row < num_rows; row++)
        if (bias)
            memcpy(y + row * y_row + first, bias + first, 4 * (last - first));
        else
            memset(y + row * y_row + first, 0, 4 * (last - first));
    add_product(x, x_row, num_rows, w, inputs, first, last, y, y_row);
}

/* Softmax in place. The numbers from `count` to the end of the last vector are overwritten. */
static void softmax(float *scores, long count, float scaling) {
    for (long i = count; i % WIDTH; i++) scores[i] = -INFINITY;
    vec top = broadcast(-INFINITY), total = {0};
    for (long i = 0; i < count; i += WIDTH) top = maximum(load(scores + i), top);
    float largest = reduce_max(top);
    for (long i = 0; i < count; i += WIDTH) store(scores + i, exp_clamped((load(scores + i) - largest) * scaling));
    for (long i = count; i % WIDTH; i++) scores[i] = 0;
    for (long i = 0; i < count; i += WIDTH) total += load(scores + i);
    float inverse = 1 / reduce_sum(total);
    for (long i = 0; i < count; i += WIDTH) store(scores + i, load(scores + i) * inverse);
}

INLINE void add_weighted(const int C, const float *weights, const float *values, long count, long row, float *to) {
    vec sums[8];
    for (int c = 0; c < C; c++) sums[c] = (vec){0};
    for (long i = 0; i < count; i++)
        for (int c = 0; c < C; c++) sums[c] += weights[i] * load(values + i * row + c * WIDTH);
    for (int c = 0; c < C; c++) store(to + c * WIDTH, sums[c]);
}

/* weights [count] x values [count, width]. */
static void weighted_sum(const float *weights, const float *values, long count, long width, float *to) {
    long d = 0;
    for (; d + 8 * WIDTH <= width; d += 8 * WIDTH) add_weighted(8, weights, values + d, count, width, to + d);
    for (; d + 2 * WIDTH <= width; d += 2 * WIDTH) add_weighted(2, weights, values + d, count, width, to + d);
    for (; d < width; d++) {
        float sum = 0;
        for (long i = 0; i < count; i++) sum += weights[i] * values[i * width + d];
        to[d] = sum;
    }
}

/* For one row and key head: rotates the new queries and key, stores key and value in the cache, and attends to all
   positions up to this one. */
static void attend(const Model *model, const Layer *layer, const Pass *pass, const Scratch *s, long index, long row,
                   long group, float *scores) {
    long width = model->head_width, half = width / 2, shared = model->num_heads / model->num_key_heads;
    const float *cosines = pass->cosines + row * half, *sines = pass->sines + row * half;
    float *queries = s->heads + row * s->heads_row + group * shared * width;
    float *key = s->heads + row * s->heads_row + (model->num_heads + group) * width;
    const float *value = key + model->num_key_heads * width;
    long position = pass->positions[row], past = (row * model->num_key_heads + group) * pass->capacity * width;
    long begin = layer->window && position >= layer->window ? position + 1 - layer->window : 0;
    long count = position + 1 - begin;
    float *keys = pass->keys[index] + past, *values = pass->values[index] + past;
    for (long i = 0; i < shared; i++) rotate(queries + i * width, queries + i * width, cosines, sines, 1, half);
    rotate(key, key, cosines, sines, 1, half);
    memcpy(keys + position * width, key, 4 * width);
    memcpy(values + position * width, value, 4 * width);
    for (long i = 0; i < shared; i++) memset(scores + i * s->scores_row, 0, 4 * count);
    add_product(queries, width, shared, keys + begin * width, width, 0, count, scores, s->scores_row);
    for (long i = 0; i < shared; i++) {
        float *to = s->attended + (row * model->num_heads + group * shared + i) * width;
        softmax(scores + i * s->scores_row, count, layer->scaling);
        weighted_sum(scores + i * s->scores_row, values + begin * width, count, width, to);
    }
}

static void run(const Model *model, const Pass *pass, int thread, int num_threads) {
    Scratch s = lay_out_scratch(model, pass);
    long rows = pass->num_rows, width = model->width, of_heads = model->num_heads * model->head_width;
    long of_keys = model->num_key_heads * model->head_width, gated = model->gated_width;
    float *scores = s.scores + thread * (model->num_heads / model->num_key_heads) * s.scores_row;
    long first_row = range_begin(rows, 1, thread, num_threads), last_row = range_begin(rows, 1, thread + 1, num_threads);
#define SHARE(count) range_begin(count, 16, thread, num_threads), range_begin(count, 16, thread + 1, num_threads)
    for (long i = 0; i < model->num_layers; i++) {
        const Layer *layer = model->layers + i;
        norm(pass->hidden, s.normed, layer->first_norm, layer->first_epsilon, width, first_row, last_row);
        GOMP_barrier();
        linear(s.normed, width, rows, layer->query, layer->query_bias, width, SHARE(of_heads), s.heads, s.heads_row);
        linear(s.normed, width, rows, layer->key, layer->key_bias, width, SHARE(of_keys), s.heads + of_heads, s.heads_row);
        linear(s.normed, width, rows, layer->value, layer->value_bias, width, SHARE(of_keys), s.heads + of_heads + of_keys,
               s.heads_row);
        GOMP_barrier();
        for (long item = thread; item < rows * model->num_key_heads; item += num_threads)
            attend(model, layer, pass, &s, i, item / model->num_key_heads, item % model->num_key_heads, scores);
        GOMP_barrier();
        add_product(s.attended, of_heads, rows, layer->output, of_heads, SHARE(width), pass->hidden, width);
        GOMP_barrier();
        norm(pass->hidden, s.normed, layer->second_norm, layer->second_epsilon, width, first_row, last_row);
        GOMP_barrier();
        linear(s.normed, width, rows, layer->gate, 0, width, SHARE(gated), s.gates, gated);
        linear(s.normed, width, rows, layer->up, 0, width, SHARE(gated), s.ups, gated);
        for (long at = 0; at < rows * gated; at += gated) swiglu_row(s.gates + at, s.ups + at, s.gates + at, SHARE(gated));
        GOMP_barrier();
        add_product(s.gates, gated, rows, layer->down, gated, SHARE(width), pass->hidden, width);
        GOMP_barrier();
    }
    norm(pass->hidden, pass->hidden, model->last_norm, model->last_epsilon, width, first_row, last_row);
}

typedef struct {
    const Model *model;
    const Pass *pass;
} Whole;

static void run_thread(void *given) {
    const Whole *whole = given;
    run(whole->model, whole->pass, omp_get_thread_num(), omp_get_num_threads());
}

EXPORT void decode(const Model *model, const Pass *pass) {
    Whole whole = {model, pass};
    GOMP_parallel(run_thread, &whole, (unsigned)pass->num_threads, 0);
}

typedef struct {
    const float *x, *w, *bias;
    float *y;
    long num_rows, inputs, outputs;
} Linear;

static void linear_range(void *work, long first, long last) {
    const Linear *l = work;
    linear(l->x, l->inputs, l->num_rows, l->w, l->bias, l->inputs, first, last, l->y, l->outputs);
}

/* x w' + bias: x [rows, inputs], w [outputs, inputs] -> y [rows, outputs]. `bias` may be null. */
EXPORT void linear_rows(const float *x, const float *w, const float *bias, float *y, int64_t num_rows, int64_t inputs,
                        int64_t outputs, int64_t num_threads) {
    Linear all = {x, w, bias, y, num_rows, inputs, outputs};
    parallel_for(linear_range, &all, outputs, 16, (int)num_threads);
}
