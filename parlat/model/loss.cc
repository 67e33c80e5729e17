#include "parlat/base/error.h"
#include "parlat/base/range.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/model/transformer.h"
#include "parlat/tensor/memory_meter.h"

namespace parlat {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// 16 MiB of fp32 logits at once, but never so few tokens that reading the head dominates.
constexpr int64_t kBlockLogits = 1 << 22;
constexpr int64_t kMinBlockTokens = 64;

template <typename Body>
void for_each_block(int64_t n_tokens, int64_t vocab_size, const Body& body) {
  const int64_t step = std::max(kMinBlockTokens, kBlockLogits / vocab_size);
  for (int64_t begin = 0; begin < n_tokens; begin += step) body(begin, std::min(step, n_tokens - begin));
}

Tensor block_logits(const Tensor& hidden_bD, const Tensor& head_VD) {
  const at::ScalarType wide = compute_dtype(hidden_bD.scalar_type());
  const Tensor logits_bV =
      metered("logits of a block", at::empty({hidden_bD.size(0), head_VD.size(0)}, hidden_bD.options().dtype(wide)));
  gemm(hidden_bD, head_VD.t(), logits_bV);
  return logits_bV;
}

// Column to read for each target: its own, or 0 where there is none to be read.
Tensor target_columns(const Tensor& targets_b) { return targets_b.clamp_min(0).unsqueeze(1); }

// ln sum exp of each row; the row is used up, so that no second block of logits exists.
Tensor logsumexp_in_place(const Tensor& logits_bV) {
  const Tensor largest_b1 = logits_bV.amax(1, /*keepdim=*/true);
  return logits_bV.sub_(largest_b1).exp_().sum(1).log_().add_(largest_b1.squeeze(1));
}

struct TokenLoss : torch::autograd::Function<TokenLoss> {
  static Tensor forward(AutogradContext* ctx, const Tensor& hidden_nD, const Tensor& head_VD, const Tensor& targets_n) {
    const at::ScalarType wide = compute_dtype(hidden_nD.scalar_type());
    const Tensor lse_n = at::empty({hidden_nD.size(0)}, hidden_nD.options().dtype(wide));
    const Tensor sum = at::zeros({}, lse_n.options().dtype(at::kDouble));
    for_each_block(hidden_nD.size(0), head_VD.size(0), [&](int64_t begin, int64_t count) {
      const Tensor logits_bV = block_logits(hidden_nD.narrow(0, begin, count), head_VD);
      const Tensor targets_b = targets_n.narrow(0, begin, count);
      const Tensor target_logits_b = logits_bV.gather(1, target_columns(targets_b)).squeeze(1);
      const Tensor lse_b = logsumexp_in_place(logits_bV);
      lse_n.narrow(0, begin, count).copy_(lse_b);
      sum.add_((lse_b - target_logits_b).masked_fill_(targets_b.eq(kIgnoredTarget), 0.0).sum(at::kDouble));
    });
    ctx->save_for_backward({hidden_nD, head_VD, targets_n, lse_n});
    return sum.to(wide);
  }

  // d logits = (softmax - one hot) * d loss, zero for ignored targets.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_gradients("token loss");
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &hidden_nD = saved[0], &head_VD = saved[1], &targets_n = saved[2], &lse_n = saved[3];
    const Tensor d_hidden_nD = at::empty_like(hidden_nD, hidden_nD.options(), at::MemoryFormat::Contiguous);
    WeightGradient d_head(head_VD, lse_n.scalar_type());
    for_each_block(hidden_nD.size(0), head_VD.size(0), [&](int64_t begin, int64_t count) {
      const Tensor hidden_bD = hidden_nD.narrow(0, begin, count);
      const Tensor targets_b = targets_n.narrow(0, begin, count);
      Tensor d_logits_bV = block_logits(hidden_bD, head_VD);
      d_logits_bV.sub_(lse_n.narrow(0, begin, count).unsqueeze(1)).exp_();
      d_logits_bV.scatter_add_(1, target_columns(targets_b), at::full({count, 1}, -1.0, lse_n.options()));
      d_logits_bV.mul_(grads[0]).masked_fill_(targets_b.eq(kIgnoredTarget).unsqueeze(1), 0.0);
      d_logits_bV = d_logits_bV.to(hidden_nD.scalar_type());
      gemm(d_logits_bV, head_VD, d_hidden_nD.narrow(0, begin, count));
      gemm(d_logits_bV.t(), hidden_bD, d_head.place(), /*accumulate=*/true);
    });
    return {d_hidden_nD, d_head.finish(), {}};
  }
};

void check_targets(const Tensor& targets_n, int64_t vocab_size) {
  if (targets_n.is_meta()) return;
  const Tensor outside = targets_n.lt(0).logical_or(targets_n.ge(vocab_size));
  const Tensor bad = outside.logical_and(targets_n.ne(kIgnoredTarget));
  if (!bad.any().item<bool>()) return;
  const int64_t first = bad.nonzero()[0].item<int64_t>();
  throw ConfigError("target {}: expected 0 to {} or {} (ignored), got {}", first, vocab_size - 1, kIgnoredTarget,
                    targets_n[first].item<int64_t>());
}

}  // namespace

Tensor token_loss_sum(const Transformer& model, const Tensor& hidden_nD, const Tensor& targets_n) {
  const Tensor& head_VD = model.head();
  check_shape(hidden_nD, {kAny, head_VD.size(1)}, "hidden");
  check_shape(targets_n, {hidden_nD.size(0)}, "targets");
  check_targets(targets_n, head_VD.size(0));
  return TokenLoss::apply(hidden_nD, head_VD, targets_n);
}

}  // namespace parlat
