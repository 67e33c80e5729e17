#include "parlat/decode/cache_size.h"

#include <c10/core/ScalarType.h>

#include <string_view>

#include "parlat/base/error.h"
#include "parlat/base/memory_limit.h"
#include "parlat/base/units.h"

namespace parlat {

double cache_elements_per_token(const MlaDims& dims, const LayoutSpec& layout, int ranks) {
  const Placement p = place(layout, dims.n_heads, ranks, 0);  // the first slice is the widest
  const int64_t width = even_share(dims.d_latent, p.groups, p.group).size() + dims.d_rope;
  return static_cast<double>(width) / (p.tokens_split ? static_cast<double>(p.members) : 1.0);
}

void require_cache_memory(const ModelConfig& config, const LayoutSpec& layout, int64_t tokens, at::ScalarType dtype,
                          const Communicator& comm) {
  const int ranks_here = comm.backend() == std::string_view("local") ? comm.size() : 1;
  const auto memory = static_cast<double>(memory_limit());
  const double wanted = cache_elements_per_token(config.mla.dims, layout, comm.size()) *
                        static_cast<double>(config.n_layers) * static_cast<double>(c10::elementSize(dtype)) *
                        static_cast<double>(tokens) * ranks_here;
  if (wanted <= memory) return;
  throw ConfigError("cache: expected at most this machine's memory of {}, got {} for {} tokens on {} rank{}",
                    format_bytes(memory), format_bytes(wanted), format_count(tokens), ranks_here,
                    ranks_here > 1 ? "s" : "");
}

}  // namespace parlat
