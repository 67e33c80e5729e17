// config.json: whatever it holds, the answer is a model that can be written and read again, or a parlat::Error.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "parlat/base/error.h"
#include "parlat/base/json.h"
#include "parlat/config/model_config.h"

using parlat::ModelConfig;

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void use(const ModelConfig& config) {
  require(std::isfinite(config.mla.softmax_scale()));
  require(std::isfinite(parlat::rope_amplitude(config.mla.rope)));
  if (config.mla.dims.d_rope <= 1024) {
    for (const double f : parlat::inverse_frequencies(config.mla.rope, config.mla.dims.d_rope))
      require(std::isfinite(f));
  }
  const nlohmann::json written = parlat::to_hf_json(config);
  require(parlat::to_hf_json(parlat::parse_model_config(written, "written")) == written);
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ModelConfig config;
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    config = parlat::parse_model_config(parlat::parse_json(text, "input"), "input");
  } catch (const parlat::Error& error) {
    require(std::string(error.what()).find('\n') == std::string::npos);
    require(error.exit_code() != 1);
    return 0;
  }
  use(config);
  return 0;
}
