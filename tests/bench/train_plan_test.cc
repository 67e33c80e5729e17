// Predicted peaks against those of the dry run, which allocates what the forms allocate.
#include "parlat/plan/train_plan.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>

#include "parlat/bench/attention_bench.h"
#include "parlat/kernels/eager_attention.h"
#include "parlat/kernels/fused_passes.h"
#include "parlat/kernels/key_source.h"
#include "parlat/plan/peak.h"
#include "tests/run_ranks.h"

namespace parlat {
namespace {

static_assert(KernelBlocks::kQueries == kFusedQueries && KernelBlocks::kKeys == kFusedKeys);
static_assert(KernelBlocks::kEagerRows == kEagerBlockRows);

struct Case {
  MlaSpec spec;
  int64_t sequence;
  int ranks;
  AttentionKernel kernel = AttentionKernel::kFused;
  at::ScalarType dtype = at::kBFloat16;
  bool backward = true;
};

// Moments that are not planned, of exchanges and projections, may need more: up to 5 %, of 512 tokens 8 %. Of
// a forward pass alone all that are the worst are planned.
void expect_peaks(const Case& at) {
  ::setenv("PARLAT_BF16_GEMM", "widen", /*overwrite=*/1);  // what plans assume
  AttentionBenchOptions bench;
  bench.spec = at.spec;
  bench.sequences = {at.sequence};
  bench.attention.kernel = at.kernel;
  bench.forms = possible_train_forms(at.spec.dims.d_q_latent.has_value());
  std::erase_if(bench.forms, [&](TrainForm form) {
    const bool no_groups = form == TrainForm::kHybrid && at.ranks == 2;  // of several ranks
    return no_groups || (passes_latents(form) && at.kernel == AttentionKernel::kEager);
  });
  bench.dtype = at.dtype;
  bench.backward = at.backward;
  bench.dry_run = true;
  const auto rows = bench_attention(bench, [&](const auto& body) { run_ranks(at.ranks, body); });
  ::unsetenv("PARLAT_BF16_GEMM");
  TrainPlanOptions options{.dims = at.spec.dims, .ranks = at.ranks, .sequence = at.sequence};
  options.backward = at.backward;
  options.attention.kernel = at.kernel;
  Machine machine = load_machine("h800x8-roce");
  options.dtype = name(at.dtype);
  machine.gemm[options.dtype] = machine.gemm_in("bf16");
  machine.attention[options.dtype] = machine.attention_in("bf16");
  const TrainPlan plan = plan_train(machine, options);
  for (const AttentionBenchRow& row : rows) {
    const auto same = std::find_if(plan.forms.begin(), plan.forms.end(), [&](const FormPlan& form) {
      return form.form == row.form && form.costs.forward.total() == row.sent_forward.total();
    });
    SCOPED_TRACE(fmt::format("{}, {} heads, {} tokens, {} ranks, {}, {}{}", name(row.form), at.spec.dims.n_heads,
                             at.sequence, at.ranks, name(at.kernel), options.dtype, at.backward ? "" : ", forward"));
    ASSERT_NE(same, plan.forms.end());
    const double ratio = static_cast<double>(same->peak_bytes) / static_cast<double>(row.peak_activation_bytes);
    EXPECT_LT(ratio, 1.001);
    EXPECT_GT(ratio, !at.backward ? 0.999 : at.sequence > 512 ? 0.95 : 0.92);
  }
}

MlaSpec v3_with(int64_t heads) {
  MlaSpec spec = load_model_config("v3").mla;
  spec.dims.n_heads = heads;
  return spec;
}

TEST(TrainPlanPeak, IsThatOfTheDryRun) {
  for (const int ranks : {2, 8}) {
    for (const int64_t sequence : {8192, 65536}) expect_peaks({v3_with(128), sequence, ranks});
  }
}

// A rank of 8 has 1 to 4 heads; then what kernels need for one of them is no small part.
TEST(TrainPlanPeak, IsThatOfTheDryRunWithFewHeads) {
  for (const int ranks : {2, 8}) {
    for (const int64_t heads : {8, 32}) {
      for (const int64_t sequence : {512, 2048, 65536}) expect_peaks({v3_with(heads), sequence, ranks});
    }
  }
}

TEST(TrainPlanPeak, IsThatOfTheDryRunWithoutAQueryLatent) {
  MlaSpec spec = load_model_config("v3").mla;
  spec.dims.d_q_latent = {};
  for (const int ranks : {2, 8}) {
    for (const int64_t sequence : {512, 8192, 65536}) expect_peaks({spec, sequence, ranks});
  }
}

TEST(TrainPlanPeak, IsThatOfTheDryRunWithTheEagerKernel) {
  for (const int64_t heads : {16, 128}) {
    for (const int64_t sequence : {2048, 8192}) {
      expect_peaks({v3_with(heads), sequence, 8, AttentionKernel::kEager});
    }
  }
}

TEST(TrainPlanPeak, IsThatOfTheDryRunInFp32) {
  for (const int64_t heads : {16, 128}) {
    expect_peaks({v3_with(heads), 8192, 8, AttentionKernel::kFused, at::kFloat});
    expect_peaks({v3_with(heads), 2048, 8, AttentionKernel::kEager, at::kFloat});
  }
}

// Nothing is saved: another moment is the worst, and tensors' last uses decide.
TEST(TrainPlanPeak, IsThatOfTheDryRunOfAForwardPass) {
  for (const int ranks : {2, 8}) {
    for (const int64_t heads : {8, 32, 128}) {
      for (const int64_t sequence : {512, 8192, 65536}) {
        expect_peaks({v3_with(heads), sequence, ranks, AttentionKernel::kFused, at::kBFloat16, /*backward=*/false});
      }
    }
  }
  MlaSpec no_query_latent = load_model_config("v3").mla;
  no_query_latent.dims.d_q_latent = {};
  expect_peaks({no_query_latent, 8192, 8, AttentionKernel::kFused, at::kBFloat16, /*backward=*/false});
  for (const int64_t heads : {16, 128}) {
    expect_peaks({v3_with(heads), 8192, 8, AttentionKernel::kFused, at::kFloat, /*backward=*/false});
    for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      expect_peaks({v3_with(heads), 2048, 8, AttentionKernel::kEager, dtype, /*backward=*/false});
    }
  }
}

}  // namespace
}  // namespace parlat
