#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "parlat/tensor/shape.h"

namespace parlat {

// Attention over part of the keys: out [.., d] is the softmax-weighted sum over them, lse [..] the natural logarithm of
// the sum of exp(score), fp32. No keys: out 0, lse -inf.
struct PartialOut {
  Tensor out, lse;
};

// Attention over all the keys of parts that see different keys (docs/mathematics.md section 7). All parts empty: empty.
PartialOut merge(const std::vector<PartialOut>& parts);

}  // namespace parlat
