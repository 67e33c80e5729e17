#include "parlat/io/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <utility>

#include "parlat/base/error.h"
#include "parlat/io/oniguruma.h"
#include "parlat/io/quote.h"
#include "parlat/io/utf8.h"

namespace parlat {

namespace {

// Of one match. Patterns of tokenizers take some dozens of steps, or as many as a run is long where a group repeats;
// those that backtrack without end reach this within milliseconds. The memory is what so many steps may need.
constexpr uint32_t kMostSteps = 1'000'000;
constexpr uint32_t kMostKilobytes = 256'000;

std::string reason(int code) {
  std::array<PCRE2_UCHAR, 256> text = {};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

}  // namespace

void Regex::Free::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }
void Regex::Free::operator()(pcre2_real_match_context_8* context) const { pcre2_match_context_free(context); }
void RegexMatcher::Free::operator()(pcre2_real_match_data_8* data) const { pcre2_match_data_free(data); }

Regex::Regex(std::string_view pattern, std::string name)
    : Regex(pcre2_from_oniguruma(pattern, name), name, PCRE2_UCP | PCRE2_MULTILINE) {}

Regex Regex::literal(std::string_view text, std::string name) { return {text, std::move(name), PCRE2_LITERAL}; }

Regex::Regex(std::string_view pattern, std::string name, unsigned options) : name_(std::move(name)) {
  const std::unique_ptr<pcre2_compile_context, void (*)(pcre2_compile_context*)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);  // whatever the installed library was built with
  int error = 0;
  size_t offset = 0;
  code_.reset(pcre2_compile(units(pattern), pattern.size(), options | PCRE2_UTF, &error, &offset, context.get()));
  if (!code_) throw DataError("{}: {} is no pattern: {}", name_, quote(pattern), reason(error));
  // Where there is no compiler for this machine, the same is interpreted.
  pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
  limits_.reset(pcre2_match_context_create(nullptr));
  pcre2_set_match_limit(limits_.get(), kMostSteps);
  pcre2_set_heap_limit(limits_.get(), kMostKilobytes);
}

RegexMatcher::RegexMatcher(const Regex& regex)
    : regex_(regex), data_(pcre2_match_data_create_from_pattern(regex.code_.get(), nullptr)) {}

void RegexMatcher::start(std::string_view text) {
  text_ = text;
  from_ = 0;
  last_end_.reset();
}

std::optional<RegexMatcher::Match> RegexMatcher::next() {
  while (from_ <= text_.size()) {
    const auto match = [&](uint32_t options) {
      return pcre2_match(regex_.code_.get(), units(text_), text_.size(), from_, options | PCRE2_NO_UTF_CHECK,
                         data_.get(), regex_.limits_.get());
    };
    int found = match(0);
    // The machine code has 32 kB of stack; the interpreter has the heap.
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = match(PCRE2_NO_JIT);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) throw DataError("{}: the pattern could not be matched: {}", regex_.name_, reason(found));
    const size_t* const ends = pcre2_get_ovector_pointer(data_.get());
    const Match result{ends[0], ends[1]};
    if (result.begin != result.end || last_end_ != result.end) {
      from_ = result.end;
      last_end_ = result.end;
      return result;
    }
    if (from_ == text_.size()) break;
    from_ += utf8_character_length(text_, from_);
  }
  from_ = text_.size() + 1;
  return std::nullopt;
}

}  // namespace parlat
