#include "../cuda/operator.cuh"
#include "op.h"
#include "random.h"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;

// A level's special tokens and their logits; −1 where there is none. Of equal tokens the later one counts.
struct Choices {
  int32_t token[3];
  float logit[3];
};

__device__ Choices choose(const DraftScriptShape& shape, const ScriptHash& hash, int32_t right) {
  Choices choices = {{-1, -1, -1}, {}};
  const auto set = [&](int i, int32_t token, float logit) { choices.token[i] = token, choices.logit[i] = logit; };
  if (shape.kind == kOracle) {
    set(0, right, 8);
  } else if (shape.kind == kAdversarial) {
    set(0, right, -INFINITY);
  } else {
    const uint64_t vocab = static_cast<uint64_t>(shape.vocab);
    const auto decoy = [&](int i) {
      return static_cast<int32_t>((static_cast<uint64_t>(right) + 1 + hash.bits(-3 - i) % (vocab - 1)) % vocab);
    };
    const bool first = hash.uniform(-1) >= shape.p;
    const int place = first ? 0 : static_cast<int>(hash.bits(-2) % 3) + 1;  // of the right token; 3 is nowhere
    if (place < 3) set(0, right, 8);
    if (place > 0) set(1, decoy(0), 9);
    if (place == 2) set(2, decoy(1), 10);
  }
  return choices;
}

__global__ void draft(DraftScriptShape shape, DraftScriptArgs args) {
  if (args.state->done) return;
  const int level = static_cast<int>(blockIdx.y);
  const int64_t position = int64_t{args.state->prefix} + 1 + level;
  const bool scripted = position < *args.script_length;
  const ScriptHash hash(shape.seed, position, level);
  __shared__ Choices choices;
  if (threadIdx.x == 0) choices = scripted ? choose(shape, hash, args.script[position]) : Choices{{-1, -1, -1}, {}};
  __syncthreads();
  float* logits = args.logits + int64_t{level} * shape.vocab;
  for (int token = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); token < shape.vocab;
       token += static_cast<int>(gridDim.x * kThreads)) {
    float logit = scripted && shape.kind != kOracle ? 4 * hash.uniform(token) : 0;
    for (int i = 0; i < 3; ++i)
      if (choices.token[i] == token) logit = choices.logit[i];
    logits[token] = logit;
  }
}

const char* refuse(const DraftScriptShape& shape) {
  if (shape.kind < kOracle || shape.kind > kAdversarial) return "kind: must be oracle, noisy or adversarial";
  if (!(shape.p >= 0 && shape.p <= 1)) return "p: must lie in 0..1";
  if (shape.vocab < 2) return "vocab: must be at least 2";
  return nullptr;
}

void run(const DraftScriptShape& shape, const DraftScriptArgs& args, void*, cudaStream_t stream) {
  if (shape.levels == 0) return;
  const dim3 grid(grid_for(shape.vocab, 4 * kThreads, 2), static_cast<unsigned>(shape.levels));
  draft<<<grid, kThreads, 0, stream>>>(shape, args);
}

}  // namespace

const Operator draft_script = {"draft_script", refuse_as<DraftScriptShape, refuse>,
                               no_bytes,       nullptr,
                               no_bytes,       run_as<DraftScriptShape, DraftScriptArgs, run>};

}  // namespace kdtree
