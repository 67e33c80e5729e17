#include "parlat/mla/rms_rows.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "parlat/kernels/gemm.h"

namespace parlat {

namespace {

// Calls body(first row, rows) for blocks of about 64K elements: a few hundred KB of scratch.
template <typename Body>
void for_each_block(const Tensor& x_nd, const Body& body) {
  const int64_t n = x_nd.size(0), block = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, x_nd.size(1)));
  for (int64_t first = 0; first < n; first += block) body(first, std::min(block, n - first));
}

}  // namespace

Tensor rms_rows(const Tensor& x_nd, const Tensor& weight_d, double eps, const Tensor& out_nd) {
  const at::ScalarType compute = compute_dtype(x_nd.scalar_type());
  const Tensor inverse_rms_n1 = at::empty({x_nd.size(0), 1}, x_nd.options().dtype(compute));
  for_each_block(x_nd, [&](int64_t first, int64_t rows) {
    const Tensor x = x_nd.narrow(0, first, rows).to(compute);
    Tensor inverse_rms = inverse_rms_n1.narrow(0, first, rows);
    at::mean_out(inverse_rms, x * x, {1}, /*keepdim=*/true);
    inverse_rms.add_(eps).rsqrt_();
    Tensor out = out_nd.narrow(0, first, rows);
    out.copy_(x * inverse_rms);
    out.mul_(weight_d);
  });
  return inverse_rms_n1;
}

Tensor rms_rows_backward(const Tensor& x_nd, const Tensor& weight_d, const Tensor& inverse_rms_n1,
                         const Tensor& grad_nd, const Tensor& grad_x_nd) {
  const at::ScalarType compute = inverse_rms_n1.scalar_type();
  const Tensor weight = weight_d.to(compute);
  Tensor grad_weight_d = at::zeros_like(weight);
  for_each_block(x_nd, [&](int64_t first, int64_t rows) {
    const Tensor inverse_rms = inverse_rms_n1.narrow(0, first, rows);
    const Tensor grad = grad_nd.narrow(0, first, rows).to(compute);
    const Tensor normalised = x_nd.narrow(0, first, rows).to(compute) * inverse_rms;
    // The forward pass rounds before the weight; its factor in the weight's gradient is the rounded one.
    grad_weight_d.add_((grad * normalised.to(x_nd.scalar_type())).sum(0));
    const Tensor grad_normalised = grad * weight;
    const Tensor along = (grad_normalised * normalised).mean({1}, /*keepdim=*/true);
    grad_x_nd.narrow(0, first, rows).copy_((grad_normalised - normalised * along) * inverse_rms);
  });
  return grad_weight_d.to(weight_d.scalar_type());
}

}  // namespace parlat
