#include "parlat/kernels/row_block.h"

#include <hwy/cache_control.h>

#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "parlat/kernels/row_block.cc"  // this file again, once an instruction set
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace parlat::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::CappedTag<float, 16>;
using Vector = hn::Vec<Floats>;
constexpr int64_t kLanes = hn::MaxLanes(Floats());

HWY_INLINE Vector load(const float* from) { return hn::LoadU(Floats(), from); }
HWY_INLINE Vector load(const hwy::bfloat16_t* from) {
  return hn::PromoteTo(Floats(), hn::LoadU(hn::Rebind<hwy::bfloat16_t, Floats>(), from));
}
inline float widen(float value) { return value; }
inline float widen(hwy::bfloat16_t value) { return hwy::F32FromBF16(value); }

// What is asked of memory ahead of its use: rows that take as long to multiply as memory takes to answer. Processors'
// own prefetching begins anew at every page, and a row is often no longer than one. Those with AVX-512 follow one
// stream of rows at 22 to 31 GB/s a core (Zen 4), where four streams, asked for ahead or not, come at 17 to 19.
constexpr int64_t kAheadBytes = 8192;
constexpr bool kOneStream = kLanes == 16;

template <typename T>
int64_t elements_ahead(const RowBlock& b, int64_t n_rows) {
  const int64_t bytes = n_rows * b.w_stride * static_cast<int64_t>(sizeof(T));
  return n_rows * b.w_stride * (1 + kAheadBytes / (bytes + 1));
}

// kX rows of x times kW rows of w.
template <int64_t kX, int64_t kW, typename T>
HWY_INLINE void tile(const RowBlock& b, int64_t i, int64_t n) {
  const Floats floats;
  const T* const w = static_cast<const T*>(b.w) + n * b.w_stride;
  const float* const x = b.x + i * b.x_stride;
  constexpr int64_t kLine = 64 / sizeof(T);
  // Sums side by side, so that none waits for itself; 16 registers have no room for it.
  constexpr int64_t kChains = kOneStream ? kLine / kLanes : 1;
  Vector sum[kChains][kX][kW];
  for (int64_t c = 0; c < kChains; ++c) {
    for (int64_t p = 0; p < kX; ++p) {
      for (int64_t q = 0; q < kW; ++q) sum[c][p][q] = hn::Zero(floats);
    }
  }
  const auto add = [&](int64_t j, int64_t c) HWY_ATTR {
    Vector weight[kW];
    for (int64_t q = 0; q < kW; ++q) weight[q] = load(w + q * b.w_stride + j);
    for (int64_t p = 0; p < kX; ++p) {
      const Vector value = hn::LoadU(floats, x + p * b.x_stride + j);
      for (int64_t q = 0; q < kW; ++q) sum[c][p][q] = hn::MulAdd(value, weight[q], sum[c][p][q]);
    }
  };
  const T* const ahead = w + elements_ahead<T>(b, kW);
  int64_t j = 0;
  for (; j + kLine <= b.depth; j += kLine) {
    if (kW > 1 && i == 0) {
      for (int64_t q = 0; q < kW; ++q) hwy::Prefetch(ahead + q * b.w_stride + j);
    }
    for (int64_t part = 0; part < kLine / kLanes; ++part) add(j + part * kLanes, part % kChains);
  }
  for (; j + kLanes <= b.depth; j += kLanes) add(j, 0);
  for (int64_t p = 0; p < kX; ++p) {
    for (int64_t q = 0; q < kW; ++q) {
      Vector whole = sum[0][p][q];
      for (int64_t c = 1; c < kChains; ++c) whole = hn::Add(whole, sum[c][p][q]);
      float total = hn::GetLane(hn::SumOfLanes(floats, whole));
      for (int64_t rest = j; rest < b.depth; ++rest)
        total += x[p * b.x_stride + rest] * widen(w[q * b.w_stride + rest]);
      b.y[(i + p) * b.y_stride + n + q] = total;
    }
  }
}

// kW rows of w against all rows of x, kX at a time: the weights then lie in the nearest cache.
template <int64_t kX, int64_t kW, typename T>
HWY_INLINE void columns(const RowBlock& b, int64_t n) {
  int64_t i = 0;
  for (; i + kX <= b.m; i += kX) tile<kX, kW, T>(b, i, n);
  if constexpr (kX > 2) {
    for (; i + 2 <= b.m; i += 2) tile<2, kW, T>(b, i, n);
  }
  for (; i < b.m; ++i) tile<1, kW, T>(b, i, n);
}

template <int64_t kX, int64_t kW, typename T>
HWY_INLINE void all_columns(const RowBlock& b, Range rows) {
  int64_t n = rows.begin;
  for (; n + kW <= rows.end; n += kW) columns<kX, kW, T>(b, n);
  for (; n < rows.end; ++n) columns<kX, 1, T>(b, n);
}

// Few rows wait for memory, of which more rows of w ask sooner; for more, widening costs less the more rows of x it is
// for. Either way 16 registers (32 of AVX-512) hold sums and operands.
template <typename T>
HWY_INLINE void all_columns(const RowBlock& b, Range rows) {
  if (b.m < (kOneStream ? 3 : 4)) {
    all_columns<2, kOneStream ? 1 : 4, T>(b, rows);
  } else {
    all_columns<4, 3, T>(b, rows);
  }
}

void multiply_rows_of_this_target(const RowBlock& b, Range rows) {
  if (b.bf16) {
    all_columns<hwy::bfloat16_t>(b, rows);
  } else {
    all_columns<float>(b, rows);
  }
}

}  // namespace parlat::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace parlat {

HWY_EXPORT(multiply_rows_of_this_target);

void multiply_rows(const RowBlock& block, Range rows) {
  HWY_DYNAMIC_DISPATCH(multiply_rows_of_this_target)(block, rows);
}

}  // namespace parlat
#endif
