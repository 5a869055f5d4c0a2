// What the GPU-only checks share: operators of the library by contract, device buffers, random data, records.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "../../engine/backend/backend.h"
#include "../../engine/ops/operator.h"

inline void check(int error, const char* what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: %s\n", what, kdtree::backend::error_text(error));
  std::exit(1);
}

// Device memory that starts as NaN.
struct Buffer {
  char* memory = nullptr;
  size_t bytes;
  explicit Buffer(size_t bytes) : bytes(bytes) {
    check(cudaMalloc(&memory, bytes ? bytes : 1), "cudaMalloc");
    poison();
  }
  template <class T>
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size() * sizeof(T)) {
    put(0, values);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(memory); }

  void poison() { check(cudaMemset(memory, 0xFF, bytes), "cudaMemset"); }
  template <class T>
  T* as(size_t element = 0) const {
    return reinterpret_cast<T*>(memory) + element;
  }
  template <class T>
  void put(size_t element, const std::vector<T>& values) {
    check(cudaMemcpy(as<T>(element), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  template <class T>
  std::vector<T> get(size_t first, size_t count) const {
    std::vector<T> values(count);
    check(cudaMemcpy(values.data(), as<T>(first), count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }
  std::vector<char> get() const { return get<char>(0, bytes); }
};

inline std::mt19937& generator() {
  static std::mt19937 state(7);
  return state;
}
inline std::vector<float> normal(size_t count, float scale = 1) {
  std::normal_distribution<float> distribution(0, scale);
  std::vector<float> values(count);
  for (float& v : values) v = distribution(generator());
  return values;
}
inline std::vector<uint16_t> normal_bf16(size_t count, float scale = 1) {
  std::vector<uint16_t> values(count);
  const std::vector<float> floats = normal(count, scale);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &floats[i], 4);
    values[i] = static_cast<uint16_t>(bits >> 16);
  }
  return values;
}
inline std::vector<int32_t> random_words(size_t count) {
  std::vector<int32_t> words(count);
  for (int32_t& w : words) w = static_cast<int32_t>(generator()());
  return words;
}

// {operator, backend, cases}, as engine/check.py writes it.
struct Record {
  std::string cases;
  void add(const std::string& name, double error, double budget = 0) {
    char line[256];
    std::snprintf(line, sizeof line, "%s\n  {\"name\": \"%s\", \"max_abs_error\": %.9g, \"budget\": %.9g}",
                  cases.empty() ? "" : ",", name.c_str(), error, budget);
    cases += line;
    std::printf("%-40s %12.6g  (%g)%s\n", name.c_str(), error, budget, error <= budget ? "" : "  ABOVE");
  }
  void write(const char* path, const char* name) const {
    FILE* file = std::fopen(path, "w");
    if (!file) check(-1, path);
    std::fprintf(file, "{\"operator\": \"%s\", \"backend\": \"cuda\", \"cases\": [%s\n]}\n", name, cases.c_str());
    std::fclose(file);
  }
};

inline double differing_bytes(const std::vector<char>& a, const std::vector<char>& b) {
  double count = a.size() == b.size() ? 0 : 1e9;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += a[i] != b[i];
  return count;
}

// ---- time ------------------------------------------------------------------------------------------------------------
struct Spread {
  double p10, median, p90;
};

// Microseconds per round: a graph of `rounds` is replayed 60 times after 5 replays to warm up.
inline Spread time_rounds(int rounds, const std::function<void(cudaStream_t, int round)>& issue) {
  constexpr int kReplays = 60;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t begin, end;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int round = 0; round < rounds; ++round) issue(stream, round);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph), "instantiate");
  std::vector<double> times;
  for (int replay = 0; replay < kReplays + 5; ++replay) {
    float milliseconds;
    check(cudaEventRecord(begin, stream), "record");
    check(cudaGraphLaunch(executable, stream), "launch");
    check(cudaEventRecord(end, stream), "record");
    check(cudaEventSynchronize(end), "synchronize");
    check(cudaEventElapsedTime(&milliseconds, begin, end), "elapsed");
    if (replay >= 5) times.push_back(1e3 * milliseconds / rounds);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::sort(times.begin(), times.end());
  return {times[kReplays / 10], times[kReplays / 2], times[kReplays * 9 / 10]};
}
