#include "cli/inspect_cache.h"

#include <array>

#include "parlat/base/units.h"
#include "parlat/decode/cache_size.h"

namespace parlat {

namespace {

constexpr std::array kRankCounts = {1, 2, 4, 8};
constexpr int64_t kBytesPerElement = 2;  // bf16

}  // namespace

PredictedCache predict_cache(const ModelConfig& config) {
  const MlaDims& d = config.mla.dims;
  PredictedCache predicted;
  predicted.table = {{"cache a token and rank, predicted", "groups"}};
  for (const int ranks : kRankCounts) {
    predicted.table.front().push_back(fmt::format("{} rank{}", ranks, ranks > 1 ? "s" : ""));
  }
  for (const DecodeLayout layout : all_decode_layouts()) {
    for (const int64_t groups : is_sliced(layout) ? std::vector<int64_t>{2, 4, 8} : std::vector<int64_t>{1}) {
      std::vector<std::string> line = {std::string(name(layout)), fmt::format("{}", groups)};
      for (const int ranks : kRankCounts) {
        line.emplace_back("-");
        if (!can_place({layout, groups}, d, ranks)) continue;
        const double elements = cache_elements_per_token(d, {layout, groups}, ranks);
        const double bytes = elements * static_cast<double>(config.n_layers * kBytesPerElement);
        line.back() = fmt::format("{:.6g}: {}", elements, format_bytes(bytes));
        predicted.rows.push_back({{"layout", name(layout)},
                                  {"groups", groups},
                                  {"ranks", ranks},
                                  {"cache_elements_per_token_and_layer", elements},
                                  {"cache_bytes_per_token", bytes}});
      }
      predicted.table.push_back(std::move(line));
    }
  }
  return predicted;
}

}  // namespace parlat
