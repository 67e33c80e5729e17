// Frequencies and the two corrections of YaRN, against numbers worked out apart from the code.
#include "parlat/config/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "parlat/config/model_config.h"

namespace parlat {
namespace {

RopeSpec yarn(double factor, std::optional<double> mscale, std::optional<double> mscale_all_dim) {
  return {.type = RopeSpec::Type::kYarn,
          .factor = factor,
          .mscale = mscale,
          .mscale_all_dim = mscale_all_dim,
          .attention_factor = {}};
}

TEST(Rope, PlainFrequenciesAreAGeometricSeries) {
  const auto got = inverse_frequencies({}, 64);
  ASSERT_EQ(got.size(), 32u);
  EXPECT_DOUBLE_EQ(got[0], 1.0);
  EXPECT_DOUBLE_EQ(got[1], std::pow(10000.0, -1.0 / 32));
  EXPECT_DOUBLE_EQ(got[31], std::pow(10000.0, -31.0 / 32));
  EXPECT_DOUBLE_EQ(rope_amplitude({}), 1.0);
  EXPECT_DOUBLE_EQ(softmax_scale_factor({}), 1.0);
}

// V3: find_dim(32) = 64 ln(4096 / (64 pi)) / (2 ln 1e4) = 10.47 -> 10, find_dim(1) = 22.51 -> 23.
TEST(Rope, YarnRampOfV3) {
  const auto plain = inverse_frequencies({}, 64), got = inverse_frequencies(yarn(40, 1, 1), 64);
  for (int i = 0; i < 32; ++i) {
    const double share = std::clamp((i - 10) / 13.0, 0.0, 1.0);
    EXPECT_NEAR(got[i], plain[i] * (share / 40 + 1 - share), 1e-15) << i;
  }
}

TEST(Rope, YarnRampWithoutTruncation) {
  RopeSpec spec = yarn(40, 1, 1);
  spec.truncate = false;
  const auto find_dim = [](double n) { return 64 * std::log(4096 / (2 * M_PI * n)) / (2 * std::log(1e4)); };
  const double share = (15 - find_dim(32)) / (find_dim(1) - find_dim(32));
  EXPECT_NEAR(inverse_frequencies(spec, 64)[15], std::pow(1e4, -15.0 / 32) * (share / 40 + 1 - share), 1e-15);
}

// Kimi-K2's beta_fast = beta_slow = 1 gives a ramp of one step; with 32 and 1 the frequencies differ.
TEST(Rope, EqualBetasAreKept) {
  RopeSpec spec = yarn(32, 1, 1);
  spec.theta = 50000;
  spec.beta_fast = 1;
  const auto got = inverse_frequencies(spec, 64);
  const auto plain = [](int i) { return std::pow(50000.0, -i / 32.0); };
  // find_dim(1) = 19.16: floor 19, ceil 20.
  EXPECT_NEAR(got[19], plain(19), 1e-15);
  EXPECT_NEAR(got[20], plain(20) / 32, 1e-15);
  spec.beta_fast = 32;
  EXPECT_GT(std::abs(inverse_frequencies(spec, 64)[15] - got[15]), 1e-3 * got[15]);
}

TEST(Rope, FactorsOfPublicModels) {
  EXPECT_NEAR(softmax_scale_factor(yarn(40, 0.707, 0.707)), 1.590, 5e-4);  // V2-Lite
  EXPECT_NEAR(softmax_scale_factor(yarn(40, 1, 1)), 1.874, 5e-4);          // V3
  EXPECT_NEAR(softmax_scale_factor(yarn(32, 1, 1)), 1.813, 5e-4);          // K2
  EXPECT_DOUBLE_EQ(rope_amplitude(yarn(40, 1, 1)), 1.0);
}

// The softmax factor comes from mscale_all_dim alone; the amplitude from both.
TEST(Rope, MscaleAndMscaleAllDimHaveSeparateEffects) {
  const RopeSpec spec = yarn(40, 1, 0.5);
  const double m1 = 0.1 * std::log(40) + 1, m05 = 0.05 * std::log(40) + 1;
  EXPECT_DOUBLE_EQ(softmax_scale_factor(spec), m05 * m05);
  EXPECT_DOUBLE_EQ(rope_amplitude(spec), m1 / m05);
}

TEST(Rope, AmplitudeWithoutMscale) {
  EXPECT_DOUBLE_EQ(rope_amplitude(yarn(40, {}, {})), 0.1 * std::log(40) + 1);
  EXPECT_DOUBLE_EQ(softmax_scale_factor(yarn(40, {}, {})), 1.0);
  RopeSpec spec = yarn(40, 1, 1);
  spec.attention_factor = 1.25;
  EXPECT_DOUBLE_EQ(rope_amplitude(spec), 1.25);
}

TEST(Rope, SoftmaxScaleUsesTheWholeQueryWidth) {
  EXPECT_NEAR(load_model_config("moonlight").mla.softmax_scale(), 1 / std::sqrt(192.0), 1e-12);
  EXPECT_NEAR(load_model_config("v3").mla.softmax_scale(), 1.8738 / std::sqrt(192.0), 1e-5);
}

}  // namespace
}  // namespace parlat
