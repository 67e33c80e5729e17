#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/tensor/shape.h"

namespace parlat {

// What the operands of products of blocks lie in, for inputs like x: bf16 where the machine multiplies it natively
// (bf16_product.h); fp32, or fp64 for fp64, elsewhere.
at::ScalarType block_dtype(const Tensor& x);
at::TensorOptions block_options(const Tensor& x);
// `size` where what was summed must be rounded to be an operand again, 0 elsewhere: of room for that.
int64_t rounded_size(const Tensor& x, int64_t size);

// c = scale a b, and c += a b, without autograd: a [m, k], b [k, n] of any strides in one dtype; c [m, n] in that
// dtype, or fp32 for operands in bf16, rows of consecutive columns.
void multiply(const Tensor& a_mk, const Tensor& b_kn, const Tensor& c_mn, double scale = 1.0);
void accumulate(const Tensor& a_mk, const Tensor& b_kn, const Tensor& c_mn);

}  // namespace parlat
