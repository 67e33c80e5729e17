#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "cli/attention_flags.h"
#include "cli/commands.h"
#include "cli/peak_sites.h"
#include "cli/ranks.h"
#include "parlat/base/error.h"
#include "parlat/base/units.h"
#include "parlat/train/dry_run.h"
#include "parlat/train/step_record.h"
#include "parlat/train/trainer.h"

namespace parlat {

namespace {

constexpr int kInterrupted = 130;

volatile sig_atomic_t interrupts = 0;  // a handler can reach nothing else

// The first asks for an orderly end after the step, the second ends at once.
void on_interrupt(int) {
  if (interrupts > 0) _exit(kInterrupted);
  interrupts = 1;
}

void catch_interrupts() {
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

struct Flags {
  CommonOptions common;
  AttentionFlags attention;
  std::string model_config, tokenizer;
  double inner_norm_eps = MlaSpec{}.inner_norm_eps;
  TextSpec text;
  bool dry_run = false;
  std::string form = "laga", sharding = "contiguous", schedule = "cosine";
  TrainSettings settings;
};

void add_flags(CLI::App& command, Flags& flags) {
  add_common_options(command, flags.common);
  TrainSettings& s = flags.settings;
  const auto option = [&command](const char* name, auto& value, const std::string& help) {
    return command.add_option(name, value, help)->capture_default_str();
  };
  option("--model-config", flags.model_config, "built-in name, config.json, or a folder with one (tiny, or --init's)");
  add_inner_norm_eps(command, flags.inner_norm_eps);
  option("--init", s.init, "folder of a Hugging Face checkpoint whose weights to start from");
  option("--tokenizer", flags.tokenizer, "bytes, or a folder with tokenizer.json (--init's if it has one, or bytes)");
  option("--data", flags.text.files, "text files, each one document");
  option("--eval-data", flags.text.evaluation_file, "text file to evaluate on, instead of a held-out part of --data");
  option("--eval-fraction", flags.text.evaluation_fraction, "part of the sequences to hold out");
  option("--eval-every", s.evaluate_every, "steps (0: at the end)");
  option("--out", s.out, "folder for metrics.jsonl and checkpoints");
  command.add_flag("--resume", s.resume, "go on from the newest checkpoint in --out, if there is one");
  option("--checkpoint-every", s.checkpoint_every, "steps (0: at the end)");
  option("--keep", s.keep, "checkpoints to keep");

  option("--form", flags.form, "one of " + form_names());
  add_attention_options(command, flags.attention);
  option("--sharding", flags.sharding, "contiguous or zigzag");
  option("--data-parallel", s.parallel.data, "ranks over the batch; the others split each sequence");
  option("--expert-parallel", s.parallel.expert, "consecutive ranks that split the experts");

  option("--sequence", flags.text.sequence, "tokens of a sequence");
  option("--batch", s.batch, "sequences of a micro-batch, all ranks together");
  option("--accumulate", s.accumulate, "micro-batches a step");
  option("--steps", s.steps, "steps of the whole run");
  option("--schedule", flags.schedule, "constant, cosine or wsd");
  option("--lr", s.learning_rate.peak, "peak learning rate");
  option("--min-lr", s.learning_rate.minimum, "learning rate at the end");
  option("--warmup", s.learning_rate.warmup, "steps of linear warm-up");
  option("--weight-decay", s.adamw.weight_decay, "of matrices");
  option("--beta1", s.adamw.beta1, "AdamW");
  option("--beta2", s.adamw.beta2, "AdamW");
  option("--clip", s.adamw.clip, "largest norm of the gradient (0: any)");
  command.add_flag("--dry-run", flags.dry_run,
                   "only one step's bytes and memory: the same code on tensors without values, of any size, no --data");
}

std::unique_ptr<Tokenizer> choose_tokenizer(const Flags& flags) {
  const std::filesystem::path& init = flags.settings.init;
  std::error_code missing;
  const bool from_init = !init.empty() && std::filesystem::exists(init / "tokenizer.json", missing);
  if (flags.tokenizer.empty() && from_init) return load_tokenizer(init);
  if (flags.tokenizer.empty() || flags.tokenizer == "bytes") return make_byte_tokenizer();
  return load_tokenizer(flags.tokenizer);
}

TrainSettings resolve(const Flags& flags, int ranks) {
  TrainSettings settings = flags.settings;
  settings.dtype = parse_dtype("dtype", flags.common.dtype);
  settings.seed = flags.common.seed;
  settings.quiet = flags.common.quiet;
  settings.learning_rate.schedule = parse_schedule(flags.schedule);
  settings.learning_rate.steps = settings.steps;
  settings.parallel.form = parse_train_form(flags.form);
  settings.parallel.attention = parse(flags.attention);
  settings.parallel.sharding = parse_sharding(flags.sharding);
  settings.parallel.sequence = settings.parallel.data > 0 ? ranks / settings.parallel.data : ranks;
  return settings;
}

std::string number(const std::optional<double>& value, int digits) {
  return value ? fmt::format("{:.{}f}", *value, digits) : "-";
}

void print_result(const TrainResult& result, const TrainSettings& settings) {
  const bool took_steps = result.loss.has_value();
  print_table({{"form", "ranks", "steps", "loss", "eval loss", "tokens/s", "sent a token", "peak memory", "mfu"},
               {std::string(name(settings.parallel.form)), fmt::format("{}", settings.parallel.ranks()),
                format_count(result.steps), number(result.loss, 4), number(result.evaluation_loss, 4),
                took_steps ? format_count(static_cast<int64_t>(result.tokens_per_s)) : "-",
                took_steps ? format_bytes(result.sent_bytes_per_token) : "-",
                took_steps ? format_bytes(static_cast<double>(result.peak_bytes)) : "-", number(result.mfu, 3)}});
  fmt::print("checkpoint  {}\nrecords     {}\n", result.checkpoint.string(), result.metrics.string());
}

nlohmann::json result_row(const TrainResult& result, const TrainSettings& settings, const ModelConfig& config,
                          int64_t sequence) {
  nlohmann::json row = {{"form", name(settings.parallel.form)},
                        {"kernel", name(settings.parallel.attention.kernel)},
                        {"save", name(settings.parallel.attention.save)},
                        {"ring_groups", settings.parallel.attention.ring_groups},
                        {"ranks", settings.parallel.ranks()},
                        {"sequence", sequence},
                        {"batch", settings.batch},
                        {"heads", config.mla.dims.n_heads},
                        {"dtype", name(settings.dtype)},
                        {"pass", "forward+backward"},
                        {"steps", result.steps},
                        {"interrupted", result.interrupted},
                        {"checkpoint", result.checkpoint.string()},
                        {"metrics", result.metrics.string()}};
  if (result.evaluation_loss) row["eval_loss"] = *result.evaluation_loss;
  if (!result.loss) return row;
  row["loss"] = *result.loss;
  row["tokens_per_s"] = result.tokens_per_s;
  row["sent_bytes"] = to_json(sent_bytes(result.sent));
  row["sent_bytes_per_token"] = result.sent_bytes_per_token;
  row["peak_bytes"] = result.peak_bytes;
  row["mfu"] = *result.mfu;
  return row;
}

struct Inputs {
  ModelConfig config;
  std::unique_ptr<Tokenizer> tokenizer;
  TrainingText text;
};

ModelConfig load_config(const Flags& flags) {
  const bool init_config = flags.model_config.empty() && !flags.settings.init.empty();
  const std::string source = init_config                  ? flags.settings.init.string()
                             : flags.model_config.empty() ? "tiny"
                                                          : flags.model_config;
  return load_model_config(source, flags.inner_norm_eps);
}

Inputs load_inputs(const Flags& flags) {
  ModelConfig config = load_config(flags);
  std::unique_ptr<Tokenizer> tokenizer = choose_tokenizer(flags);
  if (tokenizer->vocab_size() > config.vocab_size) {
    throw ConfigError("model-config: expected a vocabulary of at least the {} tokens of the {} tokenizer, got {}",
                      tokenizer->vocab_size(), tokenizer->name(), config.vocab_size);
  }
  TrainingText text = load_training_text(flags.text, *tokenizer);
  return {std::move(config), std::move(tokenizer), std::move(text)};
}

// One step's bytes and memory, of the rank with most.
void run_dry(const Flags& flags) {
  require_local_ranks(flags.common);
  const ModelConfig config = load_config(flags);
  std::mutex mutex;
  TrainSettings settings;
  DryRun most;
  with_ranks(flags.common, [&](Communicator& world) {
    const TrainSettings of_ranks = resolve(flags, world.size());
    DryRun mine = dry_run_step(of_ranks, config, flags.text.sequence, world);
    const std::lock_guard lock(mutex);
    settings = of_ranks;
    if (mine.peak_bytes > most.peak_bytes) most = std::move(mine);
  });
  print_table(
      {{"form", "ranks", "S", "batch", "dtype", "sent a step", "peak memory"},
       {std::string(name(settings.parallel.form)), fmt::format("{}", settings.parallel.ranks()),
        fmt::format("{}", flags.text.sequence), fmt::format("{}", settings.batch), flags.common.dtype,
        format_bytes(static_cast<double>(most.sent.bytes())), format_bytes(static_cast<double>(most.peak_bytes))}});
  std::vector<std::vector<std::string>> sites = {{"at the peak", "bytes", ""}};
  for (auto& cells : peak_cells(most.peak_sites)) sites.push_back(std::move(cells));
  fmt::print("\n");
  print_table(sites);
  write_record(flags.common, "train",
               {{"model", to_hf_json(config)},
                {"data_ranks", settings.parallel.data},
                {"seed", settings.seed},
                {"expert_ranks", settings.parallel.expert},
                {"accumulate", settings.accumulate}},
               nlohmann::json::array({{{"form", name(settings.parallel.form)},
                                       {"kernel", name(settings.parallel.attention.kernel)},
                                       {"save", name(settings.parallel.attention.save)},
                                       {"ring_groups", settings.parallel.attention.ring_groups},
                                       {"ranks", settings.parallel.ranks()},
                                       {"sequence", flags.text.sequence},
                                       {"batch", settings.batch},
                                       {"heads", config.mla.dims.n_heads},
                                       {"dtype", name(settings.dtype)},
                                       {"pass", "forward+backward"},
                                       {"dry_run", true},
                                       {"sent_bytes", to_json(sent_bytes(most.sent))},
                                       {"peak_bytes", most.peak_bytes},
                                       {"peak_sites", to_json(most.peak_sites)}}}));
}

void run_train(const Flags& flags) {
  if (flags.dry_run) return run_dry(flags);
  if (flags.text.files.empty()) throw CLI::RequiredError("--data");
  if (flags.settings.out.empty()) throw CLI::RequiredError("--out");
  std::optional<Inputs> inputs;
  load_in_every_process(flags.common, [&] { inputs.emplace(load_inputs(flags)); });
  const ModelConfig& config = inputs->config;
  const TrainingText& text = inputs->text;

  std::atomic<bool> interrupted = false;
  catch_interrupts();
  with_ranks(flags.common, [&](Communicator& world) {
    TrainSettings settings = resolve(flags, world.size());
    settings.tokenizer_files = inputs->tokenizer->files();
    // Weights, their gradients' sum in fp32, and what the optimizer keeps in fp32: a copy and two moments.
    require_weight_memory(config, static_cast<int64_t>(c10::elementSize(settings.dtype)) + 16, world);
    const TrainResult result = train(settings, config, text, world, [] { return interrupts > 0; });
    if (result.interrupted) interrupted = true;
    if (world.rank() != 0) return;
    print_result(result, settings);
    write_record(flags.common, "train", describe(settings, config, text.training),
                 nlohmann::json::array({result_row(result, settings, config, text.training.sequence())}));
  });
  if (interrupted) throw CLI::RuntimeError(kInterrupted);
}

}  // namespace

void add_train(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  CLI::App* const command = app.add_subcommand("train", "Train a model, each sequence split over ranks");
  add_flags(*command, *flags);
  command->callback([flags] { run_train(*flags); });
}

}  // namespace parlat
