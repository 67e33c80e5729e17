#pragma once

#include <string>

namespace parlat {

// What is known of config.json keys that parlat does not read.
// True for bookkeeping, token ids, generation and loss settings: never reported.
bool is_harmless_key(const std::string& key);
// True where the name says that the model computes something else when set (bias, dropout, sliding windows, ...).
bool changes_mathematics(const std::string& key);

}  // namespace parlat
