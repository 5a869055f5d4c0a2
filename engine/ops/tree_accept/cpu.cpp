#include "../cpu/operator_cpu.h"
#include "op.h"

namespace kdtree::KDTREE_PATH {
namespace {

// The child of `row` that holds `token`; -1 if there is none. Siblings differ, so there is at most one.
int32_t child_with(const TreeAcceptArgs& args, int32_t row, int32_t token) {
  for (int32_t child = row + 1; child < args.state->n_rows; ++child)
    if (args.parents[child] == row && args.tokens[child] == token) return child;
  return -1;
}

bool is_stop(const TreeAcceptArgs& args, int32_t token) {
  for (int32_t i = 0; i < args.state->n_stop_ids; ++i)
    if (args.stop_ids[i] == token) return true;
  return false;
}

// Appends one committed token, unless the output has ended.
void emit(const TreeAcceptArgs& args, int32_t token) {
  DecodeState& state = *args.state;
  ++state.committed;
  if (state.done) return;
  args.output[state.generated++] = token;
  if (is_stop(args, token))
    state.done = kStopToken;
  else if (state.generated >= state.limit)
    state.done = kTokenLimit;
}

void run(const TreeAcceptShape&, const TreeAcceptArgs& args, void*) {
  DecodeState& state = *args.state;
  state.accepted = 0;
  state.verified = state.n_rows;
  if (state.n_rows == 0) return;

  int32_t accepted = 0;
  for (int32_t row = 0; row >= 0; row = child_with(args, row, args.next_tokens[row])) {
    args.accepted_rows[accepted++] = row;
    if (args.next_tokens[row] < 0) {
      state.done = kNanLogits;
      state.n_rows = 0;
      return;
    }
  }
  for (int32_t i = 0; i < accepted; ++i) emit(args, args.next_tokens[args.accepted_rows[i]]);
  state.accepted = accepted;
  state.prefix += accepted;
  ++state.steps;
  args.tokens[0] = args.next_tokens[args.accepted_rows[accepted - 1]];
  state.n_rows = state.done ? 0 : 1;
}

}  // namespace

KDTREE_OPERATOR(tree_accept) = {"tree_accept", accept_any, no_bytes, nullptr,
                                no_bytes,      run_as<TreeAcceptShape, TreeAcceptArgs, run>};

}  // namespace kdtree::KDTREE_PATH
