#include "parlat/tensor/shape.h"

#include <algorithm>
#include <array>
#include <string>

#include "parlat/base/error.h"

namespace parlat {

namespace {

struct DtypeName {
  std::string_view name;
  at::ScalarType dtype;
};
constexpr std::array<DtypeName, 4> kDtypes = {
    {{"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}, {"fp64", at::kDouble}}};

}  // namespace

std::string shape_text(at::IntArrayRef shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] == kAny ? "*" : std::to_string(shape[i]);
  }
  return text + "]";
}

void check_shape(const Tensor& tensor, std::initializer_list<int64_t> shape, std::string_view name) {
  const at::IntArrayRef want(shape.begin(), shape.size());
  if (!tensor.defined()) throw ConfigError("{}: expected shape {}, got no tensor", name, shape_text(want));
  const at::IntArrayRef got = tensor.sizes();
  const bool equal = std::equal(got.begin(), got.end(), want.begin(), want.end(),
                                [](int64_t g, int64_t w) { return w == kAny || g == w; });
  if (!equal) throw ConfigError("{}: expected shape {}, got {}", name, shape_text(want), shape_text(got));
}

Tensor rows_of(const Tensor& x) { return x.reshape({-1, x.size(-1)}); }

at::ScalarType parse_dtype(std::string_view text) {
  for (const DtypeName& entry : kDtypes) {
    if (entry.name == text) return entry.dtype;
  }
  throw ConfigError("dtype: expected fp32, bf16, fp16 or fp64, got '{}'", text);
}

std::string_view name(at::ScalarType dtype) {
  for (const DtypeName& entry : kDtypes) {
    if (entry.dtype == dtype) return entry.name;
  }
  return c10::toString(dtype);
}

}  // namespace parlat
