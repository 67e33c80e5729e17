#pragma once

#include "parlat/plan/train_plan.h"

namespace parlat {

// Blocks of the CPU's kernels, which hold these in headers that need torch; tests/bench holds them against those.
struct KernelBlocks {
  static constexpr int64_t kQueries = 128, kKeys = 512;  // kFusedQueries, kFusedKeys
  static constexpr int64_t kEagerRows = 256;             // kEagerBlockRows
};

// The most memory that a layer's activations take on a rank: what is saved and, of five moments of a forward and a
// backward pass, what the worst needs besides (docs/plan.md). The form's costs (rank 0) must be there. Kernels' scratch
// is that of one thread on a CPU that widens bf16 to multiply it; gradients of weights are added where they are kept.
// Without a backward pass nothing is saved, and it is the most of a forward pass's moments: inputs, attention, output.
//   source  parlat/kernels (scratch), parlat/train (who holds what); tests/bench holds it against the dry run
int64_t peak_bytes(const TrainPlanOptions& options, const FormPlan& plan);

}  // namespace parlat
