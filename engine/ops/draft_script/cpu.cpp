#include "../cpu/operator_cpu.h"
#include "op.h"
#include "random.h"

#include <algorithm>
#include <cmath>

namespace kdtree::KDTREE_PATH {
namespace {

void draft(const DraftScriptShape& shape, const ScriptHash& hash, int32_t right, float* logits) {
  if (shape.kind == kOracle) {
    std::fill_n(logits, shape.vocab, 0.0f);
    logits[right] = 8;
    return;
  }
  for (int32_t token = 0; token < shape.vocab; ++token) logits[token] = 4 * hash.uniform(token);
  if (shape.kind == kAdversarial) {
    logits[right] = -INFINITY;
    return;
  }
  const auto decoy = [&](int32_t i) {
    return static_cast<int32_t>((static_cast<uint64_t>(right) + 1 + hash.bits(-3 - i) % static_cast<uint64_t>(shape.vocab - 1)) %
                                static_cast<uint64_t>(shape.vocab));
  };
  const uint64_t place = hash.uniform(-1) >= shape.p ? 3 : hash.bits(-2) % 3;  // 3: first, 0: second, 1: third, 2: nowhere
  if (place != 2) logits[right] = 8;
  if (place != 3) logits[decoy(0)] = 9;
  if (place == 1) logits[decoy(1)] = 10;
}

const char* refuse(const DraftScriptShape& shape) {
  if (shape.kind < kOracle || shape.kind > kAdversarial) return "kind: must be oracle, noisy or adversarial";
  if (!(shape.p >= 0 && shape.p <= 1)) return "p: must lie in 0..1";
  if (shape.vocab < 2) return "vocab: must be at least 2";
  return nullptr;
}

void run(const DraftScriptShape& shape, const DraftScriptArgs& args, void*) {
  if (args.state->done) return;
  for (int32_t level = 0; level < shape.levels; ++level) {
    const int64_t position = int64_t{args.state->prefix} + 1 + level;
    float* logits = args.logits + int64_t{level} * shape.vocab;
    if (position < *args.script_length)
      draft(shape, ScriptHash(shape.seed, position, level), args.script[position], logits);
    else
      std::fill_n(logits, shape.vocab, 0.0f);
  }
}

}  // namespace

KDTREE_OPERATOR(draft_script) = {"draft_script", refuse_as<DraftScriptShape, refuse>,
                                 no_bytes,       nullptr,
                                 no_bytes,       run_as<DraftScriptShape, DraftScriptArgs, run>};

}  // namespace kdtree::KDTREE_PATH
