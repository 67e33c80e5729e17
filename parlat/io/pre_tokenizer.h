#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "parlat/io/regex.h"

namespace parlat {

// What becomes of the stretches that a pattern matches, on "a--b" with the pattern "-".
enum class SplitBehavior {
  kIsolated,            // a, -, -, b
  kRemoved,             // a, b
  kMergedWithPrevious,  // a-, -, b
  kMergedWithNext,      // a, -, -b
  kContiguous,          // a, --, b
};

struct Split {
  Regex pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // the stretches between the matches count as matched
};

// Cuts text into the words within which bytes are merged, as the pre-tokenizers of tokenizer.json do: one split after
// the other, each on the pieces that the one before left and seeing nothing around them. Bytes that are not UTF-8 are
// each a character of their own to the patterns: no letter, digit, punctuation or white space.
class PreTokenizer {
 public:
  // A word of the text; with space_before, a space that the text does not have precedes it.
  using OnWord = std::function<void(std::string_view word, bool space_before)>;

  std::vector<Split> splits;
  bool add_prefix_space = false;    // in front of every piece that has none, then:
  std::vector<Split> space_splits;  // these splits

  // Calls on_word for every word in order. Time is linear in the text, but for what a pattern itself costs.
  void cut(std::string_view text, const OnWord& on_word) const;
};

}  // namespace parlat
