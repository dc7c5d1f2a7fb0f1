// The order of the keys of quantised values: a bijection, the order of a score accumulator's registers, and transposed
// tiles that lose no byte and split no 16-byte vector; head dimensions as computed.
#include <vector>

#include "check.hpp"
#include "core/softmax.hpp"
#include "core/value_layout.hpp"

using namespace flashhopper;

namespace {

void keys() {
  std::vector<int> hits(kValueGroup, 0);
  for (int position = 0; position < kValueGroup; ++position) {
    int const key = value_key(position);
    if (CHECK(key >= 0 && key < kValueGroup)) ++hits[key];
    CHECK(value_position(key) == position);
  }
  for (int count : hits) CHECK(count == 1);
}

// Thread c of a quad holds columns accumulator_column(i) + 2c of its row; accumulator_row(i) is 0 for i % 4 < 2. The
// 8-bit A operand wants its positions 4c .. 4c+3 of every 16.
void accumulator_order() {
  for (int group = 0; group < 8; ++group) {
    for (int c = 0; c < 4; ++c) {
      int e = 0;
      for (int i = 8 * group; i < 8 * group + 8; ++i) {
        if (accumulator_row(i) != 0) continue;
        CHECK(accumulator_column(i) + 2 * c == kValueGroup * group + value_key(4 * c + e));
        ++e;
      }
      CHECK(e == 4);
    }
  }
}

// P V of one row over 128 keys, through both permutations: probabilities as a quad's registers hold and pack them
// (consumer8.hpp), read as the 8-bit A operand, against values where the quantiser puts them.
void product() {
  int probability[128], value[128], stored[128], expected = 0, found = 0;
  for (int key = 0; key < 128; ++key) {
    probability[key] = key * 37 % 101 + 1;
    value[key] = key * 53 % 89 - 40;
    expected += probability[key] * value[key];
    stored[key / kValueGroup * kValueGroup + value_position(key % kValueGroup)] = value[key];
  }
  for (int c = 0; c < 4; ++c) {
    int scores[64], packed[16][4];
    for (int e = 0; e < 64; ++e) scores[e] = probability[accumulator_column(e) + 2 * c];
    for (int i = 0; i < 16; ++i) {
      int const e = i / 2 * 8 + i % 2 * 2;
      for (int byte = 0; byte < 4; ++byte) packed[i][byte] = scores[e + byte % 2 + byte / 2 * 4];
      CHECK(accumulator_row(e) == i % 2 && accumulator_row(e + 5) == i % 2);
    }
    // m64k32: registers 0 and 2 of four are row lane / 4, of keys 4c .. 4c+3 and 16 more; 1 and 3 are the row below.
    for (int step = 0; step < 4; ++step) {
      for (int half = 0; half < 2; ++half) {
        for (int byte = 0; byte < 4; ++byte) {
          int const place = 32 * step + 16 * half + 4 * c + byte;
          found += packed[4 * step + 2 * half][byte] * stored[place];
        }
      }
    }
  }
  CHECK(found == expected);
}

void tiles() {
  constexpr int kWords = kScaleBlock / 4;
  for (int columns : {64, 96, 128, 192, 256}) {
    std::vector<int> hits(columns * kWords, 0);
    for (int channel = 0; channel < columns; ++channel) {
      for (int word = 0; word < kWords; ++word) {
        int const at = value_tile_word(channel, word);
        if (CHECK(at >= channel * kWords && at < (channel + 1) * kWords)) ++hits[at];
        CHECK(at == value_tile_word(channel, word / 4 * 4) + word % 4);
      }
    }
    for (int count : hits) CHECK(count == 1);
  }
}

// The writes of a warp of quantize_values_kernel: at most 4 threads meet in a bank.
void banks() {
  for (int columns : {64, 96, 128, 192, 256}) {
    for (int warp = 0; warp < columns / 16; ++warp) {
      std::vector<int> hits(32, 0);
      for (int thread = 32 * warp; thread < 32 * warp + 32; ++thread) {
        int const vectors = columns / 8;
        CHECK(++hits[value_tile_word(thread % vectors * 8, thread / vectors) % 32] <= 4);
      }
    }
  }
}

void head_dims() {
  int const computed[] = {64, 96, 128, 192, 256};
  for (int head_dim = 1; head_dim <= 256; ++head_dim) {
    int const columns = computed_head_dim(head_dim);
    CHECK(columns >= head_dim);
    for (int other : computed) CHECK(other >= columns || other < head_dim);
  }
  CHECK(computed_head_dim(257) == 0);
  for (int columns : computed) {
    // The largest power of two that divides it.
    CHECK(hadamard_block(columns) == (columns & -columns));
  }
}

}  // namespace

int main() {
  keys();
  accumulator_order();
  product();
  tiles();
  banks();
  head_dims();
  return check::report("value layout");
}
