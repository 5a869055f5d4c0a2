// Weights from the bundle into strips (strips.cuh): once, at load, permuted on the device.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>

#include "numbers.cuh"
#include "operator.cuh"
#include "strips.cuh"

namespace kdtree::cuda {

// Device memory for the time of packing, ordered on the stream.
class Staged {
 public:
  Staged(const void* host, size_t bytes, cudaStream_t stream) : stream_(stream) {
    error = cudaMallocAsync(&memory_, bytes, stream);
    if (error == cudaSuccess) error = cudaMemcpyAsync(memory_, host, bytes, cudaMemcpyHostToDevice, stream);
  }
  ~Staged() {
    if (memory_) cudaFreeAsync(memory_, stream_);
  }
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;
  template <class T>
  const T* as() const {
    return static_cast<const T*>(memory_);
  }
  cudaError_t error;

 private:
  void* memory_ = nullptr;
  cudaStream_t stream_;
};

// Where strips come from: strip s takes outputs 0 … 7 from rows step · s on of `low`, and 8 … 15 from those of `high`.
template <class T>
struct StripSource {
  const T *low, *high;
  int step, low_rows, high_rows;
  // One matrix [n, width]: the upper half of a strip is 8 rows further.
  static StripSource of(const T* w, int n, int64_t width) { return {w, w + 8 * width, 16, n, n - 8}; }
  // Two matrices of n rows: a strip has the same 8 outputs of both.
  static StripSource of(const T* low, const T* high, int n) { return {low, high, 8, n, n}; }

  // Element `column` of output g (of 8) in either half; `absent` past the rows.
  __device__ T at(int strip, bool upper, int g, int64_t width, int column, T absent) const {
    const int row = step * strip + g;
    return row < (upper ? high_rows : low_rows) ? (upper ? high : low)[row * width + column] : absent;
  }
};

template <class Strips>
size_t strip_bytes(int strips, int k) {
  return static_cast<size_t>(strips) * static_cast<size_t>(ceil_div(k, 64)) * Strips::kUnitBytes;
}

// Strip and unit of the i-th unit in memory.
struct UnitAt {
  int strip, unit;
  __device__ UnitAt(int64_t i, int strips, int units) {
    const auto first = static_cast<int>(i / (kStrips * int64_t{units}) * kStrips), here = min(kStrips, strips - first);
    const auto in_tile = static_cast<int>(i - int64_t{first} * units);
    strip = first + in_tile % here, unit = in_tile / here;
  }
};

// A lane's eight codes of a half, four words of the bundle, as Int4Units has them.
template <class Order>
__host__ __device__ uint32_t codes_of_lane(const uint32_t (&half)[4], int t) {
  uint32_t to = 0;
  for (int p = 0; p < 4; ++p)
    for (int i = 0; i < 2; ++i) {
      const int input = Order::input(t, p) + i;
      to |= (half[input / 8] >> (4 * (input % 8)) & 15) << (16 * i + p % 2 * 8 + p / 2 * 4);
    }
  return to;
}

// A thread a word. What pads is code 8, scale 0; groups are 32 inputs, so a half is there or not.
template <class Order>
__global__ void permute_int4(StripSource<uint32_t> codes, StripSource<bf16> scales, int k, int strips,
                             uint32_t* packed) {
  constexpr int kWords = Int4Units::kUnitBytes / 4, kCodes = 128;
  const int units = ceil_div(k, 64);
  const int64_t count = int64_t{strips} * units * kWords;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int at = static_cast<int>(i % kWords);
    const UnitAt at_unit(i / kWords, strips, units);
    const int strip = at_unit.strip, unit = at_unit.unit;
    if (at < kCodes) {
      const int lane = at / 4, word = 8 * unit + at / 2 % 2 * 4;
      uint32_t half[4];
      for (int j = 0; j < 4; ++j)
        half[j] = word < k / 8 ? codes.at(strip, at % 2, lane / 4, k / 8, word + j, 0x88888888u) : 0x88888888u;
      packed[i] = codes_of_lane<Order>(half, lane % 4);
    } else {
      const int g = (at - kCodes) / 2, group = 2 * unit + at % 2;
      const auto scale = [&](bool upper) -> uint32_t {
        if (group >= k / 32) return 0;
        return __float_as_uint(to_float(scales.at(strip, upper, g, k / 32, group, rounded<bf16>(0))) *
                               Int4Units::kPackedScale) >> 16;  // a power of two: exact
      };
      packed[i] = scale(false) | scale(true) << 16;
    }
  }
}

// A thread a pair of inputs. What pads is 0.
template <class Order, class T>
__global__ void permute_bf16(StripSource<T> w, int k, int strips, uint32_t* packed) {
  constexpr int kWords = Bf16Units::kUnitBytes / 4;
  const int units = ceil_div(k, 64);
  const int64_t count = int64_t{strips} * units * kWords;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int at = static_cast<int>(i % kWords);
    const UnitAt at_unit(i / kWords, strips, units);
    const int strip = at_unit.strip, unit = at_unit.unit;
    const int lane = at / 4 % 32, half_and_product = at / 128;
    const int half = half_and_product / 2, pair = half_and_product % 2 * 2 + at / 2 % 2;
    const int input = 64 * unit + 32 * half + Order::input(lane % 4, pair);
    const auto value = [&](int column) -> uint32_t {
      if (column >= k) return 0;
      const float v = to_float(w.at(strip, at % 2, lane / 4, k, column, rounded<T>(0)));
      return __float_as_uint(to_float(rounded<bf16>(v))) >> 16;
    };
    packed[i] = value(input) | value(input + 1) << 16;
  }
}

template <class Strips>
void pack_strips(StripSource<uint32_t> codes, StripSource<bf16> scales, int k, int strips, void* packed,
                 cudaStream_t stream) {
  const auto words = static_cast<int64_t>(strip_bytes<Strips>(strips, k) / 4);
  using Order = typename Strips::Order;
  permute_int4<Order><<<grid_for(words, 256, 8), 256, 0, stream>>>(codes, scales, k, strips,
                                                                   static_cast<uint32_t*>(packed));
}
template <class Strips, class T>
void pack_strips(StripSource<T> w, int k, int strips, void* packed, cudaStream_t stream) {
  const auto words = static_cast<int64_t>(strip_bytes<Strips>(strips, k) / 4);
  using Order = typename Strips::Order;
  permute_bf16<Order, T><<<grid_for(words, 256, 8), 256, 0, stream>>>(w, k, strips, static_cast<uint32_t*>(packed));
}

// A float matrix [n, k] in host memory, some tiles at a time.
template <class Strips, class T>
cudaError_t stage_strips(const T* w, int n, int k, void* packed, cudaStream_t stream) {
  const int64_t tile_bytes = int64_t{16} * kStrips * k * static_cast<int64_t>(sizeof(T));
  const int at_once = kStrips * static_cast<int>(std::max<int64_t>(1, (int64_t{64} << 20) / tile_bytes));
  for (int strip = 0; strip < ceil_div(n, 16); strip += at_once) {
    const int rows = std::min(16 * at_once, n - 16 * strip);
    const size_t bytes = static_cast<size_t>(rows) * static_cast<size_t>(k) * sizeof(T);
    const Staged staged(w + int64_t{16} * strip * k, bytes, stream);
    if (staged.error != cudaSuccess) return staged.error;
    pack_strips<Strips>(StripSource<T>::of(staged.template as<T>(), rows, k), k, ceil_div(rows, 16),
                        static_cast<char*>(packed) + strip_bytes<Strips>(strip, k), stream);
  }
  return cudaGetLastError();
}

}  // namespace kdtree::cuda
