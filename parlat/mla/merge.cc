#include "parlat/mla/merge.h"

#include <ATen/ATen.h>

#include <limits>

#include "parlat/base/error.h"

namespace parlat {

PartialOut merge(const std::vector<PartialOut>& parts) {
  PARLAT_ASSERT(!parts.empty(), "nothing to merge");
  Tensor max = parts[0].lse;
  for (const PartialOut& part : parts) max = at::maximum(max, part.lse);
  // Where every part is empty, any finite number will do: exp(-inf - 0) is 0.
  const Tensor finite = max.masked_fill(max == -std::numeric_limits<double>::infinity(), 0.0);
  Tensor sum = at::zeros_like(max), out = at::zeros_like(parts[0].out);
  for (const PartialOut& part : parts) {
    const Tensor weight = (part.lse - finite).exp();
    sum = sum + weight;
    out = out + weight.unsqueeze(-1) * part.out;
  }
  const Tensor divisor = sum.masked_fill(sum == 0, 1.0);
  return {out / divisor.unsqueeze(-1), finite + sum.log()};
}

}  // namespace parlat
