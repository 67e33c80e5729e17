#pragma once

namespace CLI {
class App;
}

namespace parlat {

// Each adds one subcommand to the program: its flags, and a callback that runs it after parsing and reports failure by
// throwing (parlat/base/error.h, or CLI::RuntimeError for a bare exit code).
void add_train(CLI::App& app);
void add_inspect(CLI::App& app);
void add_verify(CLI::App& app);
void add_eval(CLI::App& app);
void add_generate(CLI::App& app);
void add_convert(CLI::App& app);
CLI::App& add_plan(CLI::App& app);     // with train and decode, which need no torch
void add_plan_decode(CLI::App& plan);  // a subcommand of plan
void add_plan_calibrate(CLI::App& plan);
void add_bench(CLI::App& app);
void add_bench_decode(CLI::App& bench);  // a subcommand of bench
void add_bench_kernel(CLI::App& bench);
void add_bench_nondeterminism(CLI::App& bench);

}  // namespace parlat
