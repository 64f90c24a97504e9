/* y = x W^T + b with a packed W. fp32, for processors with AVX-512; elsewhere torch's library is
 * used instead (omni_has_linear says so).
 *
 * A decode step multiplies few rows by every weight of the model, so it waits for memory. Library
 * kernels read, then compute; here the next lines are fetched while these are used. W is packed so
 * that the whole product reads it once:
 *
 *     [out / 16][in][16]      a panel holds 16 outputs of every input, a cache line an input
 *
 * A tile is up to 14 rows of x by two panels: 28 accumulators, two vectors of W and one broadcast
 * of x fill the 32 registers. Two panels are two streams for the processor's own prefetcher; 32
 * outputs side by side in one stream took a fifth longer.
 *
 * While a span of inputs is multiplied the next one is fetched, each tile of rows its share of it,
 * so that memory never waits for the arithmetic:
 *
 *     span        | 0                     | 1                     |
 *     computed    | tile 0    | tile 1    | tile 0    | tile 1    |
 *     fetched     | 1st half of 1 | 2nd   | 1st half of 2 | ...
 */
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define OUTPUTS (2 * LANES) /* of a tile */
#define MAX_ROWS 14

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

int omni_has_linear(void) {
#ifdef __AVX512F__
    return 1;
#else
    return 0;
#endif
}

/* Inputs that are summed before y takes the sum. Two panels of them stay in the first-level cache
 * while all rows pass over them; and a chain over thousands of inputs would round more than the
 * library's several do. */
#define SPAN 256

/* Where the rows of x lie. Rows are taken in tiles of nearly one size: tile t is rows
 * row_of(t) .. row_of(t + 1) - 1.
 *
 * Many rows are copied first, tile by tile as [in][rows of the tile]: rows that lie a power of two
 * apart would fight over a few lines of the cache. */
typedef struct {
    const float *x;
    int64_t stride; /* from row to row; not used when copied */
    int64_t rows, tiles, in;
    int copied;
} Rows;

static int64_t row_of(const Rows *r, int64_t tile) { return r->rows * tile / r->tiles; }

/* What a tile fetches while it computes: from `at` on in two panels, `step` 256ths of a float for
 * each of its inputs. */
typedef struct {
    const float *at;
    int64_t step;
} Fetch;

/* y += x W^T over `count` inputs; y = b + ... in the first span. `rows`, and one of the steps of x,
 * are constants where this is inlined, so that `sum` stays in registers. `panel` is the distance
 * between the two panels. */
INLINE void tile(int rows, const float *x, int64_t row_step, int64_t in_step, const float *w,
                 int64_t panel, const float *bias, int64_t count, float *y, int64_t y_stride,
                 int is_first, Fetch fetch) {
    vec sum[MAX_ROWS][2];
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vec){0};
    for (int64_t k = 0; k < count; k++) {
        const float *low_at = w + k * LANES, *high_at = low_at + panel;
        const vec low = *(const vec *)low_at, high = *(const vec *)high_at;
        /* To the second level: the first holds the span that is computed. */
        __builtin_prefetch(fetch.at + (k * fetch.step >> 8), 0, 2);
        __builtin_prefetch(fetch.at + panel + (k * fetch.step >> 8), 0, 2);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            const float value = x[r * row_step + k * in_step];
            sum[r][0] += value * low;
            sum[r][1] += value * high;
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) {
            vec *to = (vec *)(y + r * y_stride + v * LANES);
            if (!is_first) sum[r][v] += *to;
            if (is_first && bias) sum[r][v] += *(const vec *)(bias + v * LANES);
            *to = sum[r][v];
        }
}

#define CASE(n)                                                                                  \
    case n:                                                                                      \
        if (from->copied)                                                                        \
            tile(n, x, 1, n, w, panel, bias, count, y, y_stride, first == 0, fetch);             \
        else                                                                                     \
            tile(n, x, from->stride, 1, w, panel, bias, count, y, y_stride, first == 0, fetch);  \
        break;

/* Tile t of the rows over the inputs from `first` on. */
static void tile_of(const Rows *from, int64_t t, int64_t first, int64_t count, const float *w,
                    const float *bias, float *y, int64_t y_stride, Fetch fetch) {
    const int64_t row = row_of(from, t), rows = row_of(from, t + 1) - row, panel = from->in * LANES;
    const float *x = from->copied ? from->x + row * from->in + first * rows
                                  : from->x + row * from->stride + first;
    w += first * LANES;
    y += row * y_stride;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
    }
}

static void copy_tile(const Rows *from, const Rows *to, float *copy, int64_t t) {
    const int64_t row = row_of(to, t), rows = row_of(to, t + 1) - row;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < from->in; k++)
            copy[row * from->in + k * rows + r] = from->x[(row + r) * from->stride + k];
}

/* x (rows, in), `x_stride` from row to row; y (rows, out) contiguous; out is a multiple of 32;
 * `copy` has room for all of x, or is NULL for few rows.
 *
 * Rows go in blocks of a quarter of a megabyte, which stay in the second-level cache while all
 * panels pass over them. */
void omni_linear(const float *x, int64_t x_stride, const float *w, const float *bias, float *y,
                 int64_t rows, int64_t in, int64_t out, float *copy, int threads) {
    const Rows given = {x, x_stride, rows, (rows + MAX_ROWS - 1) / MAX_ROWS, in, 0};
    Rows from = given;
    if (copy) {
        from.x = copy, from.copied = 1;
#pragma omp parallel for num_threads(threads)
        for (int64_t t = 0; t < from.tiles; t++) copy_tile(&given, &from, copy, t);
    }
    int64_t block = (1 << 16) / in / MAX_ROWS;
    block = block < 4 ? 4 : block;
    const int64_t blocks = (from.tiles + block - 1) / block, pairs = out / OUTPUTS;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t p = 0; p < pairs; p++) {
            const int64_t begin = b * block;
            const int64_t end = begin + block < from.tiles ? begin + block : from.tiles;
            for (int64_t first = 0; first < in; first += SPAN)
                for (int64_t t = begin; t < end; t++) {
                    const int64_t count = in - first < SPAN ? in - first : SPAN, tiles = end - begin;
                    const int64_t next = first + SPAN < in ? first + SPAN : OUTPUTS / LANES * in;
                    const int64_t share = (t - begin) * count / tiles;
                    const Fetch fetch = {w + p * OUTPUTS * in + (next + share) * LANES,
                                         (LANES << 8) / tiles};
                    tile_of(&from, t, first, count, w + p * OUTPUTS * in,
                            bias ? bias + p * OUTPUTS : 0, y + p * OUTPUTS, out, fetch);
                }
        }
}
