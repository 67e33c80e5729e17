// What broke other systems under sequence parallelism, on one attention layer: a small input that shows each.
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "tests/expect_close.h"
#include "tests/form_name.h"
#include "tests/train/form_case.h"

namespace parlat {
namespace {

using ::testing::HasSubstr;

class Cases : public ::testing::TestWithParam<TrainForm> {};

Tolerance rounding() { return Tolerance::rounding(at::kFloat, 64, 10); }

// Real keys dropped, zero rows, a different result on the second run.
TEST_P(Cases, TailPaddingChangesNothing) {
  const FormCase plain = make_form_case({.n_heads = 8, .batch = 1, .sequence = 13, .packed = false});
  FormCase padded = plain;
  padded.x_BSD = at::constant_pad_nd(plain.x_BSD, {0, 0, 0, 3});
  padded.grad_out_BSD = at::constant_pad_nd(plain.grad_out_BSD, {0, 0, 0, 3});
  padded.documents = Documents::packed(16, {{13, 3}});
  const OracleResult want = run_form(GetParam(), plain, 1);
  const OracleResult got = run_form(GetParam(), padded, 4), again = run_form(GetParam(), padded, 4);
  EXPECT_CLOSE(got.out.narrow(1, 0, 13), want.out, rounding());
  for (const auto& [name, gradient] : want.gradients) {
    const Tensor& padded_gradient = got.gradients.at(name);
    EXPECT_CLOSE(name == "x" ? padded_gradient.narrow(1, 0, 13) : padded_gradient, gradient, rounding()) << name;
    EXPECT_TRUE(padded_gradient.equal(again.gradients.at(name))) << name;
  }
}

// Gradients too large or too small by the number of ranks.
TEST_P(Cases, GradientNormDoesNotDependOnRanks) {
  const FormCase c = make_form_case({.n_heads = 8});
  const OracleResult one = run_form(GetParam(), c, 1), four = run_form(GetParam(), c, 4);
  for (const auto& [name, gradient] : one.gradients) {
    const double ratio = (four.gradients.at(name).norm() / gradient.norm()).item<double>();
    EXPECT_NEAR(ratio, 1.0, rounding().relative_to_norm) << name;
  }
}

// A head count that was stored once for the whole process.
TEST_P(Cases, TwoModelsOfDifferentHeadsInOneProcess) {
  for (const int64_t n_heads : {7, 12, 7}) {
    const FormCase c = make_form_case({.n_heads = n_heads});
    EXPECT_CLOSE(run_form(GetParam(), c, 4).out, oracle(c).out, rounding()) << n_heads << " heads";
  }
}

// Attention that is silently local to the shard.
TEST_P(Cases, TokensOfOneRankReachTheNext) {
  const FormCase c = make_form_case({.n_heads = 8, .batch = 1, .sequence = 16, .packed = false});
  FormCase perturbed = c;
  perturbed.x_BSD = c.x_BSD.clone();
  constexpr int64_t kToken = 5;  // on rank 0 of 2
  perturbed.x_BSD.select(1, kToken) += 1;
  const Tensor moved = (run_form(GetParam(), perturbed, 2).out - run_form(GetParam(), c, 2).out).abs().amax(-1)[0];
  for (int64_t token = 0; token < 16; ++token) {
    const double by = moved[token].item<double>();
    if (token < kToken) {
      EXPECT_EQ(by, 0) << "token " << token << " sees the future";
    } else {
      EXPECT_GT(by, 1e-4) << "token " << token << " does not see token " << kToken;
    }
  }
}

// Sequences that the ranks don't divide, fewer tokens than ranks, an empty sequence.
TEST_P(Cases, AnySequenceLength) {
  for (const auto& [sequence, ranks] : {std::pair<int64_t, int>{29, 4}, {29, 7}, {3, 4}, {1, 8}, {0, 2}}) {
    const FormCase c = make_form_case({.n_heads = 8, .sequence = sequence});
    const OracleResult got = run_form(GetParam(), c, ranks), want = oracle(c);
    EXPECT_CLOSE(got.out, want.out, rounding()) << sequence << " tokens on " << ranks << " ranks";
    EXPECT_CLOSE(got.gradients.at("w_ukv"), want.gradients.at("w_ukv"), rounding());
  }
}

// Balanced sharding with and without a causal mask: the order of tokens is the same.
TEST_P(Cases, ShardingDoesNotChangeTheResult) {
  for (const bool causal : {true, false}) {
    const FormCase c = make_form_case({.n_heads = 8, .causal = causal});
    const OracleResult contiguous = run_form(GetParam(), c, 4, Sharding::kContiguous);
    const OracleResult zigzag = run_form(GetParam(), c, 4, Sharding::kZigzag);
    EXPECT_CLOSE(zigzag.out, contiguous.out, rounding()) << "causal " << causal;
    for (const auto& [name, gradient] : contiguous.gradients) {
      EXPECT_CLOSE(zigzag.gradients.at(name), gradient, rounding()) << name;
    }
  }
}

// More ranks than heads: forms that split heads say why they can't.
TEST_P(Cases, MoreRanksThanHeadsIsRefusedWithTheReason) {
  if (passes_latents(GetParam())) return;  // forms_oracle_test.cc runs them on more ranks
  const FormCase c = make_form_case({.n_heads = 3});
  try {
    run_form(GetParam(), c, 4);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr(fmt::format("form {}: expected at most 3 sequence ranks", name(GetParam()))));
  }
}

TEST_P(Cases, WrongShapesAreNamed) {
  FormCase c = make_form_case({.n_heads = 8});
  c.x_BSD = c.x_BSD.narrow(2, 0, 40).contiguous();
  try {
    run_form(GetParam(), c, 1);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "x: expected shape [2, 29, 48], got [2, 29, 40]");
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, Cases, ::testing::ValuesIn(all_train_forms()),
                         [](const auto& info) { return test_name(info.param); });

// Output and gradient of x of layers in several forms, each beside an explicit one on x, on so many ranks.
OracleResult interleaved(const FormCase& c, int ranks) {
  OracleResult result{.out = at::zeros_like(c.x_BSD), .gradients = {{"x", at::zeros_like(c.x_BSD)}}};
  std::mutex mutex;
  run_ranks(ranks, [&](Communicator& comm) {
    const SequenceShards shards = SequenceShards::zigzag(c.x_BSD.size(1), comm.size());
    const TokenShard tokens = make_token_shard(c.spec, c.documents, shards, comm.rank());
    const MlaWeights w = trainable_copy(c.weights);
    const Tensor x = local_tokens(c.x_BSD, shards, comm.rank()).clone().requires_grad_();
    Tensor y = x;
    for (const TrainForm form : {TrainForm::kLaga, TrainForm::kExplicit, TrainForm::kRing, TrainForm::kAbsorbed,
                                 TrainForm::kLagaQ, TrainForm::kHybrid}) {
      y = y + make_attention(form, comm, c.spec.dims)->forward(w, y, tokens) +
          make_attention(TrainForm::kExplicit, comm, c.spec.dims)->forward(w, x, tokens);
    }
    y.backward(local_tokens(c.grad_out_BSD, shards, comm.rank()));
    const std::lock_guard lock(mutex);
    const Tensor index = shard_indices(shards, comm.rank());
    result.out.index_copy_(1, index, y.detach());
    result.gradients["x"].index_copy_(1, index, x.grad());
  });
  return result;
}

// Asynchronous collectives of two layers under way at once.
TEST(Interleaved, FormsInOneStepComputeWhatOneRankDoes) {
  const FormCase c = make_form_case({.n_heads = 8});
  const Tolerance tolerance = Tolerance::rounding(at::kFloat, 64, 6 * 10);  // six layers, one after the other
  const OracleResult want = interleaved(c, 1);
  for (const int ranks : {2, 4}) {
    const OracleResult got = interleaved(c, ranks);
    EXPECT_CLOSE(got.out, want.out, tolerance);
    EXPECT_CLOSE(got.gradients.at("x"), want.gradients.at("x"), tolerance);
  }
}

}  // namespace
}  // namespace parlat
