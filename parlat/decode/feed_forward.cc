#include "parlat/decode/feed_forward.h"

#include <ATen/ATen.h>

#include "parlat/kernels/few_rows.h"
#include "parlat/model/moe.h"

namespace parlat {

Tensor partial_mlp(const MlpWeights& w, const Tensor& x_nD) {
  std::vector<Tensor> hidden = project_rows(x_nD, {w.w_gate, w.w_up});
  return project_rows(at::silu_(hidden[0]).mul_(hidden[1]), w.w_down);
}

Tensor partial_experts(const MoeSpec& spec, const MoeWeights& w, const Tensor& x_nD) {
  const Routing routing = route(spec, w, x_nD);
  const Tensor sum_nD = w.shared ? partial_mlp(*w.shared, x_nD) : at::zeros_like(x_nD);
  for (int64_t i = 0; i < w.local_experts.size(); ++i) {
    const std::vector<Tensor> chosen = routing.experts_nk.eq(w.local_experts.begin + i).nonzero_numpy();
    if (chosen[0].numel() == 0) continue;
    const Tensor weights = routing.weights_nk.index({chosen[0], chosen[1]}).unsqueeze(1);
    sum_nD.index_add_(0, chosen[0], partial_mlp(w.experts[i], x_nD.index_select(0, chosen[0])).mul_(weights));
  }
  return sum_nD;
}

Tensor partial_feed_forward(const ModelConfig& config, const std::optional<MlpWeights>& mlp,
                            const std::optional<MoeWeights>& moe, const Tensor& x_nD) {
  return mlp ? partial_mlp(*mlp, x_nD) : partial_experts(*config.moe, *moe, x_nD);
}

}  // namespace parlat
