#include "parlat/train/data.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "parlat/base/error.h"
#include "parlat/io/files.h"
#include "parlat/model/transformer.h"
#include "parlat/tensor/fill.h"

namespace parlat {

PackedText::PackedText(const std::vector<std::vector<int64_t>>& documents, int64_t sequence) : sequence_(sequence) {
  if (sequence < 1) throw ConfigError("sequence: expected at least 1 token, got {}", sequence);
  auto stream = std::make_shared<Stream>();
  for (const std::vector<int64_t>& document : documents) {
    if (document.empty()) continue;
    stream->starts.push_back(static_cast<int64_t>(stream->tokens.size()));
    stream->tokens.insert(stream->tokens.end(), document.begin(), document.end());
  }
  stream->starts.push_back(static_cast<int64_t>(stream->tokens.size()));
  sequences_ = {0, stream->starts.back() / sequence};
  stream_ = std::move(stream);
}

PackedText PackedText::subset(Range sequences) const {
  PARLAT_ASSERT(0 <= sequences.begin && sequences.end <= count(), "{} to {} of {} sequences", sequences.begin,
                sequences.end, count());
  PackedText part = *this;
  part.sequences_ = {sequences_.begin + sequences.begin, sequences_.begin + sequences.end};
  return part;
}

Range PackedText::span(int64_t index) const {
  const int64_t begin = (sequences_.begin + index) * sequence_;
  return {begin, begin + sequence_};
}

// The parts of documents that lie within, as indices into the stream.
std::vector<Range> PackedText::documents_in(Range tokens) const {
  const std::vector<int64_t>& starts = stream_->starts;
  std::vector<Range> parts;
  auto next = std::upper_bound(starts.begin(), starts.end(), tokens.begin);
  for (int64_t begin = tokens.begin; begin < tokens.end; ++next) {
    parts.push_back({begin, std::min(*next, tokens.end)});
    begin = parts.back().end;
  }
  return parts;
}

bool PackedText::ends_document(int64_t end) const {
  return std::binary_search(stream_->starts.begin(), stream_->starts.end(), end);
}

std::vector<int64_t> PackedText::document_lengths(int64_t index) const {
  std::vector<int64_t> lengths;
  for (const Range& part : documents_in(span(index))) lengths.push_back(part.size());
  return lengths;
}

int64_t PackedText::target_count(int64_t index) const {
  int64_t targets = 0;
  for (const Range& part : documents_in(span(index))) targets += part.size() - (ends_document(part.end) ? 1 : 0);
  return targets;
}

Batch PackedText::batch(const std::vector<int64_t>& sequences) const {
  const auto rows = static_cast<int64_t>(sequences.size());
  const Tensor tokens_BS = at::empty({rows, sequence_}, at::kLong), targets_BS = at::empty_like(tokens_BS);
  int64_t* token = tokens_BS.mutable_data_ptr<int64_t>();
  int64_t* target = targets_BS.mutable_data_ptr<int64_t>();
  const int32_t* const stream = stream_->tokens.data();
  std::vector<std::vector<int64_t>> lengths;
  for (const int64_t index : sequences) {
    for (const Range& part : documents_in(span(index))) {
      token = std::copy(stream + part.begin, stream + part.end, token);
      target = std::copy(stream + part.begin + 1, stream + part.end, target);
      *target++ = ends_document(part.end) ? kIgnoredTarget : stream[part.end];
    }
    lengths.push_back(document_lengths(index));
  }
  return {tokens_BS, targets_BS, Documents::packed(sequence_, lengths)};
}

uint64_t PackedText::fingerprint() const {
  const Range tokens{span(0).begin, span(count()).begin};
  uint64_t hash = static_cast<uint64_t>(sequence_);
  for (const Range& part : documents_in(tokens)) {
    const auto* const bytes = reinterpret_cast<const char*>(stream_->tokens.data() + part.begin);
    hash = derive_seed(hash, std::string_view(bytes, static_cast<size_t>(part.size()) * sizeof(int32_t)));
  }
  return hash;
}

namespace {

PackedText pack_files(const std::vector<std::filesystem::path>& files, int64_t sequence, const Tokenizer& tokenizer) {
  std::vector<std::vector<int64_t>> documents;
  for (const std::filesystem::path& file : files) {
    std::vector<int64_t>& document = documents.emplace_back(tokenizer.prefix());
    const std::vector<int64_t> tokens = tokenizer.encode(read_text(file));
    document.insert(document.end(), tokens.begin(), tokens.end());
    document.push_back(tokenizer.end_of_document());
  }
  return PackedText(documents, sequence);
}

void require_sequences(const PackedText& text, int64_t sequences, const std::filesystem::path& file) {
  if (text.count() >= sequences) return;
  throw DataError("{}: expected at least {} tokens for {} of {} tokens, got {}", file.string(),
                  sequences * text.sequence(), sequences == 1 ? "a sequence" : "a training and an evaluation sequence",
                  text.sequence(), text.token_count());
}

}  // namespace

TrainingText load_training_text(const TextSpec& spec, const Tokenizer& tokenizer) {
  if (spec.files.empty()) throw ConfigError("data: expected at least one file, got none");
  if (!(spec.evaluation_fraction >= 0 && spec.evaluation_fraction < 1)) {
    throw ConfigError("eval-fraction: expected at least 0 and less than 1, got {}", spec.evaluation_fraction);
  }
  const PackedText all = pack_files(spec.files, spec.sequence, tokenizer);
  const bool hold_out = spec.evaluation_file.empty() && spec.evaluation_fraction > 0;
  require_sequences(all, hold_out ? 2 : 1, spec.files.front());
  if (hold_out) {
    const double share = spec.evaluation_fraction * static_cast<double>(all.count());
    const int64_t held_out = std::clamp<int64_t>(std::llround(share), 1, all.count() - 1);
    const int64_t kept = all.count() - held_out;
    return {all.subset({0, kept}), all.subset({kept, all.count()})};
  }
  if (spec.evaluation_file.empty()) return {all, std::nullopt};
  const PackedText evaluation = pack_files({spec.evaluation_file}, spec.sequence, tokenizer);
  require_sequences(evaluation, 1, spec.evaluation_file);
  return {all, evaluation};
}

std::vector<int64_t> SequenceOrder::sequences(Range k) {
  std::vector<int64_t> chosen;
  for (int64_t i = k.begin; i < k.end; ++i) {
    if (const int64_t epoch = i / count_; epoch != epoch_) {
      order_.resize(count_);
      std::iota(order_.begin(), order_.end(), 0);
      // Fisher-Yates by hand: std::shuffle differs between standard libraries.
      std::mt19937_64 random(derive_seed(seed_, fmt::format("order of epoch {}", epoch)));
      for (int64_t left = count_; left > 1; --left) {
        std::swap(order_[left - 1], order_[random() % static_cast<uint64_t>(left)]);
      }
      epoch_ = epoch;
    }
    chosen.push_back(order_[i % count_]);
  }
  return chosen;
}

}  // namespace parlat
