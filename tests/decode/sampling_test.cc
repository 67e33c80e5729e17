#include "parlat/decode/sampling.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <cmath>
#include <map>

#include "parlat/base/error.h"

namespace parlat {
namespace {

const Tensor kLogits = at::tensor({0.0f, 3.0f, 1.0f, 3.0f, 2.0f});

std::map<int64_t, int> draw(const Sampling& sampling, int count) {
  std::map<int64_t, int> drawn;
  for (int i = 0; i < count; ++i) ++drawn[sample(kLogits, sampling, i)];
  return drawn;
}

TEST(Sample, GreedyTakesTheFirstOfTheLargest) { EXPECT_EQ(sample(kLogits, {}, 7), 1); }

TEST(Sample, FrequenciesAreTheProbabilities) {
  constexpr int kDraws = 20000;
  const Tensor p = (kLogits / 0.7).softmax(0);
  const std::map<int64_t, int> drawn = draw({.temperature = 0.7, .top_k = 0, .top_p = 1, .seed = 3}, kDraws);
  for (int64_t token = 0; token < 5; ++token) {
    const double expected = p[token].item<double>(), got = drawn.contains(token) ? drawn.at(token) : 0;
    // Five standard deviations of a binomial.
    EXPECT_NEAR(got / kDraws, expected, 5 * std::sqrt(expected * (1 - expected) / kDraws)) << token;
  }
}

TEST(Sample, TopKAndTopPKeepTheLikeliest) {
  const auto tokens = [](const Sampling& sampling) {
    std::set<int64_t> seen;
    for (const auto& [token, count] : draw(sampling, 2000)) seen.insert(token);
    return seen;
  };
  using Set = std::set<int64_t>;
  EXPECT_EQ(tokens({.temperature = 5, .top_k = 2, .top_p = 1, .seed = 1}), (Set{1, 3}));
  EXPECT_EQ(tokens({.temperature = 5, .top_k = 3, .top_p = 1, .seed = 1}), (Set{1, 3, 4}));
  EXPECT_EQ(tokens({.temperature = 1, .top_k = 0, .top_p = 0.5, .seed = 1}), (Set{1, 3}));
  EXPECT_EQ(tokens({.temperature = 1, .top_k = 0, .top_p = 0.01, .seed = 1}), (Set{1}));
}

TEST(Sample, DependsOnSeedAndIndexOnly) {
  const Sampling one{.temperature = 1, .top_k = 0, .top_p = 1, .seed = 1};
  const Sampling two{.temperature = 1, .top_k = 0, .top_p = 1, .seed = 2};
  int differ = 0;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(sample(kLogits, one, i), sample(kLogits.clone(), one, i));
    differ += sample(kLogits, one, i) != sample(kLogits, two, i) ? 1 : 0;
  }
  EXPECT_GT(differ, 10);
}

TEST(Sample, RefusesNonsense) {
  EXPECT_THROW(validate({.temperature = -1, .top_k = 0, .top_p = 1, .seed = 1}), ConfigError);
  EXPECT_THROW(validate({.temperature = NAN, .top_k = 0, .top_p = 1, .seed = 1}), ConfigError);
  EXPECT_THROW(validate({.temperature = 1, .top_k = -1, .top_p = 1, .seed = 1}), ConfigError);
  EXPECT_THROW(validate({.temperature = 1, .top_k = 0, .top_p = 0, .seed = 1}), ConfigError);
  EXPECT_THROW(validate({.temperature = 1, .top_k = 0, .top_p = NAN, .seed = 1}), ConfigError);
}

}  // namespace
}  // namespace parlat
