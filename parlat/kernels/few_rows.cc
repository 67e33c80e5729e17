#include "parlat/kernels/few_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "parlat/base/error.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/instruction_sets.h"
#include "parlat/kernels/row_block.h"

namespace parlat {

namespace {

// Weight rows that one task streams: some 100 KB.
constexpr int64_t kTaskWeights = 1 << 16;

void check(const Tensor& x, const Tensor& w) {
  apply_instruction_set();
  PARLAT_ASSERT(x.scalar_type() == at::kFloat, "x of {}", name(x.scalar_type()));
  PARLAT_ASSERT(w.scalar_type() == at::kFloat || w.scalar_type() == at::kBFloat16, "w of {}", name(w.scalar_type()));
  PARLAT_ASSERT(w.size(-1) == 1 || w.stride(-1) == 1, "columns {} apart", w.stride(-1));
}

RowBlock block_of(const Tensor& x_mK, const Tensor& w_NK, const Tensor& y_mN) {
  const bool bf16 = w_NK.scalar_type() == at::kBFloat16;
  return {.x = x_mK.const_data_ptr<float>(),
          .x_stride = x_mK.stride(0),
          .m = x_mK.size(0),
          .depth = x_mK.size(1),
          .w = w_NK.const_data_ptr(),
          .w_stride = w_NK.stride(0),
          .bf16 = bf16,
          .y = y_mN.mutable_data_ptr<float>(),
          .y_stride = y_mN.stride(0)};
}

}  // namespace

Tensor project_rows(const Tensor& x_mK, const Tensor& w_NK) {
  check_shape(w_NK, {kAny, x_mK.size(1)}, "weight");
  check(x_mK, w_NK);
  const int64_t m = x_mK.size(0), n = w_NK.size(0);
  const Tensor y_mN = at::empty({m, n}, at::kFloat);
  if (m > kFewRows) {
    gemm(x_mK, w_NK.t(), y_mN);
    return y_mN;
  }
  const Tensor x = x_mK.contiguous();
  const RowBlock block = block_of(x, w_NK, y_mN);
  at::parallel_for(0, n, std::max<int64_t>(1, kTaskWeights / std::max<int64_t>(1, x.size(1))),
                   [&](int64_t begin, int64_t end) {
                     multiply_rows(block, {begin, end});
                   });
  return y_mN;
}

Tensor project_heads(const Tensor& x_mhK, const Tensor& w_hNK) {
  check_shape(w_hNK, {x_mhK.size(1), kAny, x_mhK.size(2)}, "weight");
  check(x_mhK, w_hNK);
  const int64_t m = x_mhK.size(0), n_heads = x_mhK.size(1);
  const Tensor y_mhN = at::empty({m, n_heads, w_hNK.size(1)}, at::kFloat);
  const Tensor x = x_mhK.contiguous();
  if (m > kFewRows) {
    for (int64_t h = 0; h < n_heads; ++h) gemm(x.select(1, h), w_hNK[h].t(), y_mhN.select(1, h));
    return y_mhN;
  }
  at::parallel_for(0, n_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      multiply_rows(block_of(x.select(1, h), w_hNK[h], y_mhN.select(1, h)), {0, w_hNK.size(1)});
    }
  });
  return y_mhN;
}

}  // namespace parlat
