#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/tensor/shape.h"

namespace parlat {

// Whether this machine multiplies bf16 itself (AVX-512 BF16, AMX). PARLAT_BF16_GEMM=native|widen forces either (tests).
bool native_bf16_gemm();

// c = alpha a b + beta c of bf16 operands, summed and left in fp32: oneDNN's gemm, since torch has no such product on
// CPUs and MKL's runs at half its rate on AMD's. Without autograd; a [m, k] and b [k, n] of any strides, c [m, n] of
// rows of consecutive columns. False, and c as it was, where oneDNN has no such product for this machine (AVX2).
// Outside of tasks that share the threads out it takes all of them, and the order of sums may depend on how many.
bool bf16_product(const Tensor& a_mk, const Tensor& b_kn, const Tensor& c_mn, double alpha, double beta);

}  // namespace parlat
