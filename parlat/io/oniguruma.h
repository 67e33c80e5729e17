#pragma once

#include <string>
#include <string_view>

namespace parlat {

// A regular expression in the syntax of Oniguruma, which the `tokenizers` package compiles, in that of PCRE2 (UTF, UCP
// and MULTILINE set): set operations ([a&&[^b]]), white space, word characters and scripts as Unicode defines them,
// quantifiers on intervals, escapes of other meanings. Throws DataError, beginning with `name`, for what is not known
// to mean the same (back references, \b, named groups, ...): such a pattern would cut text differently without a word.
std::string pcre2_from_oniguruma(std::string_view pattern, const std::string& name);

}  // namespace parlat
