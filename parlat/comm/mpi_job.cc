#include "parlat/comm/mpi_job.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "parlat/base/error.h"

namespace parlat {

namespace {

constexpr size_t kReasonBytes = 1000;             // small enough that sending it never waits for the receiver
constexpr auto kGrace = std::chrono::seconds(5);  // for the others to report a failure before this rank exits
constexpr auto kEchoDelay = std::chrono::milliseconds(300);
enum ControlTag { kFailed = 1, kLeaving = 2 };

}  // namespace

std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return text;
}

void check_mpi(int code, const std::string& what) {
  if (code != MPI_SUCCESS) throw CommError("{}: {}", what, mpi_error_text(code));
}

// MPI moves bytes only while somebody calls it: without this thread an exchange would stand still while its rank
// computes. It sleeps while nothing is under way. The interval is what a fast wire needs to be kept busy from the
// buffers of a socket, for about 1 % of a core.
class MpiProgress {
 public:
  explicit MpiProgress(MPI_Comm comm) : comm_(comm), thread_([this] { run(); }) {}
  ~MpiProgress() {
    change([this] { stop_ = true; });
    thread_.join();
  }

  // An exchange is under way for as long as this lives.
  std::shared_ptr<void> under_way() {
    change([this] { ++count_; });
    return {nullptr, [this](void*) { change([this] { --count_; }); }};
  }

 private:
  static constexpr auto kInterval = std::chrono::microseconds(300);

  template <typename Change>
  void change(const Change& apply) {
    const std::lock_guard lock(mutex_);
    apply();
    changed_.notify_one();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (count_ == 0) {
        changed_.wait(lock);
        continue;
      }
      lock.unlock();
      int there = 0;
      MPI_Iprobe(MPI_ANY_SOURCE, kFailed, comm_, &there, MPI_STATUS_IGNORE);
      std::this_thread::sleep_for(kInterval);
      lock.lock();
    }
  }

  const MPI_Comm comm_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

MpiJob::MpiJob() {
  int provided = 0;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init");
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &control_), "MPI_Init");
  check_mpi(MPI_Comm_set_errhandler(control_, MPI_ERRORS_RETURN), "MPI_Init");
  MPI_Comm_rank(control_, &rank_);
  MPI_Comm_size(control_, &size_);
  // An MPI built without threads leaves exchanges to whoever waits.
  if (provided == MPI_THREAD_MULTIPLE) progress_ = std::make_unique<MpiProgress>(control_);
}

MpiJob::~MpiJob() = default;

std::shared_ptr<void> MpiJob::under_way() const { return progress_ ? progress_->under_way() : nullptr; }

void MpiJob::fail(const std::string& reason) {
  if (failed()) return;
  failed_rank_ = rank_;
  reason_ = reason.substr(0, std::min(reason.find('\n'), kReasonBytes));
  tell_others(kFailed, reason_);
}

void MpiJob::throw_if_failed(const std::string& what) {
  if (!failed()) hear_failure();
  if (failed()) throw CommError("{}: rank {} failed: {}", what, failed_rank_, reason_);
}

void MpiJob::leave() {
  tell_others(kLeaving, "");
  const auto deadline = std::chrono::steady_clock::now() + kGrace;
  MpiBackoff backoff;
  for (int left = 1; left < size_ && std::chrono::steady_clock::now() < deadline; backoff.pause()) {
    if (receive(kLeaving)) ++left;
  }
  if (failed_rank_ != rank_) std::this_thread::sleep_for(kEchoDelay);
}

void MpiJob::finalize() {
  progress_.reset();
  MPI_Comm_free(&control_);
  MPI_Finalize();
}

void MpiJob::tell_others(int tag, const std::string& text) {
  // The requests are never completed and the text never freed: the process is about to end.
  const auto* kept = new std::string(text);
  for (int p = 0; p < size_; ++p) {
    MPI_Request request;
    if (p == rank_) continue;
    MPI_Isend(kept->data(), static_cast<int>(kept->size()), MPI_CHAR, p, tag, control_, &request);
    MPI_Request_free(&request);
  }
}

// A control message that has come: its sender is in sender_, its text in text_.
bool MpiJob::receive(int tag) {
  int there = 0, bytes = 0;
  MPI_Status status;
  if (MPI_Iprobe(MPI_ANY_SOURCE, tag, control_, &there, &status) != MPI_SUCCESS || !there) return false;
  MPI_Get_count(&status, MPI_CHAR, &bytes);
  text_.resize(bytes);
  sender_ = status.MPI_SOURCE;
  MPI_Recv(text_.data(), bytes, MPI_CHAR, sender_, tag, control_, MPI_STATUS_IGNORE);
  return true;
}

void MpiJob::hear_failure() {
  if (!receive(kFailed)) return;
  failed_rank_ = sender_;
  reason_ = text_;
}

std::shared_ptr<MpiJob>& mpi_job() {
  static std::shared_ptr<MpiJob> job;
  return job;
}

}  // namespace parlat
