// The program `parlat-torch`: every subcommand, one a file (cli/commands.h).
#include <CLI/CLI.hpp>
#include <cstdlib>

#include "cli/commands.h"
#include "cli/program.h"
#include "parlat/comm/communicator.h"

int main(int argc, char** argv) {
  // Large tensors on large pages, unless the environment says otherwise: torch reads this at its first allocation.
  ::setenv("THP_MEM_ALLOC_ENABLE", "1", /*overwrite=*/0);
  const int exit_code = parlat::run_program(argc, argv, [](CLI::App& app) {
    parlat::add_train(app);
    parlat::add_inspect(app);
    parlat::add_verify(app);
    parlat::add_eval(app);
    parlat::add_generate(app);
    parlat::add_convert(app);
    parlat::add_plan_calibrate(parlat::add_plan(app));
    parlat::add_bench(app);
  });
  parlat::finalize_mpi();
  return exit_code;
}
