#pragma once

#include "parlat/kernels/fused_passes.h"

namespace parlat {

// fused_forward and fused_backward from torch's operators alone, for tensors of any device: what those two call for
// tensors that are not on the CPU. The same contract and arithmetic; queries in one block, so scores of S x kFusedKeys
// of one head exist at a time.
void device_forward(const FusedQuery& query, const KeySource& keys, const Tensor& out_BSHv, const Tensor& lse_BSH,
                    bool resume = false);
void device_backward(const FusedQuery& query, const KeySource& keys, const Tensor& along_BSH, const Tensor& lse_BSH,
                     const Tensor& grad_out_BSHv, const QueryGradient& grad_q, bool parts = false);

}  // namespace parlat
