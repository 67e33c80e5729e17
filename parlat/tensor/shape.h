#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string_view>

namespace parlat {

using at::Tensor;

inline constexpr int64_t kAny = -1;

// Throws ConfigError "x: expected shape [2, *, 48], got [2, 3, 47]" unless the tensor has this shape; kAny matches any
// size. The check at the door of every entry point is its shape comment.
void check_shape(const Tensor& tensor, std::initializer_list<int64_t> shape, std::string_view name);

// x [.., n] as a matrix.
Tensor rows_of(const Tensor& x);

// "[2, *, 48]".
std::string shape_text(at::IntArrayRef shape);

// The names users write: fp32, bf16, fp16, fp64. Throws ConfigError with the possible values.
at::ScalarType parse_dtype(std::string_view text);
std::string_view name(at::ScalarType dtype);

}  // namespace parlat
