#include "parlat/bench/comm_bench.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

#include "parlat/base/error.h"
#include "parlat/base/spread.h"

namespace parlat {

namespace {

constexpr double kSampleMs = 0.5;  // a sample lasts at least about this long: timers and wake-ups cost microseconds
constexpr int kMaxCalls = 100;

// One collective on tensors of its own.
struct CollectiveCase {
  Collective kind;
  std::function<void()> run;
  Tensor result;  // what run() must have made equal to want the first time
  Tensor want;
};

// Small whole numbers that tell where they come from, where they go and their position; their sums are exact.
Tensor coded(int64_t count, int from, int to) {
  return ((at::arange(count, at::kLong) + 3 * from + 5 * to) % 64).to(at::kFloat);
}

std::vector<Tensor> for_ranks(int ranks, const std::function<Tensor(int)>& make) {
  std::vector<Tensor> tensors;
  for (int p = 0; p < ranks; ++p) tensors.push_back(make(p));
  return tensors;
}

Tensor sum_of(const std::vector<Tensor>& tensors) { return at::stack(tensors).sum(0); }

CollectiveCase make_case(Collective kind, Communicator& comm, int64_t count) {
  const int ranks = comm.size(), rank = comm.rank();
  const int64_t part = (count + ranks - 1) / ranks;
  const Tensor own = coded(count, rank, 0);
  switch (kind) {
    case Collective::kAllToAll: {
      const auto send = for_ranks(ranks, [&](int p) { return coded(part, rank, p); });
      const Tensor all = at::zeros({ranks * part});
      return {kind, [&comm, send, all, part] { comm.all_to_all(send, all.split(part), "bench").wait(); }, all,
              at::cat(for_ranks(ranks, [&](int p) { return coded(part, p, rank); }))};
    }
    case Collective::kAllGather: {
      const Tensor all = at::zeros({ranks * count});
      return {kind, [&comm, own, all, count] { comm.all_gather(own, all.split(count), "bench").wait(); }, all,
              at::cat(for_ranks(ranks, [&](int p) { return coded(count, p, 0); }))};
    }
    case Collective::kReduceScatter: {
      const auto parts = for_ranks(ranks, [&](int p) { return coded(part, rank, p); });
      const Tensor sum = at::zeros({part});
      return {kind, [&comm, parts, sum] { comm.reduce_scatter(parts, sum, "bench").wait(); }, sum,
              sum_of(for_ranks(ranks, [&](int p) { return coded(part, p, rank); }))};
    }
    case Collective::kAllReduce:
      return {kind, [&comm, own] { comm.all_reduce(own, "bench").wait(); }, own,
              sum_of(for_ranks(ranks, [&](int p) { return coded(count, p, 0); }))};
    case Collective::kSendRecv: {
      const int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
      const Tensor received = at::zeros({count});
      return {kind, [&comm, own, to, received, from] { comm.send_recv(own, to, received, from, "bench").wait(); },
              received, coded(count, from, 0)};
    }
    case Collective::kBroadcast:
      return {kind, [&comm, own] { comm.broadcast(own, 0, "bench").wait(); }, own, coded(count, 0, 0)};
    case Collective::kBarrier:
      break;
  }
  throw InternalError(fmt::format("no case of {}", name(kind)));
}

// Milliseconds of `calls` calls in a row, after a barrier.
double time_calls(const CollectiveCase& test, Communicator& comm, int calls) {
  comm.barrier("bench");
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) test.run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

nlohmann::json measure(const CollectiveCase& test, Communicator& comm, int repeats) {
  const Traffic before = comm.traffic();
  test.run();
  const double sent_bytes = comm.max_over_ranks(static_cast<double>((comm.traffic() - before).bytes()), "bench");
  PARLAT_ASSERT(at::equal(test.result, test.want), "{} of {} elements: wrong result on rank {}", name(test.kind),
                test.want.numel(), comm.rank());

  const double once_ms = comm.max_over_ranks(time_calls(test, comm, 1), "bench");
  const int calls = std::clamp(static_cast<int>(std::ceil(kSampleMs / once_ms)), 1, kMaxCalls);
  std::vector<double> samples;
  for (int i = 0; i < repeats; ++i) {
    samples.push_back(comm.max_over_ranks(time_calls(test, comm, calls), "bench") / calls);
  }
  const Spread ms = spread_of(samples);
  return {{"collective", name(test.kind)},
          {"backend", comm.backend()},
          {"ranks", comm.size()},
          {"ms", to_json(ms)},
          {"sent_bytes", static_cast<int64_t>(sent_bytes)},
          {"gbytes_per_s", sent_bytes / (ms.median * 1e6)}};
}

}  // namespace

std::vector<nlohmann::json> bench_comm(Communicator& comm, const CommBenchOptions& options) {
  if (options.repeats < 1) throw ConfigError("repeats: expected at least 1, got {}", options.repeats);
  std::vector<nlohmann::json> rows;
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    if (static_cast<Collective>(kind) == Collective::kBarrier) continue;
    for (const int64_t bytes : options.bytes) {
      const auto width = static_cast<int64_t>(sizeof(float));
      if (bytes < width || bytes % width != 0) throw ConfigError("bytes: expected a multiple of 4, got {}", bytes);
      nlohmann::json row =
          measure(make_case(static_cast<Collective>(kind), comm, bytes / width), comm, options.repeats);
      row["bytes"] = bytes;
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace parlat
