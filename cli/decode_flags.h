#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/common.h"
#include "parlat/decode/decoder.h"

namespace parlat {

// The flags of commands that run a model over a latent cache.
struct DecodeFlags {
  CommonOptions common;
  std::filesystem::path model;
  std::string layout = "mla", cache_dtype, prefill = "exact";
  int64_t groups = 0;  // 0: 1 for whole latents, else the ranks (tpla-dcp: 2)
  std::filesystem::path slices;
  bool slice_norm = false;
  double inner_norm_eps = MlaSpec{}.inner_norm_eps;
};
void add_decode_flags(CLI::App& command, DecodeFlags& flags);

// groups resolved for so many ranks.
LayoutSpec layout_spec(const std::string& layout, int64_t groups, int ranks);
// For commands with several layouts: groups concern those that slice.
LayoutSpec listed_layout_spec(const std::string& layout, int64_t groups, int ranks);
bool exact_prefill(const DecodeFlags& flags);

// This rank's decoder with room for `cache_tokens` tokens. Collective.
std::unique_ptr<Decoder> make_decoder(const DecodeFlags& flags, const ModelConfig& config, const LayoutSpec& layout,
                                      int64_t cache_tokens, Communicator& comm);

}  // namespace parlat
