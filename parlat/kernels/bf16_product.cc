#include "parlat/kernels/bf16_product.h"

#include <ATen/ATen.h>
#include <ATen/cpu/Utils.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "parlat/base/error.h"

// Exported by oneDNN but in none of its headers, and torch brings headers of another oneDNN: row-major.
extern "C" int dnnl_gemm_bf16bf16f32(char transpose_a, char transpose_b, int64_t m, int64_t n, int64_t k, float alpha,
                                     const void* a, int64_t a_stride, const void* b, int64_t b_stride, float beta,
                                     float* c, int64_t c_stride);

namespace parlat {

namespace {

constexpr int kSuccess = 0, kUnimplemented = 3;  // of dnnl_status_t

// Whether x's rows are runs of memory that do not overlap.
bool has_plain_rows(const Tensor& x) {
  return (x.stride(1) == 1 || x.size(1) == 1) && (x.stride(0) >= x.size(1) || x.size(0) == 1);
}

int64_t row_stride(const Tensor& x) { return std::max(x.stride(0), x.size(1)); }

struct Operand {
  explicit Operand(const Tensor& x)
      : matrix(has_plain_rows(x) || has_plain_rows(x.t()) ? x : x.contiguous()),
        transpose(has_plain_rows(matrix) ? 'N' : 'T'),
        stride(row_stride(transpose == 'N' ? matrix : matrix.t())) {}
  const void* data() const { return matrix.const_data_ptr(); }
  Tensor matrix;
  char transpose;
  int64_t stride;
};

}  // namespace

bool native_bf16_gemm() {
  if (const char* forced = std::getenv("PARLAT_BF16_GEMM")) {
    if (std::string_view(forced) == "native") return true;
    if (std::string_view(forced) == "widen") return false;
    throw ConfigError("PARLAT_BF16_GEMM: expected native or widen, got '{}'", forced);
  }
  static const bool native = [] {
    const auto capabilities = at::cpu::get_cpu_capabilities();
    const auto has = [&](const char* name) {
      const auto found = capabilities.find(name);
      return found != capabilities.end() && found->second.isBool() && found->second.toBool();
    };
    return has("avx512_bf16") || has("amx_bf16");
  }();
  return native;
}

bool bf16_product(const Tensor& a_mk, const Tensor& b_kn, const Tensor& c_mn, double alpha, double beta) {
  PARLAT_ASSERT(
      a_mk.scalar_type() == at::kBFloat16 && b_kn.scalar_type() == at::kBFloat16 && c_mn.scalar_type() == at::kFloat,
      "operands {} and {}, sums {}", name(a_mk.scalar_type()), name(b_kn.scalar_type()), name(c_mn.scalar_type()));
  if (c_mn.is_meta()) return true;
  PARLAT_ASSERT(has_plain_rows(c_mn), "sums of strides {}", shape_text(c_mn.strides()));
  const Operand a(a_mk), b(b_kn);
  Tensor c = c_mn;
  const int status = dnnl_gemm_bf16bf16f32(a.transpose, b.transpose, c.size(0), c.size(1), a_mk.size(1),
                                           static_cast<float>(alpha), a.data(), a.stride, b.data(), b.stride,
                                           static_cast<float>(beta), c.mutable_data_ptr<float>(), row_stride(c));
  PARLAT_ASSERT(status == kSuccess || status == kUnimplemented, "oneDNN's status {}", status);
  return status == kSuccess;
}

}  // namespace parlat
