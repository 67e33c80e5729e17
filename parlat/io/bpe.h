#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace parlat {

// Byte pair encoding of single words: bytes become tokens, and of all neighbours that merge, those of the lowest rank
// do so first (of equals the leftmost), until none is left. O(n log n) for n bytes. Sennrich et al., arXiv:1508.07909.
class Bpe {
 public:
  static constexpr int32_t kNoToken = -1;
  struct Merge {
    int32_t left, right, result;
  };

  // byte_tokens: the token of each byte. merges: by rank; of one pair, the last counts. whole_words: those that are one
  // token whatever the merges say.
  Bpe(const std::array<int32_t, 256>& byte_tokens, const std::vector<Merge>& merges,
      std::unordered_map<std::string, int32_t> whole_words);

  // Appends the word's tokens. Throws DataError for a byte that has none.
  void encode(std::string_view word, std::vector<int64_t>& tokens) const;

 private:
  struct Slot {
    uint64_t pair;
    uint32_t rank;
    int32_t result;
  };
  const Slot* find(int32_t left, int32_t right) const;
  Slot& slot_of(uint64_t pair);

  std::array<int32_t, 256> byte_tokens_;
  std::vector<Slot> slots_;  // of a hash table with linear probing, a power of two, at most half full
  std::unordered_map<std::string, int32_t> whole_words_;
};

}  // namespace parlat
