#include "parlat/config/layout.h"

#include <fmt/format.h>

#include <array>
#include <string>
#include <utility>

#include "parlat/config/model_config.h"
#include "parlat/config/names.h"

namespace parlat {

namespace {

constexpr std::array<std::pair<DecodeLayout, std::string_view>, 5> kLayouts = {{{DecodeLayout::kMla, "mla"},
                                                                                {DecodeLayout::kGla, "gla"},
                                                                                {DecodeLayout::kTpla, "tpla"},
                                                                                {DecodeLayout::kDcp, "dcp"},
                                                                                {DecodeLayout::kTplaDcp, "tpla-dcp"}}};

bool splits_tokens(DecodeLayout layout) { return layout == DecodeLayout::kDcp || layout == DecodeLayout::kTplaDcp; }

// The heads that the ranks of a slice split: all of them, but in gla, where each slice has its own.
Range heads_of_slice(const LayoutSpec& spec, int64_t n_heads, int64_t group) {
  return spec.layout == DecodeLayout::kGla ? even_share(n_heads, spec.groups, group) : Range{0, n_heads};
}

Range share_of(Range range, int64_t parts, int64_t index) {
  const Range share = even_share(range.size(), parts, index);
  return {range.begin + share.begin, range.begin + share.end};
}

// Why the layout cannot be; empty where it can.
std::string misfit(const LayoutSpec& spec, const MlaDims& dims, int ranks) {
  if (!is_sliced(spec.layout) && spec.groups != 1) {
    return fmt::format("expected no groups, since it does not slice the latent, got {}", spec.groups);
  }
  if (spec.groups < 1 || ranks % spec.groups != 0) {
    return fmt::format("expected groups that divide the {} ranks, got {}", ranks, spec.groups);
  }
  if (spec.groups > dims.d_latent) {
    return fmt::format("expected at most the latent's {} columns as groups, got {}", dims.d_latent, spec.groups);
  }
  const int64_t sharers = ranks / spec.groups;
  if (const int64_t heads = heads_of_slice(spec, dims.n_heads, spec.groups - 1).size(); sharers > heads) {
    return fmt::format("expected at most {} ranks to split the {} heads{}, got {}", heads, heads,
                       heads < dims.n_heads ? " of a slice" : "", sharers);
  }
  return "";
}

}  // namespace

const std::vector<DecodeLayout>& all_decode_layouts() {
  static const std::vector<DecodeLayout> kAll = all_in(kLayouts);
  return kAll;
}

bool is_sliced(DecodeLayout layout) { return layout != DecodeLayout::kMla && layout != DecodeLayout::kDcp; }

bool can_place(const LayoutSpec& spec, const MlaDims& dims, int ranks) { return misfit(spec, dims, ranks).empty(); }

std::string_view name(DecodeLayout layout) { return name_in(kLayouts, layout); }
DecodeLayout parse_decode_layout(std::string_view text) { return parse_in(kLayouts, "layout", text); }

Placement place(const LayoutSpec& spec, const MlaDims& dims, int ranks, int rank) {
  if (const std::string why = misfit(spec, dims, ranks); !why.empty()) {
    throw ConfigError("layout {}: {}", name(spec.layout), why);
  }
  Placement p;
  p.groups = spec.groups;
  p.members = ranks / spec.groups;
  p.group = rank / p.members;
  p.member = rank % p.members;
  p.tokens_split = splits_tokens(spec.layout);
  p.heads = share_of(heads_of_slice(spec, dims.n_heads, p.group), p.members, p.member);
  // Slices that compute the same heads share out their exact prefill.
  p.prefill_heads = spec.layout == DecodeLayout::kGla ? p.heads : share_of(p.heads, p.groups, p.group);
  return p;
}

double cache_elements_per_token(const MlaDims& dims, const LayoutSpec& layout, int ranks) {
  const Placement p = place(layout, dims, ranks, 0);  // the first slice is the widest
  const int64_t width = even_share(dims.d_latent, p.groups, p.group).size() + dims.d_rope;
  return static_cast<double>(width) / static_cast<double>(p.token_sharers());
}

}  // namespace parlat
