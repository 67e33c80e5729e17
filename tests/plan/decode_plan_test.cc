#include "parlat/plan/decode_plan.h"

#include <gmock/gmock.h>

#include <cmath>

#include "parlat/base/error.h"
#include "tests/plan/machines.h"

namespace parlat {
namespace {

using ::testing::HasSubstr;

DecodePlanOptions options_of(const std::string& model, int64_t ranks, int64_t context) {
  return {.config = load_model_config(model), .ranks = ranks, .context = context};
}

LayoutPlan find(const std::vector<LayoutPlan>& plans, const std::string& label, int64_t groups) {
  for (const LayoutPlan& plan : plans) {
    if (plan.label == label && plan.groups == groups) return plan;
  }
  ADD_FAILURE() << "no " << label << " of " << groups;
  return {};
}

std::string refusal(const DecodePlanOptions& options) {
  try {
    plan_decode(round_machine(), options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(DecodePlan, CacheOfEveryLayout) {
  DecodePlanOptions options = options_of("v3", 8, 4096);
  options.attention_only = true;
  const std::vector<LayoutPlan> plans = plan_decode(round_machine(), options);
  ASSERT_EQ(plans.size(), 12U);
  struct Cell {
    const char* layout;
    int64_t groups;
    double elements;  // a token, a layer
  };
  for (const Cell& cell : {Cell{"mla", 1, 576}, Cell{"gla", 2, 320}, Cell{"gla", 8, 128}, Cell{"tpla", 2, 320},
                           Cell{"tpla", 4, 192}, Cell{"tpla", 8, 128}, Cell{"dcp", 1, 72}, Cell{"tpla-dcp", 2, 80},
                           Cell{"tpla-dcp", 4, 96}, Cell{"tpla-dcp", 8, 128}, Cell{"gqa", 8, 256}}) {
    const LayoutPlan plan = find(plans, cell.layout, cell.groups);
    SCOPED_TRACE(fmt::format("{} {}", cell.layout, cell.groups));
    EXPECT_EQ(plan.misfit, "");
    EXPECT_DOUBLE_EQ(plan.cache_bytes_per_token, cell.elements * 61 * 2);
    EXPECT_EQ(plan.largest_context, std::floor((80e9 - plan.weight_bytes) / plan.cache_bytes_per_token));
    EXPECT_EQ(plan.largest_batch, plan.largest_context / 4096);
    EXPECT_EQ(plan.steps.back().batch, plan.largest_batch);
  }
  options.ranks = 2;
  EXPECT_DOUBLE_EQ(find(plan_decode(round_machine(), options), "gqa", 8).cache_bytes_per_token, 1024 * 61 * 2);
}

// One rank, no query latent, no experts: everything written out.
TEST(DecodePlan, AStepWrittenOut) {
  DecodePlanOptions options = options_of("moonlight", 1, 1000);
  options.attention_only = true;
  options.batches = {4};
  const double layers = 27, weights = 2048 * 16 * 192 + 2048 * 576 + 16 * 512 * 256 + 16 * 128 * 2048;
  const LayoutPlan plan = find(plan_decode(round_machine(), options), "mla", 1);
  EXPECT_DOUBLE_EQ(plan.weight_bytes, weights * layers * 2);
  const DecodeStep& step = plan.steps.front();
  EXPECT_EQ(step.batch, 4);
  EXPECT_DOUBLE_EQ(step.weight_bytes, weights * layers * 2);
  EXPECT_DOUBLE_EQ(step.cache_bytes, 4.0 * 1000 * 576 * layers * 2);
  EXPECT_EQ(step.sent_bytes, 0);
  const double attention = 4.0 * 1000 * 2 * 16 * (2 * 512 + 64) * layers / 5e11;
  ASSERT_LT(step.cache_bytes / 1e11, attention);          // attention waits for computation,
  ASSERT_GT(weights * 2 / 1e11, 2 * 4 * weights / 1e12);  // products for memory
  EXPECT_NEAR(step.compute_s, step.weight_bytes / 1e11 + attention + layers * 1e-3, 1e-12);
  Machine quick = round_machine();
  quick.attention["bf16"].decode_rate = 1e13;
  EXPECT_NEAR(find(plan_decode(quick, options), "mla", 1).steps.front().compute_s,
              (step.weight_bytes + step.cache_bytes) / 1e11 + layers * 1e-3, 1e-12);
  EXPECT_DOUBLE_EQ(step.tokens_per_s(), 4 / step.compute_s);
}

TEST(DecodePlan, ExchangesAllReducesAndQueries) {
  DecodePlanOptions options = options_of("v3", 8, 4096);
  options.attention_only = true;
  options.batches = {1};
  const std::vector<LayoutPlan> plans = plan_decode(round_machine(), options);
  const double reduced = 2.0 * 7 / 8 * 7168 * 2 * 61;
  const DecodeStep mla = find(plans, "mla", 1).steps.front(), dcp = find(plans, "dcp", 1).steps.front();
  EXPECT_DOUBLE_EQ(mla.sent_bytes, reduced);
  EXPECT_NEAR(mla.exchange_s, reduced / 1e9 + 61 * 2 * 1e-5, 1e-12);
  Machine quick = round_machine();
  quick.within.decode_latency_s = 1e-6;
  EXPECT_NEAR(find(plan_decode(quick, options), "mla", 1).steps.front().exchange_s, reduced / 1e9 + 61 * 2 * 1e-6,
              1e-12);
  // docs/decoding.md: n h (w + R) (M - 1) gathered, n (H - h) (w + 1) scattered.
  EXPECT_DOUBLE_EQ(dcp.sent_bytes, reduced + (16.0 * 576 * 7 + 112 * 513) * 2 * 61);
}

// Each of two slices has half of w_uq and w_o, and half of the queries and outputs travels.
TEST(DecodePlan, SplitsProjectionsBetweenSlices) {
  DecodePlanOptions options = options_of("v3", 2, 4096);
  options.attention_only = true;
  options.batches = {1};
  const LayoutPlan whole = find(plan_decode(round_machine(), options), "tpla", 2);
  options.split_projections = true;
  const std::vector<LayoutPlan> plans = plan_decode(round_machine(), options);
  const LayoutPlan split = find(plans, "tpla", 2);
  const double half = 64.0 * (1536 * 192 + 128 * 7168) * 61 * 2;
  EXPECT_DOUBLE_EQ(whole.weight_bytes - split.weight_bytes, half);
  EXPECT_DOUBLE_EQ(split.weight_bytes, find(plans, "mla", 1).weight_bytes);
  const DecodeStep before = whole.steps.front(), after = split.steps.front();
  EXPECT_DOUBLE_EQ(after.sent_bytes - before.sent_bytes, 64.0 * (192 + 128) * 61 * 2);
  EXPECT_NEAR(after.exchange_s - before.exchange_s, 64.0 * (192 + 128) * 61 * 2 / 1e9 + 61 * 2 * 1e-5, 1e-12);
  // Every rank of gla has heads of its own, every rank of dcp the whole latent.
  EXPECT_DOUBLE_EQ(find(plans, "gla", 2).steps.front().sent_bytes, find(plans, "mla", 1).steps.front().sent_bytes);
}

// Two halves read weights twice and wait for every latency twice, but hide what overlaps.
TEST(DecodePlan, RunsTwoBatchesWhereThatIsFaster) {
  Machine machine = round_machine();
  machine.overlap = 0.5;
  machine.layer_overhead_s = 1e-9;
  DecodePlanOptions options = options_of("v3", 2, 16);
  options.attention_only = true;
  options.batches = {2, 4096};
  const auto steps = [&] { return find(plan_decode(machine, options), "mla", 1).steps; };
  const std::vector<DecodeStep> one = steps();
  options.two_batches = true;
  const std::vector<DecodeStep> two = steps();
  EXPECT_DOUBLE_EQ(two[0].weight_bytes, one[0].weight_bytes);  // reading them again takes longer than it hides
  EXPECT_DOUBLE_EQ(two[1].weight_bytes, 2 * one[1].weight_bytes);
  EXPECT_DOUBLE_EQ(two[1].sent_bytes, one[1].sent_bytes);
  EXPECT_NEAR(two[1].exchange_s, (one[1].exchange_s + 61 * 2 * 1e-5) / 2, 1e-9);
}

// Of 256 experts a batch of one visits 8; a large one all.
TEST(DecodePlan, ReadsTheExpertsThatABatchVisits) {
  Machine machine = round_machine();
  machine.memory_bytes = 1e15;
  DecodePlanOptions options = options_of("v3", 8, 128);
  options.batches = {1, 4096};
  const LayoutPlan plan = find(plan_decode(machine, options), "mla", 1);
  const double routed = 58.0 * 3 * 7168 * 2048 * 256 / 8 * 2;
  EXPECT_NEAR(plan.weight_bytes - plan.steps[0].weight_bytes, routed * (1 - 8.0 / 256), 1e-6 * routed);
  EXPECT_NEAR(plan.steps[1].weight_bytes, plan.weight_bytes, 1e-6 * routed);
  EXPECT_NEAR(plan.weight_bytes * 8, 671e9 * 2, 0.05 * 671e9 * 2);  // what every rank has of its own makes up the rest
  options.weight_element_bytes = 1;
  EXPECT_DOUBLE_EQ(find(plan_decode(machine, options), "mla", 1).weight_bytes, plan.weight_bytes / 2);
}

TEST(DecodePlan, SaysWhatDoesNotFit) {
  const std::vector<LayoutPlan> whole = plan_decode(round_machine(), options_of("v3", 2, 4096));
  EXPECT_THAT(find(whole, "mla", 1).misfit, HasSubstr("of weights in 80.0 GB"));
  EXPECT_THAT(find(whole, "tpla", 4).misfit, HasSubstr("expected groups that divide the 2 ranks, got 4"));
  DecodePlanOptions options = options_of("v3", 2, 4'000'000);
  options.attention_only = true;
  EXPECT_THAT(find(plan_decode(round_machine(), options), "mla", 1).misfit,
              HasSubstr("one sequence takes 281.1 GB in 67.7 GB"));
}

// A batch beyond the largest is not dropped.
TEST(DecodePlan, SaysWhichBatchesDoNotFit) {
  DecodePlanOptions options = options_of("v3", 2, 4096);
  options.attention_only = true;
  options.batches = {1, 100'000};
  const LayoutPlan plan = find(plan_decode(round_machine(), options), "mla", 1);
  ASSERT_EQ(plan.steps.size(), 3U);
  EXPECT_EQ(plan.steps[0].misfit, "");
  EXPECT_EQ(plan.steps[1].batch, 100'000);
  EXPECT_EQ(plan.steps[1].misfit, "the batch takes 28.8 TB in 67.7 GB");  // 4096 x 576 x 61 x 2 bytes each
  EXPECT_EQ(plan.steps[2].batch, plan.largest_batch);
  options.batches = {plan.largest_batch, plan.largest_batch + 1};
  const std::vector<DecodeStep> steps = find(plan_decode(round_machine(), options), "mla", 1).steps;
  EXPECT_EQ(steps[0].misfit, "");
  EXPECT_NE(steps[1].misfit, "");
}

TEST(DecodePlan, RefusesWhatCannotBe) {
  EXPECT_THAT(refusal(options_of("v3", 0, 4096)), HasSubstr("ranks: expected 1 to"));
  EXPECT_THAT(refusal(options_of("v3", 8, -5)), HasSubstr("context: expected 1 to"));
  EXPECT_THAT(refusal(options_of("v3", 16, 4096)), HasSubstr("ranks: expected at most 8 on each"));
  DecodePlanOptions options = options_of("v3", 8, 4096);
  options.nodes = 3;
  EXPECT_THAT(refusal(options), HasSubstr("nodes: expected a divisor"));
  options = options_of("v3", 8, 4096);
  options.batches = {0};
  EXPECT_THAT(refusal(options), HasSubstr("batch: expected 1 to"));
}

TEST(DecodePlan, LargeSizesDoNotWrapAround) {
  Machine machine = round_machine();
  machine.memory_bytes = 1e27;
  DecodePlanOptions options = options_of("v3", 100'000, int64_t{1} << 40);
  options.nodes = 12'500;
  options.batches = {int64_t{1} << 40};
  int placed = 0;
  for (const LayoutPlan& plan : plan_decode(machine, options)) {
    SCOPED_TRACE(plan.label);
    if (!plan.placed) {
      EXPECT_NE(plan.misfit, "");
      continue;
    }
    ++placed;
    EXPECT_GT(plan.largest_context, 0);
    for (const DecodeStep& step : plan.steps)
      EXPECT_TRUE(step.tokens_per_s() > 0 && std::isfinite(step.tokens_per_s()));
  }
  EXPECT_EQ(placed, 0);  // 128 heads are not for so many ranks
  options.ranks = 128;
  options.nodes = 16;
  const LayoutPlan dcp = find(plan_decode(machine, options), "dcp", 1);
  EXPECT_GT(dcp.largest_context, int64_t{1} << 40);
  EXPECT_GT(dcp.steps.back().tokens_per_s(), 0);
}

}  // namespace
}  // namespace parlat
