// Products in drawn orders are the same sums but for rounding, drawn orders make twins part, and nothing else does.
#include "parlat/bench/nondeterminism_bench.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "parlat/base/error.h"
#include "parlat/base/spread.h"
#include "parlat/bench/shuffled_sums.h"
#include "parlat/kernels/gemm.h"
#include "parlat/tensor/compare.h"
#include "parlat/tensor/fill.h"
#include "tests/run_ranks.h"
#include "tests/train/small_model.h"

namespace parlat {
namespace {

constexpr int64_t kDepth = 100;

struct Product {
  Tensor x = seeded_normal({20, kDepth}, 1, 1, "x"), w = seeded_normal({30, kDepth}, 1, 1, "w");
  Tensor in_order(uint64_t seed) const {
    ShuffledSums sums(seed);
    const ShuffledSums::Scope scope(sums);
    return parlat::linear(x, w);
  }
};

TEST(ShuffledSums, DifferByRoundingAlone) {
  const Product product;
  const Tensor exact = at::matmul(product.x.to(at::kDouble), product.w.to(at::kDouble).t());
  const Comparison compared =
      compare(product.in_order(1).to(at::kDouble), exact, Tolerance::rounding(at::kFloat, kDepth, 1));
  EXPECT_TRUE(compared.close) << compared.text();
  EXPECT_TRUE(product.in_order(1).equal(product.in_order(1)));
  EXPECT_FALSE(product.in_order(1).equal(product.in_order(2)));
  EXPECT_TRUE(parlat::linear(product.x, product.w).equal(parlat::linear(product.x, product.w)));
}

// Sums of small integers are exact in every order.
TEST(ShuffledSums, KeepWhatIsAddedAndScaled) {
  ShuffledSums sums(1);
  for (const int64_t depth : {1, 2, 7, 8, 50}) {
    const Tensor a = seeded_integers({5, depth}, 9, 1, "a").to(at::kFloat);
    const Tensor b = seeded_integers({6, depth}, 9, 1, "b").to(at::kFloat).t();
    const Tensor c = seeded_integers({5, 12}, 9, 1, "c").to(at::kFloat).narrow(1, 3, 6);
    Tensor plain = c.clone(), shuffled = c.clone();
    at::addmm_out(plain, plain, a, b, /*beta=*/3, /*alpha=*/2);
    {
      const ShuffledSums::Scope scope(sums);
      at::addmm_out(shuffled, shuffled, a, b, /*beta=*/3, /*alpha=*/2);
    }
    EXPECT_TRUE(plain.equal(shuffled)) << depth;
  }
}

TEST(ShuffledSums, DrawAnewAndReachTheBackwardPass) {
  const Product product;
  const auto gradient = [&](bool shuffled_backward) {
    const Tensor w = product.w.clone().requires_grad_();
    const Tensor y = parlat::linear(product.x, w);
    ShuffledSums sums(1);
    std::optional<ShuffledSums::Scope> scope;
    if (shuffled_backward) scope.emplace(sums);
    y.square().sum().backward();
    return w.grad();
  };
  EXPECT_TRUE(gradient(false).equal(gradient(false)));
  EXPECT_FALSE(gradient(true).equal(gradient(false)));

  ShuffledSums sums(1);
  const ShuffledSums::Scope scope(sums);
  Tensor ahead;
  sums.ahead([&] { ahead = parlat::linear(product.x, product.w); });
  EXPECT_TRUE(parlat::linear(product.x, product.w).equal(ahead));
  EXPECT_FALSE(parlat::linear(product.x, product.w).equal(ahead));
}

NondeterminismOptions small_options() {
  NondeterminismOptions options;
  options.experts = small_model(/*experts=*/true);
  options.batch = 2;
  options.sequence = 64;
  options.steps = 24;
  options.learning_rate = 0.1;  // so steep that a difference grows fast, and flips come within few steps
  return options;
}

NondeterminismResult measure(const NondeterminismOptions& options) {
  return bench_nondeterminism(
      options, [](const auto& body) { run_ranks(2, body); }, [](const std::string&) {});
}

const NondeterminismResult& measured() {
  static const NondeterminismResult result = measure(small_options());
  return result;
}

TEST(NondeterminismBench, TwinsPartInDrawnOrdersAndInNoOther) {
  const NondeterminismOptions options = small_options();
  const NondeterminismResult& result = measured();
  EXPECT_TRUE(result.ok) << result.max_error << " of " << result.tolerance;
  ASSERT_EQ(result.runs.size(), 4);
  for (const TwinRun& run : result.runs) {
    ASSERT_EQ(run.steps.size(), options.steps);
    EXPECT_LT(run.steps.back().loss, run.steps.front().loss);
    if (run.shuffled) {
      EXPECT_GT(run.steps.front().output, 0) << run.model;
      EXPECT_LT(run.steps.front().output, 1e-5) << run.model;
      EXPECT_GT(run.last().weights, run.steps.front().output) << run.model;
      continue;
    }
    EXPECT_FALSE(run.first_flip) << run.model;
    for (const Apart& apart : run.steps) {
      EXPECT_EQ(apart.loss_difference, 0);
      EXPECT_EQ(apart.output, 0);
      EXPECT_EQ(apart.weights, 0);
      EXPECT_EQ(apart.flips, 0);
    }
  }
  // Equal runs but for the orders.
  EXPECT_NEAR(result.runs[1].steps[0].loss, result.runs[3].steps[0].loss, 1e-5);
}

TEST(NondeterminismBench, FindsTheFirstFlipAndItsJump) {
  const NondeterminismOptions options = small_options();
  const NondeterminismResult& result = measured();
  const TwinRun &dense = result.runs[0], &experts = result.runs[1];
  EXPECT_EQ(dense.model, "dense");
  EXPECT_FALSE(dense.first_flip);
  ASSERT_EQ(experts.model, "experts");
  ASSERT_TRUE(experts.first_flip);
  const Flip flip = *experts.first_flip;
  EXPECT_EQ(flip.layer, 1);
  EXPECT_LT(flip.sequence, options.batch);
  EXPECT_LT(flip.position, options.sequence);
  std::vector<double> before;
  for (int64_t step = 1; step <= flip.step; ++step) {
    EXPECT_EQ(experts.steps[step - 1].flips > 0, step == flip.step) << step;
    if (step < flip.step && step + 10 >= flip.step) before.push_back(experts.steps[step - 1].output);
  }
  ASSERT_GT(flip.step, 1);
  EXPECT_NEAR(experts.jump->output, experts.steps[flip.step - 1].output / spread_of(before).median, 1e-9);
  EXPECT_EQ(to_json(result)[1]["first_flip"]["step"], flip.step);
}

TEST(NondeterminismBench, ModelsAreAsWideAndOthersAreRefused) {
  const TwinModels models = twin_models(small_model(/*experts=*/true));
  EXPECT_EQ(models.dense.d_mlp, 16 * (2 + 1));
  EXPECT_EQ(models.experts.d_mlp, models.dense.d_mlp);
  EXPECT_FALSE(models.dense.moe);
  EXPECT_THROW(twin_models(models.dense), ConfigError);
  NondeterminismOptions options = small_options();
  options.dtype = at::kBFloat16;
  EXPECT_THROW(measure(options), ConfigError);
  options = small_options();
  options.experts.vocab_size = int64_t{1} << 40;
  EXPECT_THROW(measure(options), ConfigError);  // before anything that large is made
}

TEST(NondeterminismBench, DivergenceIsAnErrorThatNamesItsStep) {
  NondeterminismOptions options = small_options();
  options.learning_rate = 1e30;
  try {
    measure(options);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), 1);
    EXPECT_THAT(error.what(), testing::StartsWith("step 1: the dense twins diverged"));
  }
}

}  // namespace
}  // namespace parlat
