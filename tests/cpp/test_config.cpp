// Every row of the config tables fits the machine, and the heuristics find a row for every head dimension.
#include <set>
#include <string_view>

#include "check.hpp"
#include "core/heuristics.hpp"

using namespace flashhopper;

namespace {

void rows_fit() {
  std::set<std::string_view> names;
  for (ForwardConfig const& row : kForwardConfigs) {
    CHECK(is_valid(row));
    CHECK(names.insert(row.name).second);
    CHECK(smem_bytes(row) <= 227 * 1024);
    CHECK(threads(row) <= 1024);
    int const registers =
        kWarpgroupThreads * (producer_registers(row) + consumer_warpgroups(row) * consumer_registers(row));
    CHECK(registers <= 64 * 1024);
    CHECK(producer_registers(row) % 8 == 0 && consumer_registers(row) % 8 == 0);
    CHECK(kForwardConfigs[find_forward_config(row.name)].name == row.name);
  }
  CHECK(find_forward_config("fwd_nothing") == -1);
}

void rows_of_8_bits_fit() {
  std::set<std::string_view> names;
  for (ForwardConfig const& row : kForward8Configs) {
    CHECK(is_valid8(row));
    CHECK(names.insert(row.name).second);
    CHECK(find_forward_config(row.name) == -1);
    CHECK(kForward8Configs[find_forward8_config(row.name)].name == row.name);
    CHECK(smem_bytes(row) <= 227 * 1024);
    CHECK(kWarpgroupThreads * (producer_registers(row) + consumer_warpgroups(row) * consumer_registers(row)) <=
          64 * 1024);
    // A step has one scale of K and one of V.
    CHECK(row.element_bytes == 1 && kScaleBlock % row.tile_n == 0);
    CHECK(row.head_dim_v % row.partial_columns == 0 && (row.partial_columns + sum_columns(row)) % 8 == 0);
    CHECK(sum_columns(row) == 8);
    // A stage of V holds its columns and those that sum in whole swizzle atoms of 8 rows of 128 bytes.
    CHECK((row.head_dim_v + sum_columns(row)) % 8 == 0 && row.tile_n == 128);
    int const box = box_columns(row.head_dim, 1);
    CHECK(row.head_dim % box == 0 && (box == 128 || box == 64 || box == 32));
  }
  CHECK(find_forward8_config("fwd8_nothing") == -1);
  CHECK(box_columns(64, 1) == 64 && box_columns(96, 1) == 32 && box_columns(128, 1) == 128);
  CHECK(box_columns(192, 1) == 64 && box_columns(256, 1) == 128);
  for (ForwardConfig const& row : kForwardConfigs) CHECK(sum_columns(row) == 0);
}

void validity_of_8_bits_can_fail() {
  ForwardConfig const good = kForward8Configs[find_forward8_config("fwd8_hd128_m128_n128")];
  ForwardConfig row = good;
  row.element_bytes = 2;
  CHECK(!is_valid8(row));
  row = good;
  row.tile_n = 96;  // a step across two scales
  CHECK(!is_valid8(row));
  row = good;
  row.partial_columns = 0;
  CHECK(!is_valid8(row));
  row = good;
  row.partial_columns = 64;  // with overlap the product has all columns
  CHECK(!is_valid8(row));
  row = good;
  row.stages = 64;
  CHECK(!is_valid8(row));
}

void heuristics_choose_the_smallest_row_of_8_bits() {
  Mask const full{1024, 1024, -1, -1}, causal{1024, 1024, -1, 0};
  auto const all = [](int) { return true; };
  for (Mask const& mask : {full, causal}) {
    for (int d : {64, 96, 128, 192, 256}) {
      int const index = choose_forward8_config(d, d, mask, all);
      if (CHECK(index >= 0)) CHECK(kForward8Configs[index].head_dim == d && kForward8Configs[index].head_dim_v == d);
    }
    int const narrow = choose_forward8_config(192, 128, mask, all);
    if (CHECK(narrow >= 0)) CHECK(kForward8Configs[narrow].head_dim == 192);
    CHECK(choose_forward8_config(272, 64, mask, all) == -1);
    CHECK(choose_forward8_config(64, 64, mask, [](int) { return false; }) == -1);
  }
}

void validity_can_fail() {
  ForwardConfig row = kForwardConfigs[0];
  row.tile_n = 8;
  CHECK(!is_valid(row));
  row = kForwardConfigs[0];
  row.stages = 64;
  CHECK(!is_valid(row));
  row = kForwardConfigs[0];
  row.tile_m = 256;
  CHECK(!is_valid(row));
}

void backward_rows_fit() {
  std::set<std::string_view> names;
  for (BackwardConfig const& row : kBackwardConfigs) {
    CHECK(is_valid(row));
    CHECK(names.insert(row.name).second);
    CHECK(smem_bytes(row) <= 227 * 1024);
    CHECK(kBackwardConfigs[find_backward_config(row.name)].name == row.name);
    CHECK(find_forward_config(row.name) == -1);
    // setmaxnreg: in steps of 8, together no more than the launch gives, 168 a thread.
    int const producer = kBackwardProducerRegisters, consumer = kBackwardConsumerRegisters;
    CHECK(producer % 8 == 0 && producer >= 24 && consumer % 8 == 0 && consumer <= 240);
    CHECK(kWarpgroupThreads * (producer + kBackwardWarpgroups * consumer) <= kBackwardThreads * 168);
    CHECK(kBackwardThreads * 168 <= 64 * 1024);
    // The slices of a tile that TMA moves and that warpgroups own are whole boxes.
    int const owners = row.share == Share::kKeys ? 1 : kBackwardWarpgroups;
    for (int head_dim : {row.head_dim, row.head_dim_v}) CHECK(head_dim / owners % box_columns(row, head_dim) == 0);
    // By keys a warpgroup's dK is staged in one tile of the dS ring, while a third one is still read.
    if (row.share == Share::kKeys) {
      CHECK(dk_box_rows(row) * kBackwardWarpgroups == row.tile_n);
      CHECK(dk_box_rows(row) * row.head_dim <= row.tile_m * row.tile_n);
      CHECK(exchange_tiles(row) == kBackwardWarpgroups + 1);
    } else {
      CHECK(dk_box_rows(row) == row.tile_n);
    }
  }
  CHECK(find_backward_config("bwd_nothing") == -1);
}

void backward_validity_can_fail() {
  BackwardConfig const good = kBackwardConfigs[0];
  BackwardConfig row = good;
  row.tile_n = 96;
  CHECK(!is_valid(row));
  row = good;
  row.tile_m = 192;
  CHECK(!is_valid(row));
  row = good;
  row.q_stages = 64;
  CHECK(!is_valid(row));
  row = good;
  row.dout_stages = 64;
  CHECK(!is_valid(row));
  row = good;
  row.head_dim_v = good.head_dim + 64;
  CHECK(!is_valid(row));
  row = good;
  row.head_dim = row.head_dim_v = 96;
  CHECK(!is_valid(row));
  row = good;
  row.share = Share::kColumns;  // with tiles made for the other way to share
  CHECK(!is_valid(row));
  row = kBackwardConfigs[find_backward_config("bwd_hd256_m64_n64")];
  row.scores_first = true;  // by keys only
  CHECK(!is_valid(row));
  row = good;
  row.head_dim = row.head_dim_v = 256;  // more registers than a thread has
  row.tile_m = 64;
  CHECK(!is_valid(row));
}

void heuristics_choose_the_smallest_row() {
  Mask const full{1024, 1024, -1, -1}, causal{1024, 1024, -1, 0};
  auto const all = [](int) { return true; };
  for (Mask const& mask : {full, causal}) {
    for (int d = 8; d <= 256; d += 8) {
      for (int dv = 8; dv <= 256; dv += 8) {
        int const index = choose_forward_config(d, dv, mask, all);
        if (!CHECK(index >= 0)) continue;
        ForwardConfig const& row = kForwardConfigs[index];
        CHECK(row.head_dim >= d && row.head_dim_v >= dv);
        for (ForwardConfig const& other : kForwardConfigs) {
          if (other.head_dim >= d && other.head_dim_v >= dv) {
            CHECK(other.head_dim + other.head_dim_v >= row.head_dim + row.head_dim_v);
          }
        }
      }
    }
    CHECK(choose_forward_config(264, 64, mask, all) == -1);
    CHECK(choose_forward_config(64, 264, mask, all) == -1);
  }
  CHECK(kForwardConfigs[choose_forward_config(192, 128, full, all)].head_dim_v == 128);
  CHECK(kForwardConfigs[choose_forward_config(128, 128, full, all)].tile_n >=
        kForwardConfigs[choose_forward_config(128, 128, causal, all)].tile_n);
}

void backward_heuristics_choose_the_smallest_row() {
  Mask const full{1024, 1024, -1, -1}, causal{1024, 1024, -1, 0};
  auto const all = [](int) { return true; };
  for (Mask const& mask : {full, causal}) {
    for (int d = 8; d <= 256; d += 8) {
      for (int dv = 8; dv <= 256; dv += 8) {
        int const index = choose_backward_config(d, dv, mask, all);
        if (!CHECK(index >= 0)) continue;
        BackwardConfig const& row = kBackwardConfigs[index];
        CHECK(row.head_dim >= d && row.head_dim_v >= dv);
        for (BackwardConfig const& other : kBackwardConfigs) {
          if (other.head_dim >= d && other.head_dim_v >= dv) {
            CHECK(other.head_dim + other.head_dim_v >= row.head_dim + row.head_dim_v);
          }
        }
      }
    }
    CHECK(choose_backward_config(264, 64, mask, all) == -1);
    CHECK(choose_backward_config(64, 264, mask, all) == -1);
    CHECK(choose_backward_config(64, 64, mask, [](int) { return false; }) == -1);
  }
  CHECK(kBackwardConfigs[choose_backward_config(192, 128, full, all)].head_dim_v == 128);
  int const widest = find_backward_config("bwd_hd256_m64_n64");
  CHECK(choose_backward_config(64, 64, full, [&](int row) { return row == widest; }) == widest);
}

// A narrowed build serves what its rows can hold.
void heuristics_respect_the_build() {
  Mask const full{1024, 1024, -1, -1};
  int const widest = find_forward_config("fwd_hd256_m128_n80");
  CHECK(choose_forward_config(64, 64, full, [&](int row) { return row == widest; }) == widest);
  CHECK(choose_forward_config(64, 64, full, [](int) { return false; }) == -1);
}

}  // namespace

int main() {
  heuristics_respect_the_build();
  rows_fit();
  rows_of_8_bits_fit();
  validity_of_8_bits_can_fail();
  heuristics_choose_the_smallest_row_of_8_bits();
  validity_can_fail();
  backward_rows_fit();
  backward_validity_can_fail();
  backward_heuristics_choose_the_smallest_row();
  heuristics_choose_the_smallest_row();
  return check::report("config");
}
