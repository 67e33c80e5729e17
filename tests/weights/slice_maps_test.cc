// Files of slices: read as written, refused when they are damaged or of another model.
#include "parlat/weights/slice_maps.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <limits>

#include "parlat/base/error.h"
#include "parlat/io/files.h"
#include "parlat/io/safetensors.h"
#include "parlat/weights/checkpoint_files.h"
#include "tests/temporary_folder.h"
#include "tests/weights/small_model.h"

namespace parlat {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SliceFile, RoundTripsAndRefusesOtherModels) {
  const ModelConfig config = small_model();
  const TemporaryFolder folder;
  SliceFile slices{.model = "", .transform = "test", .layers = {}};
  for (int64_t layer = 0; layer < config.n_layers; ++layer) {
    slices.layers.push_back({plain_slice(16, 3, 0), plain_slice(16, 3, 1), plain_slice(16, 3, 2)});
  }
  const std::filesystem::path path = folder / slice_file_name(3);
  save_slices(path, slices);
  const SliceFile read = load_slices(path, config);
  EXPECT_EQ(read.groups(), 3);
  EXPECT_EQ(read.transform, "test");
  EXPECT_TRUE(read.layers[1][2].value_Lw.equal(slices.layers[1][2].value_Lw));
  Tensor sum = at::zeros({16, 16});
  for (const SliceMaps& slice : read.layers[0]) sum += at::matmul(slice.value_Lw, slice.store_Lw.t());
  EXPECT_TRUE(sum.equal(at::eye(16)));

  // Of a model that is cut to its first layers the rest is skipped.
  ModelConfig deeper = config, wider = config, cut = config;
  cut.n_layers = 1;
  EXPECT_TRUE(load_slices(path, cut).layers.at(0)[2].key_Lw.equal(slices.layers[0][2].key_Lw));
  deeper.n_layers = 3;
  wider.mla.dims.d_latent = 20;
  EXPECT_THROW(load_slices(path, deeper), DataError);
  EXPECT_THROW(load_slices(path, wider), DataError);
  write_safetensors(path, {{"x", at::ones({1})}});
  EXPECT_THROW(load_slices(path, config), DataError);
}

TEST(SliceFile, DamageIsSeenInAnyLayerAndNaNIsRefused) {
  const ModelConfig config = small_model();
  const TemporaryFolder folder;
  SliceFile slices{.model = "", .transform = "test", .layers = {}};
  for (int64_t layer = 0; layer < config.n_layers; ++layer) slices.layers.push_back({plain_slice(16, 1, 0)});
  const std::filesystem::path path = folder / slice_file_name(1);
  const auto refusal = [&](const ModelConfig& model) -> std::string {
    try {
      load_slices(path, model);
    } catch (const DataError& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  save_slices(path, slices);
  std::string bytes = read_file(path);
  bytes[bytes.size() - 3] ^= 1;  // a bit of the last layer's last number
  folder.write(path.filename(), bytes);
  ModelConfig cut = config;
  cut.n_layers = 1;
  for (const ModelConfig& model : {config, cut}) {
    EXPECT_THAT(refusal(model), AllOf(HasSubstr(path.string() + ": tensors: expected a checksum of "),
                                      HasSubstr(": the file is damaged")));
  }
  slices.layers[1][0].key_Lw = at::full({16, 16}, std::numeric_limits<float>::quiet_NaN());
  save_slices(path, slices);
  EXPECT_THAT(refusal(config), HasSubstr("layers.1.slices.0.key: expected finite numbers, got NaN"));
}

TEST(LatentFingerprint, TellsModelsApartByAnyLayer) {
  const ModelConfig config = small_model();
  const auto fingerprint = [&](int64_t changed_layer) {
    const TemporaryFolder folder;
    ModelWeights weights;
    const std::vector<WeightRow> table = weight_table(config, all_experts(config), weights);
    initialize(table, config, /*seed=*/5, at::kFloat);
    if (changed_layer >= 0) weights.layers[changed_layer].mla.w_dkv[0][0].add_(1);
    save_weights(folder.path(), config, table);
    return latent_fingerprint(folder.path());
  };
  EXPECT_EQ(fingerprint(-1), fingerprint(-1));
  EXPECT_NE(fingerprint(0), fingerprint(-1));
  EXPECT_NE(fingerprint(1), fingerprint(-1));
}

TEST(LatentFingerprint, RefusesAModelWhoseShardsCannotBeRead) {
  const ModelConfig config = small_model();
  const TemporaryFolder folder;
  ModelWeights weights;
  const std::vector<WeightRow> table = weight_table(config, all_experts(config), weights);
  initialize(table, config, /*seed=*/5, at::kFloat);
  save_weights(folder.path(), config, table, /*max_shard_bytes=*/8'000);
  const std::string latent = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight";
  std::filesystem::remove(folder / read_json(folder / "model.safetensors.index.json").at("weight_map").at(latent));
  EXPECT_THROW(latent_fingerprint(folder.path()), DataError);
}

}  // namespace
}  // namespace parlat
