#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <vector>

#include "parlat/base/range.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// Some keys and values of one head, k [n, d], v [n, v], in block_dtype (block_product.h); or their gradients, in the
// dtype of the arithmetic.
struct KeyBlock {
  Tensor k, v;
};

// Keys and values of one head, a block at a time. One thread's.
class HeadKeys {
 public:
  virtual ~HeadKeys() = default;
  // Keys `keys` of sequence b. Valid until the next load.
  virtual KeyBlock load(int64_t b, Range keys) = 0;
  // Takes the gradients of the block that was loaded last; called for the blocks in increasing order.
  virtual void add_gradients(int64_t b, Range keys, const KeyBlock& gradients) = 0;
  // After the last block: what is summed over all keys is written.
  virtual void finish() {}
};

// Where fused attention takes keys and values from, and where their gradients go.
class KeySource {
 public:
  virtual ~KeySource() = default;
  virtual int64_t n_keys() const = 0;
  virtual int64_t d_v() const = 0;
  // To be called for heads in increasing order.
  virtual std::unique_ptr<HeadKeys> head(int64_t h) const = 0;
  // A head failed: those that wait for their turn after it throw.
  virtual void abandon() const {}
};

// Lets heads add to a sum that they share, in the order of their numbers, so that it doesn't depend on the threads.
// Heads must be begun in that order.
class HeadOrder {
 public:
  explicit HeadOrder(int64_t places) : next_(places) {}
  template <typename Body>
  void in_turn(int64_t place, int64_t head, const Body& body) {
    while (next_[place].load(std::memory_order_acquire) != head) pause();
    body();
    next_[place].store(head + 1, std::memory_order_release);
  }

  void abandon() { abandoned_ = true; }

 private:
  // Throws InternalError once abandoned.
  void pause() const;
  std::vector<std::atomic<int64_t>> next_;
  std::atomic<bool> abandoned_ = false;
};

// k [B, T, K, d], v [B, T, K, v]; K = n_heads, or 1: one key and value for all heads. Gradients, where defined: like k
// and v, of which the rows that are seen are written; for K = 1 added to, in the dtype of the arithmetic.
class ExplicitKeys final : public KeySource {
 public:
  ExplicitKeys(const Tensor& k_BTKd, const Tensor& v_BTKv, const Tensor& grad_k = {}, const Tensor& grad_v = {});
  int64_t n_keys() const override { return k_.size(1); }
  int64_t d_v() const override { return v_.size(3); }
  std::unique_ptr<HeadKeys> head(int64_t h) const override;
  void abandon() const override;

 private:
  friend class ExplicitHead;
  Tensor k_, v_, grad_k_, grad_v_;
  std::unique_ptr<HeadOrder> order_;
};

// latent [B, T, L+R] and w_ukv [h (N+V), L], rebuilt a block at a time: k_nope = c_kv w_uk^T, k_rope, v = c_kv w_uv^T.
// Gradients, where defined, are added to: grad_latent [B, T, L+R] in the dtype of the arithmetic, grad_w like w_ukv.
//   cost  n (N+V) L multiply-adds a block and head, twice that for its gradients
class LatentKeys final : public KeySource {
 public:
  LatentKeys(const Tensor& latent_BTd, const Tensor& w_ukv_hL, int64_t n_heads, int64_t d_nope,
             const Tensor& grad_latent = {}, const Tensor& grad_w = {});
  int64_t n_keys() const override { return latent_.size(1); }
  int64_t d_v() const override { return w_.size(0) / n_heads_ - d_nope_; }
  std::unique_ptr<HeadKeys> head(int64_t h) const override;
  void abandon() const override { order_->abandon(); }

 private:
  friend class LatentHead;
  Tensor latent_, w_, grad_latent_, grad_w_;
  int64_t n_heads_, d_nope_;
  std::unique_ptr<HeadOrder> order_;
};

// Keys a block; what a thread holds of a head beside its running sums grows with it.
inline constexpr int64_t kFusedKeys = 512;

}  // namespace parlat
