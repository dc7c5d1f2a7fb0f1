// A consumer warpgroup: online-softmax attention of 64 query rows against the streamed key blocks.
// Before it: kernel.hpp. Its partner: producer.hpp. After it: epilogue.hpp.
#pragma once

#include "core/gemm.hpp"
#include "core/softmax.hpp"
#include "core/tile_queue.hpp"
#include "forward/args.hpp"
#include "forward/epilogue.hpp"
#include "forward/storage.hpp"

namespace flashhopper {

template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  static constexpr int kScores = Traits::kTileN / 2;      // floats of S in one thread
  static constexpr int kOutputs = Traits::kHeadDimV / 2;  // floats of O in one thread

  ForwardArgs const& args;
  ForwardStorage<Traits>& storage;
  int const warpgroup;
  int const thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
  int const lane = thread % 32;
  // Row of accumulator row 0 within the warpgroup's 64, and first column within an 8-column group.
  int const thread_row = thread / 32 * 16 + lane / 4;
  int const thread_column = lane % 4 * 2;

  RingPosition<Traits::kStages> at_k, at_v;
  RingPosition<Traits::kQStages> at_q;

  FLASHHOPPER_DEVICE Consumer(ForwardArgs const& args, ForwardStorage<Traits>& storage, int warpgroup)
      : args(args), storage(storage), warpgroup(warpgroup) {}

  FLASHHOPPER_DEVICE void run() {
    if constexpr (Traits::kConfig.ping_pong) {
      if (warpgroup == Traits::kWarpgroups - 1) pass_turn();  // to warpgroup 0, which goes first
    }
    TileReader<ForwardStorage<Traits>> reader{storage};
    Tile tile;
    while (reader.next_for_warp(tile, lane == 0)) {
      attend(tile);
      at_q.advance();
    }
    if constexpr (Traits::kConfig.ping_pong) {
      if (warpgroup == 0) wait_turn();  // the one arrival still pending, so that the barrier ends even
    }
  }

 private:
  FLASHHOPPER_DEVICE void wait_turn() { named_barrier_sync<2 * kWarpgroupThreads>(kTurnOfWarpgroup + warpgroup); }
  FLASHHOPPER_DEVICE void pass_turn() {
    int const next = warpgroup + 1 == Traits::kWarpgroups ? 0 : warpgroup + 1;
    named_barrier_arrive<2 * kWarpgroupThreads>(kTurnOfWarpgroup + next);
  }

  // One arrival a warp: its wgmma reads of the slot are over.
  template <class Ring>
  FLASHHOPPER_DEVICE void release(Barrier* empty, Ring& ring) {
    if (lane == 0) empty[ring.slot].arrive();
    ring.advance();
  }

  // The same, but not before `value` is known. The alignment bits of the workspace are zero, which the compiler cannot
  // know.
  template <class Ring>
  FLASHHOPPER_DEVICE void release_after(Barrier* empty, Ring& ring, float value) {
    uint32_t const zero =
        __float_as_uint(value) & static_cast<uint32_t>(reinterpret_cast<uintptr_t>(args.workspace) & 3);
    if (lane == 0) empty[ring.slot].arrive(zero);
    ring.advance();
  }

  // Scores outside the mask become -inf. first_row: sequence position of the thread's accumulator row 0.
  FLASHHOPPER_DEVICE void apply_mask(float (&scores)[kScores], int first_row, int n) const {
    int const origin = n * Traits::kTileN + thread_column;
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      int const end = args.mask.key_end(first_row + 8 * r) - origin;
      FLASHHOPPER_UNROLL
      for (int e = 0; e < kScores; ++e) {
        if (accumulator_row(e) == r && accumulator_column(e) >= end) scores[e] = -INFINITY;
      }
    }
    if (args.mask.window_left < 0) return;  // the same for all threads
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      int const begin = args.mask.key_begin(first_row + 8 * r) - origin;
      FLASHHOPPER_UNROLL
      for (int e = 0; e < kScores; ++e) {
        if (accumulator_row(e) == r && accumulator_column(e) < begin) scores[e] = -INFINITY;
      }
    }
  }

  FLASHHOPPER_DEVICE static void multiply_rows(float (&outputs)[kOutputs], float const (&factor)[kRowsPerThread]) {
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kOutputs; ++e) outputs[e] *= factor[accumulator_row(e)];
  }

  FLASHHOPPER_DEVICE void attend(Tile const& tile) {
    using namespace cute;
    int const row_begin = tile.block * Traits::kTileM;
    int const first_row = row_begin + warpgroup * kWarpgroupRows + thread_row;
    BlockRange const blocks = args.mask.visited(row_begin, row_begin + Traits::kTileM, Traits::kTileN);
    BlockRange const unmasked = args.mask.unmasked(row_begin, row_begin + Traits::kTileM, Traits::kTileN);

    typename Traits::MmaQK mma_qk;
    typename Traits::MmaPV mma_pv;
    Tensor sQ = make_tensor(make_smem_ptr(storage.q[warpgroup][0]), typename Traits::LayoutQ{});  // (64, D, q_stages)
    Tensor sK = make_tensor(make_smem_ptr(storage.k[0]), typename Traits::LayoutK{});             // (N, D, stages)
    Tensor sVt = make_tensor(make_smem_ptr(storage.v[0]), typename Traits::LayoutVt{});           // (Dv, N, stages)
    Tensor tSrQ = mma_qk.get_slice(thread).partition_fragment_A(sQ);   // (MMA, 1, D/16, q_stages)
    Tensor tSrK = mma_qk.get_slice(thread).partition_fragment_B(sK);   // (MMA, 1, D/16, stages)
    Tensor tOrV = mma_pv.get_slice(thread).partition_fragment_B(sVt);  // (MMA, 1, N/16, stages)

    float scores[kScores];
    float outputs[kOutputs];
    uint32_t probabilities[kScores / 2];
    Tensor tSrS = make_tensor(make_rmem_ptr(scores), partition_shape_C(mma_qk, Shape<_64, Int<Traits::kTileN>>{}));
    Tensor tOrO = make_tensor(make_rmem_ptr(outputs), partition_shape_C(mma_pv, Shape<_64, Int<Traits::kHeadDimV>>{}));
    Tensor tOrP =
        make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(probabilities)), ProbabilityLayout<Traits::kTileN>{});

    OnlineSoftmax softmax(args.softmax_scale_log2);
    float rescale[kRowsPerThread];

    FLASHHOPPER_UNROLL
    for (int e = 0; e < kOutputs; ++e) outputs[e] = 0.f;
    storage.q_full[warpgroup][at_q.slot].wait(at_q.phase);

    auto issue_qk = [&] {
      storage.k_full[at_k.slot].wait(at_k.phase);
      if constexpr (Traits::kConfig.ping_pong) wait_turn();
      issue_gemm<Accumulate::kFresh>(mma_qk, tSrQ(_, _, _, at_q.slot), tSrK(_, _, _, at_k.slot), tSrS);
    };
    auto issue_pv = [&] {
      storage.v_full[at_v.slot].wait(at_v.phase);
      issue_gemm<Accumulate::kAdd>(mma_pv, tOrP, tOrV(_, _, _, at_v.slot), tOrO);
    };
    auto finish_pv = [&] {
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrO);
      release(storage.v_empty, at_v);
    };
    // From the scores of block n to its probabilities, while the previous block's product with V runs. That product is
    // waited for within the exponentials: the rest of them then share their time with the conversions and with the
    // rescaling of O. ptxas would move the wait to the top, where nothing is left to overlap; the release of K in front
    // of it, tied to the first exponential, holds it down (scripts/check_sass.py verifies).
    auto finish_scores = [&](int n, auto pv_in_flight) {
      warpgroup_fence_operand(tSrS);
      // Whether a block needs the element mask is the same for all threads of the CTA.
      if (n < unmasked.begin || n >= unmasked.end) apply_mask(scores, first_row, n);
      rescale[0] = softmax.raise_max(scores, 0);
      rescale[1] = softmax.raise_max(scores, 1);
      softmax.exponentiate(scores, 0);
      release_after(storage.k_empty, at_k, scores[0]);
      softmax.exponentiate(scores, 1);
      if constexpr (decltype(pv_in_flight)::value) finish_pv();
      pack_all<Element>(scores, probabilities);
      multiply_rows(outputs, rescale);
    };

    if (blocks.size() > 0) {
      int n = blocks.end - 1;
      issue_qk();
      if constexpr (Traits::kConfig.ping_pong) pass_turn();
      warpgroup_wait<0>();
      finish_scores(n, false_type{});
      for (--n; n >= blocks.begin; --n) {
        issue_qk();
        issue_pv();
        if constexpr (Traits::kConfig.ping_pong) pass_turn();
        warpgroup_wait<1>();
        finish_scores(n, true_type{});
      }
      issue_pv();
      finish_pv();
    }

    float normalise[kRowsPerThread], lse[kRowsPerThread];
    softmax.finish(normalise, lse);
    multiply_rows(outputs, normalise);
    store_lse(args, tile, lse, first_row, lane);
    // The output replaces the queries, which every warp of the warpgroup must have finished with.
    named_barrier_sync<kWarpgroupThreads>(kOutputOfWarpgroup + warpgroup);
    stage_output<Traits>(tOrO, mma_pv, storage.q[warpgroup][at_q.slot], thread);
    fence_async_shared();
    __syncwarp();
    if (lane == 0) storage.o_full[warpgroup][at_q.slot].arrive();
  }
};

}  // namespace flashhopper
