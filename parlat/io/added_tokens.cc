#include "parlat/io/added_tokens.h"

#include <algorithm>
#include <utility>

#include "parlat/io/utf8.h"

namespace parlat {

namespace {

// Bytes of the white space character (Unicode's White_Space) at text[i]; 0 where there is another.
size_t white_space_length(std::string_view text, size_t i) {
  static constexpr std::string_view kAscii = "\t\n\v\f\r ";
  static constexpr std::array<std::string_view, 19> kOthers = {
      "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
      "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
  if (i >= text.size()) return 0;
  if (kAscii.find(text[i]) != std::string_view::npos) return 1;
  for (const std::string_view other : kOthers) {
    if (text.substr(i).starts_with(other)) return other.size();
  }
  return 0;
}

// The same of the one that ends at text[end].
size_t white_space_length_before(std::string_view text, size_t end) {
  for (size_t length = 1; length <= std::min<size_t>(3, end); ++length) {
    if (white_space_length(text, end - length) == length) return length;
  }
  return 0;
}

size_t character_length_before(std::string_view text, size_t end) {
  for (size_t length = 1; length <= std::min<size_t>(4, end); ++length) {
    if (utf8_character_length(text, end - length) == length) return length;
  }
  return 0;
}

// Word characters as Unicode's annex 18 has them: with joiners, and without Oniguruma's additions.
constexpr std::string_view kWord = R"([\w&&[^\u00b2\u00b3\u00b9\u00bc-\u00be]]|[\u200c\u200d])";

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)), word_(kWord, "added tokens") {
  std::erase_if(tokens_, [](const AddedToken& token) { return token.content.empty(); });
  std::sort(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) { return a.content < b.content; });
  for (const AddedToken& token : tokens_) begins_[static_cast<unsigned char>(token.content[0])] = true;
}

// Narrows the sorted tokens byte by byte to those that begin as the text does.
const AddedToken* AddedTokens::longest_at(std::string_view text, size_t begin) const {
  const AddedToken* longest = nullptr;
  auto low = tokens_.begin(), high = tokens_.end();
  for (size_t depth = 0; low != high && begin + depth < text.size(); ++depth) {
    const auto byte = static_cast<unsigned char>(text[begin + depth]);
    // Those that end here come first.
    if (low->content.size() == depth) ++low;
    const auto before = [&](const AddedToken& t) { return static_cast<unsigned char>(t.content[depth]) < byte; };
    const auto within = [&](const AddedToken& t) { return static_cast<unsigned char>(t.content[depth]) == byte; };
    low = std::partition_point(low, high, before);
    high = std::partition_point(low, high, within);
    if (low != high && low->content.size() == depth + 1) longest = &*low;
  }
  return longest;
}

bool AddedTokens::alone(std::string_view text, size_t begin, size_t end) const {
  RegexMatcher matcher(word_);
  const auto is_word = [&](size_t at, size_t length) {
    if (length == 0) return false;
    matcher.start(text.substr(at, length));
    return matcher.next().has_value();
  };
  const size_t before = character_length_before(text, begin);
  return !is_word(begin - before, before) && !is_word(end, utf8_character_length(text, end));
}

void AddedTokens::cut(std::string_view text, const OnToken& on_token, const OnText& on_text) const {
  size_t done = 0;
  for (size_t i = 0; i < text.size();) {
    const AddedToken* const token = begins_[static_cast<unsigned char>(text[i])] ? longest_at(text, i) : nullptr;
    if (token == nullptr) {
      ++i;
      continue;
    }
    size_t begin = i, end = i + token->content.size();
    i = end;  // what is passed over here is not looked at again
    if (token->single_word && !alone(text, begin, end)) continue;
    if (token->lstrip) {
      for (size_t space = 0; begin > done && (space = white_space_length_before(text, begin)) > 0;) begin -= space;
      begin = std::max(begin, done);
    }
    if (token->rstrip) {
      for (size_t space = 0; (space = white_space_length(text, end)) > 0;) end += space;
    }
    if (done < begin) on_text(text.substr(done, begin - done));
    on_token(token->id);
    done = end;
  }
  if (done < text.size()) on_text(text.substr(done));
}

}  // namespace parlat
