// LAGA's memory claims, held by the meter: absorbed's excess over explicit is linear in the sequence and in the heads,
// laga's peak is explicit's.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>

#include "parlat/bench/attention_bench.h"
#include "parlat/config/model_config.h"
#include "parlat/plan/train_plan.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

constexpr int kRanks = 2;

AttentionBenchOptions options_with(int64_t heads, int64_t sequence) {
  AttentionBenchOptions options;
  MlaDims& d = options.spec.dims;
  d.d_model = 64;
  d.n_heads = heads;
  d.d_nope = 32;
  d.d_rope = 16;
  d.d_v = 32;
  d.d_latent = 128;
  options.sequences = {sequence};
  options.dtype = at::kBFloat16;
  options.repeats = 1;
  options.verify_sequence = 16;
  options.attention.kernel = AttentionKernel::kEager;  // what the paper measures
  return options;
}

double peak_bytes(TrainForm form, int64_t heads, int64_t sequence) {
  AttentionBenchOptions options = options_with(heads, sequence);
  options.forms = {form};
  const auto rows = bench_attention(options, [](const auto& body) { run_ranks(kRanks, body); });
  return static_cast<double>(rows.front().peak_activation_bytes);
}

double absorbed_excess(int64_t heads, int64_t sequence) {
  return peak_bytes(TrainForm::kAbsorbed, heads, sequence) - peak_bytes(TrainForm::kExplicit, heads, sequence);
}

// What plan/ says: kept, and gradients at the peak.
double planned_excess(int64_t heads, int64_t sequence) {
  const AttentionBenchOptions options = options_with(heads, sequence);
  const TrainPlan plan =
      plan_train(load_machine("h800x8-roce"),
                 {.dims = options.spec.dims, .ranks = kRanks, .sequence = sequence, .attention = options.attention});
  const auto peak = [&](TrainForm form) {
    const auto same = [form](const FormPlan& candidate) { return candidate.form == form; };
    return static_cast<double>(std::find_if(plan.forms.begin(), plan.forms.end(), same)->peak_bytes);
  };
  return peak(TrainForm::kAbsorbed) - peak(TrainForm::kExplicit);
}

// Beside what is kept, peaks hold scratch whose size does not depend on heads.
TEST(MemoryTrap, GrowsLinearlyWithTheHeads) {
  const double at_8 = absorbed_excess(8, 512), at_16 = absorbed_excess(16, 512), at_24 = absorbed_excess(24, 512);
  EXPECT_GT(at_8, 0);
  EXPECT_EQ(at_16 - at_8, planned_excess(16, 512) - planned_excess(8, 512));
  EXPECT_EQ(at_24 - at_16, planned_excess(24, 512) - planned_excess(16, 512));
}

TEST(MemoryTrap, GrowsLinearlyWithTheSequence) {
  const double at_1 = absorbed_excess(8, 512), at_2 = absorbed_excess(8, 1024), at_3 = absorbed_excess(8, 1536);
  EXPECT_GE(at_2 - at_1, planned_excess(8, 1024) - planned_excess(8, 512));
  EXPECT_EQ(at_3 - at_2, at_2 - at_1);
}

TEST(MemoryTrap, LagaAvoidsIt) {
  const double explicit_peak = peak_bytes(TrainForm::kExplicit, 16, 2048);
  const double laga_peak = peak_bytes(TrainForm::kLaga, 16, 2048);
  EXPECT_NEAR(laga_peak / explicit_peak, 1, 0.005) << laga_peak << " against " << explicit_peak;
}

// Peaks at DeepSeek-V3's shape over 8 ranks, without values.
std::map<TrainForm, AttentionBenchRow> peaks_at_v3() {
  AttentionBenchOptions options;
  options.spec = load_model_config("v3").mla;
  options.sequences = {8192};
  options.forms = possible_train_forms(/*has_query_latent=*/true);
  options.dtype = at::kBFloat16;
  options.dry_run = true;
  std::map<TrainForm, AttentionBenchRow> rows;
  for (auto& row : bench_attention(options, [](const auto& body) { run_ranks(8, body); })) rows[row.form] = row;
  return rows;
}

// No gradient of a weight is there beside the sum that it is added to.
TEST(PeakAtV3, OfFusedLagaAndRingAgainstExplicit) {
  const auto rows = peaks_at_v3();
  const auto peak = [&](TrainForm form) { return static_cast<double>(rows.at(form).peak_activation_bytes); };
  EXPECT_LE(peak(TrainForm::kLaga), 0.6 * peak(TrainForm::kExplicit));
  EXPECT_LE(peak(TrainForm::kRing), 0.5 * peak(TrainForm::kExplicit));
  for (const auto& [form, row] : rows) {
    for (const MemoryMeter::Site& site : row.peak_sites) EXPECT_NE(site.name, "weight gradient") << name(form);
  }
}

}  // namespace
}  // namespace parlat
