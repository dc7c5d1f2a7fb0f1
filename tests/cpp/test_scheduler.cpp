// The tile order is a permutation: every (block, head, batch) has exactly one place, and blocks go the way that the
// schedule names, in sections that fit L2.
#include <vector>

#include "check.hpp"
#include "core/scheduler.hpp"

using namespace flashhopper;

namespace {

void is_permutation(int blocks, int batch, int heads, int kv_heads, int64_t head_bytes, bool uneven, bool descending) {
  TileSchedule const schedule = make_tile_schedule(blocks, batch, heads, kv_heads, head_bytes, uneven, descending);
  int const group = heads / kv_heads;
  CHECK(schedule.total() == blocks * batch * heads);
  CHECK(schedule.section_heads >= 1 && schedule.section_heads % group == 0);
  CHECK(schedule.section_heads <= batch * heads);
  if (schedule.section_heads > group) CHECK(uneven && schedule.section_heads / group * head_bytes <= kL2SectionBytes);
  std::vector<int> owners(schedule.total(), 0);
  int last_section = 0, last_block = -1;
  for (int place = 0; place < schedule.total(); ++place) {
    Tile const tile = schedule.at(place);
    bool const inside = tile.block >= 0 && tile.block < blocks && tile.head >= 0 && tile.head < heads &&
                        tile.batch >= 0 && tile.batch < batch;
    if (!CHECK(inside)) continue;
    ++owners[(tile.batch * heads + tile.head) * blocks + tile.block];
    int const section = (tile.batch * heads + tile.head) / schedule.section_heads;
    CHECK(section >= last_section);
    if (section != last_section) last_section = section, last_block = -1;
    if (last_block >= 0) CHECK(descending ? tile.block <= last_block : tile.block >= last_block);
    last_block = tile.block;
  }
  for (int count : owners) CHECK(count == 1);
}

}  // namespace

int main() {
  for (int blocks : {1, 2, 5, 17}) {
    for (int batch : {1, 3}) {
      for (int kv_heads : {1, 2, 5}) {
        for (int group : {1, 4}) {
          for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{8} << 20, int64_t{20} << 20, int64_t{1} << 40}) {
            for (bool uneven : {false, true}) {
              for (bool descending : {false, true}) {
                is_permutation(blocks, batch, kv_heads * group, kv_heads, bytes, uneven, descending);
              }
            }
          }
        }
      }
    }
  }
  return check::report("scheduler");
}
