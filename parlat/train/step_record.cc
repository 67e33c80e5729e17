#include "parlat/train/step_record.h"

namespace parlat {

using nlohmann::json;

json sent_bytes_json(const Traffic& sent) {
  json by_kind;
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    if (sent.entries[kind].calls > 0) by_kind[name(static_cast<Collective>(kind))] = sent.entries[kind].bytes;
  }
  by_kind["total"] = sent.bytes();
  return by_kind;
}

json to_json(const StepRecord& record) {
  return {{"step", record.step},
          {"loss", record.loss},
          {"grad_norm", record.gradient_norm},
          {"lr", record.learning_rate},
          {"tokens", record.step * record.tokens},
          {"tokens_per_s", static_cast<double>(record.tokens) / record.seconds},
          {"sent_bytes", sent_bytes_json(record.sent)},
          {"peak_bytes", record.peak_bytes},
          {"mfu", record.mfu}};
}

}  // namespace parlat
