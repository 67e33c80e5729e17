// What broke other systems when a whole model is trained over ranks: masks that differ between ranks, meshes of data
// and sequence ranks, experts on other ranks. The loss is the mean over the unmasked tokens of all ranks; gradients are
// sums.
#include <gmock/gmock.h>

#include <map>
#include <mutex>

#include "parlat/model/transformer.h"
#include "parlat/tensor/fill.h"
#include "parlat/train/forms.h"
#include "parlat/weights/weight_table.h"
#include "tests/expect_close.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

constexpr uint64_t kSeed = 7;

ModelConfig small_model(bool experts) {
  ModelConfig config;
  config.name = "small";
  config.model_type = "deepseek_v3";
  config.mla.dims = {.d_model = 32, .n_heads = 4, .d_nope = 8, .d_rope = 4, .d_v = 8, .d_latent = 16, .d_q_latent = 24};
  config.n_layers = 2;
  config.vocab_size = 61;
  config.d_mlp = 48;
  config.initializer_range = 0.2;
  if (experts) {
    config.moe = MoeSpec{.n_routed = 8,
                         .n_shared = 1,
                         .experts_per_token = 2,
                         .d_expert = 16,
                         .first_dense = 1,
                         .gating = Gating::kNoauxTc,
                         .n_group = 2,
                         .topk_group = 1,
                         .norm_topk_prob = true,
                         .routed_scaling_factor = 2.5};
  }
  return config;
}

struct ModelCase {
  ModelConfig config;
  Tensor tokens_BS, targets_BS;
};

ModelCase make_model_case(bool experts = false) {
  const ModelConfig config = small_model(experts);
  return {config, seeded_integers({2, 16}, config.vocab_size, kSeed, "tokens"),
          seeded_integers({2, 16}, config.vocab_size, kSeed, "targets")};
}

struct ModelResult {
  double loss = 0;
  std::map<std::string, Tensor> gradients;
};

// One step on data x sequence ranks, experts over groups of `expert` ranks: the mean loss, and every gradient summed
// over the ranks that hold the weight.
ModelResult run_model(const ModelCase& c, const ParallelSpec& spec) {
  ModelResult result;
  std::vector<std::map<std::string, Tensor>> by_rank(spec.ranks());
  std::mutex mutex;
  run_ranks(static_cast<int>(spec.ranks()), [&](Communicator& world) {
    const auto sequence = world.split(static_cast<int>(world.rank() / spec.sequence));
    const auto experts = world.split(static_cast<int>(world.rank() / spec.expert));
    ModelWeights weights;
    const int64_t n_experts = c.config.moe ? c.config.moe->n_routed : 0;
    const auto table = weight_table(c.config, even_share(n_experts, experts->size(), experts->rank()), weights);
    initialize(table, c.config, kSeed, at::kFloat);
    for (const WeightRow& row : table) row.tensor->requires_grad_(row.trained);

    const Range batch = even_share(c.tokens_BS.size(0), spec.data, world.rank() / spec.sequence);
    const Tensor tokens = c.tokens_BS.narrow(0, batch.begin, batch.size());
    const Tensor targets = c.targets_BS.narrow(0, batch.begin, batch.size());
    const SequenceShards shards = SequenceShards::contiguous(tokens.size(1), sequence->size());
    const TokenShard shard =
        make_token_shard(c.config.mla, Documents::whole(batch.size(), tokens.size(1)), shards, sequence->rank());
    const auto attention = make_attention(spec.form, *sequence, c.config.mla.dims.n_heads);
    const Transformer model(c.config, weights, *attention, *experts);
    const Tensor hidden = model.forward(local_tokens(tokens, shards, sequence->rank()), shard);
    const Tensor local_targets = local_tokens(targets, shards, sequence->rank()).reshape({-1});
    const double count = world.sum_over_ranks((local_targets != kIgnoredTarget).sum().item<double>(), "count");
    const Tensor loss = token_loss_sum(model, hidden.reshape({-1, hidden.size(-1)}), local_targets) / count;
    loss.backward();
    const double mean = world.sum_over_ranks(loss.item<double>(), "loss");

    const std::lock_guard lock(mutex);
    result.loss = mean;
    for (const WeightRow& row : table) {
      if (row.tensor->grad().defined()) by_rank[world.rank()][row.name] = row.tensor->grad().to(at::kDouble);
    }
  });
  for (const auto& gradients : by_rank) {
    for (const auto& [name, gradient] : gradients) {
      Tensor& sum = result.gradients[name];
      sum = sum.defined() ? sum + gradient : gradient;
    }
  }
  return result;
}

void expect_same(const ModelResult& got, const ModelResult& want) {
  const Tolerance rounding = Tolerance::rounding(at::kFloat, 64, 24);  // two layers, forwards and backwards
  ASSERT_TRUE(std::isfinite(got.loss));
  EXPECT_NEAR(got.loss, want.loss, rounding.relative_to_norm * want.loss);
  for (const auto& [name, gradient] : want.gradients) {
    ASSERT_EQ(got.gradients.count(name), 1u) << name;
    EXPECT_CLOSE(got.gradients.at(name), gradient, rounding) << name;
  }
}

class ModelCases : public ::testing::TestWithParam<TrainForm> {
 protected:
  static ParallelSpec split(int64_t data, int64_t sequence, int64_t expert = 1) {
    return {.data = data, .sequence = sequence, .expert = expert, .form = GetParam()};
  }
};

// A gradient scaled by 1/P because each rank averaged its own tokens.
TEST_P(ModelCases, OneUnmaskedToken) {
  ModelCase c = make_model_case();
  const Tensor only = c.targets_BS[1][9].clone();
  c.targets_BS.fill_(kIgnoredTarget);
  c.targets_BS[1][9] = only;
  const ModelResult want = run_model(c, split(1, 1));
  expect_same(run_model(c, split(1, 2)), want);
  expect_same(run_model(c, split(1, 4)), want);
  expect_same(run_model(c, split(2, 2)), want);
}

// Tokens counted over the data-parallel ranks only.
TEST_P(ModelCases, DataBySequenceMesh) {
  ModelCase c = make_model_case();
  c.targets_BS[0].narrow(0, 3, 10).fill_(kIgnoredTarget);
  const ModelResult want = run_model(c, split(1, 1));
  for (const auto& [data, sequence] : {std::pair<int64_t, int64_t>{2, 1}, {2, 2}, {1, 4}, {2, 4}}) {
    SCOPED_TRACE(fmt::format("data {} sequence {}", data, sequence));
    expect_same(run_model(c, split(data, sequence)), want);
  }
}

// A rank without a valid label.
TEST_P(ModelCases, AllTargetsOnOneRank) {
  ModelCase c = make_model_case();
  c.targets_BS.narrow(1, 0, 8).fill_(kIgnoredTarget);
  expect_same(run_model(c, split(1, 2)), run_model(c, split(1, 1)));
}

TEST_P(ModelCases, ExpertParallelismComposes) {
  const ModelCase c = make_model_case(/*experts=*/true);
  const ModelResult want = run_model(c, split(1, 1));
  for (const auto& [data, sequence, expert] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 2, 2}, {1, 4, 2}, {2, 2, 4}, {1, 3, 3}}) {
    SCOPED_TRACE(fmt::format("data {} sequence {} expert {}", data, sequence, expert));
    expect_same(run_model(c, split(data, sequence, expert)), want);
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, ModelCases, ::testing::ValuesIn(all_train_forms()),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace parlat
