#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

// PCRE2's types, whose header regex.cc alone includes.
struct pcre2_real_code_8;
struct pcre2_real_match_context_8;
struct pcre2_real_match_data_8;

namespace parlat {

// A regular expression with the meaning it has to the `tokenizers` package (oniguruma.h), run by PCRE2, as machine code
// where PCRE2 can. Unicode classes are those of the installed PCRE2: 10.42 knows Unicode 14.
class Regex {
 public:
  // Throws DataError, beginning with `name`, where the pattern is none.
  Regex(std::string_view pattern, std::string name);
  // What matches this very text.
  static Regex literal(std::string_view text, std::string name);

 private:
  friend class RegexMatcher;
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
    void operator()(pcre2_real_match_context_8* context) const;
  };
  Regex(std::string_view pattern, std::string name, unsigned options);

  std::string name_;
  std::unique_ptr<pcre2_real_code_8, Free> code_;
  std::unique_ptr<pcre2_real_match_context_8, Free> limits_;
};

// Walks the matches of a Regex through one text after another. One thread each; the Regex outlives it.
class RegexMatcher {
 public:
  struct Match {
    size_t begin, end;
  };
  explicit RegexMatcher(const Regex& regex);
  // `text` is valid UTF-8 and stays until the last next().
  void start(std::string_view text);
  // Left to right, none overlaps another; empty ones count, but not directly behind another match. Throws DataError
  // where a match takes more steps than any sensible pattern does.
  std::optional<Match> next();

 private:
  struct Free {
    void operator()(pcre2_real_match_data_8* data) const;
  };
  const Regex& regex_;
  std::unique_ptr<pcre2_real_match_data_8, Free> data_;
  std::string_view text_;
  size_t from_ = 0;
  std::optional<size_t> last_end_;
};

}  // namespace parlat
