// The three gatings against the definition, written once more as loops.
#include <gmock/gmock.h>

#include <numeric>
#include <set>

#include "parlat/base/error.h"
#include "parlat/model/moe.h"
#include "parlat/tensor/fill.h"
#include "tests/expect_close.h"

namespace parlat {
namespace {

constexpr uint64_t kSeed = 11;

MoeSpec grouped(Gating gating) {
  return {.n_routed = 8, .experts_per_token = 3, .d_expert = 4, .gating = gating, .n_group = 4, .topk_group = 2};
}

// Weights whose router logits are x itself.
MoeWeights identity_router(const MoeSpec& spec) {
  MoeWeights w;
  w.w_router = at::eye(spec.n_routed);
  w.selection_bias = at::zeros({spec.n_routed});
  return w;
}

// Indices of the k largest, lower indices first among equals; then increasing.
std::vector<int64_t> largest(const std::vector<double>& scores, int64_t k) {
  std::vector<int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

std::vector<double> scores_of(Gating gating, const std::vector<double>& logits) {
  std::vector<double> scores;
  if (gating == Gating::kNoauxTc) {
    for (const double l : logits) scores.push_back(1 / (1 + std::exp(-l)));
    return scores;
  }
  double sum = 0;
  for (const double l : logits) sum += std::exp(l);
  for (const double l : logits) scores.push_back(std::exp(l) / sum);
  return scores;
}

// The experts of one token.
std::vector<int64_t> expected_experts(const MoeSpec& spec, const std::vector<double>& logits,
                                      const std::vector<double>& bias) {
  std::vector<double> choice = scores_of(spec.gating, logits);
  const bool noaux = spec.gating == Gating::kNoauxTc;
  for (size_t e = 0; e < choice.size(); ++e) choice[e] += noaux ? bias[e] : 0.0;
  if (spec.gating == Gating::kGreedy) return largest(choice, spec.experts_per_token);
  const int64_t size = spec.n_routed / spec.n_group;
  std::vector<double> group_scores;
  for (int64_t g = 0; g < spec.n_group; ++g) {
    std::vector<double> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::sort(members.rbegin(), members.rend());
    group_scores.push_back(noaux ? members[0] + members[1] : members[0]);
  }
  const std::vector<int64_t> kept = largest(group_scores, spec.topk_group);
  for (int64_t e = 0; e < spec.n_routed; ++e) {
    if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) choice[e] = noaux ? -INFINITY : 0.0;
  }
  return largest(choice, spec.experts_per_token);
}

std::vector<double> expected_weights(const MoeSpec& spec, const std::vector<double>& logits,
                                     const std::vector<int64_t>& experts) {
  const std::vector<double> scores = scores_of(spec.gating, logits);
  std::vector<double> weights;
  for (const int64_t e : experts) weights.push_back(scores[e]);
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const bool noaux = spec.gating == Gating::kNoauxTc;
  const bool normalise = spec.norm_topk_prob && (noaux || spec.experts_per_token > 1);
  for (double& weight : weights) {
    if (normalise) weight /= sum;
    if (noaux || !normalise) weight *= spec.routed_scaling_factor;
  }
  return weights;
}

void expect_routing(const MoeSpec& spec, const MoeWeights& w, const Tensor& logits_nE) {
  const Routing got = route(spec, w, logits_nE);
  const Tensor bias_E = w.selection_bias.to(at::kDouble);
  const std::vector<double> bias(bias_E.data_ptr<double>(), bias_E.data_ptr<double>() + bias_E.numel());
  std::vector<Tensor> experts, weights;
  for (int64_t t = 0; t < logits_nE.size(0); ++t) {
    const Tensor row = logits_nE[t].to(at::kDouble).contiguous();
    const std::vector<double> logits(row.data_ptr<double>(), row.data_ptr<double>() + row.numel());
    const std::vector<int64_t> chosen = expected_experts(spec, logits, bias);
    experts.push_back(at::tensor(chosen));
    weights.push_back(at::tensor(expected_weights(spec, logits, chosen), at::kDouble));
  }
  EXPECT_TRUE(at::equal(got.experts_nk, at::stack(experts)));
  EXPECT_EQ(got.weights_nk.scalar_type(), at::kFloat);
  EXPECT_CLOSE(got.weights_nk, at::stack(weights), Tolerance::rounding(at::kFloat, spec.n_routed, 4));
}

class EveryGating : public ::testing::TestWithParam<std::tuple<Gating, bool>> {};

TEST_P(EveryGating, FollowsTheDefinition) {
  const auto [gating, normalise] = GetParam();
  MoeSpec spec = grouped(gating);
  spec.norm_topk_prob = normalise;
  spec.routed_scaling_factor = 2.827;
  MoeWeights w = identity_router(spec);
  w.selection_bias = seeded_normal({spec.n_routed}, 0.3, kSeed, "bias");
  expect_routing(spec, w, seeded_normal({64, spec.n_routed}, 1.0, kSeed, "logits"));
}

// Equal scores: the lower index wins, for groups and for experts.
TEST_P(EveryGating, BreaksTiesByIndex) {
  const auto [gating, normalise] = GetParam();
  MoeSpec spec = grouped(gating);
  spec.norm_topk_prob = normalise;
  const Tensor coarse = seeded_integers({64, spec.n_routed}, 2, kSeed, "ties").to(at::kFloat);
  expect_routing(spec, identity_router(spec), coarse);
}

TEST_P(EveryGating, OneExpertAToken) {
  const auto [gating, normalise] = GetParam();
  MoeSpec spec = grouped(gating);
  spec.norm_topk_prob = normalise;
  spec.experts_per_token = 1;
  spec.routed_scaling_factor = 2.827;
  expect_routing(spec, identity_router(spec), seeded_normal({16, spec.n_routed}, 1.0, kSeed, "logits"));
}

INSTANTIATE_TEST_SUITE_P(Gatings, EveryGating,
                         ::testing::Combine(::testing::Values(Gating::kGreedy, Gating::kGroupLimitedGreedy,
                                                              Gating::kNoauxTc),
                                            ::testing::Bool()));

// A masked expert wins when biased scores are negative and the mask is 0.
TEST(NoauxTc, NegativeScoresStayInTheKeptGroups) {
  const MoeSpec spec = grouped(Gating::kNoauxTc);
  MoeWeights w = identity_router(spec);
  w.selection_bias = at::full({spec.n_routed}, -2.0);
  const Tensor logits = seeded_normal({32, spec.n_routed}, 1.0, kSeed, "negative");
  expect_routing(spec, w, logits);
  const Tensor groups = route(spec, w, logits).experts_nk.div(2, "floor");
  for (int64_t t = 0; t < 32; ++t) {
    std::set<int64_t> distinct;
    for (int64_t j = 0; j < 3; ++j) distinct.insert(groups[t][j].item<int64_t>());
    EXPECT_EQ(distinct.size(), 2u) << "token " << t;
  }
}

// The biased score used as the weight.
TEST(NoauxTc, TheBiasChoosesButDoesNotWeigh) {
  MoeSpec spec = grouped(Gating::kNoauxTc);
  spec.experts_per_token = 4;
  MoeWeights w = identity_router(spec);
  w.selection_bias = at::tensor({0.0, 0.0, 100.0, 100.0, 0.0, 0.0, 100.0, 100.0});
  const Tensor logits = seeded_normal({5, spec.n_routed}, 1.0, kSeed, "logits");
  const Routing got = route(spec, w, logits);
  EXPECT_TRUE(at::equal(got.experts_nk, at::tensor({2, 3, 6, 7}, at::kLong).expand({5, 4})));
  EXPECT_CLOSE(got.weights_nk, at::sigmoid(logits).gather(1, got.experts_nk), Tolerance::rounding(at::kFloat, 1, 2));
}

// routed_scaling_factor skipped.
TEST(NoauxTc, AlwaysScales) {
  MoeSpec spec = grouped(Gating::kNoauxTc);
  const MoeWeights w = identity_router(spec);
  const Tensor logits = seeded_normal({5, spec.n_routed}, 1.0, kSeed, "logits");
  for (const bool normalise : {true, false}) {
    spec.norm_topk_prob = normalise;
    spec.routed_scaling_factor = 1.0;
    const Tensor plain = route(spec, w, logits).weights_nk;
    spec.routed_scaling_factor = 2.827;
    EXPECT_CLOSE(route(spec, w, logits).weights_nk, plain * 2.827, Tolerance::rounding(at::kFloat, 1, 1));
  }
}

// Impossible group topologies are refused where configurations are.
TEST(NoauxTc, RefusesImpossibleGroups) {
  ModelConfig config = load_model_config("tiny");
  for (const auto& [routed, groups] : {std::pair<int64_t, int64_t>{8, 8}, {10, 4}}) {
    config.moe = grouped(Gating::kNoauxTc);
    config.moe->n_routed = routed;
    config.moe->n_group = groups;
    EXPECT_THROW(validate(config), ConfigError) << routed << " experts in " << groups << " groups";
  }
}

TEST(Route, NoTokens) {
  for (const Gating gating : {Gating::kGreedy, Gating::kGroupLimitedGreedy, Gating::kNoauxTc}) {
    const MoeSpec spec = grouped(gating);
    EXPECT_EQ(route(spec, identity_router(spec), at::zeros({0, spec.n_routed})).experts_nk.sizes(),
              (std::vector<int64_t>{0, 3}));
  }
}

// Logits come from exact fp32 values of bf16 inputs: scores that bf16 would round to equals stay apart.
TEST(Route, LogitsAreFp32) {
  MoeSpec spec = grouped(Gating::kGreedy);
  spec.experts_per_token = 1;
  MoeWeights w = identity_router(spec);
  w.w_router[5][0] = 0.001953125;  // 2^-9: lost beside 1 in bf16
  w.w_router[0][0] = 0.0;
  w.w_router = w.w_router.to(at::kBFloat16);
  const Tensor x = at::tensor({1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0}).to(at::kBFloat16).unsqueeze(0);
  EXPECT_EQ(route(spec, w, x).experts_nk.item<int64_t>(), 5);
}

}  // namespace
}  // namespace parlat
