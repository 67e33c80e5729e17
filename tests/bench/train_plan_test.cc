// Predicted peaks against those of the dry run, which allocates what the forms allocate.
#include "parlat/plan/train_plan.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "parlat/bench/attention_bench.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

void expect_peaks(const MlaSpec& spec, int64_t sequence, int ranks) {
  AttentionBenchOptions bench;
  bench.spec = spec;
  bench.sequences = {sequence};
  bench.forms = possible_train_forms(spec.dims.d_q_latent.has_value());
  if (ranks == 2) std::erase(bench.forms, TrainForm::kHybrid);  // no groups of several ranks
  bench.dtype = at::kBFloat16;
  bench.dry_run = true;
  const auto rows = bench_attention(bench, [&](const auto& body) { run_ranks(ranks, body); });
  const TrainPlan plan =
      plan_train(load_machine("h800x8-roce"), {.dims = spec.dims, .ranks = ranks, .sequence = sequence});
  for (const AttentionBenchRow& row : rows) {
    const auto same = std::find_if(plan.forms.begin(), plan.forms.end(), [&](const FormPlan& form) {
      return form.form == row.form && form.costs.forward.total() == row.sent_forward.total();
    });
    SCOPED_TRACE(fmt::format("{}, {} tokens, {} ranks", name(row.form), sequence, ranks));
    ASSERT_NE(same, plan.forms.end());
    const double ratio = static_cast<double>(same->peak_bytes) / static_cast<double>(row.peak_activation_bytes);
    EXPECT_LT(ratio, 1.02);
    EXPECT_GT(ratio, 0.65);
  }
}

TEST(TrainPlanPeak, IsALittleLessThanThatOfTheDryRun) {
  for (const int ranks : {2, 8}) {
    for (const int64_t sequence : {8192, 65536}) expect_peaks(load_model_config("v3").mla, sequence, ranks);
  }
}

TEST(TrainPlanPeak, HoldsWithoutAQueryLatent) {
  MlaSpec spec = load_model_config("v3").mla;
  spec.dims.d_q_latent = {};
  for (const int ranks : {2, 8}) {
    for (const int64_t sequence : {512, 8192, 65536}) expect_peaks(spec, sequence, ranks);
  }
}

}  // namespace
}  // namespace parlat
