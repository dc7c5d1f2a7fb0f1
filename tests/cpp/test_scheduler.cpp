// The tile order is a permutation: every (query block, head, batch) has exactly one place, and long tiles go first.
#include <vector>

#include "check.hpp"
#include "core/scheduler.hpp"

using namespace flashhopper;

namespace {

void is_permutation(int m_blocks, int batch, int heads, int kv_heads, int64_t kv_head_bytes, bool longest_first) {
  TileSchedule const schedule = make_tile_schedule(m_blocks, batch, heads, kv_heads, kv_head_bytes, longest_first);
  CHECK(schedule.total() == m_blocks * batch * heads);
  CHECK(schedule.section_heads >= 1 && schedule.section_heads % (heads / kv_heads) == 0);
  if (longest_first && schedule.section_heads > heads / kv_heads) {
    CHECK(schedule.section_heads / (heads / kv_heads) * kv_head_bytes <= kL2SectionBytes);
  }
  std::vector<int> owners(schedule.total(), 0);
  int section_start = 0, last_m = -1;
  for (int place = 0; place < schedule.total(); ++place) {
    Tile const tile = schedule.at(place);
    bool const inside = tile.m_block >= 0 && tile.m_block < m_blocks && tile.head >= 0 && tile.head < heads &&
                        tile.batch >= 0 && tile.batch < batch;
    if (!CHECK(inside)) continue;
    ++owners[(tile.batch * heads + tile.head) * m_blocks + tile.m_block];
    int const section = (tile.batch * heads + tile.head) / schedule.section_heads;
    if (section != section_start) section_start = section, last_m = -1;
    if (last_m >= 0) CHECK(longest_first ? tile.m_block <= last_m : tile.m_block >= last_m);
    last_m = tile.m_block;
  }
  for (int count : owners) CHECK(count == 1);
}

}  // namespace

int main() {
  for (int m_blocks : {1, 2, 5, 17}) {
    for (int batch : {1, 3}) {
      for (int kv_heads : {1, 2, 5}) {
        for (int group : {1, 4}) {
          for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{8} << 20, int64_t{20} << 20, int64_t{1} << 40}) {
            for (bool longest_first : {false, true}) {
              is_permutation(m_blocks, batch, kv_heads * group, kv_heads, bytes, longest_first);
            }
          }
        }
      }
    }
  }
  return check::report("scheduler");
}
