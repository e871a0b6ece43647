// Threads that share a product: own workers, or the threads of PyTorch's OpenMP runtime.
//
// A worker polls its mailbox for AWAKE microseconds, then sleeps on a condition variable. The caller puts an offer,
// which is on its stack, into the mailboxes of idle workers, works, and withdraws the offer from workers that have not
// begun: it never waits for a sleeping thread. A worker claims an offer by compare-and-swap before it reads it. Without
// workers (no threads left, a forked child before its first product) the caller works alone.
#include "common.hpp"
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#endif

namespace {

void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#else
    __asm__ __volatile__("yield");
#endif
}

struct Offer {
    void (*work)(void*, int);
    void* argument;
    std::atomic<int> next;  // number of the next thread
    std::atomic<int64_t> done;  // workers that have returned
#if defined(__linux__)
    cpu_set_t cpus;  // of the caller; a worker runs on these
#endif
    static void enter(void* at) {
        lp::Arithmetic standard;
        Offer& offer = *(Offer*)at;
        offer.work(offer.argument, offer.next.fetch_add(1));
    }
};
Offer* const CLAIMED = (Offer*)1;

struct alignas(64) Worker {  // valid when all bytes are 0
    std::atomic<Offer*> mailbox;
    std::atomic<bool> is_asleep;
#if defined(_WIN32)
    SRWLOCK mutex;
    CONDITION_VARIABLE wake;
#else
    pthread_mutex_t mutex;
    pthread_cond_t wake;
#endif
#if defined(__linux__)
    cpu_set_t cpus;
#endif
};

const int MOST_WORKERS = 255, AWAKE = 150;
const size_t STACK = 1 << 20;
Worker workers[MOST_WORKERS];
std::atomic<int> count;
std::atomic<bool> is_starting, is_child;
std::atomic<void (*)(void (*)(void*), void*, unsigned, unsigned)> gomp_parallel;
std::atomic<int (*)(void)> omp_in_parallel;

#if defined(_WIN32)
void lock(Worker& w) { AcquireSRWLockExclusive(&w.mutex); }
void unlock(Worker& w) { ReleaseSRWLockExclusive(&w.mutex); }
void wait(Worker& w) { SleepConditionVariableSRW(&w.wake, &w.mutex, INFINITE, 0); }
void wake(Worker& w) { WakeConditionVariable(&w.wake); }
int64_t microseconds() {
    LARGE_INTEGER ticks, frequency;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&frequency);
    return ticks.QuadPart * 1000000 / frequency.QuadPart;
}
#else
void lock(Worker& w) { pthread_mutex_lock(&w.mutex); }
void unlock(Worker& w) { pthread_mutex_unlock(&w.mutex); }
void wait(Worker& w) { pthread_cond_wait(&w.wake, &w.mutex); }
void wake(Worker& w) { pthread_cond_signal(&w.wake); }
int64_t microseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}
#endif

// Does the work in the mailbox. The caller waits for `done` of a claimed offer, so that it stays valid until then.
bool serve_once(Worker& w) {
    Offer* offer = w.mailbox.load(std::memory_order_acquire);
    if (!offer || !w.mailbox.compare_exchange_strong(offer, CLAIMED)) return false;
#if defined(__linux__)
    if (memcmp(&w.cpus, &offer->cpus, sizeof w.cpus)) {
        w.cpus = offer->cpus;
        sched_setaffinity(0, sizeof w.cpus, &w.cpus);
    }
#endif
    Offer::enter(offer);
    w.mailbox = nullptr;
    offer->done.fetch_add(1);
    return true;
}

#if defined(_WIN32)
DWORD WINAPI serve(void* at) {
#else
void* serve(void* at) {
#endif
    Worker& w = *(Worker*)at;
    for (;;) {
        int64_t end = microseconds() + AWAKE;
        do {
            for (int i = 0; i < 64; i++) {
                if (serve_once(w)) end = microseconds() + AWAKE;
                pause_cpu();
            }
        } while (microseconds() < end);
        lock(w);
        w.is_asleep = true;
        while (!w.mailbox.load()) wait(w);
        w.is_asleep = false;
        unlock(w);
    }
}

#if defined(_WIN32)
bool start(Worker& w) {
    HANDLE thread = CreateThread(nullptr, STACK, serve, &w, STACK_SIZE_PARAM_IS_A_RESERVATION, nullptr);
    return thread && CloseHandle(thread);
}
#else
bool start(Worker& w) {
    w.mailbox = nullptr;
    w.is_asleep = false;
    pthread_mutex_init(&w.mutex, nullptr);
    pthread_cond_init(&w.wake, nullptr);
#if defined(__linux__)
    memset(&w.cpus, 0, sizeof w.cpus);
#endif
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t every, before;  // signals are for Python's threads
    sigfillset(&every);
    pthread_sigmask(SIG_BLOCK, &every, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    const bool is_made = pthread_create(&thread, &attributes, serve, &w) == 0 && pthread_detach(thread) == 0;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return is_made;
}
// A forked child has no workers, and OpenMP would wait for threads that do not exist there.
void forget() {
    count = 0;
    is_starting = false;
    is_child = true;
}
__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, forget); }
#endif

// Starts workers until there are as many, or no more threads; returns the number of all.
int ready(int wanted) {
    if (wanted > MOST_WORKERS) wanted = MOST_WORKERS;
    if (count < wanted && !is_starting.exchange(true)) {
        while (count < wanted && start(workers[count])) count++;
        is_starting = false;
    }
    return count;
}

}  // namespace

namespace lp {

void wait_for(const std::atomic<int64_t>& counter, int64_t value) {
    for (int polls = 0; counter.load(std::memory_order_acquire) < value; polls++) {
        if (polls < 2000) pause_cpu();
#if defined(_WIN32)
        else SwitchToThread();
#else
        else sched_yield();
#endif
    }
}

void run(void (*work)(void*, int), void* argument, int threads) {
    if (threads <= 1) return work(argument, 0);
    Offer offer = {};
    offer.work = work;
    offer.argument = argument;
    if (auto parallel = gomp_parallel.load(); parallel && !is_child) {
        // A thread of a parallel region works alone: the region has the CPUs already.
        return omp_in_parallel.load()() ? Offer::enter(&offer) : parallel(Offer::enter, &offer, (unsigned)threads, 0);
    }
#if defined(__linux__)
    sched_getaffinity(0, sizeof offer.cpus, &offer.cpus);
#endif
    const int known = ready(threads - 1);
    int64_t offered = 0, claimed = 0;
    bool is_offered[MOST_WORKERS] = {};
    for (int i = 0; i < known && offered < threads - 1; i++) {
        Worker& w = workers[i];
        Offer* none = nullptr;
        if (!w.mailbox.compare_exchange_strong(none, &offer)) continue;  // busy with another caller's offer
        is_offered[i] = true;
        offered++;
        if (w.is_asleep) {
            lock(w);
            ::wake(w);
            unlock(w);
        }
    }
    Offer::enter(&offer);
    for (int i = 0; i < known; i++) {
        Offer* same = &offer;
        if (is_offered[i]) claimed += !workers[i].mailbox.compare_exchange_strong(same, nullptr);
    }
    wait_for(offer.done, claimed);
}

}  // namespace lp

LP_API void lp_use_openmp(void* parallel, void* in_parallel) {
    gomp_parallel = nullptr;
    if (in_parallel) omp_in_parallel = (int (*)(void))in_parallel;  // a product that runs may still call the last one
    gomp_parallel = (void (*)(void (*)(void*), void*, unsigned, unsigned))parallel;
}
LP_API void lp_run(void (*work)(void*, int), void* argument, int threads) { lp::run(work, argument, threads); }
