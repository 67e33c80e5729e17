#include "parlat/decode/cache_size.h"

#include <c10/core/ScalarType.h>

#include <string_view>

#include "parlat/base/error.h"
#include "parlat/base/memory_limit.h"
#include "parlat/base/units.h"

namespace parlat {

int ranks_here(const Communicator& comm) { return comm.backend() == std::string_view("local") ? comm.size() : 1; }

void require_cache_memory(const ModelConfig& config, const LayoutSpec& layout, int64_t tokens, at::ScalarType dtype,
                          const Communicator& comm) {
  const int sharing = ranks_here(comm);
  const auto memory = static_cast<double>(memory_limit());
  const double wanted = cache_elements_per_token(config.mla.dims, layout, comm.size()) *
                        static_cast<double>(config.n_layers) * static_cast<double>(c10::elementSize(dtype)) *
                        static_cast<double>(tokens) * sharing;
  if (wanted <= memory) return;
  throw ConfigError("cache: expected at most this machine's memory of {}, got {} for {} tokens on {} rank{}",
                    format_bytes(memory), format_bytes(wanted), format_count(tokens), sharing, sharing > 1 ? "s" : "");
}

}  // namespace parlat
