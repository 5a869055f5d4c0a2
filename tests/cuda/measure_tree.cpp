// What the tree costs a round: build, accept and compact at K2's sizes, in microseconds, by replaying CUDA graphs.
//   measure_tree <output.json>
// A graph holds 20 rounds; each first resets the counters, and that reset's own time, measured alone, is taken off.
// "cold" rotates the logits over 16 copies (73 MB, more than an H200's L2); "warm" reads one copy.
#include <algorithm>
#include <memory>
#include <string>

#include "../../engine/ops/decode_state.h"
#include "../../engine/ops/kv_compact/op.h"
#include "../../engine/ops/tree_accept/op.h"
#include "../../engine/ops/tree_build/op.h"
#include "harness.h"

using namespace kdtree;

namespace {

constexpr int kCopies = 16, kRounds = 20;

struct Setting {
  const char* logits;
  int budget, levels, vocab;
};

// Logits of one copy: "normal" N(0, 3); "oracle" one certain token, all others equal.
std::vector<float> make_logits(const Setting& s) {
  const size_t count = static_cast<size_t>(s.levels) * static_cast<size_t>(s.vocab);
  if (std::string(s.logits) == "normal") return normal(count, 3);
  std::vector<float> logits(count, 0.0f);
  for (int level = 0; level < s.levels; ++level)
    logits[static_cast<size_t>(level) * s.vocab + generator()() % static_cast<unsigned>(s.vocab)] = 8;
  return logits;
}

std::string measure(const Setting& s) {
  const int rows = s.budget + 1, layers = 61, width = 576, prefix = 1024;
  const TreeBuildShape build_shape{s.levels, s.vocab, s.budget, std::min(s.budget, s.vocab)};
  const TreeAcceptShape accept_shape{rows, s.levels};
  const KvCompactShape compact_shape{layers, width, prefix + 2 * rows, s.levels, kBFloat16};
  DecodeState start{};
  start.n_rows = 1;
  start.prefix = prefix;
  start.limit = 1 << 30;
  const Buffer initial(std::vector<DecodeState>{start}), state(std::vector<DecodeState>{start});
  const Buffer tokens(4 * rows), parents(4 * rows), depths(4 * rows), next_tokens(4 * rows), accepted_rows(4 * (s.levels + 1)),
      output(4 * 64), kv(static_cast<size_t>(layers) * compact_shape.pool_rows * width * 2), workspace(tree_build.workspace(&build_shape));
  std::vector<std::unique_ptr<Buffer>> logits;
  for (int copy = 0; copy < kCopies; ++copy) logits.push_back(std::make_unique<Buffer>(make_logits(s)));

  const auto reset = [&](cudaStream_t stream) {
    check(cudaMemcpyAsync(state.memory, initial.memory, sizeof(DecodeState), cudaMemcpyDeviceToDevice, stream), "reset");
  };
  const auto build = [&](cudaStream_t stream, int copy) {
    const TreeBuildArgs args{logits[copy]->as<float>(), state.as<DecodeState>(), tokens.as<int32_t>(), parents.as<int32_t>(),
                             depths.as<int32_t>(),      nullptr,                 nullptr};
    check(tree_build.run(&build_shape, &args, workspace.memory, stream), "tree_build");
  };
  const auto accept = [&](cudaStream_t stream) {
    const TreeAcceptArgs args{state.as<DecodeState>(),   tokens.as<int32_t>(),        parents.as<int32_t>(), next_tokens.as<int32_t>(),
                              nullptr, accepted_rows.as<int32_t>(), output.as<int32_t>()};
    check(tree_accept.run(&accept_shape, &args, nullptr, stream), "tree_accept");
  };
  const auto compact = [&](cudaStream_t stream) {
    const KvCompactArgs args{state.as<DecodeState>(), accepted_rows.as<int32_t>(), kv.memory};
    check(kv_compact.run(&compact_shape, &args, nullptr, stream), "kv_compact");
  };

  // A target that agrees with the deepest path of the first copy's tree.
  build(nullptr, 0);
  check(cudaDeviceSynchronize(), "tree_build");
  const int n_rows = state.get<DecodeState>(0, 1)[0].n_rows;
  const auto token = tokens.get<int32_t>(0, n_rows), parent = parents.get<int32_t>(0, n_rows), depth = depths.get<int32_t>(0, n_rows);
  std::vector<int32_t> next(rows, 0);
  for (int row = static_cast<int>(std::max_element(depth.begin(), depth.end()) - depth.begin()); row > 0; row = parent[row])
    next[parent[row]] = token[row];
  check(cudaMemcpy(next_tokens.memory, next.data(), next.size() * 4, cudaMemcpyHostToDevice), "next tokens");

  // accept and compact alone: on the state that the first copy's build leaves.
  check(cudaMemcpy(initial.memory, state.memory, sizeof(DecodeState), cudaMemcpyDeviceToDevice), "state");
  accept(nullptr);
  check(cudaDeviceSynchronize(), "tree_accept");
  const int accepted = state.get<DecodeState>(0, 1)[0].accepted;
  const Buffer after(state.get<DecodeState>(0, 1));

  std::string json = std::string("{\"logits\": \"") + s.logits + "\", \"levels\": " + std::to_string(s.levels) +
                     ", \"vocab\": " + std::to_string(s.vocab) + ", \"budget\": " + std::to_string(s.budget) +
                     ", \"nodes\": " + std::to_string(n_rows - 1) + ", \"accepted\": " + std::to_string(accepted) +
                     ", \"us\": {";
  std::printf("%s L=%d V=%d B=%d, %d nodes, %d accepted:\n", s.logits, s.levels, s.vocab, s.budget, n_rows - 1, accepted);
  const Spread nothing = time_rounds(kRounds, [&](cudaStream_t stream, int) { reset(stream); });
  const auto add = [&](const char* name, const Spread& t) {
    char line[160];
    std::snprintf(line, sizeof line, "%s\"%s\": {\"p10\": %.2f, \"median\": %.2f, \"p90\": %.2f}", json.back() == '{' ? "" : ", ",
                  name, t.p10 - nothing.median, t.median - nothing.median, t.p90 - nothing.median);
    json += line;
    std::printf("  %-22s %7.2f us  (p10 %.2f, p90 %.2f)\n", name, t.median - nothing.median, t.p10 - nothing.median, t.p90 - nothing.median);
  };
  add("tree_build.warm", time_rounds(kRounds, [&](cudaStream_t stream, int) { reset(stream), build(stream, 0); }));
  add("tree_build.cold", time_rounds(kRounds, [&](cudaStream_t stream, int round) { reset(stream), build(stream, round % kCopies); }));
  add("tree_accept", time_rounds(kRounds, [&](cudaStream_t stream, int) { reset(stream), accept(stream); }));
  add("kv_compact", time_rounds(kRounds, [&](cudaStream_t stream, int) {
        check(cudaMemcpyAsync(state.memory, after.memory, sizeof(DecodeState), cudaMemcpyDeviceToDevice, stream), "reset");
        compact(stream);
      }));
  add("together.warm", time_rounds(kRounds, [&](cudaStream_t stream, int) {
        reset(stream), build(stream, 0), accept(stream), compact(stream);
      }));
  add("together.cold", time_rounds(kRounds, [&](cudaStream_t stream, int round) {
        reset(stream), build(stream, round % kCopies), accept(stream), compact(stream);
      }));
  return json + "}}";
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return std::fprintf(stderr, "usage: measure_tree <output.json>\n"), 2;
  if (const char* reason = backend::init()) return std::fprintf(stderr, "%s\n", reason), 1;
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::string json = std::string("{\"device\": \"") + properties.name + "\", \"settings\": [\n";
  const Setting settings[] = {{"normal", 64, 7, 163840}, {"oracle", 64, 7, 163840}, {"normal", 16, 7, 163840},
                              {"normal", 512, 7, 163840}, {"normal", 64, 15, 163840}};
  for (const Setting& s : settings) json += (&s == settings ? "" : ",\n") + measure(s);
  json += "\n]}\n";
  FILE* file = std::fopen(arguments[1], "w");
  if (!file) return std::fprintf(stderr, "%s: cannot be written\n", arguments[1]), 1;
  std::fputs(json.c_str(), file);
  std::fclose(file);
}
