#include "parlat/train/step_record.h"

namespace parlat {

using nlohmann::json;

SentBytes sent_bytes(const Traffic& traffic) {
  return {.all_to_all = traffic[Collective::kAllToAll].bytes,
          .all_gather = traffic[Collective::kAllGather].bytes,
          .reduce_scatter = traffic[Collective::kReduceScatter].bytes,
          .all_reduce = traffic[Collective::kAllReduce].bytes,
          .send_recv = traffic[Collective::kSendRecv].bytes};
}

json to_json(const std::vector<MemoryMeter::Site>& sites) {
  json bytes = json::object();
  for (const MemoryMeter::Site& site : sites) bytes[site.name] = site.bytes;
  return bytes;
}

json to_json(const StepRecord& record) {
  return {{"step", record.step},
          {"loss", record.loss},
          {"grad_norm", record.gradient_norm},
          {"lr", record.learning_rate},
          {"tokens", record.step * record.tokens},
          {"tokens_per_s", static_cast<double>(record.tokens) / record.seconds},
          {"sent_bytes", to_json(sent_bytes(record.sent))},
          {"peak_bytes", record.peak_bytes},
          {"mfu", record.mfu}};
}

}  // namespace parlat
