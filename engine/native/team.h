/* One team of threads for all kernels of a process; see team.c. */
#ifndef OMNI_TEAM_H
#define OMNI_TEAM_H
#include <stdint.h>

/* Computes one piece of a kernel's work. Pieces write to different places, and in no order. */
typedef void Work(const void *arguments, int64_t piece);

/* Run pieces 0 .. pieces - 1 on at most `threads` threads, the caller's included. */
void omni_team_run(Work *work, const void *arguments, int64_t pieces, int threads);

/* How many of `total` equal parts one piece takes, so that a piece is at least `least` parts and
 * each thread gets about eight: a thread that the system does not run delays its own piece only. */
static inline int64_t omni_piece_size(int64_t total, int64_t least, int threads) {
    const int64_t size = total / (8 * (int64_t)threads);
    return size > least ? size : least;
}

static inline int64_t omni_num_pieces(int64_t total, int64_t size) {
    return (total + size - 1) / size;
}
#endif
