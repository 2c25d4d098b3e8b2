/* Tokens of several sequences through the layers of a model, and logits from a few rows. A sequence is a row of the cache;
   it may have several tokens in one pass, in order.

   The formulas of fused_functions.py. All layers run in one parallel region. Threads divide the columns of a product,
   or the rows and heads of attention, and meet at a barrier between stages.

   A model in bf16 has matrices of bf16 numbers, and rounds to bf16 what goes into a product and what comes out of it, as
   the passes of fused_functions.py do. All else is float32, as there.

   Legend: B tokens, which the code calls rows, D width, H query heads, G key heads, K head width, F width between the two
   products after attention. */
#include "rowwise.h"

enum { NO_NORM, RMS_NORM, LAYER_NORM };

/* RMS: (weight + offset) * x / rms(x). Layer: weight * (x - mean) / std + bias; null for a weight of 1 or a bias of 0. */
typedef struct {
    int64_t kind;
    const float *weight, *bias;
    float epsilon, offset;
} Norm;

typedef struct {
    const void *weight; /* [outputs, inputs] */
    const float *bias;  /* [outputs] or null */
    const float *down, *up; /* of an adapter that multiplies apart, [rank, inputs] and [outputs, rank]; null without */
    int64_t rank;
    float scaling;
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
    int64_t in_bf16;
    int64_t largest_rank; /* of the adapters */
    Norm last;
    const Layer *layers;
} Model;

typedef struct {
    const float *cosines, *sines; /* [B, half] */
    int64_t half;                 /* 2 * half <= K numbers of a head are rotated */
} Angles;

typedef struct {
    int64_t num_rows, num_threads, capacity;
    const int64_t *positions;        /* [B] in its sequence */
    const int64_t *sequences;        /* [B] the row of the cache */
    const Angles *angles;
    float *const *keys, *const *values; /* of each layer, [rows, G, capacity, K] */
    float *hidden;                   /* [B, D]: embeddings in, hidden states after the last norm out */
    float *scratch;                  /* `scratch_size` numbers */
} Pass;

/* Buffers between the stages. */
typedef struct {
    float *normed, *heads, *attended, *gates, *ups, *result, *scores;
    long heads_row, scores_row, of_thread; /* of_thread: numbers at `scores` of each thread, for scores and adapters */
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
    long of_scores = model->num_heads / model->num_key_heads * s.scores_row, of_adapter = padded(rows * model->largest_rank);
    s.of_thread = of_scores > of_adapter ? of_scores : of_adapter;
    return s;
}

EXPORT int64_t scratch_size(const Model *model, const Pass *pass) {
    Scratch s = lay_out_scratch(model, pass);
    return s.scores - pass->scratch + pass->num_threads * s.of_thread;
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

/* hidden += norm(x), or hidden += x. */
static void add_normed_rows(const Norm *norm, const float *x, float *hidden, long width, long first, long last) {
    for (long at = first * width; at < last * width; at += width)
        if (norm->kind)
            norm_row(norm, x + at, hidden + at, hidden + at, width);
        else
            for (long i = 0; i < width; i++) hidden[at + i] += x[at + i];
}

static void start_with_bias(const float *bias, long num_rows, long first, long last, float *y, long y_row) {
    for (long row = 0; row < num_rows; row++)
        if (bias)
            memcpy(y + row * y_row + first, bias + first, 4 * (last - first));
        else
            memset(y + row * y_row + first, 0, 4 * (last - first));
}

/* The columns from `first` to `last` of x w' + bias. */
static void linear(const float *x, long x_row, long num_rows, const Matrix *matrix, long inputs, long first, long last,
                   float *y, long y_row) {
    start_with_bias(matrix->bias, num_rows, first, last, y, y_row);
    add_product(x, x_row, num_rows, matrix->weight, inputs, first, last, y, y_row);
}

/* The same in bf16. x is rounded already. Each thread multiplies with the whole of `down`, into `low`. */
static void half_linear(const float *x, long num_rows, const Matrix *matrix, long inputs, long first, long last, float *y,
                        long y_row, float *low) {
    long rank = matrix->rank;
    start_with_bias(matrix->bias, num_rows, first, last, y, y_row);
    add_half_product(x, inputs, num_rows, matrix->weight, inputs, first, last, y, y_row);
    round_rows(y, y_row, num_rows, first, last, y, y_row);
    if (!rank) return;
    memset(low, 0, 4 * num_rows * rank);
    add_product(x, inputs, num_rows, matrix->down, inputs, 0, rank, low, rank);
    round_rows(low, rank, num_rows, 0, rank, low, rank);
    for (long i = 0; i < num_rows * rank; i++) low[i] *= matrix->scaling;
    add_product(low, rank, num_rows, matrix->up, rank, first, last, y, y_row);
    round_rows(y, y_row, num_rows, first, last, y, y_row);
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

/* Where the cache has the keys, or the values, of the sequence of a token. */
static long in_cache(const Model *model, const Pass *pass, long row, long group) {
    return (pass->sequences[row] * model->num_key_heads + group) * pass->capacity * model->head_width;
}

/* For one token and key head: norms and rotates the queries and the key, and stores key and value in the cache. */
static void place(const Model *model, const Layer *layer, const Pass *pass, const Scratch *s, long index, long row,
                  long group) {
    long width = model->head_width, shared = model->num_heads / model->num_key_heads;
    float *queries = s->heads + row * s->heads_row + group * shared * width;
    float *key = s->heads + row * s->heads_row + (model->num_heads + group) * width;
    const float *value = key + model->num_key_heads * width;
    long at = in_cache(model, pass, row, group) + pass->positions[row] * width;
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
    memcpy(pass->keys[index] + at, key, 4 * width);
    memcpy(pass->values[index] + at, value, 4 * width);
}

/* For one token and key head: attends to all positions of its sequence up to its own. */
static void attend(const Model *model, const Layer *layer, const Pass *pass, const Scratch *s, long index, long row,
                   long group, float *scores) {
    long width = model->head_width, shared = model->num_heads / model->num_key_heads;
    const float *queries = s->heads + row * s->heads_row + group * shared * width;
    long position = pass->positions[row], past = in_cache(model, pass, row, group);
    long begin = layer->window && position >= layer->window ? position + 1 - layer->window : 0;
    long count = position + 1 - begin;
    const float *keys = pass->keys[index] + past, *values = pass->values[index] + past;
    for (long i = 0; i < shared; i++) memset(scores + i * s->scores_row, 0, 4 * count);
    add_product(queries, width, shared, keys + begin * width, width, 0, count, scores, s->scores_row);
    for (long i = 0; i < shared; i++) {
        float *to = s->attended + (row * model->num_heads + group * shared + i) * width;
        if (layer->softcap > 0) cap(scores + i * s->scores_row, count, layer->scaling, layer->softcap);
        softmax(scores + i * s->scores_row, count, layer->softcap > 0 ? 1 : layer->scaling);
        weighted_sum(scores + i * s->scores_row, values + begin * width, count, width, to);
        if (model->in_bf16) round_rows(to, width, 1, 0, width, to, width);
    }
}

/* What one thread computes, and with what. `first_row` to `last_row`: its rows where threads divide rows. */
typedef struct {
    const Model *model;
    const Pass *pass;
    Scratch s;
    float *of_thread;
    int thread, num_threads;
    long first_row, last_row;
} Share;

/* A share of the columns of x w' + bias [B, outputs]. */
static void multiply(const Share *share, const float *x, long inputs, const Matrix *matrix, long outputs, float *y,
                     long y_row) {
    long first = range_begin(outputs, 16, share->thread, share->num_threads);
    long last = range_begin(outputs, 16, share->thread + 1, share->num_threads);
    if (share->model->in_bf16)
        half_linear(x, share->pass->num_rows, matrix, inputs, first, last, y, y_row, share->of_thread);
    else
        linear(x, inputs, share->pass->num_rows, matrix, inputs, first, last, y, y_row);
}

/* hidden += norm(x w' + bias). Ends with what the thread's rows need; others may still be at work. */
static void add_result(const Share *share, const float *x, long inputs, const Matrix *matrix, const Norm *norm) {
    long width = share->model->width, rows = share->pass->num_rows;
    if (norm->kind || share->model->in_bf16) {
        multiply(share, x, inputs, matrix, width, share->s.result, width);
        GOMP_barrier();
        add_normed_rows(norm, share->s.result, share->pass->hidden, width, share->first_row, share->last_row);
    } else {
        add_linear(x, rows, matrix, inputs, range_begin(width, 16, share->thread, share->num_threads),
                   range_begin(width, 16, share->thread + 1, share->num_threads), share->pass->hidden, width);
        GOMP_barrier();
    }
}

/* The operand of products with the hidden states: normed where there is a norm, rounded in bf16. */
static const float *operand(const Share *share, const Norm *norm) {
    const float *hidden = share->pass->hidden;
    float *normed = share->s.normed;
    long width = share->model->width, first = share->first_row, count = share->last_row - first;
    if (norm->kind) norm_rows(norm, hidden, normed, width, first, share->last_row);
    if (share->model->in_bf16)
        round_rows((norm->kind ? normed : hidden) + first * width, width, count, 0, width, normed + first * width, width);
    return norm->kind || share->model->in_bf16 ? normed : hidden;
}

/* a(gates) * ups in `gates`, of a share of the columns. In bf16 the activation is rounded before the product. */
static void open_gates(const Share *share, const Layer *layer) {
    long inner = share->model->inner_width, rows = share->pass->num_rows;
    long first = range_begin(inner, 16, share->thread, share->num_threads);
    long last = range_begin(inner, 16, share->thread + 1, share->num_threads);
    int in_bf16 = share->model->in_bf16 != 0;
    for (long at = 0; at < rows * inner; at += inner) {
        float *gates = share->s.gates + at, *ups = layer->up.weight ? share->s.ups + at : 0;
        activate(layer->activation, gates, in_bf16 ? 0 : ups, gates, first, last);
        if (!in_bf16) continue;
        round_rows(gates, inner, 1, first, last, gates, inner);
        if (!ups) continue;
        for (long i = first; i < last; i++) gates[i] *= ups[i];
        round_rows(gates, inner, 1, first, last, gates, inner);
    }
}

static void run_layer(const Share *share, long index) {
    const Model *model = share->model;
    const Layer *layer = model->layers + index;
    const Scratch *s = &share->s;
    long rows = share->pass->num_rows, width = model->width, of_heads = model->num_heads * model->head_width;
    long of_keys = model->num_key_heads * model->head_width, inner = model->inner_width;
    const float *inputs = operand(share, &layer->before_attention);
    GOMP_barrier();
    multiply(share, inputs, width, &layer->query, of_heads, s->heads, s->heads_row);
    multiply(share, inputs, width, &layer->key, of_keys, s->heads + of_heads, s->heads_row);
    multiply(share, inputs, width, &layer->value, of_keys, s->heads + of_heads + of_keys, s->heads_row);
    GOMP_barrier();
    if (layer->of_queries.kind && !layer->norms_each_head) {
        for (long row = share->first_row; row < share->last_row; row++) {
            float *heads = s->heads + row * s->heads_row;
            norm_row(&layer->of_queries, heads, 0, heads, of_heads);
            norm_row(&layer->of_keys, heads + of_heads, 0, heads + of_heads, of_keys);
        }
        GOMP_barrier();
    }
    for (long item = share->thread; item < rows * model->num_key_heads; item += share->num_threads)
        place(model, layer, share->pass, s, index, item / model->num_key_heads, item % model->num_key_heads);
    GOMP_barrier();
    for (long item = share->thread; item < rows * model->num_key_heads; item += share->num_threads)
        attend(model, layer, share->pass, s, index, item / model->num_key_heads, item % model->num_key_heads,
               share->of_thread);
    GOMP_barrier();
    add_result(share, s->attended, of_heads, &layer->output, &layer->after_attention);
    inputs = operand(share, &layer->before_mlp);
    GOMP_barrier();
    multiply(share, inputs, width, &layer->gate, inner, s->gates, inner);
    if (layer->up.weight) multiply(share, inputs, width, &layer->up, inner, s->ups, inner);
    open_gates(share, layer);
    GOMP_barrier();
    add_result(share, s->gates, inner, &layer->down, &layer->after_mlp);
}

static void run(const Model *model, const Pass *pass, int thread, int num_threads) {
    Scratch s = lay_out_scratch(model, pass);
    Share share = {model, pass, s, s.scores + thread * s.of_thread, thread, num_threads,
                   range_begin(pass->num_rows, 1, thread, num_threads),
                   range_begin(pass->num_rows, 1, thread + 1, num_threads)};
    for (long i = 0; i < model->num_layers; i++) run_layer(&share, i);
    norm_rows(&model->last, pass->hidden, pass->hidden, model->width, share.first_row, share.last_row);
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
    int in_bf16;
} Linear;

static void linear_range(void *work, long first, long last) {
    const Linear *l = work;
    if (!l->in_bf16) {
        linear(l->x, l->inputs, l->num_rows, &l->matrix, l->inputs, first, last, l->y, l->outputs);
        return;
    }
    start_with_bias(l->matrix.bias, l->num_rows, first, last, l->y, l->outputs);
    add_half_product(l->x, l->inputs, l->num_rows, l->matrix.weight, l->inputs, first, last, l->y, l->outputs);
}

/* x w' + bias: x [rows, inputs], w [outputs, inputs], of bf16 numbers if `in_bf16` -> y [rows, outputs]. `bias` may be
   null. */
EXPORT void linear_rows(const float *x, const void *w, const float *bias, float *y, int64_t num_rows, int64_t inputs,
                        int64_t outputs, int64_t in_bf16, int64_t num_threads) {
    Linear all = {x, {.weight = w, .bias = bias}, y, num_rows, inputs, outputs, in_bf16 != 0};
    parallel_for(linear_range, &all, outputs, 16, (int)num_threads);
}
