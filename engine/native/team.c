/* A team of threads that is fast on idle cores and patient on busy ones.
 *
 * A job's pieces are handed out by a counter. The caller publishes the job, rings, and takes pieces
 * itself; members that are awake take the rest:
 *
 *     caller   publish ─ piece 0 ─ piece 2 ─ piece 3 ─ piece 5 ─ wait ─► return
 *     member             wake ──── piece 1 ─────────── piece 4 ─┘ done == 6
 *
 * A member that another program keeps from its core takes no piece, or delays the one that it has.
 * Waiting spins for some 20 microseconds, the time between two kernels of a layer, then sleeps, so
 * that the core goes to somebody who works. OpenMP's teams hand out equal shares in advance and
 * spin for milliseconds: beside another program each operation waits for the slowest share.
 *
 * `ticket` is the number of the job (upper half) and how many pieces of it are left (lower half).
 * Whoever reads a ticket with pieces left reads the job, then takes a piece by compare-and-swap. If
 * this succeeds, the job had pieces left all the while, so it was not replaced and what was read is
 * its own: the caller replaces a job only when all pieces are done, and then none is left. Between
 * two jobs none is left either, so a late member takes nothing while the fields are half replaced.
 */
#ifdef __linux__
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#include "team.h"

#define SPIN_NS 20000
#define MAX_MEMBERS 1023

static struct {
    _Atomic uint64_t ticket;
    _Atomic(Work *) work;
    _Atomic(const void *) arguments;
    _Atomic uint32_t pieces, done;
    _Atomic int threads;              /* that may take part, the caller's included */
    _Atomic uint32_t bell, sleepers;  /* the job's number again; members asleep until it changes */
    _Atomic uint32_t caller_sleeps;
    _Atomic int num_members;          /* threads besides the caller; changed under `busy` alone */
} team;
static atomic_flag busy = ATOMIC_FLAG_INIT;

/* Sleep while *word is `seen`; may return early. */
static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    (void)word, (void)seen;
    sched_yield();
#endif
}

static void wake(_Atomic uint32_t *word, int count) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
#else
    (void)word, (void)count;
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Returns once *word is not `seen`, which it adds to `sleepers` for as long as it sleeps. */
static void await_change(_Atomic uint32_t *word, uint32_t seen, _Atomic uint32_t *sleepers) {
    const int64_t until = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 16; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != seen) return;
            pause_briefly();
        }
    } while (now_ns() < until);
    atomic_fetch_add(sleepers, 1);
    while (atomic_load(word) == seen) sleep_on(word, seen);
    atomic_fetch_sub(sleepers, 1);
}

/* Take pieces of the job at hand until none is left. The caller is number 0. */
static void take_pieces(int number) {
    uint64_t ticket = atomic_load_explicit(&team.ticket, memory_order_acquire);
    for (;;) {
        Work *work = atomic_load_explicit(&team.work, memory_order_relaxed);
        const void *arguments = atomic_load_explicit(&team.arguments, memory_order_relaxed);
        const uint32_t pieces = atomic_load_explicit(&team.pieces, memory_order_relaxed);
        const int threads = atomic_load_explicit(&team.threads, memory_order_relaxed);
        const uint32_t left = (uint32_t)ticket;
        if (!left || number >= threads) return;
        if (!atomic_compare_exchange_weak_explicit(&team.ticket, &ticket, ticket - 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        work(arguments, pieces - left);
        if (atomic_fetch_add(&team.done, 1) + 1 == pieces && atomic_load(&team.caller_sleeps))
            wake(&team.done, 1);
        ticket = atomic_load_explicit(&team.ticket, memory_order_acquire);
    }
}

static void *member(void *number) {
    uint32_t seen = 0;
    for (;;) {
        await_change(&team.bell, seen, &team.sleepers);
        seen = atomic_load(&team.bell);
        take_pieces((int)(intptr_t)number);
    }
    return NULL;
}

/* A forked child has none of its parent's threads. */
static void forget_members(void) {
    atomic_store(&team.ticket, 0); /* of a job that was running */
    atomic_store(&team.num_members, 0);
    atomic_store(&team.sleepers, 0);
    atomic_store(&team.caller_sleeps, 0);
    atomic_flag_clear(&busy);
}

/* Have `wanted` members, or as many as the system allows. Signals go to the program's own threads. */
static void grow(int wanted) {
    static int watches_forks;
    int count = atomic_load(&team.num_members);
    if (count >= wanted || count >= MAX_MEMBERS) return;
    if (!watches_forks) watches_forks = !pthread_atfork(NULL, NULL, forget_members);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (count < wanted && count < MAX_MEMBERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, member, (void *)(intptr_t)(count + 1))) break;
        pthread_detach(thread);
        count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    atomic_store(&team.num_members, count);
}

/* A job that comes while another thread's is running is computed by its caller alone. */
void omni_team_run(Work *work, const void *arguments, int64_t pieces, int threads) {
    if (pieces <= 1 || threads <= 1 || pieces > INT32_MAX ||
        atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {
        for (int64_t piece = 0; piece < pieces; piece++) work(arguments, piece);
        return;
    }
    grow(threads - 1);
    atomic_store_explicit(&team.work, work, memory_order_relaxed);
    atomic_store_explicit(&team.arguments, arguments, memory_order_relaxed);
    atomic_store_explicit(&team.pieces, (uint32_t)pieces, memory_order_relaxed);
    atomic_store_explicit(&team.threads, threads, memory_order_relaxed);
    atomic_store_explicit(&team.done, 0, memory_order_relaxed);
    const uint32_t number = atomic_load(&team.bell) + 1;
    const uint64_t ticket = (uint64_t)number << 32 | (uint32_t)pieces;
    atomic_store_explicit(&team.ticket, ticket, memory_order_release);
    atomic_store(&team.bell, number);
    if (atomic_load(&team.sleepers)) {
        /* Where there are more members than may take part, those that may must be among the woken. */
        const int useful = (int)(threads < pieces ? threads : pieces) - 1;
        wake(&team.bell, atomic_load(&team.num_members) < threads ? useful : MAX_MEMBERS);
    }
    take_pieces(0);
    for (;;) {
        const uint32_t done = atomic_load(&team.done);
        if (done == (uint32_t)pieces) break;
        await_change(&team.done, done, &team.caller_sleeps);
    }
    atomic_flag_clear_explicit(&busy, memory_order_release);
}
