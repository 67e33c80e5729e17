#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "parlat/base/spread.h"
#include "parlat/config/model_config.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// Attention kernels on this thread (and the intra-op threads it has), beside what torch offers: one sequence, causal.
struct KernelBenchOptions {
  MlaDims dims;  // n_heads as it is used
  int64_t sequence = 2048;
  at::ScalarType dtype = at::kFloat;
  bool backward = true;
  int repeats = 5;
  uint64_t seed = 1;
  std::vector<std::string> kernels;  // empty: all
};

// fused, fused from latents, eager, torch, torch padded.
std::vector<std::string> kernel_names();

// flops: of attention, the causal half, forward 2 (N+R + V) a pair and backward 2 (3 (N+R) + 2 V) (scores once more);
// of the up-projection apart, for the kernel that contains it: once forward, three times more backward.
struct KernelBenchRow {
  std::string kernel;
  Spread ms;
  double attention_flops = 0, up_projection_flops = 0;
  double gemm_flops_per_s = 0;  // of this machine in this dtype, measured in the same run between the kernels
  double max_error = 0, tolerance = 0;
  bool ok = false;
  double of_gemm_rate() const { return (attention_flops + up_projection_flops) / ms.median * 1e3 / gemm_flops_per_s; }
};

// Each kernel is compared with the eager one in fp64 on up to 700 tokens (two blocks of the fused kernel's keys) of
// the same case, output and gradients, then timed in turns with the others. torch: scaled_dot_product_attention on
// contiguous [B, H, S, d], as it is and with v padded with zeros to the keys' width, which its flash path demands.
// Throws ConfigError where a kernel would need more memory than there is: torch as it is writes all scores.
// Throws ConfigError where a kernel would need more memory than there is: torch as it is writes all scores.
void require_memory(const KernelBenchOptions& options);
std::vector<KernelBenchRow> bench_kernels(const KernelBenchOptions& options);

nlohmann::json to_json(const KernelBenchRow& row, const KernelBenchOptions& options);

}  // namespace parlat
