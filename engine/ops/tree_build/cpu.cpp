#include "../cpu/operator_cpu.h"
#include "../cpu/vector.h"
#include "op.h"

#include <algorithm>
#include <cmath>

namespace kdtree::KDTREE_PATH {
namespace {

constexpr float kNever = -INFINITY;

// A candidate: child number `rank` (0 = best) of row `parent`.
struct Candidate {
  float score;
  int32_t parent;
  int32_t depth;
  int32_t rank;
};

struct Scratch {
  int32_t* order;       // [vocab]: top-k selection
  int32_t* top_tokens;  // [levels, top_k], unless the caller wants them
  float* log_probs;     // [levels, top_k], unless the caller wants them
  float* scores;        // [budget + 1] of the rows
  int32_t* ranks;       // [budget + 1, levels]: the rows' rank tuples
  Candidate* frontier;  // [budget + 1]: a heap

  Scratch(const TreeBuildShape& shape, void* workspace) {
    const int64_t top = int64_t{shape.levels} * shape.top_k, rows = shape.budget + 1;
    order = static_cast<int32_t*>(workspace);
    top_tokens = order + shape.vocab;
    log_probs = reinterpret_cast<float*>(top_tokens + top);
    scores = log_probs + top;
    ranks = reinterpret_cast<int32_t*>(scores + rows);
    frontier = reinterpret_cast<Candidate*>(ranks + rows * shape.levels);
  }
  static size_t bytes(const TreeBuildShape& shape) {
    const int64_t top = int64_t{shape.levels} * shape.top_k, rows = shape.budget + 2;
    return 4 * static_cast<size_t>(shape.vocab + 2 * top + rows * (1 + shape.levels)) +
           sizeof(Candidate) * static_cast<size_t>(2 * rows);
  }
};

double log_sum_exp(const float* logits, int32_t n, float largest) {
  double total = 0;
  each_sixteen(n, [&](int64_t i, int64_t lanes) {
    float e[kLanes];
    store(e, exp(load(logits + i, lanes) - splat(largest)));
    for (int64_t j = 0; j < lanes; ++j) total += static_cast<double>(e[j]);
  });
  return std::log(total);
}

// The top_k largest logits of a level, ties to the lower token, and their log-probs. A NaN makes every log-prob of the
// level NaN, so that no node of it is pushed; for the order of the tokens it counts as -inf.
void log_softmax_top_k(const float* logits, const TreeBuildShape& shape, int32_t* order, int32_t* tokens,
                       float* log_probs) {
  const auto value = [&](int32_t i) { return logits[i] == logits[i] ? logits[i] : kNever; };
  float largest = kNever;
  for (int32_t i = 0; i < shape.vocab; ++i) {
    order[i] = i;
    largest = std::max(largest, value(i));
  }
  const auto before = [&](int32_t a, int32_t b) { return value(a) > value(b) || (value(a) == value(b) && a < b); };
  std::partial_sort(order, order + shape.top_k, order + shape.vocab, before);
  const double log_z = log_sum_exp(logits, shape.vocab, largest);
  for (int32_t k = 0; k < shape.top_k; ++k) {
    tokens[k] = order[k];
    log_probs[k] = static_cast<float>(static_cast<double>(logits[order[k]]) - largest - log_z);
  }
}

void build(const TreeBuildShape& shape, const TreeBuildArgs& args, Scratch scratch) {
  const int32_t levels = shape.levels, top_k = shape.top_k;
  for (int32_t level = 0; level < levels; ++level)
    log_softmax_top_k(args.logits + int64_t{level} * shape.vocab, shape, scratch.order,
                      scratch.top_tokens + int64_t{level} * top_k, scratch.log_probs + int64_t{level} * top_k);

  // `a` is popped after `b`: lower score, or equal and a lexicographically larger rank tuple (a prefix comes first).
  const auto rank_at = [&](const Candidate& c, int32_t level) {
    return level == c.depth - 1 ? c.rank : scratch.ranks[int64_t{c.parent} * levels + level];
  };
  const auto after = [&](const Candidate& a, const Candidate& b) {
    if (a.score != b.score) return a.score < b.score;
    for (int32_t level = 0; level < std::min(a.depth, b.depth); ++level)
      if (rank_at(a, level) != rank_at(b, level)) return rank_at(a, level) > rank_at(b, level);
    return a.depth > b.depth;
  };
  int64_t waiting = 0;
  const auto push = [&](int32_t parent, int32_t depth, int32_t rank) {
    if (depth > levels || rank >= top_k) return;
    const float score = scratch.scores[parent] + scratch.log_probs[int64_t{depth - 1} * top_k + rank];
    if (!(score > kNever)) return;
    scratch.frontier[waiting++] = {score, parent, depth, rank};
    std::push_heap(scratch.frontier, scratch.frontier + waiting, after);
  };

  args.parents[0] = -1;
  args.depths[0] = 0;
  scratch.scores[0] = 0;
  int32_t rows = 1;
  push(0, 1, 0);
  while (rows <= shape.budget && waiting > 0) {
    std::pop_heap(scratch.frontier, scratch.frontier + waiting, after);
    const Candidate node = scratch.frontier[--waiting];
    args.tokens[rows] = scratch.top_tokens[int64_t{node.depth - 1} * top_k + node.rank];
    args.parents[rows] = node.parent;
    args.depths[rows] = node.depth;
    scratch.scores[rows] = node.score;
    for (int32_t level = 0; level < node.depth; ++level)
      scratch.ranks[int64_t{rows} * levels + level] = rank_at(node, level);
    push(node.parent, node.depth, node.rank + 1);
    push(rows, node.depth + 1, 0);
    ++rows;
  }
  args.state->n_rows = rows;
}

const char* refuse(const TreeBuildShape& shape) {
  if (shape.levels < 0) return "levels: must not be negative";
  if (shape.budget < 0) return "budget: must not be negative";
  if (shape.top_k != std::min(shape.budget, shape.vocab)) return "top_k: must be min(budget, vocab)";
  return nullptr;
}

size_t workspace(const TreeBuildShape& shape) { return Scratch::bytes(shape); }

void run(const TreeBuildShape& shape, const TreeBuildArgs& args, void* workspace) {
  if (args.state->done) {
    args.state->n_rows = 0;
    return;
  }
  Scratch scratch(shape, workspace);
  if (args.top_tokens) scratch.top_tokens = args.top_tokens;
  if (args.top_log_probs) scratch.log_probs = args.top_log_probs;
  build(shape, args, scratch);
}

}  // namespace

KDTREE_OPERATOR(tree_build) = {"tree_build", refuse_as<TreeBuildShape, refuse>,
                               no_bytes,     nullptr,
                               bytes_as<TreeBuildShape, workspace>,
                               run_as<TreeBuildShape, TreeBuildArgs, run>};

}  // namespace kdtree::KDTREE_PATH
