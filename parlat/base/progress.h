#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace parlat {

// Progress of something a person waits for, on stderr: one line redrawn in place (rate and time left) when stderr is a
// terminal, a plain line every few seconds otherwise, nothing when quiet.
class Progress {
 public:
  Progress(std::string what, int64_t total, std::string unit, bool quiet);
  ~Progress();
  // `note` follows the bar: "loss 2.31, 1,204 tokens/s".
  void update(int64_t done, const std::string& note = "");

 private:
  std::string line(int64_t done, const std::string& note) const;
  std::string what_, unit_;
  int64_t total_, first_ = -1;
  bool quiet_, terminal_;
  std::chrono::steady_clock::time_point start_, last_print_;
};

}  // namespace parlat
