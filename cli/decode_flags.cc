#include "cli/decode_flags.h"

#include "cli/ranks.h"
#include "parlat/base/error.h"
#include "parlat/base/log.h"
#include "parlat/decode/cache_size.h"

namespace parlat {

void add_decode_flags(CLI::App& command, DecodeFlags& flags) {
  add_common_options(command, flags.common);
  command.add_option("--model", flags.model, "folder of a Hugging Face checkpoint")->required();
  command.add_option("--layout", flags.layout, "mla, gla, tpla, dcp or tpla-dcp")->capture_default_str();
  command.add_option("--groups", flags.groups, "slices of the latent (0: one a rank; tpla-dcp: 2)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  command.add_option("--slices", flags.slices, "file of slice maps; default: the model folder's for the groups");
  command.add_option("--cache-dtype", flags.cache_dtype, "fp32 or bf16; default: --dtype");
  command.add_option("--prefill", flags.prefill, "exact or sliced")->capture_default_str();
  command.add_flag("--slice-norm", flags.slice_norm, "normalise each slice by its own RMS, as published");
  add_inner_norm_eps(command, flags.inner_norm_eps);
}

LayoutSpec layout_spec(const std::string& layout, int64_t groups, int ranks) {
  LayoutSpec spec{.layout = parse_decode_layout(layout), .groups = groups};
  if (groups > 0) return spec;
  spec.groups = !is_sliced(spec.layout) ? 1 : spec.layout == DecodeLayout::kTplaDcp ? 2 : ranks;
  return spec;
}

LayoutSpec listed_layout_spec(const std::string& layout, int64_t groups, int ranks) {
  return layout_spec(layout, is_sliced(parse_decode_layout(layout)) ? groups : 0, ranks);
}

bool exact_prefill(const DecodeFlags& flags) {
  if (flags.prefill != "exact" && flags.prefill != "sliced") {
    throw ConfigError("prefill: expected exact or sliced, got '{}'", flags.prefill);
  }
  return flags.prefill == "exact";
}

std::unique_ptr<Decoder> make_decoder(const DecodeFlags& flags, const ModelConfig& config, const LayoutSpec& layout,
                                      int64_t cache_tokens, Communicator& comm) {
  const at::ScalarType dtype = parse_dtype("dtype", flags.common.dtype);
  const at::ScalarType cache_dtype = flags.cache_dtype.empty() ? dtype : parse_dtype("cache-dtype", flags.cache_dtype);
  require_cache_memory(config, layout, cache_tokens, cache_dtype, comm);
  const ModelSource source{.directory = flags.model, .slices = flags.slices, .seed = flags.common.seed};
  const bool own_slices = layout.groups > 1 && layout.layout != DecodeLayout::kGla && flags.slices.empty();
  std::error_code ignored;
  if (own_slices && comm.rank() == 0 &&
      !std::filesystem::exists(flags.model / slice_file_name(layout.groups), ignored)) {
    log_warning(fmt::format("{}: no {}: the latent is cut as it is; see parlat convert", flags.model.string(),
                            slice_file_name(layout.groups)));
  }
  return std::make_unique<Decoder>(
      load_model_shard(source, config, layout, comm.size(), comm.rank(), dtype), comm,
      DecoderOptions{.cache_tokens = cache_tokens, .cache_dtype = cache_dtype, .slice_norm = flags.slice_norm});
}

}  // namespace parlat
