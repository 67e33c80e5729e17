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

enum class Rotation { kForward, kTransposed };
// x [B, S, n, R] (n heads, or 1) in place, computed in fp32 (fp64 for fp64); a view of columns with last stride 1.
// Without autograd: the gradient of a rotation is the transposed one. Interleaved pairs stay where they are: scores
// agree with the reference, caches are permuted.
void rotate(const Tensor& x_BSnR, const RopeTable& table, Rotation rotation);

}  // namespace parlat
