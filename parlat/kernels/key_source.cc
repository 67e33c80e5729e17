#include "parlat/kernels/key_source.h"

#include <ATen/ATen.h>

#include <thread>

#include "parlat/base/error.h"
#include "parlat/kernels/attention_inputs.h"
#include "parlat/kernels/block_product.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/scratch.h"

namespace parlat {

namespace {

// [n, columns] of one sequence.
Tensor rows(const Tensor& x_BTd, int64_t b, Range range) {
  return x_BTd.select(0, b).narrow(0, range.begin, range.size());
}

int64_t places(int64_t batch, int64_t n_keys) { return batch * (n_keys / kFusedKeys + 1); }
int64_t place(int64_t b, int64_t n_keys, Range keys) { return b * (n_keys / kFusedKeys + 1) + keys.begin / kFusedKeys; }

}  // namespace

void HeadOrder::pause() const {
  if (abandoned_) throw InternalError("the attention of a head before this one failed");
  std::this_thread::yield();
}

class ExplicitHead final : public HeadKeys {
 public:
  ExplicitHead(const ExplicitKeys& source, int64_t h)
      : source_(source),
        h_(h),
        k_room_(kFusedKeys * source.k_.size(3), block_options(source.k_)),
        v_room_(kFusedKeys * source.v_.size(3), block_options(source.v_)) {}

  KeyBlock load(int64_t b, Range keys) override {
    return {k_room_.packed(of_head(source_.k_, b, keys)), v_room_.packed(of_head(source_.v_, b, keys))};
  }

  void add_gradients(int64_t b, Range keys, const KeyBlock& gradients) override {
    const Tensor grad_k = of_head(source_.grad_k_, b, keys), grad_v = of_head(source_.grad_v_, b, keys);
    if (source_.order_ == nullptr) {  // nobody else's: written once
      grad_k.copy_(gradients.k);
      grad_v.copy_(gradients.v);
      return;
    }
    source_.order_->in_turn(place(b, source_.n_keys(), keys), h_, [&] {
      grad_k.add_(gradients.k);
      grad_v.add_(gradients.v);
    });
  }

 private:
  Tensor of_head(const Tensor& x_BTKd, int64_t b, Range keys) const {
    return rows(x_BTKd.select(2, x_BTKd.size(2) == 1 ? 0 : h_), b, keys);
  }

  const ExplicitKeys& source_;
  int64_t h_;
  Scratch k_room_, v_room_;
};

ExplicitKeys::ExplicitKeys(const Tensor& k_BTKd, const Tensor& v_BTKv, const Tensor& grad_k, const Tensor& grad_v)
    : k_(k_BTKd), v_(v_BTKv), grad_k_(grad_k), grad_v_(grad_v) {
  if (k_.size(2) == 1) order_ = std::make_unique<HeadOrder>(places(k_.size(0), n_keys()));
}

void ExplicitKeys::abandon() const {
  if (order_ != nullptr) order_->abandon();
}

std::unique_ptr<HeadKeys> ExplicitKeys::head(int64_t h) const { return std::make_unique<ExplicitHead>(*this, h); }

class LatentHead final : public HeadKeys {
 public:
  LatentHead(const LatentKeys& source, int64_t h)
      : source_(source),
        h_(h),
        w_(widened(rows_of_head(source.w_), block_dtype(source.latent_))),
        c_room_(kFusedKeys * d_latent(), block_options(source.latent_)),
        k_room_(kFusedKeys * (source.d_nope_ + d_rope()), block_options(source.latent_)),
        v_room_(kFusedKeys * source.d_v(), block_options(source.latent_)),
        grad_k_room_(rounded_size(source.latent_, kFusedKeys * source.d_nope_), block_options(source.latent_)),
        grad_v_room_(rounded_size(source.latent_, kFusedKeys * source.d_v()), block_options(source.latent_)) {
    if (source.grad_w_.defined()) grad_w_ = metered("scratch", at::zeros(w_.sizes(), compute_options(w_)));
  }

  KeyBlock load(int64_t b, Range keys) override {
    const Tensor latent = rows(source_.latent_, b, keys);
    c_ = c_room_.converted(latent.narrow(1, 0, d_latent()));
    const Tensor k = k_room_.matrix(keys.size(), source_.d_nope_ + d_rope());
    const Tensor v = v_room_.matrix(keys.size(), source_.d_v());
    multiply(c_, key_rows(w_).t(), k.narrow(1, 0, source_.d_nope_));
    k.narrow(1, source_.d_nope_, d_rope()).copy_(latent.narrow(1, d_latent(), d_rope()));
    multiply(c_, value_rows(w_).t(), v);
    return {k, v};
  }

  void add_gradients(int64_t b, Range keys, const KeyBlock& gradients) override {
    const Tensor grad_nope = grad_k_room_.converted(gradients.k.narrow(1, 0, source_.d_nope_));
    const Tensor grad_v = grad_v_room_.converted(gradients.v);
    accumulate(grad_nope.t(), c_, key_rows(grad_w_));
    accumulate(grad_v.t(), c_, value_rows(grad_w_));
    source_.order_->in_turn(place(b, source_.n_keys(), keys), h_, [&] {
      const Tensor grad = rows(source_.grad_latent_, b, keys), grad_c = grad.narrow(1, 0, d_latent());
      accumulate(grad_nope, key_rows(w_), grad_c);
      accumulate(grad_v, value_rows(w_), grad_c);
      grad.narrow(1, d_latent(), d_rope()).add_(gradients.k.narrow(1, source_.d_nope_, d_rope()));
    });
  }

  void finish() override { rows_of_head(source_.grad_w_).add_(grad_w_); }

 private:
  int64_t d_latent() const { return source_.w_.size(1); }
  int64_t d_rope() const { return source_.latent_.size(2) - d_latent(); }
  Tensor rows_of_head(const Tensor& w) const {
    const int64_t n = source_.d_nope_ + source_.d_v();
    return w.narrow(0, h_ * n, n);
  }
  Tensor key_rows(const Tensor& w) const { return w.narrow(0, 0, source_.d_nope_); }
  Tensor value_rows(const Tensor& w) const { return w.narrow(0, source_.d_nope_, source_.d_v()); }

  const LatentKeys& source_;
  int64_t h_;
  Tensor w_, grad_w_, c_;  // w [N+V, L]; c_: the latents of the block at hand
  Scratch c_room_, k_room_, v_room_, grad_k_room_, grad_v_room_;
};

LatentKeys::LatentKeys(const Tensor& latent_BTd, const Tensor& w_ukv_hL, int64_t n_heads, int64_t d_nope,
                       const Tensor& grad_latent, const Tensor& grad_w)
    : latent_(latent_BTd),
      w_(w_ukv_hL),
      grad_latent_(grad_latent),
      grad_w_(grad_w),
      n_heads_(n_heads),
      d_nope_(d_nope),
      order_(std::make_unique<HeadOrder>(places(latent_.size(0), n_keys()))) {}

std::unique_ptr<HeadKeys> LatentKeys::head(int64_t h) const { return std::make_unique<LatentHead>(*this, h); }

}  // namespace parlat
