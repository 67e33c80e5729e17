#include "parlat/config/model_config.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include "parlat/base/error.h"
#include "parlat/base/json.h"
#include "parlat/config/builtin_models.h"
#include "parlat/config/json_fields.h"
#include "parlat/config/known_keys.h"

namespace parlat {

namespace {

using nlohmann::json;

constexpr int64_t kMaxWidth = int64_t{1} << 24, kMaxCount = int64_t{1} << 16;
constexpr int64_t kMaxPositions = int64_t{1} << 40;
constexpr std::streamoff kMaxFileBytes = 16'000'000;

// What transformers 5.24 gives keys that a file lacks (its configuration classes; kimi_k2's own code has V3's).
ModelConfig class_defaults(const std::string& model_type) {
  ModelConfig c;
  c.model_type = model_type;
  MlaDims& d = c.mla.dims;
  d = {.d_nope = 128, .d_rope = 64, .d_v = 128, .d_latent = 512, .d_q_latent = 1536};
  if (model_type == "deepseek_v2") {
    d.d_model = 4096, d.n_heads = 32;
    c.vocab_size = 102400, c.d_mlp = 11008, c.n_layers = 32, c.max_positions = 2048;
    c.moe = MoeSpec{.n_routed = 64, .n_shared = 2, .d_expert = 1407, .gating = Gating::kGreedy};
  } else if (model_type == "youtu") {
    d.d_model = 2048, d.n_heads = 16;
    c.vocab_size = 128256, c.d_mlp = 6144, c.n_layers = 32, c.max_positions = 131072, c.tied_embeddings = true;
  } else {
    d.d_model = 7168, d.n_heads = 128;
    c.vocab_size = 129280, c.d_mlp = 18432, c.n_layers = 61, c.max_positions = 4096;
    c.moe = MoeSpec{.n_routed = 256,
                    .n_shared = 1,
                    .experts_per_token = 8,
                    .d_expert = 2048,
                    .first_dense = 3,
                    .gating = Gating::kNoauxTc,
                    .n_group = 8,
                    .topk_group = 4,
                    .norm_topk_prob = true,
                    .routed_scaling_factor = 2.5};
  }
  return c;
}

std::string parse_model_type(JsonFields& fields) {
  std::string type = fields.text("model_type", "deepseek_v3");
  if (type == "youtu_llm") return "youtu";  // the hub's own code; transformers' class is the same model
  if (type != "deepseek_v2" && type != "deepseek_v3" && type != "kimi_k2" && type != "youtu") {
    fields.refuse("model_type", "deepseek_v2, deepseek_v3, kimi_k2 or youtu");
  }
  return type;
}

void parse_attention(JsonFields& fields, ModelConfig& c) {
  MlaDims& d = c.mla.dims;
  d.d_model = fields.integer("hidden_size", d.d_model, 1, kMaxWidth);
  d.n_heads = fields.integer("num_attention_heads", d.n_heads, 1, kMaxCount);
  d.d_nope = fields.integer("qk_nope_head_dim", d.d_nope, 1, kMaxWidth);
  d.d_rope = fields.integer("qk_rope_head_dim", d.d_rope, 2, kMaxWidth);
  d.d_v = fields.integer("v_head_dim", d.d_v, 1, kMaxWidth);
  d.d_latent = fields.integer("kv_lora_rank", d.d_latent, 1, kMaxWidth);
  // Absent means the class default, null that queries have no latent.
  if (fields.is_null("q_lora_rank")) {
    fields.find("q_lora_rank");
    d.d_q_latent.reset();
  } else {
    d.d_q_latent = fields.integer("q_lora_rank", *d.d_q_latent, 1, kMaxWidth);
  }
  if (fields.find("num_key_value_heads") != nullptr &&
      fields.integer("num_key_value_heads", 0, 0, kMaxCount) != d.n_heads) {
    fields.refuse("num_key_value_heads", fmt::format("null or num_attention_heads ({})", d.n_heads));
  }
  if (fields.integer("qk_head_dim", d.d_qk(), 0, 2 * kMaxWidth) != d.d_qk()) {
    fields.refuse("qk_head_dim", fmt::format("qk_nope_head_dim + qk_rope_head_dim ({})", d.d_qk()));
  }
  if (!fields.boolean("use_mla", true)) fields.refuse("use_mla", "true");
}

void parse_yarn(JsonFields& fields, int64_t max_positions, RopeSpec& rope) {
  rope.type = RopeSpec::Type::kYarn;
  rope.original_max_positions = fields.integer("original_max_position_embeddings", max_positions, 1, kMaxPositions);
  if (!fields.object().contains("factor")) fields.refuse("factor", "a number of at least 1");
  rope.factor = fields.optional_number("factor", 1, 1e9)
                    .value_or(static_cast<double>(max_positions) / static_cast<double>(rope.original_max_positions));
  // Zero and null both mean the default.
  const auto beta = [&](const char* key, double absent) {
    const double value = fields.optional_number(key, 0, 1e9).value_or(0);
    return value == 0 ? absent : value;
  };
  rope.beta_fast = beta("beta_fast", 32);
  rope.beta_slow = beta("beta_slow", 1);
  rope.mscale = fields.optional_number("mscale", 0, 1e3);
  rope.mscale_all_dim = fields.optional_number("mscale_all_dim", 0, 1e3);
  rope.attention_factor = fields.optional_number("attention_factor", 0, 1e6);
  rope.truncate = fields.boolean("truncate", true);
  // With one of the two, the reference code and transformers compute different amplitudes.
  const double mscale = rope.mscale.value_or(1), all_dim = rope.mscale_all_dim.value_or(0);
  if (!rope.attention_factor && (all_dim == 0 ? mscale != 1 : rope.mscale.value_or(0) == 0)) {
    fields.refuse(all_dim == 0 ? "mscale_all_dim" : "mscale", "mscale and mscale_all_dim together");
  }
}

// rope_scaling (transformers 4) or rope_parameters (5), whose type is called type or rope_type.
void parse_rope(JsonFields& fields, const std::string& name, ModelConfig& c) {
  RopeSpec& rope = c.mla.rope;
  rope.interleaved = fields.boolean("rope_interleave", true);
  if (!rope.interleaved && c.model_type == "deepseek_v2") fields.refuse("rope_interleave", "true for deepseek_v2");
  rope.theta = fields.number("rope_theta", rope.theta, 1.0001, 1e15);
  const json* scaling = fields.find("rope_scaling");
  const json* parameters = fields.find("rope_parameters");
  if (scaling != nullptr && parameters != nullptr && *scaling != *parameters) {
    fields.refuse("rope_scaling", "none beside rope_parameters");
  }
  const std::string key = scaling != nullptr ? "rope_scaling" : "rope_parameters";
  const json* object = scaling != nullptr ? scaling : parameters;
  if (object == nullptr) return;
  if (!object->is_object()) fields.refuse(key, "an object or null");

  JsonFields inner(*object, fmt::format("{}: {}.", name, key));
  const std::string type = inner.text("rope_type", inner.text("type", "default"));
  if (inner.text("type", type) != type) inner.refuse("type", fmt::format("rope_type's value ({})", type));
  rope.theta = inner.number("rope_theta", rope.theta, 1.0001, 1e15);
  if (inner.optional_number("partial_rotary_factor", 0, 1).value_or(1) != 1) inner.refuse("partial_rotary_factor", "1");
  if (type == "yarn") {
    parse_yarn(inner, c.max_positions, rope);
  } else if (type != "default") {
    inner.refuse(inner.object().contains("rope_type") ? "rope_type" : "type", "default or yarn");
  }
  for (const std::string& unknown : inner.unread()) {
    if (!inner.is_null(unknown)) inner.refuse(unknown, fmt::format("no such key for rope type {}", type));
  }
}

void parse_gating(JsonFields& fields, const std::string& model_type, MoeSpec& moe) {
  const bool v2 = model_type == "deepseek_v2";
  const std::string method = fields.text("topk_method", v2 ? "greedy" : "noaux_tc");
  if (v2 && method == "greedy") {
    moe.gating = Gating::kGreedy;
  } else if (v2 && method == "group_limited_greedy") {
    moe.gating = Gating::kGroupLimitedGreedy;
  } else if (!v2 && method == "noaux_tc") {
    moe.gating = Gating::kNoauxTc;
  } else {
    fields.refuse("topk_method",
                  fmt::format("{} for {}", v2 ? "greedy or group_limited_greedy" : "noaux_tc", model_type));
  }
  const std::string scoring = v2 ? "softmax" : "sigmoid";
  if (fields.text("scoring_func", scoring) != scoring) {
    fields.refuse("scoring_func", fmt::format("{} with topk_method {}", scoring, method));
  }
}

void parse_experts(JsonFields& fields, ModelConfig& c) {
  MoeSpec moe = c.moe.value_or(MoeSpec{});
  moe.n_routed = fields.is_null("n_routed_experts") ? 0 : moe.n_routed;
  if (fields.find("n_routed_experts") != nullptr) {
    moe.n_routed = fields.integer("n_routed_experts", 0, 0, kMaxCount);
  }
  if (c.model_type == "youtu" && moe.n_routed > 0) fields.refuse("n_routed_experts", "none for youtu");
  moe.first_dense = fields.integer("first_k_dense_replace", moe.first_dense, 0, kMaxCount);
  moe.layer_freq = fields.integer("moe_layer_freq", 1, 1, kMaxCount);
  c.moe = moe;
  bool any = false;
  for (int64_t layer = 0; layer < c.n_layers && moe.n_routed > 0; ++layer) any = any || c.is_moe_layer(layer);
  if (!any) {
    c.moe.reset();
    for (const char* key : {"n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "topk_method",
                            "scoring_func", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"}) {
      fields.find(key);
    }
    return;
  }
  parse_gating(fields, c.model_type, moe);
  const auto or_null = [&](const char* key, int64_t absent, int64_t null, int64_t low) {
    return fields.find(key) == nullptr && fields.is_null(key) ? null : fields.integer(key, absent, low, kMaxWidth);
  };
  moe.n_shared = or_null("n_shared_experts", moe.n_shared, 0, 0);
  moe.experts_per_token = fields.integer("num_experts_per_tok", moe.experts_per_token, 1, kMaxCount);
  if (moe.experts_per_token == 0) fields.refuse("num_experts_per_tok", "an integer of at least 1");
  moe.d_expert = fields.integer("moe_intermediate_size", moe.d_expert, 1, kMaxWidth);
  if (moe.gating == Gating::kGreedy) {
    moe.n_group = or_null("n_group", 1, 1, 1);
    moe.topk_group = or_null("topk_group", 1, 1, 1);
  } else {
    moe.n_group = fields.integer("n_group", moe.n_group, 1, kMaxCount);
    moe.topk_group = fields.integer("topk_group", moe.topk_group, 1, kMaxCount);
  }
  moe.norm_topk_prob = fields.boolean("norm_topk_prob", moe.norm_topk_prob);
  moe.routed_scaling_factor = fields.number("routed_scaling_factor", moe.routed_scaling_factor, 1e-6, 1e6);
  c.moe = moe;
}

// Keys that nothing has read: harmless, listed, or refused when set.
void check_unread(const JsonFields& fields, ModelConfig& c) {
  for (const std::string& key : fields.unread()) {
    if (is_harmless_key(key)) continue;
    const json& value = fields.object().at(key);
    const bool off = value.is_null() || value == false || value == 0;
    if (changes_mathematics(key) && !off) fields.refuse(key, "it off (null, false, 0 or absent): parlat lacks it");
    if (!off) c.ignored_keys.push_back(key);
  }
}

void parse_rest(JsonFields& fields, ModelConfig& c) {
  c.n_layers = fields.integer("num_hidden_layers", c.n_layers, 1, kMaxCount);
  c.vocab_size = fields.integer("vocab_size", c.vocab_size, 1, kMaxWidth);
  c.d_mlp = fields.integer("intermediate_size", c.d_mlp, 1, kMaxWidth);
  c.rms_norm_eps = fields.number("rms_norm_eps", c.rms_norm_eps, 0, 1);
  c.tied_embeddings = fields.boolean("tie_word_embeddings", c.tied_embeddings);
  c.max_positions = fields.integer("max_position_embeddings", c.max_positions, 1, kMaxPositions);
  if (fields.text("hidden_act", "silu") != "silu") fields.refuse("hidden_act", "silu");
  const bool youtu = c.model_type == "youtu";
  if (youtu) c.initializer_range = 2.0 / std::sqrt(5.0 * static_cast<double>(c.mla.dims.d_model));
  c.initializer_range = fields.optional_number("initializer_range", 0, 1e3).value_or(c.initializer_range);
  if (youtu) {
    const double stated = fields.optional_number("embedding_initializer_range", 0, 1e3).value_or(0);
    c.embedding_initializer_range = stated != 0 ? stated : 2 * c.initializer_range;
  }
}

// Block-scaled fp8 weights; other quantisations are refused. What is saved is not quantised, so the file forgets it.
void parse_quantization(JsonFields& fields, ModelConfig& c) {
  const json* const object = fields.find("quantization_config");
  if (object == nullptr) return;
  if (!object->is_object()) fields.refuse("quantization_config", "an object");
  JsonFields q(*object, c.name + ": quantization_config.");
  if (q.text("quant_method", "") != "fp8") q.refuse("quant_method", "fp8");
  if (q.text("fmt", "e4m3") != "e4m3") q.refuse("fmt", "e4m3");
  const json* const block = q.find("weight_block_size");
  const auto is_size = [](const json& size) { return size.is_number_integer() && size > 0 && size <= 1 << 20; };
  if (block == nullptr || !block->is_array() || block->size() != 2 || !is_size((*block)[0]) || !is_size((*block)[1])) {
    q.refuse("weight_block_size", "two sizes such as [128, 128]");
  }
  c.fp8_block = {(*block)[0].get<int64_t>(), (*block)[1].get<int64_t>()};
}

// The outside of a multimodal model's file: its own tie_word_embeddings must not contradict the text model's.
void parse_outside(JsonFields& outside, const json& text, ModelConfig& c) {
  outside.text("model_type", "");
  parse_quantization(outside, c);
  if (outside.object().contains("tie_word_embeddings")) {
    const bool tied = outside.boolean("tie_word_embeddings", false);
    if (text.contains("tie_word_embeddings") && tied != c.tied_embeddings) {
      outside.refuse("tie_word_embeddings", fmt::format("the text model's value ({})", c.tied_embeddings));
    }
    c.tied_embeddings = tied;
  }
  check_unread(outside, c);
}

json read_config_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw DataError("{}: cannot be opened", path.string());
  if (!std::filesystem::is_regular_file(path))
    throw DataError("{}: expected a file, got a folder or a device", path.string());
  const std::streamoff size = file.tellg();
  if (size < 0 || size > kMaxFileBytes) {
    throw DataError("{}: expected a config.json of at most {} bytes, got {}", path.string(), kMaxFileBytes, size);
  }
  std::string bytes(static_cast<size_t>(size), '\0');
  file.seekg(0);
  if (!file.read(bytes.data(), size)) throw DataError("{}: cannot be read", path.string());
  return parse_json(bytes, path.string());
}

}  // namespace

double MlaSpec::softmax_scale() const {
  return softmax_scale_factor(rope) / std::sqrt(static_cast<double>(dims.d_qk()));
}

bool ModelConfig::is_moe_layer(int64_t layer) const {
  return moe && layer >= moe->first_dense && layer % moe->layer_freq == 0;
}

ModelConfig parse_model_config(const json& root, const std::string& name) {
  if (!root.is_object()) throw DataError("{}: expected a JSON object, got {}", name, root.type_name());
  JsonFields outside(root, name + ": ");
  const json* nested = outside.find("text_config");
  std::string where = name + ": text_config.";
  if (nested == nullptr) {
    nested = outside.find("language_config");
    where = name + ": language_config.";
  }
  if (nested != nullptr && !nested->is_object()) outside.refuse("text_config", "an object");
  const json& object = nested != nullptr ? *nested : root;
  JsonFields fields(object, nested != nullptr ? where : name + ": ");
  // As in `outside`: null here says that the file is not nested.
  if (nested == nullptr) {
    fields.find("text_config");
    fields.find("language_config");
  }

  ModelConfig c = class_defaults(parse_model_type(fields));
  c.name = name;
  parse_attention(fields, c);
  parse_rest(fields, c);
  parse_rope(fields, name, c);
  parse_experts(fields, c);
  parse_quantization(fields, c);
  check_unread(fields, c);
  if (nested != nullptr) parse_outside(outside, object, c);
  c.hf = object;
  c.hf.erase("quantization_config");
  validate(c);
  return c;
}

ModelConfig load_model_config(const std::string& path_or_name) {
  if (const auto builtin = builtin_model(path_or_name)) return parse_model_config(*builtin, path_or_name);
  std::filesystem::path path = path_or_name;
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) path /= "config.json";
  if (!std::filesystem::exists(path, ignored)) {
    std::string names;
    for (const std::string& builtin : builtin_model_names()) names += (names.empty() ? "" : ", ") + builtin;
    throw DataError("{}: no such file, and not a built-in model ({})", path.string(), names);
  }
  return parse_model_config(read_config_file(path), path.string());
}

}  // namespace parlat
