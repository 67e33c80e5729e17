#include "parlat/kernels/softmax_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "parlat/kernels/instruction_sets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "parlat/kernels/softmax_rows.cc"  // this file again, once an instruction set
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

// Plain loops, which the compiler vectorises anew for each instruction set: the order of sums, and so their bits, stay.
HWY_BEFORE_NAMESPACE();
namespace parlat::HWY_NAMESPACE {

// Partial results that the compiler keeps in vector registers.
constexpr int64_t kLanes = 32;

// Partial results become one.
template <typename T, typename Combine>
HWY_INLINE T over_lanes(const T* lanes, const Combine& combine) {
  T total = lanes[0];
  for (int64_t j = 1; j < kLanes; ++j) total = combine(total, lanes[j]);
  return total;
}

// Calls body(i, lane) for all i below n.
template <typename Body>
HWY_INLINE void by_lanes(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) body(i + j, j);
  }
  for (int64_t j = 0; i < n; ++i, ++j) body(i, j);
}

// Combines value(0), ..., value(n - 1) lane by lane, then over the lanes.
template <typename T, typename Combine, typename Value>
HWY_INLINE T reduce(int64_t n, T start, const Combine& combine, const Value& value) {
  T lanes[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) lanes[j] = start;
  by_lanes(n, [&](int64_t i, int64_t j) { lanes[j] = combine(lanes[j], value(i)); });
  return over_lanes(lanes, combine);
}

constexpr auto kAdd = [](auto a, auto b) { return a + b; };
constexpr auto kMax = [](auto a, auto b) { return b > a ? b : a; };

// Compilers vectorise no comparison of floats that might trap on NaN, so floats are compared as bits here and below.
HWY_INLINE bool has_nan(const float* x, int64_t n) {
  constexpr uint32_t kInfinity = std::bit_cast<uint32_t>(std::numeric_limits<float>::infinity());
  return reduce<uint32_t>(n, 0, kMax, [&](int64_t i) { return std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu; }) >
         kInfinity;
}
HWY_INLINE bool has_nan(const double* x, int64_t n) {
  return std::any_of(x, x + n, [](double value) { return std::isnan(value); });
}

// Cephes' expf for x <= 0, no NaN: exp(x) = 2^n exp(r), |r| <= ln(2) / 2, a polynomial of degree 7 in r. From n = -127
// on, where x is clamped, the exponent's bits are 0 and so is the result.
HWY_INLINE float exp_nonpositive(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  constexpr uint32_t kLowest = std::bit_cast<uint32_t>(-88.0f);
  const float clamped = std::bit_cast<float>(std::min(std::bit_cast<uint32_t>(x), kLowest));
  const float shifted = clamped * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float exp_r = p * (r * r) + r + 1.0f;
  const uint32_t exponent = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound) + 127u;
  return exp_r * std::bit_cast<float>(exponent << 23);
}
HWY_INLINE double exp_nonpositive(double x) { return std::exp(x); }

template <typename T>
HWY_INLINE void clear_outside(T* row, int64_t n, Range inside) {
  std::fill(row, row + inside.begin, T(0));
  std::fill(row + inside.end, row + n, T(0));
}

// The bits of the nearest bf16, to even, above others. No NaN, which may become something else.
HWY_INLINE uint32_t nearest_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return bits + 0x7fffu + (bits >> 16 & 1u);
}
HWY_INLINE float rounded_to_bf16(float x) { return std::bit_cast<float>(nearest_bf16(x) & 0xffff0000u); }

// Scores become exp(score - max), rounded to bf16 if kRound; returned with max and the sums of both.
template <bool kRound, typename T>
HWY_INLINE RunningSoftmax<T> exponentials(T* __restrict x, int64_t n, T max) {
  T sums[kLanes] = {}, weights[kLanes] = {};
  by_lanes(n, [&](int64_t i, int64_t j) {
    const T exact = exp_nonpositive(x[i] - max);
    sums[j] += exact;
    x[i] = exact;
    if constexpr (kRound) {
      x[i] = rounded_to_bf16(exact);
      weights[j] += x[i];
    }
  });
  const T sum = over_lanes(sums, kAdd);
  return {max, sum, kRound ? over_lanes(weights, kAdd) : sum};
}

template <typename T>
HWY_INLINE void softmax(T* __restrict row, int64_t n, Range inside) {
  clear_outside(row, n, inside);
  T* __restrict x = row + inside.begin;
  const int64_t size = inside.size();
  if (size == 0) return;
  const auto element = [&](int64_t i) { return x[i]; };
  const T max = reduce<T>(size, -std::numeric_limits<T>::infinity(), kMax, element);
  if (!std::isfinite(max) || has_nan(x, size)) {
    std::fill(x, x + size, std::numeric_limits<T>::quiet_NaN());
    return;
  }
  const T inverse_sum = T(1) / exponentials<false>(x, size, max).sum;
  for (int64_t i = 0; i < size; ++i) x[i] *= inverse_sum;
}

template <typename T>
HWY_INLINE void softmax_backward(const T* __restrict p, T* __restrict grad, int64_t n, T scale) {
  const T along = reduce<T>(n, T(0), kAdd, [&](int64_t i) { return p[i] * grad[i]; });
  for (int64_t i = 0; i < n; ++i) grad[i] = p[i] * (grad[i] - along) * scale;
}

HWY_INLINE void write_bf16(const float* __restrict row, int64_t n, uint16_t* __restrict bf16) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(row[i]) & 0x7fffffffu;
    bf16[i] = static_cast<uint16_t>((magnitude > 0x7f800000u ? 0x7fc00000u : nearest_bf16(row[i])) >> 16);
  }
}

template <bool kRound, typename T>
HWY_INLINE T join(T* __restrict row, int64_t n, Range inside, RunningSoftmax<T>& so_far) {
  clear_outside(row, n, inside);
  T* __restrict x = row + inside.begin;
  const int64_t size = inside.size();
  const auto element = [&](int64_t i) { return x[i]; };
  const T new_max = kMax(so_far.max, reduce<T>(size, -std::numeric_limits<T>::infinity(), kMax, element));
  if (has_nan(x, size) || new_max == std::numeric_limits<T>::infinity()) {
    std::fill(x, x + size, std::numeric_limits<T>::quiet_NaN());
    so_far.sum = so_far.weight = std::numeric_limits<T>::quiet_NaN();
    return T(1);
  }
  if (new_max == -std::numeric_limits<T>::infinity()) {  // nothing but -inf so far
    std::fill(x, x + size, T(0));
    return T(1);
  }
  const RunningSoftmax<T> block = exponentials<kRound>(x, size, new_max);
  const T shrink = exp_nonpositive(so_far.max - new_max);
  so_far = {new_max, so_far.sum * shrink + block.sum, so_far.weight * shrink + block.weight};
  return shrink;
}

template <typename T>
HWY_INLINE void regain(T* __restrict row, T* __restrict grad, int64_t n, Range inside, bool whole, T lse, T along,
                       T scale) {
  clear_outside(row, n, inside);
  clear_outside(grad, n, inside);
  T* __restrict x = row + inside.begin;
  T* __restrict g = grad + inside.begin;
  const int64_t size = inside.size();
  if (!std::isfinite(lse) || has_nan(x, size)) {
    std::fill(x, x + size, std::numeric_limits<T>::quiet_NaN());
    std::fill(g, g + size, std::numeric_limits<T>::quiet_NaN());
    return;
  }
  for (int64_t i = 0; i < size; ++i) x[i] = exp_nonpositive(x[i] - lse);
  if (whole) along = reduce<T>(size, T(0), kAdd, [&](int64_t i) { return x[i] * g[i]; });
  for (int64_t i = 0; i < size; ++i) {
    const T unsettled = x[i] == T(1) ? T(0) : T(1);
    g[i] = x[i] * (g[i] - along) * (scale * unsettled);
  }
}

float join_floats(float* row, int64_t n, Range inside, RunningSoftmax<float>& so_far, uint16_t* bf16) {
  if (bf16 == nullptr) return join<false>(row, n, inside, so_far);
  const float shrink = join<true>(row, n, inside, so_far);
  write_bf16(row, n, bf16);
  return shrink;
}
void regain_floats(float* row, float* grad, int64_t n, Range inside, bool whole, float lse, float along, float scale,
                   uint16_t* row_bf16, uint16_t* grad_bf16) {
  regain(row, grad, n, inside, whole, lse, along, scale);
  if (row_bf16 != nullptr) write_bf16(row, n, row_bf16);
  if (grad_bf16 != nullptr) write_bf16(grad, n, grad_bf16);
}
void softmax_floats(float* row, int64_t n, Range inside) { softmax(row, n, inside); }
void softmax_floats_backward(const float* p, float* grad, int64_t n, float scale) {
  softmax_backward(p, grad, n, scale);
}

}  // namespace parlat::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace parlat {

HWY_EXPORT(join_floats);
HWY_EXPORT(regain_floats);
HWY_EXPORT(softmax_floats);
HWY_EXPORT(softmax_floats_backward);

float join_softmax_row(float* row, int64_t n, Range inside, RunningSoftmax<float>& so_far, uint16_t* bf16) {
  apply_instruction_set();
  return HWY_DYNAMIC_DISPATCH(join_floats)(row, n, inside, so_far, bf16);
}
void regain_softmax_row(float* row, float* grad, int64_t n, Range inside, bool whole, float lse, float along,
                        float scale, uint16_t* row_bf16, uint16_t* grad_bf16) {
  apply_instruction_set();
  HWY_DYNAMIC_DISPATCH(regain_floats)(row, grad, n, inside, whole, lse, along, scale, row_bf16, grad_bf16);
}
void softmax_row(float* row, int64_t n, Range inside) {
  apply_instruction_set();
  HWY_DYNAMIC_DISPATCH(softmax_floats)(row, n, inside);
}
void softmax_row_backward(const float* p, float* grad, int64_t n, float scale) {
  apply_instruction_set();
  HWY_DYNAMIC_DISPATCH(softmax_floats_backward)(p, grad, n, scale);
}

// fp64 is for comparisons: the baseline's version.
double join_softmax_row(double* row, int64_t n, Range inside, RunningSoftmax<double>& so_far, uint16_t*) {
  return HWY_NAMESPACE::join<false>(row, n, inside, so_far);
}
void regain_softmax_row(double* row, double* grad, int64_t n, Range inside, bool whole, double lse, double along,
                        double scale, uint16_t*, uint16_t*) {
  HWY_NAMESPACE::regain(row, grad, n, inside, whole, lse, along, scale);
}
void softmax_row(double* row, int64_t n, Range inside) { HWY_NAMESPACE::softmax(row, n, inside); }
void softmax_row_backward(const double* p, double* grad, int64_t n, double scale) {
  HWY_NAMESPACE::softmax_backward(p, grad, n, scale);
}

}  // namespace parlat
#endif
