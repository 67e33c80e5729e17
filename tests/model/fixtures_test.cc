// Whole models against transformers: logits, loss and the gradient of every weight, of every fixture.
#include <gmock/gmock.h>

#include <map>
#include <mutex>

#include "parlat/model/transformer.h"
#include "tests/expect_close.h"
#include "tests/model/fixture.h"
#include "tests/model/local_attention.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

struct ModelResult {
  Tensor logits;
  double loss_sum = 0;
  std::map<std::string, Tensor> gradients;  // of the mean loss
};

// This rank's share of the batch; gradients are summands of sums over ranks.
ModelResult run_share(const Fixture& fixture, at::ScalarType dtype, Communicator& experts) {
  const MoeSpec moe = fixture.config.moe.value_or(MoeSpec{});
  const LoadedWeights loaded(fixture, even_share(moe.n_routed, experts.size(), experts.rank()), dtype);
  const Range batch = even_share(fixture.tokens().size(0), experts.size(), experts.rank());
  const Tensor tokens = fixture.tokens().narrow(0, batch.begin, batch.size());
  const Tensor targets = fixture.targets().narrow(0, batch.begin, batch.size());

  const LocalAttention attention;
  const Transformer model(fixture.config, loaded.weights, attention, experts);
  const Tensor hidden = model.forward(tokens, whole_sequences(fixture.config, batch.size(), tokens.size(1), dtype));
  const Tensor loss = token_loss_sum(model, hidden.flatten(0, 1), targets.flatten());
  (loss / fixture.targets().numel()).backward();

  ModelResult result{.logits = model.logits(hidden).detach(), .loss_sum = loss.item<double>(), .gradients = {}};
  for (const WeightRow& row : loaded.table) {
    if (row.trained) result.gradients[row.name] = row.tensor->grad();
  }
  return result;
}

// Products of at most 64 terms; a dozen of them in a row a layer forward, twice as many backward.
Tolerance rounding(const Fixture& fixture, at::ScalarType dtype) {
  return Tolerance::rounding(dtype, 64, 36 * fixture.config.n_layers);
}

// Worst relative error of a tensor, kept as a property of the test's record.
void record(const std::string& key, double error) {
  ::testing::Test::RecordProperty(key, fmt::format("{:.2e}", error));
}

double relative_error(const Tensor& got, const Tensor& want) { return compare(got, want, Tolerance{0.0}).relative; }

class EveryFixture : public ::testing::TestWithParam<std::tuple<std::string, at::ScalarType>> {};

TEST_P(EveryFixture, ComputesWhatTransformersComputes) {
  const auto& [name, dtype] = GetParam();
  const Fixture fixture(name);
  ModelResult got;
  run_ranks(1, [&, dtype = dtype](Communicator& comm) { got = run_share(fixture, dtype, comm); });

  const Tolerance tolerance = rounding(fixture, dtype);
  const Tensor logits = fixture.expected.tensor("logits");
  EXPECT_CLOSE(got.logits, logits, tolerance);
  const double loss = fixture.expected.tensor("loss").item<double>();
  EXPECT_NEAR(got.loss_sum / static_cast<double>(fixture.targets().numel()), loss, tolerance.relative_to_norm * loss);
  double worst = 0;
  size_t compared = 0;
  for (const auto& [key, entry] : fixture.expected.entries()) {
    if (!key.starts_with("gradient.")) continue;
    const std::string weight = key.substr(std::string("gradient.").size());
    ASSERT_EQ(got.gradients.count(weight), 1u) << weight;
    ASSERT_TRUE(got.gradients.at(weight).defined()) << weight;
    const Tensor want = fixture.expected.tensor(key);
    EXPECT_CLOSE(got.gradients.at(weight), want, tolerance) << weight;
    worst = std::max(worst, relative_error(got.gradients.at(weight), want));
    ++compared;
  }
  EXPECT_EQ(compared, got.gradients.size());
  record("logit_error", relative_error(got.logits, logits));
  record("gradient_error", worst);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, EveryFixture,
                         ::testing::Combine(::testing::ValuesIn(all_fixtures()),
                                            ::testing::Values(at::kFloat, at::kDouble)),
                         [](const auto& info) {
                           return fmt::format("{}_{}", std::get<0>(info.param), parlat::name(std::get<1>(info.param)));
                         });

// Sequences and experts on different ranks.
TEST(ExpertParallelModel, GivesTheGradientsOfOneRank) {
  for (const char* name : {"v2_grouped_no_q_latent", "v3_tied_no_q_latent"}) {
    const Fixture fixture(name);
    std::vector<ModelResult> by_rank(2);
    run_ranks(2, [&](Communicator& comm) { by_rank[comm.rank()] = run_share(fixture, at::kFloat, comm); });

    const Tolerance tolerance = rounding(fixture, at::kFloat);
    EXPECT_CLOSE(at::cat({by_rank[0].logits, by_rank[1].logits}), fixture.expected.tensor("logits"), tolerance) << name;
    for (const auto& [key, entry] : fixture.expected.entries()) {
      if (!key.starts_with("gradient.")) continue;
      const std::string weight = key.substr(std::string("gradient.").size());
      Tensor sum = at::zeros(entry.shape, at::kDouble);
      for (const ModelResult& rank : by_rank) {
        if (rank.gradients.contains(weight)) sum.add_(rank.gradients.at(weight));
      }
      EXPECT_CLOSE(sum, fixture.expected.tensor(key), tolerance) << name << ": " << weight;
    }
  }
}

}  // namespace
}  // namespace parlat
