#include "cli/verify_layouts.h"

#include <algorithm>

#include "cli/ranks.h"
#include "parlat/bench/layout_check.h"
#include "parlat/bench/rank_runner.h"

namespace parlat {

namespace {

constexpr int64_t kLayers = 2, kTokens = 70;  // more than a page

std::vector<LayoutSpec> layouts_of(int ranks, int64_t n_heads) {
  std::vector<LayoutSpec> layouts;
  for (const DecodeLayout layout : all_decode_layouts()) {
    for (const int64_t groups : is_sliced(layout) ? std::vector<int64_t>{2, 4, 8} : std::vector<int64_t>{1}) {
      if (can_place({layout, groups}, n_heads, ranks)) layouts.push_back({layout, groups});
    }
  }
  return layouts;
}

}  // namespace

VerifiedLayouts verify_layouts(const CommonOptions& common, const std::filesystem::path& model, double inner_norm_eps) {
  ModelConfig config = load_model_config(model, inner_norm_eps);
  config.n_layers = std::min(config.n_layers, kLayers);
  const ModelSource source{.directory = model, .slices = {}, .seed = common.seed};
  const at::ScalarType dtype = parse_dtype(common.dtype);
  VerifiedLayouts verified;
  verified.table = {{"layout", "groups", "ranks", "error", "allowed", ""}};
  for (const CommonOptions& options : each_rank_count(common)) {
    const RankRunner run_ranks = [&](const auto& body) { with_ranks(options, body); };
    const int ranks = run_and_keep(run_ranks, 0, [](Communicator& comm, int& mine) { mine = comm.size(); });
    for (const LayoutSpec& layout : layouts_of(ranks, config.mla.dims.n_heads)) {
      const LayoutCheck check = run_and_keep(run_ranks, LayoutCheck(), [&](Communicator& comm, LayoutCheck& mine) {
        mine = check_layout(source, config, layout, dtype, kTokens, comm);
      });
      verified.ok = verified.ok && check.ok;
      verified.table.push_back({std::string(name(layout.layout)), fmt::format("{}", layout.groups),
                                fmt::format("{}", ranks), fmt::format("{:.1e}", check.max_error),
                                fmt::format("{:.1e}", check.tolerance), check.ok ? "ok" : "FAILED"});
      verified.rows.push_back({{"layout", name(layout.layout)},
                               {"groups", layout.groups},
                               {"ranks", ranks},
                               {"dtype", common.dtype},
                               {"max_error", check.max_error},
                               {"tolerance", check.tolerance},
                               {"ok", check.ok}});
    }
  }
  return verified;
}

}  // namespace parlat
