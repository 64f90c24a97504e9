/* y = x W^T + b with a packed W. fp32, for processors with AVX-512, AVX2 or NEON; elsewhere torch's
 * library is used instead (omni_has_linear says so).
 *
 * A decode step multiplies few rows by every weight of the model, so it waits for memory. Library
 * kernels read, then compute; here the next lines are fetched while these are used. W is packed so
 * that the whole product reads it once:
 *
 *     [out / 16][in][16]      a panel holds 16 outputs of every input, a cache line an input
 *
 * With AVX-512 a tile is up to 14 rows of x by two panels: 28 accumulators, two vectors of W and one
 * broadcast of x fill the 32 registers. Two panels are two streams for the processor's own
 * prefetcher; 32 outputs side by side in one stream took a fifth longer. With AVX2 it is up to 6
 * rows by one panel, whose sixteen outputs are two vectors, with NEON four.
 *
 * While a span of inputs is multiplied the next one is fetched, each tile of rows its share of it,
 * so that memory never waits for the arithmetic:
 *
 *     span        | 0                     | 1                     |
 *     computed    | tile 0    | tile 1    | tile 0    | tile 1    |
 *     fetched     | 1st half of 1 | 2nd   | 1st half of 2 | ...
 */
#include <stdlib.h>

#include "team.h"
#include "vectors.h"

#define MAX_ROWS (WIDTH == 16 ? 14 : 6)
#define MOST_OUTPUTS 1024 /* of a piece: fewer would fetch in vain at its end too often */

int omni_has_linear(void) {
#if defined(__AVX2__) || defined(__ARM_NEON)
    return 1;
#else
    return 0;
#endif
}

/* Inputs that are summed before y takes the sum. A tile's panels of them stay in the first-level
 * cache while all rows pass over them; and a chain over thousands of inputs would round more than the
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

/* What a tile fetches while it computes: from `at` on in its panels, `step` 256ths of a float
 * for each of its inputs. */
typedef struct {
    const float *at;
    int64_t step;
} Fetch;

/* y += x W^T over `count` inputs; y = b + ... in the first span. `rows`, and one of the steps of x,
 * are constants where this is inlined, so that `sum` stays in registers. `panel` is the distance
 * between two panels. */
INLINE void tile(int rows, const float *x, int64_t row_step, int64_t in_step, const float *w,
                 int64_t panel, const float *bias, int64_t count, float *y, int64_t y_stride,
                 int is_first, Fetch fetch) {
    vec sum[MAX_ROWS][VECS];
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[r][v] = (vec){0};
    for (int64_t k = 0; k < count; k++) {
        vec weight[VECS];
        /* To the second level: the first holds the span that is computed. */
#pragma GCC unroll 2
        for (int i = 0; i < PANELS; i++)
            __builtin_prefetch(fetch.at + i * panel + (k * fetch.step >> 8), 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++)
            weight[v] = *(const vec *)(w + k * LANES + panel_of(v) * panel + place_of(v));
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            const float value = x[r * row_step + k * in_step];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[r][v] += value * weight[v];
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
            vec *to = (vec *)(y + r * y_stride + v * WIDTH);
            if (!is_first) sum[r][v] += *to;
            if (is_first && bias) sum[r][v] += *(const vec *)(bias + v * WIDTH);
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
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if WIDTH == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
    }
}

/* See omni_linear. */
typedef struct {
    Rows given, from; /* as they came, and as they are multiplied */
    const float *w, *bias;
    float *copy, *y;
    int64_t out;
    int64_t block;  /* tiles of rows that are multiplied together */
    int64_t chunks; /* pieces of a block */
    int64_t size;   /* strips of a piece */
} Product;

static void copy_tile(const void *arguments, int64_t t) {
    const Product *p = arguments;
    const Rows *from = &p->given;
    const int64_t row = row_of(from, t), rows = row_of(from, t + 1) - row;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < from->in; k++)
            p->copy[row * from->in + k * rows + r] = from->x[(row + r) * from->stride + k];
}

/* A block of rows by one strip of W. */
static void multiply_strip(const Product *p, int64_t begin, int64_t end, int64_t strip) {
    const int64_t in = p->from.in, tiles = end - begin;
    const float *w = p->w + strip * OUTPUTS * in, *bias = p->bias ? p->bias + strip * OUTPUTS : 0;
    for (int64_t first = 0; first < in; first += SPAN)
        for (int64_t t = begin; t < end; t++) {
            const int64_t count = in - first < SPAN ? in - first : SPAN;
            const int64_t next = first + SPAN < in ? first + SPAN : PANELS * in;
            const int64_t share = (t - begin) * count / tiles;
            const Fetch fetch = {w + (next + share) * LANES, (LANES << 8) / tiles};
            tile_of(&p->from, t, first, count, w, bias, p->y + strip * OUTPUTS, p->out, fetch);
        }
}

static void multiply(const void *arguments, int64_t piece) {
    const Product *p = arguments;
    const int64_t begin = piece / p->chunks * p->block, strips = p->out / OUTPUTS;
    const int64_t end = begin + p->block < p->from.tiles ? begin + p->block : p->from.tiles;
    const int64_t first = piece % p->chunks * p->size;
    const int64_t last = first + p->size < strips ? first + p->size : strips;
    for (int64_t strip = first; strip < last; strip++) multiply_strip(p, begin, end, strip);
}

/* Cut a product into pieces; `strips` are multiplied by all products together. Returns how many
 * pieces it has. */
static int64_t cut(Product *p, int64_t strips, int threads) {
    const int64_t block = (1 << 16) / p->from.in / MAX_ROWS;
    p->block = block < 4 ? 4 : block;
    const int64_t blocks = omni_num_pieces(p->given.tiles, p->block);
    p->size = omni_piece_size(strips * blocks, 1, threads);
    p->size = p->size < MOST_OUTPUTS / OUTPUTS ? p->size : MOST_OUTPUTS / OUTPUTS;
    p->chunks = omni_num_pieces(p->out / OUTPUTS, p->size);
    return blocks * p->chunks;
}

static Product product_of(const float *x, int64_t x_stride, const float *w, const float *bias,
                          float *y, int64_t rows, int64_t in, int64_t out, float *copy) {
    const Rows given = {x, x_stride, rows, (rows + MAX_ROWS - 1) / MAX_ROWS, in, 0};
    Product product = {given, given, w, bias, copy, y, out, 0, 0, 0};
    if (copy) product.from.x = copy, product.from.copied = 1;
    return product;
}

/* x (rows, in), `x_stride` from row to row; y (rows, out) contiguous; out is a multiple of 32;
 * `copy` has room for all of x, or is NULL for few rows.
 *
 * Rows go in blocks of a quarter of a megabyte, which stay in the second-level cache while all
 * panels pass over them. A piece is one block by some strips. */
void omni_linear(const float *x, int64_t x_stride, const float *w, const float *bias, float *y,
                 int64_t rows, int64_t in, int64_t out, float *copy, int threads) {
    Product product = product_of(x, x_stride, w, bias, y, rows, in, out, copy);
    if (copy) omni_team_run(copy_tile, &product, product.given.tiles, threads);
    omni_team_run(multiply, &product, cut(&product, out / OUTPUTS, threads), threads);
}

/* Several products, and the first piece of each. */
typedef struct {
    const Product *products;
    const int64_t *first;
    int64_t count;
} Groups;

static int64_t group_of(const Groups *g, int64_t piece) {
    int64_t low = 0, high = g->count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (g->first[middle] <= piece) low = middle;
        else high = middle;
    }
    return low;
}

static void multiply_group(const void *arguments, int64_t piece) {
    const Groups *g = arguments;
    const int64_t at = group_of(g, piece);
    multiply(&g->products[at], piece - g->first[at]);
}

static void copy_group(const void *arguments, int64_t piece) {
    const Groups *g = arguments;
    const Product *p = &g->products[piece];
    if (p->from.copied)
        for (int64_t t = 0; t < p->given.tiles; t++) copy_tile(p, t);
}

/* `count` products, all (rows[g], in) by (out, in), of rows that lie side by side in x (sum, in) and
 * y (sum, out), both contiguous; `copy` has room for all of x, or is NULL if no group has `many`
 * rows. All of them are one run of the team: it waits once, not once for each. Returns 0 if there
 * is no memory. */
int omni_linear_groups(const float *x, const float *const *w, float *y, const int64_t *rows,
                       int64_t count, int64_t in, int64_t out, float *copy, int64_t many,
                       int threads) {
    Product *products = malloc(count * (sizeof(Product) + sizeof(int64_t)));
    if (!products) return 0;
    int64_t *first = (int64_t *)(products + count), pieces = 0;
    for (int64_t g = 0; g < count; g++) {
        products[g] = product_of(x, in, w[g], 0, y, rows[g], in, out, rows[g] < many ? 0 : copy);
        first[g] = pieces;
        pieces += cut(&products[g], count * (out / OUTPUTS), threads);
        x += rows[g] * in, y += rows[g] * out;
        if (copy) copy += rows[g] * in;
    }
    const Groups groups = {products, first, count};
    if (copy) omni_team_run(copy_group, &groups, count, threads);
    omni_team_run(multiply_group, &groups, pieces, threads);
    free(products);
    return 1;
}
