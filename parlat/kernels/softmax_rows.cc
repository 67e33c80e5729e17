#include "parlat/kernels/softmax_rows.h"

#include <bit>
#include <cmath>
#include <limits>

// One version a vector width; the loader picks. Sanitizers can't run the picker.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define PARLAT_VECTOR_VERSIONS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PARLAT_VECTOR_VERSIONS
#endif

namespace parlat {

namespace {

// Partial results that the compiler keeps in vector registers.
constexpr int64_t kLanes = 32;

// Cephes' expf for x <= 0: exp(x) = 2^n exp(r), |r| <= ln(2) / 2, a polynomial of degree 7 in r. NaN stays NaN.
inline float exp_nonpositive(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float exp_r = p * (r * r) + r + 1.0f;
  const uint32_t exponent = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound) + 127u;
  const float y = exp_r * std::bit_cast<float>(exponent << 23);
  return x < -87.3f ? 0.0f : y;
}
inline double exp_nonpositive(double x) { return std::exp(x); }

// Reduces row[0, n) with `add` lane by lane, then over the lanes.
template <typename T, typename Add>
inline T reduce(int64_t n, T start, const Add& add, const auto& value) {
  T lanes[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) lanes[j] = start;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] = add(lanes[j], value(i + j));
  }
  for (int64_t j = 0; i < n; ++i, ++j) lanes[j] = add(lanes[j], value(i));
  T total = lanes[0];
  for (int64_t j = 1; j < kLanes; ++j) total = add(total, lanes[j]);
  return total;
}

template <typename T>
inline void softmax(T* __restrict row, int64_t n, Range inside) {
  for (int64_t i = 0; i < inside.begin; ++i) row[i] = 0;
  for (int64_t i = inside.end; i < n; ++i) row[i] = 0;
  T* __restrict x = row + inside.begin;
  const int64_t size = inside.size();
  // NaN never wins here; it comes back through exp.
  const T max = reduce<T>(
      size, -std::numeric_limits<T>::infinity(), [](T a, T b) { return b > a ? b : a; },
      [&](int64_t i) { return x[i]; });
  for (int64_t i = 0; i < size; ++i) x[i] = exp_nonpositive(x[i] - max);
  const T inverse_sum = T(1) / reduce<T>(
                                   size, T(0), [](T a, T b) { return a + b; }, [&](int64_t i) { return x[i]; });
  for (int64_t i = 0; i < size; ++i) x[i] *= inverse_sum;
}

template <typename T>
inline void softmax_backward(const T* __restrict p, T* __restrict grad, int64_t n, T scale) {
  const T along = reduce<T>(
      n, T(0), [](T a, T b) { return a + b; }, [&](int64_t i) { return p[i] * grad[i]; });
  for (int64_t i = 0; i < n; ++i) grad[i] = p[i] * (grad[i] - along) * scale;
}

}  // namespace

PARLAT_VECTOR_VERSIONS void softmax_row(float* row, int64_t n, Range inside) { softmax(row, n, inside); }
void softmax_row(double* row, int64_t n, Range inside) { softmax(row, n, inside); }

PARLAT_VECTOR_VERSIONS void softmax_row_backward(const float* p, float* grad, int64_t n, float scale) {
  softmax_backward(p, grad, n, scale);
}
void softmax_row_backward(const double* p, double* grad, int64_t n, double scale) {
  softmax_backward(p, grad, n, scale);
}

}  // namespace parlat
