#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace parlat {

// Parses the command line, with the subcommands that add_commands adds, runs the one that it names and returns the exit
// code: 0; 1 our own bug or a run that diverged, 2 what was asked for cannot be done, 3 a file, 4 a peer, 130
// interrupted. Needs no torch.
int run_program(int argc, char** argv, const std::function<void(CLI::App&)>& add_commands);

}  // namespace parlat
