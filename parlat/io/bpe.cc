#include "parlat/io/bpe.h"

#include <bit>
#include <queue>
#include <tuple>
#include <utility>

#include "parlat/base/error.h"

namespace parlat {

namespace {

constexpr uint64_t kNoPair = UINT64_MAX;  // tokens are at least 0

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

uint64_t hash(uint64_t pair) {
  pair *= 0x9E3779B97F4A7C15u;
  return pair ^ pair >> 32;
}

// A token within a word, and its neighbours by index; -1 where there is none.
struct Symbol {
  int32_t token;
  bool merged = false;  // into its left neighbour
  int64_t previous, next;
};

struct Candidate {
  uint32_t rank;
  int32_t result;
  int64_t left;
  bool operator<(const Candidate& other) const {  // the top of a priority queue is the largest
    return std::tie(rank, left) > std::tie(other.rank, other.left);
  }
};

}  // namespace

Bpe::Bpe(const std::array<int32_t, 256>& byte_tokens, const std::vector<Merge>& merges,
         std::unordered_map<std::string, int32_t> whole_words)
    : byte_tokens_(byte_tokens),
      slots_(std::bit_ceil(2 * merges.size() + 1), Slot{kNoPair, 0, 0}),
      whole_words_(std::move(whole_words)) {
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const uint64_t pair = pair_of(merges[rank].left, merges[rank].right);
    slot_of(pair) = {pair, static_cast<uint32_t>(rank), merges[rank].result};
  }
}

Bpe::Slot& Bpe::slot_of(uint64_t pair) {
  const size_t mask = slots_.size() - 1;
  size_t i = hash(pair) & mask;
  while (slots_[i].pair != pair && slots_[i].pair != kNoPair) i = (i + 1) & mask;
  return slots_[i];
}

const Bpe::Slot* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  const size_t mask = slots_.size() - 1;
  for (size_t i = hash(pair) & mask; slots_[i].pair != kNoPair; i = (i + 1) & mask) {
    if (slots_[i].pair == pair) return &slots_[i];
  }
  return nullptr;
}

void Bpe::encode(std::string_view word, std::vector<int64_t>& tokens) const {
  if (!whole_words_.empty()) {
    const auto whole = whole_words_.find(std::string(word));
    if (whole != whole_words_.end()) return tokens.push_back(whole->second);
  }
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  for (const char c : word) {
    const int32_t token = byte_tokens_[static_cast<unsigned char>(c)];
    if (token == kNoToken) {
      throw DataError("text: byte 0x{:02x} has no token in this vocabulary", static_cast<unsigned char>(c));
    }
    const auto i = static_cast<int64_t>(symbols.size());
    symbols.push_back({.token = token, .previous = i - 1, .next = i + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;

  std::priority_queue<Candidate> candidates;
  const auto consider = [&](int64_t left) {
    if (left < 0 || symbols[left].next < 0) return;
    const Slot* const slot = find(symbols[left].token, symbols[symbols[left].next].token);
    if (slot != nullptr) candidates.push({slot->rank, slot->result, left});
  };
  for (int64_t i = 0; i + 1 < static_cast<int64_t>(symbols.size()); ++i) consider(i);
  while (!candidates.empty()) {
    const Candidate top = candidates.top();
    candidates.pop();
    Symbol& left = symbols[top.left];
    if (left.merged || left.next < 0) continue;
    Symbol& right = symbols[left.next];
    // Either side may have changed since; another pair of the same result keeps this place, as it does in `tokenizers`.
    const Slot* const slot = find(left.token, right.token);
    if (slot == nullptr || slot->result != top.result) continue;
    left.token = top.result;
    right.merged = true;
    left.next = right.next;
    if (left.next >= 0) symbols[left.next].previous = top.left;
    consider(left.previous);
    consider(top.left);
  }
  for (int64_t i = 0; i >= 0; i = symbols[i].next) tokens.push_back(symbols[i].token);
}

}  // namespace parlat
