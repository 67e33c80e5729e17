#pragma once

#include <cstdint>

#include "parlat/comm/communicator.h"
#include "parlat/config/layout.h"
#include "parlat/config/model_config.h"

namespace parlat {

// How many ranks hold what they hold in this process's memory: all of the local backend, one of any other.
int ranks_here(const Communicator& comm);

// Throws ConfigError where caches of `tokens` tokens (cache_elements_per_token) exceed this machine's memory. To be
// asked before weights are loaded: memory is promised freely and missed only once it is touched.
void require_cache_memory(const ModelConfig& config, const LayoutSpec& layout, int64_t tokens, at::ScalarType dtype,
                          const Communicator& comm);

}  // namespace parlat
