// Checks that need a GPU and are no matter of one operator's numbers: offsets past 2^31 and 2^32, two streams at once,
// a hundred repeats.    device <output.json>
#include <memory>

#include "../../engine/ops/decode_state.h"
#include "../../engine/ops/gemm/op.h"
#include "../../engine/ops/kv_compact/op.h"
#include "../../engine/ops/tree_attention/op.h"
#include "../../engine/ops/tree_build/op.h"
#include "../../engine/ops/w4a16_gemm/op.h"
#include "../../engine/ops/w4a16_moe_experts/op.h"
#include "harness.h"

using namespace kdtree;

namespace {

void run(const Operator& op, const void* shape, const void* args, const Buffer& workspace, void* stream = nullptr) {
  check(op.run(shape, args, workspace.memory, stream), op.name);
}

// ---- offsets ---------------------------------------------------------------------------------------------------------

// The last expert of a K2-size layer against a layer of that expert alone.
void last_of_384_experts(Record& record) {
  const int hidden = 7168, intermediate = 2048, group = 32, rows = 3;
  const size_t weights = static_cast<size_t>(hidden) * intermediate;
  const auto gate = random_words(weights / 8), up = random_words(weights / 8), down = random_words(weights / 8);
  const auto gate_sc = normal_bf16(weights / group, 0.01f), up_sc = normal_bf16(weights / group, 0.01f),
             down_sc = normal_bf16(weights / group, 0.01f);
  const Buffer n_rows(std::vector<int32_t>{rows}), x(normal_bf16(rows * hidden)), slot_weights(normal(rows));
  std::vector<char> results[2];
  for (int n_experts : {1, 384}) {
    const W4a16MoeExpertsShape shape{rows, hidden, intermediate, n_experts, 1, group, kBFloat16, kBFloat16};
    const Buffer packed(w4a16_moe_experts.packed_bytes(&shape)), workspace(w4a16_moe_experts.workspace(&shape));
    const W4a16MoeExpertsWeights expert{n_experts - 1, gate.data(), gate_sc.data(), up.data(),
                                        up_sc.data(),  down.data(), down_sc.data()};
    check(w4a16_moe_experts.prepare(&shape, &expert, packed.memory, nullptr), "prepare");
    const Buffer experts(std::vector<int32_t>(rows, n_experts - 1)), y(static_cast<size_t>(rows) * hidden * 2);
    const W4a16MoeExpertsArgs args{n_rows.as<int32_t>(), x.memory, experts.as<int32_t>(), slot_weights.as<float>(),
                                   packed.memory,        nullptr,  nullptr,               y.memory};
    run(w4a16_moe_experts, &shape, &args, workspace);
    results[n_experts > 1] = y.get();
  }
  record.add("offsets.expert_383_of_384", differing_bytes(results[0], results[1]));
  const auto* y = reinterpret_cast<const uint16_t*>(results[0].data());
  double nan = 0;
  for (int i = 0; i < rows * hidden; ++i) nan += (y[i] & 0x7F80) == 0x7F80;
  record.add("offsets.expert_383_of_384.nan", nan);
}

// The last outputs of a matrix of more than 2^31 elements against a matrix of these outputs alone.
void large_gemm(Record& record) {
  const int k = 14336, tail = 64, n = 163840, rows = 2;
  const auto w = normal_bf16(static_cast<size_t>(tail) * k);
  const Buffer n_rows(std::vector<int32_t>{rows}), x(normal_bf16(static_cast<size_t>(rows) * k));
  std::vector<float> results[2];
  for (int outputs : {tail, n}) {
    const GemmShape shape{rows, outputs, k, 1, k, 0, outputs, 0, kBFloat16, kFloat32, kBFloat16};
    const Buffer packed(gemm.packed_bytes(&shape)), workspace(gemm.workspace(&shape));
    auto* all = static_cast<uint16_t*>(std::calloc(static_cast<size_t>(outputs) * k, 2));
    std::memcpy(all + static_cast<size_t>(outputs - tail) * k, w.data(), w.size() * 2);
    const GemmWeights weights{all, kBFloat16};
    check(gemm.prepare(&shape, &weights, packed.memory, nullptr), "prepare");
    check(cudaDeviceSynchronize(), "prepare");
    std::free(all);
    const Buffer y(static_cast<size_t>(rows) * outputs * 4);
    const GemmArgs args{n_rows.as<int32_t>(), x.memory, packed.memory, nullptr, y.memory};
    run(gemm, &shape, &args, workspace);
    for (int r = 0; r < rows; ++r) {
      const auto row = y.get<float>(static_cast<size_t>(r + 1) * outputs - tail, tail);
      results[outputs > tail].insert(results[outputs > tail].end(), row.begin(), row.end());
    }
  }
  double largest = 0, difference = 0;  // a streaming sum's order depends on the number of outputs
  for (size_t i = 0; i < results[0].size(); ++i) {
    largest = std::max<double>(largest, std::abs(results[0][i]));
    difference = results[1][i] == results[1][i] ? std::max<double>(difference, std::abs(results[0][i] - results[1][i])) : 1e9;
  }
  const bool plain = std::strstr(backend::variant(), "plain");
  record.add("offsets.gemm_past_2^31", difference / largest, plain ? 0 : 1e-4);
}

// Keys past 2^31 elements: one key far in the pool outweighs all others, so the output is its latent.
void far_key(Record& record) {
  const int rank = 512, rope = 64, width = rank + rope, prefix = 3800000;  // 2.19e9 elements
  const TreeAttentionShape shape{1, 1, rank, rope, rope, rope, prefix + 1, kBFloat16, 1.0f};
  const Buffer one(std::vector<int32_t>{1}), prefix_at(std::vector<int32_t>{prefix}), root(std::vector<int32_t>{-1}),
      depth(std::vector<int32_t>{0});
  Buffer kv(static_cast<size_t>(prefix + 1) * width * 2);
  check(cudaMemset(kv.memory, 0, kv.bytes), "cudaMemset");
  const auto key = normal_bf16(width);
  kv.put(static_cast<size_t>(prefix) * width, key);
  std::vector<uint16_t> query = key;
  for (uint16_t& q : query) q = static_cast<uint16_t>(q + (2 << 7));  // times 4: the score is over 2000
  const Buffer q_latent(std::vector<uint16_t>(query.begin(), query.begin() + rank)),
      q_rope(std::vector<uint16_t>(query.begin() + rank, query.end())), y(rank * 2), workspace(tree_attention.workspace(&shape));
  const TreeAttentionArgs args{one.as<int32_t>(),   prefix_at.as<int32_t>(), root.as<int32_t>(), depth.as<int32_t>(),
                               q_latent.memory, q_rope.memory,           kv.memory,          y.memory};
  run(tree_attention, &shape, &args, workspace);
  const auto latent = y.get<uint16_t>(0, rank);
  double differing = 0;
  for (int i = 0; i < rank; ++i) differing += latent[i] != key[i];
  record.add("offsets.key_past_2^31", differing);
}

// A pool of all layers past 2^32 elements, at an odd address: the last layer's rows must move.
void last_layer(Record& record) {
  const int layers = 61, width = 576, pool_rows = 131072 + 65, base = 131072;
  const KvCompactShape shape{layers, width, pool_rows, 7, kBFloat16};
  Buffer kv((static_cast<size_t>(layers) * pool_rows * width + 1) * 2);
  std::vector<std::vector<uint16_t>> rows;
  const std::vector<int32_t> accepted{0, 2, 5, 64};
  for (int layer : {0, layers - 1})
    for (int row : accepted) {
      rows.push_back(normal_bf16(width));
      kv.put((static_cast<size_t>(layer) * pool_rows + base + row) * width + 1, rows.back());
    }
  DecodeState state{};
  state.prefix = base + 4;
  state.accepted = 4;
  const Buffer state_at(std::vector<DecodeState>{state}), accepted_at(accepted);
  const KvCompactArgs args{state_at.as<DecodeState>(), accepted_at.as<int32_t>(), kv.as<uint16_t>(1)};
  run(kv_compact, &shape, &args, Buffer(kv_compact.workspace(&shape)));
  double differing = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t layer = i < 4 ? 0 : layers - 1;
    const auto moved = kv.get<uint16_t>((layer * pool_rows + base + i % 4) * width + 1, width);
    for (int c = 0; c < width; ++c) differing += moved[c] != rows[i][c];
  }
  record.add("offsets.layer_past_2^32", differing);
}

// ---- row invariance over many keys --------------------------------------------------------------------------------------

// Rows of a tree, with keys enough for several splits, against each row's path run alone as a chain, and against the
// same call made for a longer context.
void rows_of_a_tree(Record& record) {
  const int heads = 3, rank = 64, rope = 16, width = rank + rope, rows = 9;
  const std::vector<int32_t> parents{-1, 0, 0, 1, 1, 2, 3, 6, 0}, depths{0, 1, 1, 2, 2, 2, 3, 4, 1};
  const auto q_latent = normal_bf16(rows * heads * rank), q_rope = normal_bf16(rows * heads * rope);
  double differing = 0, differing_in_longer = 0;
  for (int prefix : {0, 100, 127, 128, 250, 600, 2100}) {
    const auto kv = normal_bf16(static_cast<size_t>(prefix + rows) * width);
    const auto attend = [&](const std::vector<int32_t>& path, const std::vector<int32_t>& parent, const std::vector<int32_t>& depth, int context) {
      const int n = static_cast<int>(path.size());
      const TreeAttentionShape shape{n, heads, rank, rope, heads * rope, rope, context, kBFloat16, 0.1f};
      std::vector<uint16_t> latent, roped, pool(kv.begin(), kv.begin() + prefix * width);
      for (int row : path) {
        latent.insert(latent.end(), q_latent.begin() + row * heads * rank, q_latent.begin() + (row + 1) * heads * rank);
        roped.insert(roped.end(), q_rope.begin() + row * heads * rope, q_rope.begin() + (row + 1) * heads * rope);
        pool.insert(pool.end(), kv.begin() + (prefix + row) * width, kv.begin() + (prefix + row + 1) * width);
      }
      const Buffer n_rows(std::vector<int32_t>{n}), prefix_at(std::vector<int32_t>{prefix}), parents_at(parent), depths_at(depth),
          latent_at(latent), roped_at(roped), pool_at(pool), y(latent.size() * 2), workspace(tree_attention.workspace(&shape));
      const TreeAttentionArgs args{n_rows.as<int32_t>(),    prefix_at.as<int32_t>(), parents_at.as<int32_t>(),
                                   depths_at.as<int32_t>(), latent_at.memory,        roped_at.memory,
                                   pool_at.memory,          y.memory};
      run(tree_attention, &shape, &args, workspace);
      return y.get();
    };
    std::vector<int32_t> all;
    for (int row = 0; row < rows; ++row) all.push_back(row);
    const auto tree = attend(all, parents, depths, prefix + rows);
    differing_in_longer += differing_bytes(tree, attend(all, parents, depths, 8 * prefix + 1000));
    const size_t row_bytes = static_cast<size_t>(heads) * rank * 2;
    for (int row = 0; row < rows; ++row) {
      std::vector<int32_t> path, chain, depth;
      for (int node = row; node >= 0; node = parents[static_cast<size_t>(node)]) path.insert(path.begin(), node);
      for (size_t i = 0; i < path.size(); ++i) chain.push_back(static_cast<int32_t>(i) - 1), depth.push_back(static_cast<int32_t>(i));
      const auto alone = attend(path, chain, depth, prefix + rows);
      differing += differing_bytes({tree.begin() + row * row_bytes, tree.begin() + (row + 1) * row_bytes},
                                   {alone.end() - row_bytes, alone.end()});
    }
  }
  record.add("row_invariance.tree_against_chains", differing);
  record.add("row_invariance.longer_context", differing_in_longer);
}

// ---- repeats and streams -----------------------------------------------------------------------------------------------

// One call with its own buffers, to be run many times on a stream.
struct Call {
  virtual ~Call() = default;
  virtual void launch(void* stream) = 0;
  virtual std::vector<char> outputs() = 0;
};

struct TreeBuildCall : Call {
  TreeBuildShape shape{7, 163840, 64, 64};
  Buffer logits{normal(7 * 163840, 3)}, state{std::vector<DecodeState>(1)}, tokens{65 * 4}, parents{65 * 4}, depths{65 * 4},
      top_tokens{7 * 64 * 4}, top_log_probs{7 * 64 * 4}, workspace{tree_build.workspace(&shape)};
  void launch(void* stream) override {
    const TreeBuildArgs args{logits.as<float>(),     state.as<DecodeState>(),  tokens.as<int32_t>(),       parents.as<int32_t>(),
                             depths.as<int32_t>(), top_tokens.as<int32_t>(), top_log_probs.as<float>()};
    run(tree_build, &shape, &args, workspace, stream);
  }
  std::vector<char> outputs() override {
    std::vector<char> all;
    for (const Buffer* buffer : {&state, &tokens, &parents, &depths, &top_tokens, &top_log_probs}) {
      const auto bytes = buffer->get();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
};

struct AttentionCall : Call {
  static constexpr int rows = 17, heads = 64, rank = 512, rope = 64, keys = 5000;
  TreeAttentionShape shape{rows, heads, rank, rope, heads * rope, rope, keys + 8, kBFloat16, 0.07f};
  Buffer n_rows{std::vector<int32_t>{rows}}, prefix{std::vector<int32_t>{keys - 1}};
  Buffer q_latent{normal_bf16(rows * heads * rank)}, q_rope{normal_bf16(rows * heads * rope)},
      kv{normal_bf16(static_cast<size_t>(keys + rows) * (rank + rope))}, y{static_cast<size_t>(rows) * heads * rank * 2},
      workspace{tree_attention.workspace(&shape)};
  std::unique_ptr<Buffer> tree_parents, tree_depths;
  AttentionCall() {
    std::vector<int32_t> p{-1}, d{0};
    for (int i = 1; i < rows; ++i) {
      p.push_back((i - 1) / 2);
      d.push_back(d[static_cast<size_t>((i - 1) / 2)] + 1);
    }
    tree_parents = std::make_unique<Buffer>(p);
    tree_depths = std::make_unique<Buffer>(d);
  }
  void launch(void* stream) override {
    const TreeAttentionArgs args{n_rows.as<int32_t>(), prefix.as<int32_t>(), tree_parents->as<int32_t>(),
                                 tree_depths->as<int32_t>(), q_latent.memory, q_rope.memory, kv.memory, y.memory};
    run(tree_attention, &shape, &args, workspace, stream);
  }
  std::vector<char> outputs() override { return y.get(); }
};

struct ExpertsCall : Call {
  static constexpr int rows = 33, hidden = 1024, intermediate = 512, experts = 24, top_k = 4;
  W4a16MoeExpertsShape shape{rows, hidden, intermediate, experts, top_k, 32, kBFloat16, kBFloat16};
  Buffer packed{w4a16_moe_experts.packed_bytes(&shape)}, workspace{w4a16_moe_experts.workspace(&shape)};
  Buffer n_rows{std::vector<int32_t>{rows}}, x{normal_bf16(rows * hidden)}, weights{normal(rows * top_k)},
      y{rows * hidden * 2};
  std::unique_ptr<Buffer> chosen;
  ExpertsCall() {
    const size_t size = static_cast<size_t>(hidden) * intermediate;
    for (int e = 0; e < experts; ++e) {
      const auto a = random_words(size / 8), b = random_words(size / 8), c = random_words(size / 8);
      const auto s = normal_bf16(size / 32, 0.02f);
      const W4a16MoeExpertsWeights expert{e, a.data(), s.data(), b.data(), s.data(), c.data(), s.data()};
      check(w4a16_moe_experts.prepare(&shape, &expert, packed.memory, nullptr), "prepare");
    }
    std::vector<int32_t> ids;
    for (int i = 0; i < rows * top_k; ++i) ids.push_back((i / top_k * 5 + i % top_k * 7) % experts);
    chosen = std::make_unique<Buffer>(ids);
    check(cudaDeviceSynchronize(), "prepare");
  }
  void launch(void* stream) override {
    const W4a16MoeExpertsArgs args{n_rows.as<int32_t>(), x.memory, chosen->as<int32_t>(), weights.as<float>(),
                                   packed.memory,        nullptr,  nullptr,               y.memory};
    run(w4a16_moe_experts, &shape, &args, workspace, stream);
  }
  std::vector<char> outputs() override { return y.get(); }
};

// Linear layers of K2's sizes with inputs split over blocks.
struct LinearCall : Call {
  const int rows, n, k;
  Buffer n_rows, x, y;
  LinearCall(int rows, int max_rows, int n, int k)
      : rows(rows),
        n(n),
        k(k),
        n_rows(std::vector<int32_t>{rows}),
        x(normal_bf16(static_cast<size_t>(max_rows) * k)),
        y(static_cast<size_t>(max_rows) * n * 2) {}
  virtual void launch_on(const int32_t* n_rows, const void* x, void* y, void* stream) = 0;
  void launch(void* stream) override { launch_on(n_rows.as<int32_t>(), x.memory, y.memory, stream); }
  std::vector<char> outputs() override { return y.get(); }
};

struct Int4Call : LinearCall {
  W4a16GemmShape shape;
  Buffer packed{w4a16_gemm.packed_bytes(&shape)}, workspace{w4a16_gemm.workspace(&shape)};
  explicit Int4Call(int rows, int max_rows = 64)
      : LinearCall(rows, max_rows, 4096, 7168), shape{max_rows, n, k, 32, k, n, kBFloat16, kBFloat16, kBFloat16} {
    const size_t size = static_cast<size_t>(n) * k;
    const auto codes = random_words(size / 8);
    const auto scales = normal_bf16(size / 32, 0.02f);
    const W4a16GemmWeights weights{codes.data(), scales.data()};
    check(w4a16_gemm.prepare(&shape, &weights, packed.memory, nullptr), "prepare");
    check(cudaDeviceSynchronize(), "prepare");
  }
  void launch_on(const int32_t* n_rows, const void* x, void* y, void* stream) override {
    const W4a16GemmArgs args{n_rows, x, packed.memory, nullptr, y};
    run(w4a16_gemm, &shape, &args, workspace, stream);
  }
};

struct FloatCall : LinearCall {
  GemmShape shape;
  Buffer packed{gemm.packed_bytes(&shape)}, workspace{gemm.workspace(&shape)};
  explicit FloatCall(int rows, int max_rows = 64)
      : LinearCall(rows, max_rows, 2048, 7168), shape{max_rows, n, k, 1, k, 0, n, 0, kBFloat16, kBFloat16, kBFloat16} {
    const auto w = normal_bf16(static_cast<size_t>(n) * k, 0.02f);
    const GemmWeights weights{w.data(), kBFloat16};
    check(gemm.prepare(&shape, &weights, packed.memory, nullptr), "prepare");
    check(cudaDeviceSynchronize(), "prepare");
  }
  void launch_on(const int32_t* n_rows, const void* x, void* y, void* stream) override {
    const GemmArgs args{n_rows, x, packed.memory, nullptr, y};
    run(gemm, &shape, &args, workspace, stream);
  }
};

// Calls that follow each other at once, so that one begins while the other ends, by themselves and in a graph.
void back_to_back(Record& record) {
  std::vector<std::unique_ptr<Call>> calls;
  for (int rows : {1, 9, 20, 40, 64}) {
    calls.push_back(std::make_unique<Int4Call>(rows));
    calls.push_back(std::make_unique<FloatCall>(rows));
  }
  calls.push_back(std::make_unique<ExpertsCall>());
  std::vector<std::vector<char>> alone;
  for (const auto& call : calls) {
    call->launch(nullptr);
    check(cudaDeviceSynchronize(), "alone");
    alone.push_back(call->outputs());
  }
  const auto differing = [&] {
    double bytes = 0;
    for (size_t i = 0; i < calls.size(); ++i) bytes += differing_bytes(alone[i], calls[i]->outputs());
    return bytes;
  };
  const auto burst = [&](cudaStream_t stream) {
    for (int repeat = 0; repeat < 20; ++repeat)
      for (const auto& call : calls) call->launch(stream), call->launch(stream);
  };
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  burst(stream);
  check(cudaStreamSynchronize(stream), "back to back");
  record.add("back_to_back.stream", differing());
  time_rounds(1, [&](cudaStream_t graph, int) { burst(graph); });
  record.add("back_to_back.graph", differing());
}

// Layers of which each takes what the one in front makes, which must have ended: one after the other, then all at once.
void chain(Record& record) {
  constexpr int rows = 33, n = 4096, layers = 40;
  const W4a16GemmShape shape{rows, n, n, 32, n, n, kBFloat16, kBFloat16, kBFloat16};
  const auto codes = random_words(size_t{n} * n / 8);
  const auto scales = normal_bf16(size_t{n} * n / 32, 0.003f);  // rows keep about their size
  const W4a16GemmWeights weights{codes.data(), scales.data()};
  const Buffer packed{w4a16_gemm.packed_bytes(&shape)}, workspace{w4a16_gemm.workspace(&shape)};
  const Buffer n_rows{std::vector<int32_t>{rows}};
  check(w4a16_gemm.prepare(&shape, &weights, packed.memory, nullptr), "prepare");
  const auto start = normal_bf16(size_t{rows} * n);
  Buffer x[2] = {Buffer{start}, Buffer{start}};
  const auto made = [&](bool alone) {
    x[0].put(0, start);
    x[1].poison();
    check(cudaDeviceSynchronize(), "start");
    for (int layer = 0; layer < layers; ++layer) {
      const W4a16GemmArgs args{n_rows.as<int32_t>(), x[layer % 2].memory, packed.memory, nullptr, x[1 - layer % 2].memory};
      run(w4a16_gemm, &shape, &args, workspace);
      if (alone) check(cudaDeviceSynchronize(), "layer");
    }
    return x[layers % 2].get();
  };
  const auto want = made(true);
  double differing = 0;
  for (int repeat = 0; repeat < 20; ++repeat) differing += differing_bytes(want, made(false));
  record.add("back_to_back.chain", differing);
  double nan = 0;
  for (size_t i = 0; i < want.size(); i += 2) nan += (want[i + 1] & 0x7F) == 0x7F && (want[i] & 0x80);
  record.add("back_to_back.chain.nan", nan);
}

// Several blocks of rows, of two classes, so that blocks of threads go from one to the next: against calls of one each.
void blocks_of_rows(Record& record, const std::string& name, LinearCall&& all) {
  constexpr int block = 64;
  all.launch(nullptr);
  const auto want = all.outputs();
  double differing = 0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    all.launch(nullptr);
    differing += differing_bytes(want, all.outputs());
  }
  record.add("repeats.blocks_of_rows." + name, differing);
  differing = 0;
  for (int first = 0; first < all.rows; first += block) {
    const int count = std::min(block, all.rows - first);
    const Buffer n_rows{std::vector<int32_t>{count}}, y{static_cast<size_t>(all.rows) * all.n * 2};
    all.launch_on(n_rows.as<int32_t>(), all.x.as<uint16_t>(static_cast<size_t>(first) * all.k), y.memory, nullptr);
    const size_t row_bytes = static_cast<size_t>(all.n) * 2, at = first * row_bytes, bytes = count * row_bytes;
    differing += differing_bytes({want.begin() + static_cast<std::ptrdiff_t>(at),
                                  want.begin() + static_cast<std::ptrdiff_t>(at + bytes)},
                                 y.get<char>(0, bytes));
  }
  record.add("row_invariance.blocks_of_rows." + name, differing);
}

void repeats_and_streams(Record& record) {
  std::vector<std::unique_ptr<Call>> calls;
  for (int copy = 0; copy < 2; ++copy) {
    calls.push_back(std::make_unique<TreeBuildCall>());
    calls.push_back(std::make_unique<AttentionCall>());
    calls.push_back(std::make_unique<ExpertsCall>());
  }
  const char* names[] = {"tree_build", "tree_attention", "w4a16_moe_experts"};
  std::vector<std::vector<char>> first;
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i]->launch(nullptr);
    first.push_back(calls[i]->outputs());
    double differing = 0;
    for (int repeat = 0; repeat < 100; ++repeat) {
      calls[i]->launch(nullptr);
      differing += differing_bytes(first[i], calls[i]->outputs());
    }
    if (i < 3) record.add(std::string("repeats.") + names[i], differing);
  }
  void* streams[2] = {backend::create_stream(), backend::create_stream()};
  for (int repeat = 0; repeat < 50; ++repeat)
    for (size_t i = 0; i < calls.size(); ++i)
      for (int s = 0; s < 2; ++s) calls[s * 3 + (i + static_cast<size_t>(s)) % 3]->launch(streams[s]);
  for (void* stream : streams) check(backend::synchronize(stream), "synchronize");
  for (size_t i = 0; i < calls.size(); ++i)
    record.add(std::string("two_streams.") + names[i % 3] + (i < 3 ? ".a" : ".b"),
               differing_bytes(first[i], calls[i]->outputs()));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return std::fprintf(stderr, "usage: device <output.json>\n"), 2;
  if (const char* reason = backend::init()) return std::fprintf(stderr, "%s\n", reason), 1;
  Record record;
  rows_of_a_tree(record);
  repeats_and_streams(record);
  back_to_back(record);
  chain(record);
  blocks_of_rows(record, "int4", Int4Call(200, 200));
  blocks_of_rows(record, "float", FloatCall(216, 216));
  last_of_384_experts(record);
  large_gemm(record);
  far_key(record);
  last_layer(record);
  record.write(arguments[1], "device");
}
