#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "parlat/base/range.h"
#include "parlat/config/model_config.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// Hugging Face's packing, symbols of docs/mathematics.md. Undefined tensors are weights the model does not have.
struct MlaWeights {
  MlaSpec spec;
  Tensor w_dq;     // [Q, D]              q_a_proj; undefined without query latent
  Tensor q_norm;   // [Q]                 q_a_layernorm; undefined without query latent
  Tensor w_uq;     // [H (N+R), Q or D]   q_b_proj or q_proj: per head N nope rows, then R rope rows
  Tensor w_dkv;    // [L + R, D]          kv_a_proj_with_mqa
  Tensor kv_norm;  // [L]                 kv_a_layernorm
  Tensor w_ukv;    // [H (N+V), L]        kv_b_proj: per head N key rows, then V value rows
  Tensor w_o;      // [D, H V]            o_proj
  const MlaDims& dims() const { return spec.dims; }
};

struct MlpWeights {
  Tensor w_gate, w_up;  // [F, D]
  Tensor w_down;        // [D, F]
};

struct MoeWeights {
  Tensor w_router;                  // [E, D]
  Tensor selection_bias;            // [E] fp32, e_score_correction_bias; noaux_tc only. Not trained by gradient.
  Range local_experts;              // the experts this rank holds
  std::vector<MlpWeights> experts;  // of local_experts, in order
  std::optional<MlpWeights> shared;
};

struct LayerWeights {
  Tensor attention_norm;  // [D] input_layernorm
  MlaWeights mla;
  Tensor mlp_norm;  // [D] post_attention_layernorm
  std::optional<MlpWeights> mlp;
  std::optional<MoeWeights> moe;
};

struct ModelWeights {
  Tensor embedding;  // [vocabulary, D]
  std::vector<LayerWeights> layers;
  Tensor final_norm;  // [D]
  Tensor head;        // [vocabulary, D]; the same tensor as embedding when tied
};

}  // namespace parlat
