#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "parlat/io/regex.h"

namespace parlat {

// A token that text may name as a whole, before anything is split: <|begin_of_sentence|>.
struct AddedToken {
  int64_t id = 0;
  std::string content;
  bool single_word = false;  // only between characters that are no word characters
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and behind it
  bool normalized = false;   // looked for in normalised text
  bool special = false;
};

// Finds added tokens in text: leftmost first, the longest of those that begin there.
class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens);

  using OnToken = std::function<void(int64_t id)>;
  using OnText = std::function<void(std::string_view text)>;
  // Tells of the tokens and the text between them in order; text is never empty.
  void cut(std::string_view text, const OnToken& on_token, const OnText& on_text) const;

 private:
  const AddedToken* longest_at(std::string_view text, size_t begin) const;
  bool alone(std::string_view text, size_t begin, size_t end) const;

  std::vector<AddedToken> tokens_;  // by content
  std::array<bool, 256> begins_ = {};
  Regex word_;
};

}  // namespace parlat
