#pragma once

#include <cstdint>

#include "parlat/comm/communicator.h"
#include "parlat/config/layout.h"
#include "parlat/config/model_config.h"

namespace parlat {

// Elements of the cache that a token takes on the rank with the widest slice, a layer: (L/G + R) / members that split
// tokens. Predicted from the placement for slices of equal width; what a Decoder holds it measures itself
// (cache_bytes_per_token). Throws what place throws.
double cache_elements_per_token(const MlaDims& dims, const LayoutSpec& layout, int ranks);

// Throws ConfigError where caches of `tokens` tokens exceed this machine's memory, which all ranks of the local backend
// share. To be asked before weights are loaded: memory is promised freely and missed only once it is touched.
void require_cache_memory(const ModelConfig& config, const LayoutSpec& layout, int64_t tokens, at::ScalarType dtype,
                          const Communicator& comm);

}  // namespace parlat
