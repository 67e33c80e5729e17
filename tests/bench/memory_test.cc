// LAGA's memory claims, held by the meter: absorbed's excess over explicit is linear in the sequence and in the heads,
// laga's peak is explicit's.
#include <gmock/gmock.h>

#include "parlat/bench/attention_bench.h"
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

// What plan/ says that absorbed keeps and explicit does not, beside the gathered latent, on rank 0.
double planned_excess(int64_t heads, int64_t sequence) {
  AttentionShape shape;
  shape.dims = options_with(heads, sequence).spec.dims;
  shape.dims.n_heads = heads;
  shape.tokens.assign(kRanks, sequence / kRanks);
  shape.attention.kernel = AttentionKernel::kEager;
  return static_cast<double>(form_costs(TrainForm::kAbsorbed, shape).saved_bytes -
                             form_costs(TrainForm::kExplicit, shape).saved_bytes);
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

}  // namespace
}  // namespace parlat
