#include "parlat/mla/rope.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include "parlat/base/error.h"

namespace parlat {

namespace {

// One token: the table's row against each of its heads.
template <typename T>
void rotate_token(T* x, int64_t n_heads, int64_t head_stride, const at::opmath_type<T>* cos,
                  const at::opmath_type<T>* sin, int64_t n_pairs, bool interleaved, bool transposed) {
  using Compute = at::opmath_type<T>;
  const int64_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : n_pairs;
  const Compute sign = transposed ? -1 : 1;
  for (int64_t h = 0; h < n_heads; ++h) {
    T* head = x + h * head_stride;
    for (int64_t i = 0; i < n_pairs; ++i) {
      const Compute a = static_cast<Compute>(head[i * step]), b = static_cast<Compute>(head[i * step + partner]);
      const Compute s = sign * sin[i];
      head[i * step] = static_cast<T>(a * cos[i] - b * s);
      head[i * step + partner] = static_cast<T>(b * cos[i] + a * s);
    }
  }
}

template <typename T>
void rotate_tokens(const Tensor& x, const RopeTable& table, bool transposed) {
  constexpr at::ScalarType kCompute = c10::CppTypeToScalarType<at::opmath_type<T>>::value;
  const Tensor cos = table.cos_BSr.to(kCompute).contiguous(), sin = table.sin_BSr.to(kCompute).contiguous();
  const auto* cos_row = cos.const_data_ptr<at::opmath_type<T>>();
  const auto* sin_row = sin.const_data_ptr<at::opmath_type<T>>();
  T* data = x.mutable_data_ptr<T>();
  const int64_t n_pairs = cos.size(2);
  for (int64_t b = 0; b < x.size(0); ++b) {
    for (int64_t s = 0; s < x.size(1); ++s) {
      rotate_token(data + b * x.stride(0) + s * x.stride(1), x.size(2), x.stride(2), cos_row, sin_row, n_pairs,
                   table.interleaved, transposed);
      cos_row += n_pairs;
      sin_row += n_pairs;
    }
  }
}

}  // namespace

RopeTable rope_table(const RopeSpec& rope, int64_t d_rope, const Tensor& positions_BS, at::ScalarType dtype) {
  const Tensor frequencies_r = at::tensor(inverse_frequencies(rope, d_rope), at::kDouble);
  const Tensor angles_BSr = positions_BS.to(at::kDouble).unsqueeze(-1) * frequencies_r;
  const double amplitude = rope_amplitude(rope);
  return {(angles_BSr.cos() * amplitude).to(dtype), (angles_BSr.sin() * amplitude).to(dtype), rope.interleaved};
}

void rotate(const Tensor& x_BSnR, const RopeTable& table, Rotation rotation) {
  check_shape(table.cos_BSr, {x_BSnR.size(0), x_BSnR.size(1), x_BSnR.size(3) / 2}, "rope table");
  PARLAT_ASSERT(x_BSnR.stride(3) == 1, "columns {} apart", x_BSnR.stride(3));
  if (x_BSnR.is_meta()) return;
  PARLAT_ASSERT(x_BSnR.is_cpu(), "x on {}", x_BSnR.device().str());
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x_BSnR.scalar_type(), "rotate",
                                 [&] { rotate_tokens<scalar_t>(x_BSnR, table, rotation == Rotation::kTransposed); });
}

}  // namespace parlat
