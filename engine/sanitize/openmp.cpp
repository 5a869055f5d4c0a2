// OpenMP for the sanitized libraries: the entry points that g++ calls for the kernels' pragmas, on std::thread.
//
// libgomp is not compiled with ThreadSanitizer, which therefore cannot see that its threads begin after the fork and
// end before the join, and reports races that are none. Here it sees both, and nothing that orders the threads in
// between. A region is always run by the whole team, whatever its `if` clause says, so that the checks' small shapes
// run in parallel too. An entry point that is not here fails the link.
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr int kProcessors = 4;  // never changes: the kernels size their workspaces by it
int team_size = kProcessors;
thread_local int index_in_team = 0;
thread_local bool in_team = false;

// This thread's place in a loop of schedule(dynamic).
thread_local struct {
  long next, end, step, chunk;
} loop;

void join_team(void (*body)(void*), void* data, int index) {
  index_in_team = index;
  in_team = true;
  body(data);
  in_team = false;
  index_in_team = 0;
}

}  // namespace

extern "C" {

void omp_set_num_threads(int count) { team_size = count < kProcessors ? count : kProcessors; }
int omp_get_max_threads() { return team_size; }
int omp_get_num_procs() { return kProcessors; }
int omp_get_num_threads() { return in_team ? team_size : 1; }
int omp_get_thread_num() { return index_in_team; }

void GOMP_parallel(void (*body)(void*), void* data, unsigned, unsigned) {
  if (in_team) std::abort();  // no kernel nests regions
  std::vector<std::thread> others;
  for (int index = 1; index < team_size; ++index) others.emplace_back(join_team, body, data, index);
  join_team(body, data, 0);
  for (std::thread& other : others) other.join();
}

// Any thread may take any chunk, so thread t takes every team_size-th: with no shared counter, which would order them.
bool GOMP_loop_nonmonotonic_dynamic_next(long* begin, long* end) {
  if (loop.step > 0 ? loop.next >= loop.end : loop.next <= loop.end) return false;
  *begin = loop.next;
  *end = loop.next + loop.chunk * loop.step;
  if (loop.step > 0 ? *end > loop.end : *end < loop.end) *end = loop.end;
  loop.next += team_size * loop.chunk * loop.step;
  return true;
}
bool GOMP_loop_nonmonotonic_dynamic_start(long begin, long end, long step, long chunk, long* chunk_begin,
                                          long* chunk_end) {
  loop = {begin + index_in_team * chunk * step, end, step, chunk};
  return GOMP_loop_nonmonotonic_dynamic_next(chunk_begin, chunk_end);
}
void GOMP_loop_end_nowait() {}

}  // extern "C"
