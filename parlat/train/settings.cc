#include "parlat/train/settings.h"

#include <fmt/format.h>

#include <cmath>
#include <set>
#include <string>

#include "parlat/base/error.h"
#include "parlat/base/log.h"

namespace parlat {

using nlohmann::json;

namespace {

void require_at_least(const char* what, int64_t least, int64_t got) {
  if (got < least) throw ConfigError("{}: expected at least {}, got {}", what, least, got);
}

// Infinities and NaN are refused too.
void require_from_zero(const char* what, double got) {
  if (!(got >= 0 && std::isfinite(got))) throw ConfigError("{}: expected a number of at least 0, got {}", what, got);
}

void require_below_one(const char* what, double got) {
  if (!(got >= 0 && got < 1)) throw ConfigError("{}: expected at least 0 and less than 1, got {}", what, got);
}

// "batch: checkpoint 4, now 8; ..." of the leaves that differ; empty if none do.
std::string differences(const json& checkpoint, const json& now) {
  const json before = checkpoint.flatten(), after = now.flatten();
  std::set<std::string> keys;
  for (const auto& [key, value] : before.items()) keys.insert(key);
  for (const auto& [key, value] : after.items()) keys.insert(key);
  std::string text;
  for (const std::string& key : keys) {
    const json old_value = before.value(key, json("absent")), new_value = after.value(key, json("absent"));
    if (old_value == new_value) continue;
    text += fmt::format("{}{}: checkpoint {}, now {}", text.empty() ? "" : "; ", key.substr(1), old_value.dump(),
                        new_value.dump());
  }
  return text;
}

}  // namespace

void validate(const TrainSettings& settings) {
  require_at_least("batch", 1, settings.batch);
  require_at_least("accumulate", 1, settings.accumulate);
  require_at_least("steps", 1, settings.steps);
  require_at_least("data-parallel", 1, settings.parallel.data);
  require_at_least("warmup", 0, settings.learning_rate.warmup);
  require_from_zero("lr", settings.learning_rate.peak);
  require_from_zero("min-lr", settings.learning_rate.minimum);
  require_from_zero("weight-decay", settings.adamw.weight_decay);
  require_from_zero("clip", settings.adamw.clip);
  require_below_one("beta1", settings.adamw.beta1);
  require_below_one("beta2", settings.adamw.beta2);
  require_at_least("eval-every", 0, settings.evaluate_every);
  require_at_least("checkpoint-every", 0, settings.checkpoint_every);
  require_at_least("keep", 1, settings.keep);
  if (settings.batch % settings.parallel.data != 0) {
    throw ConfigError("batch: expected a multiple of the {} data-parallel ranks, got {}", settings.parallel.data,
                      settings.batch);
  }
  if (settings.dtype != at::kFloat && settings.dtype != at::kBFloat16) {
    throw ConfigError("dtype: expected fp32 or bf16 for training, got {}", name(settings.dtype));
  }
}

void validate(const TrainSettings& settings, const PackedText& training) {
  validate(settings);
  if (settings.out.empty()) throw ConfigError("out: expected a folder, got none");
  if (settings.batch > training.count() / settings.accumulate) {
    throw DataError("data: expected at least one step's sequences (batch {} x accumulate {}), got {} of {} tokens",
                    settings.batch, settings.accumulate, training.count(), training.sequence());
  }
}

json describe(const TrainSettings& settings, const ModelConfig& config, const PackedText& training) {
  const AdamWSpec& adamw = settings.adamw;
  const LearningRate& rate = settings.learning_rate;
  return {{"fixed",
           {{"model", to_hf_json(config)},
            {"inner_norm_eps", config.mla.inner_norm_eps},
            {"dtype", name(settings.dtype)},
            {"seed", settings.seed},
            {"batch", settings.batch},
            {"accumulate", settings.accumulate},
            {"sequence", training.sequence()},
            {"data", {{"sequences", training.count()}, {"hash", fmt::format("{:016x}", training.fingerprint())}}}}},
          {"changeable",
           {{"form", name(settings.parallel.form)},
            {"kernel", name(settings.parallel.attention.kernel)},
            {"save", name(settings.parallel.attention.save)},
            {"ring_groups", settings.parallel.attention.ring_groups},
            {"sharding", name(settings.parallel.sharding)},
            {"data_ranks", settings.parallel.data},
            {"sequence_ranks", settings.parallel.sequence},
            {"expert_ranks", settings.parallel.expert},
            {"steps", settings.steps},
            {"schedule", name(rate.schedule)},
            {"lr", rate.peak},
            {"min_lr", rate.minimum},
            {"warmup", rate.warmup},
            {"beta1", adamw.beta1},
            {"beta2", adamw.beta2},
            {"weight_decay", adamw.weight_decay},
            {"clip", adamw.clip}}}};
}

void require_same_run(const json& checkpoint, const json& now, const std::string& name) {
  for (const char* part : {"fixed", "changeable"}) {
    const json* const settings = checkpoint.is_object() && checkpoint.contains(part) ? &checkpoint[part] : nullptr;
    if (settings == nullptr || !settings->is_object() || settings->empty()) {
      throw DataError("{}: expected the settings of a run, got no object '{}'", name, part);
    }
  }
  const std::string fixed = differences(checkpoint.at("fixed"), now.at("fixed"));
  if (!fixed.empty()) throw ConfigError("resume: the run differs from the checkpoint's: {}", fixed);
  const std::string changed = differences(checkpoint.at("changeable"), now.at("changeable"));
  if (!changed.empty()) log_warning(fmt::format("resumed with other settings: {}", changed));
}

}  // namespace parlat
