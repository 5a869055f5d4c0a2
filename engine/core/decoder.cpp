#include "decoder.h"

#include <algorithm>
#include <numeric>

#include "limits.h"

namespace kdtree {
namespace {

Buffer integers(int64_t count, const char* what) { return Buffer(static_cast<size_t>(count) * sizeof(int32_t), what); }

}  // namespace

Decoder::Decoder(const ModelConfig& config, const EngineOptions& options, const TensorSource& source)
    : options_(options),
      stream_(backend::create_stream()),
      model_(config, options, source, ops_, stream_),
      draft_shape_{options.block_size - 1, config.vocab_size, options.drafter, options.drafter_p, options.drafter_seed},
      build_shape_{options.block_size - 1, config.vocab_size, options.tree_budget,
                   std::min(options.tree_budget, config.vocab_size)},
      accept_shape_{model_.max_rows(), options.block_size - 1},
      compact_shape_{config.num_hidden_layers, model_.kv_width(), static_cast<int32_t>(model_.pool_rows()),
                     options.block_size - 1, options.activations} {
  ops_.draft_script.plan(draft_shape_);
  ops_.tree_build.plan(build_shape_);
  ops_.tree_accept.plan(accept_shape_);
  ops_.kv_compact.plan(compact_shape_);
  ops_.workspace.memory = Buffer(ops_.workspace.bytes, "workspace");

  const int64_t rows = model_.max_rows(), block = options.block_size;
  rows_.state = Buffer(sizeof(DecodeState), "decode state");
  rows_.tokens = integers(rows, "rows");
  rows_.parents = integers(rows, "rows");
  rows_.depths = integers(rows, "rows");
  accepted_rows_ = integers(block, "rows");
  draft_logits_ = Buffer(static_cast<size_t>((block - 1) * config.vocab_size) * sizeof(float), "draft logits");
  output_ = integers(options.context + 4 * block, "output");
  script_ = integers(options.context + 4 * block, "script");
  script_length_ = integers(1, "script");
  stop_ids_ = integers(kMaxStopIds, "stop ids");
  for (Report& report : reports_) {
    report.state = static_cast<DecodeState*>(backend::allocate_host(sizeof(DecodeState)));
    report.tokens = static_cast<int32_t*>(backend::allocate_host(static_cast<size_t>(2 * block) * sizeof(int32_t)));
    report.event = backend::create_event();
    if (!report.state || !report.tokens) fail("reports of rounds: host memory: out of memory");
  }
}

Decoder::~Decoder() {
  backend::synchronize(stream_);
  for (Report& report : reports_) {
    backend::release_host(report.state);
    backend::release_host(report.tokens);
    backend::destroy_event(report.event);
  }
  if (ar_graph_) backend::destroy_graph(ar_graph_);
  if (ddtree_graph_) backend::destroy_graph(ddtree_graph_);
  backend::destroy_stream(stream_);
}

// Plain decoding is a tree of its root alone, through the same kernels.
void Decoder::ar_round(backend::Stream stream) {
  model_.forward(rows_, true, stream);
  ops_.tree_accept(accept_shape_,
                   {rows_.state.as<DecodeState>(), rows_.tokens.as<int32_t>(), rows_.parents.as<int32_t>(),
                    model_.next_tokens(), stop_ids_.as<int32_t>(), accepted_rows_.as<int32_t>(),
                    output_.as<int32_t>()},
                   stream);
}

// draft → build → verify → accept → compact
void Decoder::ddtree_round(backend::Stream stream) {
  ops_.draft_script(draft_shape_,
                    {rows_.state.as<DecodeState>(), script_.as<int32_t>(), script_length_.as<int32_t>(),
                     draft_logits_.as<float>()},
                    stream);
  ops_.tree_build(build_shape_,
                  {draft_logits_.as<float>(), rows_.state.as<DecodeState>(), rows_.tokens.as<int32_t>(),
                   rows_.parents.as<int32_t>(), rows_.depths.as<int32_t>(), nullptr, nullptr},
                  stream);
  ar_round(stream);
  ops_.kv_compact(compact_shape_,
                  {rows_.state.as<DecodeState>(), accepted_rows_.as<int32_t>(), model_.kv()}, stream);
}

template <void (Decoder::*round)(backend::Stream)>
backend::Graph Decoder::capture() {
  const auto body = [](void* self, backend::Stream stream) {
    auto* decoder = static_cast<Decoder*>(self);
    try {
      (decoder->*round)(stream);
      return 0;
    } catch (const std::exception& error) {
      decoder->capture_error_ = error.what();
      return -1;
    }
  };
  int error = 0;
  capture_error_.clear();
  const backend::Graph graph = backend::create_graph(body, this, stream_, &error);
  if (!capture_error_.empty()) fail(capture_error_);
  if (!graph) check(error ? error : -1, "recording a round");
  return graph;
}

void Decoder::set_state(const DecodeState& state) {
  check(backend::upload(rows_.state.as(), &state, sizeof state, stream_), "upload");
}

// Fills the KV pool for `length` tokens, chunk by chunk, each a chain below the last.
void Decoder::prefill(const int32_t* prompt, int32_t kept, int32_t length) {
  const int32_t chunk = options_.prefill_chunk;
  std::vector<int32_t> parents(static_cast<size_t>(chunk)), depths(parents);
  std::iota(parents.begin(), parents.end(), -1);
  std::iota(depths.begin(), depths.end(), 0);
  check(backend::upload(rows_.parents.as(), parents.data(), parents.size() * 4, stream_), "upload");
  check(backend::upload(rows_.depths.as(), depths.data(), depths.size() * 4, stream_), "upload");
  for (int32_t begin = kept, rows; begin < length; begin += rows) {
    rows = std::min(chunk - begin % chunk, length - begin);  // chunks end at multiples of their size, kept rows or not
    check(backend::upload(rows_.tokens.as(), prompt + begin, static_cast<size_t>(rows) * 4, stream_), "upload");
    DecodeState state{};
    state.n_rows = rows;
    state.prefix = begin;
    set_state(state);
    model_.forward(rows_, false, stream_);
  }
}

void Decoder::launch(backend::Graph graph, Report& report) {
  if (const int error = backend::launch_graph(graph, stream_)) {
    if (!capture_error_.empty()) fail(capture_error_);
    check(error, "a round");
  }
  report.first = last_.generated;
  check(backend::download(report.state, rows_.state.as(), sizeof(DecodeState), stream_), "download");
  check(backend::download(report.tokens, output_.as<int32_t>() + report.first,
                          static_cast<size_t>(2 * options_.block_size) * 4, stream_),
        "download");
  check(backend::record(report.event, stream_), "record");
}

// Waits for a round and hands it on; false once there is nothing more to come.
bool Decoder::deliver(const Report& report, const Request& request, bool overrun, OnRound on_round, void* user) {
  check(backend::wait(report.event), "waiting for a round");
  const DecodeState& state = *report.state;
  if (state.done == kNanLogits)
    fail("logits: NaN: every logit after position " + std::to_string(state.prefix) + " is NaN");
  Round round{state.verified, state.accepted,        state.prefix, state.generated - last_.generated,
              overrun,        report.tokens + (last_.generated - report.first), nullptr, nullptr};
  std::vector<float> logits;
  std::vector<char> kv;
  if (request.record && state.accepted) {
    const size_t vocab = static_cast<size_t>(model_.config().vocab_size), accepted = static_cast<size_t>(state.accepted);
    std::vector<int32_t> rows(accepted);
    check(backend::download(rows.data(), accepted_rows_.as(), accepted * 4, stream_), "download");
    logits.resize(accepted * vocab);
    for (size_t i = 0; i < accepted; ++i)
      check(backend::download(logits.data() + i * vocab, model_.logits() + static_cast<size_t>(rows[i]) * vocab,
                              vocab * 4, stream_),
            "download");
    const int32_t layers = model_.config().num_hidden_layers;
    kv.resize(static_cast<size_t>(layers) * accepted * static_cast<size_t>(model_.kv_width()) *
              size_of(options_.activations));
    read_kv(state.prefix - state.accepted, state.accepted, kv.data());
    round.logits = logits.data();
    round.kv = kv.data();
  }
  last_ = state;
  if (on_round && on_round(user, &round)) cancelled_ = true;
  return !state.done && !cancelled_;
}

// Rounds until the output ends, at most `most_rounds`. A record reads every round before the next one overwrites its
// logits; otherwise the next round is already under way (and changes nothing if there is no more to do).
void Decoder::decode(const Request& request, backend::Graph rounds, bool overrun, int32_t most_rounds,
                     OnRound on_round, void* user) {
  int32_t launched = 0;
  const int32_t ahead = request.record ? 0 : 1;
  for (int32_t delivered = 0; delivered < most_rounds; ++delivered) {
    while (launched < most_rounds && launched <= delivered + ahead) {
      launch(rounds, reports_[launched % 2]);
      ++launched;
    }
    if (!deliver(reports_[delivered % 2], request, overrun, on_round, user)) return;
  }
}

void Decoder::read_kv(int64_t first, int64_t count, void* to) {
  if (first < 0 || count < 0 || first > model_.pool_rows() - count)
    fail("KV rows: " + std::to_string(first) + " and " + std::to_string(count) + " more: the pool has " +
         std::to_string(model_.pool_rows()));
  const size_t row = static_cast<size_t>(model_.kv_width()) * size_of(options_.activations);
  for (int64_t layer = 0; layer < model_.config().num_hidden_layers; ++layer)
    check(backend::download(static_cast<char*>(to) + static_cast<size_t>(layer * count) * row,
                            static_cast<const char*>(model_.kv()) +
                                static_cast<size_t>(layer * model_.pool_rows() + first) * row,
                            static_cast<size_t>(count) * row, stream_),
          "download");
}

Result Decoder::generate(const Request& request, OnRound on_round, void* user) {
  check_request(request, model_.config(), options_);
  const int32_t script_length = std::min(request.script_length, options_.context + 4 * options_.block_size);

  if (!ar_graph_) ar_graph_ = capture<&Decoder::ar_round>();
  if (request.mode == kDdtree && !ddtree_graph_) ddtree_graph_ = capture<&Decoder::ddtree_round>();
  const backend::Graph rounds = request.mode == kDdtree ? ddtree_graph_ : ar_graph_;

  const auto put = [&](const Buffer& to, const int32_t* from, int32_t count) {
    if (count) check(backend::upload(to.as(), from, static_cast<size_t>(count) * 4, stream_), "upload");
  };
  put(stop_ids_, request.stop_ids, request.n_stop_ids);
  put(script_, request.script, script_length);
  put(script_length_, &script_length, 1);

  const int32_t before = request.prompt_length - 1;
  prefill(request.prompt, request.kept, before);
  put(rows_.tokens, request.prompt + before, 1);
  DecodeState state{};
  state.n_rows = 1;
  state.prefix = before;
  state.limit = std::min(request.max_new_tokens, options_.context - request.prompt_length);
  state.n_stop_ids = request.n_stop_ids;
  set_state(state);
  last_ = state;
  cancelled_ = false;

  // The last prompt token is the first root: one plain round yields the first token.
  decode(request, ar_graph_, false, 1, on_round, user);
  if (!last_.done && !cancelled_) decode(request, rounds, false, INT32_MAX, on_round, user);
  int32_t reason = cancelled_ ? kCancelled : last_.done;
  if (reason == kTokenLimit && last_.generated < request.max_new_tokens) reason = kContextLimit;
  const Result result{last_.generated, last_.committed, last_.steps - 1, reason};

  if (request.overrun > 0 && !cancelled_) {
    state = last_;
    state.done = kRunning;
    state.n_rows = 1;
    state.limit = last_.generated + request.overrun * options_.block_size;
    state.n_stop_ids = 0;
    set_state(state);
    decode(request, rounds, true, request.overrun, on_round, user);
  }
  check(backend::synchronize(stream_), "the end of the run");
  return result;
}

}  // namespace kdtree
