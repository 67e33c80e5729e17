#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/tensor/shape.h"

namespace parlat {

// y = x w^T with x [..., K], w [N, K] -> [..., N], differentiable in both. fp64, fp32: torch's matmul. bf16: torch's
// where the machine multiplies bf16 natively (AVX-512 BF16, AMX); elsewhere, where torch falls back to about 1 to 10
// GFLOP/s, panels of both operands are widened to fp32, multiplied in fp32 and rounded once.
//   saved  x and w
//   cost   M N K multiply-adds forward, twice that backward; scratch of at most 12 MB
Tensor linear(const Tensor& x, const Tensor& w_NK);

// C [m, n] = A B, or C += A B, without autograd: A [m, k], B [k, n] of any of the dtypes above and any strides; C fp32
// (fp64 for fp64) or the inputs' dtype, rows of consecutive columns. Sums run in fp32 (fp64) and are rounded once.
void gemm(const Tensor& a_mk, const Tensor& b_kn, const Tensor& c_mn, bool accumulate = false);

// fp64 for fp64, fp32 otherwise: what products are summed in.
at::ScalarType compute_dtype(at::ScalarType dtype);

}  // namespace parlat
