// What surrounds attention and experts: shards of tokens, embedding, observers, the blockwise loss.
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/model/transformer.h"
#include "parlat/tensor/fill.h"
#include "parlat/tensor/memory_meter.h"
#include "parlat/weights/weight_table.h"
#include "tests/expect_close.h"
#include "tests/model/local_attention.h"
#include "tests/run_ranks.h"
#include "tests/shard_indices.h"

namespace parlat {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kSeed = 3;

// A model of nothing but embedding, final norm and head, unless layers are asked for.
ModelConfig small_config(int64_t vocab_size, int64_t d_model, int64_t n_layers = 0) {
  ModelConfig config;
  config.name = "small";
  config.model_type = "deepseek_v3";
  config.mla.dims = {
      .d_model = d_model, .n_heads = 2, .d_nope = 4, .d_rope = 4, .d_v = 4, .d_latent = 8, .d_q_latent = {}};
  config.n_layers = n_layers;
  config.vocab_size = vocab_size;
  config.d_mlp = 2 * d_model;
  config.initializer_range = 0.2;
  return config;
}

struct SmallModel {
  ModelConfig config;
  ModelWeights weights;
  LocalAttention attention;
  SmallModel(ModelConfig c, at::ScalarType dtype) : config(std::move(c)) {
    const auto table = weight_table(config, {}, weights);
    initialize(table, config, kSeed, dtype);
    for (const WeightRow& row : table) row.tensor->requires_grad_();
  }
  Transformer transformer(Communicator& comm) const { return {config, weights, attention, comm}; }
};

template <typename Body>
std::string config_error(const Body& body) {
  try {
    body();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(LocalTokens, AreTheRunsOfTheRank) {
  const Tensor x = at::arange(2 * 13).view({2, 13});
  for (const int ranks : {1, 2, 3, 8}) {
    for (const auto& shards : {SequenceShards::contiguous(13, ranks), SequenceShards::zigzag(13, ranks)}) {
      for (int r = 0; r < ranks; ++r) {
        const Tensor index = shard_indices(shards, r);
        const Tensor local = local_tokens(x, shards, r);
        EXPECT_TRUE(at::equal(local, x.index_select(1, index))) << ranks << " ranks, rank " << r;
        EXPECT_TRUE(local.is_contiguous());
      }
    }
  }
}

TEST(LocalTokens, CarryThePositionsOfTheirDocuments) {
  const ModelConfig config = small_config(16, 8);
  const Documents documents = Documents::packed(12, {{12}, {5, 7}});
  const SequenceShards shards = SequenceShards::zigzag(12, 2);
  const RopeTable whole = rope_table(config.mla.rope, 4, documents.positions());
  const TokenShard shard = make_token_shard(config.mla, documents, shards, 1);
  EXPECT_TRUE(at::equal(shard.rope.cos_BSr, local_tokens(whole.cos_BSr, shards, 1)));
  EXPECT_TRUE(at::equal(shard.rope.sin_BSr, local_tokens(whole.sin_BSr, shards, 1)));
  EXPECT_EQ(shard.visible.row(1, 7), (Range{5, 8}));
}

TEST(LocalTokens, RefusesShardsOfAnotherSequence) {
  const ModelConfig config = small_config(16, 8);
  const auto make = [&] {
    make_token_shard(config.mla, Documents::whole(1, 12), SequenceShards::contiguous(13, 2), 0);
  };
  EXPECT_THAT(config_error(make), ::testing::AllOf(HasSubstr("12"), HasSubstr("13")));
}

TEST(Transformer, ObserversSeeEveryStageInOrder) {
  const SmallModel model(small_config(16, 8, /*n_layers=*/2), at::kFloat);
  std::vector<std::string> stages;
  run_ranks(1, [&](Communicator& comm) {
    const Tensor tokens = seeded_integers({2, 5}, 16, kSeed, "tokens");
    model.transformer(comm).forward(tokens, whole_sequences(model.config, 2, 5),
                                    [&](const std::string& stage, const Tensor& activation) {
                                      stages.push_back(stage);
                                      EXPECT_EQ(activation.sizes(), (std::vector<int64_t>{2, 5, 8}));
                                      EXPECT_FALSE(activation.requires_grad());
                                    });
  });
  EXPECT_THAT(stages, ElementsAre("embedding", "layer 0 attention", "layer 0 mlp", "layer 1 attention", "layer 1 mlp",
                                  "final norm"));
}

TEST(Transformer, RefusesTokensOutsideTheVocabulary) {
  const SmallModel model(small_config(16, 8), at::kFloat);
  run_ranks(1, [&](Communicator& comm) {
    const Tensor tokens = at::zeros({2, 5}, at::kLong);
    tokens[1][3] = 16;
    const auto run = [&] { model.transformer(comm).forward(tokens, whole_sequences(model.config, 2, 5)); };
    EXPECT_THAT(config_error(run), HasSubstr("token 3 of sequence 1: expected 0 to 15, got 16"));
  });
}

// A frequent token's row: 4096 summands of 1 after 256 of which bf16 stands still.
TEST(Transformer, EmbeddingGradientsAreSummedInFp32) {
  const SmallModel model(small_config(16, 8), at::kBFloat16);
  run_ranks(1, [&](Communicator& comm) {
    Tensor table = model.weights.embedding;
    const auto row_gradient = [&](int64_t n) {
      table.mutable_grad() = Tensor();
      model.transformer(comm)
          .forward(at::zeros({1, n}, at::kLong), whole_sequences(model.config, 1, n))
          .sum()
          .backward();
      return table.grad()[0].to(at::kFloat);
    };
    EXPECT_CLOSE(row_gradient(4096), row_gradient(1) * 4096, Tolerance::rounding(at::kBFloat16, 4096, 1));
  });
}

// Beside the sum no gradient of the table exists, nor is one rounded: 257 equal summands are exact in fp32, not in
// bf16.
TEST(Transformer, EmbeddingGradientsAreAddedToTheirSum) {
  constexpr int64_t kVocabSize = 1 << 14;
  const SmallModel model(small_config(kVocabSize, 8), at::kBFloat16);
  run_ranks(1, [&](Communicator& comm) {
    MemoryMeter meter;
    const MemoryMeter::Scope scope(meter);
    const Tensor table = model.weights.embedding, sum = at::zeros(table.sizes());
    sum_gradients(table, sum);
    const auto add_rows = [&](int64_t n) {
      const Tensor hidden =
          model.transformer(comm).forward(at::full({1, n}, 3), whole_sequences(model.config, 1, n)).sum();
      meter.reset();
      hidden.backward();
      EXPECT_LT(meter.peak_bytes(), table.numel() * 2);
    };
    add_rows(1);
    const Tensor one = sum.clone();
    add_rows(257);
    EXPECT_TRUE(sum[3].equal(one[3] * 258));
    EXPECT_GT(one[3].abs().min().item<double>(), 0);
    EXPECT_EQ((sum != 0).sum().item<int64_t>(), 8);
    sum_gradients(table, {});
  });
}

struct LossCase {
  Tensor hidden, targets;
};

LossCase loss_case(int64_t n_tokens, const ModelConfig& config, at::ScalarType dtype) {
  const Tensor targets = seeded_integers({n_tokens}, config.vocab_size, kSeed, "targets");
  targets.slice(0, 1, n_tokens, 5).fill_(kIgnoredTarget);
  const Tensor hidden = seeded_normal({n_tokens, config.mla.dims.d_model}, 1.0, kSeed, "hidden", dtype);
  return {hidden.requires_grad_(), targets};
}

// Three blocks of 64 tokens and a rest.
TEST(TokenLoss, EqualsCrossEntropyAcrossBlocks) {
  const ModelConfig config = small_config(70000, 4);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const SmallModel model(config, dtype);
    const LossCase c = loss_case(200, config, dtype);
    run_ranks(1, [&](Communicator& comm) {
      const Tensor loss = token_loss_sum(model.transformer(comm), c.hidden, c.targets);
      EXPECT_EQ(loss.scalar_type(), dtype);
      (loss * 0.25).backward();

      const Tensor hidden = c.hidden.detach().to(at::kDouble).requires_grad_();
      const Tensor head = model.weights.head.detach().to(at::kDouble).requires_grad_();
      const Tensor want = at::cross_entropy_loss(at::linear(hidden, head), c.targets, {}, at::Reduction::Sum);
      (want * 0.25).backward();
      const Tolerance rounding = Tolerance::rounding(dtype, 70000, 3);
      EXPECT_CLOSE(loss, want, rounding);
      EXPECT_CLOSE(c.hidden.grad(), hidden.grad(), rounding);
      EXPECT_CLOSE(model.weights.head.grad(), head.grad(), rounding);
    });
  }
}

TEST(TokenLoss, LogitsOfAllTokensNeverExistTogether) {
  const ModelConfig config = small_config(70000, 4);
  const SmallModel model(config, at::kFloat);
  const LossCase c = loss_case(512, config, at::kFloat);
  run_ranks(1, [&](Communicator& comm) {
    MemoryMeter meter;
    const MemoryMeter::Scope scope(meter);
    token_loss_sum(model.transformer(comm), c.hidden, c.targets).backward();
    EXPECT_LT(meter.peak_bytes(), 512 * 70000 * 4 / 4);
  });
}

TEST(TokenLoss, IgnoredTokensDoNotCountWhateverTheyHold) {
  const ModelConfig config = small_config(16, 4);
  const SmallModel model(config, at::kFloat);
  LossCase c = loss_case(10, config, at::kFloat);
  run_ranks(1, [&](Communicator& comm) {
    c.targets.fill_(kIgnoredTarget);
    const Tensor loss = token_loss_sum(model.transformer(comm), c.hidden, c.targets);
    loss.backward();
    EXPECT_EQ(loss.item<float>(), 0.0f);
    EXPECT_EQ(c.hidden.grad().count_nonzero().item<int64_t>(), 0);
    EXPECT_EQ(model.weights.head.grad().count_nonzero().item<int64_t>(), 0);
  });
}

// A rank without tokens: 0, and gradients of 0 for every weight, like any other rank's.
TEST(TokenLoss, EmptyShardsReachEveryWeight) {
  const SmallModel model(small_config(16, 8, /*n_layers=*/1), at::kFloat);
  run_ranks(1, [&](Communicator& comm) {
    const Transformer transformer = model.transformer(comm);
    const Tensor none = at::zeros({2, 0}, at::kLong);
    const Tensor hidden = transformer.forward(none, whole_sequences(model.config, 2, 0));
    const Tensor loss = token_loss_sum(transformer, hidden.flatten(0, 1), none.flatten());
    EXPECT_EQ(loss.item<float>(), 0.0f);
    loss.backward();
    const LayerWeights& layer = model.weights.layers[0];
    for (const Tensor& weight : {model.weights.embedding, model.weights.head, layer.mla.w_o, layer.mla.w_dkv,
                                 layer.mlp->w_down, layer.mlp_norm}) {
      ASSERT_TRUE(weight.grad().defined());
      EXPECT_EQ(weight.grad().count_nonzero().item<int64_t>(), 0);
    }
  });
}

TEST(TokenLoss, RefusesTargetsOutsideTheVocabulary) {
  const ModelConfig config = small_config(16, 4);
  const SmallModel model(config, at::kFloat);
  const LossCase c = loss_case(10, config, at::kFloat);
  run_ranks(1, [&](Communicator& comm) {
    for (const int64_t bad : {16, -1}) {
      const Tensor targets = c.targets.clone();
      targets[7] = bad;
      const auto run = [&] { token_loss_sum(model.transformer(comm), c.hidden, targets); };
      EXPECT_THAT(config_error(run),
                  HasSubstr(fmt::format("target 7: expected 0 to 15 or -100 (ignored), got {}", bad)));
    }
  });
}

}  // namespace
}  // namespace parlat
