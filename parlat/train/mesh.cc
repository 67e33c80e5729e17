#include "parlat/train/mesh.h"

namespace parlat {

Range Mesh::experts_of(int64_t expert_index, const ModelConfig& config) const {
  return even_share(config.moe ? config.moe->n_routed : 0, spec.expert, expert_index);
}

Mesh make_mesh(const ParallelSpec& spec, const ModelConfig& config, Communicator& world) {
  validate(spec, world.size(), config.mla.dims.n_heads, config.moe ? config.moe->n_routed : 0);
  const int rank = world.rank();
  return {.spec = spec,
          .world = world,
          .sequence = world.split(static_cast<int>(rank / spec.sequence)),
          .experts = world.split(static_cast<int>(rank / spec.expert)),
          .expert_replicas = world.split(static_cast<int>(rank % spec.expert))};
}

}  // namespace parlat
