// Sums of the products of one place of a program: of 1, 2, 4, 8... following products each. Those of two runs are
// compared by their sketches.
#pragma once
#include "lanewise.hpp"

namespace lp {

struct Site {
    std::atomic<bool> is_locked;
    int64_t products;  // of all blocks
    int64_t position;  // of the next number in the last block
    lp_observed *first, *last;
};

enum Fault { HAS_NAN = 1, HAS_INF = 2 };

class SiteLock {
    Site& site;

public:
    explicit SiteLock(Site& site) : site(site) {
        while (site.is_locked.exchange(true, std::memory_order_acquire)) continue;
    }
    ~SiteLock() { site.is_locked.store(false, std::memory_order_release); }
};

// With the lock: the sums of the next product, whose number in the run is `index`; null if there is no memory. Those of
// a product that `begins` are new.
lp_observed* begin_product(Site&, int64_t index, bool& begins);
void add_run(Site&, lp_observed&, Run);
// Whether a sum is not finite: the product may have the first fault.
bool may_be_faulty(const lp_observed&);

template <class Real> int fault_of(const Real* x, int64_t count, int64_t step) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) {
        const Real value = x[i * step];
        if (value != value) found |= HAS_NAN;
        else if (__builtin_isinf(value)) found |= HAS_INF;
    }
    return found;
}

}  // namespace lp
