#include "parlat/comm/traffic.h"

namespace parlat {

const char* name(Collective kind) {
  static constexpr std::array<const char*, kCollectiveKinds> kNames = {
      "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "send_recv", "broadcast", "barrier"};
  return kNames[static_cast<int>(kind)];
}

int64_t Traffic::bytes() const {
  int64_t sum = 0;
  for (const Entry& entry : entries) sum += entry.bytes;
  return sum;
}

int64_t Traffic::paper_bytes() const {
  return 4 * (*this)[Collective::kAllToAll].elements + 2 * (*this)[Collective::kAllGather].shard_elements;
}

Traffic Traffic::operator-(const Traffic& earlier) const {
  Traffic result = *this;
  for (int i = 0; i < kCollectiveKinds; ++i) {
    result.entries[i].calls -= earlier.entries[i].calls;
    result.entries[i].bytes -= earlier.entries[i].bytes;
    result.entries[i].elements -= earlier.entries[i].elements;
    result.entries[i].shard_elements -= earlier.entries[i].shard_elements;
  }
  return result;
}

}  // namespace parlat
