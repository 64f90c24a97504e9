/* What a decode step does between its matrix products, in one pass each. fp32, CPU.
 *
 * Compiled on first use (build.py) and called through ctypes (kernels.py), which checks types,
 * strides and bounds: nothing is checked here. All strides and offsets count floats. `threads` is
 * torch's thread count; GOMP_parallel is torch's own, so that both work in one pool of threads.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

/* Sixteen floats at any address; the compiler splits them where registers are narrower. */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* e^x to 1e-7 relative, for x <= 88; below -87 it stays at e^-87. NaN stays NaN.
 * Written without a branch, so that loops over it become vector code: x = n ln 2 + r, |r| <= ln 2/2,
 * and 2^n goes into the exponent's bits. */
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

/* residual += x (unless x is NULL), then out = residual / rms(residual) * weight. */
void omni_add_rms_norm(const float *x, float *residual, const float *weight, float *out,
                       int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        float *sum = residual + row * width, *normed = out + row * width;
        if (x) {
            const float *added = x + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) sum[i] += added[i];
        }
        const float scale = 1.0f / sqrtf(dot(sum, sum, (int)width) / (float)width + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) normed[i] = sum[i] * scale * weight[i];
    }
}

/* out = silu(gate) * up; a row of gate_up is width gates, then width ups. */
void omni_gated_silu(const float *gate_up, float *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        float *gated = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++)
            gated[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
    }
}

/* Rotate the first 2 * half channels of every head in place, channel i with channel half + i.
 * cos and sin are (tokens, 2 * half); of cos the first half is read, of sin the second, which is
 * the one that is not negated. */
void omni_rotate(float *heads, int64_t row_stride, const float *cos, const float *sin,
                 int64_t tokens, int64_t num_heads, int64_t head_dim, int64_t half, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 1)
    for (int64_t token = 0; token < tokens; token++) {
        const float *c = cos + token * 2 * half, *s = sin + token * 2 * half + half;
        for (int64_t h = 0; h < num_heads; h++) {
            float *low = heads + token * row_stride + h * head_dim, *high = low + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float a = low[i], b = high[i];
                low[i] = a * c[i] - b * s[i];
                high[i] = b * c[i] + a * s[i];
            }
        }
    }
}

/* Paged keys and values of one layer; see prefix_cache/paged_memory.py for the layout. */
typedef struct {
    const float *keys, *values; /* row 0 of this layer in page 0 */
    int64_t page_stride;        /* from a page to the next, all layers */
    int32_t block_size, num_kv_heads, group, head_dim;
} Pages;

/* Lane j of the result is the sum of the lanes of s[j]. Every stage halves the number of vectors:
 * lanes with bit `w` unset go on for s[i], the others for s[i + w]. */
#define STAGE(w)                                                                                 \
    for (int i = 0; i < w; i++)                                                                  \
        s[i] = __builtin_shufflevector(s[i], s[i + w], L(0, w), L(1, w), L(2, w), L(3, w),       \
                                       L(4, w), L(5, w), L(6, w), L(7, w), L(8, w), L(9, w),     \
                                       L(10, w), L(11, w), L(12, w), L(13, w), L(14, w),         \
                                       L(15, w)) +                                               \
               __builtin_shufflevector(s[i], s[i + w], R(0, w), R(1, w), R(2, w), R(3, w),       \
                                       R(4, w), R(5, w), R(6, w), R(7, w), R(8, w), R(9, w),     \
                                       R(10, w), R(11, w), R(12, w), R(13, w), R(14, w),         \
                                       R(15, w));
#define L(j, w) ((j) & (w) ? LANES + (j) : (j))
#define R(j, w) ((j) & (w) ? LANES + ((j) ^ (w)) : (j) ^ (w))
INLINE vec sums_of_lanes(vec s[LANES]) {
    STAGE(8) STAGE(4) STAGE(2) STAGE(1)
    return s[0];
}

/* out[t] = query . (keys + rows[t]) for sixteen rows. */
INLINE void score_tile(const float *query, const float *keys, const int64_t *rows, int dim,
                       float *out) {
    vec sums[LANES];
    for (int t = 0; t < LANES; t++) {
        const float *key = keys + rows[t];
        vec sum = {0};
        for (int i = 0; i + LANES <= dim; i += LANES)
            sum += *(const vec *)(query + i) * *(const vec *)(key + i);
        sums[t] = sum;
    }
    *(vec *)out = sums_of_lanes(sums);
    for (int t = 0; t < LANES; t++)
        for (int i = dim / LANES * LANES; i < dim; i++) out[t] += query[i] * keys[rows[t] + i];
}

/* sums = sums * shrink + sum over t of weights[t] * (values + rows[t]), for 16 * n channels. */
INLINE void add_values(float *sums, float shrink, const float *weights, const float *values,
                       const int64_t *rows, int count, int n) {
    vec acc[4];
    for (int i = 0; i < n; i++) acc[i] = *(const vec *)(sums + i * LANES) * shrink;
    for (int t = 0; t < count; t++)
        for (int i = 0; i < n; i++)
            acc[i] += weights[t] * *(const vec *)(values + rows[t] + i * LANES);
    for (int i = 0; i < n; i++) *(vec *)(sums + i * LANES) = acc[i];
}

/* Scores of a tile become weights relative to the largest score so far; returns the factor by
 * which sums of earlier tiles shrink. */
INLINE float soften(float *scores, int count, float *peak, float *total) {
    float top = *peak, sum = 0.0f;
    for (int t = count; t < LANES; t++) scores[t] = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int t = 0; t < LANES; t++) top = scores[t] > top ? scores[t] : top;
#pragma omp simd
    for (int t = 0; t < LANES; t++) scores[t] = exp_fast(scores[t] - top);
    for (int t = 0; t < count; t++) sum += scores[t];
    const float shrink = exp_fast(*peak - top);
    *total = *total * shrink + sum;
    *peak = top;
    return shrink;
}

/* Offsets of the rows of sixteen positions from `position` on; those past `last` repeat it. */
INLINE void find_rows(const Pages *p, const int32_t *table, int64_t position, int64_t last,
                      int64_t *rows) {
    int64_t block = position / p->block_size, offset = position % p->block_size;
    const int64_t width = (int64_t)p->num_kv_heads * p->head_dim;
    for (int t = 0; t < LANES; t++) {
        rows[t] = table[block] * p->page_stride + offset * width;
        if (position + 1 < last) {
            position++;
            if (++offset == p->block_size) offset = 0, block++;
        }
    }
}

INLINE void prefetch_row(const Pages *p, int64_t row) {
    for (int64_t i = 0; i < (int64_t)p->num_kv_heads * p->head_dim; i += LANES) {
        __builtin_prefetch(p->keys + row + i);
        __builtin_prefetch(p->values + row + i);
    }
}

/* One query token over positions first .. last-1 of its sequence: online softmax, tile by tile.
 *
 * `sums` (heads, dim) are values weighted by exp(score - peak), `total` (heads) the weights' sum,
 * `peak` (heads) the largest score. While a tile is computed the next one is fetched, its rows
 * spread evenly over the heads. dim is a constant where this is inlined. */
INLINE void attend(const Pages *p, const float *query, const int32_t *table, int64_t first,
                   int64_t last, float *sums, float *peak, float *total, int dim) {
    const int heads = p->num_kv_heads * p->group;
    int64_t rows[LANES], next[LANES];
    for (int h = 0; h < heads; h++) peak[h] = -INFINITY, total[h] = 0.0f;
    memset(sums, 0, sizeof(float) * (size_t)(heads * dim));
    if (first < last) find_rows(p, table, first, last, next);
    for (int64_t start = first; start < last; start += LANES) {
        const int count = (int)(last - start < LANES ? last - start : LANES);
        const int more = start + LANES < last;
        memcpy(rows, next, sizeof rows);
        if (more) find_rows(p, table, start + LANES, last, next);
        for (int h = 0; h < heads; h++) {
            const float *keys = p->keys + h / p->group * dim;
            const float *values = p->values + h / p->group * dim;
            float scores[LANES], *sum = sums + h * dim;
            if (more)
                for (int t = LANES * h / heads; t < LANES * (h + 1) / heads; t++)
                    prefetch_row(p, next[t]);
            score_tile(query + h * dim, keys, rows, dim, scores);
            const float shrink = soften(scores, count, peak + h, total + h);
            int i = 0;
            for (; i + 4 * LANES <= dim; i += 4 * LANES)
                add_values(sum + i, shrink, scores, values + i, rows, count, 4);
            for (; i + LANES <= dim; i += LANES)
                add_values(sum + i, shrink, scores, values + i, rows, count, 1);
            for (; i < dim; i++) {
                sum[i] *= shrink;
                for (int t = 0; t < count; t++) sum[i] += scores[t] * values[rows[t] + i];
            }
        }
    }
}

/* Common widths become constants, which unrolls the loops over them. */
static void attend_any(const Pages *p, const float *query, const int32_t *table, int64_t first,
                       int64_t last, float *sums, float *peak, float *total) {
    if (p->head_dim == 64)
        attend(p, query, table, first, last, sums, peak, total, 64);
    else if (p->head_dim == 128)
        attend(p, query, table, first, last, sums, peak, total, 128);
    else
        attend(p, query, table, first, last, sums, peak, total, p->head_dim);
}

/* One query token per request over its paged sequence.
 *
 * A task is one part of one request, so that few long sequences keep all threads busy too; parts
 * meet in `partial`, (batch, parts, heads, dim + 2): sums, peak and total of each head.
 * query is (batch, heads, dim), `query_stride` from row to row; out is contiguous. */
void omni_decode_attention(const float *query, int64_t query_stride, const int32_t *block_table,
                           int64_t table_stride, const int32_t *seq_lens, const float *keys,
                           const float *values, int64_t page_stride, int64_t batch,
                           int64_t parts, int32_t block_size, int32_t num_kv_heads, int32_t group,
                           int32_t head_dim, float scale, float *partial, float *out,
                           int threads) {
    const Pages pages = {keys, values, page_stride, block_size, num_kv_heads, group, head_dim};
    const int64_t heads = (int64_t)num_kv_heads * group, dim = head_dim;
    const int64_t part_size = heads * (dim + 2);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < batch * parts; task++) {
            const int64_t request = task / parts, part = task % parts, length = seq_lens[request];
            const int64_t first = length * part / parts, last = length * (part + 1) / parts;
            float scaled[heads * dim], *sums = partial + task * part_size;
            for (int64_t i = 0; i < heads * dim; i++)
                scaled[i] = query[request * query_stride + i] * scale;
            attend_any(&pages, scaled, block_table + request * table_stride, first, last, sums,
                       sums + heads * dim, sums + heads * (dim + 1));
        }
#pragma omp for
        for (int64_t row = 0; row < batch * heads; row++) {
            const float *first = partial + row / heads * parts * part_size;
            const int64_t head = row % heads;
            float top = -INFINITY, total = 0.0f, *result = out + row * dim;
            for (int64_t part = 0; part < parts; part++) {
                const float peak = first[part * part_size + heads * dim + head];
                top = peak > top ? peak : top;
            }
            memset(result, 0, sizeof(float) * (size_t)dim);
            for (int64_t part = 0; part < parts; part++) {
                const float *sums = first + part * part_size;
                const float weight = exp_fast(sums[heads * dim + head] - top);
                total += weight * sums[heads * (dim + 1) + head];
                for (int64_t i = 0; i < dim; i++) result[i] += weight * sums[head * dim + i];
            }
            for (int64_t i = 0; i < dim; i++) result[i] /= total;
        }
    }
}
