/* What all kernels share: vectors, the exponential, products of rows with a matrix. float32 throughout.

   The order of additions never depends on the number of threads or on the other rows of a batch: the bits of a result
   are the same in any batch. Vectors are GCC's vector extensions, so one source serves every processor, and they need no
   alignment. GCC 9 and clang 13 or later compile it. */
#ifndef PROXIMO_KERNELS_H
#define PROXIMO_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* Keeps a value in a register. Without it the compiler reads the value from memory at each use, and loads are the
   bottleneck of these loops. */
#if defined(__AVX__)
#define KEEP_IN_REGISTER(value) __asm__("" : "+x"(value))
#else
#define KEEP_IN_REGISTER(value)
#endif

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }
INLINE vec broadcast(float value) { return value - (vec){0}; }

/* SHUFFLED: selects lanes of a and b (numbered after those of a) by constants of the vector type `kind`. GCC before 12
   has only its own builtin for it. INDEPENDENT: iterations of the loop do not depend on each other. UNROLLED: unrolls a
   loop of at most 16 iterations before register allocation; GCC before 12 would otherwise keep a tile's sums in memory. */
#ifdef __clang__
#define SHUFFLED(kind, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define SHUFFLED(kind, a, b, ...) __builtin_shuffle(a, b, (kind){__VA_ARGS__})
#define INDEPENDENT _Pragma("GCC ivdep")
#define UNROLLED _Pragma("GCC unroll 16")
#endif

/* 16 lanes to 8: the sum of both halves. Nothing to do where a vector has 8. */
INLINE vec8 fold_to_8(vec value) {
#if WIDTH == 16
    union {
        vec whole;
        vec8 half[2];
    } both = {value};
    return both.half[0] + both.half[1];
#else
    return value;
#endif
}

INLINE vec4 fold_to_4(vec8 value) {
    union {
        vec8 whole;
        vec4 half[2];
    } both = {value};
    return both.half[0] + both.half[1];
}

/* Adds neighbouring lanes: sums of a and of b, interleaved within each half as the AVX instruction hadd does. */
INLINE vec8 add_neighbours(vec8 a, vec8 b) {
    return SHUFFLED(ivec8, a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLED(ivec8, a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

/* The sum over the lanes of each of four vectors. */
INLINE vec4 reduce_sum_4(vec a, vec b, vec c, vec d) {
    vec8 ab = add_neighbours(fold_to_8(a), fold_to_8(b)), cd = add_neighbours(fold_to_8(c), fold_to_8(d));
    return fold_to_4(add_neighbours(ab, cd));
}

INLINE float reduce_sum(vec a) { return reduce_sum_4(a, a, a, a)[0]; }

/* a in the lanes where the mask is all ones, b where it is zero. */
INLINE vec blend(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

INLINE vec maximum(vec a, vec b) { return blend(a > b, a, b); }

INLINE float reduce_max(vec a) {
    float found = a[0];
    for (int i = 1; i < WIDTH; i++) found = a[i] > found ? a[i] : found;
    return found;
}

/* The first `count` < WIDTH numbers, and `filling` in the other lanes. */
static vec load_tail(const float *from, long count, float filling) {
    vec found = broadcast(filling);
    for (long i = 0; i < count; i++) found[i] = from[i];
    return found;
}

/* A full vector. At the end of an array, where only `left` < WIDTH numbers remain: those, then zeros. */
INLINE vec load_masked(const float *from, long left) { return left >= WIDTH ? load(from) : load_tail(from, left, 0); }

INLINE void store_masked(float *to, vec value, long left) {
    if (left >= WIDTH)
        store(to, value);
    else
        for (long i = 0; i < left; i++) to[i] = value[i];
}

/* exp(x) for -87.3 <= x <= 88 with a relative error below 2e-7; NaN for NaN, undefined for other x. With x = n ln 2 + r,
   2^n is written into the exponent bits and exp(r), |r| < 0.35, is a Taylor polynomial. ln 2 is subtracted in two parts,
   so that r keeps its digits. */
INLINE vec exp_in_range(vec x) {
    vec shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum is rounded to a whole number */
    vec n = shifted - 12582912.0f;
    vec r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    vec p = broadcast(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uvec exponent = ((uvec)shifted << 23) + 0x3F800000u; /* unsigned: beyond the ends it wraps around */
    return p * (vec)exponent;
}

/* exp of x clamped to -87.3 .. 88; NaN for NaN. */
INLINE vec exp_clamped(vec x) {
    x = blend(x < -87.3f, broadcast(-87.3f), x);
    return exp_in_range(blend(x > 88.0f, broadcast(88.0f), x));
}

/* exp(x) for x <= 88: 0 below -87.3, and NaN for NaN. */
INLINE vec exp_or_zero(vec x) { return (vec)((ivec)exp_in_range(x) & ~(x < -87.3f)); }

/* x, but 0 where exp(x) is 0: there the product x exp(x) would be minus infinity times 0, which is NaN. */
INLINE vec zero_if_no_share(vec x) { return (vec)((ivec)x & ~(x < -87.3f)); }

/* Entry points of the OpenMP runtime that torch has already loaded, by the names that GCC generates calls to. Calling
   them directly works with every compiler and adds no second runtime, whose threads would compete with torch's. */
void GOMP_parallel(void (*of_thread)(void *), void *given, unsigned num_threads, unsigned flags);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

/* Where the range of one thread begins, of `count` numbers in units of `size`. */
INLINE long range_begin(long count, long size, int thread, int num_threads) {
    long units = (count + size - 1) / size, first = units * thread / num_threads * size;
    return first < count ? first : count;
}

typedef struct {
    void (*run)(void *work, long first, long last);
    void *work;
    long count, size;
} ParallelFor;

static void run_range(void *given) {
    ParallelFor *all = given;
    int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    long first = range_begin(all->count, all->size, thread, threads);
    all->run(all->work, first, range_begin(all->count, all->size, thread + 1, threads));
}

/* Runs work over `count` numbers; each thread gets one range of whole units of `size`. */
INLINE void parallel_for(void (*run)(void *work, long first, long last), void *work, long count, long size,
                         int num_threads) {
    ParallelFor all = {run, work, count, size};
    if (num_threads > 1)
        GOMP_parallel(run_range, &all, (unsigned)num_threads, 0);
    else
        run(work, 0, count);
}

/* Threads for so many numbers. Waking threads takes 5 to 10 microseconds, which little work does not repay. */
INLINE int threads_for(long numbers, long num_threads) { return numbers < 1 << 15 ? 1 : (int)num_threads; }

/* y += x w' for R rows of x and C rows of w, [R, depth] x [C, depth]'. R <= 3 and C (4 or 1) are compile-time constants
   of each call. 3 x 4 sums, three vectors of x and one of w fill the sixteen registers of AVX2. `ahead`: prefetch w this
   many columns further on, for the first pass over w; 0 for no prefetch. */
INLINE void add_tile(const int R, const int C, const int ahead, const float *x, long x_row, const float *w, long w_row,
                     long depth, float *y, long y_row) {
    vec sums[3][4];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] = (vec){0};
    long k = 0;
    for (; k + WIDTH <= depth; k += WIDTH) {
        vec of_x[3];
        for (int r = 0; r < R; r++) {
            of_x[r] = load(x + r * x_row + k);
            KEEP_IN_REGISTER(of_x[r]);
        }
        for (int c = 0; c < C; c++) {
            vec of_w = load(w + c * w_row + k);
            if (ahead) __builtin_prefetch(w + (c + ahead) * w_row + k);
            KEEP_IN_REGISTER(of_w);
            for (int r = 0; r < R; r++) sums[r][c] += of_x[r] * of_w;
        }
    }
    for (int r = 0; r < R; r++)
        if (C == 4)
            *(vec4 *)(y + r * y_row) += reduce_sum_4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        else
            y[r * y_row] += reduce_sum(sums[r][0]);
    for (; k < depth; k++)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) y[r * y_row + c] += x[r * x_row + k] * w[c * w_row + k];
}

/* How many rows of a matrix to prefetch ahead: eight, or 16 KiB of short ones. Memory answers after a hundred
   nanoseconds, in which a thread reads several KiB. */
INLINE long rows_ahead(long width) { return width < 512 ? 4096 / (width > 16 ? width : 16) : 8; }

/* y += x w' for the columns from `first` to `last`, at most eight: x [rows, depth], w [columns, depth] with rows of
   `w_row` numbers, y [rows, columns]. */
INLINE void add_panel(const float *x, long x_row, long num_rows, const float *w, long w_row, long depth, long ahead,
                      long first, long last, float *y, long y_row) {
    for (long row = 0; row < num_rows; row += 3) {
        long column = first, left = num_rows - row;
        const float *of_x = x + row * x_row;
        for (; column + 4 <= last; column += 4) {
            const float *of_w = w + (column - first) * w_row;
            float *to = y + row * y_row + column;
            if (left >= 3 && row == 0)
                add_tile(3, 4, ahead, of_x, x_row, of_w, w_row, depth, to, y_row);
            else if (left >= 3)
                add_tile(3, 4, 0, of_x, x_row, of_w, w_row, depth, to, y_row);
            else if (left == 2)
                add_tile(2, 4, ahead, of_x, x_row, of_w, w_row, depth, to, y_row);
            else
                add_tile(1, 4, ahead, of_x, x_row, of_w, w_row, depth, to, y_row);
        }
        for (; column < last; column++)
            for (long r = 0; r < (left < 3 ? left : 3); r++)
                add_tile(1, 1, 0, of_x + r * x_row, x_row, w + (column - first) * w_row, w_row, depth,
                         y + (row + r) * y_row + column, y_row);
    }
}

#define PIECE 768

/* Inputs are cut into pieces of at most PIECE, so that eight columns of a matrix stay in the L1 cache while all rows are
   multiplied with them; x comes from the L2 cache. */
INLINE long piece_of(long inputs) {
    long num_pieces = (inputs + PIECE - 1) / PIECE;
    return (inputs + num_pieces * WIDTH - 1) / (num_pieces * WIDTH) * WIDTH;
}

/* y += x w' for the columns from `first` to `last`: x [rows, inputs], w [columns, inputs], y [rows, columns]. */
static void add_product(const float *x, long x_row, long num_rows, const float *w, long inputs, long first, long last,
                        float *y, long y_row) {
    long ahead = rows_ahead(inputs), piece = piece_of(inputs);
    for (long from = 0; from < inputs; from += piece)
        for (long panel = first; panel < last; panel += 8)
            add_panel(x + from, x_row, num_rows, w + panel * inputs + from, inputs,
                      from + piece < inputs ? piece : inputs - from, ahead, panel, panel + 8 < last ? panel + 8 : last, y,
                      y_row);
}

/* bf16: the upper half of a float32 number. */
typedef uint16_t half;
typedef half halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

INLINE vec widen(const half *from) { return (vec)(__builtin_convertvector(*(const halves *)from, uvec) << 16); }

/* Rounded to bf16: to the nearest, and of two as near to the even one. NaN stays NaN. */
INLINE vec rounded(vec x) {
    uvec bits = (uvec)x;
    vec near = (vec)((bits + 0x7FFFu + ((bits >> 16) & 1)) & 0xFFFF0000u);
    return blend(x != x, x, near);
}

/* Rows of numbers from `first` to `last`, rounded to bf16. y may be x. */
static void round_rows(const float *x, long x_row, long num_rows, long first, long last, float *y, long y_row) {
    for (long row = 0; row < num_rows; row++)
        for (long i = first; i < last; i += WIDTH)
            store_masked(y + row * y_row + i, rounded(load_masked(x + row * x_row + i, last - i)), last - i);
}

/* As add_product, of a matrix in bf16. Eight columns at a time are widened, once for all rows. */
static void add_half_product(const float *x, long x_row, long num_rows, const half *w, long inputs, long first, long last,
                             float *y, long y_row) {
    float wide[8 * PIECE];
    long ahead = 2 * rows_ahead(inputs), piece = piece_of(inputs);
    for (long from = 0; from < inputs; from += piece) {
        long depth = from + piece < inputs ? piece : inputs - from;
        for (long panel = first; panel < last; panel += 8) {
            long end = panel + 8 < last ? panel + 8 : last;
            for (long column = panel; column < end; column++) {
                const half *of_w = w + column * inputs + from;
                float *to = wide + (column - panel) * depth;
                long k = 0;
                for (; k + WIDTH <= depth; k += WIDTH) {
                    __builtin_prefetch(of_w + ahead * inputs + k);
                    store(to + k, widen(of_w + k));
                }
                for (; k < depth; k++) {
                    uint32_t bits = (uint32_t)of_w[k] << 16;
                    memcpy(to + k, &bits, 4);
                }
            }
            add_panel(x + from, x_row, num_rows, wide, depth, depth, 0, panel, end, y, y_row);
        }
    }
}

#endif
