#pragma once

#include "parlat/mla/attention.h"
#include "parlat/mla/oracle.h"
#include "parlat/tensor/fill.h"
#include "tests/expect_close.h"

namespace parlat {

inline constexpr uint64_t kSeed = 20260717;

// A small layer with YaRN and its batch of packed documents, and everything between x and out on one rank.
struct Layer {
  MlaSpec spec;
  MlaWeights w;
  Tensor x_BSD;
  Documents documents;

  RopeTable rope() const {
    return rope_table(spec.rope, spec.dims.d_rope, documents.positions(),
                      x_BSD.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
  Tensor attend(bool absorbed, bool causal) const {
    const KeyRanges visible = documents.visible(causal);
    const Tensor latent = project_latent(w, x_BSD, rope()), q = project_query(w, x_BSD, rope());
    if (absorbed) return attend_absorbed(spec, q, latent, w.w_ukv, visible);
    return attend_explicit(spec, q, up_project(w.w_ukv, latent, spec.dims), visible);
  }
  Tensor forward(bool absorbed, bool causal) const { return project_output(w, attend(absorbed, causal)); }

  // The weights that exist, then x.
  std::vector<std::pair<std::string, Tensor>> inputs() const {
    auto all = named_weights(w);
    all.emplace_back("x", x_BSD);
    return all;
  }
};

struct LayerShape {
  std::optional<int64_t> d_q_latent = 24;
  bool interleaved = true;
  at::ScalarType dtype = at::kFloat;
  int64_t n_heads = 5, d_v = 12;
};

inline Layer make_layer(const LayerShape& shape) {
  MlaSpec spec;
  spec.dims = {.d_model = 40,
               .n_heads = shape.n_heads,
               .d_nope = 16,
               .d_rope = 8,
               .d_v = shape.d_v,
               .d_latent = 20,
               .d_q_latent = shape.d_q_latent};
  spec.rope.type = RopeSpec::Type::kYarn;
  spec.rope.factor = 40;
  spec.rope.original_max_positions = 16;
  spec.rope.mscale = 1.0;
  spec.rope.mscale_all_dim = 0.707;
  spec.rope.interleaved = shape.interleaved;
  Layer layer{spec, random_mla_weights(spec, kSeed, shape.dtype),
              seeded_normal({2, 35, 40}, 1, kSeed, "x", shape.dtype).requires_grad_(),
              Documents::packed(35, {{1, 4, 30}, {32, 3}})};
  for (auto& [name, weight] : named_weights(layer.w)) weight.requires_grad_();
  return layer;
}

}  // namespace parlat
