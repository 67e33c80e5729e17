#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "parlat/config/layout.h"
#include "parlat/mla/projections.h"
#include "parlat/model/attention.h"
#include "parlat/weights/slice_maps.h"

namespace parlat {

// The definition of a sliced layout, slowly: fp64, one rank, every slice in turn, plain torch operations. Plugged into
// the Transformer it gives the logits that all ranks together must give.
class SlicedOracle final : public Attention {
 public:
  // slices: one a layer, in the order in which layers call; each a map set a group. own_heads: group g sees heads
  // even_share(H, G, g) only (gla).
  SlicedOracle(std::vector<std::vector<SliceMaps>> slices, bool own_heads)
      : slices_(std::move(slices)), own_heads_(own_heads) {}

  Tensor forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const override {
    const MlaDims& d = w.dims();
    const Tensor q = project_query(w, x_BSD, tokens.rope), latent = project_latent(w, x_BSD, tokens.rope);
    const Tensor c_kv = latent.narrow(2, 0, d.d_latent), k_rope = latent.narrow(2, d.d_latent, d.d_rope);
    const Tensor w_ukv = w.w_ukv.view({d.n_heads, d.d_nope + d.d_v, d.d_latent});
    const std::vector<SliceMaps>& slices = slices_[next_layer_++ % slices_.size()];
    Tensor out = at::zeros({x_BSD.size(0), x_BSD.size(1), d.n_heads, d.d_v}, x_BSD.options());
    for (size_t g = 0; g < slices.size(); ++g) {
      const auto wide = [&](const Tensor& map) { return map.to(x_BSD.scalar_type()); };
      const Tensor z = at::matmul(c_kv, wide(slices[g].store_Lw));
      const Tensor w_uk = at::matmul(w_ukv.narrow(1, 0, d.d_nope), wide(slices[g].key_Lw));
      const Tensor w_uv = at::matmul(w_ukv.narrow(1, d.d_nope, d.d_v), wide(slices[g].value_Lw));
      const Tensor absorbed = at::einsum("bshn,hnw->bshw", {q.narrow(3, 0, d.d_nope), w_uk});
      const Tensor scores =
          w.spec.softmax_scale() * (at::einsum("bshw,btw->bhst", {absorbed, z}) +
                                    at::einsum("bshr,btr->bhst", {q.narrow(3, d.d_nope, d.d_rope), k_rope}));
      const Tensor future = at::ones({x_BSD.size(1), x_BSD.size(1)}, at::kBool).triu(1);
      const Tensor p = scores.masked_fill(future, -INFINITY).softmax(-1);
      const Tensor part = at::einsum("bhsw,hvw->bshv", {at::einsum("bhst,btw->bhsw", {p, z}), w_uv});
      const Range heads = own_heads_
                              ? even_share(d.n_heads, static_cast<int64_t>(slices.size()), static_cast<int64_t>(g))
                              : Range{0, d.n_heads};
      out.narrow(2, heads.begin, heads.size()).add_(part.narrow(2, heads.begin, heads.size()));
    }
    return project_output(w, out);
  }

 private:
  std::vector<std::vector<SliceMaps>> slices_;
  bool own_heads_;
  mutable size_t next_layer_ = 0;
};

}  // namespace parlat
