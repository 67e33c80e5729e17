#include "parlat/tensor/memory_meter.h"

namespace parlat {

class MeterReporter final : public c10::MemoryReportingInfoBase {
 public:
  explicit MeterReporter(MemoryMeter& meter) : meter_(meter) {}

  void reportMemoryUsage(void*, int64_t alloc_size, size_t, size_t, c10::Device) override {
    const int64_t now = meter_.current_.fetch_add(alloc_size) + alloc_size;
    int64_t peak = meter_.peak_.load();
    while (now > peak && !meter_.peak_.compare_exchange_weak(peak, now)) {
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

 private:
  MemoryMeter& meter_;
};

int64_t MemoryMeter::current_bytes() const { return current_.load(); }
int64_t MemoryMeter::peak_bytes() const { return peak_.load(); }

void MemoryMeter::reset() {
  current_ = 0;
  peak_ = 0;
}

MemoryMeter::Scope::Scope(MemoryMeter& meter)
    : guard_(std::make_unique<c10::DebugInfoGuard>(c10::DebugInfoKind::PROFILER_STATE,
                                                   std::make_shared<MeterReporter>(meter))) {}
MemoryMeter::Scope::~Scope() = default;

}  // namespace parlat
