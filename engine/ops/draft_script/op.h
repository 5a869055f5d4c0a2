// draft_script: the drafter of generated models. It knows the sequence that plain decoding yields (`script`) and turns
// it into block logits [levels, vocab], so that log-softmax, top-k and the builder do real work:
//   oracle       the script's token first, every other token equal
//   noisy        per position, with probability p the script's token is only second or third
//   adversarial  never the script's token: it gets the lowest logit
// Positions past the script are uniform. The random logits are a hash of (seed, position, level, token): the same on
// every backend and in reference/drafters.py.
#pragma once
#include "../decode_state.h"
#include "../operator.h"

namespace kdtree {

constexpr int32_t kOracle = 0;
constexpr int32_t kNoisy = 1;
constexpr int32_t kAdversarial = 2;

struct DraftScriptShape {
  int32_t levels;
  int32_t vocab;
  int32_t kind;
  float p;        // noisy: probability that a level's first choice is wrong
  int64_t seed;
};

struct DraftScriptArgs {
  const DecodeState* state;       // level l drafts position prefix + 1 + l
  const int32_t* script;          // [*script_length] tokens of the whole sequence, prompt first
  const int32_t* script_length;
  float* logits;                  // [levels, vocab]
};

extern const Operator draft_script;

}  // namespace kdtree
