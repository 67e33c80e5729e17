#include "parlat/io/pre_tokenizer.h"

#include <algorithm>
#include <optional>
#include <string>

#include "parlat/io/utf8.h"

namespace parlat {

namespace {

// Text for the patterns, whose bytes that are no UTF-8 are replaced by a character in no class.
class ValidText {
 public:
  explicit ValidText(std::string_view text) : text_(text) {
    static constexpr std::string_view kStandIn = "\xEF\xB7\x90";  // U+FDD0, which never becomes a character
    static_assert(kStandIn.size() == 1 + kGrowth);
    std::string_view rest = text;
    while (const auto invalid = find_invalid_utf8(rest)) {
      replaced_.append(rest, 0, *invalid);
      stand_ins_.push_back(replaced_.size());
      replaced_ += kStandIn;
      rest.remove_prefix(*invalid + 1);
    }
    if (!stand_ins_.empty()) text_ = replaced_.append(rest);
  }
  ValidText(const ValidText&) = delete;
  ValidText& operator=(const ValidText&) = delete;

  std::string_view text() const { return text_; }
  // Where an offset into text() lies in the text as it was.
  size_t original(size_t offset) const {
    if (stand_ins_.empty()) return offset;
    const auto before = std::lower_bound(stand_ins_.begin(), stand_ins_.end(), offset) - stand_ins_.begin();
    return offset - kGrowth * static_cast<size_t>(before);
  }

 private:
  static constexpr size_t kGrowth = 2;
  std::string_view text_;
  std::string replaced_;
  std::vector<size_t> stand_ins_;  // ascending offsets into replaced_
};

struct Piece {
  size_t begin, end;
  bool space_before = false;  // one that the text does not have
};

// Gives `emit` the pieces that a behavior makes of the stretches it is told of in order.
template <typename Emit>
class Joiner {
 public:
  Joiner(SplitBehavior behavior, const Emit& emit) : behavior_(behavior), emit_(emit) {}

  void stretch(size_t begin, size_t end, bool matched) {
    switch (behavior_) {
      case SplitBehavior::kIsolated:
        return emit_(begin, end);
      case SplitBehavior::kRemoved:
        if (!matched) emit_(begin, end);
        return;
      default:
        break;
    }
    const bool join = held_ && joins(matched);
    if (held_ && !join) emit_(held_begin_, held_end_);
    if (!join) held_begin_ = begin;
    held_ = true;
    held_end_ = end;
    held_matched_ = matched;
  }

  void finish() {
    if (held_) emit_(held_begin_, held_end_);
  }

 private:
  // Whether a stretch belongs to the piece held so far, which ends in one that was matched or not.
  bool joins(bool matched) const {
    switch (behavior_) {
      case SplitBehavior::kMergedWithPrevious:
        return matched && !held_matched_;
      case SplitBehavior::kMergedWithNext:
        return !matched && held_matched_;
      default:
        return matched == held_matched_;
    }
  }

  SplitBehavior behavior_;
  const Emit& emit_;
  bool held_ = false, held_matched_ = false;
  size_t held_begin_ = 0, held_end_ = 0;
};

// One cut: every split walks its pieces while the splits before it wait.
class Cut {
 public:
  Cut(const PreTokenizer& rules, const ValidText& valid, std::string_view text, const PreTokenizer::OnWord& on_word)
      : valid_(valid), text_(text), on_word_(on_word), spaced_from_(rules.splits.size()) {
    for (const Split& split : rules.splits) stages_.push_back({split, RegexMatcher(split.pattern)});
    for (const Split& split : rules.space_splits) stages_.push_back({split, RegexMatcher(split.pattern)});
    if (!rules.add_prefix_space) spaced_from_ = SIZE_MAX;
  }

  void run(size_t index, Piece piece) {
    if (piece.begin == piece.end && !piece.space_before) return;
    if (index == spaced_from_ && valid_.text().substr(piece.begin, 1) != " ") piece.space_before = true;
    if (index == stages_.size()) return word(piece);
    std::string spaced;
    std::string_view text = valid_.text().substr(piece.begin, piece.end - piece.begin);
    if (piece.space_before) text = spaced.append(" ").append(text);
    const size_t shift = piece.space_before ? 1 : 0;
    split(stages_[index], text, [&](size_t begin, size_t end) {
      const bool has_space = piece.space_before && begin == 0 && end > 0;
      run(index + 1,
          {piece.begin + std::max(begin, shift) - shift, piece.begin + std::max(end, shift) - shift, has_space});
    });
  }

 private:
  struct Stage {
    const Split& split;
    RegexMatcher matcher;
  };

  template <typename Emit>
  static void split(Stage& stage, std::string_view text, const Emit& emit) {
    Joiner joiner(stage.split.behavior, emit);
    const bool matched = !stage.split.invert;
    size_t done = 0;
    stage.matcher.start(text);
    while (const auto match = stage.matcher.next()) {
      if (done != match->begin) joiner.stretch(done, match->begin, !matched);
      joiner.stretch(match->begin, match->end, matched);
      done = match->end;
    }
    if (done != text.size()) joiner.stretch(done, text.size(), !matched);
    joiner.finish();
  }

  void word(const Piece& piece) const {
    const size_t begin = valid_.original(piece.begin), end = valid_.original(piece.end);
    on_word_(text_.substr(begin, end - begin), piece.space_before);
  }

  const ValidText& valid_;
  std::string_view text_;
  const PreTokenizer::OnWord& on_word_;
  size_t spaced_from_;
  std::vector<Stage> stages_;
};

}  // namespace

void PreTokenizer::cut(std::string_view text, const OnWord& on_word) const {
  const ValidText valid(text);
  Cut(*this, valid, text, on_word).run(0, {0, valid.text().size()});
}

}  // namespace parlat
