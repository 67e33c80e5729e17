#include "parlat/base/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "parlat/base/units.h"

namespace parlat {

using std::chrono::steady_clock;

Progress::Progress(std::string what, int64_t total, std::string unit, bool quiet)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      total_(total),
      quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(steady_clock::now()) {}

Progress::~Progress() {
  if (!quiet_ && terminal_ && first_ >= 0) std::fputs("\n", stderr);
}

void Progress::update(int64_t done, const std::string& note) {
  if (quiet_) return;
  const auto now = steady_clock::now();
  const bool start = first_ < 0;
  if (start) first_ = done;
  const auto interval = terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(5000);
  if (!start && done < total_ && now - last_print_ < interval) return;
  last_print_ = now;
  std::fputs(terminal_ ? fmt::format("\r\033[K{}", line(done, note)).c_str() : (line(done, note) + "\n").c_str(),
             stderr);
  std::fflush(stderr);
}

std::string Progress::line(int64_t done, const std::string& note) const {
  const double seconds = std::chrono::duration<double>(steady_clock::now() - start_).count();
  const int64_t moved = done - std::max<int64_t>(first_, 0);
  std::string text = fmt::format("{} {}/{} {}", what_, done, total_, unit_);
  if (terminal_) {
    constexpr int64_t kWidth = 24;
    const int64_t filled = total_ > 0 ? std::min(kWidth, kWidth * done / total_) : 0;
    text = fmt::format("{} [{:=<{}}{: <{}}] {}/{} {}", what_, "", filled, "", kWidth - filled, done, total_, unit_);
  }
  if (moved > 0 && done < total_) text += fmt::format(", {} left", format_seconds(seconds / moved * (total_ - done)));
  return note.empty() ? text : text + ", " + note;
}

}  // namespace parlat
