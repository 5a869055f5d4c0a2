// Jobs over threads. Which thread runs a job, and how many there are, changes no bits.
#pragma once
#include <omp.h>

#include "vector.h"

namespace kdtree::KDTREE_PATH {

// Multiplications from which waking the other threads pays: some tens of microseconds on one.
constexpr int64_t kWorthThreads = 125000 * kRegisterLanes;
constexpr int64_t kExpCost = 16;  // multiplications that an exp takes as long as

// Never more than this, so that a workspace with a part for every thread is large enough whatever is set later.
inline int most_threads() {
  static const int processors = omp_get_num_procs();
  return processors;
}

// f(job) for 0 <= job < jobs, which take about `work` multiplications in all. Jobs are handed out one by one, so that
// a thread that shares its core with another program holds nobody up.
template <class F>
void for_each_job(int64_t jobs, int64_t work, F&& f) {
  const int threads = std::min(omp_get_max_threads(), most_threads());
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (jobs > 1 && work >= kWorthThreads)
  for (int64_t job = 0; job < jobs; ++job) f(job);
}

}  // namespace kdtree::KDTREE_PATH
