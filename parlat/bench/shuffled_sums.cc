#include "parlat/bench/shuffled_sums.h"

#include <ATen/ops/addmm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

#include "parlat/base/error.h"
#include "parlat/base/range.h"

namespace parlat {

namespace {

// A key that torch keeps for modes of one process, which nothing but the scopes below turns on.
constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local ShuffledSums* current = nullptr;

// out = beta self + alpha a b.
Tensor& add_product_in_drawn_order(const Tensor& self, const Tensor& a_mk, const Tensor& b_kn, const at::Scalar& beta,
                                   const at::Scalar& alpha, Tensor& out) {
  const c10::impl::ExcludeDispatchKeyGuard plainly(kKey);
  PARLAT_ASSERT(current != nullptr, "a product on a thread that has no scope");
  const int64_t depth = a_mk.size(1), parts = std::clamp<int64_t>(depth, 1, ShuffledSums::kParts);
  bool first = true;
  for (const int64_t index : current->draw(parts)) {
    const Range part = even_share(depth, parts, index);
    at::addmm_out(out, first ? self : out, a_mk.narrow(1, part.begin, part.size()),
                  b_kn.narrow(0, part.begin, part.size()), first ? beta : 1, alpha);
    first = false;
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) { library.impl("addmm.out", &add_product_in_drawn_order); }

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

ShuffledSums::Scope::Scope(ShuffledSums& sums) {
  PARLAT_ASSERT(current == nullptr, "two scopes on one thread");
  current = &sums;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

ShuffledSums::Scope::~Scope() {
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  current = nullptr;
}

std::vector<int64_t> ShuffledSums::draw(int64_t parts) {
  std::vector<int64_t> order(parts);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_);
  return order;
}

}  // namespace parlat
