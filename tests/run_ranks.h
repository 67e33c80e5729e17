#pragma once

#include <functional>

#include "parlat/comm/communicator.h"

namespace parlat {

// Runs body on `ranks` threads with a short timeout, so that a deadlock in a test is an error within seconds.
inline void run_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  run_local_ranks(ranks, body, /*threads=*/1, CommOptions{.timeout = std::chrono::seconds(60)});
}

}  // namespace parlat
