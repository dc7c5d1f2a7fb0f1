// The smallest test harness that serves: CHECK counts and prints failures, report() is main's return value.
#pragma once

#include <cstdio>

namespace check {

inline int failures = 0;
inline int checks = 0;

inline bool record(bool ok, char const* text, char const* file, int line) {
  ++checks;
  if (!ok && ++failures <= 20) std::printf("%s:%d: failed: %s\n", file, line, text);
  return ok;
}

inline int report(char const* name) {
  std::printf("%s: %d checks, %d failed\n", name, checks, failures);
  return failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition) check::record((condition), #condition, __FILE__, __LINE__)
