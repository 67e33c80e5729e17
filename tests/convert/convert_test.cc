// Conversions: the copies compute what the model computes, slices are what they say, and the fit helps.
#include "parlat/convert/convert.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "parlat/base/error.h"
#include "parlat/convert/balanced_start.h"
#include "parlat/convert/layer_walk.h"
#include "parlat/convert/rotation.h"
#include "parlat/io/files.h"
#include "parlat/tensor/fill.h"
#include "parlat/weights/shard_set.h"
#include "tests/decode/small_model.h"
#include "tests/expect_close.h"
#include "tests/full_disk.h"

namespace parlat {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<std::vector<int64_t>> random_windows(int64_t count, int64_t length) {
  const Tensor tokens = seeded_integers({count, length}, 61, 9, "calibration");
  std::vector<std::vector<int64_t>> windows;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* row = tokens[i].const_data_ptr<int64_t>();
    windows.emplace_back(row, row + length);
  }
  return windows;
}

class Conversion : public ::testing::Test {
 protected:
  ConvertOptions options(Transform transform, const std::filesystem::path& out) const {
    ConvertOptions o{.model = saved_.folder.path(),
                     .out = out,
                     .transform = transform,
                     .groups = {2, 4},
                     .windows = random_windows(6, 40),
                     .balanced = {}};
    o.balanced.steps = 60;
    o.balanced.queries = 24;
    return o;
  }

  SavedModel saved_;
};

TEST_F(Conversion, RotatedCopiesComputeTheSame) {
  const std::vector<int64_t> tokens = random_windows(1, 30)[0];
  const Tensor want = saved_.logits(LocalAttention(), tokens);
  for (const Transform transform : {Transform::kHadamard, Transform::kPca}) {
    const TemporaryFolder out;
    convert(options(transform, out.path()), saved_.config, [](int64_t) {});
    const ModelConfig config = load_model_config(out.path().string());
    ModelWeights weights;
    load_weights(out.path(), config, weight_table(config, all_experts(config), weights), at::kDouble);
    EXPECT_TRUE(weights.layers[1].mla.kv_norm.equal(at::ones({16}, at::kDouble)));
    EXPECT_FALSE(weights.layers[1].mla.w_ukv.allclose(saved_.weights.layers[1].mla.w_ukv)) << "nothing was rotated";
    Tensor got;
    run_local_ranks(1, [&](Communicator& comm) {
      const at::NoGradGuard no_grad;
      const LocalAttention attention;
      const Transformer model(config, weights, attention, comm);
      const TokenShard shard = whole_sequences(config, 1, 30, at::kDouble);
      got = model.logits(model.forward(at::tensor(tokens, at::kLong).view({1, 30}), shard))[0];
    });
    // Rotated weights were rounded to fp32, once.
    EXPECT_CLOSE(got, want, Tolerance::rounding(at::kFloat, 80, 4));
    for (const int64_t groups : {2, 4}) {
      const SliceFile slices = load_slices(out / slice_file_name(groups), config);
      EXPECT_EQ(slices.transform, name(transform));
      double share = 0;
      for (const SliceMaps& maps : slices.layers[0]) share += 1 / maps.key_Lw.max().item<double>();
      EXPECT_NEAR(share, 1, 1e-6) << "shares of the variance";
    }
  }
}

TEST_F(Conversion, PrincipalCoordinatesAreUncorrelatedAndFallInVariance) {
  walk_layers(
      saved_.folder.path(), saved_.config, random_windows(6, 40),
      [&](const WalkedLayer& layer) {
        const LayerSamples samples = layer_samples(layer.weights.mla, layer.x_BSD);
        const Tensor u = pca_basis(samples);
        EXPECT_CLOSE(at::matmul(u.t(), u), at::eye(16, at::kDouble), Tolerance::rounding(at::kDouble, 16, 16));
        const Tensor variance = variance_in(u, samples);
        EXPECT_TRUE((variance.narrow(0, 0, 15) >= variance.narrow(0, 1, 15)).all().item<bool>());
      },
      [](int64_t) {});
}

TEST_F(Conversion, BalancedLeavesTheModelAndLowersTheError) {
  const TemporaryFolder out;
  ConvertOptions fitted = options(Transform::kBalanced, out.path());
  const std::vector<ConvertedLayer> layers = convert(fitted, saved_.config, [](int64_t) {});
  ASSERT_EQ(layers.size(), 4);
  for (const ConvertedLayer& layer : layers) EXPECT_LE(layer.error_after, layer.error_before) << layer.layer;
  EXPECT_EQ(read_file(out / "model.safetensors"), read_file(saved_.folder / "model.safetensors"));
  for (const int64_t groups : {2, 4}) {
    const SliceFile slices = load_slices(out / slice_file_name(groups), saved_.config);
    EXPECT_EQ(slices.groups(), groups);
    EXPECT_EQ(slices.layers[1][groups - 1].width(), 16 / groups);
  }
}

// As huggingface_hub keeps models: the files of a snapshot are symbolic links to blobs, relative to the snapshot.
TEST_F(Conversion, ASnapshotOfACacheBecomesAFolderOfItsOwn) {
  for (const int64_t max_shard_bytes : {1'000'000, 20'000}) {
    const TemporaryFolder cache, out;
    const std::filesystem::path snapshot = cache / "snapshots" / "7f3a", blobs = cache / "blobs";
    std::filesystem::create_directories(snapshot);
    save_weights(blobs, saved_.config, saved_.table, max_shard_bytes);
    for (const auto& file : std::filesystem::directory_iterator(blobs)) {
      std::filesystem::create_symlink(".." / (".." / file.path().lexically_relative(cache.path())),
                                      snapshot / file.path().filename());
    }
    ConvertOptions o = options(Transform::kBalanced, out / "sliced");
    o.model = snapshot;
    o.groups = {2};
    o.balanced.steps = 0;
    convert(o, saved_.config, [](int64_t) {});
    EXPECT_NO_THROW(check_weights(o.out, saved_.config));
    EXPECT_EQ(load_slices(o.out / slice_file_name(2), saved_.config).model, latent_fingerprint(snapshot));
  }
}

// Names of shards are free: what counts is the index.
TEST_F(Conversion, TheShardsThatAnIndexNamesAreCopied) {
  const TemporaryFolder model, out;
  save_weights(model.path(), saved_.config, saved_.table, 20'000);
  nlohmann::json index = read_json(model / "model.safetensors.index.json");
  for (auto& [tensor, shard] : index.at("weight_map").items()) {
    const std::string old = shard;
    shard = "weights" + old.substr(5);
    if (std::filesystem::exists(model / old)) std::filesystem::rename(model / old, model / std::string(shard));
  }
  model.write("model.safetensors.index.json", index.dump());
  ConvertOptions o = options(Transform::kBalanced, out.path());
  o.model = model.path();
  o.balanced.steps = 0;
  convert(o, saved_.config, [](int64_t) {});
  EXPECT_NO_THROW(check_weights(out.path(), saved_.config));
  EXPECT_EQ(latent_fingerprint(out.path()), latent_fingerprint(model.path()));
}

// Shards of a rotated copy must not stay beside one file; the model's own folder only gains slices.
TEST_F(Conversion, WeightsOfAnEarlierConversionGoAndTheModelsOwnStay) {
  const TemporaryFolder out;
  const auto names = [](const std::filesystem::path& folder) {
    std::set<std::string> found;
    for (const auto& file : std::filesystem::directory_iterator(folder)) found.insert(file.path().filename());
    return found;
  };
  convert(options(Transform::kPca, out.path()), saved_.config, [](int64_t) {});
  EXPECT_TRUE(names(out.path()).contains("model.safetensors.index.json"));
  const std::string before = read_file(saved_.folder / "model.safetensors");
  for (const std::filesystem::path& folder : {out.path(), saved_.folder.path()}) {
    ConvertOptions o = options(Transform::kBalanced, folder);
    o.balanced.steps = 0;
    convert(o, saved_.config, [](int64_t) {});
    EXPECT_THAT(names(folder),
                ElementsAre("config.json", "model.safetensors", "slices-2.safetensors", "slices-4.safetensors"));
    EXPECT_EQ(read_file(folder / "model.safetensors"), before);
  }
}

TEST_F(Conversion, SlicesOfWeightsThatAreNoMoreGo) {
  const TemporaryFolder out;
  ConvertOptions o = options(Transform::kBalanced, out.path());
  o.balanced.steps = 0;
  o.groups = {2};
  convert(o, saved_.config, [](int64_t) {});
  o.groups = {4};
  convert(o, saved_.config, [](int64_t) {});
  EXPECT_TRUE(std::filesystem::exists(out / "slices-2.safetensors")) << "of the same weights";
  o.transform = Transform::kHadamard;
  convert(o, saved_.config, [](int64_t) {});
  EXPECT_FALSE(std::filesystem::exists(out / "slices-2.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(out / "slices-4.safetensors"));
}

TEST_F(Conversion, AFullDiskLeavesTheEarlierConversion) {
  const TemporaryFolder out;
  ConvertOptions o = options(Transform::kBalanced, out.path());
  o.balanced.steps = 0;
  convert(o, saved_.config, [](int64_t) {});
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const auto& file : std::filesystem::directory_iterator(out.path())) {
      files[file.path().filename()] = read_file(file.path());
    }
    return files;
  };
  const auto before = contents();
  const TemporaryFolder other;
  initialize(saved_.table, saved_.config, /*seed=*/6, at::kFloat);
  save_weights(other.path(), saved_.config, saved_.table);
  other.write("tokenizer.json", std::string(200'000, ' '));  // larger than slices and rotated shards
  o.model = other.path();
  for (const Transform transform : {Transform::kBalanced, Transform::kPca}) {
    o.transform = transform;
    const FullDisk full(150'000);
    EXPECT_THROW(convert(o, saved_.config, [](int64_t) {}), DataError);
    EXPECT_EQ(contents(), before) << name(transform);
  }
}

// A link needs one file system.
TEST_F(Conversion, WeightsAreCopiedToAnotherFileSystem) {
  const std::filesystem::path out = fmt::format("/dev/shm/parlat_test_{}", ::getpid());
  std::error_code error;
  if (!std::filesystem::create_directory(out, error)) GTEST_SKIP() << "no /dev/shm";
  ConvertOptions o = options(Transform::kBalanced, out);
  o.balanced.steps = 0;
  convert(o, saved_.config, [](int64_t) {});
  EXPECT_EQ(read_file(out / "model.safetensors"), read_file(saved_.folder / "model.safetensors"));
  std::filesystem::remove_all(out);
}

// bf16 with norms, routers and one matrix in other dtypes, and an fp8 matrix.
TEST_F(Conversion, RotatedCopiesKeepEachTensorsDtype) {
  const TemporaryFolder model, out;
  const std::string in_fp8 = "model.layers.1.self_attn.o_proj.weight";
  ModelConfig config = saved_.config;
  config.fp8_block = {{128, 128}};
  std::map<std::string, Tensor> stored;
  for (const WeightRow& row : saved_.table) {
    const bool norm_or_router = row.shape.size() == 1 || row.name.ends_with("mlp.gate.weight");
    const bool half = row.name.ends_with("kv_b_proj.weight");
    stored[row.name] = row.tensor->to(norm_or_router ? at::kFloat : half ? at::kHalf : at::kBFloat16);
  }
  stored[in_fp8] = stored[in_fp8].to(at::kFloat8_e4m3fn);
  stored[in_fp8 + "_scale_inv"] = at::ones({1, 1});
  write_safetensors(model / "model.safetensors", {stored.begin(), stored.end()});
  ConvertOptions o = options(Transform::kPca, out.path());
  o.model = model.path();
  convert(o, config, [](int64_t) {});
  std::vector<std::string> problems;
  const ShardSet copy(out.path(), problems);
  EXPECT_EQ(copy.names().size(), saved_.table.size());
  for (const WeightRow& row : saved_.table) {
    const Tensor was = row.name == in_fp8 ? stored[in_fp8].to(at::kBFloat16) : stored[row.name];
    EXPECT_EQ(copy.tensor(row.name).scalar_type(), was.scalar_type()) << row.name;
    const bool rotated = row.name.find("self_attn.kv_") != std::string::npos;
    EXPECT_TRUE(rotated || copy.tensor(row.name).equal(was)) << row.name;
  }
  EXPECT_EQ(load_slices(out / slice_file_name(2), config).model, latent_fingerprint(out.path()));
}

TEST_F(Conversion, PrincipalBlocksGiveBackTheLatentAndTheStartIsNoWorse) {
  walk_layers(
      saved_.folder.path(), saved_.config, random_windows(6, 40),
      [&](const WalkedLayer& layer) {
        const MlaWeights& weights = layer.weights.mla;
        const LayerSamples samples = layer_samples(weights, layer.x_BSD);
        const QueryPool all{{0, 1, 2, 3, 4, 5}, {0, 40}};
        std::vector<QuerySample> queries;
        for (int64_t i = 0; i < 3; ++i)
          queries.push_back(sample_queries(samples, all, {.windows = 2, .queries = 20}, i));
        for (const int64_t groups : {2, 4}) {
          const std::vector<SliceMaps> blocks = principal_blocks(samples, groups);
          Tensor sum = at::zeros({16, 16});
          for (const SliceMaps& maps : blocks) sum += at::matmul(maps.value_Lw, maps.store_Lw.t());
          EXPECT_CLOSE(sum, at::eye(16), Tolerance::rounding(at::kFloat, 16, 16));
          const Start start = best_start(samples, queries, groups);
          EXPECT_LE(start.error, mean_error(blocks, queries, weights));
          EXPECT_DOUBLE_EQ(start.error, mean_error(start.slices, queries, weights));
        }
        // One slice of everything is exact.
        EXPECT_LT(mean_error({plain_slice(16, 1, 0)}, queries, weights), 1e-9);
      },
      [](int64_t) {});
}

TEST_F(Conversion, QueriesThatJudgeAreNotFitted) {
  for (const int64_t n_windows : {2, 7, 8, 9, 64}) {
    const auto [fit, judge] = split_queries(n_windows, 40);
    EXPECT_EQ(judge.windows.size(), std::max<int64_t>(1, n_windows / 8));
    std::vector<int64_t> both = fit.windows;
    both.insert(both.end(), judge.windows.begin(), judge.windows.end());
    std::ranges::sort(both);
    std::vector<int64_t> all(n_windows);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(both, all);
    EXPECT_EQ(judge.positions, (Range{0, 40}));
  }
  for (const auto& [n_tokens, kept] : {std::pair{2, 1}, std::pair{40, 5}}) {
    const auto [fit, judge] = split_queries(1, n_tokens);
    EXPECT_EQ(fit.positions, (Range{0, n_tokens - kept}));
    EXPECT_EQ(judge.positions, (Range{n_tokens - kept, n_tokens}));
  }
}

// What one short window teaches is wrong elsewhere: the start is kept, in both layers.
TEST_F(Conversion, AFitToItsOwnWindowsAloneIsNotTaken) {
  walk_layers(
      saved_.folder.path(), saved_.config, random_windows(10, 24),
      [&](const WalkedLayer& layer) {
        const MlaWeights& weights = layer.weights.mla;
        const LayerSamples few = layer_samples(weights, layer.x_BSD.narrow(0, 0, 2));
        const LayerSamples fresh = layer_samples(weights, layer.x_BSD.narrow(0, 2, 8));
        const QueryPool all{{0, 1, 2, 3, 4, 5, 6, 7}, {0, 24}};
        const std::vector<QuerySample> unseen = {sample_queries(fresh, all, {.windows = 8, .queries = 24}, 0)};
        const auto error = [&](int64_t steps) {
          return mean_error(balance(few, {.groups = 4, .steps = steps}).slices, unseen, weights);
        };
        EXPECT_LE(error(200), error(0)) << layer.index;
      },
      [](int64_t) {});
}

TEST_F(Conversion, RepeatsBitForBit) {
  const TemporaryFolder first, second;
  ConvertOptions o = options(Transform::kBalanced, first.path());
  o.groups = {2};
  convert(o, saved_.config, [](int64_t) {});
  o.out = second.path();
  convert(o, saved_.config, [](int64_t) {});
  EXPECT_EQ(read_file(first / slice_file_name(2)), read_file(second / slice_file_name(2)));
}

TEST_F(Conversion, RefusesWhatCannotBe) {
  const auto refusal = [&](ConvertOptions o) -> std::string {
    try {
      convert(o, saved_.config, [](int64_t) {});
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  const TemporaryFolder out;
  EXPECT_THAT(refusal(options(Transform::kPca, saved_.folder.path())), HasSubstr("expected another folder"));
  ConvertOptions many = options(Transform::kPca, out.path());
  many.groups = {17};
  EXPECT_THAT(refusal(many), HasSubstr("2 to the latent's 16 columns, got 17"));
  many.groups = {2, 4, 2};
  EXPECT_THAT(refusal(many), HasSubstr("every number once, got 2 2 times"));
  EXPECT_THROW(hadamard_basis(24, 1), ConfigError);
  ConvertOptions few = options(Transform::kPca, out.path());
  few.windows = random_windows(4, 4);
  EXPECT_THAT(refusal(few), HasSubstr("more tokens for pca than the latent's 16 columns, got 16"));
  ConvertOptions outside = options(Transform::kBalanced, out.path());
  outside.windows[0][3] = 61;
  EXPECT_THAT(refusal(outside), HasSubstr("tokens from 0 to 60, got 61"));

  const TemporaryFolder taken;
  ModelConfig other = saved_.config;
  other.d_mlp += 1;
  taken.write("config.json", to_hf_json(other).dump());
  EXPECT_THAT(refusal(options(Transform::kBalanced, taken.path())), HasSubstr("holds another model"));
  const FolderLock in_use(out.path());
  EXPECT_THAT(refusal(options(Transform::kBalanced, out.path())), HasSubstr("got one in use"));
}

TEST_F(Conversion, NamesTheLayerOfWeightsThatAreNoNumbers) {
  const TemporaryFolder broken, out;
  for (const double poison : {double{NAN}, 0.0}) {
    initialize(saved_.table, saved_.config, /*seed=*/5, at::kFloat);
    saved_.weights.layers[1].mla.w_dkv.detach().fill_(poison);
    save_weights(broken.path(), saved_.config, saved_.table);
    ConvertOptions o = options(Transform::kBalanced, out.path());
    o.model = broken.path();
    EXPECT_THAT([&] { convert(o, saved_.config, [](int64_t) {}); },
                ThrowsMessage<DataError>(HasSubstr("layer 1: expected weights that give latents which vary")));
  }
}

// A text of two tokens: the first layer's latents lie on a line, whatever their number.
TEST_F(Conversion, SharesOfTheVarianceThatAreRoundingAreRefused) {
  const TemporaryFolder out;
  ConvertOptions o = options(Transform::kPca, out.path());
  for (std::vector<int64_t>& window : o.windows) {
    for (int64_t& token : window) token %= 2;
  }
  EXPECT_THROW(convert(o, saved_.config, [](int64_t) {}), DataError);
  EXPECT_NO_THROW(rotated_slices(at::ones({16}, at::kDouble), 16));
  EXPECT_THROW(rotated_slices(at::zeros({16}, at::kDouble), 2), DataError);
}

TEST_F(Conversion, AFolderThatTakesNoFilesIsFoundOutBeforeTheWork) {
  bool worked = false;
  // Not even root may create files there.
  EXPECT_THROW(convert(options(Transform::kBalanced, "/proc"), saved_.config, [&](int64_t) { worked = true; }),
               DataError);
  EXPECT_FALSE(worked);
}

}  // namespace
}  // namespace parlat
