/* The team with a pause before each of its stores, where a late member meets a job half replaced.
 *
 * Prints how many pieces did not run exactly once, or with another job's arguments. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#undef atomic_store_explicit
#define atomic_store_explicit(place, value, order) (sched_yield(), *(place) = (value))
#include "team.c"

#define MOST_PIECES 64

typedef struct {
    int64_t pieces;
    _Atomic int runs[MOST_PIECES];
} Job;

static _Atomic(const Job *) running;
static _Atomic int wrong;

static void run_piece(const void *arguments, int64_t piece) {
    Job *job = (Job *)arguments;
    if (job != atomic_load(&running) || piece < 0 || piece >= job->pieces)
        atomic_fetch_add(&wrong, 1);
    else
        atomic_fetch_add(&job->runs[piece], 1);
}

int main(int count, char **arguments) {
    const int num_jobs = count > 1 ? atoi(arguments[1]) : 1, threads = 3;
    static Job jobs[2];
    for (int number = 0; number < num_jobs; number++) {
        Job *job = &jobs[number % 2];
        job->pieces = number % 2 ? MOST_PIECES : 2;
        for (int piece = 0; piece < MOST_PIECES; piece++) atomic_store(&job->runs[piece], 0);
        atomic_store(&running, job);
        omni_team_run(run_piece, job, job->pieces, threads);
        for (int piece = 0; piece < job->pieces; piece++)
            if (atomic_load(&job->runs[piece]) != 1) atomic_fetch_add(&wrong, 1);
    }
    printf("%d\n", atomic_load(&wrong));
    return 0;
}
