// What the 16-bit and the 8-bit forward dispatch share: schedule, output, plans.
#include "forward_common.hpp"

#include <algorithm>
#include <cstdio>

#include "core/heuristics.hpp"

namespace flashhopper {
namespace {

// cluster: CTAs whose tiles are one block of the schedule.
BatchSchedule make_schedule(Problem const& p, ForwardConfig const& config, RowMap const& row_map, int cluster) {
  Window const window = p.window();
  bool const uneven = window.left >= 0 || window.right >= 0;
  int const row_bytes = (config.head_dim + config.head_dim_v) * config.element_bytes;
  int const packs = static_cast<int>(p.heads / row_map.heads), kv_heads = static_cast<int>(p.kv_heads);
  BatchSchedule schedule{};
  schedule.tile = cluster * config.tile_m;
  if (p.is_packed) {
    schedule.dense.heads = packs;
    schedule.dense.descending = uneven;
    schedule.section_rows = uneven ? static_cast<int>(kL2SectionBytes / row_bytes) : 0;
    schedule.group = packs / kv_heads;
    return schedule;
  }
  int const seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
  int const positions = cluster * consumer_warpgroups(config) * row_map.positions;
  schedule.dense = make_tile_schedule(ceil_div(seqlen_q, positions), static_cast<int>(p.batch), packs, kv_heads,
                                      p.seqlen_k * row_bytes, uneven, uneven);
  schedule.rows = {{0, seqlen_q, seqlen_q}, {0, seqlen_k, seqlen_k}};
  return schedule;
}

// Query blocks of one pack of heads; packed sequences: at most, where the list has blocks of `cluster` tiles.
int64_t query_blocks(Problem const& p, ForwardConfig const& config, RowMap const& row_map, int cluster = 1) {
  if (p.is_packed) return most_packed_blocks(p.batch, p.total_q, cluster * config.tile_m) * cluster;
  int64_t const positions = consumer_warpgroups(config) * row_map.positions;
  return (p.seqlen_q + positions - 1) / positions * p.batch;
}

// All tiles that the grid is handed, with those that even out the last cluster of a pack; packed sequences: at most.
int64_t work_tiles(Problem const& p, ForwardConfig const& config, ForwardArgs const& args) {
  if (!p.is_packed) return int64_t{args.schedule.dense.total()} * args.cluster;
  return query_blocks(p, config, args.row_map, args.cluster) * (p.heads / args.row_map.heads);
}

// Packed sequences are taken for as long as they are on average: no length is known here.
int choose_cluster(Problem const& p, ForwardConfig const& config, int positions) {
  Mask mask = p.mask();
  if (!p.is_packed || p.batch == 0) return choose_cluster(config, mask, false, positions);
  mask.seqlen_q = static_cast<int>(p.total_q / p.batch);
  mask.seqlen_k = static_cast<int>(p.total_k / p.batch);
  return choose_cluster(config, mask, p.total_q != p.batch * p.seqlen_q, positions);
}

}  // namespace

flashhopper_status set_problem(Problem const& p, ForwardConfig const& config, RowMap const& row_map, int num_sms,
                               ForwardArgs* args, int* grid) {
  int64_t const m_blocks = query_blocks(p, config, row_map), packs = p.heads / row_map.heads;
  if (m_blocks > kMaxTiles / packs) {
    return set_error(FLASHHOPPER_UNSUPPORTED, "heads ", p.heads, " x ", m_blocks, " query blocks of batch ", p.batch,
                     " exceed 2^31 work tiles: split the batch");
  }
  args->window = p.window();
  args->wrap = wrap_of(p.is_packed);
  args->row_map = row_map;
  args->softmax_scale_log2 = p.softmax_scale * kLog2e;
  args->group = static_cast<int>(packs / p.kv_heads);
  args->lse.batch_stride = p.is_packed ? 0 : p.heads * p.seqlen_q;
  args->lse.head_stride = p.is_packed ? p.total_q : p.seqlen_q;
  int const sms = num_sms - p.sm_margin, positions = consumer_warpgroups(config) * row_map.positions;
  args->cluster = sms < config.cluster ? 1 : choose_cluster(p, config, positions);
  args->schedule = make_schedule(p, config, row_map, args->cluster);
  *grid = static_cast<int>(std::min<int64_t>(work_tiles(p, config, *args), sms / args->cluster * args->cluster));
  return FLASHHOPPER_OK;
}

flashhopper_status set_output(flashhopper_tensor const& out, Problem const& p, OutputTensor* output) {
  auto const is_aligned = [](int64_t stride, int64_t extent) { return extent <= 1 || stride % 8 == 0; };
  int64_t const batch_stride = p.is_packed ? 0 : out.batch_stride;
  if (reinterpret_cast<uintptr_t>(out.data) % 16 != 0 || !is_aligned(batch_stride, p.batch) ||
      !is_aligned(out.row_stride, p.is_packed ? p.total_q : p.seqlen_q) || !is_aligned(out.head_stride, p.heads)) {
    return set_error(FLASHHOPPER_INVALID_ARGUMENT, "out cannot be written in 16-byte pieces: address ", out.data,
                     ", strides in elements row ", out.row_stride, ", head ", out.head_stride, ", batch ",
                     out.batch_stride, "; the address must be a multiple of 16 bytes and each stride of 8 elements");
  }
  *output = {out.data, batch_stride, out.row_stride, out.head_stride, static_cast<int>(p.head_dim_v)};
  return FLASHHOPPER_OK;
}

void describe(ForwardConfig const& config, flashhopper_plan* plan) {
  *plan = {};
  std::snprintf(plan->config, sizeof(plan->config), "%.*s", static_cast<int>(config.name.size()), config.name.data());
  plan->tile_m = config.tile_m;
  plan->tile_n = config.tile_n;
  plan->head_dim = config.head_dim;
  plan->head_dim_v = config.head_dim_v;
  plan->stages = config.stages;
  plan->q_stages = config.q_stages;
  plan->consumer_warpgroups = consumer_warpgroups(config);
  plan->cluster = config.cluster;
  plan->threads = threads(config);
  plan->producer_registers = producer_registers(config);
  plan->consumer_registers = consumer_registers(config);
  plan->smem_bytes = smem_bytes(config);
  plan->workspace_bytes = flashhopper_workspace_bytes();
  plan->packed_heads = 1;
}

void describe_problem(Problem const& p, ForwardConfig const& config, ForwardArgs const& args, int grid,
                      flashhopper_plan* plan) {
  describe(config, plan);
  plan->grid = grid;
  plan->cluster = args.cluster;
  plan->packed_heads = args.row_map.heads;
  if (p.is_packed) plan->workspace_bytes += flashhopper_packed_workspace_bytes(p.batch, p.total_q);
  plan->tiles = work_tiles(p, config, args);
  double const batch = static_cast<double>(p.batch), heads = static_cast<double>(p.heads);
  double const sq = static_cast<double>(p.seqlen_q), sk = static_cast<double>(p.seqlen_k);
  double const qk = static_cast<double>(p.head_dim), v = static_cast<double>(p.head_dim_v);
  plan->flops = 2 * batch * heads * p.kept_scores() * (qk + v);
  double const read = heads * sq * qk + static_cast<double>(p.kv_heads) * sk * (qk + v);
  plan->bytes = batch * (config.element_bytes * read + heads * sq * (2 * v + 4));
}

}  // namespace flashhopper
