// The counters of one sequence, in the backend's memory, so that a whole round runs without the host.
#pragma once
#include <cstdint>

namespace kdtree {

// Why decoding ended: DecodeState::done.
constexpr int32_t kRunning = 0;
constexpr int32_t kStopToken = 1;
constexpr int32_t kTokenLimit = 2;
constexpr int32_t kNanLogits = 3;

struct DecodeState {
  int32_t n_rows;       // rows of the verify call, root included; 0 once done, so that a round changes nothing
  int32_t prefix;       // committed positions: the rows of the KV pool that hold the sequence
  int32_t done;         // kRunning or why decoding ended
  int32_t generated;    // tokens in `output`: after the cut by stop token and limit
  int32_t limit;        // most tokens to generate, the context length taken into account
  int32_t n_stop_ids;
  int32_t committed;    // tokens before the cut: accepted nodes and bonus tokens
  int32_t steps;        // rounds
  int32_t accepted;     // rows the last walk accepted, root included: rows committed to the KV pool
  int32_t verified;     // rows of the last verify call
};

}  // namespace kdtree
