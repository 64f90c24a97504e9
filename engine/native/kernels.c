/* What a decode step does between its matrix products, in one pass each. fp32, CPU.
 *
 * Compiled on first use (build.py) and called through ctypes (kernels.py), which checks types,
 * strides and bounds: nothing is checked here. All strides and offsets count floats. A kernel's
 * pieces run on at most `threads` threads of the process's team (team.h).
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "team.h"
#include "vectors.h"

/* A piece of a kernel that works through rows of floats has at least so many of them: some
 * microseconds of work, which is what it takes to hand it to another thread. */
#define FEWEST_FLOATS 16384

/* Of what these kernels were compiled for, the instructions that count. */
const char *omni_instructions(void) {
#if defined(__AMX_BF16__)
    return "AVX-512, VNNI, BF16 and AMX";
#elif defined(__AVX512BF16__)
    return "AVX-512, VNNI and BF16";
#elif defined(__AVX512VNNI__)
    return "AVX-512 and VNNI";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "any processor";
#endif
}

/* e^x to 1e-7 relative, for x <= 88; below -87 it stays at e^-87. NaN stays NaN.
 * Written without a branch, so that loops over it become vector code: x = n ln 2 + r with
 * |r| <= ln 2 / 2, and 2^n goes into the exponent's bits. */
INLINE float exp_fast(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = __builtin_nearbyintf(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f; /* Cephes' minimax polynomial of (e^r - 1 - r) / r^2 */
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const float mantissa = p * r * r + r + 1.0f;
    const int32_t exponent = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &exponent, sizeof power);
    return mantissa * power;
}

INLINE float dot(const float *a, const float *b, int n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Rows that one piece takes of a kernel over `rows` rows of `width` floats. */
INLINE int64_t rows_of_piece(int64_t rows, int64_t width, int threads) {
    return omni_piece_size(rows, FEWEST_FLOATS / width + 1, threads);
}

/* The first row of a piece and, as `end`, the one past its last. */
#define EACH_ROW(row, piece, size, rows)                                                         \
    for (int64_t row = (piece) * (size),                                                         \
                 end = row + (size) < (rows) ? row + (size) : (rows);                            \
         row < end; row++)

typedef struct {
    const float *x, *weight;
    float *residual, *out;
    int64_t rows, width, size;
    float eps;
} Norm;

static void norm_rows(const void *arguments, int64_t piece) {
    const Norm *n = arguments;
    const int64_t width = n->width;
    EACH_ROW(row, piece, n->size, n->rows) {
        float *sum = n->residual + row * width, *normed = n->out + row * width;
        if (n->x) {
            const float *added = n->x + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) sum[i] += added[i];
        }
        const float scale = 1.0f / sqrtf(dot(sum, sum, (int)width) / (float)width + n->eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) normed[i] = sum[i] * scale * n->weight[i];
    }
}

/* residual += x (unless x is NULL), then out = residual / rms(residual) * weight. */
void omni_add_rms_norm(const float *x, float *residual, const float *weight, float *out,
                       int64_t rows, int64_t width, float eps, int threads) {
    const int64_t size = rows_of_piece(rows, width, threads);
    const Norm norm = {x, weight, residual, out, rows, width, size, eps};
    omni_team_run(norm_rows, &norm, omni_num_pieces(rows, size), threads);
}

typedef struct {
    const float *gate_up;
    float *out;
    int64_t rows, width, size;
} Gate;

static void gate_rows(const void *arguments, int64_t piece) {
    const Gate *g = arguments;
    EACH_ROW(row, piece, g->size, g->rows) {
        const float *gate = g->gate_up + row * 2 * g->width, *up = gate + g->width;
        float *gated = g->out + row * g->width;
#pragma omp simd
        for (int64_t i = 0; i < g->width; i++)
            gated[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
    }
}

/* out = silu(gate) * up; a row of gate_up is width gates, then width ups. */
void omni_gated_silu(const float *gate_up, float *out, int64_t rows, int64_t width, int threads) {
    const int64_t size = rows_of_piece(rows, 2 * width, threads);
    const Gate gate = {gate_up, out, rows, width, size};
    omni_team_run(gate_rows, &gate, omni_num_pieces(rows, size), threads);
}

typedef struct {
    float *heads;
    const float *cos, *sin;
    int64_t row_stride, tokens, num_heads, head_dim, half, size;
} Rotation;

static void rotate_rows(const void *arguments, int64_t piece) {
    const Rotation *r = arguments;
    const int64_t half = r->half;
    EACH_ROW(token, piece, r->size, r->tokens) {
        const float *c = r->cos + token * 2 * half, *s = r->sin + token * 2 * half + half;
        for (int64_t h = 0; h < r->num_heads; h++) {
            float *low = r->heads + token * r->row_stride + h * r->head_dim, *high = low + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float a = low[i], b = high[i];
                low[i] = a * c[i] - b * s[i];
                high[i] = b * c[i] + a * s[i];
            }
        }
    }
}

/* Rotate the first 2 * half channels of every head in place, channel i with channel half + i.
 * cos and sin are (tokens, 2 * half); of cos the first half is read, of sin the second, which is
 * the one that is not negated. */
void omni_rotate(float *heads, int64_t row_stride, const float *cos, const float *sin,
                 int64_t tokens, int64_t num_heads, int64_t head_dim, int64_t half, int threads) {
    const int64_t size = rows_of_piece(tokens, num_heads * head_dim, threads);
    const Rotation rotation = {heads,  cos,       sin,      row_stride,
                               tokens, num_heads, head_dim, half,       size};
    omni_team_run(rotate_rows, &rotation, omni_num_pieces(tokens, size), threads);
}

INLINE void mask_word(float *logits, uint64_t allowed, int n) {
    if (allowed == UINT64_MAX) return;
#pragma omp simd
    for (int i = 0; i < n; i++) logits[i] = allowed >> i & 1 ? logits[i] : -INFINITY;
}

/* Set logits whose bit is 0 to minus infinity; a row's bits take row_bytes, lowest bit first. By one
 * thread: to wake others takes longer. */
void omni_mask_logits(float *logits, const uint8_t *allowed, int64_t rows, int64_t width,
                      int64_t row_bytes) {
    for (int64_t row = 0; row < rows; row++, logits += width, allowed += row_bytes) {
        uint64_t word = 0;
        int64_t i = 0;
        for (; i + 64 <= width; i += 64) {
            memcpy(&word, allowed + i / 8, 8);
            mask_word(logits + i, word, 64);
        }
        word = 0;
        memcpy(&word, allowed + i / 8, (width - i + 7) / 8);
        mask_word(logits + i, word, (int)(width - i));
    }
}

/* tanh to 1e-7 relative: near 0 an odd polynomial (Cephes), where 1 - 2 / (e^2x + 1) cancels. */
INLINE float tanh_fast(float x) {
    const float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const float near = x + x * z * p, far = 1.0f - 2.0f / (exp_fast(2.0f * x) + 1.0f);
    return z < 0.390625f ? near : far;
}

/* Paged keys and values of one layer; see prefix_cache/stores/paged_memory.py for the layout. */
typedef struct {
    const void *keys, *values; /* row 0 of this layer in page 0, floats or bfloat16 */
    int64_t page_stride;       /* from a page to the next, all layers, in elements */
    int half;                  /* whether pages are bfloat16 */
    int32_t block_size, num_kv_heads, group, head_dim;
    float softcap;     /* scores become softcap * tanh(score / softcap); 0: they stay */
    const float *bias; /* (heads, distances), added to scores then; NULL: nothing is */
    int64_t distances; /* of the bias; keys that are farther away take the last */
} Pages;

#define TILE 16 /* keys that are scored together */

#if WIDTH == 16
#define EACH_LANE(f, w)                                                                          \
    f(0, w), f(1, w), f(2, w), f(3, w), f(4, w), f(5, w), f(6, w), f(7, w), f(8, w), f(9, w),    \
        f(10, w), f(11, w), f(12, w), f(13, w), f(14, w), f(15, w)
#define HALVINGS(f) f(8) f(4) f(2) f(1)
#elif WIDTH == 8
#define EACH_LANE(f, w) f(0, w), f(1, w), f(2, w), f(3, w), f(4, w), f(5, w), f(6, w), f(7, w)
#define HALVINGS(f) f(4) f(2) f(1)
#else
#define EACH_LANE(f, w) f(0, w), f(1, w), f(2, w), f(3, w)
#define HALVINGS(f) f(2) f(1)
#endif

/* Lane j of the result is the sum of the lanes of s[j]. Every stage halves the number of vectors:
 * lanes with bit `w` unset go on for s[i], the others for s[i + w]. */
#define STAGE(w)                                                                                 \
    for (int i = 0; i < w; i++)                                                                  \
        s[i] = __builtin_shufflevector(s[i], s[i + w], EACH_LANE(LEFT, w)) +                     \
               __builtin_shufflevector(s[i], s[i + w], EACH_LANE(RIGHT, w));
#define LEFT(j, w) ((j) & (w) ? WIDTH + (j) : (j))
#define RIGHT(j, w) ((j) & (w) ? WIDTH + ((j) ^ (w)) : (j) ^ (w))
INLINE vec sums_of_lanes(vec s[WIDTH]) {
    HALVINGS(STAGE)
    return s[0];
}

typedef uint16_t hvec __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

/* A register of elements of a page, from element `at` on, and one. */
INLINE vec load_vec(const void *page, int64_t at, int half) {
    if (!half) return *(const vec *)((const float *)page + at);
    return (vec)(__builtin_convertvector(*(const hvec *)((const uint16_t *)page + at), ivec) << 16);
}

INLINE float load_one(const void *page, int64_t at, int half) {
    if (!half) return ((const float *)page)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)page)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* out[t] = query . (row rows[t] of keys, from its element `at` on) for the rows of a tile. */
INLINE void score_tile(const float *query, const void *keys, int64_t at, const int64_t *rows,
                       int dim, int half, float *out) {
    for (int first = 0; first < TILE; first += WIDTH) {
        vec sums[WIDTH];
        for (int t = 0; t < WIDTH; t++) {
            vec sum = {0};
            for (int i = 0; i + WIDTH <= dim; i += WIDTH)
                sum += *(const vec *)(query + i) * load_vec(keys, rows[first + t] + at + i, half);
            sums[t] = sum;
        }
        *(vec *)(out + first) = sums_of_lanes(sums);
    }
    for (int t = 0; t < TILE; t++)
        for (int i = dim / WIDTH * WIDTH; i < dim; i++)
            out[t] += query[i] * load_one(keys, rows[t] + at + i, half);
}

/* sums = sums * shrink + sum over t of weights[t] * (row rows[t] of values, from its element `at`
 * on), for n registers of channels. */
INLINE void add_values(float *sums, float shrink, const float *weights, const void *values,
                       int64_t at, const int64_t *rows, int count, int half, int n) {
    vec even[4], odd[4]; /* two chains of additions, which the processor runs side by side */
    for (int i = 0; i < n; i++)
        even[i] = *(const vec *)(sums + i * WIDTH) * shrink, odd[i] = (vec){0};
    int t = 0;
    for (; t + 1 < count; t += 2)
        for (int i = 0; i < n; i++) {
            even[i] += weights[t] * load_vec(values, rows[t] + at + i * WIDTH, half);
            odd[i] += weights[t + 1] * load_vec(values, rows[t + 1] + at + i * WIDTH, half);
        }
    if (t < count)
        for (int i = 0; i < n; i++)
            even[i] += weights[t] * load_vec(values, rows[t] + at + i * WIDTH, half);
    for (int i = 0; i < n; i++) *(vec *)(sums + i * WIDTH) = even[i] + odd[i];
}

/* Where either is NaN, b. */
INLINE vec larger(vec a, vec b) {
    const ivec is_a = a > b;
    return (vec)((is_a & (ivec)a) | (~is_a & (ivec)b));
}

/* exp_fast of a register, NaN for NaN; adding 1.5 * 2^23 rounds to an integer. */
INLINE vec exp_lanes(vec x) {
    const vec magic = (vec){0} + 12582912.0f;
    x = larger((vec){0} - 87.0f, x);
    const vec n = (x * 1.44269504f + magic) - magic;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = (vec){0} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
    return (p * r * r + r + 1.0f) * (vec)exponent;
}

#define FLIP(j, w) (j) ^ (w)
#define FOLD(v, w) __builtin_shufflevector(v, v, EACH_LANE(FLIP, w))
#define FOLD_TOP(w) top = larger(top, FOLD(top, w));
#define FOLD_SUM(w) sum += FOLD(sum, w);

/* Scores of a tile become weights relative to the largest score so far; those before `from` and
 * from `to` on are not seen: their weights say nothing, and are not to be used. Returns the factor
 * by which sums of earlier tiles shrink. A score that is seen and is NaN makes `total` NaN. */
INLINE float soften(float *scores, int from, int to, float *peak, float *total) {
    for (int t = 0; t < from; t++) scores[t] = -INFINITY;
    for (int t = to; t < TILE; t++) scores[t] = -INFINITY;
    vec top = *(vec *)scores, sum = {0};
    for (int t = WIDTH; t < TILE; t += WIDTH) top = larger(top, *(vec *)(scores + t));
    HALVINGS(FOLD_TOP)
    const vec before = (vec){0} + *peak;
    top = larger(top, before);
    for (int t = 0; t < TILE; t += WIDTH) {
        const vec weights = exp_lanes(*(vec *)(scores + t) - top);
        *(vec *)(scores + t) = weights;
        sum += weights;
    }
    HALVINGS(FOLD_SUM)
    const float shrink = exp_lanes(before - top)[0];
    *total = *total * shrink + sum[0];
    *peak = top[0];
    return shrink;
}

/* Offsets of the rows of sixteen positions from `position` on; those past `last` repeat it. */
INLINE void find_rows(const Pages *p, const int32_t *table, int64_t position, int64_t last,
                      int64_t *rows) {
    int64_t block = position / p->block_size, offset = position % p->block_size;
    const int64_t width = (int64_t)p->num_kv_heads * p->head_dim;
    for (int t = 0; t < TILE; t++) {
        rows[t] = table[block] * p->page_stride + offset * width;
        if (position + 1 < last) {
            position++;
            if (++offset == p->block_size) offset = 0, block++;
        }
    }
}

INLINE void prefetch_row(const Pages *p, int64_t row, int half) {
    const int64_t size = half ? 2 : 4, first = row * size;
    for (int64_t i = 0; i < (int64_t)p->num_kv_heads * p->head_dim * size; i += 64) {
        __builtin_prefetch((const char *)p->keys + first + i);
        __builtin_prefetch((const char *)p->values + first + i);
    }
}

INLINE void cap(float *scores, int count, float softcap) {
#pragma omp simd
    for (int i = 0; i < count; i++) scores[i] = softcap * tanh_fast(scores[i] / softcap);
}

/* Add what the bias says of a tile's keys; the first lies `distance` behind the query, the others
 * nearer and nearer. Keys past the query are hidden later: they take any column. */
INLINE void add_bias(const Pages *p, float scores[][TILE], int heads, int64_t distance) {
    int32_t column[TILE];
    for (int t = 0; t < TILE; t++) {
        const int64_t d = distance > t ? distance - t : 0;
        column[t] = (int32_t)(d < p->distances ? d : p->distances - 1);
    }
    for (int h = 0; h < heads; h++) {
        const float *bias = p->bias + h * p->distances;
        for (int t = 0; t < TILE; t++) scores[h][t] += bias[column[t]];
    }
}

/* One query token: its position, what it sees, and its share of the softmax so far. `sums` (heads,
 * dim) are values weighted by exp(score - peak), `total` (heads) the weights' sum, `peak` (heads)
 * the largest score. `query` is scaled already. */
typedef struct {
    const float *query;
    int64_t position, first, last;
    float *sums, *peak, *total;
} Token;

#define MAX_TOKENS 4 /* that share the reading of a tile of keys */

/* Tokens of one sequence over its positions, an online softmax, tile by tile. While a tile is
 * computed the next one is fetched (if `fetch`), its rows spread evenly over the heads. dim is a
 * constant where this is inlined. Three loops per tile, each over independent heads, because the
 * steps of one head wait for each other.
 *
 * Tiles begin at multiples of TILE, wherever a token's first position is, and one that a token does
 * not see leaves its sums as they are: what a token gets does not depend on those beside it. */
INLINE void attend(const Pages *p, const Token *tokens, int num_tokens, const int32_t *table,
                   int fetch, int dim, int half) {
    const int heads = p->num_kv_heads * p->group;
    int64_t rows[TILE], next[TILE], begin = tokens[0].first, end = tokens[0].last;
    float scores[MAX_TOKENS][heads][TILE], shrink[MAX_TOKENS][heads];
    int from[MAX_TOKENS], to[MAX_TOKENS]; /* which of a tile's keys a token sees */
    for (int i = 0; i < num_tokens; i++) {
        const Token *k = tokens + i;
        begin = k->first < begin ? k->first : begin;
        end = k->last > end ? k->last : end;
        /* Not -INFINITY: of a tile that is not seen, its difference to itself would be NaN. */
        for (int h = 0; h < heads; h++) k->peak[h] = -FLT_MAX, k->total[h] = 0.0f;
        memset(k->sums, 0, sizeof(float) * (size_t)(heads * dim));
    }
    begin = begin / TILE * TILE;
    if (begin < end) find_rows(p, table, begin, end, next);
    for (int64_t start = begin; start < end; start += TILE) {
        const int more = start + TILE < end;
        memcpy(rows, next, sizeof rows);
        if (more) find_rows(p, table, start + TILE, end, next);
        for (int h = 0; h < heads; h++) {
            if (more && fetch)
                for (int t = TILE * h / heads; t < TILE * (h + 1) / heads; t++)
                    prefetch_row(p, next[t], half);
            for (int i = 0; i < num_tokens; i++)
                score_tile(tokens[i].query + h * dim, p->keys, h / p->group * dim, rows, dim, half,
                           scores[i][h]);
        }
        for (int i = 0; i < num_tokens; i++) {
            const Token *k = tokens + i;
            const int64_t first = k->first - start, last = k->last - start;
            from[i] = first < 0 ? 0 : first < TILE ? (int)first : TILE;
            to[i] = last < 0 ? 0 : last < TILE ? (int)last : TILE;
            if (p->softcap > 0.0f) cap(scores[i][0], heads * TILE, p->softcap);
            if (p->bias) add_bias(p, scores[i], heads, k->position - start);
            for (int h = 0; h < heads; h++)
                shrink[i][h] = soften(scores[i][h], from[i], to[i], k->peak + h, k->total + h);
        }
        for (int h = 0; h < heads; h++) {
            const int64_t at = h / p->group * dim;
            for (int token = 0; token < num_tokens; token++) {
                /* No value that is not seen is touched, however small its weight: it may be NaN. */
                const float *weights = scores[token][h] + from[token], factor = shrink[token][h];
                const int64_t *seen = rows + from[token];
                const int count = to[token] - from[token];
                float *sum = tokens[token].sums + h * dim;
                int i = 0;
                for (; i + 4 * WIDTH <= dim; i += 4 * WIDTH)
                    add_values(sum + i, factor, weights, p->values, at + i, seen, count, half, 4);
                for (; i + WIDTH <= dim; i += WIDTH)
                    add_values(sum + i, factor, weights, p->values, at + i, seen, count, half, 1);
                for (; i < dim; i++) {
                    sum[i] *= factor;
                    for (int t = 0; t < count; t++)
                        sum[i] += weights[t] * load_one(p->values, seen[t] + at + i, half);
                }
            }
        }
    }
}

/* Common widths become constants, which unrolls the loops over them. */
static void attend_any(const Pages *p, const Token *tokens, int num_tokens, const int32_t *table,
                       int fetch) {
    if (p->half && p->head_dim == 64)
        attend(p, tokens, num_tokens, table, fetch, 64, 1);
    else if (p->half && p->head_dim == 128)
        attend(p, tokens, num_tokens, table, fetch, 128, 1);
    else if (p->half)
        attend(p, tokens, num_tokens, table, fetch, p->head_dim, 1);
    else if (p->head_dim == 64)
        attend(p, tokens, num_tokens, table, fetch, 64, 0);
    else if (p->head_dim == 128)
        attend(p, tokens, num_tokens, table, fetch, 128, 0);
    else
        attend(p, tokens, num_tokens, table, fetch, p->head_dim, 0);
}

/* Round to bfloat16, to even where two are as near; NaN stays NaN. */
INLINE void to_half(const float *from, uint16_t *to, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 64 : rounded);
    }
}

/* Store a step's keys and values, (tokens, width) each; rows[i] is where token i goes. */
void omni_write_kv(const float *key, const float *value, int64_t key_stride, int64_t value_stride,
                   const int64_t *rows, void *keys, void *values, int64_t tokens, int64_t width,
                   int half) {
    for (int64_t token = 0; token < tokens; token++) {
        const float *from[2] = {key + token * key_stride, value + token * value_stride};
        void *to[2] = {keys, values};
        for (int i = 0; i < 2; i++)
            if (half)
                to_half(from[i], (uint16_t *)to[i] + rows[token] * width, width);
            else
                memcpy((float *)to[i] + rows[token] * width, from[i], sizeof(float) * (size_t)width);
    }
}

/* See omni_paged_attention. */
typedef struct {
    Pages pages;
    const float *query;
    int64_t query_stride;
    const int32_t *block_table;
    int64_t table_stride;
    const int32_t *table_rows, *starts, *ends;
    int64_t tokens, parts, part_size, together, size;
    float scale;
    float *partial, *out;
} Attention;

INLINE int64_t heads_of(const Pages *p) { return (int64_t)p->num_kv_heads * p->group; }

/* Add the share of later positions to `all`, for one head; both are (heads, dim + 2). */
INLINE void add_part(float *all, const float *part, int64_t heads, int64_t dim, int64_t head) {
    float *peak = all + heads * dim + head, *total = peak + heads, *sums = all + head * dim;
    const float *next = part + heads * dim + head, *more = part + head * dim;
    const float top = *next > *peak ? *next : *peak;
    const float before = exp_fast(*peak - top), weight = exp_fast(*next - top);
    *total = *total * before + next[heads] * weight, *peak = top;
    for (int64_t i = 0; i < dim; i++) sums[i] = sums[i] * before + more[i] * weight;
}

/* Of a run of tokens of one sequence, what each sees of part number `part` of the positions, into
 * `sums` (tokens, heads, dim + 2). */
static void attend_run(const Attention *a, const float *scaled, int64_t token, int length,
                       int64_t part, int fetch, float *sums) {
    const int64_t heads = heads_of(&a->pages), dim = a->pages.head_dim;
    const int64_t from = part * a->part_size, to = from + a->part_size;
    Token run[MAX_TOKENS];
    for (int i = 0; i < length; i++, sums += heads * (dim + 2)) {
        const int64_t start = a->starts[token + i], end = a->ends[token + i];
        const int64_t first = start > from ? start : from, last = end < to ? end : to;
        run[i] = (Token){scaled + i * heads * dim, end - 1, first < last ? first : from,
                         first < last ? last : from, sums, sums + heads * dim,
                         sums + heads * (dim + 1)};
    }
    attend_any(&a->pages, run, length, a->block_table + a->table_rows[token] * a->table_stride,
               fetch);
}

/* One part of the keys of one token; the last of `parts`, and the only one of some neighbours, goes
 * on to the end, part by part. */
static void attend_piece(const void *arguments, int64_t piece) {
    const Attention *a = arguments;
    const int64_t heads = heads_of(&a->pages), dim = a->pages.head_dim, row = heads * (dim + 2);
    const int64_t from = piece / a->parts * a->together;
    const int64_t to = from + a->together < a->tokens ? from + a->together : a->tokens;
    float scaled[MAX_TOKENS][heads * dim], later[MAX_TOKENS][row];
    int length = 0;
    for (int64_t token = from; token < to; token++) {
        for (int64_t i = 0; i < heads * dim; i++)
            scaled[length][i] = a->query[token * a->query_stride + i] * a->scale;
        length++;
        if (token + 1 < to && a->table_rows[token + 1] == a->table_rows[token]) continue;
        /* The tokens before, if of the same request, have just used the same pages. */
        const int64_t head = token + 1 - length;
        const int fetch = head == 0 || a->table_rows[head - 1] != a->table_rows[head];
        int64_t start = a->starts[head], end = a->ends[head];
        for (int64_t i = head; i <= token; i++) {
            start = a->starts[i] < start ? a->starts[i] : start;
            end = a->ends[i] > end ? a->ends[i] : end;
        }
        const int64_t own = piece % a->parts, part = start / a->part_size + own;
        float *sums = a->partial + (head * a->parts + own) * row;
        attend_run(a, scaled[0], head, length, part, fetch, sums);
        for (int64_t p = part + 1; own + 1 == a->parts && p * a->part_size < end; p++) {
            attend_run(a, scaled[0], head, length, p, fetch, later[0]);
            for (int i = 0; i < length; i++)
                for (int64_t h = 0; h < heads; h++) add_part(sums + i * row, later[i], heads, dim, h);
        }
        length = 0;
    }
}

/* Bring the parts of some heads of tokens together, in their order. */
static void merge_parts(const void *arguments, int64_t piece) {
    const Attention *a = arguments;
    const int64_t heads = heads_of(&a->pages), dim = a->pages.head_dim, parts = a->parts;
    const int64_t part_size = heads * (dim + 2);
    EACH_ROW(row, piece, a->size, a->tokens * heads) {
        float *sums = a->partial + row / heads * parts * part_size, *result = a->out + row * dim;
        const int64_t head = row % heads;
        for (int64_t part = 1; part < parts; part++)
            add_part(sums, sums + part * part_size, heads, dim, head);
        const float total = sums[heads * (dim + 1) + head];
        const int is_empty = a->starts[row / heads] == a->ends[row / heads];
        for (int64_t i = 0; i < dim; i++)
            result[i] = is_empty ? 0.0f : sums[head * dim + i] / total;
    }
}

/* Query tokens over paged sequences: token i sees positions starts[i] .. ends[i] - 1 of the
 * sequence whose blocks are row table_rows[i] of the block table. It gets zeros if that is none. A
 * bias takes ends[i] - 1 for its own position.
 *
 * Softmax goes over parts of `part_size` positions, a multiple of TILE, which begin at multiples of
 * it and are added in their order: a token gets the same bits whatever runs beside it, and however
 * many threads there are. Where few tokens would leave threads idle, `parts` is the most parts that
 * one of them sees, and each is a piece; else it is 1. They meet in `partial`,
 * (tokens, parts, heads, dim + 2): sums, peak and total of each head. query is (tokens, heads, dim), `query_stride` from row to row; out is
 * contiguous. */
void omni_paged_attention(const float *query, int64_t query_stride, const int32_t *block_table,
                          int64_t table_stride, const int32_t *table_rows, const int32_t *starts,
                          const int32_t *ends, const void *keys, const void *values, int half,
                          int64_t page_stride, int64_t tokens, int64_t parts, int64_t part_size,
                          int32_t block_size, int32_t num_kv_heads, int32_t group, int32_t head_dim, float scale,
                          float softcap, const float *bias, int64_t distances, float *partial,
                          float *out, int threads) {
    const int64_t rows = tokens * num_kv_heads * group;
    const Attention attention = {
        .pages = {keys, values, page_stride, half, block_size, num_kv_heads, group, head_dim, softcap,
                  bias, distances},
        .query = query,
        .query_stride = query_stride,
        .block_table = block_table,
        .table_stride = table_stride,
        .table_rows = table_rows,
        .starts = starts,
        .ends = ends,
        .tokens = tokens,
        .parts = parts,
        .part_size = part_size,
        /* Few tokens are spread over the threads, many share what they read. */
        .together = parts > 1 || tokens < 16 * MAX_TOKENS ? 1 : MAX_TOKENS,
        .size = rows_of_piece(rows, head_dim * parts, threads),
        .scale = scale,
        .partial = partial,
        .out = out,
    };
    omni_team_run(attend_piece, &attention,
                  omni_num_pieces(tokens, attention.together) * parts, threads);
    omni_team_run(merge_parts, &attention, omni_num_pieces(rows, attention.size), threads);
}
