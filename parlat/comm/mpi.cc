// Ranks as processes under mpirun. Blocks travel as bytes by Isend and Irecv; waiting polls, so that a failed or silent
// peer ends the wait. A rank calls MPI from one thread; while its exchanges are under way, another keeps them moving.
#include <ATen/ATen.h>
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>

#include "parlat/base/error.h"
#include "parlat/comm/communicator.h"

namespace parlat {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kChunkBytes = int64_t{1} << 30;  // MPI counts are ints
constexpr size_t kReasonBytes = 1000;              // small enough that sending it never waits for the receiver
constexpr auto kGrace = std::chrono::seconds(5);   // for the others to report a failure before this rank exits
constexpr auto kEchoDelay = std::chrono::milliseconds(300);
enum ControlTag { kFailed = 1, kLeaving = 2 };

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return text;
}

void check(int code, const std::string& what) {
  if (code != MPI_SUCCESS) throw CommError("{}: {}", what, error_text(code));
}

// Lets other processes run: ranks may outnumber cores, and a rank that spins takes the core its peer needs.
class Backoff {
 public:
  void pause() {
    if (++pauses_ < kYields) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
  }

 private:
  static constexpr int kYields = 200;
  static constexpr auto kSleep = std::chrono::microseconds(50);
  int pauses_ = 0;
};

// MPI moves bytes only while somebody calls it: without this thread an exchange would stand still while its rank
// computes. It sleeps while nothing is under way. The interval is what a fast wire needs to be kept busy from the
// buffers of a socket, for about 1 % of a core.
class Progress {
 public:
  explicit Progress(MPI_Comm comm) : comm_(comm), thread_([this] { run(); }) {}
  ~Progress() {
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

// This process among all of them: who failed, and the channel that tells it. A process is one rank of one MPI job, so
// there is one.
class Job {
 public:
  Job() {
    int provided = 0;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init");
    check(MPI_Comm_dup(MPI_COMM_WORLD, &control_), "MPI_Init");
    check(MPI_Comm_set_errhandler(control_, MPI_ERRORS_RETURN), "MPI_Init");
    MPI_Comm_rank(control_, &rank_);
    MPI_Comm_size(control_, &size_);
    // An MPI built without threads leaves exchanges to whoever waits.
    if (provided == MPI_THREAD_MULTIPLE) progress_ = std::make_unique<Progress>(control_);
  }

  // Held by an exchange while it is under way.
  std::shared_ptr<void> under_way() const { return progress_ ? progress_->under_way() : nullptr; }

  // The first failure that this rank knows of counts; its own is told to the others.
  void fail(const std::string& reason) {
    if (failed()) return;
    failed_rank_ = rank_;
    reason_ = reason.substr(0, std::min(reason.find('\n'), kReasonBytes));
    tell_others(kFailed, reason_);
  }

  // Throws CommError when this rank has failed or another one has told so.
  void throw_if_failed(const std::string& what) {
    if (!failed()) hear_failure();
    if (failed()) throw CommError("{}: rank {} failed: {}", what, failed_rank_, reason_);
  }

  bool failed() const { return failed_rank_ >= 0; }

  // These stay until the process ends.
  void strand(const std::vector<Tensor>& tensors) { stranded_.insert(stranded_.end(), tensors.begin(), tensors.end()); }

  // Returns when every rank has said that it leaves, or after the grace period. The rank that failed first comes first,
  // so that its exit code is mpirun's.
  void leave() {
    tell_others(kLeaving, "");
    const auto deadline = Clock::now() + kGrace;
    Backoff backoff;
    for (int left = 1; left < size_ && Clock::now() < deadline; backoff.pause()) {
      if (receive(kLeaving)) ++left;
    }
    if (failed_rank_ != rank_) std::this_thread::sleep_for(kEchoDelay);
  }

  void finalize() {
    progress_.reset();
    MPI_Comm_free(&control_);
    MPI_Finalize();
  }

 private:
  void tell_others(ControlTag tag, const std::string& text) {
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
  bool receive(ControlTag tag) {
    int there = 0, bytes = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, tag, control_, &there, &status) != MPI_SUCCESS || !there) return false;
    MPI_Get_count(&status, MPI_CHAR, &bytes);
    text_.resize(bytes);
    sender_ = status.MPI_SOURCE;
    MPI_Recv(text_.data(), bytes, MPI_CHAR, sender_, tag, control_, MPI_STATUS_IGNORE);
    return true;
  }

  void hear_failure() {
    if (!receive(kFailed)) return;
    failed_rank_ = sender_;
    reason_ = text_;
  }

  MPI_Comm control_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  int failed_rank_ = -1;
  std::string reason_;
  int sender_ = -1;
  std::string text_;
  std::vector<Tensor> stranded_;
  std::unique_ptr<Progress> progress_;
};

std::shared_ptr<Job>& job() {
  static std::shared_ptr<Job> job;
  return job;
}

// One exchange under way, in messages of at most kChunkBytes.
struct Pending {
  struct Message {
    int peer;
    int receive_bytes;  // kSent: goes to the peer
  };
  static constexpr int kSent = -1;

  std::string what;
  std::vector<Tensor> send, receive;
  std::vector<MPI_Request> requests;
  std::vector<Message> messages;  // of each request
  std::shared_ptr<void> under_way;
};

class MpiCommunicator final : public Communicator {
 public:
  // Owns comm. members: world rank of each rank.
  MpiCommunicator(MPI_Comm comm, std::vector<int> members, std::shared_ptr<Traffic> traffic, CommOptions options)
      : Communicator(rank_in(comm), static_cast<int>(members.size()), std::move(traffic)),
        comm_(comm),
        members_(std::move(members)),
        options_(options),
        job_(job()) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    int* bound = nullptr;
    int set = 0;
    MPI_Comm_get_attr(comm_, MPI_TAG_UB, &bound, &set);
    if (set) tag_bound_ = *bound;
  }

  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized && !job_->failed()) MPI_Comm_free(&comm_);
  }

  std::unique_ptr<Communicator> split(int color) override {
    // The exchange comes first because MPI_Comm_split has no timeout: after it every rank is known to be here.
    const std::vector<int> ranks = ranks_of_color(color);
    MPI_Comm group = MPI_COMM_NULL;
    check(MPI_Comm_split(comm_, color, rank_, &group), "split");
    std::vector<int> members;
    for (const int rank : ranks) members.push_back(members_[rank]);
    return std::make_unique<MpiCommunicator>(group, std::move(members), traffic_, options_);
  }

  void fail(const std::string& reason) override { job_->fail(reason); }
  const char* backend() const override { return "mpi"; }

 protected:
  Handle do_exchange(std::vector<Tensor> send, std::vector<Tensor> receive, const std::string& what) override;

 private:
  static int rank_in(MPI_Comm comm) {
    int rank = 0;
    MPI_Comm_rank(comm, &rank);
    return rank;
  }

  void start(Pending& pending);
  void finish(Pending& pending);
  void check_arrivals(Pending& pending, std::vector<MPI_Status>& statuses, bool has_errors);
  void strand(const Pending& pending);
  [[noreturn]] void give_up(const Pending& pending, const std::string& reason);
  std::string late_ranks(const Pending& pending) const;

  MPI_Comm comm_;
  const std::vector<int> members_;
  const CommOptions options_;
  const std::shared_ptr<Job> job_;
  int tag_bound_ = 32767;
  size_t exchanges_ = 0;
};

Handle MpiCommunicator::do_exchange(std::vector<Tensor> send, std::vector<Tensor> receive, const std::string& what) {
  job_->throw_if_failed(what);
  const auto pending = std::make_shared<Pending>();
  pending->what = what;
  pending->send = std::move(send);
  pending->receive = std::move(receive);
  start(*pending);
  pending->under_way = job_->under_way();
  return Handle([this, pending] { finish(*pending); });
}

void MpiCommunicator::start(Pending& pending) {
  // A rank that is in another exchange has another tag, so the two never take each other's bytes.
  const size_t key = exchanges_++ * 31 + std::hash<std::string>()(pending.what);
  const int tag = static_cast<int>(key % static_cast<size_t>(tag_bound_));
  // An empty tensor is a message of no bytes, so that a peer which expects some notices.
  const auto add = [&](const Tensor& tensor, int peer, bool sends) {
    if (!tensor.defined()) return;
    auto* data = static_cast<char*>(tensor.data_ptr());
    auto left = static_cast<int64_t>(tensor.nbytes());
    do {
      const int bytes = static_cast<int>(std::min(left, kChunkBytes));
      MPI_Request request;
      const int code = sends ? MPI_Isend(data, bytes, MPI_BYTE, peer, tag, comm_, &request)
                             : MPI_Irecv(data, bytes, MPI_BYTE, peer, tag, comm_, &request);
      if (code != MPI_SUCCESS) give_up(pending, fmt::format("{}: {}", pending.what, error_text(code)));
      pending.requests.push_back(request);
      pending.messages.push_back({peer, sends ? Pending::kSent : bytes});
      left -= bytes, data += bytes;
    } while (left > 0);
  };
  // Every rank begins with its right neighbour, so that no rank is everybody's first.
  for (int i = 1; i < size_; ++i) add(pending.receive[(rank_ + size_ - i) % size_], (rank_ + size_ - i) % size_, false);
  for (int i = 1; i < size_; ++i) add(pending.send[(rank_ + i) % size_], (rank_ + i) % size_, true);
  const Tensor& own = pending.receive[rank_];
  if (own.defined() && own.nbytes() > 0 && own.data_ptr() != pending.send[rank_].data_ptr()) {
    std::memcpy(own.data_ptr(), pending.send[rank_].data_ptr(), own.nbytes());
  }
}

void MpiCommunicator::finish(Pending& pending) {
  const auto deadline = Clock::now() + options_.timeout;
  const int count = static_cast<int>(pending.requests.size());
  std::vector<MPI_Status> statuses(count);
  Backoff backoff;
  while (true) {
    int done = 0;
    const int code = MPI_Testall(count, pending.requests.data(), &done, statuses.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
      give_up(pending, fmt::format("{}: {}", pending.what, error_text(code)));
    }
    if (done || code != MPI_SUCCESS) return check_arrivals(pending, statuses, code == MPI_ERR_IN_STATUS);
    try {
      job_->throw_if_failed(pending.what);
    } catch (const CommError&) {
      strand(pending);
      throw;
    }
    if (Clock::now() > deadline) {
      give_up(pending, fmt::format("{}: no answer from {} within {} s", pending.what, late_ranks(pending),
                                   std::chrono::duration<double>(options_.timeout).count()));
    }
    backoff.pause();
  }
}

// MPI takes a message that is shorter than what was expected without a word.
void MpiCommunicator::check_arrivals(Pending& pending, std::vector<MPI_Status>& statuses, bool has_errors) {
  for (size_t i = 0; i < statuses.size(); ++i) {
    const auto& [peer, expected] = pending.messages[i];
    const int code = has_errors ? statuses[i].MPI_ERROR : MPI_SUCCESS;
    if (code != MPI_SUCCESS && code != MPI_ERR_PENDING) {
      give_up(pending, fmt::format("{}: {} bytes expected from rank {}: {}", pending.what, expected, members_[peer],
                                   error_text(code)));
    }
    int received = expected;
    if (expected != Pending::kSent && code == MPI_SUCCESS) MPI_Get_count(&statuses[i], MPI_BYTE, &received);
    if (received != expected) {
      give_up(pending, fmt::format("{}: rank {} sends {} bytes to rank {}, which expects {}", pending.what,
                                   members_[peer], received, members_[rank_], expected));
    }
  }
}

// MPI may still write to the buffers of a failed exchange.
void MpiCommunicator::strand(const Pending& pending) {
  job_->strand(pending.send);
  job_->strand(pending.receive);
}

void MpiCommunicator::give_up(const Pending& pending, const std::string& reason) {
  strand(pending);
  job_->fail(reason);
  throw CommError("{}", reason);
}

std::string MpiCommunicator::late_ranks(const Pending& pending) const {
  std::vector<bool> late(size_);
  for (size_t i = 0; i < pending.requests.size(); ++i) {
    int done = 0;
    MPI_Request_get_status(pending.requests[i], &done, MPI_STATUS_IGNORE);
    if (!done) late[pending.messages[i].peer] = true;
  }
  std::string text;
  for (int p = 0; p < size_; ++p) {
    if (late[p]) text += fmt::format("{}rank {}", text.empty() ? "" : ", ", members_[p]);
  }
  return text;
}

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(CommOptions options) {
  if (!job()) job() = std::make_shared<Job>();
  MPI_Comm comm = MPI_COMM_NULL;
  check(MPI_Comm_dup(MPI_COMM_WORLD, &comm), "MPI_Comm_dup");
  int size = 0;
  MPI_Comm_size(comm, &size);
  std::vector<int> members(size);
  std::iota(members.begin(), members.end(), 0);
  return std::make_unique<MpiCommunicator>(comm, std::move(members), std::make_shared<Traffic>(), options);
}

void finalize_mpi() {
  if (!job()) return;
  if (job()->failed()) {
    job()->leave();
  } else {
    job()->finalize();
    job().reset();
  }
}

}  // namespace parlat
