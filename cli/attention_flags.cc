#include "cli/attention_flags.h"

#include "parlat/base/error.h"

namespace parlat {

void add_attention_options(CLI::App& command, AttentionFlags& flags) {
  command.add_option("--kernel", flags.kernel, "fused, or eager, which writes all scores")->capture_default_str();
  command
      .add_option("--save", flags.save,
                  "of keys and values for the backward pass: latent, which rebuilds them, or all (fused; laga, laga-q)")
      ->capture_default_str();
  command
      .add_option("--ring-groups", flags.ring_groups,
                  "of hybrid: groups of ranks between which latents pass; heads are split within one (0: as many as "
                  "leave several ranks in each)")
      ->capture_default_str();
}

AttentionOptions parse(const AttentionFlags& flags) {
  return {.kernel = parse_attention_kernel(flags.kernel),
          .save = parse_saved_keys(flags.save),
          .ring_groups = flags.ring_groups};
}

void require_tokens(int64_t documents, int64_t sequence) {
  if (documents <= sequence) return;
  throw ConfigError("documents: expected at most the {} tokens of a sequence, got {}", sequence, documents);
}

std::string form_names() {
  std::string names;
  for (const TrainForm form : all_train_forms()) names += (names.empty() ? "" : ", ") + std::string(name(form));
  return names;
}

std::string forms_help() { return "some of " + form_names() + "; default: every form that the model allows"; }

std::vector<TrainForm> parse_forms(const std::vector<std::string>& names, bool has_query_latent,
                                   const AttentionOptions& options) {
  if (names.empty()) return possible_train_forms(has_query_latent, options.kernel);
  std::vector<TrainForm> forms;
  for (const std::string& form : names) forms.push_back(parse_train_form(form));
  return forms;
}

}  // namespace parlat
