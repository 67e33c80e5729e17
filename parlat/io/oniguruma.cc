#include "parlat/io/oniguruma.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "parlat/base/error.h"
#include "parlat/io/quote.h"
#include "parlat/io/utf8.h"

namespace parlat {

namespace {

// PCRE2's own \s has U+180E, which is no white space since Unicode 6.3, and its \w lacks marks. Oniguruma's \w has the
// digits and fractions of Latin-1.
constexpr std::string_view kSpace =
    R"(\x{9}-\x{d} \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kNoSpace =
    R"(\x{0}-\x{8}\x{e}-\x{1f}!-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";
constexpr std::string_view kWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";
constexpr std::string_view kHexDigit = "0-9a-fA-F";

constexpr int kDeepestNesting = 64;

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex_digit(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

// One step of a set: what stands for it between brackets, and whether it is a single character.
struct Item {
  std::string text;
  bool character = false;
};

class Translator {
 public:
  Translator(std::string_view pattern, const std::string& name) : in_(pattern), name_(name) {}

  std::string run() {
    while (i_ < in_.size()) step();
    if (!groups_.empty()) refuse("a group that does not end");
    return std::move(out_);
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;

  bool at(std::string_view text) const { return in_.substr(i_).starts_with(text); }
  // The character `ahead` of the next one; NUL behind the end.
  char peek(size_t ahead = 0) const { return i_ + ahead < in_.size() ? in_[i_ + ahead] : '\0'; }

  [[noreturn]] void refuse(const std::string& what) const {
    throw DataError("{}: {} in the pattern {} at byte {} is not supported", name_, what, quote(in_), i_);
  }

  // Something that a quantifier may follow.
  void put_atom(std::string_view text) {
    atom_ = out_.size();
    out_ += text;
  }
  // Something that none may follow.
  void put(std::string_view text) {
    atom_ = kNone;
    out_ += text;
  }

  void step() {
    switch (peek()) {
      case '\\':
        return escape();
      case '[':
        return put_atom(set());
      case '(':
        return open_group();
      case ')':
        if (groups_.empty()) refuse("a parenthesis that closes nothing");
        ++i_;
        out_ += ')';
        atom_ = groups_.back();
        groups_.pop_back();
        return;
      case '*':
      case '+':
      case '?':
        return quantifier();
      case '{':
        return interval();
      case '|':
      case '^':
      case '$':
        put(in_.substr(i_, 1));
        ++i_;
        return;
      case '.':
        put_atom(".");
        ++i_;
        return;
      default:
        put_atom(literal());
    }
  }

  // One character that stands for itself; the pattern is UTF-8.
  std::string literal() {
    const size_t length = std::max<size_t>(1, utf8_character_length(in_, i_));
    const std::string_view character = in_.substr(i_, length);
    i_ += length;
    const auto byte = static_cast<unsigned char>(character[0]);
    if (length > 1 || is_letter(character[0]) || is_digit(character[0])) return std::string(character);
    return fmt::format("\\x{{{:x}}}", byte);
  }

  void open_group() {
    static constexpr std::array<std::string_view, 8> kOpenings = {
        "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?-i:"};
    if (groups_.size() == kDeepestNesting) refuse("deep nesting");
    if (at("(?i)")) {
      // Elsewhere Oniguruma ends the group with the option at the next |, PCRE2 does not.
      if (i_ > 0) refuse("an option inside");
      i_ += 4;
      return put("(?i)");
    }
    const auto* const opening =
        std::find_if(kOpenings.begin(), kOpenings.end(), [&](std::string_view text) { return at(text); });
    groups_.push_back(out_.size());
    if (opening != kOpenings.end()) {
      i_ += opening->size();
      return put(*opening);
    }
    ++i_;
    if (peek() == '?' || peek() == '*') refuse("a group of this kind");
    put("(?:");  // nothing refers back to it
  }

  void quantifier() {
    if (atom_ == kNone) refuse("a quantifier of nothing, or of a quantifier,");
    const size_t length = 1 + (peek(1) == '+' || peek(1) == '?' ? 1 : 0);
    put(in_.substr(i_, length));
    i_ += length;
  }

  std::string digits() {
    const size_t begin = i_;
    while (is_digit(peek())) ++i_;
    return std::string(in_.substr(begin, i_ - begin));
  }

  void interval() {
    const size_t begin = i_++;
    std::string low = digits();
    const bool comma = peek() == ',';
    if (comma) ++i_;
    const std::string high = comma ? digits() : low;
    if (peek() != '}' || (low.empty() && high.empty())) {
      i_ = begin;
      return put_atom(literal());
    }
    ++i_;
    if (atom_ == kNone) refuse("a quantifier of nothing, or of a quantifier,");
    if (low.empty()) low = "0";
    const std::string count = comma ? fmt::format("{{{},{}}}", low, high) : fmt::format("{{{}}}", low);
    // x{1,3}+ is (x{1,3})+ in Oniguruma and possessive in PCRE2; x{3}? is (x{3})?.
    const char next = peek();
    if (next == '+' || (next == '?' && !comma)) {
      ++i_;
      out_.insert(atom_, "(?:");
      return put(count + ")" + next);
    }
    if (next == '?') ++i_;
    put(next == '?' ? count + "?" : count);
  }

  // Outside sets.
  void escape() {
    if (at("\\A") || at("\\z") || at("\\Z")) {
      put(in_.substr(i_, 2));
      i_ += 2;
      return;
    }
    const std::optional<Item> complement = complement_escape();
    if (complement) return put_atom("[^" + complement->text + "]");
    const Item item = item_escape();
    put_atom(item.character ? item.text : "[" + item.text + "]");
  }

  // \W and \H, whose complement alone is known.
  std::optional<Item> complement_escape() {
    const bool word = at("\\W"), hex = at("\\H");
    if (!word && !hex) return std::nullopt;
    i_ += 2;
    return Item{std::string(word ? kWord : kHexDigit)};
  }

  // An escape as it stands between brackets.
  Item item_escape() {
    if (i_ + 1 >= in_.size()) refuse("a backslash at the end");
    const char c = in_[i_ + 1];
    switch (c) {
      case 's':
        return skip({std::string(kSpace)});
      case 'S':
        return skip({std::string(kNoSpace)});
      case 'd':
        return skip({"\\p{Nd}"});
      case 'D':
        return skip({"\\P{Nd}"});
      case 'w':
        return skip({std::string(kWord)});
      case 'h':
        return skip({std::string(kHexDigit)});
      case 'p':
      case 'P':
        return property();
      case 'x':
      case 'u':
        return code_point();
      default:
        break;
    }
    static constexpr std::string_view kControls = "nrtfvae", kCodes = "\n\r\t\f\v\a\x1b";
    if (const size_t control = kControls.find(c); control != std::string_view::npos) {
      return skip({fmt::format("\\x{{{:x}}}", static_cast<unsigned>(kCodes[control])), true});
    }
    if (is_letter(c) || is_digit(c) || c == '\0') refuse(fmt::format("the escape {}", quote(in_.substr(i_, 2))));
    ++i_;
    return {literal(), true};
  }

  Item skip(Item item) {
    i_ += 2;
    return item;
  }

  // \p{L}, \P{L}, \p{^L}: general categories have one or two letters, scripts more.
  Item property() {
    const size_t end = in_.find('}', i_);
    if (peek(2) != '{' || end == std::string_view::npos) refuse("a property without a name");
    std::string_view property = in_.substr(i_ + 3, end - i_ - 3);
    bool negated = in_[i_ + 1] == 'P';
    if (property.starts_with('^')) {
      negated = !negated;
      property.remove_prefix(1);
    }
    const bool named = !property.empty() &&
                       std::all_of(property.begin(), property.end(), [](char c) { return is_letter(c) || c == '_'; });
    if (!named) refuse("a property of this name");
    i_ = end + 1;
    return {fmt::format("\\{}{{{}{}}}", negated ? 'P' : 'p', property.size() > 2 ? "sc:" : "", property)};
  }

  // \x41, \x{4e00}, \u4e00
  Item code_point() {
    const bool braces = at("\\x{");
    const size_t most = in_[i_ + 1] == 'u' ? 4 : braces ? 8 : 2, first = i_ + (braces ? 3 : 2);
    size_t end = first;
    while (end < in_.size() && end - first < most && is_hex_digit(in_[end])) ++end;
    const std::string_view digits = in_.substr(first, end - first);
    const bool closed = !braces || in_.substr(end, 1) == "}";
    if (digits.empty() || !closed || (in_[i_ + 1] == 'u' && digits.size() != 4)) refuse("a code point");
    i_ = end + (braces ? 1 : 0);
    return {fmt::format("\\x{{{}}}", digits), true};
  }

  // From '[' to its ']', as something that matches one character.
  std::string set() {
    if (++depth_ > kDeepestNesting) refuse("deep nesting");
    ++i_;
    const bool negated = peek() == '^';
    if (negated) ++i_;
    std::vector<std::string> operands = {operand(/*first=*/true)};
    while (at("&&")) {
      i_ += 2;
      operands.push_back(operand(/*first=*/false));
    }
    ++i_;  // the ']' that operand() stopped at
    --depth_;
    std::string all;
    for (size_t k = 0; k + 1 < operands.size(); ++k) all += "(?=" + operands[k] + ")";
    all += operands.back();
    if (operands.size() > 1) all = "(?:" + all + ")";
    if (!negated) return all;
    if (plain_ && operands.size() == 1) return "[^" + all.substr(1);
    return "(?:(?!" + all + ")(?s:.))";
  }

  // The union of the items up to "&&" or "]". plain_ tells whether it is a set without sets inside.
  std::string operand(bool first) {
    std::string items;
    std::vector<std::string> alternatives;
    bool at_start = first, after_range = false;
    for (; !(at("]") && !at_start) && !at("&&"); at_start = false) {
      if (i_ >= in_.size()) refuse("a set that does not end");
      if (at("[:")) refuse("a bracket expression");
      if (at("[")) {
        alternatives.push_back(set());
        after_range = true;
        continue;
      }
      if (after_range && peek() == '-' && peek(1) != ']') refuse("a hyphen behind a range");
      after_range = range(items);
    }
    if (!items.empty()) alternatives.insert(alternatives.begin(), "[" + items + "]");
    if (alternatives.empty()) refuse("an empty set");
    plain_ = alternatives.size() == 1 && !items.empty();
    if (alternatives.size() == 1) return alternatives.front();
    std::string any = "(?:" + alternatives.front();
    for (size_t k = 1; k < alternatives.size(); ++k) any += "|" + alternatives[k];
    return any + ")";
  }

  // One item, or two with a hyphen between; true unless it is a single character.
  bool range(std::string& items) {
    const Item low = item();
    items += low.text;
    if (!low.character) return true;
    const std::string_view rest = in_.substr(i_);
    if (!rest.starts_with('-') || rest.size() < 2 || rest[1] == ']' || rest.starts_with("-&&")) return false;
    ++i_;
    if (at("[")) refuse("a range that ends in a set");
    const Item high = item();
    if (!high.character) refuse("a range that ends in a class");
    items += "-" + high.text;
    return true;
  }

  Item item() {
    if (peek() == '\\') return item_escape();
    return {literal(), true};
  }

  std::string_view in_;
  const std::string& name_;
  size_t i_ = 0;
  std::string out_;
  size_t atom_ = kNone;  // where in out_ the last atom begins
  std::vector<size_t> groups_;
  int depth_ = 0;
  bool plain_ = true;
};

}  // namespace

std::string pcre2_from_oniguruma(std::string_view pattern, const std::string& name) {
  return Translator(pattern, name).run();
}

}  // namespace parlat
