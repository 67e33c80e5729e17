#pragma once

#include <functional>
#include <mutex>
#include <utility>

#include "parlat/comm/communicator.h"

namespace parlat {

// Starts the ranks and runs a body on each. May be called more than once.
using RankRunner = std::function<void(const std::function<void(Communicator&)>&)>;

// Runs body(comm, result) on every rank, each with a copy of `start`, and returns what they made of it: the same on
// all ranks, so that it matters not which of those in this process is kept.
template <typename Result, typename Body>
Result run_and_keep(const RankRunner& run_ranks, const Result& start, const Body& body) {
  Result kept = start;
  std::mutex mutex;
  run_ranks([&](Communicator& comm) {
    Result mine = start;
    body(comm, mine);
    const std::lock_guard lock(mutex);
    kept = std::move(mine);
  });
  return kept;
}

}  // namespace parlat
