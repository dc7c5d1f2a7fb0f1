// The rows' kernel of the quantiser: every vector has a place of its own in shared memory, neither the copies of a warp
// nor the reads of its threads, of rows, signs or means, meet in a bank, and lanes load and store each group of 16
// columns once.
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
  for (int i = 0; i < Shape::kChunks; ++i) {
    for (int b = 0; b < 2; ++b) {
      for (int quarter = 0; quarter < 32; quarter += 8) {
        Banks banks;
        for (int thread = quarter; thread < quarter + 8; ++thread) {
          int const r = thread / Shape::kLanes, lane = thread % Shape::kLanes;
          int const place = row_place<Shape>(r, 2 * Shape::loaded_group(lane, i) + b);
          CHECK(place == chunk_place<Shape>(row_place<Shape>(r, 2 * Shape::loaded_group(lane, 0)), i, b));
          banks.add(place);
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

template <class Shape>
void groups() {
  std::set<int> loaded, stored;
  for (int lane = 0; lane < Shape::kLanes; ++lane) {
    for (int i = 0; i < Shape::kChunks; ++i) {
      loaded.insert(Shape::loaded_group(lane, i));
      stored.insert(Shape::stored_group(lane, i));
      // Lanes of a row store side by side.
      CHECK(Shape::stored_group(lane, i) == Shape::stored_group(0, i) + lane);
    }
  }
  for (auto const& all : {loaded, stored}) {
    CHECK(static_cast<int>(all.size()) == Shape::kColumns / 16);
    CHECK(*all.begin() == 0 && *all.rbegin() == Shape::kColumns / 16 - 1);
  }
}

// The lanes of a row read signs and means of as many columns at once, 16 bytes each.
template <class Shape>
void columns() {
  std::set<int> seen;
  for (int i = 0; i < Shape::kChunks; ++i) {
    for (int e = 0; e < 16; e += 4) {
      Banks banks;
      for (int lane = 0; lane < Shape::kLanes; ++lane) {
        int const place = column_place(Shape::loaded_group(lane, i) * 16 + e);
        CHECK(place == chunk_columns<Shape>(lane, i) + e && place % 4 == 0);
        CHECK(place + 4 <= column_places(Shape::kColumns));
        seen.insert(place);
        banks.add(place / 4);
      }
      CHECK(static_cast<int>(banks.seen.size()) == Shape::kLanes);
    }
  }
  CHECK(static_cast<int>(seen.size()) == Shape::kColumns / 4);
}

// Where an exchange leaves columns: a lane's bit and a chunk's bit have changed places.
template <class Shape>
void exchanges() {
  for (int lane = 0; lane < Shape::kLanes; ++lane) {
    for (int i = 0; i < Shape::kChunks; ++i) {
      int other_lane = lane, other = i;
      for (int bit = 1; bit < Shape::kLanes; bit *= 2) {
        other_lane = (other_lane & ~bit) | (i & bit);
        other = (other & ~bit) | (lane & bit);
      }
      CHECK(Shape::stored_group(lane, i) == Shape::loaded_group(other_lane, other));
    }
  }
}

template <int kDim, Rotation kRotation>
void check_shape() {
  using Shape = RowsShape<kDim, kRotation>;
  places<Shape>();
  reads<Shape>();
  copies<Shape>();
  groups<Shape>();
  columns<Shape>();
  CHECK(Shape::kExchange == (kRotation == Rotation::kWide && kDim != 96));
  if constexpr (Shape::kExchange) exchanges<Shape>();
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
  return check::report("row_layout");
}
