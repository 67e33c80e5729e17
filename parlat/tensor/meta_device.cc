#include "parlat/tensor/meta_device.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

namespace parlat {

namespace {

void report(void* block, int64_t bytes) { c10::reportMemoryUsageToProfiler(block, bytes, 0, 0, at::kMeta); }

// Of a storage without memory: its size, at an address of its own.
struct Ghost {
  int64_t bytes;
};

void free_ghost(void* context) {
  auto* const ghost = static_cast<Ghost*>(context);
  report(ghost, -ghost->bytes);
  delete ghost;
}

class GhostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, at::kMeta};
    auto* const ghost = new Ghost{static_cast<int64_t>(bytes)};
    report(ghost, ghost->bytes);
    return {nullptr, ghost, &free_ghost, at::kMeta};
  }
  void copy_data(void*, const void*, size_t) const override {}
};

at::Tensor index_select(const at::Tensor& x, int64_t dimension, const at::Tensor& index) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape[dimension < 0 ? dimension + x.dim() : dimension] = index.numel();
  return at::empty(shape, x.options());
}

at::Tensor embedding_dense_backward(const at::Tensor& grad, const at::Tensor&, c10::SymInt rows, c10::SymInt, bool) {
  return at::empty({rows.expect_int(), grad.size(-1)}, grad.options());
}

}  // namespace

void prepare_meta_device() {
  static GhostAllocator allocator;
  [[maybe_unused]] static const bool prepared = [] {
    c10::SetAllocator(at::kMeta, &allocator, /*priority=*/1);
    static torch::Library operations(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
    operations.impl("index_select", index_select);
    operations.impl("embedding_dense_backward", embedding_dense_backward);
    return true;
  }();
}

}  // namespace parlat
