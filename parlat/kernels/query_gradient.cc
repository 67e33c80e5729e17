#include "parlat/kernels/query_gradient.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>
#include <vector>

#include "parlat/kernels/attention_inputs.h"
#include "parlat/kernels/gemm.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

constexpr int64_t kBlock = 32;  // columns of one unit
constexpr int8_t kNaN = 127;    // in place of an exponent: no float has a unit as large

float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23); }

// Values as multiples of 2^exponent, to the nearest. Returns the exponent.
int8_t encode(const float* x, int64_t n, int16_t* values) {
  uint32_t largest = 0;  // as bits, which order as the values do, NaN last
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  if (largest >= std::bit_cast<uint32_t>(std::numeric_limits<float>::infinity())) {
    std::fill_n(values, n, int16_t{0});
    return kNaN;
  }
  // Of the largest value as 15 bits hold it, which may be the next power of two; units are normal numbers.
  const int exponent = std::max(static_cast<int>((largest + (1u << 8)) >> 23) - 127 - 14, -126);
  const float units = power_of_two(-exponent);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  for (int64_t i = 0; i < n; ++i) {
    values[i] = static_cast<int16_t>(std::bit_cast<uint32_t>(x[i] * units + kRound) & 0xffffu);
  }
  return static_cast<int8_t>(exponent);
}

void decode(const int16_t* values, int64_t n, int8_t exponent, float* x) {
  const float unit = exponent == kNaN ? std::numeric_limits<float>::quiet_NaN() : power_of_two(exponent);
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(values[i]) * unit;
}

// Calls body(s, b, columns) for every block of a row of n columns.
template <typename Body>
void for_each_block(int64_t tokens, int64_t n, const Body& body) {
  for (int64_t s = 0; s < tokens; ++s) {
    for (int64_t b = 0; b * kBlock < n; ++b) body(s, b, Range{b * kBlock, std::min((b + 1) * kBlock, n)});
  }
}

}  // namespace

QueryGradient QueryGradient::zeros(const Tensor& q_BSHd, int n_parts) {
  const bool in_units = n_parts > 1 && q_BSHd.scalar_type() == at::kBFloat16 && (q_BSHd.is_cpu() || q_BSHd.is_meta());
  if (!in_units) {
    return n_parts > 1 ? wide_zeros("query gradient", q_BSHd)
                       : metered("query gradient", at::zeros(q_BSHd.sizes(), q_BSHd.options().requires_grad(false)));
  }
  const at::TensorOptions options = q_BSHd.options().requires_grad(false);
  QueryGradient sums(metered("query gradient", at::zeros(q_BSHd.sizes(), options.dtype(at::kShort))));
  std::vector<int64_t> blocks = q_BSHd.sizes().vec();
  blocks.back() = (blocks.back() + kBlock - 1) / kBlock;
  sums.exponents_BSHb_ = metered("query gradient", at::zeros(blocks, options.dtype(at::kChar)));
  return sums;
}

Tensor QueryGradient::open(int64_t b, int64_t h) const {
  const Tensor sums = one_head(sums_BSHd_, b, h);
  if (!exponents_BSHb_.defined()) {
    const at::ScalarType compute = compute_dtype(sums.scalar_type());
    return sums.scalar_type() == compute ? sums : metered("scratch", sums.to(compute));
  }
  const Tensor wide = metered("scratch", at::empty(sums.sizes(), compute_options(sums)));
  if (sums.is_meta()) return wide;
  const Tensor exponents_Sb = one_head(exponents_BSHb_, b, h);
  const auto values = sums.accessor<int16_t, 2>();
  const auto exponents = exponents_Sb.accessor<int8_t, 2>();
  auto x = wide.accessor<float, 2>();
  for_each_block(sums.size(0), sums.size(1), [&](int64_t s, int64_t block, Range columns) {
    decode(&values[s][columns.begin], columns.size(), exponents[s][block], &x[s][columns.begin]);
  });
  return wide;
}

void QueryGradient::close(int64_t b, int64_t h, const Tensor& sums_Sd) const {
  const Tensor kept = one_head(sums_BSHd_, b, h);
  if (!exponents_BSHb_.defined()) {
    if (!kept.is_alias_of(sums_Sd)) kept.copy_(sums_Sd);
    return;
  }
  if (kept.is_meta()) return;
  const Tensor exponents_Sb = one_head(exponents_BSHb_, b, h);
  const auto x = sums_Sd.accessor<float, 2>();
  auto values = kept.accessor<int16_t, 2>();
  auto exponents = exponents_Sb.accessor<int8_t, 2>();
  for_each_block(kept.size(0), kept.size(1), [&](int64_t s, int64_t block, Range columns) {
    exponents[s][block] = encode(&x[s][columns.begin], columns.size(), &values[s][columns.begin]);
  });
}

Tensor QueryGradient::finish(at::ScalarType dtype) && {
  const QueryGradient sums = std::move(*this);
  if (!sums.exponents_BSHb_.defined()) return metered("query gradient", sums.sums_BSHd_.to(dtype));
  const Tensor result = metered("query gradient", at::empty_like(sums.sums_BSHd_, dtype));
  for (int64_t b = 0; b < result.size(0); ++b) {
    for (int64_t h = 0; h < result.size(2); ++h) one_head(result, b, h).copy_(sums.open(b, h));
  }
  return result;
}

}  // namespace parlat
