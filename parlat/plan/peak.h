#pragma once

#include "parlat/plan/train_plan.h"

namespace parlat {

// The most memory that a layer's activations take on a rank: what is saved and, of five moments of a forward and a
// backward pass, what the worst needs besides (docs/plan.md). The form's costs (rank 0) must be there. Kernels' scratch
// is that of one thread on a CPU that widens bf16 to multiply it; gradients of weights are added where they are kept.
// Without a backward pass: what is saved.
//   source  parlat/kernels (scratch), parlat/train (who holds what); tests/bench holds it against the dry run
int64_t peak_bytes(const TrainPlanOptions& options, const FormPlan& plan);

}  // namespace parlat
