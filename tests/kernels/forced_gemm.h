#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "parlat/tensor/shape.h"

namespace parlat {

// bf16 products run natively or widened while it lives, whatever the machine can do.
class ForcedGemm {
 public:
  explicit ForcedGemm(const char* path) { setenv("PARLAT_BF16_GEMM", path, 1); }
  ~ForcedGemm() { unsetenv("PARLAT_BF16_GEMM"); }
  ForcedGemm(const ForcedGemm&) = delete;
  ForcedGemm& operator=(const ForcedGemm&) = delete;
};

// Tests that run on every path of products: INSTANTIATE_TEST_SUITE_P(Paths, X, kGemmPaths, gemm_path_name).
struct GemmPath {
  at::ScalarType dtype;
  const char* bf16;
};

inline const auto kGemmPaths = ::testing::Values(GemmPath{at::kDouble, "widen"}, GemmPath{at::kFloat, "widen"},
                                                 GemmPath{at::kBFloat16, "widen"}, GemmPath{at::kBFloat16, "native"});

inline std::string gemm_path_name(const ::testing::TestParamInfo<GemmPath>& info) {
  return fmt::format("{}_{}", name(info.param.dtype), info.param.bf16);
}

class OnEveryGemmPath : public ::testing::TestWithParam<GemmPath> {
 protected:
  at::ScalarType dtype() const { return GetParam().dtype; }

 private:
  ForcedGemm forced_{GetParam().bf16};
};

}  // namespace parlat
