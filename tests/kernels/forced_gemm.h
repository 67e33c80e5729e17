#pragma once

#include <cstdlib>

namespace parlat {

// bf16 products run natively or widened while it lives, whatever the machine can do.
class ForcedGemm {
 public:
  explicit ForcedGemm(const char* path) { setenv("PARLAT_BF16_GEMM", path, 1); }
  ~ForcedGemm() { unsetenv("PARLAT_BF16_GEMM"); }
  ForcedGemm(const ForcedGemm&) = delete;
  ForcedGemm& operator=(const ForcedGemm&) = delete;
};

}  // namespace parlat
