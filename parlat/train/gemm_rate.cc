#include "parlat/train/gemm_rate.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>

#include "parlat/kernels/gemm.h"

namespace parlat {

double measure_gemm_rate(at::ScalarType dtype) {
  using std::chrono::steady_clock;
  constexpr int64_t kSize = 512;
  constexpr int kRepeats = 8;
  const at::NoGradGuard no_grad;
  const Tensor a = at::ones({kSize, kSize}, dtype), b = at::ones({kSize, kSize}, dtype);
  Tensor c = at::empty({kSize, kSize}, dtype);
  gemm(a, b, c);
  double best = 0;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = steady_clock::now();
    gemm(a, b, c);
    const double seconds = std::chrono::duration<double>(steady_clock::now() - start).count();
    best = std::max(best, 2.0 * kSize * kSize * kSize / seconds);
  }
  return best;
}

}  // namespace parlat
