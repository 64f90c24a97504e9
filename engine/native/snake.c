/* The anti-aliased snake of BigVGAN in one pass: two samples for one, the snake, one for two. fp32.
 *
 *     x ──► low-pass, twice the samples ──► v = u + c sin^2(a u) ──► low-pass, every second one
 *
 * As convolutions of one channel each, which is how torch runs the two filters, this takes most of
 * a vocoder's time, and eight passes over memory. Here a tile of a channel stays in the first-level
 * cache. Samples at twice the rate are kept as two rows, those at even places and those at odd
 * ones: each filter of 12 taps is then two of 6 over neighbours, and every loop is vector code.
 */
#include <math.h>
#include <stdint.h>

#include "team.h"

#define TAPS 12
#define HALF (TAPS / 2)
#define TILE 512
/* Before and after a tile: the second filter sees 3 samples further, the first 3 from there. */
#define HALO 3

/* Beyond this, pi times the count of half turns is not exact enough to be taken off. */
#define FAR 8192.0f

/* The square of the sine, to 2e-7 for |x| <= FAR. It has pi for its period, so that what is left
 * over from the nearest multiple will do, whichever that is: x = n pi + r with |r| <= pi / 2. */
static inline __attribute__((always_inline)) float sine_squared(float x) {
    const float n = __builtin_nearbyintf(x * 0.318309886f);
    /* Pi in three parts, of which n times the first two is exact. */
    const float r = ((x - n * 3.140625f) - n * 9.67502593994140625e-4f) - n * 1.509957990978376e-7f;
    const float z = r * r;
    float p = -2.3889859e-8f; /* Taylor's and minimax' terms of sin r / r to the tenth power */
    p = p * z + 2.7525562e-6f;
    p = p * z - 1.9840874e-4f;
    p = p * z + 8.3333310e-3f;
    p = p * z - 1.6666667e-1f;
    const float sine = r + r * z * p;
    return sine * sine;
}

/* v = u + c sin^2(a u), in place. */
static void snake(float *samples, int64_t count, float rate, float scale) {
    float most = 0.0f;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) {
        const float turned = fabsf(samples[i] * rate);
        most = turned > most ? turned : most;
    }
    if (most > FAR) {
        for (int64_t i = 0; i < count; i++) {
            const float sine = sinf(samples[i] * rate);
            samples[i] += scale * (sine * sine);
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        samples[i] += scale * sine_squared(samples[i] * rate);
}

/* Samples start - HALO .. start + count + HALO - 1 at both places of twice the rate. Beyond the
 * channel's ends its first and last sample repeat. */
static void twice(const float *x, int64_t length, int64_t start, int64_t count, const float *up,
                  float rate, float scale, float *even, float *odd) {
    float near[TILE + 4 * HALO];
    for (int64_t i = 0; i < count + 4 * HALO; i++) {
        const int64_t place = start - 2 * HALO + i;
        near[i] = x[place < 0 ? 0 : place >= length ? length - 1 : place];
    }
    const float *middle = near + HALO; /* of the first sample that is made */
#pragma omp simd
    for (int64_t s = 0; s < count + 2 * HALO; s++) {
        float first = 0.0f, second = 0.0f;
#pragma GCC unroll 6
        for (int k = 0; k < HALF; k++) {
            first += middle[s + 2 - k] * up[2 * k + 1];
            second += middle[s + 3 - k] * up[2 * k];
        }
        even[s] = 2.0f * first;
        odd[s] = 2.0f * second;
    }
    snake(even, count + 2 * HALO, rate, scale);
    snake(odd, count + 2 * HALO, rate, scale);
}

typedef struct {
    const float *x, *up, *down, *rates, *scales;
    float *out;
    int64_t channels, length;
} Snake;

/* One row: a channel of one item of the batch. */
static void snake_row(const void *arguments, int64_t row) {
    const Snake *k = arguments;
    const int64_t length = k->length;
    const float *from = k->x + row * length;
    float *to = k->out + row * length;
    const float rate = k->rates[row % k->channels], scale = k->scales[row % k->channels];
    float even[TILE + 2 * HALO], odd[TILE + 2 * HALO];
    for (int64_t start = 0; start < length; start += TILE) {
        const int64_t count = length - start < TILE ? length - start : TILE;
        twice(from, length, start, count, k->up, rate, scale, even, odd);
        /* Beyond the ends it is the samples at twice the rate that repeat. */
        if (start == 0)
            for (int i = 0; i < HALO; i++) even[i] = odd[i] = even[HALO];
        const int64_t end = length - start + HALO;
        for (int64_t i = end; i < count + 2 * HALO; i++) even[i] = odd[i] = odd[end - 1];
        const float *e = even + HALO, *o = odd + HALO, *down = k->down;
        float *made = to + start;
#pragma omp simd
        for (int64_t s = 0; s < count; s++) {
            float sum = 0.0f;
#pragma GCC unroll 6
            for (int k = 0; k < HALF; k++)
                sum += e[s - 2 + k] * down[2 * k + 1] + o[s - 3 + k] * down[2 * k];
            made[s] = sum;
        }
    }
}

/* Rows of (batch, channels, length): a rate and a scale for each channel, filters for all. */
void omni_snake(const float *x, float *out, int64_t rows, int64_t channels, int64_t length,
                const float *up, const float *down, const float *rates, const float *scales,
                int threads) {
    const Snake snake = {x, up, down, rates, scales, out, channels, length};
    omni_team_run(snake_row, &snake, rows, threads);
}
