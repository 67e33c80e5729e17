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

// a / b where nothing of nothing is nothing.
double ratio(double a, double b) { return a > 0 ? a / b : 0; }

Tensor row_rms(const Tensor& flat, int64_t row) { return flat.view({-1, row}).square().mean(1).sqrt(); }

int64_t row_size(at::IntArrayRef shape) {
  int64_t size = 1;
  for (size_t i = shape.size(); i-- > 0 && size < Comparison::kRow;) size *= shape[i];
  return size;
}

Tensor finite_doubles(const Tensor& x) {
  const Tensor flat = x.detach().to(at::kDouble).contiguous().flatten();
  return at::where(flat.isfinite(), flat, at::zeros_like(flat));
}

}  // namespace

Tolerance Tolerance::rounding(at::ScalarType dtype, int64_t terms, int64_t depth) {
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  const double sum = (std::sqrt(static_cast<double>(terms)) + 2.0) * unit_roundoff(narrow ? at::kFloat : dtype);
  const double stage = narrow ? sum + unit_roundoff(dtype) : sum;
  return {kSafety * std::sqrt(static_cast<double>(depth)) * stage};
}

std::string Comparison::text() const {
  return fmt::format("max error {:.3e} against {:.3e} allowed, worst row off by {:.3e} of its size, worst at {}",
                     max_error, allowed, row_error, worst);
}

Scale scale_of(const Tensor& want) {
  if (want.numel() == 0) return {};
  const Tensor flat = finite_doubles(want);
  return {.max = flat.abs().max().item<double>(), .rms = flat.square().mean().sqrt().item<double>()};
}

Comparison compare(const Tensor& got, const Tensor& want, Tolerance tolerance) {
  return compare(got, want, tolerance, scale_of(want));
}

Comparison compare(const Tensor& got, const Tensor& want, Tolerance tolerance, const Scale& whole) {
  PARLAT_ASSERT(got.sizes() == want.sizes(), "{} against {}", shape_text(got.sizes()), shape_text(want.sizes()));
  Comparison result;
  result.close = true;
  if (got.numel() == 0) return result;
  const Tensor g = got.detach().to(at::kDouble).contiguous().flatten();
  const Tensor w = want.detach().to(at::kDouble).contiguous().flatten();
  Tensor error = (g - w).abs();
  // Equal infinities and NaN in both places differ by nothing; NaN in one place only is the worst of all.
  error = at::where((g == w).logical_or(g.isnan().logical_and(w.isnan())), at::zeros_like(error), error);
  error = error.nan_to_num(INFINITY, INFINITY, INFINITY);
  const int64_t worst = error.argmax().item<int64_t>();
  const int64_t row = row_size(want.sizes());
  const Tensor row_scale = row_rms(finite_doubles(want), row).clamp_min(Comparison::kSmallRow * whole.rms);
  const Tensor row_errors = row_rms(error, row);
  result.max_error = error[worst].item<double>();
  result.allowed = tolerance.relative_to_norm * whole.max;
  result.row_error = at::where(row_errors > 0, row_errors / row_scale, row_errors).max().item<double>();
  result.relative = std::max(result.row_error, ratio(result.max_error, whole.max));
  result.close = result.relative <= tolerance.relative_to_norm;
  result.worst = fmt::format("{}: got {:.9g}, want {:.9g}", index_text(worst, want.sizes()), g[worst].item<double>(),
                             w[worst].item<double>());
  return result;
}

}  // namespace parlat
