// The decode kernel on every instruction set of this machine against fp64: odd widths, heads and lengths, scattered
// pages, fp32 and bf16 rows, one thread and several.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>

#include "parlat/kernels/decode_attention.h"
#include "parlat/kernels/few_rows.h"
#include "parlat/kernels/instruction_sets.h"
#include "parlat/tensor/fill.h"
#include "tests/expect_close.h"
#include "tests/thread_count.h"

namespace parlat {
namespace {

struct Cache {
  Tensor rows_nd;
  std::vector<std::vector<int32_t>> pages;
  std::vector<int64_t> lengths;
  PagedLatents view() const {
    PagedLatents latents{rows_nd, {}, lengths};
    for (const auto& list : pages) latents.pages.emplace_back(list);
    return latents;
  }
};

// Sequences over pages in an order that is no order; NaN in the rows past each end.
Cache make_cache(const std::vector<int64_t>& lengths, int64_t d, at::ScalarType dtype) {
  Cache cache{.rows_nd = {}, .pages = {}, .lengths = lengths};
  int32_t n_pages = 0;
  for (const int64_t length : lengths) n_pages += static_cast<int32_t>((length + kPageTokens - 1) / kPageTokens);
  cache.rows_nd = seeded_normal({n_pages * kPageTokens, d}, 1.0, 1, "rows").to(dtype);
  int32_t next = n_pages;
  for (const int64_t length : lengths) {
    auto& list = cache.pages.emplace_back();
    for (int64_t row = 0; row < length; row += kPageTokens) list.push_back(--next);
    if (length % kPageTokens != 0) {
      const int64_t used = length % kPageTokens;
      cache.rows_nd.narrow(0, list.back() * kPageTokens + used, kPageTokens - used)
          .fill_(std::numeric_limits<double>::quiet_NaN());
    }
  }
  return cache;
}

PartialAttention oracle(const Tensor& q_nhd, const Cache& cache, int64_t d_rope) {
  const int64_t width = q_nhd.size(2) - d_rope;
  PartialAttention want{
      at::zeros({q_nhd.size(0), q_nhd.size(1), width}, at::kDouble),
      at::full({q_nhd.size(0), q_nhd.size(1)}, -std::numeric_limits<double>::infinity(), at::kDouble)};
  for (int64_t i = 0; i < q_nhd.size(0); ++i) {
    std::vector<Tensor> parts;
    for (const int32_t page : cache.pages[i]) parts.push_back(cache.rows_nd.narrow(0, page * kPageTokens, kPageTokens));
    if (parts.empty()) continue;
    const Tensor keys = at::cat(parts).narrow(0, 0, cache.lengths[i]).to(at::kDouble);
    const Tensor scores = at::matmul(q_nhd[i].to(at::kDouble), keys.t());
    want.out_nhw[i].copy_(at::matmul(scores.softmax(-1), keys.narrow(1, 0, width)));
    want.lse_nh[i].copy_(scores.logsumexp(-1));
  }
  return want;
}

class EveryInstructionSet : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { force_instruction_set(GetParam()); }
  void TearDown() override { force_instruction_set(""); }
};

TEST_P(EveryInstructionSet, DecodeAttentionAgreesWithTheDefinition) {
  struct Shape {
    int64_t heads, width, d_rope;
  };
  for (const auto& [heads, width, d_rope] : {Shape{16, 512, 64},
                                             {1, 7, 2},
                                             {5, 40, 16},
                                             {37, 24, 0},
                                             {8, 33, 5},
                                             {17, 97, 16},
                                             {40, 256, 64},
                                             {3, 130, 1}}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const std::vector<int64_t> lengths = {1, 64, 0, 200, 2100, 63, 8201, 130};  // up to many chunks of pages
      const Cache cache = make_cache(lengths, width + d_rope, dtype);
      const Tensor q = seeded_normal({8, heads, width + d_rope}, 2 / std::sqrt(width + d_rope), 2, "q");
      const PartialAttention got = decode_attention(q, cache.view(), d_rope), want = oracle(q, cache, d_rope);
      SCOPED_TRACE(fmt::format("{} heads, {} + {} columns, {}", heads, width, d_rope, name(dtype)));
      // Inputs are exact in both: the product of q and k, the exponential, and the sum over keys, of which there are
      // more than columns. Products of bf16 pairs round q and the exponentials besides.
      const Tolerance tolerance =
          Tolerance::rounding(decode_operand_dtype(dtype), *std::max_element(lengths.begin(), lengths.end()), 3);
      EXPECT_CLOSE(got.out_nhw, want.out_nhw, tolerance);
      EXPECT_CLOSE(got.lse_nh.exp(), want.lse_nh.exp(), tolerance);
      EXPECT_TRUE(got.lse_nh.isneginf().equal(want.lse_nh.isneginf()));
    }
  }
}

TEST_P(EveryInstructionSet, ProjectionsAgreeWithTheDefinition) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t m : {1, 2, 3, 4, 5, 7, 16, 17, 128, 129}) {
      const Tensor x = seeded_normal({m, 3, 77}, 1.0, 3, "x"), w = seeded_normal({3, 13, 77}, 1.0, 3, "w").to(dtype);
      const Tensor want = at::einsum("mhk,hnk->mhn", {x.to(at::kDouble), w.to(at::kDouble)});
      const Tolerance tolerance = Tolerance::rounding(at::kFloat, 77, 1);
      const Tensor wide = at::zeros({m, 3, 20});  // results are columns of a wider matrix
      project_heads(x, w, wide.narrow(2, 4, 13));
      EXPECT_CLOSE(wide.narrow(2, 4, 13), want, tolerance);
      EXPECT_TRUE(wide.narrow(2, 0, 4).eq(0).all().item<bool>() && wide.narrow(2, 17, 3).eq(0).all().item<bool>());
      // One x through several weights: the bits of each alone.
      const Tensor one = x.select(1, 0).contiguous();
      const std::vector<Tensor> both = project_rows(one, {w[0], w[2].narrow(0, 0, 5)});
      EXPECT_TRUE(both[0].equal(project_rows(one, w[0])) && both[1].equal(project_rows(one, w[2].narrow(0, 0, 5))));
      // Few rows have the bits of each alone, however they are taken together.
      if (are_few(m, dtype)) {
        EXPECT_TRUE(both[0].narrow(0, 0, 1).equal(project_rows(one.narrow(0, 0, 1), w[0])));
      }
      EXPECT_CLOSE(project_rows(x.select(1, 1).contiguous(), w[1]), want.select(1, 1), tolerance);
      // Rows that lie apart, as a view of a wider matrix.
      EXPECT_CLOSE(
          project_rows(x.select(1, 1).narrow(1, 0, 70), w[1].narrow(1, 0, 70)),
          at::matmul(x.select(1, 1).narrow(1, 0, 70).to(at::kDouble), w[1].narrow(1, 0, 70).t().to(at::kDouble)),
          tolerance);
    }
  }
}

TEST(NormRows, AgreesWithItsDefinitionWhereverTheRowsLie) {
  for (const int64_t d : {1, 7, 8, 77}) {
    const Tensor x = seeded_normal({5, d + 3}, 1.0, 3, "x"), weight = seeded_normal({d}, 1.0, 3, "weight");
    const Tensor rows = x.narrow(1, 2, d), wide = rows.to(at::kDouble);
    const Tensor want = wide * (wide.square().mean(1, true) + 1e-6).rsqrt() * weight.to(at::kDouble);
    norm_rows(rows, weight, 1e-6, rows);
    EXPECT_CLOSE(rows, want, Tolerance::rounding(at::kFloat, d, 2));
  }
}

// Memory beyond a sequence holds anything: the row that would complete a pair is not read, nor the column.
TEST_P(EveryInstructionSet, WhatLiesBeyondRowsIsNotRead) {
  for (const int64_t d : {12, 13}) {
    Cache cache = make_cache({65}, d, at::kBFloat16);
    const Tensor q = seeded_normal({1, 2, d}, 0.5, 2, "q");
    const PartialAttention nans = decode_attention(q, cache.view(), 4);
    cache.rows_nd.nan_to_num_(3);
    const PartialAttention numbers = decode_attention(q, cache.view(), 4);
    EXPECT_TRUE(nans.out_nhw.equal(numbers.out_nhw) && nans.lse_nh.equal(numbers.lse_nh)) << d;
    EXPECT_TRUE(nans.out_nhw.isfinite().all().item<bool>()) << d;
  }
}

TEST_P(EveryInstructionSet, NaNInARowThatIsSeenIsNaN) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Cache cache = make_cache({70}, 12, dtype);
    cache.rows_nd[cache.pages[0][1] * kPageTokens + 3][1] = std::numeric_limits<double>::quiet_NaN();
    const Tensor q = seeded_normal({1, 2, 12}, 0.5, 2, "q");
    EXPECT_TRUE(decode_attention(q, cache.view(), 4).out_nhw.isnan().all().item<bool>()) << dtype;
  }
}

INSTANTIATE_TEST_SUITE_P(This, EveryInstructionSet, ::testing::ValuesIn(instruction_sets()),
                         [](const auto& info) { return info.param; });

TEST(DecodeAttention, ThreadsChangeNothing) {
  const Cache cache = make_cache({3000, 17}, 80, at::kBFloat16);
  const Tensor q = seeded_normal({2, 20, 80}, 0.2, 2, "q");
  const auto on_threads = [&](int threads) {
    const ThreadCount count(threads);
    return decode_attention(q, cache.view(), 16);
  };
  const PartialAttention one = on_threads(1), three = on_threads(3);
  EXPECT_TRUE(one.out_nhw.equal(three.out_nhw) && one.lse_nh.equal(three.lse_nh));
}

}  // namespace
}  // namespace parlat
