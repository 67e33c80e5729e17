#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "parlat/mla/documents.h"
#include "parlat/weights/model_weights.h"

namespace parlat {

// The definition, slowly: fp64, one rank, explicit keys and values, plain torch operations under torch's own autograd
// and none of parlat's kernels. x [B, S, D] of any dtype -> [B, S, D] fp64, differentiable if x or the weights are.
Tensor oracle_attention(const MlaWeights& w, const Tensor& x_BSD, const Documents& documents, bool causal = true);

struct OracleResult {
  Tensor out;
  std::map<std::string, Tensor> gradients;  // x, w_dq, q_norm, w_uq, w_dkv, kv_norm, w_ukv, w_o: those that exist
};
// Gradients of sum(out * grad_out).
OracleResult oracle_forward_backward(const MlaWeights& w, const Tensor& x_BSD, const Tensor& grad_out_BSD,
                                     const Documents& documents, bool causal = true);

// The attention weights by name, in one order, for tests and optimizers: only those that exist.
std::vector<std::pair<std::string, Tensor>> named_weights(const MlaWeights& w);

// A layer with seeded random weights, N(0, 1/fan_in), norms 1 + 0.1 N(0, 1), in dtype; on the meta device shapes only.
MlaWeights random_mla_weights(const MlaSpec& spec, uint64_t seed, at::ScalarType dtype, at::Device device = at::kCPU);

}  // namespace parlat
