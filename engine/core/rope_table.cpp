#include "rope_table.h"

#include <algorithm>
#include <cmath>

namespace kdtree {
namespace {

constexpr double kPi = 3.14159265358979323846;

// The pair (a real number) that turns `rotations` times within the original context.
double correction_pair(const ModelConfig& config, double rotations) {
  return config.qk_rope_head_dim * std::log(config.rope_original_positions / (rotations * 2 * kPi)) /
         (2 * std::log(config.rope_theta));
}

// Static YaRN: pairs below `low` keep their frequency, pairs above `high` are slowed by the factor, a ramp between.
std::vector<double> inverse_frequencies(const ModelConfig& config) {
  const int dim = config.qk_rope_head_dim;
  std::vector<double> frequencies(static_cast<size_t>(dim / 2));
  double low = 0, high = 0;
  if (config.rope_factor != 1) {
    low = std::max(std::floor(correction_pair(config, config.rope_beta_fast)), 0.0);
    high = std::min(std::ceil(correction_pair(config, config.rope_beta_slow)), dim - 1.0);
    if (low == high) high += 0.001;
  }
  for (int i = 0; i < dim / 2; ++i) {
    const double kept = std::pow(config.rope_theta, -2.0 * i / dim);
    const double ramp = config.rope_factor == 1 ? 0 : std::clamp((i - low) / (high - low), 0.0, 1.0);
    frequencies[static_cast<size_t>(i)] = kept / config.rope_factor * ramp + kept * (1 - ramp);
  }
  return frequencies;
}

}  // namespace

RopeTable rope_table(const ModelConfig& config, int64_t positions) {
  const std::vector<double> frequencies = inverse_frequencies(config);
  RopeTable table;
  table.cos.reserve(static_cast<size_t>(positions) * frequencies.size());
  table.sin.reserve(table.cos.capacity());
  for (int64_t position = 0; position < positions; ++position)
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(position) * frequency;
      table.cos.push_back(static_cast<float>(std::cos(angle) * config.rope_attention_factor));
      table.sin.push_back(static_cast<float>(std::sin(angle) * config.rope_attention_factor));
    }
  return table;
}

float softmax_scale(const ModelConfig& config) {
  const double m = config.rope_factor > 1 ? 0.1 * config.rope_mscale_all_dim * std::log(config.rope_factor) + 1 : 1;
  return static_cast<float>(m * m / std::sqrt(static_cast<double>(config.qk_nope_head_dim + config.qk_rope_head_dim)));
}

}  // namespace kdtree
