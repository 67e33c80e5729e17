#include "parlat/kernels/query_gradient.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "parlat/kernels/attention_inputs.h"
#include "parlat/kernels/gemm.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

constexpr float kLargest = 32767;

// Values as multiples of the unit, to the nearest.
float encode_row(const float* x, int64_t n, int16_t* values) {
  uint32_t largest = 0;  // as bits, which order as the values do, NaN last
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  if (largest >= std::bit_cast<uint32_t>(std::numeric_limits<float>::infinity())) {
    std::fill_n(values, n, int16_t{0});
    return std::numeric_limits<float>::quiet_NaN();
  }
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float unit = std::max(std::bit_cast<float>(largest) / kLargest, std::numeric_limits<float>::min());
  const float units = 1 / unit;
  for (int64_t i = 0; i < n; ++i) {
    values[i] = static_cast<int16_t>(std::bit_cast<uint32_t>(x[i] * units + kRound) & 0xffffu);
  }
  return unit;
}

void decode_row(const int16_t* values, int64_t n, float unit, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(values[i]) * unit;
}

}  // namespace

QueryGradient QueryGradient::zeros(const Tensor& q_BSHd, int n_parts) {
  const bool in_units = n_parts > 1 && q_BSHd.scalar_type() == at::kBFloat16 && (q_BSHd.is_cpu() || q_BSHd.is_meta());
  if (!in_units) {
    return n_parts > 1 ? wide_zeros("query gradient", q_BSHd)
                       : metered("query gradient", at::zeros(q_BSHd.sizes(), q_BSHd.options().requires_grad(false)));
  }
  const at::TensorOptions options = compute_options(q_BSHd);
  QueryGradient sums(metered("query gradient", at::zeros(q_BSHd.sizes(), options.dtype(at::kShort))));
  sums.unit_BSH_ = metered("query gradient", at::zeros(q_BSHd.sizes().slice(0, 3), options));
  return sums;
}

Tensor QueryGradient::open(int64_t b, int64_t h) const {
  const Tensor sums = one_head(sums_BSHd_, b, h);
  if (!unit_BSH_.defined()) {
    const at::ScalarType compute = compute_dtype(sums.scalar_type());
    return sums.scalar_type() == compute ? sums : metered("scratch", sums.to(compute));
  }
  const Tensor wide = metered("scratch", at::empty(sums.sizes(), unit_BSH_.options()));
  if (sums.is_meta()) return wide;
  const auto values = sums.accessor<int16_t, 2>();
  const Tensor unit_S = unit_BSH_.select(0, b).select(1, h);
  const auto units = unit_S.accessor<float, 1>();
  auto x = wide.accessor<float, 2>();
  for (int64_t s = 0; s < sums.size(0); ++s) decode_row(&values[s][0], sums.size(1), units[s], &x[s][0]);
  return wide;
}

void QueryGradient::close(int64_t b, int64_t h, const Tensor& sums_Sd) const {
  const Tensor kept = one_head(sums_BSHd_, b, h);
  if (!unit_BSH_.defined()) {
    if (!kept.is_alias_of(sums_Sd)) kept.copy_(sums_Sd);
    return;
  }
  if (kept.is_meta()) return;
  const auto x = sums_Sd.accessor<float, 2>();
  auto values = kept.accessor<int16_t, 2>();
  const Tensor unit_S = unit_BSH_.select(0, b).select(1, h);
  auto units = unit_S.accessor<float, 1>();
  for (int64_t s = 0; s < kept.size(0); ++s) units[s] = encode_row(&x[s][0], kept.size(1), &values[s][0]);
}

Tensor QueryGradient::finish(at::ScalarType dtype) && {
  const QueryGradient sums = std::move(*this);
  if (!sums.unit_BSH_.defined()) return metered("query gradient", sums.sums_BSHd_.to(dtype));
  const Tensor result = metered("query gradient", at::empty_like(sums.sums_BSHd_, dtype));
  for (int64_t b = 0; b < result.size(0); ++b) {
    for (int64_t h = 0; h < result.size(2); ++h) one_head(result, b, h).copy_(sums.open(b, h));
  }
  return result;
}

}  // namespace parlat
