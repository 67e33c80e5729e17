#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/tensor/shape.h"

namespace parlat {

// The arithmetic of RMSNorm on the rows of a matrix, without autograd; what rms_norm and project_latent are made of.
// Rows may be strided, columns are consecutive. Blocks of rows pass through fp32 scratch (fp64 for fp64) that stays in
// the cache.

// out [n, d] = round(x / rms(x)) * weight. Returns 1/rms [n, 1] in fp32 (fp64).
Tensor rms_rows(const Tensor& x_nd, const Tensor& weight_d, double eps, const Tensor& out_nd);

// Writes the gradient of x, returns that of weight [d], summed in fp32 (fp64) and rounded once.
Tensor rms_rows_backward(const Tensor& x_nd, const Tensor& weight_d, const Tensor& inverse_rms_n1,
                         const Tensor& grad_nd, const Tensor& grad_x_nd);

}  // namespace parlat
