#include "parlat/tensor/compare.h"

#include <ATen/ATen.h>

#include <cmath>

#include "parlat/base/error.h"

namespace parlat {

namespace {

double unit_roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::ldexp(1.0, -53);
    case at::kFloat:
      return std::ldexp(1.0, -24);
    case at::kHalf:
      return std::ldexp(1.0, -11);
    case at::kBFloat16:
      return std::ldexp(1.0, -8);
    default:
      throw InternalError(fmt::format("no unit roundoff for {}", c10::toString(dtype)));
  }
}

std::string index_text(int64_t flat, at::IntArrayRef shape) {
  std::vector<int64_t> index(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    index[i] = flat % shape[i];
    flat /= shape[i];
  }
  return shape_text(index);
}

}  // namespace

Tolerance Tolerance::rounding(at::ScalarType dtype, int64_t terms, int64_t depth) {
  const double growth = static_cast<double>(depth) * (std::sqrt(static_cast<double>(terms)) + 2.0);
  // Products of 16-bit inputs are summed in fp32: only the rounding of each stage's result is in the dtype itself.
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  if (!narrow) return {kSafety * growth * unit_roundoff(dtype)};
  return {kSafety * (growth * unit_roundoff(at::kFloat) + static_cast<double>(depth) * unit_roundoff(dtype))};
}

std::string Comparison::text() const {
  return fmt::format("max error {:.3e} against {:.3e} allowed (largest value {:.3e}), worst at {}", max_error, allowed,
                     max_want, worst);
}

Comparison compare(const Tensor& got, const Tensor& want, Tolerance tolerance) {
  PARLAT_ASSERT(got.sizes() == want.sizes(), "{} against {}", shape_text(got.sizes()), shape_text(want.sizes()));
  Comparison result;
  if (got.numel() == 0) {
    result.close = true;
    return result;
  }
  const Tensor g = got.detach().to(at::kDouble).contiguous().flatten();
  const Tensor w = want.detach().to(at::kDouble).contiguous().flatten();
  Tensor error = (g - w).abs();
  // Equal infinities and NaN in both places differ by nothing; NaN in one place only is the worst of all.
  error = at::where((g == w).logical_or(g.isnan().logical_and(w.isnan())), at::zeros_like(error), error);
  error = error.nan_to_num(INFINITY, INFINITY, INFINITY);
  const int64_t worst = error.argmax().item<int64_t>();
  result.max_error = error[worst].item<double>();
  result.max_want = at::where(w.isfinite(), w.abs(), at::zeros_like(w)).max().item<double>();
  result.allowed = tolerance.relative_to_norm * result.max_want;
  result.close = result.max_error <= result.allowed;
  result.worst = fmt::format("{}: got {:.9g}, want {:.9g}", index_text(worst, want.sizes()), g[worst].item<double>(),
                             w[worst].item<double>());
  return result;
}

}  // namespace parlat
