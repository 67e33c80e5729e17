#pragma once

#include <memory>

#include "parlat/comm/communicator.h"
#include "parlat/config/parallel.h"
#include "parlat/model/attention.h"

namespace parlat {

// The registry of training forms. Throws ConfigError where `form` cannot run on comm.size() ranks with n_heads heads,
// saying why.
std::unique_ptr<Attention> make_attention(TrainForm form, Communicator& comm, int64_t n_heads);

}  // namespace parlat
