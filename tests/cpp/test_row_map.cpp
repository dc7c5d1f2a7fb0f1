// GQA packing: rows of tiles are a bijection with positions and heads, for every number of heads a tile may hold; the
// key blocks of such tiles against brute force; and the choice of that number.
#include <algorithm>
#include <vector>

#include "check.hpp"
#include "core/heuristics.hpp"
#include "forward/args.hpp"

using namespace flashhopper;

namespace {

template <int kWarpgroups_>
struct Traits {
  static constexpr bool kIs8Bit = false;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kTileN = 48;
  static constexpr ForwardConfig kConfig = kForwardConfigs[find_forward_config("fwd_hd128_m128_n128")];
  static_assert(kConfig.cluster == 2);
};

void divides_exactly() {
  for (int heads = 1; heads <= kWarpgroupRows; ++heads) {
    RowMap const map = make_row_map(heads);
    CHECK(map.heads == heads && map.rows() <= kWarpgroupRows && map.rows() + heads > kWarpgroupRows);
    for (int row = 0; row < kWarpgroupRows; ++row) {
      CHECK(map.position(row) == row / heads);
      CHECK(map.head(row) == row % heads);
    }
  }
}

// What consumers do with the scores of a tile: which blocks they visit, which keys of those a row keeps. The CTAs of a
// cluster load what any of them visits, which begins where each of them begins.
template <class T>
void blocks_keep_what_the_mask_keeps(ForwardArgs const& args, SequenceTile const& tile) {
  Mask const mask = mask_of(args, tile);
  BlockRange const visited = visited_blocks<T>(args, tile), unmasked = unmasked_blocks<T>(args, tile);
  BlockRange const shared = shared_blocks<T>(args, tile);
  CHECK(shared.size() == visited.size() + foreign_blocks<T>(args, tile));
  CHECK(visited.size() == 0 || (shared.begin == visited.begin && shared.end >= visited.end));
  int const begin = first_position<T>(args, tile, 0);
  int const end = std::min(first_position<T>(args, tile, T::kWarpgroups), mask.seqlen_q);
  if (begin >= end) CHECK(visited.size() == 0);
  for (int block = 0; block * T::kTileN < mask.seqlen_k; ++block) {
    int kept = 0;
    for (int position = begin; position < end; ++position) {
      for (int key = block * T::kTileN; key < (block + 1) * T::kTileN; ++key) kept += mask.keeps(position, key);
    }
    CHECK((block >= visited.begin && block < visited.end) == (kept > 0));
    if (begin >= end) continue;  // nobody asks which blocks of no rows need a test
    CHECK((block >= unmasked.begin && block < unmasked.end) == (kept == (end - begin) * T::kTileN));
  }
}

// Every (batch, head, position) is one used row of one tile, beside the kv head that it attends to.
template <int kWarpgroups>
void every_query_has_one_row(int batch, int kv_heads, int group, int pack, int seqlen_q, int seqlen_k, Window window,
                             int cluster = 1) {
  using T = Traits<kWarpgroups>;
  int const heads = kv_heads * group, packs = heads / pack;
  ForwardArgs args{};
  args.row_map = make_row_map(pack);
  args.group = packs / kv_heads;
  args.cluster = cluster;
  args.window = window;
  int const blocks = ceil_div(seqlen_q, cluster * kWarpgroups * args.row_map.positions);
  args.schedule.dense = make_tile_schedule(blocks, batch, packs, kv_heads, 1, window.right >= 0, window.right >= 0);
  args.schedule.rows = {{0, seqlen_q, seqlen_q}, {0, seqlen_k, seqlen_k}};
  std::vector<int> owners(batch * heads * seqlen_q, 0);
  for (int i = 0; i < args.schedule.total() * cluster; ++i) {
    SequenceTile tile;
    QueryTiles<T>{args, i % cluster}.put(i / cluster, tile);
    CHECK(first_position<T>(args, tile, 0) < seqlen_q || tile.block % cluster > 0);
    blocks_keep_what_the_mask_keeps<T>(args, tile);
    for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
      for (int row = 0; row < args.row_map.rows(); ++row) {
        int const position = first_position<T>(args, tile, warpgroup) + args.row_map.position(row);
        int const head = tile.head * pack + args.row_map.head(row);
        CHECK(head / group == tile.head / args.group);
        if (position < seqlen_q) ++owners[(tile.batch * heads + head) * seqlen_q + position];
      }
    }
  }
  CHECK(std::all_of(owners.begin(), owners.end(), [](int count) { return count == 1; }));
}

constexpr ForwardConfig const& kTwo = kForwardConfigs[find_forward_config("fwd_hd128_m128_n128")];
constexpr ForwardConfig const& kThree = kForwardConfigs[find_forward_config("fwd_hd64_m192_n128")];
static_assert(kTwo.tile_m == 128 && kThree.tile_m == 192);

constexpr Mask full(int seqlen_q, int seqlen_k = 8192) { return {seqlen_q, seqlen_k, -1, -1}; }
constexpr Mask causal(int seqlen) { return {seqlen, seqlen, -1, 0}; }
constexpr int chosen(Mask const& mask, int group, ForwardConfig const& config) {
  int const heads = choose_packed_heads(mask, group, config);
  return packing_pays(mask, group, config, heads) ? heads : 1;
}

// Without a mask the cost is that of the number of tiles.
void fewest_tiles_are_chosen() {
  for (ForwardConfig const& config : {kTwo, kThree}) {
    for (int group : {1, 2, 3, 5, 6, 7, 8, 12, 16, 24, 48, 64, 67, 71, 80, 96, 128, 134}) {
      for (int seqlen_q : {1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 128, 129, 1000}) {
        Mask const mask = full(seqlen_q);
        int const best = choose_packed_heads(mask, group, config);
        CHECK(group % best == 0 && best <= kWarpgroupRows);
        int64_t const fewest = tiles_of_group(seqlen_q, group, config, best);
        for (int heads = 2; heads <= std::min(group, kWarpgroupRows); ++heads) {
          if (group % heads != 0) continue;
          CHECK(best > 1);
          int64_t const tiles = tiles_of_group(seqlen_q, group, config, heads);
          CHECK(tiles > fewest || (tiles == fewest && heads <= best));
        }
        // As many tiles pay where they have neighbours and those of one head have not.
        bool const pays = packing_pays(mask, group, config, best);
        int64_t const alone = tiles_of_group(seqlen_q, group, config, 1);
        CHECK(fewest < alone ? pays : !pays || fewest == alone);
      }
    }
  }
  static_assert(tiles_of_group(1, 8, kTwo, 1) == 8 && tiles_of_group(1, 8, kTwo, 8) == 1);
  static_assert(tiles_of_group(16, 8, kTwo, 8) == 1 && tiles_of_group(17, 8, kTwo, 8) == 2);
  static_assert(tiles_of_group(24, 8, kThree, 8) == 1 && tiles_of_group(18, 7, kTwo, 7) == 1);
  static_assert(choose_packed_heads(full(1), 8, kTwo) == 8 && choose_packed_heads(full(1), 128, kTwo) == 64);
  static_assert(choose_packed_heads(full(1), 48, kTwo) == 48 && choose_packed_heads(full(64), 48, kTwo) == 16);
  static_assert(choose_packed_heads(full(1), 67, kTwo) == 1 && choose_packed_heads(full(1), 134, kTwo) == 2);
  static_assert(chosen(full(1), 8, kTwo) == 8 && chosen(full(100), 8, kTwo) == 8 && chosen(full(130), 8, kTwo) == 8);
  static_assert(chosen(full(128), 8, kTwo) == 8 &&  // alone, a head has one tile and no neighbour
                chosen(full(8192), 8, kTwo) == 1 && chosen(full(1), 1, kTwo) == 1);
}

// The cost that the choice goes by is near that of a loop over all tiles, wherever it makes a difference.
void cost_follows_the_visited_blocks() {
  for (ForwardConfig const& config : {kTwo, kThree}) {
    for (int group : {2, 3, 5, 7, 8, 11, 16}) {
      for (Mask const& mask : {causal(500), causal(2048), Mask{4096, 1024, -1, 0}, Mask{3000, 3000, 127, 0},
                               Mask{2048, 2048, 1023, 0}, Mask{1000, 3000, 50, 50}, full(2048)}) {
        auto const visited = [&](int heads) {
          int const positions = consumer_warpgroups(config) * make_row_map(heads).positions;
          int const cluster = choose_cluster(config, mask, false, positions);
          int64_t blocks = 0;
          for (int begin = 0; begin < mask.seqlen_q; begin += positions) {
            int const first = begin - begin / positions % cluster * positions;  // of the cluster
            blocks += mask.visited(first, first + cluster * positions, config.tile_n).size() + 1;
          }
          return static_cast<double>(blocks * (group / heads)) * (cluster > 1 ? kSharedStep : 1);
        };
        int const heads = choose_packed_heads(mask, group, config);
        double const cost = visited(heads) / visited(1);
        CHECK(!packing_pays(mask, group, config, heads) || cost <= 1.03);
        CHECK(packing_pays(mask, group, config, heads) || cost >= 0.97);
      }
    }
  }
}

void masks_save_keys_too() {
  static_assert(chosen(causal(2048), 8, kTwo) == 8 && chosen(causal(8192), 8, kThree) == 8);
  static_assert(chosen(causal(1 << 30), 8, kTwo) == 8 && chosen(causal(2048), 1, kTwo) == 1);
  static_assert(chosen({8192, 8192, 127, 0}, 8, kThree) == 8 && chosen({8192, 8192, 1023, 0}, 8, kThree) == 8);
  // Bounds of whole blocks lie at the edges of whole tiles: two blocks each, whoever shares them.
  static_assert(chosen({8192, 8192, 127, 0}, 8, kTwo) == 1 && chosen({8192, 8192, 100, 0}, 8, kTwo) == 8);
  // Rows that stay unused cost more than long sequences save: 4 in 64 of groups of 5, 9 of groups of 11.
  static_assert(chosen(causal(8192), 5, kTwo) == 1 && chosen(full(90), 5, kTwo) == 5);
  static_assert(chosen(causal(8192), 11, kTwo) == 1 && chosen(causal(8192), 67, kTwo) == 1);
  static_assert(chosen(causal(8192), 6, kTwo) == 2);
  // Rows without keys, and no keys at all.
  static_assert(chosen({4096, 1024, -1, 0}, 8, kTwo) == 8 && chosen({4096, 0, -1, 0}, 8, kTwo) == 1);
}

// Clusters where a tile waits for few keys that only its neighbour sees.
void clusters_where_few_keys_are_foreign() {
  constexpr auto cluster = [](Mask const& mask, int heads) {
    return choose_cluster(kTwo, mask, false, consumer_warpgroups(kTwo) * make_row_map(heads).positions);
  };
  static_assert(kTwo.cluster == 2);
  static_assert(cluster(full(2048), 1) == 2 && cluster(full(300), 1) == 1 && cluster(full(256), 1) == 2);
  static_assert(cluster(causal(2048), 1) == 1 && cluster(causal(4096), 1) == 2 && cluster(causal(2048), 8) == 2);
  static_assert(cluster({1500, 3400, -1, 37}, 1) == 2 && cluster({4000, 3600, -1, 0}, 1) == 2);
  static_assert(cluster({4096, 1024, -1, 0}, 1) == 1 && cluster({4096, 64, -1, 0}, 1) == 2);
  static_assert(cluster({8192, 8192, 4096, 0}, 1) == 1);
  static_assert(choose_cluster(kTwo, full(1024), false, 128) == 2 && choose_cluster(kTwo, full(1024), true, 128) == 1);
  static_assert(choose_cluster(kTwo, full(2048), true, 128) == 2);
}

}  // namespace

int main() {
  clusters_where_few_keys_are_foreign();
  divides_exactly();
  for (int seqlen_q : {1, 2, 17, 63, 130}) {
    for (Window const& window : {Window{-1, -1}, Window{-1, 0}, Window{20, 3}}) {
      for (int pack : {1, 2, 3, 5, 7, 8, 12, 16, 64}) {
        every_query_has_one_row<2>(2, 3, pack, pack, seqlen_q, 100, window);
        every_query_has_one_row<3>(1, 2, 2 * pack, pack, seqlen_q, 77, window);
        if (window.left < 0) every_query_has_one_row<2>(2, 2, 2 * pack, pack, seqlen_q, 300, window, 2);
      }
      every_query_has_one_row<2>(1, 1, 64, 1, seqlen_q, 200, window);
    }
  }
  fewest_tiles_are_chosen();
  cost_follows_the_visited_blocks();
  masks_save_keys_too();
  return check::report("row map");
}
