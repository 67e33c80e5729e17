#include "parlat/config/layout.h"

#include <array>
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

// The ranks that compute different heads: all of them, but for the copies of heads that slices make.
int64_t head_sharers(const LayoutSpec& spec, int ranks) {
  return spec.layout == DecodeLayout::kGla ? ranks : ranks / spec.groups;
}

void check(const LayoutSpec& spec, int64_t n_heads, int ranks) {
  const std::string_view layout = name(spec.layout);
  if (!is_sliced(spec.layout) && spec.groups != 1) {
    throw ConfigError("layout {}: expected no groups, since it does not slice the latent, got {}", layout, spec.groups);
  }
  if (spec.groups < 1 || ranks % spec.groups != 0) {
    throw ConfigError("layout {}: expected groups that divide the {} ranks, got {}", layout, ranks, spec.groups);
  }
  if (const int64_t sharers = head_sharers(spec, ranks); sharers > n_heads) {
    throw ConfigError("layout {}: expected at most {} ranks to split the {} heads, got {}", layout, n_heads, n_heads,
                      sharers);
  }
}

}  // namespace

const std::vector<DecodeLayout>& all_decode_layouts() {
  static const std::vector<DecodeLayout> kAll = all_in(kLayouts);
  return kAll;
}

bool is_sliced(DecodeLayout layout) { return layout != DecodeLayout::kMla && layout != DecodeLayout::kDcp; }

bool can_place(const LayoutSpec& spec, int64_t n_heads, int ranks) {
  return ranks % spec.groups == 0 && head_sharers(spec, ranks) <= n_heads;
}

std::string_view name(DecodeLayout layout) { return name_in(kLayouts, layout); }
DecodeLayout parse_decode_layout(std::string_view text) { return parse_in(kLayouts, "layout", text); }

Placement place(const LayoutSpec& spec, int64_t n_heads, int ranks, int rank) {
  check(spec, n_heads, ranks);
  Placement p;
  p.groups = spec.groups;
  p.members = ranks / spec.groups;
  p.group = rank / p.members;
  p.member = rank % p.members;
  p.tokens_split = splits_tokens(spec.layout);
  const bool own_heads = spec.layout == DecodeLayout::kGla;
  p.heads = own_heads ? even_share(n_heads, ranks, rank) : even_share(n_heads, p.members, p.member);
  // Slices that compute the same heads share out their exact prefill.
  const Range prefill = own_heads ? Range{0, p.heads.size()} : even_share(p.heads.size(), p.groups, p.group);
  p.prefill_heads = {p.heads.begin + prefill.begin, p.heads.begin + prefill.end};
  return p;
}

double cache_elements_per_token(const MlaDims& dims, const LayoutSpec& layout, int ranks) {
  const Placement p = place(layout, dims.n_heads, ranks, 0);  // the first slice is the widest
  const int64_t width = even_share(dims.d_latent, p.groups, p.group).size() + dims.d_rope;
  return static_cast<double>(width) / (p.tokens_split ? static_cast<double>(p.members) : 1.0);
}

}  // namespace parlat
