#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/tensor/shape.h"

namespace parlat {

// y = x w^T with x [..., K], w [N, K] -> [..., N], differentiable in both. fp64, fp32: torch's matmul. bf16: torch's where
// the machine multiplies bf16 natively (AVX-512 BF16, AMX); elsewhere, where torch falls back to about 1 to 10 GFLOP/s,
// panels of both operands are widened to fp32, multiplied in fp32 and rounded once. Saves x and w.
Tensor linear(const Tensor& x, const Tensor& w_NK);

// C [m, n] (+)= A op(B) without autograd: A [m, k], B [k, n] of any of the dtypes above and any strides; C fp32 (fp64 for
// fp64) or the inputs' dtype. What linear and the attention kernels are made of.
void gemm(const Tensor& a_mk, const Tensor& b_kn, Tensor& c_mn, bool accumulate = false);

// Whether bf16 products run natively here. PARLAT_BF16_GEMM=native|widen forces either (tests).
bool native_bf16_gemm();

}  // namespace parlat
