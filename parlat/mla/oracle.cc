#include "parlat/mla/oracle.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>

#include "parlat/tensor/fill.h"

namespace parlat {

namespace {

Tensor fp64(const Tensor& x) { return x.to(at::kDouble); }

Tensor rms(const Tensor& x, const Tensor& weight, double eps) {
  return x / ((x * x).mean({-1}, /*keepdim=*/true) + eps).sqrt() * weight;
}

// Each pair (a, b) of x [B, S, n, R] becomes amplitude (a cos - b sin, a sin + b cos) of the angle position *
// frequency.
Tensor rope(const Tensor& x, const RopeSpec& spec, const Tensor& positions_BS) {
  const int64_t d_rope = x.size(-1);
  const Tensor frequencies = at::tensor(inverse_frequencies(spec, d_rope), at::kDouble);
  const Tensor angle = (fp64(positions_BS).unsqueeze(-1) * frequencies).unsqueeze(2);
  const Tensor pairs = spec.interleaved ? x.unflatten(-1, {d_rope / 2, 2}) : x.unflatten(-1, {2, d_rope / 2});
  const int64_t member = spec.interleaved ? -1 : -2;
  const Tensor a = pairs.select(member, 0), b = pairs.select(member, 1);
  const Tensor rotated = at::stack({a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()}, member);
  return rotated.flatten(-2) * rope_amplitude(spec);
}

// [B, 1, S, S]: whether query s sees key t.
Tensor mask(const Documents& documents, bool causal) {
  const Tensor document_BS = (documents.positions() == 0).cumsum(1);
  const Tensor same = document_BS.unsqueeze(2) == document_BS.unsqueeze(1);
  return (causal ? same.tril() : same).unsqueeze(1);
}

}  // namespace

Tensor oracle_attention(const MlaWeights& w, const Tensor& x_BSD, const Documents& documents, bool causal) {
  const MlaDims& d = w.dims();
  check_shape(x_BSD, {documents.batch(), documents.sequence(), d.d_model}, "x");
  const Tensor x = fp64(x_BSD), positions = documents.positions();
  const double eps = w.spec.inner_norm_eps;

  const Tensor c_q = d.d_q_latent ? rms(at::matmul(x, fp64(w.w_dq).t()), fp64(w.q_norm), eps) : x;
  const Tensor q = at::matmul(c_q, fp64(w.w_uq).t()).unflatten(-1, {d.n_heads, d.d_qk()});
  const Tensor q_nope = q.narrow(-1, 0, d.d_nope),
               q_rope = rope(q.narrow(-1, d.d_nope, d.d_rope), w.spec.rope, positions);

  const Tensor c_kv_k_rope = at::matmul(x, fp64(w.w_dkv).t());
  const Tensor c_kv = rms(c_kv_k_rope.narrow(-1, 0, d.d_latent), fp64(w.kv_norm), eps);
  const Tensor k_rope = rope(c_kv_k_rope.narrow(-1, d.d_latent, d.d_rope).unsqueeze(2), w.spec.rope, positions);
  const Tensor kv = at::matmul(c_kv, fp64(w.w_ukv).t()).unflatten(-1, {d.n_heads, d.d_nope + d.d_v});
  const Tensor k_nope = kv.narrow(-1, 0, d.d_nope), v = kv.narrow(-1, d.d_nope, d.d_v);

  const Tensor scores_BHST = w.spec.softmax_scale() * (at::einsum("bshn,bthn->bhst", {q_nope, k_nope}) +
                                                       at::einsum("bshr,btr->bhst", {q_rope, k_rope.squeeze(2)}));
  const Tensor p = scores_BHST.masked_fill(mask(documents, causal).logical_not(), -INFINITY).softmax(-1);
  const Tensor out_BSHV = at::einsum("bhst,bthv->bshv", {p, v});
  return at::matmul(out_BSHV.flatten(2), fp64(w.w_o).t());
}

OracleResult oracle_forward_backward(const MlaWeights& w, const Tensor& x_BSD, const Tensor& grad_out_BSD,
                                     const Documents& documents, bool causal) {
  const auto leaf = [](const Tensor& t) { return t.defined() ? fp64(t.detach()).clone().requires_grad_() : Tensor(); };
  const MlaWeights leaves{w.spec,        leaf(w.w_dq),    leaf(w.q_norm), leaf(w.w_uq),
                          leaf(w.w_dkv), leaf(w.kv_norm), leaf(w.w_ukv),  leaf(w.w_o)};
  std::vector<std::pair<std::string, Tensor>> inputs = named_weights(leaves);
  inputs.emplace_back("x", leaf(x_BSD));

  const Tensor out = oracle_attention(leaves, inputs.back().second, documents, causal);
  torch::autograd::variable_list tensors;
  for (const auto& [name, tensor] : inputs) tensors.push_back(tensor);
  const auto gradients = torch::autograd::grad({out}, tensors, {fp64(grad_out_BSD)});

  OracleResult result{.out = out.detach(), .gradients = {}};
  for (size_t i = 0; i < inputs.size(); ++i) result.gradients[inputs[i].first] = gradients[i];
  return result;
}

std::vector<std::pair<std::string, Tensor>> named_weights(const MlaWeights& w) {
  std::vector<std::pair<std::string, Tensor>> all = {{"w_dq", w.w_dq},   {"q_norm", w.q_norm},   {"w_uq", w.w_uq},
                                                     {"w_dkv", w.w_dkv}, {"kv_norm", w.kv_norm}, {"w_ukv", w.w_ukv},
                                                     {"w_o", w.w_o}};
  std::erase_if(all, [](const auto& entry) { return !entry.second.defined(); });
  return all;
}

MlaWeights random_mla_weights(const MlaSpec& spec, uint64_t seed, at::ScalarType dtype, at::Device device) {
  const MlaDims& d = spec.dims;
  const at::TensorOptions options = at::TensorOptions(device).dtype(dtype);
  const auto matrix = [&](const char* name, int64_t rows, int64_t columns) {
    if (device.is_meta()) return at::empty({rows, columns}, options);
    return seeded_normal({rows, columns}, 1.0 / std::sqrt(static_cast<double>(columns)), seed, name, dtype);
  };
  const auto norm = [&](const char* name, int64_t size) {
    if (device.is_meta()) return at::empty({size}, options);
    return (1 + seeded_normal({size}, 0.1, seed, name)).to(dtype);
  };
  MlaWeights w;
  w.spec = spec;
  if (d.d_q_latent) {
    w.w_dq = matrix("w_dq", *d.d_q_latent, d.d_model);
    w.q_norm = norm("q_norm", *d.d_q_latent);
  }
  w.w_uq = matrix("w_uq", d.n_heads * d.d_qk(), d.d_q_latent.value_or(d.d_model));
  w.w_dkv = matrix("w_dkv", d.d_cache(), d.d_model);
  w.kv_norm = norm("kv_norm", d.d_latent);
  w.w_ukv = matrix("w_ukv", d.n_heads * (d.d_nope + d.d_v), d.d_latent);
  w.w_o = matrix("w_o", d.d_model, d.n_heads * d.d_v);
  return w;
}

}  // namespace parlat
