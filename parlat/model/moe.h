#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/comm/communicator.h"
#include "parlat/weights/model_weights.h"

namespace parlat {

// w_down(silu(w_gate x) * w_up x), x [.., D]. Saves x and the two products [.., F]; the rest is computed again.
Tensor mlp(const MlpWeights& w, const Tensor& x);

struct Routing {
  Tensor experts_nk;  // int64, each token's experts, increasing
  Tensor weights_nk;  // fp32 (fp64 for fp64), differentiable
};
// Router logits in fp32 from fp32 copies; the three gatings of docs/mathematics.md section 4. Of equal scores the lower
// index wins.
Routing route(const MoeSpec& spec, const MoeWeights& w, const Tensor& x_nD);

// x [n, D]: this rank's tokens, k experts each. Rows travel to the ranks that hold their experts and back, are weighted
// and summed in order of expert index, whatever the number of ranks; shared experts are added. Group: the
// expert-parallel ranks, rank r holding even_share(n_routed, P, r). Ranks without tokens and experts without tokens
// take part like any.
//   sent   k n D elements each way, those for other ranks, and the counts (8 bytes an expert elsewhere); twice the rows
//          with the backward pass; one rank: nothing
//   saved  x, and of the rows computed here: themselves, gate and up [m, F]; the k n rows returned
Tensor mixture_of_experts(const MoeSpec& spec, const MoeWeights& w, const Tensor& x_nD, Communicator& experts);

}  // namespace parlat
