// Temporary memory, kept between products because fresh pages cost more than a small product.
//
// A few slots hold free blocks. A slot is one word: the block's address, which is a multiple of 4096, plus its size
// class. Blocks are taken and returned by compare-and-swap of the word, without looking into memory that another thread
// may have freed; so threads, forks and signal handlers need no lock. Slots hold at most MOST_KEPT bytes.
#include "common.hpp"
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#elif defined(LP_EXACT_MEMORY)
#include <stdlib.h>
#else
#include <sys/mman.h>
#endif

namespace {

const int SLOTS = 64;
#if defined(LP_EXACT_MEMORY)
const int64_t MOST_KEPT = 0;
#else
const int64_t MOST_KEPT = 512LL << 20;
#endif
const int64_t HUGE_PAGE = 2LL << 20;
std::atomic<uint64_t> slots[SLOTS];
std::atomic<int64_t> kept;
std::atomic<unsigned> victim;

// Sizes are 8 to 15 times a power of two, from 64 KiB: similar products use each other's blocks.
int64_t bytes_of(int size_class) { return (int64_t)(8 + size_class % 8) << (13 + size_class / 8); }
int class_of(uint64_t word) { return (int)(word & 4095); }
void* address_of(uint64_t word) { return (void*)(word & ~4095ull); }

#if defined(_WIN32)
void* allocate(int64_t bytes) { return VirtualAlloc(nullptr, (size_t)bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }
void release(void* at, int64_t) { VirtualFree(at, 0, MEM_RELEASE); }
#elif defined(LP_EXACT_MEMORY)
void* allocate(int64_t bytes) {
    void* at;
    return posix_memalign(&at, 4096, (size_t)bytes) ? nullptr : at;
}
void release(void* at, int64_t) { free(at); }
#else
void release(void* at, int64_t bytes) { munmap(at, (size_t)bytes); }
void* allocate(int64_t bytes) {
    const int64_t extra = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : 0;  // huge pages save misses of the TLB
    char* at = (char*)mmap(nullptr, (size_t)(bytes + extra), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    if (!extra) return at;
    char* aligned = (char*)(((uintptr_t)at + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    if (aligned > at) release(at, aligned - at);
    if (at + extra > aligned) release(aligned + bytes, at + extra - aligned);
#if defined(__linux__)
    madvise(aligned, (size_t)bytes, MADV_HUGEPAGE);
#endif
    return aligned;
}
#endif

void release_word(uint64_t word) {
    if (!word) return;
    kept -= bytes_of(class_of(word));
    release(address_of(word), bytes_of(class_of(word)));
}

// A free block of the class or at most four times as large; 0 if there is none.
uint64_t take(int size_class) {
    for (auto& slot : slots) {
        uint64_t word = slot.load();
        if (!word || class_of(word) < size_class || class_of(word) > size_class + 16) continue;
        if (slot.compare_exchange_strong(word, 0)) {
            kept -= bytes_of(class_of(word));
            return word;
        }
    }
    return 0;
}

void keep(uint64_t word) {
    const int64_t bytes = bytes_of(class_of(word));
    if (bytes > MOST_KEPT) return release(address_of(word), bytes);
    for (int i = 0; i < SLOTS && kept.load() + bytes > MOST_KEPT; i++)
        release_word(slots[victim++ % SLOTS].exchange(0));
    kept += bytes;
    for (auto& slot : slots) {
        uint64_t none = 0;
        if (slot.compare_exchange_strong(none, word)) return;
    }
    release_word(slots[victim++ % SLOTS].exchange(word));
}

}  // namespace

namespace lp {

void* Memory::of(int64_t bytes) {
    if (MOST_KEPT && at && bytes_of(size_class) >= bytes) return at;
    this->~Memory();
    at = nullptr;
    size_class = 0;
    while (bytes_of(size_class) < bytes)
        if (++size_class > 300) return nullptr;
    if (uint64_t word = take(size_class)) {
        size_class = class_of(word);
        return at = address_of(word);
    }
    if (MOST_KEPT) bytes = bytes_of(size_class);
    at = allocate(bytes);
    if (!at) {
        lp_release_memory();
        at = allocate(bytes);
    }
    return at;
}
Memory::~Memory() {
    if (at) keep((uint64_t)(uintptr_t)at | (uint64_t)size_class);
}

}  // namespace lp

LP_API void lp_release_memory(void) {
    for (auto& slot : slots) release_word(slot.exchange(0));
}
LP_API int64_t lp_kept_bytes(void) { return kept.load(); }
