// The sharded optimizer against AdamW written down in double precision on whole tensors.
#include "parlat/train/optimizer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <cmath>
#include <map>
#include <mutex>

#include "parlat/base/error.h"
#include "parlat/tensor/fill.h"
#include "tests/expect_close.h"
#include "tests/run_ranks.h"
#include "tests/temporary_folder.h"
#include "tests/train/small_model.h"

namespace parlat {
namespace {

constexpr uint64_t kSeed = 11;
constexpr int kSteps = 3;
constexpr double kLearningRate = 0.01;
using Named = std::map<std::string, Tensor>;

// What rank `rank` finds as gradient of a weight in one step.
Tensor gradient(const WeightRow& row, int rank, int step, at::ScalarType dtype) {
  return seeded_normal(row.shape, 0.3, kSeed, fmt::format("{} of rank {} in step {}", row.name, rank, step), dtype);
}

struct Model {
  Model(const ModelConfig& config, const Mesh& mesh, at::ScalarType dtype)
      : table(weight_table(config, mesh.experts_of(mesh.experts->rank(), config), weights)) {
    initialize(table, config, kSeed, dtype);
    groups.emplace_back(/*experts=*/false, config, table, mesh);
    groups.emplace_back(/*experts=*/true, config, table, mesh);
  }
  ModelWeights weights;
  std::vector<WeightRow> table;
  std::vector<FlatGroup> groups;
};

struct Result {
  Named weights;  // of all ranks
  std::vector<double> norms;
  Named state;
};

Result run_sharded(const AdamWSpec& spec, const ParallelSpec& parallel, at::ScalarType dtype = at::kFloat) {
  const ModelConfig config = small_model(/*experts=*/true);
  Result result;
  std::mutex mutex;
  run_ranks(static_cast<int>(parallel.ranks()), [&](Communicator& world) {
    const Mesh mesh = make_mesh(parallel, config, world);
    Model model(config, mesh, dtype);
    ShardedAdamW optimizer(spec, model.groups, world);
    std::vector<double> norms;
    for (int step = 0; step < kSteps; ++step) {
      for (const WeightRow& row : model.table) {
        if (row.trained) (*row.tensor * gradient(row, world.rank(), step, dtype)).sum().backward();
      }
      norms.push_back(optimizer.step(kLearningRate));
    }
    const auto state = optimizer.gather_state();
    const std::lock_guard lock(mutex);
    for (const WeightRow& row : model.table) {
      const auto [place, fresh] = result.weights.emplace(row.name, row.tensor->detach().clone());
      EXPECT_TRUE(fresh || place->second.equal(*row.tensor)) << "ranks disagree on " << row.name;
    }
    if (world.rank() == 0) result.norms = norms;
    for (const auto& [name, tensor] : state) result.state[name] = tensor;
  });
  return result;
}

// Rows of expert e lie on the ranks whose share of the experts holds e.
bool holds(const WeightRow& row, const ModelConfig& config, const ParallelSpec& parallel, int64_t rank) {
  if (!row.expert) return true;
  ModelWeights weights;
  const Range share = even_share(config.moe->n_routed, parallel.expert, rank % parallel.expert);
  const auto table = weight_table(config, share, weights);
  return std::any_of(table.begin(), table.end(), [&](const WeightRow& other) { return other.name == row.name; });
}

Result run_reference(const AdamWSpec& spec, const ParallelSpec& parallel) {
  const ModelConfig config = small_model(/*experts=*/true);
  Result result;
  ModelWeights weights;
  const auto table = weight_table(config, all_experts(config), weights);
  initialize(table, config, kSeed, at::kFloat);
  Named m, v;
  for (const WeightRow& row : table) result.weights[row.name] = row.tensor->to(at::kDouble);
  for (int step = 0; step < kSteps; ++step) {
    Named sums;
    double squares = 0;
    for (const WeightRow& row : table) {
      if (!row.trained) continue;
      Tensor sum = at::zeros(row.shape, at::kDouble);
      for (int rank = 0; rank < parallel.ranks(); ++rank) {
        if (holds(row, config, parallel, rank)) sum += gradient(row, rank, step, at::kFloat).to(at::kDouble);
      }
      squares += sum.square().sum().item<double>();
      sums[row.name] = sum;
    }
    result.norms.push_back(std::sqrt(squares));
    const double scale = spec.clip > 0 ? std::min(1.0, spec.clip / result.norms.back()) : 1.0;
    for (auto& [name, sum] : sums) {
      const Tensor g = sum * scale;
      Tensor& w = result.weights[name];
      if (!m[name].defined()) m[name] = v[name] = at::zeros_like(g);
      m[name] = spec.beta1 * m[name] + (1 - spec.beta1) * g;
      v[name] = spec.beta2 * v[name] + (1 - spec.beta2) * g * g;
      const Tensor m_hat = m[name] / (1 - std::pow(spec.beta1, step + 1));
      const Tensor v_hat = v[name] / (1 - std::pow(spec.beta2, step + 1));
      if (w.dim() > 1) w = w * (1 - kLearningRate * spec.weight_decay);
      w = w - kLearningRate * m_hat / (v_hat.sqrt() + spec.epsilon);
    }
  }
  return result;
}

class Meshes : public ::testing::TestWithParam<ParallelSpec> {};

TEST_P(Meshes, UpdateAsAdamWDoes) {
  for (const double clip : {0.0, 0.5}) {
    const AdamWSpec spec{.weight_decay = 0.3, .clip = clip};
    const Result got = run_sharded(spec, GetParam()), want = run_reference(spec, GetParam());
    // A step is about eight roundings deep, and sums over as many terms as there are ranks.
    const Tolerance rounding = Tolerance::rounding(at::kFloat, GetParam().ranks(), 8 * kSteps);
    ASSERT_EQ(got.weights.size(), want.weights.size());
    for (const auto& [name, weight] : want.weights) EXPECT_CLOSE(got.weights.at(name), weight, rounding) << name;
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(got.norms[step], want.norms[step], rounding.relative_to_norm * want.norms[step]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Optimizer, Meshes,
    ::testing::Values(ParallelSpec{}, ParallelSpec{.sequence = 2}, ParallelSpec{.data = 3, .sequence = 1, .expert = 3},
                      ParallelSpec{.data = 2, .sequence = 2, .expert = 2}, ParallelSpec{.data = 7, .sequence = 1}),
    [](const auto& info) {
      return fmt::format("data_{}_sequence_{}_expert_{}", info.param.data, info.param.sequence, info.param.expert);
    });

TEST(Optimizer, KeepsFp32MastersOfBf16Weights) {
  const Result got = run_sharded({}, {.sequence = 3, .expert = 3}, at::kBFloat16);
  int64_t rounded = 0;
  for (const auto& [name, weight] : got.weights) {
    const auto master = got.state.find(name + ShardedAdamW::kMaster);
    if (master == got.state.end()) continue;
    EXPECT_EQ(master->second.scalar_type(), at::kFloat);
    EXPECT_TRUE(master->second.to(at::kBFloat16).equal(weight)) << name;
    rounded += master->second.ne(weight.to(at::kFloat)).sum().item<int64_t>();
  }
  EXPECT_GT(rounded, 0);
}

TEST(Optimizer, ChangesNothingWhereTheGradientIsNotFinite) {
  const ModelConfig config = small_model(/*experts=*/false);
  run_ranks(2, [&](Communicator& world) {
    const Mesh mesh = make_mesh({.sequence = 2}, config, world);
    Model model(config, mesh, at::kFloat);
    ShardedAdamW optimizer({}, model.groups, world);
    const Tensor& weight = *model.table[3].tensor;
    const Tensor before = weight.detach().clone();
    (weight * (world.rank() == 1 ? INFINITY : 1.0)).sum().backward();
    EXPECT_FALSE(std::isfinite(optimizer.step(kLearningRate)));
    EXPECT_TRUE(weight.equal(before));
    weight.sum().backward();  // the bad gradient is gone
    EXPECT_TRUE(std::isfinite(optimizer.step(kLearningRate)));
    EXPECT_FALSE(weight.equal(before));
  });
}

TEST(Optimizer, StateMovesBetweenMeshes) {
  const ModelConfig config = small_model(/*experts=*/true);
  const Result saved = run_sharded({}, {.data = 2, .sequence = 2, .expert = 2});
  const TemporaryFolder folder;
  write_safetensors(folder.path() / "state.safetensors", {saved.state.begin(), saved.state.end()});
  run_ranks(3, [&](Communicator& world) {
    const Mesh mesh = make_mesh({.sequence = 3, .expert = 3}, config, world);
    Model model(config, mesh, at::kFloat);
    ShardedAdamW optimizer({}, model.groups, world);
    optimizer.load_state(SafetensorsFile(folder.path() / "state.safetensors"), kSteps);
    for (const WeightRow& row : model.table) EXPECT_TRUE(row.tensor->equal(saved.weights.at(row.name))) << row.name;
    for (const auto& [name, tensor] : optimizer.gather_state()) EXPECT_TRUE(tensor.equal(saved.state.at(name))) << name;
  });
}

TEST(Optimizer, NamesAMissingTensorOfItsState) {
  const ModelConfig config = small_model(/*experts=*/false);
  const TemporaryFolder folder;
  write_safetensors(folder.path() / "state.safetensors", {{"other", at::zeros({1})}});
  run_ranks(1, [&](Communicator& world) {
    const Mesh mesh = make_mesh({}, config, world);
    Model model(config, mesh, at::kFloat);
    ShardedAdamW optimizer({}, model.groups, world);
    EXPECT_THROW(optimizer.load_state(SafetensorsFile(folder.path() / "state.safetensors"), 1), DataError);
  });
}

}  // namespace
}  // namespace parlat
