#include "parlat/tensor/fill.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

namespace parlat {

namespace {

at::Generator generator(uint64_t seed, std::string_view name) {
  return at::make_generator<at::CPUGeneratorImpl>(derive_seed(seed, name));
}

}  // namespace

uint64_t derive_seed(uint64_t seed, std::string_view name) {
  // FNV-1a over the name, started from the seed; the finaliser is splitmix64's.
  uint64_t hash = 14695981039346656037ull ^ (seed * 0x9e3779b97f4a7c15ull);
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ull;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebull;
  return hash ^ (hash >> 31);
}

Tensor seeded_normal(at::IntArrayRef shape, double std, uint64_t seed, std::string_view name, at::ScalarType dtype) {
  return at::empty(shape, at::kFloat).normal_(0.0, std, generator(seed, name)).to(dtype);
}

Tensor seeded_integers(at::IntArrayRef shape, int64_t high, uint64_t seed, std::string_view name) {
  return at::empty(shape, at::kLong).random_(0, high, generator(seed, name));
}

}  // namespace parlat
