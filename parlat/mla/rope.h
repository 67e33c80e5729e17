#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/config/rope.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// cos and sin for given positions, amplitude included.
struct RopeTable {
  Tensor cos_BSr, sin_BSr;  // [B, S, R/2], fp32 (fp64 for fp64 inputs)
  bool interleaved = true;
};

// positions_BS: int64. Angles are computed in fp64 and rounded once.
RopeTable rope_table(const RopeSpec& rope, int64_t d_rope, const Tensor& positions_BS,
                     at::ScalarType dtype = at::kFloat);

// x [B, S, n, R] (n heads, or 1), rotated in fp32, in x's dtype. Differentiable: the backward is the transposed
// rotation and saves nothing but the table. Interleaved pairs stay where they are: scores agree with the reference,
// caches are permuted.
Tensor apply_rope(const Tensor& x_BSnR, const RopeTable& table);

enum class Rotation { kForward, kTransposed };
// The same in place and without autograd, on a view of columns (last stride 1): what the projections are made of.
void rotate(const Tensor& x_BSnR, const RopeTable& table, Rotation rotation);

}  // namespace parlat
