#include "parlat/kernels/decode_attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

#include "parlat/base/error.h"
#include "parlat/kernels/decode_block.h"
#include "parlat/kernels/instruction_sets.h"

namespace parlat {

namespace {

// Rows that one task walks through: enough tasks to share out where the context is short, little to merge where it is
// long.
int64_t chunk_rows(int64_t length) { return length >= 8192 ? 1024 : length >= 2048 ? 256 : 128; }

struct Task {
  int64_t query;
  Range rows, heads;
  int64_t part;  // index among the partial results
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<Range> parts;  // of each (query, block of heads)
  int64_t n_parts = 0;
};

Plan make_plan(const std::vector<int64_t>& lengths, int64_t n_heads) {
  Plan plan;
  for (int64_t query = 0; query < static_cast<int64_t>(lengths.size()); ++query) {
    const int64_t length = lengths[query], step = chunk_rows(length);
    for (int64_t head = 0; head < n_heads; head += kHeadBlock) {
      const Range heads = {head, std::min(head + kHeadBlock, n_heads)};
      const int64_t first = plan.n_parts;
      for (int64_t row = 0; row < length; row += step) {
        plan.tasks.push_back({query, {row, std::min(row + step, length)}, heads, plan.n_parts++});
      }
      plan.parts.push_back({first, plan.n_parts});
    }
  }
  return plan;
}

struct Parts {
  std::vector<float> out;  // [part, kHeadBlock, w], not divided by the weight
  std::vector<float> max, sum, weight;
};

// Chunks in order: the largest maximum, every chunk's sums scaled to it.
void merge_parts(const Parts& parts, Range range, int64_t head, int64_t width, float* out, float* lse) {
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t p = range.begin; p < range.end; ++p) max = std::max(max, parts.max[p * kHeadBlock + head]);
  std::fill_n(out, width, 0.0f);
  *lse = max;
  if (range.size() == 0) return;
  float sum = 0, weight = 0;
  for (int64_t p = range.begin; p < range.end; ++p) {
    const float scale = std::exp(parts.max[p * kHeadBlock + head] - max);
    sum += scale * parts.sum[p * kHeadBlock + head];
    weight += scale * parts.weight[p * kHeadBlock + head];
    const float* part = parts.out.data() + (p * kHeadBlock + head) * width;
    for (int64_t j = 0; j < width; ++j) out[j] += scale * part[j];
  }
  const float inverse = 1 / weight;
  for (int64_t j = 0; j < width; ++j) out[j] *= inverse;
  *lse = max + std::log(sum);
}

void check(const Tensor& q_nhd, const PagedLatents& cache, int64_t d_rope) {
  const int64_t n = q_nhd.size(0);
  check_shape(q_nhd, {kAny, kAny, cache.rows_nd.size(1)}, "q");
  PARLAT_ASSERT(q_nhd.scalar_type() == at::kFloat && q_nhd.is_contiguous(), "q of {}", name(q_nhd.scalar_type()));
  PARLAT_ASSERT(cache.rows_nd.is_contiguous() && 0 <= d_rope && d_rope < q_nhd.size(2), "{} rope columns", d_rope);
  PARLAT_ASSERT(static_cast<int64_t>(cache.pages.size()) == n && static_cast<int64_t>(cache.lengths.size()) == n,
                "{} queries, {} page lists, {} lengths", n, cache.pages.size(), cache.lengths.size());
  const int64_t n_pages = cache.rows_nd.size(0) / kPageTokens;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t needed = (cache.lengths[i] + kPageTokens - 1) / kPageTokens;
    PARLAT_ASSERT(static_cast<int64_t>(cache.pages[i].size()) >= needed, "query {}: {} pages for {} rows", i,
                  cache.pages[i].size(), cache.lengths[i]);
    for (int64_t p = 0; p < needed; ++p) {
      PARLAT_ASSERT(0 <= cache.pages[i][p] && cache.pages[i][p] < n_pages, "page {} of {}", cache.pages[i][p], n_pages);
    }
  }
}

}  // namespace

at::ScalarType decode_operand_dtype(at::ScalarType rows) {
  return rows == at::kBFloat16 && uses_bf16_pairs() ? at::kBFloat16 : at::kFloat;
}

PartialAttention decode_attention(const Tensor& q_nhd, const PagedLatents& cache, int64_t d_rope) {
  apply_instruction_set();
  check(q_nhd, cache, d_rope);
  const int64_t n = q_nhd.size(0), n_heads = q_nhd.size(1), width = q_nhd.size(2) - d_rope;
  const Plan plan = make_plan(cache.lengths, n_heads);
  Parts parts;
  parts.out.resize(plan.n_parts * kHeadBlock * width);
  parts.max.resize(plan.n_parts * kHeadBlock);
  parts.sum.resize(plan.n_parts * kHeadBlock);
  parts.weight.resize(plan.n_parts * kHeadBlock);

  const bool bf16 = cache.rows_nd.scalar_type() == at::kBFloat16;
  PARLAT_ASSERT(bf16 || cache.rows_nd.scalar_type() == at::kFloat, "latents of {}", name(cache.rows_nd.scalar_type()));
  const float* q = q_nhd.const_data_ptr<float>();
  at::parallel_for(0, static_cast<int64_t>(plan.tasks.size()), 1, [&](int64_t begin, int64_t end) {
    DecodeScratch scratch(width + d_rope);
    for (int64_t i = begin; i < end; ++i) {
      const Task& task = plan.tasks[i];
      const int64_t at = task.part * kHeadBlock;
      decode_block({.q = q + (task.query * n_heads + task.heads.begin) * (width + d_rope),
                    .n_heads = task.heads.size(),
                    .width = width,
                    .d_rope = d_rope,
                    .rows = cache.rows_nd.const_data_ptr(),
                    .bf16 = bf16,
                    .pages = cache.pages[task.query],
                    .range = task.rows,
                    .out = parts.out.data() + at * width,
                    .max = parts.max.data() + at,
                    .sum = parts.sum.data() + at,
                    .weight = parts.weight.data() + at},
                   scratch);
    }
  });

  PartialAttention result{at::empty({n, n_heads, width}, at::kFloat), at::empty({n, n_heads}, at::kFloat)};
  float* const out = result.out_nhw.mutable_data_ptr<float>();
  float* const lse = result.lse_nh.mutable_data_ptr<float>();
  const int64_t blocks = (n_heads + kHeadBlock - 1) / kHeadBlock;
  // A thread is worth waking for some 32K numbers.
  const int64_t numbers_a_row = width * (1 + plan.n_parts / std::max<int64_t>(1, n * blocks));
  at::parallel_for(0, n * n_heads, 1 + 32768 / numbers_a_row, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row % n_heads, block = row / n_heads * blocks + head / kHeadBlock;
      merge_parts(parts, plan.parts[block], head % kHeadBlock, width, out + row * width, lse + row);
    }
  });
  return result;
}

}  // namespace parlat
