#pragma once

#include <array>
#include <cstdint>

namespace parlat {

enum class Collective { kAllToAll, kAllGather, kReduceScatter, kAllReduce, kSendRecv, kBroadcast, kBarrier };
inline constexpr int kCollectiveKinds = 7;
const char* name(Collective kind);  // all_to_all, all_gather, ...

// What one rank has sent, counted at the transport: the payload handed to other ranks (a rank's own part is not sent).
struct Traffic {
  struct Entry {
    int64_t calls = 0;
    int64_t bytes = 0;           // sent to other ranks
    int64_t elements = 0;        // the same in elements
    int64_t shard_elements = 0;  // of gathers: this rank's shard once, however many peers receive it
  };
  std::array<Entry, kCollectiveKinds> entries{};

  Entry& operator[](Collective kind) { return entries[static_cast<int>(kind)]; }
  const Entry& operator[](Collective kind) const { return entries[static_cast<int>(kind)]; }
  int64_t bytes() const;
  // LAGA's tables (arXiv 2607.17644): all-to-all at 4 bytes an element, a gathered shard once at 2 bytes an element.
  // Meaningful for a forward pass only.
  int64_t paper_bytes() const;
  Traffic operator-(const Traffic& earlier) const;
};

}  // namespace parlat
