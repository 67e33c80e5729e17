#include <malloc.h>

#include <memory>

#include "cli/commands.h"
#include "cli/ranks.h"
#include "parlat/base/error.h"
#include "parlat/base/log.h"
#include "parlat/base/progress.h"
#include "parlat/base/units.h"
#include "parlat/convert/convert.h"
#include "parlat/decode/evaluate.h"
#include "parlat/io/files.h"
#include "parlat/io/tokenizer.h"

namespace parlat {

namespace {

struct Flags {
  CommonOptions common;
  std::string transform = "balanced";
  std::vector<std::filesystem::path> calibration;
  int64_t window = 512, tokens = 32768;
  double inner_norm_eps = MlaSpec{}.inner_norm_eps;
  ConvertOptions options;
};

// So many tokens in windows at even distances through all texts; texts that fill no window are passed over.
std::vector<std::vector<int64_t>> calibration_windows(const Flags& flags, const ModelConfig& config) {
  if (flags.window < 2 || flags.window > config.max_positions) {
    throw ConfigError("sequence: expected 2 to the context of {}, got {}", config.max_positions, flags.window);
  }
  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(flags.options.model);
  std::vector<std::vector<int64_t>> all;
  for (const std::filesystem::path& path : flags.calibration) {
    const std::vector<int64_t> tokens = tokenizer->encode(read_text(path));
    if (static_cast<int64_t>(tokens.size()) < flags.window) continue;
    for (std::vector<int64_t>& window : text_windows(tokens, flags.window, path.string())) {
      all.push_back(std::move(window));
    }
  }
  if (all.empty()) {
    throw DataError("{}: expected at least one window of {} tokens in the calibration texts, got none",
                    flags.calibration.front().string(), flags.window);
  }
  const size_t wanted = std::max<int64_t>(1, flags.tokens / flags.window);
  if (wanted >= all.size()) return all;
  std::vector<std::vector<int64_t>> windows;
  for (size_t i = 0; i < wanted; ++i) windows.push_back(std::move(all[i * all.size() / wanted]));
  return windows;
}

void run(Flags& flags) {
  set_quiet(flags.common.quiet);
  const ModelConfig config = load_model_config(flags.options.model.string(), flags.inner_norm_eps);
  flags.options.transform = parse_transform(flags.transform);
  flags.options.balanced.seed = flags.common.seed;
  flags.options.windows = calibration_windows(flags, config);
  // The fit's temporaries stay with the process: given back to the system, they would cost as much again to get anew.
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 512 << 20);
  Progress progress("convert", config.n_layers, "layers", flags.common.quiet);
  std::vector<ConvertedLayer> layers;
  const CommonOptions& common = flags.common;
  if (common.ranks != "local:1")
    throw ConfigError("ranks: expected local:1, since convert runs on one, got {}", common.ranks);
  with_ranks(common, [&](Communicator&) {
    layers = convert(flags.options, config, [&](int64_t done) { progress.update(done); });
  });

  nlohmann::json rows = nlohmann::json::array();
  std::vector<std::vector<std::string>> table = {{"layer", "groups", "error before the fit", "after"}};
  for (const ConvertedLayer& layer : layers) {
    rows.push_back({{"layer", layer.layer}, {"groups", layer.groups}});
    if (flags.options.transform != Transform::kBalanced) continue;
    rows.back()["error_before"] = layer.error_before;
    rows.back()["error_after"] = layer.error_after;
    table.push_back({fmt::format("{}", layer.layer), fmt::format("{}", layer.groups),
                     fmt::format("{:.2e}", layer.error_before), fmt::format("{:.2e}", layer.error_after)});
  }
  if (table.size() > 1) print_table(table);
  fmt::print("{}: {} with slices for {} groups, calibrated on {} tokens, seed {}\n", flags.options.out.string(),
             flags.transform, CLI::detail::join(flags.options.groups, ", "),
             format_count(static_cast<int64_t>(flags.options.windows.size()) * flags.window), common.seed);
  write_record(common, "convert",
               {{"model", flags.options.model.string()},
                {"out", flags.options.out.string()},
                {"transform", flags.transform},
                {"inner_norm_eps", flags.inner_norm_eps},
                {"calibration_tokens", static_cast<int64_t>(flags.options.windows.size()) * flags.window},
                {"seed", common.seed}},
               rows);
}

}  // namespace

void add_convert(CLI::App& app) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* const command = app.add_subcommand("convert", "slice a checkpoint's latent for decoding over ranks");
  add_common_options(*command, flags->common);
  const CLI::Range count(int64_t{1}, int64_t{1} << 40);
  command->add_option("--model", flags->options.model, "folder of a Hugging Face checkpoint")->required();
  command->add_option("--out", flags->options.out, "folder to write; for balanced it may be the model's own")
      ->required();
  command->add_option("--transform", flags->transform, "hadamard, pca or balanced")->capture_default_str();
  add_inner_norm_eps(*command, flags->inner_norm_eps);
  add_list_option(*command, "--groups", flags->options.groups, "slices of the latent; several: a file each");
  command->add_option("--calibration", flags->calibration, "UTF-8 texts")->required();
  command->add_option("--calibration-tokens", flags->tokens, "of all texts together")
      ->check(count)
      ->capture_default_str();
  command->add_option("--sequence", flags->window, "tokens of a calibration window")
      ->check(count)
      ->capture_default_str();
  command->add_option("--fit-steps", flags->options.balanced.steps, "balanced: steps of the fit, 0 for none")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  command->callback([flags] { run(*flags); });
}

}  // namespace parlat
