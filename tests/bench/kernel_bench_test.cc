// Every kernel of the benchmark verifies, and its row says what was counted.
#include "parlat/bench/kernel_bench.h"

#include <gmock/gmock.h>

namespace parlat {
namespace {

KernelBenchOptions small_options() {
  KernelBenchOptions options;
  options.dims = {.d_model = 32, .n_heads = 3, .d_nope = 16, .d_rope = 8, .d_v = 12, .d_latent = 20, .d_q_latent = {}};
  options.sequence = 50;
  options.repeats = 2;
  return options;
}

TEST(KernelBench, VerifiesAndTimesEveryKernel) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool backward : {false, true}) {
      KernelBenchOptions options = small_options();
      options.dtype = dtype;
      options.backward = backward;
      const std::vector<KernelBenchRow> rows = bench_kernels(options);
      ASSERT_EQ(rows.size(), 5);
      for (const KernelBenchRow& row : rows) {
        EXPECT_TRUE(row.ok) << row.kernel << " " << name(dtype) << " " << row.max_error << " of " << row.tolerance;
        EXPECT_GT(row.ms.min, 0);
        EXPECT_GT(row.of_gemm_rate(), 0);
        EXPECT_EQ(to_json(row, options)["pass"], backward ? "forward+backward" : "forward");
      }
    }
  }
}

// 50 51 / 2 pairs and 3 heads; 24 columns of keys, 12 of values.
TEST(KernelBench, CountsTheCausalHalfAndTheUpProjectionApart) {
  KernelBenchOptions options = small_options();
  options.backward = false;
  const KernelBenchRow forward = bench_kernels(options)[1];
  EXPECT_EQ(forward.kernel, "fused from latents");
  EXPECT_EQ(forward.attention_flops, 1275 * 3 * 2 * (24 + 12));
  EXPECT_EQ(forward.up_projection_flops, 2 * 50 * 3 * (16 + 12) * 20);
  options.backward = true;
  const KernelBenchRow both = bench_kernels(options)[1];
  EXPECT_EQ(both.attention_flops, 1275 * 3 * 2 * (4 * 24 + 3 * 12));
  EXPECT_EQ(both.up_projection_flops, 4 * forward.up_projection_flops);
}

}  // namespace
}  // namespace parlat
