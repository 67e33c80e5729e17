#include "parlat/plan/machine.h"

#include <gmock/gmock.h>

#include <functional>

#include "parlat/base/error.h"

namespace parlat {
namespace {

using ::testing::HasSubstr;

constexpr const char* kText = R"(ranks_per_node = 4
memory_gb = 16
memory_gb_per_s = 100
overlap = 0.5
layer_overhead_us = 20

[link.within]
latency_us = 5
gb_per_s = 10

[gemm.fp32]
size = [16, 256]
tflops = [1, 5]

[attention.fp32]
fused_forward_tflops = 2
fused_backward_tflops = 1
)";

std::string replaced(const std::string& from, const std::string& to) {
  std::string text = kText;
  const size_t at = text.find(from);
  EXPECT_NE(at, text.npos) << from;
  return text.replace(at, from.size(), to);
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(MachineText, ReadsUnits) {
  const Machine machine = parse_machine(kText, "here.toml");
  EXPECT_EQ(machine.ranks_per_node, 4);
  EXPECT_EQ(machine.ranks_at_full_rate, 4);
  EXPECT_EQ(machine.memory_bytes, 16e9);
  EXPECT_EQ(machine.memory_bytes_per_s, 100e9);
  EXPECT_DOUBLE_EQ(machine.layer_overhead_s, 20e-6);
  EXPECT_DOUBLE_EQ(machine.within.latency_s, 5e-6);
  EXPECT_EQ(machine.within.bytes_per_s, 10e9);
  EXPECT_FALSE(machine.between);
  EXPECT_EQ(machine.attention_in("fp32").fused.backward, 1e12);
}

TEST(MachineText, RatesLieOnLinesOverTheLogarithmOfSize) {
  const Machine machine = parse_machine(kText, "here.toml");
  const RateCurve& curve = machine.gemm_in("fp32");
  EXPECT_EQ(curve.at(1), 1e12);
  EXPECT_EQ(curve.at(16), 1e12);
  EXPECT_DOUBLE_EQ(curve.at(64), 3e12);  // half of the way from 2^4 to 2^8
  EXPECT_EQ(curve.at(256), 5e12);
  EXPECT_EQ(curve.at(1e6), 5e12);
}

TEST(MachineText, WhatIsWrittenIsReadAgain) {
  Machine machine = parse_machine(kText, "here.toml");
  machine.between = Link{.latency_s = 3e-6, .bytes_per_s = 2e9, .decode_latency_s = 1e-6};
  machine.hierarchical_gather = true;
  machine.attention["fp32"].eager = KernelRate{1e12, 2e12};
  machine.attention["fp32"].decode_rate = 4e12;
  machine.attention["fp32"].widest_fused = 12345;  // more digits than rates are written with
  machine.attention["fp32"].written_share = 0.25;
  const std::string text = to_toml(machine);
  const Machine again = parse_machine(text, "again.toml");
  EXPECT_EQ(to_toml(again), text);
  EXPECT_TRUE(again.hierarchical_gather);
  EXPECT_EQ(again.between_nodes().bytes_per_s, 2e9);
  EXPECT_EQ(again.between_nodes().decode_latency_s, 1e-6);
  EXPECT_FALSE(again.within.decode_latency_s);
  EXPECT_EQ(again.attention_in("fp32").widest_fused, 12345);
  EXPECT_EQ(again.attention_in("fp32").written_share, 0.25);
}

// What is wrong, in one line with file and key.
TEST(MachineText, ErrorsNameFileAndKey) {
  const auto parse = [](const std::string& text) { return error_of([&] { parse_machine(text, "here.toml"); }); };
  EXPECT_EQ(parse(kText), "no error");
  EXPECT_EQ(parse(replaced("memory_gb = 16", "memory_gb = 0")),
            "here.toml: memory_gb: expected a number above 0 and at most 1e18, got 0");
  EXPECT_EQ(parse(replaced("memory_gb = 16", "memory_gb = -3")),
            "here.toml: memory_gb: expected a number above 0 and at most 1e18, got -3");
  EXPECT_EQ(parse(replaced("memory_gb = 16\n", "")),
            "here.toml: memory_gb: expected a number above 0 and at most 1e18, got nothing");
  EXPECT_EQ(parse(replaced("memory_gb = 16", "memory_gb = \"much\"")),
            "here.toml: memory_gb: expected a number above 0 and at most 1e18, got \"much\"");
  EXPECT_EQ(parse(replaced("memory_gb = 16", "memory_gb = 1e300")),
            "here.toml: memory_gb: expected a number above 0 and at most 1e18, got 1e+300");
  EXPECT_THAT(parse(replaced("memory_gb = 16", "memory_gb = nan")), HasSubstr("here.toml: memory_gb: expected"));
  EXPECT_THAT(parse(replaced("memory_gb = 16", "memory_gb = inf")), HasSubstr("here.toml: memory_gb: expected"));
  EXPECT_EQ(parse(replaced("latency_us = 5", "latency_us = 5\nspeed = 1")),
            "here.toml: link.within.speed: expected no key of this name, got 1");
  EXPECT_THAT(parse(std::string("extra = true\n") + kText), HasSubstr("here.toml: extra: expected no key"));
  EXPECT_EQ(parse(replaced("us = 5\ngb_per_s = 10", "us = 5\ngb_per_s = 0.0")),
            "here.toml: link.within.gb_per_s: expected a number above 0 and at most 1e18, got 0.0");
  EXPECT_THAT(parse(replaced("[link.within]", "[link.without]")),
              HasSubstr("here.toml: link.within: expected a table"));
  EXPECT_THAT(parse(replaced("overlap = 0.5", "overlap = 1.5")),
              HasSubstr("here.toml: overlap: expected a number from 0"));
  EXPECT_THAT(parse(replaced("tflops = [1, 5]", "tflops = [1]")), HasSubstr("here.toml: gemm.fp32.tflops: expected 2"));
  EXPECT_THAT(parse(replaced("tflops = [1, 5]", "tflops = [1, 0]")),
              HasSubstr("here.toml: gemm.fp32.tflops: expected a"));
  EXPECT_THAT(parse(replaced("size = [16, 256]", "size = [16, 16]")),
              HasSubstr("here.toml: gemm.fp32.size: expected growing"));
  EXPECT_THAT(parse(replaced("ranks_per_node = 4", "ranks_per_node = 0")),
              HasSubstr("here.toml: ranks_per_node: expected"));
  EXPECT_THAT(parse(replaced("ranks_per_node = 4\n", "")), HasSubstr("here.toml: ranks_per_node: expected"));
  EXPECT_EQ(parse(replaced("[gemm.fp32]", "[gemm.fp16]")), "here.toml: gemm: expected bf16, fp32 or fp64, got 'fp16'");
  EXPECT_EQ(parse(replaced("[gemm.fp32]\nsize = [16, 256]\ntflops = [1, 5]", "[gemm]")),
            "here.toml: gemm: expected a table for a dtype, got none");
  for (const char* width : {"0.5", "256.5", "0", "-1"}) {
    EXPECT_EQ(parse(std::string(kText) + "widest_fused = " + width + "\n"),
              fmt::format("here.toml: attention.fp32.widest_fused: expected an integer from 1 to 1099511627776, got {}",
                          width));
  }
  EXPECT_EQ(parse(std::string(kText) + "written_share = 1.5\n"),
            "here.toml: attention.fp32.written_share: expected a number above 0 and at most 1, got 1.5");
  EXPECT_THAT(parse(std::string(kText) + "written_share = 0\n"), HasSubstr("written_share: expected a number above 0"));
  EXPECT_THAT(parse("ranks_per_node = = 4\n"), HasSubstr("here.toml: line 1: expected TOML"));
  for (const char* text : {"", "link = 3", "[[link]]"}) EXPECT_THAT(parse(text), HasSubstr("here.toml: ")) << text;
}

TEST(MachineText, SaysWhatAPlanMisses) {
  const Machine machine = parse_machine(kText, "here.toml");
  EXPECT_EQ(error_of([&] { machine.gemm_in("bf16"); }),
            "here.toml: gemm.bf16: expected a table of this dtype, got fp32");
  EXPECT_THAT(error_of([&] { machine.between_nodes(); }), HasSubstr("here.toml: link.between: expected"));
}

TEST(ShippedMachines, AreReadByName) {
  EXPECT_THAT(shipped_machine_names(), ::testing::Contains("h800x8-roce"));
  for (const std::string& name : shipped_machine_names()) {
    const Machine machine = load_machine(name);
    EXPECT_EQ(machine.name, name);
    EXPECT_EQ(load_machine(name + ".toml").memory_bytes, machine.memory_bytes);
    machine.between_nodes();
    machine.attention_in("bf16");
  }
  EXPECT_THAT(error_of([] { load_machine("no such machine"); }), HasSubstr("h800x8-roce"));
  EXPECT_THAT(error_of([] { load_machine("/"); }), HasSubstr("got /"));
}

}  // namespace
}  // namespace parlat
