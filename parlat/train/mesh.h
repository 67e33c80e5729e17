#pragma once

#include <memory>

#include "parlat/base/range.h"
#include "parlat/comm/communicator.h"
#include "parlat/config/model_config.h"
#include "parlat/config/parallel.h"

namespace parlat {

// Where a rank stands among data x sequence ranks (rank = data index * sequence ranks + sequence index) and among the
// ranks that split the experts.
struct Mesh {
  ParallelSpec spec;
  Communicator& world;
  std::unique_ptr<Communicator> sequence;         // the ranks of one data index: one sequence split over them
  std::unique_ptr<Communicator> experts;          // spec.expert consecutive ranks: every expert once
  std::unique_ptr<Communicator> expert_replicas;  // the ranks that hold the same experts
  int64_t data_index() const { return world.rank() / spec.sequence; }
  // The experts that the ranks of equal rank % spec.expert hold.
  Range experts_of(int64_t expert_index, const ModelConfig& config) const;
};

// Throws ConfigError, before anything is exchanged, where validate(spec, ...) does.
Mesh make_mesh(const ParallelSpec& spec, const ModelConfig& config, Communicator& world);

}  // namespace parlat
