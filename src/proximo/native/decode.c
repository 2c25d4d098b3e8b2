/* One more token for each row through the layers of a model, and logits from a few rows.

   The formulas of models/cpu/fused.py. All layers run in one parallel region. Threads divide the columns of a product,
   or the rows and heads of attention, and meet at a barrier between stages.

   Legend: B rows, D width, H query heads, G key heads, K head width, F width between the two products after attention. */
#include "rowwise.h"

enum { NO_NORM, RMS_NORM, LAYER_NORM };

/* RMS: (weight + offset) * x / rms(x). Layer: weight * (x - mean) / std + bias; null for a weight of 1 or a bias of 0. */
typedef struct {
    int64_t kind;
    const float *weight, *bias;
    float epsilon, offset;
} Norm;

typedef struct {
    const float *weight, *bias; /* [outputs, inputs], and [outputs] or null */
} Matrix;

typedef struct {
    Norm before_attention, after_attention, before_mlp, after_mlp, of_queries, of_keys;
    Matrix query, key, value, output, gate, up, down; /* up: null if the layer has no gate */
    float scaling, softcap;  /* softcap 0 for none */
    int64_t window;          /* tokens that a token sees, itself included; 0 for all */
    int64_t angles;          /* which of the pass; -1 for none */
    int64_t activation;
    int64_t norms_each_head; /* 1: of_queries and of_keys are K wide; 0: as wide as all heads of a token */
} Layer;

typedef struct {
    int64_t num_layers, width, num_heads, num_key_heads, head_width, inner_width;
    Norm last;
    const Layer *layers;
} Model;

typedef struct {
    const float *cosines, *sines; /* [B, half] */
    int64_t half;                 /* 2 * half <= K numbers of a head are rotated */
} Angles;

typedef struct {
    int64_t num_rows, num_threads, capacity;
    const int64_t *positions;        /* [B] */
    const Angles *angles;
    float *const *keys, *const *values; /* of each layer, [rows, G, capacity, K] */
    float *hidden;                   /* [B, D]: embeddings in, hidden states after the last norm out */
    float *scratch;                  /* `scratch_size` numbers */
} Pass;

/* Buffers between the stages. */
typedef struct {
    float *normed, *heads, *attended, *gates, *ups, *result, *scores;
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
    s.ups = s.gates + padded(rows * model->inner_width);
    s.result = s.ups + padded(rows * model->inner_width);
    s.scores = s.result + padded(rows * model->width);
    return s;
}

EXPORT int64_t scratch_size(const Model *model, const Pass *pass) {
    Scratch s = lay_out_scratch(model, pass);
    return s.scores - pass->scratch + pass->num_threads * model->num_heads / model->num_key_heads * s.scores_row;
}

/* One row. y may be x. With `onto`, the result is added to it instead: y = onto + norm(x). */
static void norm_row(const Norm *norm, const float *x, const float *onto, float *y, long width) {
    float mean = norm->kind == LAYER_NORM ? sum_row(x, width) / (float)width : 0;
    float inverse = norm->kind == LAYER_NORM ? inverse_deviation(x, mean, norm->epsilon, width)
                                             : inverse_rms(x, norm->epsilon, width);
    for (long i = 0; i < width; i += WIDTH) {
        long left = width - i < WIDTH ? width - i : WIDTH;
        vec found = (load_masked(x + i, left) - mean) * inverse;
        if (norm->weight) found *= load_masked(norm->weight + i, left) + norm->offset;
        if (norm->bias) found += load_masked(norm->bias + i, left);
        if (onto) found += load_masked(onto + i, left);
        store_masked(y + i, found, left);
    }
}

static void norm_rows(const Norm *norm, const float *x, float *y, long width, long first, long last) {
    for (long at = first * width; at < last * width; at += width) norm_row(norm, x + at, 0, y + at, width);
}

/* hidden += norm(x). */
static void add_normed_rows(const Norm *norm, const float *x, float *hidden, long width, long first, long last) {
    for (long at = first * width; at < last * width; at += width) norm_row(norm, x + at, hidden + at, hidden + at, width);
}

/* The columns from `first` to `last` of x w' + bias. */
static void linear(const float *x, long x_row, long num_rows, const Matrix *matrix, long inputs, long first, long last,
                   float *y, long y_row) {
    for (long row = 0; row < num_rows; row++)
        if (matrix->bias)
            memcpy(y + row * y_row + first, matrix->bias + first, 4 * (last - first));
        else
            memset(y + row * y_row + first, 0, 4 * (last - first));
    add_product(x, x_row, num_rows, matrix->weight, inputs, first, last, y, y_row);
}

/* The same columns of y + x w' + bias. */
static void add_linear(const float *x, long num_rows, const Matrix *matrix, long inputs, long first, long last, float *y,
                       long y_row) {
    if (matrix->bias)
        for (long row = 0; row < num_rows; row++)
            for (long i = first; i < last; i++) y[row * y_row + i] += matrix->bias[i];
    add_product(x, inputs, num_rows, matrix->weight, inputs, first, last, y, y_row);
}

/* c tanh(x / c), where tanh(u) = 1 - 2 / (1 + exp(2 u)). The numbers up to the end of the last vector are overwritten. */
static void cap(float *scores, long count, float scaling, float softcap) {
    for (long i = 0; i < count; i += WIDTH) {
        vec u = load(scores + i) * (scaling / softcap);
        store(scores + i, softcap * (1 - 2 / (1 + exp_clamped(2 * u))));
    }
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
    long ahead = rows_ahead(row) * row;
    vec sums[8];
    for (int c = 0; c < C; c++) sums[c] = (vec){0};
    for (long i = 0; i < count; i++)
        for (int c = 0; c < C; c++) {
            const float *from = values + i * row + c * WIDTH;
            __builtin_prefetch(from + ahead);
            sums[c] += weights[i] * load(from);
        }
    for (int c = 0; c < C; c++) store(to + c * WIDTH, sums[c]);
}

/* weights [count] x values [count, width]. In one pass over the values for the usual widths of a head: a second one would
   read them from memory again. */
static void weighted_sum(const float *weights, const float *values, long count, long width, float *to) {
    long d = 0;
    for (; d + 8 * WIDTH <= width; d += 8 * WIDTH) add_weighted(8, weights, values + d, count, width, to + d);
    for (; d + 4 * WIDTH <= width; d += 4 * WIDTH) add_weighted(4, weights, values + d, count, width, to + d);
    for (; d + 2 * WIDTH <= width; d += 2 * WIDTH) add_weighted(2, weights, values + d, count, width, to + d);
    for (; d < width; d++) {
        float sum = 0;
        for (long i = 0; i < count; i++) sum += weights[i] * values[i * width + d];
        to[d] = sum;
    }
}

/* For one row and key head: norms and rotates the new queries and key, stores key and value in the cache, and attends to all
   positions up to this one. */
static void attend(const Model *model, const Layer *layer, const Pass *pass, const Scratch *s, long index, long row,
                   long group, float *scores) {
    long width = model->head_width, shared = model->num_heads / model->num_key_heads;
    float *queries = s->heads + row * s->heads_row + group * shared * width;
    float *key = s->heads + row * s->heads_row + (model->num_heads + group) * width;
    const float *value = key + model->num_key_heads * width;
    long position = pass->positions[row], past = (row * model->num_key_heads + group) * pass->capacity * width;
    long begin = layer->window && position >= layer->window ? position + 1 - layer->window : 0;
    long count = position + 1 - begin;
    float *keys = pass->keys[index] + past, *values = pass->values[index] + past;
    if (layer->norms_each_head) {
        for (long i = 0; i < shared; i++) norm_row(&layer->of_queries, queries + i * width, 0, queries + i * width, width);
        norm_row(&layer->of_keys, key, 0, key, width);
    }
    if (layer->angles >= 0) {
        const Angles *angles = pass->angles + layer->angles;
        long half = angles->half;
        const float *cosines = angles->cosines + row * half, *sines = angles->sines + row * half;
        for (long i = 0; i < shared; i++) rotate(queries + i * width, queries + i * width, cosines, sines, 1, half);
        rotate(key, key, cosines, sines, 1, half);
    }
    memcpy(keys + position * width, key, 4 * width);
    memcpy(values + position * width, value, 4 * width);
    for (long i = 0; i < shared; i++) memset(scores + i * s->scores_row, 0, 4 * count);
    add_product(queries, width, shared, keys + begin * width, width, 0, count, scores, s->scores_row);
    for (long i = 0; i < shared; i++) {
        float *to = s->attended + (row * model->num_heads + group * shared + i) * width;
        if (layer->softcap > 0) cap(scores + i * s->scores_row, count, layer->scaling, layer->softcap);
        softmax(scores + i * s->scores_row, count, layer->softcap > 0 ? 1 : layer->scaling);
        weighted_sum(scores + i * s->scores_row, values + begin * width, count, width, to);
    }
}

static void run(const Model *model, const Pass *pass, int thread, int num_threads) {
    Scratch s = lay_out_scratch(model, pass);
    long rows = pass->num_rows, width = model->width, of_heads = model->num_heads * model->head_width;
    long of_keys = model->num_key_heads * model->head_width, inner = model->inner_width;
    float *scores = s.scores + thread * (model->num_heads / model->num_key_heads) * s.scores_row;
    long first_row = range_begin(rows, 1, thread, num_threads), last_row = range_begin(rows, 1, thread + 1, num_threads);
#define SHARE(count) range_begin(count, 16, thread, num_threads), range_begin(count, 16, thread + 1, num_threads)
    for (long i = 0; i < model->num_layers; i++) {
        const Layer *layer = model->layers + i;
        const float *inputs = layer->before_attention.kind ? s.normed : pass->hidden;
        if (layer->before_attention.kind)
            norm_rows(&layer->before_attention, pass->hidden, s.normed, width, first_row, last_row);
        GOMP_barrier();
        linear(inputs, width, rows, &layer->query, width, SHARE(of_heads), s.heads, s.heads_row);
        linear(inputs, width, rows, &layer->key, width, SHARE(of_keys), s.heads + of_heads, s.heads_row);
        linear(inputs, width, rows, &layer->value, width, SHARE(of_keys), s.heads + of_heads + of_keys, s.heads_row);
        GOMP_barrier();
        if (layer->of_queries.kind && !layer->norms_each_head) {
            for (long row = first_row; row < last_row; row++) {
                float *heads = s.heads + row * s.heads_row;
                norm_row(&layer->of_queries, heads, 0, heads, of_heads);
                norm_row(&layer->of_keys, heads + of_heads, 0, heads + of_heads, of_keys);
            }
            GOMP_barrier();
        }
        for (long item = thread; item < rows * model->num_key_heads; item += num_threads)
            attend(model, layer, pass, &s, i, item / model->num_key_heads, item % model->num_key_heads, scores);
        GOMP_barrier();
        if (layer->after_attention.kind)
            linear(s.attended, of_heads, rows, &layer->output, of_heads, SHARE(width), s.result, width);
        else
            add_linear(s.attended, rows, &layer->output, of_heads, SHARE(width), pass->hidden, width);
        GOMP_barrier();
        if (layer->after_attention.kind)
            add_normed_rows(&layer->after_attention, s.result, pass->hidden, width, first_row, last_row);
        inputs = layer->before_mlp.kind ? s.normed : pass->hidden;
        if (layer->before_mlp.kind) norm_rows(&layer->before_mlp, pass->hidden, s.normed, width, first_row, last_row);
        GOMP_barrier();
        linear(inputs, width, rows, &layer->gate, width, SHARE(inner), s.gates, inner);
        if (layer->up.weight) linear(inputs, width, rows, &layer->up, width, SHARE(inner), s.ups, inner);
        for (long at = 0; at < rows * inner; at += inner)
            activate(layer->activation, s.gates + at, layer->up.weight ? s.ups + at : 0, s.gates + at, SHARE(inner));
        GOMP_barrier();
        if (layer->after_mlp.kind)
            linear(s.gates, inner, rows, &layer->down, inner, SHARE(width), s.result, width);
        else
            add_linear(s.gates, rows, &layer->down, inner, SHARE(width), pass->hidden, width);
        GOMP_barrier();
        if (layer->after_mlp.kind)
            add_normed_rows(&layer->after_mlp, s.result, pass->hidden, width, first_row, last_row);
    }
    norm_rows(&model->last, pass->hidden, pass->hidden, width, first_row, last_row);
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
    const float *x;
    Matrix matrix;
    float *y;
    long num_rows, inputs, outputs;
} Linear;

static void linear_range(void *work, long first, long last) {
    const Linear *l = work;
    linear(l->x, l->inputs, l->num_rows, &l->matrix, l->inputs, first, last, l->y, l->outputs);
}

/* x w' + bias: x [rows, inputs], w [outputs, inputs] -> y [rows, outputs]. `bias` may be null. */
EXPORT void linear_rows(const float *x, const float *w, const float *bias, float *y, int64_t num_rows, int64_t inputs,
                        int64_t outputs, int64_t num_threads) {
    Linear all = {x, {w, bias}, y, num_rows, inputs, outputs};
    parallel_for(linear_range, &all, outputs, 16, (int)num_threads);
}
