#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include <c10/util/ThreadLocalDebugInfo.h>

namespace parlat {

// Bytes that torch allocates on this thread while a scope is open: what lives now and the peak. Each rank is a thread,
// so a scope measures one rank; torch carries the scope into the backward pass. Storage allocated before the scope
// opened and freed inside it would count negative, so open the scope before the tensors of interest exist.
class MemoryMeter {
 public:
  int64_t current_bytes() const;
  int64_t peak_bytes() const;
  // Peak and current start again from 0: what already lives is not counted.
  void reset();

  class Scope {
   public:
    explicit Scope(MemoryMeter& meter);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::unique_ptr<c10::DebugInfoGuard> guard_;
  };

 private:
  friend class MeterReporter;
  std::atomic<int64_t> current_{0};
  std::atomic<int64_t> peak_{0};
};

}  // namespace parlat
