#pragma once

#include "parlat/mla/rope.h"

namespace parlat {

inline Tensor rotated(const Tensor& x_BSnR, const RopeTable& table, Rotation rotation = Rotation::kForward) {
  const Tensor y = x_BSnR.clone(at::MemoryFormat::Contiguous);
  rotate(y, table, rotation);
  return y;
}

}  // namespace parlat
