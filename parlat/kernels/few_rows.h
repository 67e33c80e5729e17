#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "parlat/tensor/shape.h"

namespace parlat {

// The matrix products and norms of a decode step, without autograd: activations fp32, weights fp32 or bf16 (rows of
// consecutive columns), summed in fp32.

// y = x w^T: x [m, K], w [N, K] -> [m, N]. Few rows (are_few) stream the weights once, widening them in registers: one
// or two wait for memory, 2 bytes a bf16 weight. More go to gemm (parlat/kernels/gemm.h), which widens bf16 weights to
// memory first. The order of the sums of a row depends on m only through that choice.
//   cost   m N K multiply-adds, N K weights read
Tensor project_rows(const Tensor& x_mK, const Tensor& w_NK);
// The same x through several weights, whose rows the threads share out as if they were one's.
std::vector<Tensor> project_rows(const Tensor& x_mK, const std::vector<Tensor>& weights_NK);

// Measured on AVX2: bf16 weights widened in registers at 61 GFLOP/s against gemm's 90 after 76 ms a 10^8 weights; fp32
// ones need no widening.
inline bool are_few(int64_t m, at::ScalarType weights) { return m <= (weights == at::kBFloat16 ? 128 : 16); }

// The same for every head: x [m, h, K], w [h, N, K] -> y [m, h, N]; x and y may be columns of wider heads.
void project_heads(const Tensor& x_mhK, const Tensor& w_hNK, const Tensor& y_mhN);

// RMSNorm: out [n, d] = x / sqrt(mean(x^2) + eps) * weight [d], all fp32; rows may lie apart, and out may be x.
void norm_rows(const Tensor& x_nd, const Tensor& weight_d, double eps, const Tensor& out_nd);

}  // namespace parlat
