/* Products of bf16 operands with float32 results, by the instruction that adds products of pairs. The operator of torch
   rounds such a result to bf16, which is too coarse for the scores of an output layer.

   Two neighbouring bf16 numbers of a row are one word of 32 bits. Legend: R rows, V columns of the result, D depth. */
#include "tiles.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

#define WORDS 128 /* pairs of a panel: 16 KiB, which stay in the first cache while all rows are multiplied with them */

typedef struct {
    const float *rows, *matrix;
    float *result;
    long num_rows, num_columns, pairs;
} Bf16Product;

INLINE vec add_pairs(vec sums, vec a, vec b) {
    return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

/* y = a b, or y += a b: a [R, depth] pairs, b a panel [depth, 2 vectors], y [R, left columns]. */
INLINE void half_tile(const int R, const float *a, long a_row, const float *b, long depth, float *y, long y_row,
                      long left, int add) {
    vec sums[ROWS][2];
    UNROLLED
    for (int r = 0; r < R; r++) {
        sums[r][0] = add ? load_masked(y + r * y_row, left) : (vec){0};
        sums[r][1] = add && left > WIDTH ? load_masked(y + r * y_row + WIDTH, left - WIDTH) : (vec){0};
    }
    for (long k = 0; k < depth; k++) {
        vec first = load(b + k * PANEL), second = load(b + k * PANEL + WIDTH);
        KEEP_IN_REGISTER(first);
        KEEP_IN_REGISTER(second);
        UNROLLED
        for (int r = 0; r < R; r++) {
            vec of_a = (vec)_mm512_set1_epi32(((const int32_t *)a)[r * a_row + k]);
            sums[r][0] = add_pairs(sums[r][0], of_a, first);
            sums[r][1] = add_pairs(sums[r][1], of_a, second);
        }
    }
    UNROLLED
    for (int r = 0; r < R; r++) {
        store_masked(y + r * y_row, sums[r][0], left);
        if (left > WIDTH) store_masked(y + r * y_row + WIDTH, sums[r][1], left - WIDTH);
    }
}

static void half_tile_of(long rows, const float *a, long a_row, const float *b, long depth, float *y, long y_row,
                         long left, int add) {
    switch (rows) {
    case 6: return half_tile(6, a, a_row, b, depth, y, y_row, left, add);
    case 5: return half_tile(5, a, a_row, b, depth, y, y_row, left, add);
    case 4: return half_tile(4, a, a_row, b, depth, y, y_row, left, add);
    case 3: return half_tile(3, a, a_row, b, depth, y, y_row, left, add);
    case 2: return half_tile(2, a, a_row, b, depth, y, y_row, left, add);
    default: return half_tile(1, a, a_row, b, depth, y, y_row, left, add);
    }
}

static void bf16_product_range(void *work, long panel, long last) {
    const Bf16Product *j = work;
    float packed[WORDS * PANEL];
    for (; panel < last; panel++) {
        long from = panel * PANEL, left = min_long(PANEL, j->num_columns - from);
        for (long k = 0; k < j->pairs; k += WORDS) {
            long depth = min_long(WORDS, j->pairs - k);
            pack_transposed_or_scaled(0, j->matrix + from * j->pairs + k, j->pairs, left, depth, 1, packed);
            for (long row = 0; row < j->num_rows; row += ROWS)
                half_tile_of(min_long(ROWS, j->num_rows - row), j->rows + row * j->pairs + k, j->pairs, packed, depth,
                             j->result + row * j->num_columns + from, j->num_columns, left, k > 0);
        }
    }
}
#endif

/* rows [R, D] and matrix [V, D] in bf16, D even -> rows matrix' [R, V] in float32. Returns 1, with nothing done, where
   the processor has no such instruction or there is no result to write to. */
EXPORT int bf16_product(const void *rows, const void *matrix, float *result, int64_t num_rows, int64_t num_columns,
                        int64_t depth, int64_t num_threads) {
#ifdef __AVX512BF16__
    if (!result) return 0;
    Bf16Product all = {rows, matrix, result, num_rows, num_columns, depth / 2};
    parallel_for(bf16_product_range, &all, (num_columns + PANEL - 1) / PANEL, 1,
                 threads_for(num_rows * num_columns, num_threads));
    return 0;
#else
    return 1;
#endif
}
