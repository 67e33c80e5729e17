#pragma once

#include <memory>

#include "parlat/comm/communicator.h"
#include "parlat/config/parallel.h"
#include "parlat/model/attention.h"

namespace parlat {

// The registry of training forms. Collective. Throws ConfigError where `form` cannot run on comm.size() ranks with this
// layer or these options, saying why.
std::unique_ptr<Attention> make_attention(TrainForm form, Communicator& comm, const MlaDims& dims,
                                          AttentionOptions options = {});

}  // namespace parlat
