#include "parlat/config/known_keys.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace parlat {

namespace {

constexpr std::array kHarmless = {"_attn_implementation",
                                  "_name_or_path",
                                  "architectures",
                                  "attn_implementation",
                                  "auto_map",
                                  "aux_loss_alpha",
                                  "bos_token_id",
                                  "chunk_size_feed_forward",
                                  "dtype",
                                  "eos_token_id",
                                  "ep_size",
                                  "head_dim",
                                  "id2label",
                                  "is_decoder",
                                  "is_encoder_decoder",
                                  "label2id",
                                  "num_mtp_layers",
                                  "num_nextn_predict_layers",
                                  "output_attentions",
                                  "output_hidden_states",
                                  "output_router_logits",
                                  "pad_token_id",
                                  "pretraining_tp",
                                  "problem_type",
                                  "return_dict",
                                  "router_aux_loss_coef",
                                  "seq_aux",
                                  "tokenizer_class",
                                  "torch_dtype",
                                  "transformers_version",
                                  "unk_token_id",
                                  "use_cache"};

constexpr std::array<std::string_view, 25> kMathematics = {
    "attention_", "attn",   "scale_",     "sparse", "bias",      "chunk",   "compress", "dropout",   "expert",
    "hc_",        "index_", "layer_type", "logit_", "logits_sc", "lora",    "mla_",     "mlp_layer", "multiplier",
    "norm_type",  "qk_",    "quant",      "rope",   "rotary",    "sliding", "softcap"};

}  // namespace

bool is_harmless_key(const std::string& key) {
  return std::find(kHarmless.begin(), kHarmless.end(), key) != kHarmless.end();
}

bool changes_mathematics(const std::string& key) {
  return std::any_of(kMathematics.begin(), kMathematics.end(),
                     [&](std::string_view part) { return key.find(part) != std::string::npos; });
}

}  // namespace parlat
