// Which blocks of keys the fused kernel loads: those that a query sees.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "parlat/kernels/fused_passes.h"
#include "tests/kernels/attention_case.h"

namespace parlat {
namespace {

// How often each block of each sequence was loaded, by the keys that were asked for.
using Loads = std::map<std::pair<int64_t, int64_t>, int64_t>;  // (sequence, block)

class CountingKeys final : public KeySource {
 public:
  CountingKeys(const KeySource& keys, Loads& loads) : keys_(keys), loads_(loads) {}
  int64_t n_keys() const override { return keys_.n_keys(); }
  int64_t d_v() const override { return keys_.d_v(); }
  std::unique_ptr<HeadKeys> head(int64_t h) const override { return std::make_unique<Head>(keys_.head(h), *this); }
  void abandon() const override { keys_.abandon(); }

 private:
  class Head final : public HeadKeys {
   public:
    Head(std::unique_ptr<HeadKeys> head, const CountingKeys& counting) : head_(std::move(head)), counting_(counting) {}
    KeyBlock load(int64_t b, Range keys) override {
      const std::lock_guard lock(counting_.mutex_);
      ++counting_.loads_[{b, keys.begin / kFusedKeys}];
      return head_->load(b, keys);
    }
    void add_gradients(int64_t b, Range keys, const KeyBlock& gradients) override {
      head_->add_gradients(b, keys, gradients);
    }
    void finish() override { head_->finish(); }

   private:
    std::unique_ptr<HeadKeys> head_;
    const CountingKeys& counting_;
  };
  const KeySource& keys_;
  Loads& loads_;
  mutable std::mutex mutex_;
};

// As many loads of a block as heads, where any query sees a key of it.
Loads needed(const KeyRanges& visible, int64_t n_heads) {
  Loads loads;
  for (int64_t b = 0; b < visible.batch(); ++b) {
    for (int64_t s = 0; s < visible.n_queries(); ++s) {
      for (int64_t key = visible.row(b, s).begin; key < visible.row(b, s).end; ++key)
        loads[{b, key / kFusedKeys}] = n_heads;
    }
  }
  return loads;
}

KeyRanges rows_of_one(int64_t n_keys, const std::vector<std::pair<int64_t, Range>>& runs) {
  std::vector<Range> rows;
  for (const auto& [count, seen] : runs) rows.insert(rows.end(), count, seen);
  const auto n_queries = static_cast<int64_t>(rows.size());
  return {1, n_queries, n_keys, std::move(rows)};
}

TEST(KeyBlocks, ThatNoQuerySeesAreNotLoaded) {
  const std::pair<const char*, KeyRanges> cases[] = {
      {"causal", causal(2, 1100)},
      {"documents", packed(2, 1100, true)},
      {"later tokens", rows_of_one(1024, {{700, {0, 0}}})},
      // Zigzag: of the first and last quarter the second and third see the first.
      {"zigzag", rows_of_one(1024, {{1024, {0, 512}}})},
      {"the last document", rows_of_one(1600, {{100, {1300, 1500}}})},
      {"the first and the last document", rows_of_one(1600, {{100, {0, 200}}, {100, {1100, 1500}}})},
      {"documents far apart in one block of queries", rows_of_one(2100, {{20, {0, 200}}, {20, {2050, 2100}}})},
  };
  constexpr int64_t kHeads = 2;
  for (const auto& [name, visible] : cases) {
    SCOPED_TRACE(name);
    const AttentionCase c = random_case(visible, kHeads, kHeads, at::kFloat);
    const at::NoGradGuard no_grad;
    const FusedQuery query{c.q, visible, kScale};
    const Tensor out = at::empty(c.grad.sizes()), lse = at::empty(c.grad.sizes().slice(0, 3));
    const Tensor grad_q = at::zeros(c.q.sizes()), grad_k = at::zeros(c.k.sizes()), grad_v = at::zeros(c.v.sizes());
    Loads forward, backward;
    const ExplicitKeys keys(c.k, c.v, grad_k, grad_v);
    fused_forward(query, CountingKeys(keys, forward), out, lse);
    EXPECT_EQ(forward, needed(visible, kHeads));
    fused_backward(query, CountingKeys(keys, backward), out_along_gradient(out, c.grad), lse, c.grad, grad_q);
    EXPECT_EQ(backward, needed(visible, kHeads));
  }
}

}  // namespace
}  // namespace parlat
