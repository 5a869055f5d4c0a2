// The streaming expert kernels at K2's size, from inside: against the plain kernels, and row by row.
//    check_experts <output.json>                (built by on_gpu.sh)
// The layer has 384 experts (9.5 GB), filled on the device. engine/bench_cuda times it.
#include <map>

#include "../../engine/ops/w4a16_moe_experts/cuda.cu"
#include "harness.h"

namespace kdtree::cuda {
int multiprocessors = 0;
Rung rung = Rung::kStream;
}
namespace kdtree::backend {
const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
}

using namespace kdtree;

namespace at_k2_size {

constexpr int kHidden = 7168, kWidth = 2048, kExperts = 384, kTopK = 8, kMaxRows = 64;
constexpr int64_t kOne = int64_t{kHidden} * kWidth;

__device__ uint32_t hash(uint64_t i) {
  i ^= i >> 30, i *= 0xBF58476D1CE4E5B9, i ^= i >> 27, i *= 0x94D049BB133111EB;
  return static_cast<uint32_t>(i >> 32);
}
__global__ void fill_words(uint32_t* to, int64_t count, uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x)
    to[i] = hash(seed + static_cast<uint64_t>(i));
}
// Scales of either sign over a decade, the same values as bf16 and as fp32.
__global__ void fill_scales(bf16* narrow, float* wide, int64_t count, float size) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t h = hash(static_cast<uint64_t>(i) + (uint64_t{1} << 50));
    const float v = size * (0.1f + static_cast<float>(h & 0xFFFF) / 65536) * (h >> 31 ? -1.0f : 1.0f);
    narrow[i] = rounded<bf16>(v);
    wide[i] = to_float(narrow[i]);
  }
}

struct Layer {
  W4a16MoeExpertsShape shape{kMaxRows, kHidden, kWidth, kExperts, kTopK, 32, kBFloat16, kBFloat16};
  W4a16MoeExpertsShape plain_shape{kMaxRows, kHidden, kWidth, kExperts, kTopK, 32, kBFloat16, kFloat32};
  Buffer packed{packed_bytes(shape)}, plain{packed_bytes(plain_shape)};
  Layer() {
    const int64_t words = 3 * kExperts * kOne / 8, groups = 3 * kExperts * kOne / 32;
    Buffer scales(static_cast<size_t>(groups) * 2);
    fill_words<<<2048, 256>>>(plain.as<uint32_t>(), words, 1);
    fill_scales<<<2048, 256>>>(scales.as<bf16>(), plain.as<float>(words), groups, 0.004f);
    const auto layout = streaming(shape);
    for (int64_t e = 0; e < kExperts; ++e) {
      const uint32_t* codes = plain.as<uint32_t>(3 * e * kOne / 8);
      const bf16* sc = scales.as<bf16>(3 * e * kOne / 32);
      char* to = packed.memory + e * layout.expert_bytes();
      pack_strips<GatheredInt4>(StripSource<uint32_t>::of(codes, codes + kOne / 8, kWidth),
                                StripSource<cuda::bf16>::of(sc, sc + kOne / 32, kWidth), kHidden,
                                layout.gate_up.strips, to, nullptr);
      pack_strips<GatheredInt4>(StripSource<uint32_t>::of(codes + kOne / 4, kHidden, kWidth / 8),
                                StripSource<cuda::bf16>::of(sc + kOne / 16, kHidden, kWidth / 32), kWidth, layout.down.strips,
                                to + layout.gate_up_bytes(), nullptr);
    }
    check(cudaDeviceSynchronize(), "fill");
  }
};

using Ids = std::vector<int32_t>;  // [rows, kTopK]

Ids uniform(int rows) {
  Ids ids, all(kExperts);
  for (int e = 0; e < kExperts; ++e) all[e] = e;
  for (int row = 0; row < rows; ++row) {
    std::shuffle(all.begin(), all.end(), generator());
    ids.insert(ids.end(), all.begin(), all.begin() + kTopK);
  }
  return ids;
}
// Rows of a tree resemble each other: every slot keeps the expert of an earlier row with this probability.
Ids correlated(int rows, double keep) {
  Ids ids = uniform(rows);
  std::uniform_real_distribution<> coin;
  for (int row = 1; row < rows; ++row) {
    const int parent = static_cast<int>(generator()() % static_cast<unsigned>(row));
    for (int slot = 0; slot < kTopK; ++slot) {
      const int32_t from = ids[parent * kTopK + slot];
      const auto begin = ids.begin() + row * kTopK;
      if (coin(generator()) < keep && std::find(begin, begin + kTopK, from) == begin + kTopK) begin[slot] = from;
    }
  }
  return ids;
}

struct Call {
  Buffer n_rows, x, experts, weights, residual, y, workspace;
  const Layer& layer;
  const W4a16MoeExpertsShape& shape;
  Call(const Layer& layer, const W4a16MoeExpertsShape& shape, const std::vector<uint16_t>& x, Ids ids,
       const std::vector<float>& weights)
      : n_rows(Ids{static_cast<int32_t>(ids.size()) / kTopK}), x(x), experts([&] {
          ids.resize(kMaxRows * kTopK, -1);
          return ids;
        }()), weights(weights), residual(x), y(static_cast<size_t>(kMaxRows) * kHidden * 2),
        workspace(kdtree::workspace(shape)), layer(layer), shape(shape) {}
  W4a16MoeExpertsArgs args() const {
    return {n_rows.as<int32_t>(), x.memory, experts.as<int32_t>(), weights.as<float>(),
            (shape.scale_type == kFloat32 ? layer.plain : layer.packed).memory, nullptr, residual.memory, y.memory};
  }
  void run(cudaStream_t stream = nullptr) const {
    const auto a = args();
    check(w4a16_moe_experts.run(&shape, &a, workspace.memory, stream), "run");
  }
  std::vector<uint16_t> output(int rows) const { return y.get<uint16_t>(0, static_cast<size_t>(rows) * kHidden); }
};

float value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float v;
  std::memcpy(&v, &wide, 4);
  return v;
}

void verify(const Layer& layer, Record& record) {
  const auto x = normal_bf16(static_cast<size_t>(kMaxRows) * kHidden);
  auto weights = normal(kMaxRows * kTopK);
  const std::map<std::string, Ids> routings = {
      {"one", uniform(1)},          {"nine", uniform(9)},
      {"sixty_four", uniform(64)},  {"correlated", correlated(64, 0.8)},
      {"tight", correlated(64, 1)}, {"same_40", correlated(40, 1)},
      {"last", [] {
         Ids ids = uniform(3);
         ids[0] = 383, ids[1] = 0;
         return ids;
       }()}};
  for (const auto& routing : routings) {
    const std::string& name = routing.first;
    const Ids& ids = routing.second;
    const int rows = static_cast<int>(ids.size()) / kTopK;
    const Call fast(layer, layer.shape, x, ids, weights), plain(layer, layer.plain_shape, x, ids, weights);
    fast.run(), plain.run();
    check(cudaDeviceSynchronize(), name.c_str());
    const auto a = fast.output(kMaxRows), b = plain.output(kMaxRows);
    double difference = 0, size = 0, untouched = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      if (i >= static_cast<size_t>(rows) * kHidden) {
        untouched += a[i] != 0xFFFF;
        continue;
      }
      const double d = value(a[i]) - value(b[i]);
      difference += d * d, size += static_cast<double>(value(b[i])) * value(b[i]);
    }
    record.add("plain." + name, std::sqrt(difference / size), 2e-3);  // both round once to bf16
    record.add("rows_past_n." + name, untouched);

    // Every row alone, then in other company: first rows only, reversed.
    double bytes = 0;
    const auto compare = [&](const std::vector<int>& chosen) {
      std::vector<uint16_t> some_x(x.size(), 0x7FC0);
      Ids some_ids;
      std::vector<float> some_weights(weights.size());
      for (size_t i = 0; i < chosen.size(); ++i) {
        std::copy_n(x.begin() + chosen[i] * kHidden, kHidden, some_x.begin() + i * kHidden);
        some_ids.insert(some_ids.end(), ids.begin() + chosen[i] * kTopK, ids.begin() + (chosen[i] + 1) * kTopK);
        std::copy_n(weights.begin() + chosen[i] * kTopK, kTopK, some_weights.begin() + i * kTopK);
      }
      const Call other(layer, layer.shape, some_x, some_ids, some_weights);
      other.run();
      const auto c = other.output(static_cast<int>(chosen.size()));
      for (size_t i = 0; i < chosen.size(); ++i)
        for (int k = 0; k < kHidden; ++k) bytes += c[i * kHidden + k] != a[chosen[i] * kHidden + k];
    };
    for (int row = 0; row < rows; ++row) compare({row});
    for (int n = 2; n < rows; n += 1 + n / 8) {
      std::vector<int> chosen;
      for (int i = 0; i < n; ++i) chosen.push_back((i * 7 + n) % rows);
      compare(chosen);
    }
    std::vector<int> reversed;
    for (int i = rows; i--;) reversed.push_back(i);
    compare(reversed);
    record.add("row_invariance." + name, bytes);
    for (int repeat = 0; repeat < 20; ++repeat) {
      fast.run();
      bytes += fast.output(kMaxRows) != a;
    }
    record.add("repeats." + name, bytes);
  }
}

}  // namespace at_k2_size

using namespace at_k2_size;

int main(int count, char** arguments) {
  if (count != 2) return std::fprintf(stderr, "usage: check_experts <output.json>\n"), 2;
  if (!cuda::choose_rung(std::getenv("KDTREE_CUDA"))) return std::fprintf(stderr, "KDTREE_CUDA: no rung\n"), 2;
  check(cudaDeviceGetAttribute(&cuda::multiprocessors, cudaDevAttrMultiProcessorCount, 0), "device");
  check(static_cast<cudaError_t>(cuda::init_w4a16_moe_experts()), "init");
  const Layer layer;
  Record record;
  verify(layer, record);
  record.write(arguments[1], "w4a16_moe_experts.k2");
}
