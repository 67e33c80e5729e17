#include "parlat/decode/sliced_oracle.h"

#include <ATen/ATen.h>

#include <cmath>

#include "parlat/base/range.h"
#include "parlat/mla/projections.h"

namespace parlat {

Tensor SlicedOracle::forward(const MlaWeights& w, const Tensor& x_BSD, const TokenShard& tokens) const {
  const MlaDims& d = w.dims();
  const Tensor q = project_query(w, x_BSD, tokens.rope), latent = project_latent(w, x_BSD, tokens.rope);
  const auto kept = [&](const Tensor& t) { return t.to(kept_).to(x_BSD.scalar_type()); };
  const Tensor c_kv = latent.narrow(2, 0, d.d_latent), k_rope = kept(latent.narrow(2, d.d_latent, d.d_rope));
  const Tensor w_ukv = w.w_ukv.view({d.n_heads, d.d_nope + d.d_v, d.d_latent});
  const std::vector<SliceMaps>& slices = slices_[next_layer_++ % slices_.size()];
  Tensor out = at::zeros({x_BSD.size(0), x_BSD.size(1), d.n_heads, d.d_v}, x_BSD.options());
  for (size_t g = 0; g < slices.size(); ++g) {
    const auto wide = [&](const Tensor& map) { return map.to(x_BSD.scalar_type()); };
    const Tensor z = kept(at::matmul(c_kv, wide(slices[g].store_Lw)));
    const Tensor w_uk = kept(at::matmul(w_ukv.narrow(1, 0, d.d_nope), wide(slices[g].key_Lw)));
    const Tensor w_uv = kept(at::matmul(w_ukv.narrow(1, d.d_nope, d.d_v), wide(slices[g].value_Lw)));
    const Tensor absorbed = at::einsum("bshn,hnw->bshw", {q.narrow(3, 0, d.d_nope), w_uk});
    const Tensor scores =
        w.spec.softmax_scale() * (at::einsum("bshw,btw->bhst", {absorbed, z}) +
                                  at::einsum("bshr,btr->bhst", {q.narrow(3, d.d_nope, d.d_rope), k_rope}));
    const Tensor future = at::ones({x_BSD.size(1), x_BSD.size(1)}, at::kBool).triu(1);
    const Tensor p = scores.masked_fill(future, -INFINITY).softmax(-1);
    const Tensor part = at::einsum("bhsw,hvw->bshv", {at::einsum("bhst,btw->bhsw", {p, z}), w_uv});
    const Range heads = own_heads_ ? even_share(d.n_heads, static_cast<int64_t>(slices.size()), static_cast<int64_t>(g))
                                   : Range{0, d.n_heads};
    out.narrow(2, heads.begin, heads.size()).add_(part.narrow(2, heads.begin, heads.size()));
  }
  return project_output(w, out);
}

}  // namespace parlat
