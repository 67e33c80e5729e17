#include "parlat/base/error.h"
#include "parlat/kernels/gemm.h"
#include "parlat/kernels/gradient_sum.h"
#include "parlat/model/moe.h"

namespace parlat {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// In fp32 from the exact fp32 values of x and w, without keeping fp32 copies of either.
struct RouterLogits : torch::autograd::Function<RouterLogits> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x_nD, const Tensor& w_ED) {
    ctx->save_for_backward({x_nD, w_ED});
    const Tensor logits_nE =
        at::empty({x_nD.size(0), w_ED.size(0)}, x_nD.options().dtype(compute_dtype(x_nD.scalar_type())));
    gemm(x_nD, w_ED.t(), logits_nE);
    return logits_nE;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_gradients("router logits");
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x_nD = saved[0], &w_ED = saved[1], &d_logits_nE = grads[0];
    const Tensor d_x_nD = at::empty(x_nD.sizes(), x_nD.options());
    gemm(d_logits_nE, w_ED, d_x_nD);
    return {d_x_nD, product_gradient(w_ED, d_logits_nE.t(), x_nD)};
  }
};

// Columns of the k largest of each row; of equal ones the lower column, which topk does not promise.
Tensor top_k(const Tensor& scores, int64_t k) {
  return std::get<1>(at::sort(scores, /*stable=*/true, /*dim=*/-1, /*descending=*/true)).narrow(-1, 0, k);
}

// [n, E]: true where the expert's group is not among the topk_group groups whose `best` largest scores sum highest.
Tensor outside_kept_groups(const MoeSpec& spec, const Tensor& scores_nE, int64_t best) {
  const int64_t n = scores_nE.size(0), group_size = spec.n_routed / spec.n_group;
  const Tensor grouped_nGe = scores_nE.view({n, spec.n_group, group_size});
  const Tensor group_scores_nG = std::get<0>(at::topk(grouped_nGe, best, /*dim=*/-1)).sum(-1);
  const Tensor outside_nG = at::ones({n, spec.n_group}, scores_nE.options().dtype(at::kBool));
  outside_nG.scatter_(1, top_k(group_scores_nG, spec.topk_group), false);
  return outside_nG.unsqueeze(-1).expand({n, spec.n_group, group_size}).reshape({n, spec.n_routed});
}

// Experts of each token in increasing order, which fixes the order of every sum over them.
Tensor select(const Tensor& scores_nE, int64_t k) { return std::get<0>(at::sort(top_k(scores_nE, k), -1)); }

Routing route_softmax(const MoeSpec& spec, const Tensor& logits_nE) {
  Tensor scores_nE = at::softmax(logits_nE, -1);
  if (spec.gating == Gating::kGroupLimitedGreedy) {
    scores_nE = scores_nE.masked_fill(outside_kept_groups(spec, scores_nE.detach(), /*best=*/1), 0.0);
  }
  const Tensor experts_nk = select(scores_nE.detach(), spec.experts_per_token);
  const Tensor weights_nk = scores_nE.gather(1, experts_nk);
  if (spec.norm_topk_prob && spec.experts_per_token > 1) {
    return {experts_nk, weights_nk / (weights_nk.sum(-1, /*keepdim=*/true) + 1e-20)};
  }
  return {experts_nk, weights_nk * spec.routed_scaling_factor};
}

Routing route_sigmoid(const MoeSpec& spec, const Tensor& selection_bias_E, const Tensor& logits_nE) {
  const Tensor scores_nE = at::sigmoid(logits_nE);
  // The bias chooses, the unbiased score weighs.
  Tensor biased_nE = scores_nE.detach() + selection_bias_E.detach();
  biased_nE.masked_fill_(outside_kept_groups(spec, biased_nE, /*best=*/2), -INFINITY);
  const Tensor experts_nk = select(biased_nE, spec.experts_per_token);
  Tensor weights_nk = scores_nE.gather(1, experts_nk);
  if (spec.norm_topk_prob) weights_nk = weights_nk / (weights_nk.sum(-1, /*keepdim=*/true) + 1e-20);
  return {experts_nk, weights_nk * spec.routed_scaling_factor};
}

}  // namespace

Routing route(const MoeSpec& spec, const MoeWeights& w, const Tensor& x_nD) {
  check_shape(w.w_router, {spec.n_routed, x_nD.size(-1)}, "w_router");
  const Tensor logits_nE = RouterLogits::apply(x_nD, w.w_router);
  switch (spec.gating) {
    case Gating::kGreedy:
    case Gating::kGroupLimitedGreedy:
      return route_softmax(spec, logits_nE);
    case Gating::kNoauxTc:
      check_shape(w.selection_bias, {spec.n_routed}, "e_score_correction_bias");
      return route_sigmoid(spec, w.selection_bias, logits_nE);
  }
  throw InternalError("route: a gating without a rule");
}

}  // namespace parlat
