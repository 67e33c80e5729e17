#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/tensor/shape.h"

namespace parlat {

// y = x w^T without autograd for the activations of a decode step: x [m, K] fp32, w [N, K] fp32 or bf16 (rows of
// consecutive columns) -> [m, N] fp32, summed in fp32. Few rows (m <= kFewRows) stream the weights once, widening them
// in registers: bound by memory, 2 bytes a bf16 weight. More go to gemm (parlat/kernels/gemm.h). The order of the sums
// of a row depends on m only through that choice.
//   cost  m N K multiply-adds, N K weights read
Tensor project_rows(const Tensor& x_mK, const Tensor& w_NK);

inline constexpr int64_t kFewRows = 16;

// The same for every head: x [m, h, K], w [h, N, K] -> [m, h, N].
Tensor project_heads(const Tensor& x_mhK, const Tensor& w_hNK);

}  // namespace parlat
