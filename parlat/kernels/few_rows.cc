#include "parlat/kernels/few_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "parlat/base/error.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/instruction_sets.h"
#include "parlat/kernels/row_block.h"

namespace parlat {

namespace {

constexpr int64_t kTaskWeights = 1 << 16;

void check(const Tensor& x, const Tensor& w) {
  apply_instruction_set();
  PARLAT_ASSERT(x.scalar_type() == at::kFloat, "x of {}", name(x.scalar_type()));
  PARLAT_ASSERT(w.scalar_type() == at::kFloat || w.scalar_type() == at::kBFloat16, "w of {}", name(w.scalar_type()));
  PARLAT_ASSERT(w.size(-1) == 1 || w.stride(-1) == 1, "columns {} apart", w.stride(-1));
}

// What one thread does at least: some 100 KB of weights.
int64_t rows_of_a_task(int64_t depth) { return std::max<int64_t>(1, kTaskWeights / std::max<int64_t>(1, depth)); }

RowBlock block_of(const Tensor& x_mK, const Tensor& w_NK, const Tensor& y_mN) {
  return {.x = x_mK.const_data_ptr<float>(),
          .x_stride = x_mK.stride(0),
          .m = x_mK.size(0),
          .depth = x_mK.size(1),
          .w = w_NK.const_data_ptr(),
          .w_stride = w_NK.stride(0),
          .bf16 = w_NK.scalar_type() == at::kBFloat16,
          .y = y_mN.mutable_data_ptr<float>(),
          .y_stride = y_mN.stride(0)};
}

// 1 / rms of n numbers: eight sums, so that the compiler may keep them in one register.
float inverse_rms(const float* x, int64_t n, double eps) {
  float sums[8] = {};
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    for (int64_t lane = 0; lane < 8; ++lane) sums[lane] += x[j + lane] * x[j + lane];
  }
  for (; j < n; ++j) sums[0] += x[j] * x[j];
  const float sum = std::accumulate(std::begin(sums), std::end(sums), 0.0f);
  return static_cast<float>(1 / std::sqrt(sum / static_cast<double>(n) + eps));
}

}  // namespace

Tensor project_rows(const Tensor& x_mK, const Tensor& w_NK) { return project_rows(x_mK, std::vector{w_NK}).front(); }

std::vector<Tensor> project_rows(const Tensor& x_mK, const std::vector<Tensor>& weights_NK) {
  const int64_t m = x_mK.size(0);
  const bool few = are_few(m, weights_NK.front().scalar_type());
  const Tensor x = few ? x_mK.contiguous() : x_mK;  // products of many rows take any strides
  std::vector<Tensor> results;
  std::vector<RowBlock> blocks;
  std::vector<int64_t> first = {0};  // row of each weight among all
  for (const Tensor& w : weights_NK) {
    check_shape(w, {kAny, x.size(1)}, "weight");
    check(x, w);
    results.push_back(at::empty({m, w.size(0)}, at::kFloat));
    blocks.push_back(block_of(x, w, results.back()));
    first.push_back(first.back() + w.size(0));
  }
  if (!few) {
    for (size_t i = 0; i < results.size(); ++i) gemm(x, weights_NK[i].t(), results[i]);
    return results;
  }
  at::parallel_for(0, first.back(), rows_of_a_task(x.size(1)), [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      const Range own = {std::max(begin, first[i]), std::min(end, first[i + 1])};
      if (own.begin < own.end) multiply_rows(blocks[i], {own.begin - first[i], own.end - first[i]});
    }
  });
  return results;
}

void project_heads(const Tensor& x_mhK, const Tensor& w_hNK, const Tensor& y_mhN) {
  check_shape(w_hNK, {x_mhK.size(1), kAny, x_mhK.size(2)}, "weight");
  check_shape(y_mhN, {x_mhK.size(0), x_mhK.size(1), w_hNK.size(1)}, "result");
  check(x_mhK, w_hNK);
  PARLAT_ASSERT(x_mhK.stride(2) == 1 && y_mhN.stride(2) == 1, "columns {} and {} apart", x_mhK.stride(2),
                y_mhN.stride(2));
  const int64_t n_heads = x_mhK.size(1);
  if (!are_few(x_mhK.size(0), w_hNK.scalar_type())) {
    for (int64_t h = 0; h < n_heads; ++h) gemm(x_mhK.select(1, h), w_hNK[h].t(), y_mhN.select(1, h));
    return;
  }
  at::parallel_for(0, n_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      multiply_rows(block_of(x_mhK.select(1, h), w_hNK[h], y_mhN.select(1, h)), {0, w_hNK.size(1)});
    }
  });
}

void norm_rows(const Tensor& x_nd, const Tensor& weight_d, double eps, const Tensor& out_nd) {
  const int64_t n = x_nd.size(0), d = x_nd.size(1);
  check_shape(weight_d, {d}, "norm weight");
  check_shape(out_nd, {n, d}, "normalised");
  PARLAT_ASSERT(x_nd.stride(1) == 1 && out_nd.stride(1) == 1 && weight_d.stride(0) == 1, "columns {} and {} apart",
                x_nd.stride(1), out_nd.stride(1));
  const float* const weight = weight_d.const_data_ptr<float>();
  at::parallel_for(0, n, rows_of_a_task(d), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* const x = x_nd.const_data_ptr<float>() + i * x_nd.stride(0);
      float* const out = out_nd.mutable_data_ptr<float>() + i * out_nd.stride(0);
      const float scale = inverse_rms(x, d, eps);
      for (int64_t j = 0; j < d; ++j) out[j] = x[j] * scale * weight[j];
    }
  });
}

}  // namespace parlat
