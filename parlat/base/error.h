#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace parlat {

// Every error is one line that says what, expected, got and where. The program prints it after "parlat: error: " and
// exits with exit_code.
class Error : public std::runtime_error {
 public:
  Error(int exit_code, const std::string& message) : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

// What the user asked for cannot be done.
class ConfigError : public Error {
 public:
  template <typename... Args>
  explicit ConfigError(fmt::format_string<Args...> format, Args&&... args)
      : Error(2, fmt::format(format, std::forward<Args>(args)...)) {}
};

// A file is missing, broken or not what it says.
class DataError : public Error {
 public:
  template <typename... Args>
  explicit DataError(fmt::format_string<Args...> format, Args&&... args)
      : Error(3, fmt::format(format, std::forward<Args>(args)...)) {}
};

// A peer failed, or did not answer in time.
class CommError : public Error {
 public:
  template <typename... Args>
  explicit CommError(fmt::format_string<Args...> format, Args&&... args)
      : Error(4, fmt::format(format, std::forward<Args>(args)...)) {}
};

// A bug of parlat's own.
class InternalError : public Error {
 public:
  explicit InternalError(const std::string& message) : Error(1, message) {}
};

#define PARLAT_ASSERT(condition, ...)                                                                            \
  do {                                                                                                           \
    if (!(condition)) {                                                                                          \
      throw ::parlat::InternalError(                                                                             \
          fmt::format("{}:{}: {} does not hold: {}", __FILE__, __LINE__, #condition, fmt::format(__VA_ARGS__))); \
    }                                                                                                            \
  } while (false)

}  // namespace parlat
