/* What all kernels share: vectors, the exponential, products of rows with a matrix. float32 throughout.

   Every number is computed in one order that depends on neither the number of threads nor the other rows of a batch.
   Vectors are GCC's own, so that the same text serves every processor; loads and stores need no alignment. GCC from 9 on
   and clang from 13 on compile it. */
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

/* Keeps a value in a register: the compiler would read it again for each use, and loads are what is short. */
#if defined(__AVX__)
#define KEEP(value) __asm__("" : "+x"(value))
#else
#define KEEP(value)
#endif

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }
INLINE vec spread(float value) { return value - (vec){0}; }

/* SHUFFLED: the numbers of a, and of b after them, in the order of the constants, which are of type `kind`; GCC before 12
   knows its own form alone. INDEPENDENT: a loop whose turns do not depend on each other. UNROLLED: a loop of at most 16
   turns, written out before values are given their registers; GCC before 12 would keep the sums of a tile in memory. */
#ifdef __clang__
#define SHUFFLED(kind, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define SHUFFLED(kind, a, b, ...) __builtin_shuffle(a, b, (kind){__VA_ARGS__})
#define INDEPENDENT _Pragma("GCC ivdep")
#define UNROLLED _Pragma("GCC unroll 16")
#endif

/* The sum of both halves. */
INLINE vec8 halved(vec value) {
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

INLINE vec4 quartered(vec8 value) {
    union {
        vec8 whole;
        vec4 half[2];
    } both = {value};
    return both.half[0] + both.half[1];
}

/* Sums of neighbours, of a and b in turn within each half. */
INLINE vec8 pairs(vec8 a, vec8 b) {
    return SHUFFLED(ivec8, a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLED(ivec8, a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

/* The sums over four vectors, side by side. */
INLINE vec4 sums_of_four(vec a, vec b, vec c, vec d) {
    return quartered(pairs(pairs(halved(a), halved(b)), pairs(halved(c), halved(d))));
}

INLINE float sum_of(vec a) { return sums_of_four(a, a, a, a)[0]; }

/* a where the mask is all ones, b where it is zero. */
INLINE vec pick(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

INLINE vec larger(vec a, vec b) { return pick(a > b, a, b); }

INLINE float largest_of(vec a) {
    float found = a[0];
    for (int i = 1; i < WIDTH; i++) found = a[i] > found ? a[i] : found;
    return found;
}

/* The first `count` < WIDTH numbers, and `filling` in the other places. */
static vec load_some(const float *from, long count, float filling) {
    vec found = spread(filling);
    for (long i = 0; i < count; i++) found[i] = from[i];
    return found;
}

/* A full vector or, at the end of what there is, the `left` < WIDTH numbers before zeros. */
INLINE vec take(const float *from, long left) { return left >= WIDTH ? load(from) : load_some(from, left, 0); }

INLINE void put(float *to, vec value, long left) {
    if (left >= WIDTH)
        store(to, value);
    else
        for (long i = 0; i < left; i++) to[i] = value[i];
}

/* exp(x), relative error below 2e-7 for -87.3 <= x <= 88, NaN for NaN, and no sense beyond: x = n ln 2 + r, 2^n as an
   exponent, exp(r) by its Taylor polynomial (|r| < 0.35). */
INLINE vec exp_within(vec x) {
    vec shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum is rounded to a whole number */
    vec n = shifted - 12582912.0f;
    vec r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    vec p = spread(1.0f / 5040);
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

/* exp(x), and the value at the nearer end beyond -87.3 and 88; NaN for NaN. */
INLINE vec exp_of(vec x) {
    x = pick(x < -87.3f, spread(-87.3f), x);
    return exp_within(pick(x > 88.0f, spread(88.0f), x));
}

/* exp(x) for x <= 88: 0 below -87.3, and NaN for NaN. */
INLINE vec exp_up_to_88(vec x) { return (vec)((ivec)exp_within(x) & ~(x < -87.3f)); }

/* x, and 0 where that share of it is 0: minus infinity times 0 would be NaN. */
INLINE vec if_shared(vec x) { return (vec)((ivec)x & ~(x < -87.3f)); }

/* The OpenMP that torch has brought into the process, by the names that GCC calls. Called by them here, it serves what
   every compiler made, and no compiler needs an OpenMP of its own, whose threads would stand beside torch's. */
void GOMP_parallel(void (*of_thread)(void *), void *given, unsigned num_threads, unsigned flags);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

/* Of `count` units of `size`, where the part of one thread begins. */
INLINE long part(long count, long size, int thread, int num_threads) {
    long units = (count + size - 1) / size, first = units * thread / num_threads * size;
    return first < count ? first : count;
}

typedef struct {
    void (*run)(void *work, long first, long last);
    void *work;
    long count, size;
} Shared;

static void run_part(void *given) {
    Shared *all = given;
    int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    all->run(all->work, part(all->count, all->size, thread, threads), part(all->count, all->size, thread + 1, threads));
}

/* Runs `count` numbers of work from first to last, each thread a part of whole units of `size`. */
INLINE void share_out(void (*run)(void *work, long first, long last), void *work, long count, long size, int num_threads) {
    Shared all = {run, work, count, size};
    if (num_threads > 1)
        GOMP_parallel(run_part, &all, (unsigned)num_threads, 0);
    else
        run(work, 0, count);
}

/* How many threads should work on so many numbers: it takes 5 to 10 microseconds to wake them. */
INLINE int threads_for(long numbers, long num_threads) { return numbers < 1 << 15 ? 1 : (int)num_threads; }

/* y += x w' for R rows of x and C of w, [R, depth] x [C, depth]'; R <= 3 and C (4 or 1) are constants where it is called.
   Three rows, four columns and what they are multiplied with fill the sixteen registers of AVX2. `ahead`: so many columns
   further on w is brought into the cache, where it is read for the first time; 0 for not. */
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
            KEEP(of_x[r]);
        }
        for (int c = 0; c < C; c++) {
            vec of_w = load(w + c * w_row + k);
            if (ahead) __builtin_prefetch(w + (c + ahead) * w_row + k);
            KEEP(of_w);
            for (int r = 0; r < R; r++) sums[r][c] += of_x[r] * of_w;
        }
    }
    for (int r = 0; r < R; r++)
        if (C == 4)
            *(vec4 *)(y + r * y_row) += sums_of_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        else
            y[r * y_row] += sum_of(sums[r][0]);
    for (; k < depth; k++)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) y[r * y_row + c] += x[r * x_row + k] * w[c * w_row + k];
}

/* y += x w' for the columns from `first` to `last`: x [rows, inputs], w [columns, inputs], y [rows, columns]. Eight
   columns of w stay in the first cache while all rows pass by, and a row's part of the inputs is read from the second. */
static void add_product(const float *x, long x_row, long num_rows, const float *w, long inputs, long first, long last,
                        float *y, long y_row) {
    long num_pieces = (inputs + 767) / 768, piece = (inputs + num_pieces * WIDTH - 1) / (num_pieces * WIDTH) * WIDTH;
    for (long from = 0; from < inputs; from += piece) {
        long depth = from + piece < inputs ? piece : inputs - from;
        const float *part_of_w = w + from, *part_of_x = x + from;
        for (long panel = first; panel < last; panel += 8) {
            long end = panel + 8 < last ? panel + 8 : last;
            for (long row = 0; row < num_rows; row += 3) {
                long column = panel, left = num_rows - row;
                const float *of_x = part_of_x + row * x_row;
                for (; column + 4 <= end; column += 4) {
                    const float *of_w = part_of_w + column * inputs;
                    float *to = y + row * y_row + column;
                    if (left >= 3 && row == 0)
                        add_tile(3, 4, 8, of_x, x_row, of_w, inputs, depth, to, y_row);
                    else if (left >= 3)
                        add_tile(3, 4, 0, of_x, x_row, of_w, inputs, depth, to, y_row);
                    else if (left == 2)
                        add_tile(2, 4, 8, of_x, x_row, of_w, inputs, depth, to, y_row);
                    else
                        add_tile(1, 4, 8, of_x, x_row, of_w, inputs, depth, to, y_row);
                }
                for (; column < end; column++)
                    for (long r = 0; r < (left < 3 ? left : 3); r++)
                        add_tile(1, 1, 0, of_x + r * x_row, x_row, part_of_w + column * inputs, inputs, depth,
                                 y + (row + r) * y_row + column, y_row);
            }
        }
    }
}

#endif
