#include "parlat/kernels/decode_block.h"

#include <algorithm>
#include <limits>

#include "parlat/kernels/instruction_sets.h"

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

// Rows of one page in fp32, `stride` apart, and where those of the next page lie, to be asked of memory meanwhile.
struct PageRows {
  const float* rows;
  int64_t stride, count;
  const char* next;                      // null: there is none
  int64_t next_row_bytes, line_columns;  // columns in 64 bytes
};

// A view of fp32 rows, a copy of bf16 ones.
inline PageRows page_rows(const DecodeBlock& b, int64_t row, DecodeScratch& scratch) {
  const int64_t d = b.width + b.d_rope;
  const PageSpan span = page_span(b, row);
  PageRows page{nullptr, d, span.count, span.next, span.row_bytes, 64 * d / span.row_bytes};
  if (!b.bf16) {
    page.rows = reinterpret_cast<const float*>(span.rows);
    return page;
  }
  const Floats floats;
  const hn::Rebind<hwy::bfloat16_t, Floats> halves;
  page.rows = scratch.rows.get();
  page.stride = decode_row_stride(d);
  for (int64_t t = 0; t < page.count; ++t) {
    const auto* const from = reinterpret_cast<const hwy::bfloat16_t*>(span.rows + t * span.row_bytes);
    float* const to = scratch.rows.get() + t * page.stride;
    int64_t j = 0;
    for (; j + kLanes <= d; j += kLanes) hn::Store(hn::PromoteTo(floats, hn::LoadU(halves, from + j)), floats, to + j);
    for (; j < d; ++j) to[j] = hwy::F32FromBF16(from[j]);
  }
  return page;
}

// scores[t][h] = q[h] . rows[t] for kTokens rows from row t0 on and kVectors vectors of heads.
template <int64_t kTokens, int64_t kVectors>
HWY_INLINE void score_rows(const PageRows& page, int64_t t0, int64_t d, DecodeScratch& scratch) {
  const Floats floats;
  const float* const rows = page.rows + t0 * page.stride;
  Vector sum[kTokens][kVectors];
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t v = 0; v < kVectors; ++v) sum[t][v] = hn::Zero(floats);
  }
  for (int64_t begin = 0; begin < d; begin += page.line_columns) {
    // A line of the next page's rows for as many columns as it holds.
    if (page.next != nullptr) {
      for (int64_t t = 0; t < kTokens; ++t) {
        __builtin_prefetch(page.next + (t0 + t) * page.next_row_bytes + begin / page.line_columns * 64, 0, 2);
      }
    }
    const int64_t end = std::min(begin + page.line_columns, d);
    for (int64_t j = begin; j < end; ++j) {
      Vector q[kVectors];
      for (int64_t v = 0; v < kVectors; ++v) {
        q[v] = hn::Load(floats, scratch.q_transposed.get() + j * kHeadBlock + v * kLanes);
      }
      for (int64_t t = 0; t < kTokens; ++t) {
        const Vector row = hn::Set(floats, rows[t * page.stride + j]);
        for (int64_t v = 0; v < kVectors; ++v) sum[t][v] = hn::MulAdd(row, q[v], sum[t][v]);
      }
    }
  }
  float* const scores = scratch.scores.get() + t0 * kHeadBlock;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t v = 0; v < kVectors; ++v) hn::Store(sum[t][v], floats, scores + t * kHeadBlock + v * kLanes);
  }
}

template <int64_t kVectors>
HWY_INLINE void score_page(const PageRows& page, int64_t d, DecodeScratch& scratch) {
  constexpr int64_t kTokens = std::max<int64_t>(1, 12 / kVectors);
  int64_t t = 0;
  for (; t + kTokens <= page.count; t += kTokens) score_rows<kTokens, kVectors>(page, t, d, scratch);
  // A whole page leaves a few: one at a time they would wait for their own sums.
  for (; t + 4 <= page.count; t += 4) score_rows<4, kVectors>(page, t, d, scratch);
  for (; t < page.count; ++t) score_rows<1, kVectors>(page, t, d, scratch);
}

// Half a block of heads is scored as half a block: a rank may have no more.
HWY_INLINE void score_page(const PageRows& page, int64_t d, int64_t n_heads, DecodeScratch& scratch) {
  constexpr int64_t kHalf = std::max<int64_t>(1, kHeadVectors / 2);
  if (n_heads <= kHalf * kLanes) {
    score_page<kHalf>(page, d, scratch);
  } else {
    score_page<kHeadVectors>(page, d, scratch);
  }
}

// The nearest bf16, to even; NaN stays one, being a quiet one here.
HWY_INLINE Vector rounded_to_bf16(Vector x) {
  const hn::RebindToUnsigned<Floats> bits;
  const auto whole = hn::BitCast(bits, x);
  const auto odd = hn::And(hn::ShiftRight<16>(whole), hn::Set(bits, 1));
  const auto nearest = hn::Add(hn::Add(whole, hn::Set(bits, 0x7fff)), odd);
  return hn::BitCast(Floats(), hn::And(nearest, hn::Set(bits, 0xffff0000u)));
}

void softmax_page_of_this_target(const DecodeBlock& b, int64_t count, bool round, DecodeScratch& scratch) {
  const Floats floats;
  for (int64_t v = 0; v < kHeadVectors; ++v) {
    float* const scores = scratch.scores.get() + v * kLanes;
    const Vector old_max = hn::LoadU(floats, b.max + v * kLanes);
    Vector max = old_max;
    for (int64_t t = 0; t < count; ++t) max = hn::Max(max, hn::Load(floats, scores + t * kHeadBlock));
    Vector sum = hn::Zero(floats), weight = sum;
    for (int64_t t = 0; t < count; ++t) {
      // Highway's Exp makes 0 of NaN: 0 times the argument brings it back.
      const Vector x = hn::Sub(hn::Load(floats, scores + t * kHeadBlock), max);
      const Vector p = hn::MulAdd(x, hn::Zero(floats), hn::Exp(floats, x)), w = round ? rounded_to_bf16(p) : p;
      hn::Store(w, floats, scores + t * kHeadBlock);
      sum = hn::Add(sum, p);
      weight = hn::Add(weight, w);
    }
    const Vector scale = hn::Exp(floats, hn::Sub(old_max, max));
    const auto add = [&](float* to, Vector part) {
      hn::StoreU(hn::MulAdd(hn::LoadU(floats, to + v * kLanes), scale, part), floats, to + v * kLanes);
    };
    hn::Store(scale, floats, scratch.scale.get() + v * kLanes);
    add(b.sum, sum);
    add(b.weight, weight);
    hn::StoreU(max, floats, b.max + v * kLanes);
  }
}

// out[h][j..] = scale[h] out[h][j..] + sum over t of p[t][h] rows[t][j..], kHeads heads and kVectors vectors of
// columns.
template <int64_t kHeads, int64_t kVectors>
HWY_INLINE void add_tile(const DecodeBlock& b, const PageRows& page, int64_t head, int64_t column,
                         const DecodeScratch& scratch) {
  const Floats floats;
  Vector sum[kHeads][kVectors];
  for (int64_t h = 0; h < kHeads; ++h) {
    const Vector scale = hn::Set(floats, scratch.scale[head + h]);
    for (int64_t v = 0; v < kVectors; ++v) {
      sum[h][v] = hn::Mul(scale, hn::LoadU(floats, b.out + (head + h) * b.width + column + v * kLanes));
    }
  }
  for (int64_t t = 0; t < page.count; ++t) {
    Vector row[kVectors];
    for (int64_t v = 0; v < kVectors; ++v)
      row[v] = hn::LoadU(floats, page.rows + t * page.stride + column + v * kLanes);
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

// All heads: these columns of a page then lie in the nearest cache.
template <int64_t kVectors>
HWY_INLINE void add_columns(const DecodeBlock& b, const PageRows& page, int64_t column, const DecodeScratch& scratch) {
  constexpr int64_t kHeads = kVectors == 1 ? 8 : 6;
  int64_t head = 0;
  for (; head + kHeads <= b.n_heads; head += kHeads) add_tile<kHeads, kVectors>(b, page, head, column, scratch);
  for (; head + 4 <= b.n_heads; head += 4) add_tile<4, kVectors>(b, page, head, column, scratch);
  for (; head < b.n_heads; ++head) add_tile<1, kVectors>(b, page, head, column, scratch);
}

HWY_INLINE void add_column(const DecodeBlock& b, const PageRows& page, int64_t column, const DecodeScratch& scratch) {
  for (int64_t h = 0; h < b.n_heads; ++h) {
    float sum = scratch.scale[h] * b.out[h * b.width + column];
    for (int64_t t = 0; t < page.count; ++t) {
      sum += scratch.scores[t * kHeadBlock + h] * page.rows[t * page.stride + column];
    }
    b.out[h * b.width + column] = sum;
  }
}

HWY_INLINE void add_page(const DecodeBlock& b, const PageRows& page, const DecodeScratch& scratch) {
  constexpr int64_t kVectors = 2;
  int64_t column = 0;
  for (; column + kVectors * kLanes <= b.width; column += kVectors * kLanes) {
    add_columns<kVectors>(b, page, column, scratch);
  }
  for (; column + kLanes <= b.width; column += kLanes) add_columns<1>(b, page, column, scratch);
  for (; column < b.width; ++column) add_column(b, page, column, scratch);
}

void decode_block_of_this_target(const DecodeBlock& b, DecodeScratch& scratch) {
  const int64_t d = b.width + b.d_rope;
  std::fill_n(scratch.q_transposed.get(), d * kHeadBlock, 0.0f);
  for (int64_t h = 0; h < b.n_heads; ++h) {
    for (int64_t j = 0; j < d; ++j) scratch.q_transposed[j * kHeadBlock + h] = b.q[h * d + j];
  }
  for (int64_t row = b.range.begin; row < b.range.end;) {
    const PageRows page = page_rows(b, row, scratch);
    score_page(page, d, b.n_heads, scratch);
    softmax_page_of_this_target(b, page.count, /*round=*/false, scratch);
    add_page(b, page, scratch);
    row += page.count;
  }
}

}  // namespace parlat::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace parlat {

HWY_EXPORT(decode_block_of_this_target);
HWY_EXPORT(softmax_page_of_this_target);

DecodeScratch::DecodeScratch(int64_t d)
    : q_transposed(hwy::AllocateAligned<float>(d * kHeadBlock)),
      rows(hwy::AllocateAligned<float>(kPageTokens * decode_row_stride(d))),
      scores(hwy::AllocateAligned<float>(kPageTokens * kHeadBlock)),
      scale(hwy::AllocateAligned<float>(kHeadBlock)),
      q_pairs(hwy::AllocateAligned<uint32_t>((d + 1) / 2 * kHeadBlock)),
      weight_pairs(hwy::AllocateAligned<uint32_t>(kPageTokens / 2 * kHeadBlock)),
      value_pairs(hwy::AllocateAligned<uint32_t>(kPageTokens / 2 * kValueColumns)) {}

void decode_block(const DecodeBlock& block, DecodeScratch& scratch) {
  std::fill_n(block.out, kHeadBlock * block.width, 0.0f);
  std::fill_n(block.sum, kHeadBlock, 0.0f);
  std::fill_n(block.weight, kHeadBlock, 0.0f);
  std::fill_n(block.max, kHeadBlock, std::numeric_limits<float>::lowest());  // Exp wants finite differences
  if (block.bf16 && uses_bf16_pairs()) return decode_block_in_pairs(block, scratch);
  HWY_DYNAMIC_DISPATCH(decode_block_of_this_target)(block, scratch);
}

void softmax_page(const DecodeBlock& block, int64_t count, bool round, DecodeScratch& scratch) {
  HWY_DYNAMIC_DISPATCH(softmax_page_of_this_target)(block, count, round, scratch);
}

}  // namespace parlat
#endif
