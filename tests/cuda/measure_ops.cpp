// What the heavy operators cost at K2's sizes, beside their floor: the bytes they must read at 4.3 TB/s, the read rate
// measured on an H200.    measure_ops <output.json>
// Weights (and KV pools) rotate over as many copies as it takes to outgrow the L2 cache.
#include <memory>
#include <string>

#include "../../engine/ops/argmax/op.h"
#include "../../engine/ops/gemm/op.h"
#include "../../engine/ops/tree_attention/op.h"
#include "../../engine/ops/w4a16_gemm/op.h"
#include "../../engine/ops/w4a16_moe_experts/op.h"
#include "harness.h"

using namespace kdtree;

namespace {

constexpr double kBytesPerMicrosecond = 4.3e6;
constexpr size_t kOutgrowsCache = 200u << 20;

std::string json;

void add(const std::string& name, const Spread& t, double bytes) {
  const double floor = bytes / kBytesPerMicrosecond;
  char line[256];
  std::snprintf(line, sizeof line,
                "%s\n {\"name\": \"%s\", \"us\": {\"p10\": %.2f, \"median\": %.2f, \"p90\": %.2f}, \"floor_us\": %.2f}",
                json.empty() ? "" : ",", name.c_str(), t.p10, t.median, t.p90, floor);
  json += line;
  std::printf("%-44s %10.2f us  floor %8.2f  (%4.1f %%)\n", name.c_str(), t.median, floor, 100 * floor / t.median);
}

int copies_of(size_t bytes) { return static_cast<int>(std::min<size_t>(8, kOutgrowsCache / bytes + 1)); }

// Random bytes as packed weights: their values do not matter here, only that they are not all alike.
std::vector<std::unique_ptr<Buffer>> random_copies(size_t bytes) {
  static const Buffer noise(random_words(1 << 22));
  std::vector<std::unique_ptr<Buffer>> copies;
  for (int i = 0; i < copies_of(bytes); ++i) {
    copies.push_back(std::make_unique<Buffer>(bytes));
    for (size_t at = 0; at < bytes; at += noise.bytes)
      check(cudaMemcpy(copies.back()->memory + at, noise.memory, std::min(noise.bytes, bytes - at), cudaMemcpyDeviceToDevice), "copy");
  }
  return copies;
}

void run(const Operator& op, const void* shape, const void* args, const Buffer& workspace, cudaStream_t stream) {
  check(op.run(shape, args, workspace.memory, stream), op.name);
}

void measure_gemm(const char* name, int n, int k, int rows) {
  const GemmShape shape{64, n, k, 1, k, 0, n, 0, kBFloat16, kFloat32, kBFloat16};
  const auto packed = random_copies(gemm.packed_bytes(&shape));
  const Buffer n_rows(std::vector<int32_t>{rows}), x(normal_bf16(64 * k)), y(static_cast<size_t>(64) * n * 4), workspace(gemm.workspace(&shape));
  const Spread t = time_rounds(8, [&](cudaStream_t stream, int round) {
    const GemmArgs args{n_rows.as<int32_t>(), x.memory, packed[round % packed.size()]->memory, nullptr, y.memory};
    run(gemm, &shape, &args, workspace, stream);
  });
  add(std::string("gemm.bf16.") + name + ".rows" + std::to_string(rows), t, 2.0 * n * k);
}

void measure_w4a16_gemm(int n, int k, int rows) {
  const W4a16GemmShape shape{64, n, k, 32, k, n, kBFloat16, kBFloat16, kBFloat16};
  const auto packed = random_copies(w4a16_gemm.packed_bytes(&shape));
  const Buffer n_rows(std::vector<int32_t>{rows}), x(normal_bf16(64 * k)), y(static_cast<size_t>(64) * n * 2), workspace(w4a16_gemm.workspace(&shape));
  const Spread t = time_rounds(8, [&](cudaStream_t stream, int round) {
    const W4a16GemmArgs args{n_rows.as<int32_t>(), x.memory, packed[round % packed.size()]->memory, nullptr, y.memory};
    run(w4a16_gemm, &shape, &args, workspace, stream);
  });
  add("w4a16_gemm." + std::to_string(k) + "x" + std::to_string(n) + ".rows" + std::to_string(rows), t, 0.5625 * n * k);
}

// A layer of 384 experts, top-8, uniform routing; the floor is the bytes of the experts hit.
void measure_experts(const Buffer& packed, const W4a16MoeExpertsShape& shape, int rows, int calls = 4) {
  const int experts = shape.n_experts, top_k = shape.top_k;
  std::vector<std::unique_ptr<Buffer>> chosen;
  double hit = 0;
  for (int call = 0; call < calls; ++call) {
    std::vector<int32_t> ids;
    std::vector<bool> seen(experts);
    for (int row = 0; row < rows; ++row) {
      std::vector<int32_t> all(experts);
      for (int e = 0; e < experts; ++e) all[e] = e;
      std::shuffle(all.begin(), all.end(), generator());
      for (int slot = 0; slot < top_k; ++slot) ids.push_back(all[slot]), seen[all[slot]] = true;
    }
    ids.resize(static_cast<size_t>(shape.max_rows) * top_k, -1);
    chosen.push_back(std::make_unique<Buffer>(ids));
    for (int e = 0; e < experts; ++e) hit += seen[e];
  }
  hit /= calls;
  const size_t elements = static_cast<size_t>(shape.max_rows) * shape.hidden;
  const Buffer n_rows(std::vector<int32_t>{rows}), x(normal_bf16(elements)), weights(normal(static_cast<size_t>(shape.max_rows) * top_k)),
      y(elements * 2), workspace(w4a16_moe_experts.workspace(&shape));
  const Spread t = time_rounds(calls, [&](cudaStream_t stream, int round) {
    const W4a16MoeExpertsArgs args{n_rows.as<int32_t>(), x.memory, chosen[round]->as<int32_t>(), weights.as<float>(),
                                   packed.memory,        nullptr,  nullptr,                      y.memory};
    run(w4a16_moe_experts, &shape, &args, workspace, stream);
  });
  add("w4a16_moe_experts.rows" + std::to_string(rows), t, hit * 0.5625 * 3 * shape.hidden * shape.intermediate);
}

void measure_attention(int keys, int rows) {
  const int heads = 64, rank = 512, rope = 64;
  const TreeAttentionShape shape{64, heads, rank, rope, heads * rope, rope, keys + 64, kBFloat16, 0.07f};
  std::vector<int32_t> parents{-1}, depths{0};
  for (int i = 1; i < 64; ++i) parents.push_back((i - 1) / 2), depths.push_back(depths[(i - 1) / 2] + 1);
  const Buffer n_rows(std::vector<int32_t>{rows}), prefix(std::vector<int32_t>{keys - 1}), parents_at(parents), depths_at(depths),
      q_latent(normal_bf16(64 * heads * rank)), q_rope(normal_bf16(64 * heads * rope)), y(64 * heads * rank * 2),
      kv(normal_bf16(static_cast<size_t>(keys + 64) * (rank + rope))), workspace(tree_attention.workspace(&shape));
  const TreeAttentionArgs args{n_rows.as<int32_t>(),    prefix.as<int32_t>(), parents_at.as<int32_t>(),
                               depths_at.as<int32_t>(), q_latent.memory,      q_rope.memory,
                               kv.memory,               y.memory};
  const Spread t = time_rounds(4, [&](cudaStream_t stream, int) { run(tree_attention, &shape, &args, workspace, stream); });
  add("tree_attention.keys" + std::to_string(keys) + ".rows" + std::to_string(rows), t,
      std::max(1152.0 * keys, 139264.0 * rows * keys / 600e12 * 1e6 * kBytesPerMicrosecond));
}

void measure_argmax(int rows) {
  const ArgmaxShape shape{64, 163840};
  const Buffer n_rows(std::vector<int32_t>{rows}), x(normal(static_cast<size_t>(64) * 163840)), indices(64 * 4), workspace(argmax.workspace(&shape));
  const ArgmaxArgs args{n_rows.as<int32_t>(), x.as<float>(), indices.as<int32_t>()};
  const Spread t = time_rounds(8, [&](cudaStream_t stream, int) { run(argmax, &shape, &args, workspace, stream); });
  add("argmax.rows" + std::to_string(rows), t, 4.0 * rows * 163840);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return std::fprintf(stderr, "usage: measure_ops <output.json>\n"), 2;
  if (const char* reason = backend::init()) return std::fprintf(stderr, "%s\n", reason), 1;
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  for (int rows : {1, 9, 64}) {
    measure_gemm("q_a", 1536, 7168, rows);
    measure_gemm("q_b", 12288, 1536, rows);
    measure_gemm("kv_a", 576, 7168, rows);
    measure_gemm("o", 7168, 8192, rows);
    measure_gemm("lm_head", 163840, 7168, rows);
    measure_w4a16_gemm(4096, 7168, rows);
    measure_w4a16_gemm(7168, 2048, rows);
    measure_argmax(rows);
    for (int keys : {1024, 8192}) measure_attention(keys, rows);
  }
  const W4a16MoeExpertsShape shape{64, 7168, 2048, 384, 8, 32, kBFloat16, kBFloat16};
  const Buffer packed(w4a16_moe_experts.packed_bytes(&shape));
  const Buffer noise(random_words(1 << 22));
  for (size_t at = 0; at < packed.bytes; at += noise.bytes)
    check(cudaMemcpy(packed.memory + at, noise.memory, std::min(noise.bytes, packed.bytes - at), cudaMemcpyDeviceToDevice), "copy");
  for (int rows : {1, 9, 64}) measure_experts(packed, shape, rows);
  FILE* file = std::fopen(arguments[1], "w");
  if (!file) return std::fprintf(stderr, "%s: cannot be written\n", arguments[1]), 1;
  std::fprintf(file, "{\"device\": \"%s\", \"operators\": [%s\n]}\n", properties.name, json.c_str());
  std::fclose(file);
}
