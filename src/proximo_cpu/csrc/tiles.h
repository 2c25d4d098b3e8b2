/* Products of small tiles in registers, and packing of matrices for them.

   A panel holds 2 * WIDTH columns of up to BLOCK rows, row after row, so that a tile reads it from front to back. */
#ifndef PROXIMO_TILES_H
#define PROXIMO_TILES_H

#include "kernels.h"

#define BLOCK 96 /* rows of a panel, and of a tile of scores: a whole number of panels */
#define ROWS 6   /* rows of a tile: the sums of 6 x 2 vectors, with operands, fill the sixteen registers of AVX2 */
#define PANEL (2 * WIDTH)

INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }

#if WIDTH == 16
#define LANES_XOR(a, by) SHUFFLED(ivec, a, a, 0 ^ by, 1 ^ by, 2 ^ by, 3 ^ by, 4 ^ by, 5 ^ by, 6 ^ by, 7 ^ by, \
                               8 ^ by, 9 ^ by, 10 ^ by, 11 ^ by, 12 ^ by, 13 ^ by, 14 ^ by, 15 ^ by)
#else
#define LANES_XOR(a, by) SHUFFLED(ivec, a, a, 0 ^ by, 1 ^ by, 2 ^ by, 3 ^ by, 4 ^ by, 5 ^ by, 6 ^ by, 7 ^ by)
#endif

/* As reduce_max, in log2(WIDTH) steps: each lane is compared with the one whose number differs in one bit. */
INLINE float reduce_max_by_halves(vec a) {
#if WIDTH == 16
    a = maximum(a, LANES_XOR(a, 8));
#endif
    a = maximum(a, LANES_XOR(a, 4));
    a = maximum(a, LANES_XOR(a, 2));
    return maximum(a, LANES_XOR(a, 1))[0];
}

/* y = a b, or y += a b: a [R, depth] with any strides, b a panel [depth, C vectors], y rows of C vectors. */
INLINE void tile(const int R, const int C, const float *a, long a_row, long a_step, const float *b, long depth, float *y,
                 long y_row, int add) {
    vec sums[ROWS][2];
    UNROLLED
    for (int r = 0; r < R; r++)
        UNROLLED
        for (int c = 0; c < C; c++) sums[r][c] = add ? load(y + r * y_row + c * WIDTH) : (vec){0};
    for (long k = 0; k < depth; k++) {
        vec of_b[2];
        UNROLLED
        for (int c = 0; c < C; c++) {
            of_b[c] = load(b + k * PANEL + c * WIDTH);
            KEEP_IN_REGISTER(of_b[c]);
        }
        UNROLLED
        for (int r = 0; r < R; r++) {
            vec of_a = broadcast(a[r * a_row + k * a_step]);
            UNROLLED
            for (int c = 0; c < C; c++) sums[r][c] += of_a * of_b[c];
        }
    }
    UNROLLED
    for (int r = 0; r < R; r++)
        UNROLLED
        for (int c = 0; c < C; c++) store(y + r * y_row + c * WIDTH, sums[r][c]);
}


#define CASES(C, a_row, a_step)                                            \
    switch (rows) {                                                        \
    case 6: return tile(6, C, a, a_row, a_step, b, depth, y, y_row, add); \
    case 5: return tile(5, C, a, a_row, a_step, b, depth, y, y_row, add); \
    case 4: return tile(4, C, a, a_row, a_step, b, depth, y, y_row, add); \
    case 3: return tile(3, C, a, a_row, a_step, b, depth, y, y_row, add); \
    case 2: return tile(2, C, a, a_row, a_step, b, depth, y, y_row, add); \
    default: return tile(1, C, a, a_row, a_step, b, depth, y, y_row, add); \
    }

/* The same for up to ROWS rows of a, or (`tile_by_columns`) for its columns: the transpose is never stored. */
static void tile_by_rows(long rows, long vectors, const float *a, long a_row, const float *b, long depth, float *y, long y_row,
                    int add) {
    if (vectors > 1) CASES(2, a_row, 1)
    CASES(1, a_row, 1)
}

static void tile_by_columns(long rows, long vectors, const float *a, long a_row, const float *b, long depth, float *y,
                       long y_row, int add) {
    if (vectors > 1) CASES(2, 1, a_row)
    CASES(1, 1, a_row)
}

/* Copies rows [count, width] into panels of columns; the last vector is padded with zeros. */
static void pack(const float *from, long row, long count, long width, float *to) {
    for (long i = 0; i < count; i++, from += row, to += PANEL) {
        long column = 0;
        for (; column + WIDTH <= width; column += WIDTH)
            store(to + column / PANEL * BLOCK * PANEL + column % PANEL, load(from + column));
        for (float *last = to + column / PANEL * BLOCK * PANEL; column % WIDTH || column < width; column++)
            last[column % PANEL] = column < width ? from[column] : 0;
    }
}

/* Transposes 8 x 8 numbers in registers, times `factor` if SCALED. Rows from `count` on are zeros. */
INLINE void transpose_8x8(const int SCALED, const float *from, long row, long count, float factor, float *to) {
    vec8 a[8], b[8];
    for (int i = 0; i < 8; i++) {
        a[i] = (vec8){0};
        if (i < count) a[i] = *(const vec8 *)(from + i * row);
        if (SCALED) a[i] *= factor;
    }
    for (int i = 0; i < 8; i += 2) {
        b[i] = SHUFFLED(ivec8, a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[i + 1] = SHUFFLED(ivec8, a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = SHUFFLED(ivec8, b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + 2 * j + 1] = SHUFFLED(ivec8, b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        *(vec8 *)(to + i * PANEL) = SHUFFLED(ivec8, a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(vec8 *)(to + (i + 4) * PANEL) = SHUFFLED(ivec8, a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

INLINE void pack_transposed_or_scaled(const int SCALED, const float *from, long row, long count, long width,
                                      float factor, float *to) {
    for (long i = 0; i < (count + WIDTH - 1) / WIDTH * WIDTH; i += 8) {
        float *panel = to + i / PANEL * width * PANEL + i % PANEL;
        const float *rows = from + i * row;
        long k = 0, there = min_long(8, count - i);
        if (there == 8)
            for (; k + 8 <= width; k += 8) transpose_8x8(SCALED, rows + k, row, 8, factor, panel + k * PANEL);
        else
            for (; k + 8 <= width; k += 8) transpose_8x8(SCALED, rows + k, row, there, factor, panel + k * PANEL);
        for (; k < width; k++)
            for (long j = 0; j < 8; j++) {
                float number = j < there ? rows[j * row + k] : 0;
                panel[k * PANEL + j] = SCALED ? factor * number : number;
            }
    }
}

/* Copies rows [count, width], times `factor`, transposed into panels [width, PANEL]; the last vector is padded with
   zeros. */
static void pack_transposed(const float *from, long row, long count, long width, float factor, float *to) {
    pack_transposed_or_scaled(1, from, row, count, width, factor, to);
}

/* to = factor * from, or to += factor * from. */
static void scale_row(const float *from, float factor, long width, float *to, int add) {
    long i = 0;
    for (; i + WIDTH <= width; i += WIDTH) store(to + i, load(from + i) * factor + (add ? load(to + i) : (vec){0}));
    for (; i < width; i++) to[i] = from[i] * factor + (add ? to[i] : 0);
}

static float dot(const float *a, const float *b, long width) {
    vec sums = {0};
    float rest = 0;
    long i = 0;
    for (; i + WIDTH <= width; i += WIDTH) sums += load(a + i) * load(b + i);
    for (; i < width; i++) rest += a[i] * b[i];
    return reduce_sum(sums) + rest;
}

#endif
