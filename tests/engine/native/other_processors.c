/* Products and attention against sums in double, for compilers and processors that the library of
 * this machine is not built for.
 *
 * Prints how many numbers are too far from what they should be. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void omni_linear(const float *, int64_t, const float *, const float *, float *, int64_t, int64_t,
                 int64_t, float *, int);
void omni_quantized(const float *, int64_t, const uint8_t *, const float *, const float *, float *,
                    int64_t, int64_t, int64_t, int64_t, int, int, void *, int);
void omni_paged_attention(const float *, int64_t, const int32_t *, int64_t, const int32_t *,
                          const int32_t *, const int32_t *, const void *, const void *, int, int64_t,
                          int64_t, int64_t, int64_t, int32_t, int32_t, int32_t, int32_t, float,
                          float, const float *, int64_t, float *, float *, int);
int omni_has_whole_codes(void);
int omni_has_bfloat16(void);

static uint32_t state = 1;
static uint32_t draw(void) { return (state = state * 1664525u + 1013904223u) >> 8; }
static float number(void) { return (float)draw() / (1 << 23) - 1.0f; }

/* Of y (rows, out), how many are not x W^T + bias within `allowed` of a row's and output's norms. */
static int64_t wrong(const float *x, const float *w, const float *bias, const float *y, int64_t rows,
                     int64_t in, int64_t out, double allowed) {
    int64_t count = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < out; o++) {
            double sum = bias[o], all_x = 0, all_w = 0;
            for (int64_t i = 0; i < in; i++) {
                const double a = x[r * in + i], b = w[o * in + i];
                sum += a * b, all_x += a * a, all_w += b * b;
            }
            if (!(fabs(y[r * out + o] - sum) <= allowed * (sqrt(all_x * all_w) + 1))) count++;
        }
    return count;
}

static int64_t wrong_floats(int64_t rows, int64_t in, int64_t out, const float *x, const float *bias,
                            float *y) {
    float *w = malloc(4 * out * in), *packed = malloc(4 * out * in), *copy = malloc(4 * rows * in);
    for (int64_t o = 0; o < out; o++)
        for (int64_t i = 0; i < in; i++)
            packed[(o / 16 * in + i) * 16 + o % 16] = w[o * in + i] = number();
    omni_linear(x, in, packed, bias, y, rows, in, out, rows > 12 ? copy : NULL, 2);
    const int64_t count = wrong(x, w, bias, y, rows, in, out, 1e-6);
    free(w), free(packed), free(copy);
    return count;
}

/* Codes in blocks whose scales are 2^-2 .. 2^-9 and whose offsets are -1 or 0; or bfloat16. */
static int64_t wrong_codes(int bits, int rounded, int64_t rows, int64_t in, int64_t out,
                           int64_t block, const float *x, const float *bias, float *y) {
    const int64_t blocks = (in + block - 1) / block, panels = (out + 31) / 32 * 2;
    const int64_t size = (bits == 16 ? 0 : 64) + block * 2 * bits;
    uint8_t *packed = calloc(panels * blocks, size);
    float *w = malloc(4 * out * in), *factors = malloc(4 * panels * 16);
    void *scratch = malloc(4 * rows * (blocks * (block + 1) + 1));
    for (int64_t o = 0; o < panels * 16; o++) factors[o] = o % 2 ? 4.0f : 0.5f;
    for (int64_t o = 0; o < out; o++)
        for (int64_t i = 0; i < in; i++) {
            uint8_t *at = packed + (o / 16 * blocks + i / block) * size;
            const int64_t lane = o % 16, k = i % block;
            if (bits == 16) {
                const float value = number();
                uint32_t number_bits;
                memcpy(&number_bits, &value, 4);
                const uint16_t upper = number_bits >> 16;
                memcpy(at + k / 2 * 64 + lane * 4 + k % 2 * 2, &upper, 2);
                number_bits &= 0xffff0000u;
                memcpy(&w[o * in + i], &number_bits, 4);
                continue;
            }
            const int exponent = (int)(i / block + o) % 8 + 2;
            const uint16_t scale = (15 - exponent) << 10, offset = i / block % 2 ? 0xbc00 : 0;
            memcpy(at + 2 * lane, &scale, 2), memcpy(at + 32 + 2 * lane, &offset, 2);
            const int code = draw() & ((1 << bits) - 1), half = bits == 4 && k % 8 >= 4;
            at[64 + k * bits / 32 * 64 + lane * 4 + k % 4] |= code << 4 * half;
            w[o * in + i] = factors[o] * (ldexpf(code, -exponent) - (offset ? 1.0f : 0.0f));
        }
    omni_quantized(x, in, packed, factors, bias, y, rows, in, out, block, bits, rounded, scratch, 2);
    const double allowed = !rounded ? 1e-6 : bits == 16 ? 5e-3 : 1e-4;
    const int64_t count = wrong(x, w, bias, y, rows, in, out, allowed);
    free(w), free(packed), free(factors), free(scratch);
    return count;
}

/* Five tokens of one sequence, each after 0, 1, 20, 33 or 40 others, over pages of 8 in an order of
 * their own, in two parts; two heads share their keys. */
static int64_t wrong_attention(int32_t dim) {
    enum { TOKENS = 5, HEADS = 2, BLOCK = 8, BLOCKS = 6 };
    const int32_t table[BLOCKS] = {3, 0, 5, 1, 4, 2}, rows[TOKENS] = {0}, starts[TOKENS] = {0, 0, 0, 7};
    const int32_t ends[TOKENS] = {1, 2, 21, 34, 41};
    float *keys = malloc(4 * BLOCKS * BLOCK * dim), *values = malloc(4 * BLOCKS * BLOCK * dim);
    float *query = malloc(4 * TOKENS * HEADS * dim), *out = malloc(4 * TOKENS * HEADS * dim);
    float *partial = malloc(4 * TOKENS * 2 * HEADS * (dim + 2));
    for (int64_t i = 0; i < BLOCKS * BLOCK * dim; i++) keys[i] = number(), values[i] = number();
    for (int64_t i = 0; i < TOKENS * HEADS * dim; i++) query[i] = 3 * number();
    omni_paged_attention(query, HEADS * dim, table, BLOCKS, rows, starts, ends, keys, values, 0,
                         BLOCK * dim, TOKENS, 2, 32, BLOCK, 1, HEADS, dim, 0.5f, 0, NULL, 0, partial, out,
                         2);
    int64_t count = 0;
    for (int64_t row = 0; row < TOKENS * HEADS; row++) {
        double total = 0, sums[256] = {0};
        for (int64_t at = starts[row / HEADS]; at < ends[row / HEADS]; at++) {
            const int64_t place = (table[at / BLOCK] * BLOCK + at % BLOCK) * dim;
            double score = 0;
            for (int64_t i = 0; i < dim; i++) score += query[row * dim + i] * keys[place + i];
            total += exp(0.5 * score);
            for (int64_t i = 0; i < dim; i++) sums[i] += exp(0.5 * score) * values[place + i];
        }
        for (int64_t i = 0; i < dim; i++)
            if (!(fabs(out[row * dim + i] - sums[i] / total) <= 1e-5)) count++;
    }
    free(keys), free(values), free(query), free(out), free(partial);
    return count;
}

int main(void) {
    const int64_t some_rows[] = {1, 2, 3, 4, 5, 6, 7, 13, 15, 31, 64}, widths[] = {8, 40, 300};
    int64_t count = wrong_attention(24) + wrong_attention(64) + wrong_attention(81);
    for (size_t n = 0; n < sizeof some_rows / sizeof *some_rows; n++)
        for (int kind = 0; kind < 3; kind++) {
            const int64_t rows = some_rows[n], in = widths[kind], out = 64;
            float *x = malloc(4 * rows * in), *y = malloc(4 * rows * out), bias[64];
            for (int64_t i = 0; i < rows * in; i++) x[i] = number();
            for (int64_t o = 0; o < out; o++) bias[o] = number();
            count += wrong_floats(rows, in, out, x, bias, y);
            for (int rounded = 0; rounded < 2; rounded++)
                for (int64_t some = out; some > 32; some -= 23) {
                    const int whole = rounded && omni_has_whole_codes();
                    count += wrong_codes(4, whole, rows, in, some, 32, x, bias, y);
                    count += wrong_codes(8, whole, rows, in, some, 16, x, bias, y);
                    const int short_floats = rounded && omni_has_bfloat16();
                    count += wrong_codes(16, short_floats, rows, in, some, 16, x, bias, y);
                }
            free(x), free(y);
        }
    printf("%lld\n", (long long)count);
    return 0;
}
