// The rows' kernel of the quantiser: every vector has a place of its own in shared memory, neither the copies of a warp
// nor the reads of its threads meet in a bank, and its products with the tensor cores are the Hadamard matrix.
#include <set>

#include "check.hpp"
#include "quantize/row_layout.hpp"

using namespace flashhopper;

namespace {

// The eight threads of a quarter of a warp move 16 bytes each at once: they need the eight groups of four banks.
struct Banks {
  std::set<int> seen;
  void add(int place) { seen.insert(place % 8); }
  bool is_free() const { return seen.size() == 8; }
};

template <class Shape>
void places() {
  constexpr int kVectors = Shape::kVectors;
  std::set<int> seen;
  for (int r = 0; r < Shape::kWarpRows; ++r) {
    for (int v = 0; v < kVectors; ++v) seen.insert(row_place<Shape>(r, v));
  }
  CHECK(static_cast<int>(seen.size()) == Shape::kWarpRows * kVectors);
  CHECK(*seen.begin() == 0 && *seen.rbegin() == Shape::kWarpRows * kVectors - 1);
}

template <class Shape>
void reads() {
  for (int row = 0; row < Shape::kWarpRows; row += 8) {
    for (int group = 0; group < Shape::kGroups; ++group) {
      for (int quarter = 0; quarter < 32; quarter += 8) {
        Banks banks;
        for (int lane = quarter; lane < quarter + 8; ++lane) {
          banks.add(row_place<Shape>(row + lane / 4, 4 * group + lane % 4));
        }
        CHECK(banks.is_free());
      }
    }
  }
}

template <class Shape>
void copies() {
  constexpr int kVectors = Shape::kVectors;
  for (int i = 0; i < Shape::kWarpRows; i += Shape::kCopyRows) {
    for (int j = 0; j < kVectors; j += Shape::kCopyVectors) {
      for (int quarter = 0; quarter < 32; quarter += 8) {
        Banks banks;
        for (int thread = quarter; thread < quarter + 8; ++thread) {
          int const r = thread / Shape::kCopyVectors, v = thread % Shape::kCopyVectors;
          int const place = row_place<Shape>(r, v + j) + i * kVectors;
          CHECK(place == row_place<Shape>(r + i, v + j));
          banks.add(place);
        }
        CHECK(banks.is_free());
      }
    }
  }
}

int parity(int bits) { return __builtin_popcount(static_cast<unsigned>(bits)) % 2; }

// The products of a group, as m16n8k16 defines its operands: a lane's four elements of A are of inner places 2c, 2c + 1
// (k = 0, 1) and 2c + 8, 2c + 9 (k = 2, 3), where the lane that holds column n of B has its own four. Summed over the
// halves they are the Hadamard matrix, and the accumulators of thread c, n = 2c and 2c + 1 of each tile, are its own
// eight columns.
template <Rotation kRotation>
void products() {
  for (int tile = 0; tile < 4; ++tile) {
    for (int n = 0; n < 8; ++n) {
      int const output = product_output(tile, n);
      CHECK(output / 8 == n / 2);  // of thread n / 2
      std::set<int> inputs;
      for (int half = 0; half < 2; ++half) {
        for (int c = 0; c < 4; ++c) {
          HadamardPair const pair = hadamard_pair(kRotation, n * 4 + c);
          for (int k = 0; k < 4; ++k) {
            int const input = product_input(c, half, k);
            inputs.insert(input);
            int entry = k % 2 == 0 ? pair.even : pair.odd;
            if (is_negated(kRotation, tile, half, k / 2)) entry = -entry;
            if (!takes_part(kRotation, tile, half)) entry = 0;
            bool const mix = kRotation == Rotation::kWide || input / 4 == output / 4;
            CHECK(entry == (!mix ? 0 : parity(input & output & (kRotation == Rotation::kWide ? 31 : 3)) ? -1 : 1));
          }
        }
      }
      CHECK(inputs.size() == 32 && *inputs.begin() == 0 && *inputs.rbegin() == 31);
    }
  }
}

template <int kDim, Rotation kRotation>
void check_shape() {
  using Shape = RowsShape<kDim, kRotation>;
  places<Shape>();
  reads<Shape>();
  copies<Shape>();
}

template <int... kDims>
void check_shapes() {
  (check_shape<kDims, Rotation::kNone>(), ...);
  (check_shape<kDims, Rotation::kQuads>(), ...);
  (check_shape<kDims, Rotation::kWide>(), ...);
}

}  // namespace

int main() {
  check_shapes<64, 96, 128, 192, 256>();
  products<Rotation::kQuads>();
  products<Rotation::kWide>();
  return check::report("row_layout");
}
