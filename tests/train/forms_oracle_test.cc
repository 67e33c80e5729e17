// Every training form computes what one rank computes in double precision, gradients included.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "parlat/base/error.h"
#include "tests/expect_close.h"
#include "tests/train/form_case.h"

namespace parlat {
namespace {

// Longest chain of products from x to out and back to a weight: query or latent (2), scores, values, output, and the
// same again backwards.
constexpr int64_t kDepth = 10;

Tolerance rounding(const FormCase& c) {
  const int64_t terms = std::max(c.spec.dims.d_model, c.x_BSD.size(0) * c.x_BSD.size(1));
  return Tolerance::rounding(c.x_BSD.scalar_type(), terms, kDepth);
}

void expect_same(const OracleResult& got, const OracleResult& want, Tolerance tolerance) {
  EXPECT_CLOSE(got.out, want.out, tolerance);
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, gradient] : want.gradients) {
    EXPECT_CLOSE(got.gradients.at(name), gradient, tolerance) << "gradient of " << name << ", seed " << kSeed;
  }
}

using FormAndRanks = std::tuple<TrainForm, int, Sharding>;

constexpr AttentionOptions kEager{.kernel = AttentionKernel::kEager};
constexpr AttentionOptions kSaveAll{.save = SavedKeys::kAll};

std::string form_and_ranks(const ::testing::TestParamInfo<FormAndRanks>& info) {
  const auto [form, ranks, sharding] = info.param;
  std::string text = fmt::format("{}_{}_{}", name(form), ranks, name(sharding));
  std::replace(text.begin(), text.end(), '-', '_');
  return text;
}

class EveryForm : public ::testing::TestWithParam<FormAndRanks> {
 protected:
  void matches_the_oracle(const FormCaseShape& shape) {
    const auto [form, ranks, sharding] = GetParam();
    const FormCase c = make_form_case(shape);
    const bool ring = passes_latents(form);
    if ((ranks > shape.n_heads && !ring) || (form == TrainForm::kLagaQ && !shape.d_q_latent)) {
      EXPECT_THROW(run_form(form, c, ranks, sharding), ConfigError);
      return;
    }
    const OracleResult want = oracle(c);
    expect_same(run_form(form, c, ranks, sharding), want, rounding(c));
    if (ring) {
      EXPECT_THROW(run_form(form, c, ranks, sharding, kEager), ConfigError);
      return;
    }
    if (ranks != 1 && ranks != 4) return;  // what is exchanged doesn't depend on the kernel
    expect_same(run_form(form, c, ranks, sharding, kEager), want, rounding(c));
    expect_same(run_form(form, c, ranks, sharding, kSaveAll), want, rounding(c));
  }
};

TEST_P(EveryForm, MatchesTheOracleWithSevenHeads) { matches_the_oracle({.n_heads = 7}); }
TEST_P(EveryForm, MatchesTheOracleWithSixteenHeads) { matches_the_oracle({.n_heads = 16, .packed = false}); }
TEST_P(EveryForm, MatchesTheOracleWithoutQueryLatent) { matches_the_oracle({.n_heads = 8, .d_q_latent = {}}); }
TEST_P(EveryForm, MatchesTheOracleWithoutCausalMask) { matches_the_oracle({.n_heads = 8, .causal = false}); }
TEST_P(EveryForm, MatchesTheOracleInBf16) { matches_the_oracle({.n_heads = 8, .dtype = at::kBFloat16}); }
TEST_P(EveryForm, MatchesTheOracleWithEmptyRanks) { matches_the_oracle({.n_heads = 8, .sequence = 3}); }

// The tolerance of bf16 is not so wide that a wrong result passes: a query of the wrong scale (576^-0.5 for 192^-0.5),
// one without its rope part, a token that is missing.
TEST_P(EveryForm, WrongResultsAreRefusedInBf16) {
  const auto [form, ranks, sharding] = GetParam();
  const FormCase c = make_form_case({.n_heads = 8, .dtype = at::kBFloat16});
  const OracleResult want = oracle(c);
  const auto refused = [&](const OracleResult& got, const std::string& what) {
    EXPECT_FALSE(compare(got.out, want.out, rounding(c)).close) << what;
    EXPECT_FALSE(compare(got.gradients.at("x"), want.gradients.at("x"), rounding(c)).close) << what;
  };
  FormCase wrong = c;
  wrong.weights.w_uq = c.weights.w_uq * std::sqrt(1.0 / 3.0);
  refused(run_form(form, wrong, ranks, sharding), "scale");
  wrong.weights.w_uq = c.weights.w_uq.clone();
  const int64_t d_nope = c.spec.dims.d_nope, d_rope = c.spec.dims.d_rope;
  wrong.weights.w_uq.view({8, d_nope + d_rope, -1}).narrow(1, d_nope, d_rope).zero_();
  refused(run_form(form, wrong, ranks, sharding), "rope");
  OracleResult missing = run_form(form, c, ranks, sharding);
  missing.out[1][17].zero_();
  missing.gradients.at("x")[0][28].zero_();
  refused(missing, "token");
}

// One token of one sequence: all that see it, on whatever rank, and no other sequence.
TEST_P(EveryForm, PoisonReachesThoseWhoSeeItOnEveryRank) {
  const auto [form, ranks, sharding] = GetParam();
  for (const double poison : {double{NAN}, double{INFINITY}}) {
    FormCase c = make_form_case({.n_heads = 8});
    c.x_BSD[0][11][0] = poison;  // of a document of tokens 5 to 28
    const OracleResult got = run_form(form, c, ranks, sharding);
    const Tensor& grad_x = got.gradients.at("x");
    for (const Tensor& seeing : {got.out[0].slice(0, 11), grad_x[0].slice(0, 11)})
      EXPECT_TRUE(seeing.isnan().all().item<bool>()) << poison;
    for (const Tensor& other : {got.out[1], grad_x[1]}) EXPECT_TRUE(other.isfinite().all().item<bool>()) << poison;
    for (const auto& [name, gradient] : got.gradients)
      EXPECT_TRUE(gradient.isnan().any().item<bool>()) << name << " " << poison;
  }
}

TEST_P(EveryForm, RepeatsItsBits) {
  const auto [form, ranks, sharding] = GetParam();
  const FormCase c = make_form_case({.n_heads = 8});
  const OracleResult once = run_form(form, c, ranks, sharding), again = run_form(form, c, ranks, sharding);
  EXPECT_TRUE(once.out.equal(again.out));
  for (const auto& [name, gradient] : once.gradients) EXPECT_TRUE(gradient.equal(again.gradients.at(name))) << name;
}

// arXiv 2607.17644, section 5: the output within 5.6e-6 of explicit's, the gradient of kv_b_proj within 7.7e-4.
TEST_P(EveryForm, StaysWithinThePapersBoundsOfExplicit) {
  const auto [form, ranks, sharding] = GetParam();
  const FormCase c = make_form_case({.n_heads = 16});
  const OracleResult got = run_form(form, c, ranks, sharding),
                     want = run_form(TrainForm::kExplicit, c, ranks, sharding);
  EXPECT_LE((got.out - want.out).abs().max().item<double>(), 5.6e-6);
  EXPECT_LE((got.gradients.at("w_ukv") - want.gradients.at("w_ukv")).abs().max().item<double>(), 7.7e-4);
}

INSTANTIATE_TEST_SUITE_P(Forms, EveryForm,
                         ::testing::Combine(::testing::ValuesIn(all_train_forms()), ::testing::Values(1, 2, 3, 4, 7, 8),
                                            ::testing::Values(Sharding::kContiguous, Sharding::kZigzag)),
                         form_and_ranks);

// Every way to group the ranks.
class EverySplit : public ::testing::TestWithParam<std::tuple<std::pair<int, int>, Sharding>> {
 protected:
  static void matches_the_oracle(const FormCaseShape& shape) {
    const auto [split, sharding] = GetParam();
    const auto [groups, size] = split;
    const FormCase c = make_form_case(shape);
    const AttentionOptions options{.ring_groups = groups};
    if (size > shape.n_heads) {
      EXPECT_THROW(run_form(TrainForm::kHybrid, c, groups * size, sharding, options), ConfigError);
      return;
    }
    expect_same(run_form(TrainForm::kHybrid, c, groups * size, sharding, options), oracle(c), rounding(c));
  }
};

TEST_P(EverySplit, MatchesTheOracleWithSevenHeads) { matches_the_oracle({.n_heads = 7}); }
TEST_P(EverySplit, MatchesTheOracleWithFewerHeadsThanRanks) { matches_the_oracle({.n_heads = 3, .packed = false}); }
TEST_P(EverySplit, MatchesTheOracleWithoutCausalMask) { matches_the_oracle({.n_heads = 8, .causal = false}); }
TEST_P(EverySplit, MatchesTheOracleInBf16) { matches_the_oracle({.n_heads = 8, .dtype = at::kBFloat16}); }
TEST_P(EverySplit, MatchesTheOracleWithEmptyRanks) { matches_the_oracle({.n_heads = 8, .sequence = 5}); }

std::string split_name(const ::testing::TestParamInfo<EverySplit::ParamType>& info) {
  const auto& [split, sharding] = info.param;
  return fmt::format("{}x{}_{}", split.first, split.second, name(sharding));
}

// Groups, and ranks of each.
const std::pair<int, int> kSplits[] = {{1, 1}, {1, 2}, {1, 3}, {2, 2}, {1, 4}, {3, 2},
                                       {2, 3}, {1, 7}, {4, 2}, {2, 4}, {1, 8}};
INSTANTIATE_TEST_SUITE_P(Hybrid, EverySplit,
                         ::testing::Combine(::testing::ValuesIn(kSplits),
                                            ::testing::Values(Sharding::kContiguous, Sharding::kZigzag)),
                         split_name);

// Every hop's latents are several blocks of the kernel, and the last block a partial one.
TEST(Ring, OfSeveralBlocksAHopMatchesTheOracle) {
  for (const bool packed : {false, true}) {
    const FormCase c = make_form_case({.n_heads = 2, .batch = 1, .sequence = 1300, .packed = packed});
    expect_same(run_form(TrainForm::kRing, c, 2, Sharding::kZigzag), oracle(c), rounding(c));
  }
  const FormCase c = make_form_case({.n_heads = 2, .batch = 1, .sequence = 1300, .packed = false});
  expect_same(run_form(TrainForm::kHybrid, c, 4, Sharding::kZigzag, {.ring_groups = 2}), oracle(c), rounding(c));
}

void expect_same_bits(const OracleResult& got, const OracleResult& want) {
  EXPECT_TRUE(got.out.equal(want.out));
  for (const auto& [name, gradient] : want.gradients) EXPECT_TRUE(got.gradients.at(name).equal(gradient)) << name;
}

TEST(Hybrid, OfGroupsOfOneRankIsRing) {
  const FormCase c = make_form_case({.n_heads = 8});
  expect_same_bits(run_form(TrainForm::kHybrid, c, 4, Sharding::kZigzag, {.ring_groups = 4}),
                   run_form(TrainForm::kRing, c, 4, Sharding::kZigzag));
}

TEST(Hybrid, OfOneGroupIsLaga) {
  const FormCase c = make_form_case({.n_heads = 8});
  expect_same_bits(run_form(TrainForm::kHybrid, c, 4, Sharding::kZigzag, {.ring_groups = 1}),
                   run_form(TrainForm::kLaga, c, 4, Sharding::kZigzag));
}

// arXiv 2607.17644, Proposition 1.
TEST(OneRank, LagaIsExplicitBitForBit) {
  const FormCase c = make_form_case({.n_heads = 16, .sequence = 64});
  const OracleResult laga = run_form(TrainForm::kLaga, c, 1, Sharding::kContiguous, kEager),
                     want = run_form(TrainForm::kExplicit, c, 1, Sharding::kContiguous, kEager);
  EXPECT_TRUE(laga.out.equal(want.out));
  for (const char* name : {"w_uq", "w_ukv", "w_o"})
    EXPECT_TRUE(laga.gradients.at(name).equal(want.gradients.at(name))) << name;
  for (const auto& [name, gradient] : want.gradients) {
    EXPECT_LE((laga.gradients.at(name) - gradient).abs().max().item<double>(), 2e-5) << name;
  }
}

}  // namespace
}  // namespace parlat
