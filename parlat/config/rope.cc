#include "parlat/config/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace parlat {

namespace {

double yarn_mscale(double factor, double scale) { return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0; }

// The frequencies between which YaRN passes from extrapolation to interpolation, as indices.
struct Ramp {
  double low = 0, high = 0;
};

Ramp yarn_ramp(const RopeSpec& rope, double d_rope) {
  const auto find_dim = [&](double rotations) {
    const double wavelengths = static_cast<double>(rope.original_max_positions) / (rotations * 2 * std::numbers::pi);
    return d_rope * std::log(wavelengths) / (2 * std::log(rope.theta));
  };
  double low = find_dim(rope.beta_fast), high = find_dim(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, d_rope - 1);
  if (low == high) high += 0.001;
  return {low, high};
}

}  // namespace

std::vector<double> inverse_frequencies(const RopeSpec& rope, int64_t d_rope) {
  std::vector<double> frequencies(d_rope / 2);
  const auto width = static_cast<double>(d_rope);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = std::pow(rope.theta, -2.0 * static_cast<double>(i) / width);
  }
  if (rope.type == RopeSpec::Type::kDefault) return frequencies;
  const Ramp ramp = yarn_ramp(rope, width);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double interpolated = std::clamp((static_cast<double>(i) - ramp.low) / (ramp.high - ramp.low), 0.0, 1.0);
    frequencies[i] *= interpolated / rope.factor + (1 - interpolated);
  }
  return frequencies;
}

double rope_amplitude(const RopeSpec& rope) {
  if (rope.type == RopeSpec::Type::kDefault) return 1.0;
  if (rope.attention_factor) return *rope.attention_factor;
  // Zero counts as not given, as in the reference implementation.
  if (rope.mscale.value_or(0) != 0 && rope.mscale_all_dim.value_or(0) != 0) {
    return yarn_mscale(rope.factor, *rope.mscale) / yarn_mscale(rope.factor, *rope.mscale_all_dim);
  }
  return yarn_mscale(rope.factor, 1.0);
}

double softmax_scale_factor(const RopeSpec& rope) {
  if (rope.type == RopeSpec::Type::kDefault || rope.mscale_all_dim.value_or(0) == 0) return 1.0;
  const double m = yarn_mscale(rope.factor, *rope.mscale_all_dim);
  return m * m;
}

}  // namespace parlat
