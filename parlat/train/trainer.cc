#include "parlat/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>

#include "parlat/base/error.h"
#include "parlat/base/log.h"
#include "parlat/base/progress.h"
#include "parlat/base/spread.h"
#include "parlat/base/units.h"
#include "parlat/io/files.h"
#include "parlat/io/safetensors.h"
#include "parlat/plan/flops.h"
#include "parlat/tensor/memory_meter.h"
#include "parlat/train/checkpoint.h"
#include "parlat/train/gemm_rate.h"
#include "parlat/train/sharded_model.h"
#include "parlat/train/step_record.h"
#include "parlat/weights/checkpoint_files.h"

namespace parlat {

using nlohmann::json;
using std::chrono::steady_clock;

namespace {

std::filesystem::path checkpoints_of(const TrainSettings& settings) { return settings.out / "checkpoints"; }

// Rank 0 creates OUT and holds it.
std::unique_ptr<FolderLock> lock_out(const TrainSettings& settings, const Communicator& world) {
  if (world.rank() != 0) return nullptr;
  create_folders(settings.out);
  return std::make_unique<FolderLock>(settings.out);
}

// Rank 0 looks, all agree. Nothing for a new run. `description` is this run's.
std::optional<Checkpoint> find_checkpoint(const TrainSettings& settings, const json& description, Communicator& world) {
  const Checkpoints checkpoints(checkpoints_of(settings));
  std::optional<Checkpoint> newest;
  if (world.rank() == 0 && checkpoints.any()) {
    if (!settings.resume) {
      throw ConfigError("out: expected a folder without checkpoints, or --resume to go on from them, got {}",
                        settings.out.string());
    }
    newest = checkpoints.newest();
    if (newest) require_same_run(newest->state.value("settings", json()), description, newest->directory.string());
  } else if (world.rank() == 0 && settings.resume) {
    log_info("no checkpoint to resume from: starts at step 0");
  }
  const auto step =
      static_cast<int64_t>(world.max_over_ranks(newest ? newest->step : -1.0, "checkpoint to resume from"));
  if (step < 0) return std::nullopt;
  return newest ? newest : checkpoints.at(step);
}

// Of a line of metrics.jsonl.
int64_t step_of(const json& line) {
  const auto found = line.find("step");
  return found != line.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

// What a progress bar tells of a step; bytes by rank 0's measure.
std::string note(const StepRecord& record, int ranks) {
  const auto tokens = static_cast<double>(record.tokens);
  return fmt::format("loss {:.4f}, {:.0f} tokens/s, {} sent a token, {} of memory a rank", record.loss,
                     tokens / record.seconds, format_bytes(static_cast<double>(record.sent.bytes()) * ranks / tokens),
                     format_bytes(static_cast<double>(record.peak_bytes)));
}

class Trainer {
 public:
  Trainer(const TrainSettings& settings, const ModelConfig& config, const TrainingText& text, Communicator& world)
      : settings_(settings),
        config_(config),
        text_(text),
        world_(world),
        description_(describe(settings, config, text.training)),
        out_lock_(lock_out(settings, world)),
        metered_(meter_),
        checkpoint_(find_checkpoint(settings, description_, world)),
        mesh_(make_mesh(settings.parallel, config, world)),
        model_(config, mesh_, checkpoint_ ? checkpoint_->directory : settings.init, settings.seed, settings.dtype),
        optimizer_(settings.adamw, model_.groups(), world),
        order_(text.training.count(), settings.seed) {
    if (checkpoint_) resume();
    if (leads()) {
      metrics_.emplace(metrics_path(), [&](const json& line) { return step_of(line) <= first_step_; });
    }
    world.barrier("start");
    gemm_rate_ = world.sum_over_ranks(measure_gemm_rate(settings.dtype), "matrix product rate");
  }

  TrainResult run(const std::function<bool()>& stop_requested);

 private:
  bool leads() const { return world_.rank() == 0; }
  std::filesystem::path metrics_path() const { return settings_.out / "metrics.jsonl"; }
  // What a step trains on: the first sequence of each micro-batch, their targets, and the FLOPs of it all.
  struct StepWork {
    std::vector<int64_t> batches;
    int64_t targets = 0;
    double flops = 0;
  };
  void resume();
  Batch training_batch(int64_t k);  // this rank's data share of the micro-batch that starts at the k-th sequence
  StepWork work_of(int64_t index);
  StepRecord step(int64_t index, const std::function<bool()>& stop_requested);
  double agree_on_loss(double local_loss, const std::function<bool()>& stop_requested);
  [[noreturn]] void report_non_finite(const char* what, double value, int64_t index, const StepWork& work);
  double evaluate();
  std::filesystem::path save(int64_t steps);
  void write(const json& line) {
    if (metrics_) metrics_->write(line);
  }
  int64_t peak_bytes_since_last();

  const TrainSettings& settings_;
  const ModelConfig& config_;
  const TrainingText& text_;
  Communicator& world_;
  const json description_;
  const std::unique_ptr<FolderLock> out_lock_;  // rank 0
  MemoryMeter meter_;
  MemoryMeter::Scope metered_;
  std::optional<Checkpoint> checkpoint_;
  Mesh mesh_;
  ShardedModel model_;
  ShardedAdamW optimizer_;
  SequenceOrder order_;
  std::optional<JsonLines> metrics_;  // rank 0
  int64_t first_step_ = 0;
  double gemm_rate_ = 0;  // FLOP/s of all ranks
  int64_t base_bytes_ = 0;
  bool stop_ = false;
};

void Trainer::resume() {
  first_step_ = checkpoint_->step;
  optimizer_.load_state(SafetensorsFile(checkpoint_->directory / Checkpoints::kOptimizerFile), first_step_);
  if (leads()) log_info(fmt::format("resumes after step {} from {}", first_step_, checkpoint_->directory.string()));
}

Batch Trainer::training_batch(int64_t k) {
  const Range mine = even_share(settings_.batch, settings_.parallel.data, mesh_.data_index());
  return text_.training.batch(order_.sequences({k + mine.begin, k + mine.end}));
}

Trainer::StepWork Trainer::work_of(int64_t index) {
  StepWork work;
  for (int64_t micro = 0; micro < settings_.accumulate; ++micro) {
    work.batches.push_back((index * settings_.accumulate + micro) * settings_.batch);
  }
  std::vector<int64_t> documents;
  for (const int64_t sequence : order_.sequences({work.batches.front(), work.batches.back() + settings_.batch})) {
    work.targets += text_.training.target_count(sequence);
    for (const int64_t length : text_.training.document_lengths(sequence)) documents.push_back(length);
  }
  work.flops = 3 * forward_flops(config_, documents);
  return work;
}

StepRecord Trainer::step(int64_t index, const std::function<bool()>& stop_requested) {
  const auto start = steady_clock::now();
  const Traffic before = world_.traffic();
  const StepWork work = work_of(index);

  double loss = 0;
  for (const int64_t k : work.batches) {
    const Tensor share = model_.loss_sum(training_batch(k)) / static_cast<double>(std::max<int64_t>(work.targets, 1));
    share.backward();
    loss += share.item<double>();
  }
  loss = agree_on_loss(loss, stop_requested);
  if (!std::isfinite(loss)) report_non_finite("loss", loss, index, work);

  StepRecord record;
  record.step = index + 1;
  record.loss = loss;
  record.learning_rate = settings_.learning_rate.at(index);
  record.gradient_norm = optimizer_.step(record.learning_rate);
  if (!std::isfinite(record.gradient_norm)) report_non_finite("gradient norm", record.gradient_norm, index, work);

  record.seconds = std::chrono::duration<double>(steady_clock::now() - start).count();
  record.tokens = settings_.accumulate * settings_.batch * text_.training.sequence();
  record.sent = world_.traffic() - before;
  record.peak_bytes = peak_bytes_since_last();
  record.mfu = work.flops / record.seconds / gemm_rate_;
  return record;
}

// The sum over ranks; in the same exchange, whether any rank was asked to stop.
double Trainer::agree_on_loss(double local_loss, const std::function<bool()>& stop_requested) {
  const Tensor both = at::tensor({local_loss, stop_requested() ? 1.0 : 0.0}, at::kDouble);
  world_.all_reduce(both, "loss").wait();
  stop_ = both[1].item<double>() > 0;
  return both[0].item<double>();
}

void Trainer::report_non_finite(const char* what, double value, int64_t index, const StepWork& work) {
  std::string where;
  for (const int64_t k : work.batches) {
    if (where = model_.first_non_finite(training_batch(k)); !where.empty()) break;
  }
  where = where.empty() ? "all activations are finite" : "first non-finite activation: " + where;
  throw Error(1, fmt::format("{} is {} at step {}; {}", what, value, index + 1, where));
}

double Trainer::evaluate() {
  const at::NoGradGuard no_grad;
  const PackedText& text = *text_.evaluation;
  const Range mine = even_share(settings_.batch, settings_.parallel.data, mesh_.data_index());
  double loss = 0, targets = 0;
  for (int64_t first = 0; first < text.count(); first += settings_.batch) {
    std::vector<int64_t> sequences;
    for (int64_t i = first + mine.begin; i < first + mine.end; ++i) sequences.push_back(i < text.count() ? i : 0);
    const Batch batch = text.batch(sequences);
    // All ranks run the same shapes: what is left of the last batch repeats a sequence and is not counted.
    const int64_t real = std::clamp<int64_t>(text.count() - first - mine.begin, 0, mine.size());
    batch.targets_BS.narrow(0, real, mine.size() - real).fill_(kIgnoredTarget);
    loss += model_.loss_sum(batch).item<double>();
  }
  for (int64_t i = 0; i < text.count(); ++i) targets += static_cast<double>(text.target_count(i));
  return world_.sum_over_ranks(loss, "evaluation loss") / targets;
}

std::filesystem::path Trainer::save(int64_t steps) {
  const ShardedAdamW::NamedTensors state = optimizer_.gather_state();
  if (!leads()) return {};
  // Every tensor of the model, those of other ranks' experts included, out of the gathered masters.
  std::map<std::string, Tensor> weights;
  for (const WeightRow& row : model_.table()) weights[row.name] = row.tensor->detach();
  for (const auto& [name, tensor] : state) {
    if (name.ends_with(ShardedAdamW::kMaster)) {
      weights[name.substr(0, name.size() - std::strlen(ShardedAdamW::kMaster))] = tensor.to(settings_.dtype);
    }
  }
  ModelWeights whole;
  const std::vector<WeightRow> table = weight_table(config_, all_experts(config_), whole);
  for (const WeightRow& row : table) *row.tensor = weights.at(row.name);

  return Checkpoints(checkpoints_of(settings_), settings_.keep)
      .save(steps, {{"step", steps}, {"settings", description_}}, [&](const std::filesystem::path& folder) {
        save_weights(folder, config_, table);
        for (const auto& [name, bytes] : settings_.tokenizer_files) write_file_atomically(folder / name, bytes);
        write_safetensors(folder / Checkpoints::kOptimizerFile, state);
      });
}

int64_t Trainer::peak_bytes_since_last() {
  const int64_t peak = base_bytes_ + meter_.peak_bytes();
  base_bytes_ += meter_.current_bytes();
  meter_.reset();
  return peak;
}

TrainResult Trainer::run(const std::function<bool()>& stop_requested) {
  TrainResult result;
  result.steps = first_step_;
  result.metrics = metrics_path();
  if (checkpoint_) result.checkpoint = checkpoint_->directory;
  std::vector<double> rates, utilisations;
  double sent = 0;
  Progress progress("train", settings_.steps, "steps", settings_.quiet || !leads());
  for (int64_t index = first_step_; index < settings_.steps && !stop_; ++index) {
    const StepRecord record = step(index, stop_requested);
    const int64_t done = record.step;
    const bool last = done == settings_.steps;
    const auto due = [&](int64_t every) { return last || (every > 0 && done % every == 0); };
    write(to_json(record));
    progress.update(done, note(record, world_.size()));
    if (text_.evaluation && due(settings_.evaluate_every)) {
      result.evaluation_loss = evaluate();
      write({{"step", done}, {"eval_loss", *result.evaluation_loss}});
    }
    if (stop_ || due(settings_.checkpoint_every)) result.checkpoint = save(done);

    result.steps = done;
    result.loss = record.loss;
    result.sent = record.sent;
    result.peak_bytes = std::max(result.peak_bytes, record.peak_bytes);
    rates.push_back(static_cast<double>(record.tokens) / record.seconds);
    utilisations.push_back(record.mfu);
    sent += static_cast<double>(record.sent.bytes()) / static_cast<double>(record.tokens);
  }
  result.interrupted = stop_ && result.steps < settings_.steps;
  const double steps_here = static_cast<double>(std::max<size_t>(rates.size(), 1));
  result.sent_bytes_per_token = world_.sum_over_ranks(sent / steps_here, "bytes sent");
  result.peak_bytes = static_cast<int64_t>(world_.max_over_ranks(static_cast<double>(result.peak_bytes), "peak bytes"));
  if (rates.empty()) return result;
  result.tokens_per_s = spread_of(std::move(rates)).median;
  result.mfu = spread_of(std::move(utilisations)).median;
  return result;
}

}  // namespace

TrainResult train(const TrainSettings& settings, const ModelConfig& config, const TrainingText& text,
                  Communicator& world, const std::function<bool()>& stop_requested) {
  validate(settings, text.training);
  return Trainer(settings, config, text, world).run(stop_requested);
}

}  // namespace parlat
