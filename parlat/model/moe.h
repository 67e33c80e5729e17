#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/comm/communicator.h"
#include "parlat/weights/model_weights.h"

namespace parlat {

// w_down(silu(w_gate x) * w_up x).
Tensor mlp(const MlpWeights& w, const Tensor& x);

struct Routing {
  Tensor experts_nk;  // int64, each token's experts
  Tensor weights_nk;  // fp32, differentiable
};
// Router logits in fp32 from fp32 copies; the three gatings of docs/mathematics.md section 4.
Routing route(const MoeSpec& spec, const MoeWeights& w, const Tensor& x_nD);

// x [n, D]: this rank's tokens. Rows travel to the ranks that hold their experts and back (two all-to-alls, plus one of
// counts), are weighted and summed in order of expert index; shared experts are added. Group: the expert-parallel ranks; one
// rank: nothing is sent.
Tensor mixture_of_experts(const MoeSpec& spec, const MoeWeights& w, const Tensor& x_nD, Communicator& experts);

}  // namespace parlat
