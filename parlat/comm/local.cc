// Ranks as threads of one process. Whoever posts an exchange second copies both directions, straight from the sender's
// buffer to the receiver's; so nothing needs a progress thread and handles may be waited in any order.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "parlat/base/error.h"
#include "parlat/base/printable.h"
#include "parlat/comm/communicator.h"

namespace parlat {

namespace {

constexpr int kYields = 100;
constexpr std::chrono::seconds kGrace(5);

// What all groups of one run_local_ranks share. The mutex guards every group's queues and tickets; copies run outside.
struct World {
  World(int ranks, std::chrono::milliseconds timeout) : timeout(timeout), wake(ranks), running(ranks, true) {}

  // The first failure counts; everybody waiting anywhere is woken. The mutex is held.
  void fail(int world_rank, const std::string& why) {
    if (failed_rank >= 0) return;
    failed_rank = world_rank;
    reason = why.substr(0, why.find('\n'));
    for (std::condition_variable& waiting : wake) waiting.notify_all();
    ended.notify_all();
  }
  void throw_if_failed(const std::string& what) const {
    if (failed_rank >= 0) throw CommError("{}: rank {} failed: {}", what, failed_rank, reason);
  }

  const std::chrono::milliseconds timeout;
  std::mutex mutex;
  std::vector<std::condition_variable> wake;  // one a rank
  std::condition_variable ended;              // a rank has, or has failed
  std::vector<bool> running;
  int failed_rank = -1;
  std::string reason;
};

// Blocks of the meta device are nowhere: only their sizes are held against each other.
struct Block {
  explicit Block(const Tensor& tensor)
      : data(tensor.defined() && !tensor.is_meta() ? tensor.data_ptr() : nullptr),
        bytes(tensor.defined() ? tensor.nbytes() : 0) {}
  void* data;
  size_t bytes;
};

// One rank's side of one exchange.
struct Ticket {
  Ticket(int rank, const std::string& what, const std::vector<Tensor>& send, const std::vector<Tensor>& receive)
      : rank(rank), what(what), open(send.size()) {
    for (size_t p = 0; p < send.size(); ++p) {
      this->send.emplace_back(send[p]);
      this->receive.emplace_back(receive[p]);
      open[p] = static_cast<int>(p) != rank && this->send[p].bytes + this->receive[p].bytes > 0;
      open_count += open[p];
    }
  }

  const int rank;
  const std::string what;
  std::vector<Block> send, receive;
  std::vector<bool> open;  // ranks whose blocks have not moved yet
  std::atomic<int> open_count = 0;
  int copying = 0;  // copies under way: until they end the buffers must live
};

void copy_block(const Block& from, const Block& to) {
  if (from.bytes > 0 && from.data != to.data) std::memcpy(to.data, from.data, from.bytes);
}

// Why the two sides don't belong together; empty if they do. Ranks are named by `members`.
std::string mismatch(const Ticket& mine, const Ticket& theirs, const std::vector<int>& members) {
  const int my_rank = members[mine.rank], their_rank = members[theirs.rank];
  if (mine.what != theirs.what) {
    return fmt::format("rank {} is in '{}' while rank {} is in '{}'", my_rank, mine.what, their_rank, theirs.what);
  }
  const auto differ = [&](int from, int to, size_t sent, size_t expected) {
    return fmt::format("{}: rank {} sends {} bytes to rank {}, which expects {}", mine.what, from, sent, to, expected);
  };
  const size_t out = mine.send[theirs.rank].bytes, out_expected = theirs.receive[mine.rank].bytes;
  if (out != out_expected) return differ(my_rank, their_rank, out, out_expected);
  const size_t in = theirs.send[mine.rank].bytes, in_expected = mine.receive[theirs.rank].bytes;
  if (in != in_expected) return differ(their_rank, my_rank, in, in_expected);
  return "";
}

// The ranks of one communicator.
class Group {
 public:
  Group(std::shared_ptr<World> world, std::vector<int> members)
      : world_(std::move(world)), members_(std::move(members)), queues_(members_.size() * members_.size()) {}

  const std::vector<int>& members() const { return members_; }
  World& world() { return *world_; }

  void post(const std::shared_ptr<Ticket>& mine);
  void wait(const std::shared_ptr<Ticket>& mine);
  std::shared_ptr<Group> child(int64_t split, int color, const std::vector<int>& ranks);

 private:
  using Queue = std::deque<std::shared_ptr<Ticket>>;
  // Tickets of `poster` that `peer` has not met yet. Both meet every exchange in the same order.
  Queue& queue(int poster, int peer) { return queues_[poster * members_.size() + peer]; }
  int size() const { return static_cast<int>(members_.size()); }
  std::vector<std::shared_ptr<Ticket>> meet(const std::shared_ptr<Ticket>& mine);
  static void settle(Ticket& ticket, int peer);
  void withdraw(const std::shared_ptr<Ticket>& mine);
  std::string late_ranks(const Ticket& mine) const;

  struct Child {
    std::shared_ptr<Group> group;
    size_t taken = 0;
  };
  const std::shared_ptr<World> world_;
  const std::vector<int> members_;  // world rank of each rank
  std::vector<Queue> queues_;
  std::map<std::pair<int64_t, int>, Child> children_;
};

// Queues this ticket for the ranks that come later and returns the tickets of those that came earlier.
std::vector<std::shared_ptr<Ticket>> Group::meet(const std::shared_ptr<Ticket>& mine) {
  const std::lock_guard lock(world_->mutex);
  world_->throw_if_failed(mine->what);
  for (int p = 0; p < size(); ++p) {
    if (queue(p, mine->rank).empty()) continue;
    const std::string difference = mismatch(*mine, *queue(p, mine->rank).front(), members_);
    if (difference.empty()) continue;
    world_->fail(members_[mine->rank], difference);
    throw CommError("{}", difference);
  }
  std::vector<std::shared_ptr<Ticket>> met;
  for (int p = 0; p < size(); ++p) {
    if (p == mine->rank) continue;
    Queue& theirs = queue(p, mine->rank);
    if (theirs.empty()) {
      queue(mine->rank, p).push_back(mine);
      continue;
    }
    met.push_back(std::move(theirs.front()));
    theirs.pop_front();
    ++met.back()->copying;
    ++mine->copying;
  }
  return met;
}

void Group::settle(Ticket& ticket, int peer) {
  --ticket.copying;
  ticket.open_count -= ticket.open[peer];
  ticket.open[peer] = false;
}

void Group::post(const std::shared_ptr<Ticket>& mine) {
  for (const std::shared_ptr<Ticket>& theirs : meet(mine)) {
    copy_block(theirs->send[mine->rank], mine->receive[theirs->rank]);
    copy_block(mine->send[theirs->rank], theirs->receive[mine->rank]);
    const std::lock_guard lock(world_->mutex);
    settle(*mine, theirs->rank);
    settle(*theirs, mine->rank);
    world_->wake[members_[theirs->rank]].notify_one();
  }
  copy_block(mine->send[mine->rank], mine->receive[mine->rank]);
}

void Group::wait(const std::shared_ptr<Ticket>& mine) {
  // Ranks that arrive almost together, the usual case, are faster without going to sleep.
  for (int i = 0; i < kYields && mine->open_count > 0; ++i) sched_yield();
  if (mine->open_count == 0) return;
  std::unique_lock lock(world_->mutex);
  std::condition_variable& wake = world_->wake[members_[mine->rank]];
  wake.wait_for(lock, world_->timeout, [&] { return mine->open_count == 0 || world_->failed_rank >= 0; });
  if (mine->open_count == 0) return;

  withdraw(mine);
  wake.wait(lock, [&] { return mine->copying == 0; });
  if (mine->open_count == 0) return;  // the last copy was under way when the time was over
  world_->throw_if_failed(mine->what);
  const std::string late = fmt::format("{}: no answer from {} within {} s", mine->what, late_ranks(*mine),
                                       std::chrono::duration<double>(world_->timeout).count());
  world_->fail(members_[mine->rank], late);
  throw CommError("{}", late);
}

// Nobody meets this ticket any more.
void Group::withdraw(const std::shared_ptr<Ticket>& mine) {
  for (int p = 0; p < size(); ++p) std::erase(queue(mine->rank, p), mine);
}

std::string Group::late_ranks(const Ticket& mine) const {
  std::string text;
  for (int p = 0; p < size(); ++p) {
    if (mine.open[p]) text += fmt::format("{}rank {}", text.empty() ? "" : ", ", members_[p]);
  }
  return text;
}

// The same Group for all `ranks` of this color; forgotten when the last of them has asked.
std::shared_ptr<Group> Group::child(int64_t split, int color, const std::vector<int>& ranks) {
  const std::lock_guard lock(world_->mutex);
  Child& entry = children_[{split, color}];
  if (!entry.group) {
    std::vector<int> members;
    for (const int rank : ranks) members.push_back(members_[rank]);
    entry.group = std::make_shared<Group>(world_, std::move(members));
  }
  const std::shared_ptr<Group> group = entry.group;
  if (++entry.taken == ranks.size()) children_.erase({split, color});
  return group;
}

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(int rank, std::shared_ptr<Group> group, std::shared_ptr<Traffic> traffic)
      : Communicator(rank, static_cast<int>(group->members().size()), std::move(traffic)), group_(std::move(group)) {}

  std::unique_ptr<Communicator> split(int color) override {
    const std::vector<int> ranks = ranks_of_color(color);
    const auto place = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    return std::make_unique<LocalCommunicator>(static_cast<int>(place), group_->child(splits_++, color, ranks),
                                               traffic_);
  }

  void fail(const std::string& reason) override {
    const std::lock_guard lock(group_->world().mutex);
    group_->world().fail(group_->members()[rank_], reason);
  }

  const char* backend() const override { return "local"; }

 protected:
  Handle do_exchange(std::vector<Tensor> send, std::vector<Tensor> receive, const std::string& what) override {
    const auto ticket = std::make_shared<Ticket>(rank_, what, send, receive);
    group_->post(ticket);
    return Handle(
        [group = group_, ticket, send = std::move(send), receive = std::move(receive)] { group->wait(ticket); });
  }

 private:
  const std::shared_ptr<Group> group_;
  int64_t splits_ = 0;
};

// Returns when all ranks have. Once one has failed the others have the timeout (and no less than kGrace) to notice: a
// rank that waits for nobody (a file that does not answer, an endless loop) can't be ended, so the process is.
void await_ranks(World& world) {
  std::unique_lock lock(world.mutex);
  const auto all_ended = [&] { return std::count(world.running.begin(), world.running.end(), true) == 0; };
  world.ended.wait(lock, [&] { return world.failed_rank >= 0 || all_ended(); });
  const auto grace = std::max<std::chrono::milliseconds>(world.timeout, kGrace);
  if (world.ended.wait_for(lock, grace, all_ended)) return;
  std::string late;
  for (size_t rank = 0; rank < world.running.size(); ++rank) {
    if (world.running[rank]) late += fmt::format("{}rank {}", late.empty() ? "" : ", ", rank);
  }
  fmt::print(stderr, "parlat: error: rank {} failed: {}; {} did not end within {} s\n", world.failed_rank,
             printable(world.reason), late, std::chrono::duration<double>(grace).count());
  _exit(CommError("").exit_code());
}

}  // namespace

void run_local_ranks(int ranks, const std::function<void(Communicator&)>& body, int threads, CommOptions options) {
  if (ranks < 1) throw ConfigError("ranks: expected at least 1, got {}", ranks);
  const auto world = std::make_shared<World>(ranks, options.timeout);
  std::vector<int> members(ranks);
  for (int rank = 0; rank < ranks; ++rank) members[rank] = rank;
  const auto group = std::make_shared<Group>(world, std::move(members));

  std::vector<std::exception_ptr> errors(ranks);
  const auto run_rank = [&](int rank) {
    at::set_num_threads(threads);
    LocalCommunicator comm(rank, group, std::make_shared<Traffic>());
    try {
      body(comm);
    } catch (const std::exception& error) {
      errors[rank] = std::current_exception();
      comm.fail(error.what());
    }
    const std::lock_guard lock(world->mutex);
    world->running[rank] = false;
    world->ended.notify_all();
  };
  std::vector<std::thread> others;
  for (int rank = 0; rank < ranks; ++rank) others.emplace_back(run_rank, rank);
  await_ranks(*world);
  for (std::thread& other : others) other.join();

  if (world->failed_rank >= 0 && errors[world->failed_rank]) std::rethrow_exception(errors[world->failed_rank]);
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace parlat
