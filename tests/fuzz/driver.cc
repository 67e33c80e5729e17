// Stands in for libFuzzer where the compiler has none: runs the entry point on every file of a corpus, then on seeded
// mutations of them. Usage: fuzz_NAME CORPUS MUTATIONS [SEED]. The input that failed is left in fuzz_failure.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

std::string current_input;

void keep_input() {
  const int fd = ::open("fuzz_failure", O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd >= 0 && ::write(fd, current_input.data(), current_input.size()) >= 0) ::close(fd);
}

extern "C" void keep_input_and_die(int signal) {
  keep_input();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void run(const std::string& input) {
  current_input = input;
  try {
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(current_input.data()), current_input.size());
  } catch (const std::exception& error) {
    keep_input();
    std::fprintf(stderr, "escaped: %s; the input is in fuzz_failure\n", error.what());
    std::exit(1);
  }
}

std::vector<std::string> read_corpus(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& file : std::filesystem::directory_iterator(folder)) paths.push_back(file.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

class Mutator {
 public:
  Mutator(const std::vector<std::string>& corpus, uint64_t seed) : corpus_(corpus), random_(seed) {}

  std::string next() {
    std::string text = any_file();
    for (size_t rounds = 1 + below(4); rounds > 0; --rounds) mutate(text);
    return text;
  }

 private:
  size_t below(size_t bound) { return std::uniform_int_distribution<size_t>(0, bound - 1)(random_); }
  const std::string& any_file() { return corpus_[below(corpus_.size())]; }

  void mutate(std::string& text) {
    if (text.empty()) text = "{}";
    const size_t at = below(text.size()), length = std::min(text.size() - at, size_t{1} + below(16));
    switch (below(7)) {
      case 0:
        text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        text[at] = static_cast<char>(below(256));
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(at, text.substr(below(text.size()), length));
        break;
      case 4:
        text.resize(at);
        break;
      case 5: {
        const std::string& other = any_file();
        text = text.substr(0, at) + other.substr(std::min(at, other.size()));
        break;
      }
      default:
        replace_value(text, at);
    }
  }

  // JSON stays JSON: the next number or word becomes another value.
  void replace_value(std::string& text, size_t at) {
    static constexpr std::array kValues = {
        "0",    "-1",   "1",  "2",  "7",       "0.5",  "1e308", "9223372036854775807",
        "null", "true", "[]", "{}", "[1,[2]]", "\"\"", "1e999", "18446744073709551615"};
    const char* const token = "0123456789.-+eEaflnrstu";
    const size_t begin = text.find_first_of("0123456789tfn", at);
    if (begin == std::string::npos) return;
    const size_t end = std::min(text.find_first_not_of(token, begin), text.size());
    text.replace(begin, end - begin, kValues[below(kValues.size())]);
  }

  const std::vector<std::string>& corpus_;
  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s CORPUS MUTATIONS [SEED]\n", argv[0]);
    return 2;
  }
  for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE}) std::signal(signal, keep_input_and_die);
  const std::vector<std::string> corpus = read_corpus(argv[1]);
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: no files\n", argv[1]);
    return 2;
  }
  for (const std::string& input : corpus) run(input);
  Mutator mutator(corpus, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  const unsigned long long mutations = std::strtoull(argv[2], nullptr, 10);
  for (unsigned long long i = 0; i < mutations; ++i) run(mutator.next());
  std::printf("%zu files and %llu mutations\n", corpus.size(), mutations);
  return 0;
}
