#include <algorithm>
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "cli/decode_flags.h"
#include "cli/ranks.h"
#include "parlat/base/error.h"
#include "parlat/base/progress.h"
#include "parlat/base/units.h"
#include "parlat/bench/rank_runner.h"
#include "parlat/decode/evaluate.h"
#include "parlat/io/files.h"
#include "parlat/io/tokenizer.h"

namespace parlat {

namespace {

struct Flags {
  DecodeFlags decode;
  std::filesystem::path data;
  std::vector<std::string> layouts;
  std::string reference = "mla";
  int64_t window = 512, max_tokens = 0, prompt = 0;
  bool copied = false;
};

struct Row {
  LayoutSpec layout;
  Evaluation sums;
  std::filesystem::path slices;
  double cache_bytes_per_token = 0;
};

struct Text {
  std::vector<std::vector<int64_t>> windows;
  int64_t from = 1;
  EvaluationOptions options;
};

Text make_text(const Flags& flags, const ModelConfig& config) {
  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(flags.decode.model);
  if (flags.window < 2 || flags.window > config.max_positions) {
    throw ConfigError("sequence: expected 2 to the context of {}, got {}", config.max_positions, flags.window);
  }
  if (flags.copied && flags.window % 2 != 0) {
    throw ConfigError("sequence: expected an even number of tokens with --copied, got {}", flags.window);
  }
  const bool exact = exact_prefill(flags.decode);
  if (flags.prompt >= flags.window) {
    throw ConfigError("prompt: expected fewer tokens than the window of {}, got {}", flags.window, flags.prompt);
  }
  const std::vector<int64_t> tokens = tokenizer->encode(read_text(flags.data));
  Text text;
  text.options = {.max_tokens = flags.max_tokens,
                  .prefill = exact ? PrefillMode::kExact : PrefillMode::kSliced,
                  .prompt = flags.prompt > 0 ? flags.prompt : flags.window / 2};
  if (flags.copied) {
    text.windows = copied_windows(tokens, flags.window, flags.data.string());
    text.from = std::max(flags.prompt, flags.window / 2);
  } else {
    text.windows = text_windows(tokens, flags.window, flags.data.string());
    text.from = exact || flags.prompt > 0 ? text.options.prompt : 1;
  }
  if (flags.max_tokens > 0) {
    const int64_t each = flags.window - text.from;
    const size_t needed = static_cast<size_t>((flags.max_tokens + each - 1) / each);
    if (needed < text.windows.size()) text.windows.resize(needed);
  }
  return text;
}

std::vector<Row> evaluate_layouts(const Flags& flags, const ModelConfig& config, const Text& text, Communicator& comm) {
  const ModelSource source{.directory = flags.decode.model, .slices = flags.decode.slices, .seed = 1};
  const auto decoder_of = [&](const LayoutSpec& layout) {
    const Placement placement = place(layout, config.mla.dims, comm.size(), comm.rank());
    return make_decoder(flags.decode, config, layout, Decoder::cache_tokens_for({flags.window}, placement), comm);
  };
  const auto spec_of = [&](const std::string& layout) {
    return listed_layout_spec(layout, flags.decode.groups, comm.size());
  };
  std::optional<LayoutSpec> reference_spec;
  if (flags.reference != "none") reference_spec = spec_of(flags.reference);
  // All of them can be, before the first is loaded.
  for (const std::string& layout : flags.layouts) place(spec_of(layout), config.mla.dims, comm.size(), comm.rank());
  std::vector<Row> rows;
  std::vector<std::unique_ptr<Decoder>> decoders;
  std::vector<Decoder*> evaluated;
  Decoder* reference = nullptr;
  for (const std::string& layout : flags.layouts) {
    rows.push_back({.layout = spec_of(layout), .sums = {}, .slices = slice_file(source, spec_of(layout))});
    decoders.push_back(decoder_of(rows.back().layout));
    evaluated.push_back(decoders.back().get());
    rows.back().cache_bytes_per_token = evaluated.back()->cache_bytes_per_token();
    // The reference runs once, whether or not it is one of the layouts.
    if (layout == flags.reference && rows.back().layout.groups == reference_spec->groups) reference = evaluated.back();
  }
  if (reference == nullptr && reference_spec) {
    decoders.push_back(decoder_of(*reference_spec));
    reference = decoders.back().get();
  }
  Progress progress("eval", static_cast<int64_t>(text.windows.size()), "windows",
                    flags.decode.common.quiet || comm.rank() != 0);
  const std::vector<Evaluation> sums = evaluate(evaluated, reference, text.windows, text.from, text.options,
                                                [&](int64_t done) { progress.update(done); });
  for (size_t i = 0; i < rows.size(); ++i) rows[i].sums = sums[i];
  return rows;
}

nlohmann::json to_json(const Row& row, const Flags& flags, int ranks, bool reference) {
  const double n = static_cast<double>(row.sums.tokens);
  const DecodeFlags& decode = flags.decode;
  nlohmann::json json = {{"layout", name(row.layout.layout)},
                         {"groups", row.layout.groups},
                         {"ranks", ranks},
                         {"sequence", flags.window},
                         {"prefill", decode.prefill},
                         {"dtype", decode.common.dtype},
                         {"cache_dtype", decode.cache_dtype.empty() ? decode.common.dtype : decode.cache_dtype},
                         {"slices", row.slices.string()},
                         {"transform", row.slices.empty() ? "none" : slice_transform(row.slices)},
                         {"tokens", row.sums.tokens},
                         {"loss", row.sums.loss / n},
                         {"perplexity", row.sums.perplexity()},
                         {"accuracy", static_cast<double>(row.sums.correct) / n},
                         {"cache_bytes_per_token", row.cache_bytes_per_token}};
  if (reference) {
    json["kl"] = row.sums.kl / n;
    json["agreement"] = static_cast<double>(row.sums.agreed) / n;
  }
  return json;
}

void run_eval(Flags& flags) {
  const ModelConfig config = load_model_config(flags.decode.model, flags.decode.inner_norm_eps);
  if (flags.layouts.empty()) flags.layouts = {flags.decode.layout};
  const Text text = make_text(flags, config);
  with_ranks(flags.decode.common, [&](Communicator& comm) {
    const std::vector<Row> rows = evaluate_layouts(flags, config, text, comm);
    if (comm.rank() != 0) return;
    const bool reference = flags.reference != "none";
    std::vector<std::vector<std::string>> table = {{"layout", "groups", "ranks", "tokens", "perplexity",
                                                    "KL to " + flags.reference, "same top 1", "accuracy",
                                                    "cache a token and rank"}};
    nlohmann::json json = nlohmann::json::array();
    for (const Row& row : rows) {
      json.push_back(to_json(row, flags, comm.size(), reference));
      const nlohmann::json& r = json.back();
      table.push_back(
          {std::string(name(row.layout.layout)), fmt::format("{}", row.layout.groups), fmt::format("{}", comm.size()),
           format_count(row.sums.tokens), fmt::format("{:.4f}", row.sums.perplexity()),
           reference ? fmt::format("{:.5f}", r.at("kl").get<double>()) : "-",
           reference ? fmt::format("{:.2f} %", 100 * r.at("agreement").get<double>()) : "-",
           fmt::format("{:.4f}", r.at("accuracy").get<double>()), fmt::format("{:.0f} B", row.cache_bytes_per_token)});
    }
    print_table(table);
    write_record(flags.decode.common, "eval",
                 {{"model", flags.decode.model.string()},
                  {"data", flags.data.string()},
                  {"copied", flags.copied},
                  {"reference", flags.reference},
                  {"sequence", flags.window},
                  {"counted_from", text.from},
                  {"prompt", text.options.prefill == PrefillMode::kExact ? text.options.prompt : 0},
                  {"slice_norm", flags.decode.slice_norm},
                  {"inner_norm_eps", flags.decode.inner_norm_eps}},
                 json);
  });
}

}  // namespace

void add_eval(CLI::App& app) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* const command =
      app.add_subcommand("eval", "perplexity of a text, and how far each layout is from the exact one");
  flags->decode.prefill = "sliced";
  add_decode_flags(*command, flags->decode);
  const CLI::Range count(int64_t{0}, int64_t{1} << 40);
  command->add_option("--data", flags->data, "UTF-8 text")->required();
  add_list_option(*command, "--layouts", flags->layouts, "several layouts, one row each, instead of --layout");
  command->add_option("--reference", flags->reference, "layout that KL and agreement refer to, or none")
      ->capture_default_str();
  command->add_option("--sequence", flags->window, "tokens of a window")->check(count)->capture_default_str();
  command->add_option("--tokens", flags->max_tokens, "predicted tokens at most (0: all)")->check(count);
  command
      ->add_option("--prompt", flags->prompt,
                   "tokens of each window that are not counted; --prefill exact runs them exactly (0: half with "
                   "exact prefill, else the first)")
      ->check(count);
  command->add_flag("--copied", flags->copied, "windows of a passage and its copy; counted: the copy");
  command->callback([flags] { run_eval(*flags); });
}

}  // namespace parlat
