#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "parlat/config/parallel.h"

namespace parlat {

// --kernel, --save and --ring-groups.
struct AttentionFlags {
  std::string kernel = "fused", save = "latent";
  int64_t ring_groups = 0;
};
void add_attention_options(CLI::App& command, AttentionFlags& flags);
AttentionOptions parse(const AttentionFlags& flags);

// ConfigError for more --documents than a sequence has tokens.
void require_tokens(int64_t documents, int64_t sequence);

// "explicit, absorbed, ...".
std::string form_names();
// "some of explicit, absorbed, ...; default: every form" and the forms it names, by default all that the model
// and the kernel can have.
std::string forms_help();
std::vector<TrainForm> parse_forms(const std::vector<std::string>& names, bool has_query_latent,
                                   const AttentionOptions& options);

}  // namespace parlat
