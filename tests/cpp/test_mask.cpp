// The mask policy against brute force over ragged lengths: ranges cover what is kept, visit nothing in vain, and the
// unmasked blocks need no element test; once by rows, as the forward walks, and once by keys, as the backward does.
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

// The same by keys: a tile of keys against query blocks. Queries past the end do not exist and spoil no block; keys
// past the end do, for their scores must become zero.
void compare_by_keys(int sq, int sk, int left, int right, int tile_m, int tile_n) {
  Mask const mask{sq, sk, left, right};
  for (int j = 0; j < sk; ++j) {
    int const begin = mask.query_begin(j), end = mask.query_end(j);
    for (int i = 0; i < sq + 2; ++i) CHECK((i >= begin && i < end) == (i < sq && kept(i, j, sq, sk, left, right)));
  }
  int const blocks = ceil_div(sq, tile_m);
  // Blocks of keys that do not exist, as behind a packed sequence's used ones.
  for (int key_begin = ceil_div(sk, tile_n) * tile_n; key_begin < sk + 3 * tile_n; key_begin += tile_n) {
    CHECK(mask.visited_queries(key_begin, key_begin + tile_n, tile_m).size() == 0);
  }
  for (int key_begin = 0; key_begin < sk; key_begin += tile_n) {
    int const key_end = key_begin + tile_n;
    BlockRange const visited = mask.visited_queries(key_begin, key_end, tile_m);
    BlockRange const unmasked = mask.unmasked_queries(key_begin, key_end, tile_m);
    CHECK(visited.size() == 0 || (visited.begin >= 0 && visited.end <= blocks));
    CHECK(key_end <= sk || unmasked.size() == 0);
    for (int b = 0; b < blocks; ++b) {
      int const row_end = std::min((b + 1) * tile_m, sq);
      int count = 0;
      BlockMask const test = mask.block(key_begin, b * tile_m);
      for (int c = 0; c < row_end - b * tile_m; ++c) {
        for (int r = 0; r < tile_n; ++r) {
          bool const seen = c - r >= test.lo && c - r < test.hi && r < test.keys;
          CHECK(seen == kept(b * tile_m + c, key_begin + r, sq, sk, left, right));
        }
      }
      for (int i = b * tile_m; i < row_end; ++i) {
        for (int j = key_begin; j < key_end; ++j) count += kept(i, j, sq, sk, left, right);
      }
      bool const in_visited = b >= visited.begin && b < visited.end;
      bool const in_unmasked = b >= unmasked.begin && b < unmasked.end;
      CHECK(in_visited == (count > 0));
      CHECK(in_unmasked == (count == (row_end - b * tile_m) * tile_n));
    }
  }
}

// Neighbouring query blocks that share their keys: without a left bound what all of them see begins where each begins,
// and the blocks that one does not see are the last ones, no more than the rows between them hold.
void compare_neighbours(int sq, int sk, int right, int tile_m, int tile_n, int cluster) {
  Mask const mask{sq, sk, -1, right};
  int const rows = cluster * tile_m;
  for (int begin = 0; begin < sq; begin += rows) {
    BlockRange const shared = mask.visited(begin, begin + rows, tile_n);
    for (int row = begin; row < std::min(sq, begin + rows); row += tile_m) {
      BlockRange const own = mask.visited(row, row + tile_m, tile_n);
      CHECK(shared.begin == 0 && own.begin == 0 && own.end <= shared.end);
      if (own.size() > 0) CHECK(shared.end - own.end <= ((cluster - 1) * tile_m + tile_n - 1) / tile_n);
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
          if (sq == 0) continue;
          if (left < 0) compare_neighbours(sq, sk, right, 16, 8, 2);
          if (left < 0) compare_neighbours(sq, sk, right, 8, 24, 2);
          compare(sq, sk, left, right, 16, 8);
          compare(sq, sk, left, right, 8, 24);
          compare_by_keys(sq, sk, left, right, 16, 8);
          compare_by_keys(sq, sk, left, right, 8, 24);
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
  CHECK(causal.query_begin(big - 1) == big - 1);
  CHECK(causal.visited_queries(0, 128, 64).end == big / 64);
  CHECK((Mask{1, big, -1, 0}.query_begin(big - 1) == 0));
  CHECK((Mask{big, 1, -1, 0}.query_begin(0) == big - 1));
  CHECK((Mask{big, 1, 0, 0}.query_end(0) == big));
  return check::report("mask");
}
