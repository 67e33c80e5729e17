#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "parlat/base/range.h"
#include "parlat/io/tokenizer.h"
#include "parlat/mla/documents.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// Sequences of equal length, with what each token is followed by (kIgnoredTarget at the end of a document).
struct Batch {
  Tensor tokens_BS, targets_BS;  // int64
  Documents documents;
};

// Documents laid one after the other and cut every `sequence` tokens: no padding, a long document goes on in the next
// sequence (as a new document there), the tail that fills no sequence is left out. Copies share the tokens.
class PackedText {
 public:
  PackedText(const std::vector<std::vector<int64_t>>& documents, int64_t sequence);

  int64_t count() const { return sequences_.size(); }  // sequences
  int64_t sequence() const { return sequence_; }
  int64_t token_count() const { return stream_->starts.back(); }  // of the whole text, subset or not
  Batch batch(const std::vector<int64_t>& sequences) const;
  // Of one sequence: its documents, and the tokens that have a target.
  std::vector<int64_t> document_lengths(int64_t index) const;
  int64_t target_count(int64_t index) const;
  PackedText subset(Range sequences) const;
  // Of tokens and document borders: what tells two texts apart.
  uint64_t fingerprint() const;

 private:
  struct Stream {
    std::vector<int32_t> tokens;
    std::vector<int64_t> starts;  // first token of each document, then the end of the last
  };
  Range span(int64_t index) const;
  std::vector<Range> documents_in(Range tokens) const;
  bool ends_document(int64_t end) const;

  std::shared_ptr<const Stream> stream_;
  int64_t sequence_ = 0;
  Range sequences_;
};

struct TextSpec {
  std::vector<std::filesystem::path> files;  // each one document
  std::filesystem::path evaluation_file;     // empty: the last `evaluation_fraction` of the sequences is held out
  double evaluation_fraction = 0.01;
  int64_t sequence = 512;
};

struct TrainingText {
  PackedText training;
  std::optional<PackedText> evaluation;
};

// Reads and packs text; each file is one document, between the tokenizer's prefix and its end of document. Throws
// DataError for files that can't be read and for text that fills no sequence, ConfigError for impossible settings.
TrainingText load_training_text(const TextSpec& spec, const Tokenizer& tokenizer);

// Which sequence is the k-th to be trained on, k = 0, 1, ...: every epoch visits all sequences in a new seeded order.
// The same for every number of ranks, and at any k without walking there.
class SequenceOrder {
 public:
  SequenceOrder(int64_t count, uint64_t seed) : count_(count), seed_(seed) {}
  std::vector<int64_t> sequences(Range k);

 private:
  int64_t count_;
  uint64_t seed_;
  int64_t epoch_ = -1;
  std::vector<int64_t> order_;  // of epoch_
};

}  // namespace parlat
