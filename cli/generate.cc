#include <fmt/format.h>

#include <algorithm>
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

// One prompt: text as it comes. Several: each whole when it ends.
class Printer {
 public:
  Printer(const Tokenizer& tokenizer, size_t count) : texts_(count), tokens_(count), finishes_(count) {
    for (size_t i = 0; i < count; ++i) streams_.emplace_back(tokenizer);
  }

  void take(const Emission& emission) {
    tokens_[emission.request].push_back(emission.token);
    const bool stop_token = emission.finish == Finish::kStopToken;
    std::string& text = texts_[emission.request];
    std::string piece = stop_token ? "" : streams_[emission.request].push(emission.token);
    if (emission.finish) piece += streams_[emission.request].finish();
    text += piece;
    if (texts_.size() == 1) print(piece);
    if (emission.finish) finish(emission);
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

  void finish(const Emission& emission) {
    if (texts_.size() > 1) print(fmt::format("--- {}\n{}", emission.request, texts_[emission.request]));
    print("\n");
    finishes_[emission.request] = name(*emission.finish);
    log_info(fmt::format("request {}: ended by {}", emission.request, name(*emission.finish)));
  }

  std::vector<TextStream> streams_;
  std::vector<std::string> texts_;
  std::vector<std::vector<int64_t>> tokens_;
  std::vector<std::string> finishes_;
};

int64_t cache_tokens(const std::vector<Request>& requests, int64_t max_positions, int ranks) {
  int64_t tokens = 0;
  for (const Request& request : requests) {
    // Whole pages on every rank.
    tokens += std::min(static_cast<int64_t>(request.prompt.size()) + request.max_new_tokens, max_positions) +
              kPageTokens * ranks;
  }
  return tokens;
}

// The ranks that only run prompts.
void serve_prompts(const Flags& flags, const ModelConfig& config, const std::vector<Request>& requests,
                   const HandoffPlan& plan, Communicator& own, Communicator& world) {
  int64_t longest = 0;
  for (const Request& request : requests) longest = std::max<int64_t>(longest, request.prompt.size());
  const auto decoder = make_decoder(flags.decode, config, {}, longest, own);
  for (const Request& request : requests) {
    Decoder::Prefill state{.slot = decoder->add_sequence(request.prompt.size()), .done = 0, .latents = {}};
    Tensor hidden_nD;
    for (size_t begin = 0; begin < request.prompt.size(); begin += flags.chunk) {
      const auto end = std::min<size_t>(begin + flags.chunk, request.prompt.size());
      hidden_nD = decoder->prefill(state, {request.prompt.begin() + begin, request.prompt.begin() + end});
    }
    hand_over(plan, state.latents, decoder->logits(hidden_nD.narrow(0, hidden_nD.size(0) - 1, 1))[0], world);
    decoder->release(state.slot);
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
  const auto decoder =
      make_decoder(flags.decode, config, layout, cache_tokens(requests, config.max_positions, comm.size()), comm);
  EngineOptions options{.prefill_chunk = flags.chunk, .exact_prefill = exact_prefill(flags.decode)};
  if (separate) {
    options.remote_prefill = [&](int64_t slot, int64_t tokens) {
      return take_over(plan, *decoder, slot, tokens, world);
    };
  }
  Engine engine(*decoder, options);
  for (const Request& request : requests) engine.submit(request);
  Printer printer(tokenizer, requests.size());
  while (!engine.idle()) {
    for (const Emission& emission : engine.step()) {
      if (comm.rank() == 0) printer.take(emission);
    }
  }
  if (comm.rank() != 0) return;
  write_record(flags.decode.common, "generate",
               {{"model", flags.decode.model.string()},
                {"layout", name(layout.layout)},
                {"groups", layout.groups},
                {"ranks", comm.size()},
                {"prefill_ranks", flags.prefill_ranks},
                {"prefill", flags.decode.prefill}},
               printer.rows(requests));
}

void run_generate(const Flags& flags) {
  const ModelConfig config = load_model_config(flags.decode.model);
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
