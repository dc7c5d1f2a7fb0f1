// Every row of the config table fits the machine, and the heuristics find a row for every head dimension.
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
  validity_can_fail();
  heuristics_choose_the_smallest_row();
  return check::report("config");
}
