// The mask policy against brute force over ragged lengths: ranges cover what is kept, visit nothing in vain, and the
// unmasked blocks need no element test.
#include <algorithm>
#include <vector>

#include "check.hpp"
#include "core/mask.hpp"

using namespace flashhopper;

namespace {

// The definition, written independently of the policy.
bool kept(int i, int j, int sq, int sk, int left, int right) {
  long const diagonal = static_cast<long>(i) + sk - sq;
  return j >= 0 && j < sk && (left < 0 || j >= diagonal - left) && (right < 0 || j <= diagonal + right);
}

void compare(int sq, int sk, int left, int right, int tile_m, int tile_n) {
  Mask const mask{sq, sk, left, right};
  for (int i = 0; i < sq; ++i) {
    for (int j = 0; j < sk + 2; ++j) CHECK(mask.keeps(i, j) == kept(i, j, sq, sk, left, right));
  }
  int const blocks = ceil_div(sk, tile_n);
  for (int row_begin = 0; row_begin < sq; row_begin += tile_m) {
    int const row_end = std::min(row_begin + tile_m, sq);
    BlockRange const visited = mask.visited(row_begin, row_begin + tile_m, tile_n);
    BlockRange const unmasked = mask.unmasked(row_begin, row_begin + tile_m, tile_n);
    CHECK(visited.size() == 0 || (visited.begin >= 0 && visited.end <= blocks));
    for (int b = 0; b < blocks; ++b) {
      int count = 0;
      for (int i = row_begin; i < row_end; ++i) {
        for (int j = b * tile_n; j < (b + 1) * tile_n; ++j) count += kept(i, j, sq, sk, left, right);
      }
      bool const in_visited = b >= visited.begin && b < visited.end;
      bool const in_unmasked = b >= unmasked.begin && b < unmasked.end;
      CHECK(in_visited == (count > 0));
      CHECK(in_unmasked == (count == (row_end - row_begin) * tile_n));
    }
  }
}

}  // namespace

int main() {
  std::vector<int> const lengths = {0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 64, 77};
  std::vector<int> const windows = {-1, 0, 1, 5, 16, 63, 100};
  for (int sq : lengths) {
    for (int sk : lengths) {
      for (int left : windows) {
        for (int right : windows) {
          if (sq > 0) compare(sq, sk, left, right, 16, 8), compare(sq, sk, left, right, 8, 24);
        }
      }
    }
  }
  // Lengths near the limit of 2^30 stay within 32 bits.
  int const big = 1 << 30;
  Mask const causal{big, big, -1, 0};
  CHECK(causal.key_end(big - 1) == big);
  CHECK(causal.visited(big - 128, big, 128).end == big / 128);
  CHECK((Mask{1, big, -1, 0}.key_end(0) == big));
  CHECK((Mask{big, 1, -1, 0}.key_end(0) == 0));
  CHECK((Mask{big, 1, -1, 0}.key_end(big - 1) == 1));
  return check::report("mask");
}
