#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace parlat {

// Rotary position embedding of the R rope columns, with YaRN's two separate corrections.
struct RopeSpec {
  enum class Type { kDefault, kYarn };
  Type type = Type::kDefault;
  double theta = 10000.0;
  bool interleaved = true;  // pairs (2i, 2i+1); false: (i, i + R/2)
  // YaRN only:
  double factor = 1.0;
  int64_t original_max_positions = 4096;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  std::optional<double> mscale, mscale_all_dim, attention_factor;
  bool truncate = true;  // floor and ceil of the ramp's ends
};

// R/2 inverse frequencies; YaRN's ramp applied.
std::vector<double> inverse_frequencies(const RopeSpec& rope, int64_t d_rope);

// Amplitude of cos and sin: m(f, mscale) / m(f, mscale_all_dim), m(f, 1), or attention_factor; 1 without YaRN.
double rope_amplitude(const RopeSpec& rope);

// m(f, mscale_all_dim)^2, the factor on the softmax scale; 1 where mscale_all_dim is not given.
double softmax_scale_factor(const RopeSpec& rope);

}  // namespace parlat
