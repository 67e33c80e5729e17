#include "parlat/kernels/block_product.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "parlat/base/error.h"
#include "parlat/kernels/attention_inputs.h"
#include "parlat/kernels/gemm.h"

// In torch's own library where that is built with MKL, absent elsewhere; torch has no operator for it on CPUs.
extern "C" __attribute__((weak)) void cblas_gemm_bf16bf16f32(int layout, int transpose_a, int transpose_b, int m, int n,
                                                             int k, float alpha, const void* a, int a_stride,
                                                             const void* b, int b_stride, float beta, float* c,
                                                             int c_stride);

namespace parlat {

namespace {

constexpr int kRowMajor = 101, kAsItIs = 111, kTransposed = 112;

// Whether x's rows are runs of memory that do not overlap.
bool has_plain_rows(const Tensor& x) {
  return (x.stride(1) == 1 || x.size(1) == 1) && (x.stride(0) >= x.size(1) || x.size(0) == 1);
}

int row_stride(const Tensor& x) { return static_cast<int>(std::max(x.stride(0), x.size(1))); }

struct Operand {
  explicit Operand(const Tensor& x)
      : matrix(has_plain_rows(x) || has_plain_rows(x.t()) ? x : x.contiguous()),
        transpose(has_plain_rows(matrix) ? kAsItIs : kTransposed),
        stride(row_stride(transpose == kAsItIs ? matrix : matrix.t())) {}
  const void* data() const { return matrix.const_data_ptr(); }
  Tensor matrix;
  int transpose, stride;
};

void product(const Tensor& a, const Tensor& b, Tensor c, double alpha, double beta) {
  const bool into_fp32 = a.scalar_type() == at::kBFloat16 && c.scalar_type() == at::kFloat;
  if (!into_fp32) {
    at::addmm_out(c, c, a, b, beta, alpha);
    return;
  }
  PARLAT_ASSERT(b.scalar_type() == at::kBFloat16, "operands bf16 and {}", name(b.scalar_type()));
  const Operand left(a), right(b);
  cblas_gemm_bf16bf16f32(kRowMajor, left.transpose, right.transpose, static_cast<int>(a.size(0)),
                         static_cast<int>(b.size(1)), static_cast<int>(a.size(1)), static_cast<float>(alpha),
                         left.data(), left.stride, right.data(), right.stride, static_cast<float>(beta),
                         c.mutable_data_ptr<float>(), row_stride(c));
}

}  // namespace

at::ScalarType block_dtype(const Tensor& x) {
  const bool bf16 = (x.is_cpu() || x.is_meta()) && x.scalar_type() == at::kBFloat16;
  return bf16 && cblas_gemm_bf16bf16f32 != nullptr && native_bf16_gemm() ? at::kBFloat16
                                                                         : compute_dtype(x.scalar_type());
}

at::TensorOptions block_options(const Tensor& x) { return compute_options(x).dtype(block_dtype(x)); }

int64_t rounded_size(const Tensor& x, int64_t size) {
  return block_dtype(x) == compute_dtype(x.scalar_type()) ? 0 : size;
}

void multiply(const Tensor& a_mk, const Tensor& b_kn, const Tensor& c_mn, double scale) {
  product(a_mk, b_kn, c_mn, scale, 0);
}

void accumulate(const Tensor& a_mk, const Tensor& b_kn, const Tensor& c_mn) { product(a_mk, b_kn, c_mn, 1, 1); }

}  // namespace parlat
