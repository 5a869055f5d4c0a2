// The AR and DDTree loops of one sequence.
#pragma once
#include "model.h"

namespace kdtree {

// Called after every round, in order; a non-zero answer ends the run (kCancelled).
using OnRound = int32_t (*)(void* user, const Round* round);

class Decoder {
 public:
  Decoder(const ModelConfig& config, const EngineOptions& options, const TensorSource& source);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  Result generate(const Request& request, OnRound on_round, void* user);

  // Committed rows first, …, first + count - 1 of every layer, to the host: [layers, count, kv_width].
  void read_kv(int64_t first, int64_t count, void* to);
  std::vector<std::string> called_operators() const { return ops_.called(); }
  const Model& model() const { return model_; }

 private:
  // What the host reads of a round: two in turn, so that the next round is launched before the last one is read.
  struct Report {
    DecodeState* state;   // in host memory that asynchronous copies may use, as `tokens`
    int32_t* tokens;      // output[first], …: at least the tokens of the last two rounds
    int32_t first;
    backend::Event event;
  };

  void ar_round(backend::Stream stream);
  void ddtree_round(backend::Stream stream);
  template <void (Decoder::*round)(backend::Stream)>
  backend::Graph capture();

  void set_state(const DecodeState& state);
  void prefill(const int32_t* prompt, int32_t kept, int32_t length);
  void launch(backend::Graph graph, Report& report);
  bool deliver(const Report& report, const Request& request, bool overrun, OnRound on_round, void* user);
  void decode(const Request& request, backend::Graph rounds, bool overrun, int32_t most_rounds, OnRound on_round,
              void* user);

  EngineOptions options_;
  backend::Stream stream_;
  Operators ops_;
  Model model_;
  DraftScriptShape draft_shape_;
  TreeBuildShape build_shape_;
  TreeAcceptShape accept_shape_;
  KvCompactShape compact_shape_;
  Rows rows_;
  Buffer draft_logits_;   // [levels, vocab]
  Buffer accepted_rows_;  // [block_size]
  Buffer output_;         // [context, and the rounds a record runs on past it]
  Buffer script_, script_length_, stop_ids_;
  backend::Graph ar_graph_ = nullptr, ddtree_graph_ = nullptr;
  std::string capture_error_;
  Report reports_[2];

  // Of the run under way.
  DecodeState last_{};     // as of the last round delivered
  bool cancelled_ = false;
};

}  // namespace kdtree
