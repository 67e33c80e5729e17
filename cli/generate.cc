#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/decode_flags.h"
#include "cli/ranks.h"
#include "parlat/base/error.h"
#include "parlat/base/log.h"
#include "parlat/config/json_fields.h"
#include "parlat/decode/engine.h"
#include "parlat/decode/handoff.h"
#include "parlat/io/files.h"
#include "parlat/io/tokenizer.h"
#include "parlat/io/utf8.h"

namespace parlat {

namespace {

struct Flags {
  DecodeFlags decode;
  std::vector<std::string> prompts;
  std::filesystem::path prompt_file;
  Request request;
  int64_t chunk = 512;
  int prefill_ranks = 0;
  bool ignore_end = false;
};

// From config.json and generation_config.json: one token or several.
void add_end_tokens(const nlohmann::json& config, const std::string& file, int64_t vocab_size,
                    std::vector<int64_t>& tokens) {
  JsonFields fields(config, file + ": ");
  const nlohmann::json* const found = fields.find("eos_token_id");
  if (found == nullptr) return;
  for (const nlohmann::json& token : found->is_array() ? *found : nlohmann::json::array({*found})) {
    if (!token.is_number_integer() || token < 0 || token >= vocab_size) {
      fields.refuse("eos_token_id", fmt::format("null or tokens from 0 to {}", vocab_size - 1));
    }
    tokens.push_back(token.get<int64_t>());
  }
}

std::vector<int64_t> end_tokens(const Flags& flags, const ModelConfig& config) {
  std::vector<int64_t> tokens;
  if (flags.ignore_end) return tokens;
  add_end_tokens(config.hf, config.name, config.vocab_size, tokens);
  const std::filesystem::path generation = flags.decode.model / "generation_config.json";
  std::error_code ignored;
  if (std::filesystem::exists(generation, ignored)) {
    if (const nlohmann::json json = read_json(generation); json.is_object()) {
      add_end_tokens(json, generation.string(), config.vocab_size, tokens);
    }
  }
  return tokens;
}

std::vector<Request> make_requests(const Flags& flags, const std::vector<int64_t>& stop_tokens,
                                   const Tokenizer& tokenizer) {
  for (const std::string& prompt : flags.prompts) {
    if (const auto offset = find_invalid_utf8(prompt)) {
      throw ConfigError("prompt: expected UTF-8 text, got byte 0x{:02x} at offset {}",
                        static_cast<unsigned char>(prompt[*offset]), *offset);
    }
  }
  std::vector<std::string> prompts = flags.prompts;
  if (!flags.prompt_file.empty()) prompts.push_back(read_text(flags.prompt_file));
  if (prompts.empty()) throw ConfigError("prompt: expected --prompt or --prompt-file");
  std::vector<Request> requests;
  for (const std::string& prompt : prompts) {
    Request request = flags.request;
    request.prompt = tokenizer.prefix();
    const std::vector<int64_t> tokens = tokenizer.encode(prompt);
    request.prompt.insert(request.prompt.end(), tokens.begin(), tokens.end());
    // A model needs something to go on from; without a first token of its own, the end of a document is where texts
    // begin.
    if (request.prompt.empty()) request.prompt = {tokenizer.end_of_document()};
    request.stop_tokens = stop_tokens;
    request.sampling.seed = flags.decode.common.seed + requests.size();
    requests.push_back(std::move(request));
  }
  return requests;
}

// What a signal that ends the run still has to print. mpirun sends SIGTERM when another rank dies, in whose exchange
// this process then waits, and SIGKILL a second later.
std::atomic<const std::string*> unprinted = nullptr;
std::atomic<int> ending = 0;  // a signal that came while there was none, since it changes

void print_and_end(int signal) {
  const std::string* const rest = unprinted.exchange(nullptr);
  if (rest == nullptr && ending.exchange(signal) == 0) return;
  const bool written = rest == nullptr || ::write(STDOUT_FILENO, rest->data(), rest->size()) >= 0;
  ::_exit(written ? 128 + signal : 1);
}

// Texts in the order of their requests, the first one that has not ended as it comes, those behind it when it has; or
// as far as they are, when the run ends before them.
class Printer {
 public:
  Printer(const Tokenizer& tokenizer, size_t count) : texts_(count), tokens_(count), finishes_(count) {
    for (size_t i = 0; i < count; ++i) streams_.emplace_back(tokenizer);
    publish();
    for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, print_and_end);
  }
  ~Printer() { retract(); }
  Printer(const Printer&) = delete;
  Printer& operator=(const Printer&) = delete;

  void take(const Emission& emission) {
    retract();
    const size_t request = emission.request;
    tokens_[request].push_back(emission.token);
    std::string piece = emission.finish == Finish::kStopToken ? "" : streams_[request].push(emission.token);
    if (emission.finish) {
      piece += streams_[request].finish() + "\n";
      finishes_[request] = name(*emission.finish);
      log_info(fmt::format("request {}: ended by {}", request, finishes_[request]));
    }
    if (texts_[request].empty() && texts_.size() > 1) piece.insert(0, fmt::format("--- {}\n", request));
    texts_[request] += piece;
    if (request != printing_) return publish();
    print(piece);
    while (!finishes_[printing_].empty() && ++printing_ < texts_.size()) print(texts_[printing_]);
    publish();
  }

  void print_rest() {
    retract();
    print(rest());
  }

  nlohmann::json rows(const std::vector<Request>& requests) const {
    nlohmann::json all = nlohmann::json::array();
    for (size_t i = 0; i < requests.size(); ++i) {
      all.push_back({{"request", i},
                     {"prompt_tokens", requests[i].prompt},
                     {"tokens", tokens_[i]},
                     {"seed", requests[i].sampling.seed},
                     {"finish", finishes_[i]}});
    }
    return all;
  }

 private:
  static void print(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    flush_stdout();
  }

  // Ends the line of the text that was printed last; those behind it.
  std::string rest() const {
    std::string rest;
    for (size_t i = printing_; i < texts_.size(); ++i) {
      if (i > printing_) rest += texts_[i];
      if (!texts_[i].empty() && finishes_[i].empty()) rest += "\n";
    }
    return rest;
  }

  void publish() {
    published_ = std::make_unique<const std::string>(rest());
    unprinted = published_.get();
    if (ending != 0) print_and_end(ending);
  }

  // Before anything is printed here. What a handler has taken it prints, and ends the process.
  void retract() {
    if (published_ && unprinted.exchange(nullptr) == nullptr) {
      for (;;) ::pause();
    }
    published_.reset();
  }

  std::vector<TextStream> streams_;
  std::vector<std::string> texts_;  // with what surrounds them
  std::vector<std::vector<int64_t>> tokens_;
  std::vector<std::string> finishes_;  // empty: goes on
  size_t printing_ = 0;                // the first that has not ended
  std::unique_ptr<const std::string> published_;
};

// Of all requests at once.
int64_t cache_tokens(const std::vector<Request>& requests, const ModelConfig& config, const LayoutSpec& layout,
                     const Communicator& comm) {
  std::vector<int64_t> lengths;
  for (const Request& request : requests) {
    lengths.push_back(
        std::min(static_cast<int64_t>(request.prompt.size()) + request.max_new_tokens, config.max_positions));
  }
  return Decoder::cache_tokens_for(lengths, place(layout, config.mla.dims, comm.size(), comm.rank()));
}

// The ranks that only run prompts.
void serve_prompts(const Flags& flags, const ModelConfig& config, const std::vector<Request>& requests,
                   const HandoffPlan& plan, Communicator& own, Communicator& world) {
  int64_t longest = 0;
  for (const Request& request : requests) longest = std::max<int64_t>(longest, request.prompt.size());
  const auto decoder = make_decoder(flags.decode, config, {}, longest, own);
  for (const Request& request : requests) {
    serve_prompt(plan, *decoder, request.prompt, flags.chunk, world);
  }
}

void run(Engine& engine, Printer& printer) {
  try {
    while (!engine.idle()) {
      for (const Emission& emission : engine.step()) printer.take(emission);
    }
  } catch (...) {
    printer.print_rest();
    throw;
  }
}

void generate(const Flags& flags, const ModelConfig& config, const Tokenizer& tokenizer,
              const std::vector<Request>& requests, Communicator& world) {
  const bool separate = flags.prefill_ranks > 0;
  const int decode_ranks = world.size() - flags.prefill_ranks;
  const LayoutSpec layout = layout_spec(flags.decode.layout, flags.decode.groups, std::max(decode_ranks, 1));
  HandoffPlan plan;
  std::unique_ptr<Communicator> group;
  if (separate) {
    const ModelSource source{.directory = flags.decode.model, .slices = flags.decode.slices, .seed = 1};
    plan = make_handoff_plan(source, config, layout, flags.prefill_ranks, world.size());
    group = world.split(world.rank() < flags.prefill_ranks ? 0 : 1);
    if (world.rank() < flags.prefill_ranks) return serve_prompts(flags, config, requests, plan, *group, world);
  }
  Communicator& comm = separate ? *group : world;
  const auto decoder = make_decoder(flags.decode, config, layout, cache_tokens(requests, config, layout, comm), comm);
  EngineOptions options{.prefill_chunk = flags.chunk, .exact_prefill = exact_prefill(flags.decode)};
  if (separate) {
    options.remote_prefill = [&](int64_t slot, Range chunk, bool last) {
      return take_over(plan, *decoder, slot, chunk, last, world);
    };
  }
  Engine engine(*decoder, options);
  for (const Request& request : requests) engine.submit(request);
  if (comm.rank() != 0) {
    while (!engine.idle()) engine.step();
    return;
  }
  Printer printer(tokenizer, requests.size());
  run(engine, printer);
  write_record(flags.decode.common, "generate",
               {{"model", flags.decode.model.string()},
                {"layout", name(layout.layout)},
                {"groups", layout.groups},
                {"ranks", comm.size()},
                {"prefill_ranks", flags.prefill_ranks},
                {"prefill", flags.decode.prefill},
                {"inner_norm_eps", flags.decode.inner_norm_eps}},
               printer.rows(requests));
}

void run_generate(const Flags& flags) {
  if (flags.prefill_ranks > 0 && !exact_prefill(flags.decode)) {
    throw ConfigError("prefill-ranks: expected --prefill exact with it, got sliced");
  }
  const ModelConfig config = load_model_config(flags.decode.model, flags.decode.inner_norm_eps);
  const std::vector<int64_t> stop_tokens = end_tokens(flags, config);
  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(flags.decode.model);
  const std::vector<Request> requests = make_requests(flags, stop_tokens, *tokenizer);
  with_ranks(flags.decode.common, [&](Communicator& world) { generate(flags, config, *tokenizer, requests, world); });
}

}  // namespace

void add_generate(CLI::App& app) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* const command = app.add_subcommand("generate", "text in, text out, streamed");
  add_decode_flags(*command, flags->decode);
  command->add_option("--prompt", flags->prompts, "text to go on from; several make a batch")->take_all();
  command->add_option("--prompt-file", flags->prompt_file, "UTF-8 text to go on from");
  command->add_option("--new-tokens", flags->request.max_new_tokens, "at most")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  Sampling& sampling = flags->request.sampling;
  command->add_option("--temperature", sampling.temperature, "0: greedy")->capture_default_str();
  command->add_option("--top-k", sampling.top_k, "draw from the k likeliest (0: all)")->capture_default_str();
  command->add_option("--top-p", sampling.top_p, "draw from the likeliest that add up to p")->capture_default_str();
  command->add_option("--prefill-chunk", flags->chunk, "tokens of a prompt in one pass")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  command
      ->add_option("--prefill-ranks", flags->prefill_ranks, "ranks that only run prompts, exactly; the others decode")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->add_flag("--ignore-end", flags->ignore_end, "go on past end tokens");
  command->callback([flags] { run_generate(*flags); });
}

}  // namespace parlat
