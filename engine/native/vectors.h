/* Vectors of the processor's registers, and the tiles of products that fill them. */
#ifndef OMNI_VECTORS_H
#define OMNI_VECTORS_H
#include <stdint.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16 /* outputs of a panel of weights */

/* Floats of a register, and the panels that a tile takes at once. With two panels 28 sums fill the
 * 32 registers of AVX-512, with one panel 12 the 16 of AVX2 and 24 the 32 of NEON. */
#if defined(__AVX512F__)
#define WIDTH 16
#define PANELS 2
#elif defined(__AVX__)
#define WIDTH 8
#define PANELS 1
#else
#define WIDTH 4
#define PANELS 1
#endif
#define OUTPUTS (PANELS * LANES) /* of a tile; a strip is as many panels over all inputs */
#define VECS (OUTPUTS / WIDTH)   /* registers of a row of a tile */

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

/* Where a register's outputs are in a tile: in which panel, and behind how many outputs of it. */
INLINE int64_t panel_of(int v) { return v * WIDTH / LANES; }
INLINE int64_t place_of(int v) { return v * WIDTH % LANES; }
#endif
