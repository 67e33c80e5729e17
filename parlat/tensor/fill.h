#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "parlat/tensor/shape.h"

namespace parlat {

// Normal values N(0, std^2) that depend on seed and name only: the same on every rank, for every sharding and in every
// order of creation.
Tensor seeded_normal(at::IntArrayRef shape, double std, uint64_t seed, std::string_view name,
                     at::ScalarType dtype = at::kFloat);

// Integers in [0, high), by the same rule.
Tensor seeded_integers(at::IntArrayRef shape, int64_t high, uint64_t seed, std::string_view name);

// A 64-bit seed from (seed, name): what the two above start their generator with.
uint64_t derive_seed(uint64_t seed, std::string_view name);

}  // namespace parlat
