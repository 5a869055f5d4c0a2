"""Do mma.sync m16n8k16 and wgmma give the same bits? Contract 6 of docs/numerics.md rests on it; sm_90 only.

    python tests/cuda/mma_parity.py --build DIR --output results/checks/cuda/mma_parity.json

For N = 8, 16, …, 256 a product of [64, K] and [N, K]^T bf16 matrices, k in steps of 16, is computed by
m16n8k16, by m16n8k16 with its operands swapped, and by wgmma m64nNk16. The record counts outputs whose bits differ.
"""

import argparse
import json
import subprocess
from pathlib import Path

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

// c[16, 8] += a[16, 16] · b[8, 16]^T; lane l holds rows l / 4 and l / 4 + 8 of a and c, row l / 4 of b.
__device__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ uint32_t pair(const __nv_bfloat16* matrix, int row, int k, int K) {
  return *reinterpret_cast<const uint32_t*>(matrix + static_cast<size_t>(row) * K + k);
}
__device__ void fragment_a(uint32_t (&a)[4], const __nv_bfloat16* x, int row, int k, int K) {
  const int r = row + threadIdx.x % 32 / 4, c = k + threadIdx.x % 4 * 2;
  a[0] = pair(x, r, c, K), a[1] = pair(x, r + 8, c, K), a[2] = pair(x, r, c + 8, K), a[3] = pair(x, r + 8, c + 8, K);
}
__device__ void fragment_b(uint32_t (&b)[2], const __nv_bfloat16* x, int row, int k, int K) {
  const int r = row + threadIdx.x % 32 / 4, c = k + threadIdx.x % 4 * 2;
  b[0] = pair(x, r, c, K), b[1] = pair(x, r, c + 8, K);
}

template <int N> __device__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);
@WGMMA@

// x [64, K], w [N, K] -> y [64, N] by all three; one warpgroup.
template <int N>
__global__ void products(const __nv_bfloat16* x, const __nv_bfloat16* w, int K, float* by_mma, float* swapped,
                         float* by_wgmma) {
  __shared__ __align__(128) __nv_bfloat16 tile[2][N][8];  // no swizzle: [half of k][row][8], 128 bytes a core matrix
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t a[4], b[2];
  float d[N / 2] = {};
  for (int k = 0; k < K; k += 16) {
    for (int i = threadIdx.x; i < N * 16; i += 128)
      tile[i % 16 / 8][i / 16][i % 8] = w[static_cast<size_t>(i / 16) * K + k + i % 16];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    fragment_a(a, x, 16 * warp, k, K);
    const uint64_t address = static_cast<uint64_t>(__cvta_generic_to_shared(tile)) >> 4;
    const uint64_t descriptor = (address & 0x3FFF) | uint64_t{N * 16 / 16} << 16 | uint64_t{128 / 16} << 32;
    wgmma<N>(d, a, descriptor);
    __syncthreads();
  }
  const int row = 16 * warp + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) by_wgmma[(row + i / 2 * 8) * N + 8 * j + column + i % 2] = d[4 * j + i];

  for (int j = 0; j < N / 8; ++j) {
    float c[4] = {};
    for (int k = 0; k < K; k += 16) {
      fragment_a(a, x, 16 * warp, k, K);
      fragment_b(b, w, 8 * j, k, K);
      mma(c, a, b);
    }
    for (int i = 0; i < 4; ++i) by_mma[(row + i / 2 * 8) * N + 8 * j + column + i % 2] = c[i];
  }
  for (int j = 0; j < N / 16; ++j)  // w on the 16 side, x on the 8 side
    for (int half = 0; half < 2; ++half) {
      float c[4] = {};
      for (int k = 0; k < K; k += 16) {
        fragment_a(a, w, 16 * j, k, K);
        fragment_b(b, x, 16 * warp + 8 * half, k, K);
        mma(c, a, b);
      }
      for (int i = 0; i < 4; ++i)
        swapped[(16 * warp + 8 * half + column + i % 2) * N + 16 * j + lane / 4 + i / 2 * 8] = c[i];
    }
}

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  exit(1);
}
#define CHECK(call) check(call, #call)

std::mt19937 generator(1);
float draw(int kind) {
  static std::normal_distribution<float> normal;
  if (kind == 0) return normal(generator);
  if (kind == 1) return normal(generator) * std::exp2(static_cast<float>(static_cast<int>(generator() % 25) - 12));
  return static_cast<float>(static_cast<int>(generator() % 17) - 8);
}

template <int N>
void compare(int K, int kind, const char* kind_name) {
  std::vector<__nv_bfloat16> x(64 * K), w(N * K);
  for (auto& v : x) v = __float2bfloat16(draw(kind));
  for (auto& v : w) v = __float2bfloat16(draw(kind));
  __nv_bfloat16 *dx, *dw;
  float* y;
  const size_t outputs = 64 * N;
  CHECK(cudaMalloc(&dx, x.size() * 2));
  CHECK(cudaMalloc(&dw, w.size() * 2));
  CHECK(cudaMalloc(&y, 3 * outputs * 4));
  CHECK(cudaMemset(y, 0xFF, 3 * outputs * 4));
  CHECK(cudaMemcpy(dx, x.data(), x.size() * 2, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(dw, w.data(), w.size() * 2, cudaMemcpyHostToDevice));
  products<N><<<1, 128>>>(dx, dw, K, y, y + outputs, y + 2 * outputs);
  CHECK(cudaGetLastError());
  std::vector<uint32_t> bits(3 * outputs);
  CHECK(cudaMemcpy(bits.data(), y, bits.size() * 4, cudaMemcpyDeviceToHost));
  size_t wgmma_differs = 0, swapped_differs = 0, nan = 0;
  double error = 0;
  for (size_t i = 0; i < outputs; ++i) {
    wgmma_differs += bits[i] != bits[2 * outputs + i];
    if (static_cast<int>(i % N) < N / 16 * 16) swapped_differs += bits[i] != bits[outputs + i];
    float value;
    memcpy(&value, &bits[i], 4);
    nan += std::isnan(value);
    double exact = 0, size = 0;
    for (int k = 0; k < K; ++k) {
      const double product = double(__bfloat162float(x[i / N * K + k])) * __bfloat162float(w[i % N * K + k]);
      exact += product, size += std::fabs(product);
    }
    error = std::fmax(error, std::fabs(value - exact) / size);
  }
  printf("%d %d %s %zu %zu %zu %g\n", N, K, kind_name, wgmma_differs, swapped_differs, nan, error);
  cudaFree(dx), cudaFree(dw), cudaFree(y);
}

template <int N>
void all() {
  const char* kinds[] = {"normal", "wide", "integers"};
  for (int kind = 0; kind < 3; ++kind)
    for (int K : {16, 1536, 7168})
      if (K < 7168 || N <= 64) compare<N>(K, kind, kinds[kind]);
}
int main() { @CALLS@ }
"""


def wgmma(n: int) -> str:
    d = ", ".join(f"%{i}" for i in range(n // 2))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(n // 2))
    a = ", ".join(f"%{n // 2 + i}" for i in range(4))
    return (
        f"template <> __device__ void wgmma<{n}>(float (&d)[{n // 2}], const uint32_t (&a)[4], uint64_t b) {{\n"
        '  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");\n'
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{d}}}, {{{a}}}, %{n // 2 + 4}, '
        f'1, 1, 1, 0;" : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));\n'
        '  asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;" ::: "memory");\n}'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="a folder for the program")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    sizes = range(8, 257, 8)
    source, program = options.build / "mma_parity.cu", options.build / "mma_parity"
    options.build.mkdir(parents=True, exist_ok=True)
    calls = " ".join(f"all<{n}>();" for n in sizes)
    source.write_text(SOURCE.replace("@WGMMA@", "\n".join(map(wgmma, sizes))).replace("@CALLS@", calls))
    if not program.exists() or program.stat().st_mtime < Path(__file__).stat().st_mtime:
        subprocess.run(["nvcc", "-std=c++17", "-O2", "-gencode", "arch=compute_90a,code=sm_90a", "-o", program, source],
                       check=True)
    if options.compile_only:
        return
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    cases = []
    for n, k, kind, by_wgmma, swapped, nan, error in map(str.split, lines):
        for name, differing in (("wgmma", by_wgmma), ("swapped", swapped), ("nan", nan)):
            cases.append({"name": f"{name}.n{n}.k{k}.{kind}", "max_abs_error": float(differing), "budget": 0.0})
        cases.append({"name": f"error.n{n}.k{k}.{kind}", "max_abs_error": float(error),
                      "budget": 2**-22 * max(1, int(k) / 32)})  # tensor cores truncate the terms of a step
    options.output.parent.mkdir(parents=True, exist_ok=True)
    record = {"operator": "mma_parity", "backend": "cuda", "cases": cases}
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    over = sum(not case["max_abs_error"] <= case["budget"] for case in cases)
    print(f"mma_parity: {len(cases)} measurements, {over} above budget")


if __name__ == "__main__":
    main()
