#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "parlat/config/model_config.h"
#include "parlat/weights/model_weights.h"

namespace parlat {

// This rank's summand of a layer's feed-forward output, x [n, D] fp32 -> [n, D] fp32; every rank has the same x.

// w holds a part of the columns F of an MLP.
Tensor partial_mlp(const MlpWeights& w, const Tensor& x_nD);

// w holds some of the routed experts, which compute the rows routed to them, and a part of the shared experts' columns.
Tensor partial_experts(const MoeSpec& spec, const MoeWeights& w, const Tensor& x_nD);

// Whichever of the two a layer has.
Tensor partial_feed_forward(const ModelConfig& config, const std::optional<MlpWeights>& mlp,
                            const std::optional<MoeWeights>& moe, const Tensor& x_nD);

}  // namespace parlat
