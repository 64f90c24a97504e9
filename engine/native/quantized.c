/* y = x W^T + b where W is codes of 8 or 4 bits in blocks, w = factor (scale * code + offset), or
 * bfloat16.
 *
 * Sixteen outputs are a panel, a stream of blocks. A tile is some rows of x by one panel, or by two
 * where a register holds a panel (AVX-512):
 *
 *     block   | 16 scales | 16 offsets | codes, 64 bytes for every 4 (8 bits) or 8 (4 bits) inputs |
 *               float16     float16      | output 0: input 0 1 2 3 | output 1: input 0 1 2 3 | ...
 *                                          4 bits: inputs 4 to 7 are the upper halves of the bytes
 *
 * Scales and offsets are relative to a power of two of each output, `factor`.
 *
 * With VNNI, a row of x is rounded to 16 bits by its largest value, and is multiplied in two halves
 * of 8 bits: q = 256 high + low. Sums of a block are exact. A row's largest value is at most
 * sqrt(in) times its root mean square, so that this rounds by less than 1e-3 for 10,000 inputs, a
 * share of what rounding weights does; 8 bits would round as roughly. AVX2 multiplies the 16 bits as
 * they are, by codes widened to 16 bits, which is twice as fast as floats:
 *
 *     codes, a lane   | c0 c1 c2 c3 |  ->  even | c0 | c2 |   odd | c1 | c3 |
 *     x, every lane                             | x0 | x2 |       | x1 | x3 |
 *
 * Elsewhere codes become floats on the way. In each case a tile unpacks codes once for all its rows.
 *
 * bfloat16 has no scales: 64 bytes are two inputs of sixteen outputs. With AVX512-BF16 x is rounded
 * too; sums are float32. With AMX, sixteen rows and more are multiplied in tiles of 16 rows by 32
 * inputs, which the layout fits: 1 KiB of a panel is a tile of 32 inputs by 16 outputs.
 */
#define _GNU_SOURCE
#include <math.h>
#include <string.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#endif

#include "team.h"
#include "vectors.h"

#define HEADER (4 * LANES) /* bytes of a block's scales and offsets */

/* Rows of a tile, with sums of its own for each half where there is VNNI; and of bfloat16. */
#if WIDTH == 16
#define MAX_ROWS 6
#define MAX_ROWS_16 12
#else
#define MAX_ROWS 4
#define MAX_ROWS_16 5
#endif

typedef uint16_t hvec __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

/* Whether codes are multiplied as whole numbers. */
int omni_has_whole_codes(void) {
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
    return 1;
#else
    return 0;
#endif
}

int omni_has_bfloat16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* Whether bfloat16 may be multiplied in tiles: the system must let the process use them. */
int omni_has_tiles(void) {
#ifdef HAS_TILES
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 0;
#endif
}

/* See omni_quantized. */
typedef struct {
    const float *x;
    int64_t x_stride, rows, in;
    const uint8_t *w;
    int64_t blocks, block, out;
    int bits;
    const float *factors, *bias;
    float *y;
    int rounded;       /* whether x is rounded: to 16 bits, or to bfloat16; 2: also tiled */
    void *laid_out;    /* x (rows, blocks * block), floats, bfloat16, or by fours, 16 bits */
    float *sums;       /* (rows, blocks) of x, in steps */
    float *steps;      /* (rows) what the laid out x is multiples of */
    int64_t together;  /* rows that one piece multiplies */
    int64_t chunks;    /* pieces of these rows */
    int64_t size;      /* strips of a piece */
    int64_t rows_size; /* rows that one piece lays out */
} Product;

INLINE int64_t block_bytes(const Product *p) {
    return (p->bits == 16 ? 0 : HEADER) + p->block * LANES * p->bits / 8;
}

static void lay_out_floats(const Product *p, int64_t row) {
    float *to = (float *)p->laid_out + row * p->blocks * p->block;
    memcpy(to, p->x + row * p->x_stride, sizeof(float) * (size_t)p->in);
    memset(to + p->in, 0, sizeof(float) * (size_t)(p->blocks * p->block - p->in));
    for (int64_t b = 0; b < p->blocks; b++, to += p->block) {
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < p->block; i++) sum += to[i];
        p->sums[row * p->blocks + b] = sum;
    }
    p->steps[row] = 1.0f;
}

#ifdef __AVX512F__
/* Sixteen of `left` floats, zeros past the end. */
INLINE __m512 load_some(const float *x, int64_t left) {
    return _mm512_maskz_loadu_ps(left < WIDTH ? (__mmask16)((1 << left) - 1) : 0xffff, x);
}
#endif

#ifdef __AVX512VNNI__
static void lay_out_halves(const Product *p, int64_t row) {
    const float *x = p->x + row * p->x_stride;
    __m512 top = _mm512_setzero_ps(), all = top;
    for (int64_t i = 0; i < p->in; i += WIDTH) {
        const __m512 size = _mm512_abs_ps(load_some(x + i, p->in - i));
        top = _mm512_max_ps(top, size);
        all = _mm512_add_ps(all, size);
    }
    /* What is not finite makes the row's products NaN; what is this small counts as nothing. */
    const float most = _mm512_reduce_max_ps(top), sum = _mm512_reduce_add_ps(all);
    const int is_finite = sum - sum == 0.0f, counts = is_finite && most > 1e-30f;
    p->steps[row] = is_finite ? most / 32512.0f : NAN;
    const __m512 per_step = _mm512_set1_ps(counts ? 32512.0f / most : 0.0f);
    __m128i *to = (__m128i *)((int8_t *)p->laid_out + 2 * row * p->blocks * p->block);
    for (int64_t b = 0; b < p->blocks; b++) {
        __m512i total = _mm512_setzero_si512();
        for (int64_t i = b * p->block; i < (b + 1) * p->block; i += WIDTH, to += 2) {
            const int64_t left = p->in > i && counts ? p->in - i : 0;
            const __m512 scaled = _mm512_mul_ps(load_some(x + i, left), per_step);
            const __m512i q = _mm512_cvtps_epi32(scaled);
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
            const __m128i high = _mm512_cvtepi32_epi8(upper), low = _mm512_cvtepi32_epi8(q);
            total = _mm512_add_epi32(total, q);
            _mm_storeu_si128(to, _mm_unpacklo_epi32(high, low));
            _mm_storeu_si128(to + 1, _mm_unpackhi_epi32(high, low));
        }
        p->sums[row * p->blocks + b] = (float)_mm512_reduce_add_epi32(total);
    }
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
static void lay_out_shorts(const Product *p, int64_t row) {
    const float *x = p->x + row * p->x_stride;
    float most = 0.0f, sum = 0.0f;
#pragma omp simd reduction(max : most) reduction(+ : sum)
    for (int64_t i = 0; i < p->in; i++) {
        const float size = fabsf(x[i]);
        most = size > most ? size : most;
        sum += size;
    }
    /* What is not finite makes the row's products NaN; what is this small counts as nothing. */
    const int is_finite = sum - sum == 0.0f, counts = is_finite && most > 1e-30f;
    p->steps[row] = is_finite ? most / 32512.0f : NAN;
    const float per_step = counts ? 32512.0f / most : 0.0f;
    int16_t *to = (int16_t *)p->laid_out + row * p->blocks * p->block;
    for (int64_t b = 0; b < p->blocks; b++, to += p->block) {
        const int64_t left = counts && p->in > b * p->block ? p->in - b * p->block : 0;
        const int64_t some = left < p->block ? left : p->block;
        int32_t total = 0, q[128] = {0};
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < some; i++) {
            const union { float scaled; int32_t bits; } number = {
                x[b * p->block + i] * per_step + 0x1.8p23f}; /* its last bits are the number */
            q[i] = number.bits - 0x4b400000;
            total += q[i];
        }
        for (int64_t i = 0; i < p->block; i += 4) {
            to[i] = (int16_t)q[i], to[i + 1] = (int16_t)q[i + 2];
            to[i + 2] = (int16_t)q[i + 1], to[i + 3] = (int16_t)q[i + 3];
        }
        p->sums[row * p->blocks + b] = (float)total;
    }
}
#endif

#ifdef __AVX512BF16__
static void lay_out_bfloat16(const Product *p, int64_t row) {
    const float *x = p->x + row * p->x_stride;
    __m256bh *to = (__m256bh *)((uint16_t *)p->laid_out + row * p->blocks * p->block);
    for (int64_t i = 0; i < p->blocks * p->block; i += WIDTH)
        *to++ = _mm512_cvtneps_pbh(load_some(x + i, p->in > i ? p->in - i : 0));
}
#endif

static void lay_out_rows(const void *arguments, int64_t piece) {
    const Product *p = arguments;
    const int64_t first = piece * p->rows_size, last = first + p->rows_size;
    for (int64_t row = first; row < last && row < p->rows; row++)
#ifdef __AVX512BF16__
        if (p->rounded && p->bits == 16)
            lay_out_bfloat16(p, row);
        else
#endif
#if defined(__AVX512VNNI__)
        if (p->rounded && p->bits != 16)
            lay_out_halves(p, row);
        else
#elif defined(__AVX2__) && !defined(__AVX512F__)
        if (p->rounded && p->bits != 16)
            lay_out_shorts(p, row);
        else
#endif
            lay_out_floats(p, row);
}

/* float16 to floats: the exponent's bias differs by 112. */
INLINE vec from_half(const uint8_t *at) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#endif
    const ivec bits = __builtin_convertvector(*(const hvec *)at, ivec);
    return (vec)((bits & 0x8000) << 16 | (bits & 0x7fff) << 13) * 0x1p112f;
}

/* A register of outputs from `first` on, those that are there, with the bias. */
INLINE void store(const Product *p, int64_t row, int64_t first, vec total) {
    float *y = p->y + row * p->out + first;
    for (int64_t i = 0; i < WIDTH && i < p->out - first; i++)
        y[i] = total[i] + (p->bias ? p->bias[first + i] : 0.0f);
}

/* Codes of a register's outputs, of the four inputs of one step: each byte of a lane one input. */
INLINE ivec codes_of(const uint8_t *codes, int64_t step, int bits) {
    if (bits == 8) return *(const ivec *)(codes + step * 64);
    const ivec both = *(const ivec *)(codes + step / 2 * 64);
    return (step % 2 ? both >> 4 : both) & 0x0f0f0f0f;
}

/* `rows` and `bits` are constants where these are inlined, so that sums stay in registers. */
INLINE void dot_floats(int rows, int bits, const Product *p, const uint8_t *const codes[VECS],
                       int64_t row, int64_t b, vec sum[MAX_ROWS][VECS]) {
    const int64_t width = p->blocks * p->block;
    const float *x = (const float *)p->laid_out + row * width + b * p->block;
    for (int64_t step = 0; step < p->block / 4; step += bits == 4 ? 2 : 1)
        for (int part = 0; part < (bits == 4 ? 2 : 1); part++) {
            ivec four[VECS];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) four[v] = codes_of(codes[v], step + part, bits);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                vec weight[VECS];
#pragma GCC unroll 4
                for (int v = 0; v < VECS; v++)
                    weight[v] = __builtin_convertvector(four[v] >> 8 * j & 255, vec);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    const float value = x[r * width + (step + part) * 4 + j];
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; v++) sum[r][v] += value * weight[v];
                }
            }
        }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
INLINE void dot_shorts(int rows, int bits, const Product *p, const uint8_t *const codes[VECS],
                       int64_t row, int64_t b, vec sum[MAX_ROWS][VECS]) {
    const int64_t width = p->blocks * p->block / 2; /* in twos of shorts */
    const int32_t *x = (const int32_t *)p->laid_out + row * width + b * p->block / 2;
    const __m256i mask = _mm256_set1_epi16(bits == 4 ? 15 : 255);
    __m256i total[MAX_ROWS][VECS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        total[r][0] = total[r][1] = _mm256_setzero_si256();
    for (int64_t step = 0; step < p->block * bits / 32; step++)
#pragma GCC unroll 2
        for (int part = 0; part < 8 / bits; part++) {
            __m256i even[VECS], odd[VECS];
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) {
                const __m256i all = _mm256_loadu_si256((const __m256i *)(codes[v] + step * 64));
                even[v] = _mm256_and_si256(_mm256_srli_epi16(all, 4 * part), mask);
                odd[v] = _mm256_and_si256(_mm256_srli_epi16(all, 4 * part + 8), mask);
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const int32_t *at = x + r * width + (step * (8 / bits) + part) * 2;
                const __m256i first = _mm256_set1_epi32(at[0]), second = _mm256_set1_epi32(at[1]);
#pragma GCC unroll 2
                for (int v = 0; v < VECS; v++) {
                    total[r][v] = _mm256_add_epi32(total[r][v], _mm256_madd_epi16(even[v], first));
                    total[r][v] = _mm256_add_epi32(total[r][v], _mm256_madd_epi16(odd[v], second));
                }
            }
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) sum[r][v] = (vec)_mm256_cvtepi32_ps(total[r][v]);
}
#endif

#ifdef __AVX512VNNI__
/* Four products in each lane of two panels. Of the intrinsic, gcc 12 spills what is summed. */
INLINE void add_products(__m512i sums[2], __m512i first, __m512i second, const int32_t *x) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[0]) : "v"(first), "m"(*x));
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[1]) : "v"(second), "m"(*x));
}

INLINE void dot_halves(int rows, int bits, const Product *p, const uint8_t *const codes[VECS],
                       int64_t row, int64_t b, vec sum[MAX_ROWS][VECS]) {
    const int64_t width = p->blocks * p->block / 2; /* in fours of bytes */
    const int32_t *x = (const int32_t *)p->laid_out + row * width + b * p->block / 2;
    __m512i high[MAX_ROWS][2], low[MAX_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        high[r][0] = high[r][1] = low[r][0] = low[r][1] = _mm512_setzero_si512();
    for (int64_t step = 0; step < p->block / 4; step += bits == 4 ? 2 : 1) {
        __builtin_prefetch(codes[0] + 8192 + step * 8 * bits, 0, 2);
        __builtin_prefetch(codes[1] + 8192 + step * 8 * bits, 0, 2);
#pragma GCC unroll 2
        for (int part = 0; part < (bits == 4 ? 2 : 1); part++) {
            const __m512i first = (__m512i)codes_of(codes[0], step + part, bits);
            const __m512i second = (__m512i)codes_of(codes[1], step + part, bits);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const int32_t *at = x + r * width + (step + part) * 2;
                add_products(high[r], first, second, at);
                add_products(low[r], first, second, at + 1);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
            sum[r][v] = (vec)_mm512_cvtepi32_ps(
                _mm512_add_epi32(_mm512_slli_epi32(high[r][v], 8), low[r][v]));
}
#endif

/* Rows from `row` on by the panels at `w`. */
INLINE void tile(int rows, int bits, int rounded, const Product *p, const uint8_t *w, int64_t row,
                 int64_t strip) {
    const int64_t bytes = block_bytes(p);
    vec total[MAX_ROWS][VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECS; v++) total[r][v] = (vec){0};
    for (int64_t b = 0; b < p->blocks; b++) {
        const uint8_t *blocks[VECS], *codes[VECS];
        vec sum[MAX_ROWS][VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
            blocks[v] = w + (panel_of(v) * p->blocks + b) * bytes;
            codes[v] = blocks[v] + HEADER + 4 * place_of(v);
            for (int r = 0; r < rows; r++) sum[r][v] = (vec){0};
        }
        /* Registers are for the sums of a block: totals are kept in memory meanwhile. */
        if (rows * VECS > 8) __asm__ volatile("" : : "r"(total) : "memory");
#if defined(__AVX512VNNI__)
        if (rounded)
            dot_halves(rows, bits, p, codes, row, b, sum);
        else
#elif defined(__AVX2__) && !defined(__AVX512F__)
        if (rounded)
            dot_shorts(rows, bits, p, codes, row, b, sum);
        else
#endif
            dot_floats(rows, bits, p, codes, row, b, sum);
        for (int v = 0; v < VECS; v++) {
            const uint8_t *at = blocks[v] + 2 * place_of(v);
            const vec scale = from_half(at), offset = from_half(at + 2 * LANES);
            for (int r = 0; r < rows; r++) {
                total[r][v] += sum[r][v] * scale;
                total[r][v] += offset * p->sums[(row + r) * p->blocks + b];
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECS; v++) {
            const int64_t first = strip * OUTPUTS + v * WIDTH;
            const vec scale = *(const vec *)(p->factors + first) * p->steps[row + r];
            store(p, row + r, first, total[r][v] * scale);
        }
}

#ifdef __AVX512BF16__
INLINE vec add_pairs(vec sum, __m512i weights, const int32_t *x) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*x));
    return sum;
}
#endif

/* As `tile`, of weights that are bfloat16. */
INLINE void tile_16(int rows, int rounded, const Product *p, const uint8_t *w, int64_t row,
                    int64_t strip) {
    const int64_t width = p->blocks * p->block, panel = width * LANES * 2;
    vec sum[MAX_ROWS_16][VECS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[r][v] = (vec){0};
    for (int64_t step = 0; step < width / 2; step++, w += 64) {
        ivec twos[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
            const uint8_t *at = w + panel_of(v) * panel + 4 * place_of(v);
            if (place_of(v) == 0) __builtin_prefetch(at + 8192, 0, 2);
            twos[v] = *(const ivec *)at;
        }
#ifdef __AVX512BF16__
        if (rounded) {
            const int32_t *x = (const int32_t *)p->laid_out + row * width / 2 + step;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                sum[r][0] = add_pairs(sum[r][0], (__m512i)twos[0], x + r * width / 2);
                sum[r][1] = add_pairs(sum[r][1], (__m512i)twos[1], x + r * width / 2);
            }
            continue;
        }
#endif
        const float *x = (const float *)p->laid_out + row * width + 2 * step;
        vec low[VECS], high[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++)
            low[v] = (vec)(twos[v] << 16), high[v] = (vec)(twos[v] & ((ivec){0} - 65536));
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[r][v] += x[r * width] * low[v];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[r][v] += x[r * width + 1] * high[v];
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) store(p, row + r, strip * OUTPUTS + v * WIDTH, sum[r][v]);
}

#ifdef HAS_TILES
#define TILE_ROWS 16
#define TILE_INPUTS 32

/* As `tile_16`, of the rows `row` and `other` and the 15 behind each, in four sums of 16 x 16. */
static void tile_32(const Product *p, const uint8_t *w, int64_t row, int64_t other, int64_t strip) {
    const int64_t width = p->blocks * p->block, bytes = 2 * width, panel = bytes * LANES;
    const uint8_t *x = (const uint8_t *)p->laid_out + row * bytes;
    const uint8_t *more = (const uint8_t *)p->laid_out + other * bytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < width; i += TILE_INPUTS, w += 64 * TILE_INPUTS / 2) {
        _tile_loadd(4, x + 2 * i, bytes);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + panel, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, more + 2 * i, bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    vec sums[4][TILE_ROWS];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int t = 0; t < 4; t++)
        for (int r = 0; r < TILE_ROWS; r++)
            store(p, (t < 2 ? row : other) + r, strip * OUTPUTS + t % 2 * LANES, sums[t][r]);
}

/* The strips of a piece, of at least 16 rows; the last tile may repeat rows of the one before. */
static void multiply_tiles(const Product *p, int64_t begin, int64_t end, int64_t strip,
                           int64_t last) {
    struct { uint8_t palette, start, reserved[14]; uint16_t columns[16]; uint8_t rows[16]; } shape = {
        .palette = 1};
    for (int t = 0; t < 8; t++) shape.columns[t] = 64, shape.rows[t] = TILE_ROWS;
    _tile_loadconfig(&shape);
    for (; strip < last; strip++)
        for (int64_t row = begin; row < end; row += 2 * TILE_ROWS) {
            const int64_t most = end - TILE_ROWS, next = row + TILE_ROWS;
            tile_32(p, p->w + strip * PANELS * p->blocks * block_bytes(p),
                    row < most ? row : most, next < most ? next : most, strip);
        }
    _tile_release();
}
#endif

#define CASE_16(n)                                                                               \
    case n:                                                                                      \
        p->rounded ? tile_16(n, 1, p, w, row, strip) : tile_16(n, 0, p, w, row, strip);          \
        break;

static void multiply_16(const Product *p, const uint8_t *w, int64_t row, int64_t rows,
                        int64_t strip) {
    switch (rows) {
        CASE_16(1) CASE_16(2) CASE_16(3) CASE_16(4) CASE_16(5)
#if WIDTH == 16
        CASE_16(6) CASE_16(7) CASE_16(8) CASE_16(9) CASE_16(10) CASE_16(11) CASE_16(12)
#endif
    }
}

#define CASE(n)                                                                                  \
    case n:                                                                                      \
        if (p->bits == 4)                                                                        \
            p->rounded ? tile(n, 4, 1, p, w, row, strip) : tile(n, 4, 0, p, w, row, strip);      \
        else                                                                                     \
            p->rounded ? tile(n, 8, 1, p, w, row, strip) : tile(n, 8, 0, p, w, row, strip);      \
        break;

static void multiply_codes(const Product *p, const uint8_t *w, int64_t row, int64_t rows,
                           int64_t strip) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if WIDTH == 16
        CASE(5) CASE(6)
#endif
    }
}

static void multiply(const void *arguments, int64_t piece) {
    const Product *p = arguments;
    const int64_t begin = piece / p->chunks * p->together, first = piece % p->chunks * p->size;
    const int64_t end = begin + p->together < p->rows ? begin + p->together : p->rows;
    const int64_t strips = omni_num_pieces(p->out, OUTPUTS);
    const int64_t last = first + p->size < strips ? first + p->size : strips;
#ifdef HAS_TILES
    if (p->bits == 16 && p->rounded == 2 && end - begin >= TILE_ROWS) {
        multiply_tiles(p, begin, end, first, last);
        return;
    }
#endif
    const int64_t tiles = omni_num_pieces(end - begin, p->bits == 16 ? MAX_ROWS_16 : MAX_ROWS);
    for (int64_t strip = first; strip < last; strip++) {
        const uint8_t *w = p->w + strip * PANELS * p->blocks * block_bytes(p);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = begin + (end - begin) * t / tiles;
            const int64_t rows = begin + (end - begin) * (t + 1) / tiles - row;
            (p->bits == 16 ? multiply_16 : multiply_codes)(p, w, row, rows, strip);
        }
    }
}

/* x (rows, in), `x_stride` from row to row; y (rows, out) contiguous; w and factors are of panels
 * that fill pairs; `block` is 16 to 128, and 32 for tiles (`rounded` 2). `scratch` has room for 4 bytes of every input of every
 * row, `in` rounded up to blocks, and behind it for every block of every row, and every row. */
void omni_quantized(const float *x, int64_t x_stride, const uint8_t *w, const float *factors,
                    const float *bias, float *y, int64_t rows, int64_t in, int64_t out,
                    int64_t block, int bits, int rounded, void *scratch, int threads) {
    const int64_t blocks = omni_num_pieces(in, block), strips = omni_num_pieces(out, OUTPUTS);
    Product p = {x,       x_stride, rows, in, w, blocks, block, out, bits, factors, bias, y,
                 rounded, scratch,  NULL, NULL, 0, 0, 0, 0};
    p.sums = (float *)scratch + rows * blocks * block;
    p.steps = p.sums + rows * blocks;
    p.rows_size = omni_piece_size(rows, 16384 / (blocks * block) + 1, threads);
    omni_team_run(lay_out_rows, &p, omni_num_pieces(rows, p.rows_size), threads);
    /* Rows of which the second-level cache holds all inputs while panels pass over them. */
    const int64_t fitting = (1 << 18) / (blocks * block) / 12 * 12;
    p.together = fitting > 24 ? fitting : 24;
    const int64_t turns = omni_num_pieces(rows, p.together);
    p.size = omni_piece_size(strips * turns, 1, threads);
    p.size = p.size < strips ? p.size : strips;
    p.chunks = omni_num_pieces(strips, p.size);
    omni_team_run(multiply, &p, turns * p.chunks, threads);
}
