#include "cli/verify_layouts.h"

#include <algorithm>
#include <map>
#include <utility>

#include "cli/ranks.h"
#include "parlat/bench/layout_check.h"
#include "parlat/bench/rank_runner.h"

namespace parlat {

namespace {

constexpr int64_t kLayers = 2;

// With every number of groups that the ranks can have; none for slices on one rank.
std::vector<LayoutSpec> specs_of(DecodeLayout layout, int ranks, const MlaDims& dims) {
  if (!is_sliced(layout)) return {{layout, 1}};
  std::vector<LayoutSpec> specs;
  for (int64_t groups = 2; groups <= ranks; ++groups) {
    if (can_place({layout, groups}, dims, ranks)) specs.push_back({layout, groups});
  }
  return specs;
}

void add_check(const LayoutCheck& check, const LayoutSpec& spec, int ranks, const std::string& dtype,
               VerifiedLayouts& verified) {
  verified.ok = verified.ok && check.ok;
  verified.table.push_back({std::string(name(spec.layout)), fmt::format("{}", spec.groups), fmt::format("{}", ranks),
                            fmt::format("{:.1e}", check.max_error), fmt::format("{:.1e}", check.tolerance),
                            check.ok ? "ok" : "FAILED"});
  verified.rows.push_back({{"layout", name(spec.layout)},
                           {"groups", spec.groups},
                           {"ranks", ranks},
                           {"dtype", dtype},
                           {"max_error", check.max_error},
                           {"tolerance", check.tolerance},
                           {"ok", check.ok}});
}

}  // namespace

VerifiedLayouts verify_layouts(const CommonOptions& common, const std::filesystem::path& model, double inner_norm_eps) {
  ModelConfig config = load_model_config(model, inner_norm_eps);
  config.n_layers = std::min(config.n_layers, kLayers);
  const ModelSource source{.directory = model, .slices = {}, .seed = common.seed};
  const at::ScalarType dtype = parse_dtype(common.dtype);
  // Before ranks start; one on any number of ranks, and of all layouts whose heads see every slice.
  std::map<std::pair<bool, int64_t>, LayoutDefinition> definitions;
  VerifiedLayouts verified;
  verified.table = {{"layout", "groups", "ranks", "error", "allowed", ""}};
  for (const CommonOptions& options : each_rank_count(common)) {
    const RankRunner run_ranks = [&](const auto& body) { with_ranks(options, body); };
    const int ranks = run_and_keep(run_ranks, 0, [](Communicator& comm, int& mine) { mine = comm.size(); });
    for (const DecodeLayout layout : all_decode_layouts()) {
      const std::vector<LayoutSpec> specs = specs_of(layout, ranks, config.mla.dims);
      if (specs.empty()) {
        verified.table.push_back(
            {std::string(name(layout)), "-", fmt::format("{}", ranks), "-", "-", "left out: slices need 2 ranks"});
      }
      for (const LayoutSpec& spec : specs) {
        const LayoutCase layout_case{
            .source = source, .model = config, .layout = spec, .dtype = dtype, .cache_dtype = dtype};
        const auto [found, is_new] = definitions.try_emplace({layout == DecodeLayout::kGla, spec.groups});
        LayoutDefinition& definition = found->second;
        if (is_new) load_in_every_process(options, [&] { definition = define_layout(layout_case); });
        const LayoutCheck check = run_and_keep(run_ranks, LayoutCheck(), [&](Communicator& comm, LayoutCheck& mine) {
          mine = check_layout(layout_case, definition, comm);
        });
        add_check(check, spec, ranks, common.dtype, verified);
      }
    }
  }
  return verified;
}

}  // namespace parlat
