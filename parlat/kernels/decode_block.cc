#include "parlat/kernels/decode_block.h"

#include <algorithm>
#include <limits>

#include "parlat/kernels/decode_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "parlat/kernels/decode_block.cc"  // this file again, once an instruction set
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// after foreach_target.h
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace parlat::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
// Vectors of at most kHeadBlock floats, so that a block of heads is a whole number of them.
using Floats = hn::CappedTag<float, kHeadBlock>;
using Vector = hn::Vec<Floats>;
constexpr int64_t kLanes = hn::MaxLanes(Floats());
constexpr int64_t kHeadVectors = kHeadBlock / kLanes;

// Rows of a page in fp32: a view of fp32 rows, a copy of bf16 ones.
inline const float* page_rows(const DecodeBlock& b, int64_t first_row, int64_t count, DecodeScratch& scratch) {
  const int64_t d = b.width + b.d_rope;
  if (!b.bf16) return static_cast<const float*>(b.rows) + first_row * d;
  const auto* from = static_cast<const hwy::bfloat16_t*>(b.rows) + first_row * d;
  const Floats floats;
  const hn::Rebind<hwy::bfloat16_t, Floats> halves;
  int64_t i = 0;
  for (; i + kLanes <= count * d; i += kLanes) {
    hn::StoreU(hn::PromoteTo(floats, hn::LoadU(halves, from + i)), floats, scratch.rows.get() + i);
  }
  for (; i < count * d; ++i) scratch.rows[i] = hwy::F32FromBF16(from[i]);
  return scratch.rows.get();
}

// scores[t][h] = q[h] . rows[t] for kTokens rows.
template <int64_t kTokens>
HWY_INLINE void score_rows(const float* q_transposed, const float* rows, int64_t d, float* scores) {
  const Floats floats;
  Vector sum[kTokens][kHeadVectors];
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t v = 0; v < kHeadVectors; ++v) sum[t][v] = hn::Zero(floats);
  }
  for (int64_t j = 0; j < d; ++j) {
    Vector q[kHeadVectors];
    for (int64_t v = 0; v < kHeadVectors; ++v) q[v] = hn::Load(floats, q_transposed + j * kHeadBlock + v * kLanes);
    for (int64_t t = 0; t < kTokens; ++t) {
      const Vector row = hn::Set(floats, rows[t * d + j]);
      for (int64_t v = 0; v < kHeadVectors; ++v) sum[t][v] = hn::MulAdd(row, q[v], sum[t][v]);
    }
  }
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t v = 0; v < kHeadVectors; ++v) hn::Store(sum[t][v], floats, scores + t * kHeadBlock + v * kLanes);
  }
}

// Scores become exp(score - new maximum); max, sum and scale (of what was summed before) follow.
HWY_INLINE void softmax_page(const DecodeBlock& b, int64_t count, DecodeScratch& scratch) {
  const Floats floats;
  for (int64_t v = 0; v < kHeadVectors; ++v) {
    float* const scores = scratch.scores.get() + v * kLanes;
    const Vector old_max = hn::LoadU(floats, b.max + v * kLanes);
    Vector max = old_max;
    for (int64_t t = 0; t < count; ++t) max = hn::Max(max, hn::Load(floats, scores + t * kHeadBlock));
    Vector sum = hn::Zero(floats);
    for (int64_t t = 0; t < count; ++t) {
      // Highway's Exp makes 0 of NaN: 0 times the argument brings it back.
      const Vector x = hn::Sub(hn::Load(floats, scores + t * kHeadBlock), max);
      const Vector p = hn::MulAdd(x, hn::Zero(floats), hn::Exp(floats, x));
      hn::Store(p, floats, scores + t * kHeadBlock);
      sum = hn::Add(sum, p);
    }
    const Vector scale = hn::Exp(floats, hn::Sub(old_max, max));
    hn::Store(scale, floats, scratch.scale.get() + v * kLanes);
    hn::StoreU(hn::MulAdd(hn::LoadU(floats, b.sum + v * kLanes), scale, sum), floats, b.sum + v * kLanes);
    hn::StoreU(max, floats, b.max + v * kLanes);
  }
}

// out[h][j..] = scale[h] out[h][j..] + sum over t of p[t][h] rows[t][j..], kHeads heads and kVectors vectors of
// columns.
template <int64_t kHeads, int64_t kVectors>
HWY_INLINE void add_columns(const DecodeBlock& b, const float* rows, int64_t count, int64_t head, int64_t column,
                            const DecodeScratch& scratch) {
  const Floats floats;
  const int64_t d = b.width + b.d_rope;
  Vector sum[kHeads][kVectors];
  for (int64_t h = 0; h < kHeads; ++h) {
    const Vector scale = hn::Set(floats, scratch.scale[head + h]);
    for (int64_t v = 0; v < kVectors; ++v) {
      sum[h][v] = hn::Mul(scale, hn::LoadU(floats, b.out + (head + h) * b.width + column + v * kLanes));
    }
  }
  for (int64_t t = 0; t < count; ++t) {
    Vector row[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) row[v] = hn::LoadU(floats, rows + t * d + column + v * kLanes);
    for (int64_t h = 0; h < kHeads; ++h) {
      const Vector p = hn::Set(floats, scratch.scores[t * kHeadBlock + head + h]);
      for (int64_t v = 0; v < kVectors; ++v) sum[h][v] = hn::MulAdd(p, row[v], sum[h][v]);
    }
  }
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t v = 0; v < kVectors; ++v) {
      hn::StoreU(sum[h][v], floats, b.out + (head + h) * b.width + column + v * kLanes);
    }
  }
}

HWY_INLINE void add_rest(const DecodeBlock& b, const float* rows, int64_t count, int64_t head, int64_t column,
                         const DecodeScratch& scratch) {
  const int64_t d = b.width + b.d_rope;
  for (int64_t j = column; j < b.width; ++j) {
    float sum = scratch.scale[head] * b.out[head * b.width + j];
    for (int64_t t = 0; t < count; ++t) sum += scratch.scores[t * kHeadBlock + head] * rows[t * d + j];
    b.out[head * b.width + j] = sum;
  }
}

template <int64_t kHeads>
HWY_INLINE void add_heads(const DecodeBlock& b, const float* rows, int64_t count, int64_t head,
                          const DecodeScratch& scratch) {
  constexpr int64_t kVectors = 3;
  int64_t column = 0;
  for (; column + kVectors * kLanes <= b.width; column += kVectors * kLanes) {
    add_columns<kHeads, kVectors>(b, rows, count, head, column, scratch);
  }
  for (; column + kLanes <= b.width; column += kLanes) {
    add_columns<kHeads, 1>(b, rows, count, head, column, scratch);
  }
  for (int64_t h = 0; h < kHeads && column < b.width; ++h) add_rest(b, rows, count, head + h, column, scratch);
}

void decode_block_of_this_target(const DecodeBlock& b, DecodeScratch& scratch) {
  const int64_t d = b.width + b.d_rope;
  std::fill_n(scratch.q_transposed.get(), d * kHeadBlock, 0.0f);
  for (int64_t h = 0; h < b.n_heads; ++h) {
    for (int64_t j = 0; j < d; ++j) scratch.q_transposed[j * kHeadBlock + h] = b.q[h * d + j];
  }
  std::fill_n(b.out, kHeadBlock * b.width, 0.0f);
  std::fill_n(b.sum, kHeadBlock, 0.0f);
  std::fill_n(b.max, kHeadBlock, std::numeric_limits<float>::lowest());  // Exp wants finite differences

  constexpr int64_t kTokens = std::max<int64_t>(1, 12 / kHeadVectors);
  for (int64_t row = b.range.begin; row < b.range.end;) {
    const int64_t in_page = row % kPageTokens, count = std::min(kPageTokens - in_page, b.range.end - row);
    const float* rows = page_rows(b, b.pages[row / kPageTokens] * kPageTokens + in_page, count, scratch);
    int64_t t = 0;
    float* const scores = scratch.scores.get();
    for (; t + kTokens <= count; t += kTokens) {
      score_rows<kTokens>(scratch.q_transposed.get(), rows + t * d, d, scores + t * kHeadBlock);
    }
    for (; t < count; ++t) score_rows<1>(scratch.q_transposed.get(), rows + t * d, d, scores + t * kHeadBlock);
    softmax_page(b, count, scratch);
    int64_t head = 0;
    for (; head + 4 <= b.n_heads; head += 4) add_heads<4>(b, rows, count, head, scratch);
    for (; head < b.n_heads; ++head) add_heads<1>(b, rows, count, head, scratch);
    row += count;
  }
}

}  // namespace parlat::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace parlat {

HWY_EXPORT(decode_block_of_this_target);

DecodeScratch::DecodeScratch(int64_t d)
    : q_transposed(hwy::AllocateAligned<float>(d * kHeadBlock)),
      rows(hwy::AllocateAligned<float>(kPageTokens * d)),
      scores(hwy::AllocateAligned<float>(kPageTokens * kHeadBlock)),
      scale(hwy::AllocateAligned<float>(kHeadBlock)) {}

void decode_block(const DecodeBlock& block, DecodeScratch& scratch) {
  HWY_DYNAMIC_DISPATCH(decode_block_of_this_target)(block, scratch);
}

}  // namespace parlat
#endif
