#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "parlat/config/parallel.h"

namespace parlat {

// --kernel and --save.
struct AttentionFlags {
  std::string kernel = "fused", save = "latent";
};
void add_attention_options(CLI::App& command, AttentionFlags& flags);
AttentionOptions parse(const AttentionFlags& flags);

// "some of explicit, absorbed, ...; default: every form" and the forms it names, by default all that the model
// and the kernel can have.
std::string forms_help();
std::vector<TrainForm> parse_forms(const std::vector<std::string>& names, bool has_query_latent,
                                   const AttentionOptions& options);

}  // namespace parlat
