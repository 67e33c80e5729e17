#include "parlat/kernels/block_product.h"

#include <ATen/ATen.h>
#include <omp.h>

#include "parlat/kernels/attention_inputs.h"
#include "parlat/kernels/bf16_product.h"
#include "parlat/kernels/gemm.h"

namespace parlat {

namespace {

// Products run within tasks that share the threads out: one alone takes no more, so that its sums keep their order.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

void product(const Tensor& a, const Tensor& b, Tensor c, double alpha, double beta) {
  if (a.scalar_type() == at::kBFloat16 && c.scalar_type() == at::kFloat) {
    const OneThread one_thread;
    if (bf16_product(a, b, c, alpha, beta)) return;
    at::addmm_out(c, c, a.to(at::kFloat), b.to(at::kFloat), beta, alpha);  // a block, where native is forced
  } else {
    at::addmm_out(c, c, a, b, beta, alpha);
  }
}

}  // namespace

at::ScalarType block_dtype(const Tensor& x) {
  const bool bf16 = (x.is_cpu() || x.is_meta()) && x.scalar_type() == at::kBFloat16;
  return bf16 && native_bf16_gemm() ? at::kBFloat16 : compute_dtype(x.scalar_type());
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
