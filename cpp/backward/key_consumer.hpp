// A consumer warpgroup that owns 64 of a tile's 128 keys: dK and dV of them over all steps in registers, and its share
// of every step's dQ. Before it: consumer.hpp. Its partner: producer.hpp.
#pragma once

#include "backward/consumer.hpp"

namespace flashhopper {

// The same descriptors of an operand in shared memory, computed anew where they are used: held through the loop, those
// of K, V and K^T would cost the registers of 24 values that it does not have. The volatile keeps the compiler from
// holding them.
template <class Fragment>
FLASHHOPPER_DEVICE auto recomputed(Fragment const& fragment) {
  auto descriptor = fragment.data();
  asm volatile("mov.b32 %0, %1;" : "=r"(descriptor.desc_.reg32_[0]) : "r"(fragment.data().desc_.reg32_[0]));
  return cute::make_tensor(descriptor, fragment.layout());
}

template <class Traits, bool kCapped>
struct KeyConsumer : BackwardConsumer<Traits> {
  using Base = BackwardConsumer<Traits>;
  using Element = typename Traits::Element;
  using Base::args, Base::storage, Base::warpgroup, Base::thread;

  // Where Q and dO of a step stand in their rings of two: one position for both, registers are few. dS^T has a ring of
  // three, in which the warpgroups may be a step apart.
  static_assert(Traits::kQStages == 2 && Traits::kDoutStages == 2 && Traits::kExchangeTiles == 3);
  RingPosition<2> at;
  RingPosition<3> at_ds;
  // Whether registers allow lse to be loaded while the scores, and delta while dP are on their way.
  static constexpr bool kColumnsEarly = Base::kScores <= 32;

  FLASHHOPPER_DEVICE void run() {
    TileReader<BackwardStorage<Traits>> reader{storage};
    while (true) {
      int const slot = reader.await();
      bool const ends_tile = storage.tile[slot].block < 0;
      int const steps = storage.tile[slot].steps;
      reader.hand_back(slot, this->lane == 0);
      if (ends_tile) break;
      differentiate_tile(steps, slot & 1);
    }
  }

 private:
  // Makes this warpgroup's part of dS visible to wgmma and to the other warpgroup, and the dQ written before it to the
  // warp that adds it: one fence, which takes hundreds of clocks, for both.
  FLASHHOPPER_DEVICE void publish(Barrier& ds_full, bool has_dq) const {
    fence_async_shared();
    __syncwarp();
    if (this->lane != 0) return;
    ds_full.arrive();
    if (has_dq) storage.dq_full[warpgroup].arrive();
  }

  // count: of steps. phase: of K and V, one each a tile, and the ring of tiles has an even length.
  FLASHHOPPER_DEVICE void differentiate_tile(int count, uint32_t phase) {
    using namespace cute;
    typename Traits::MmaScores mma_s;
    typename Traits::MmaDp mma_dp;
    typename Traits::MmaDv mma_dv;
    typename Traits::MmaDk mma_dk;
    typename Traits::MmaDq mma_dq;
    Tensor sQ = make_tensor(make_smem_ptr(storage.q[0]), typename Traits::LayoutQ{});             // (M, D, stages)
    Tensor sQt = make_tensor(make_smem_ptr(storage.q[0]), typename Traits::LayoutQt{});           // (D, M, stages)
    Tensor sDO = make_tensor(make_smem_ptr(storage.dout[0]), typename Traits::LayoutDO{});        // (M, Dv, stages)
    Tensor sDOt = make_tensor(make_smem_ptr(storage.dout[0]), typename Traits::LayoutDOt{});      // (Dv, M, stages)
    Tensor sK = make_tensor(make_smem_ptr(storage.k), typename Traits::LayoutK{})(_, _, _0{});    // (N, D)
    Tensor sKt = make_tensor(make_smem_ptr(storage.k), typename Traits::LayoutKt{})(_, _, _0{});  // (D, N)
    Tensor sV = make_tensor(make_smem_ptr(storage.v), typename Traits::LayoutV{})(_, _, _0{});    // (N, Dv)
    Tensor sDS = make_tensor(make_smem_ptr(storage.exchange[0]), typename Traits::LayoutP{});     // (N, M, 2)
    Tensor sDSt = make_tensor(make_smem_ptr(storage.exchange[0]), typename Traits::LayoutPt{});   // (M, N, 2)
    // Own rows of K, V, dS^T; own part of dQ: half of its columns, or of its rows.
    Tensor sK_own = local_tile(sK, Shape<_64, Int<Traits::kHeadDim>>{}, make_coord(warpgroup, 0));
    Tensor sV_own = local_tile(sV, Shape<_64, Int<Traits::kHeadDimV>>{}, make_coord(warpgroup, 0));
    Tensor sDS_own = local_tile(sDS, Shape<_64, Int<Traits::kTileM>, _3>{}, make_coord(warpgroup, 0, 0));
    constexpr bool kSplitColumns = dq_splits_columns(Traits::kTileM);
    Tensor sDSt_own =
        local_tile(sDSt, Shape<_64, Int<Traits::kTileN>, _3>{}, make_coord(kSplitColumns ? 0 : warpgroup, 0, 0));
    Tensor sKt_own = local_tile(sKt, Shape<Int<Traits::kDqColumns>, Int<Traits::kTileN>>{},
                                make_coord(kSplitColumns ? warpgroup : 0, 0));

    Tensor tSrK = mma_s.get_slice(thread).partition_fragment_A(sK_own);
    Tensor tSrQ = mma_s.get_slice(thread).partition_fragment_B(sQ);
    Tensor tPrV = mma_dp.get_slice(thread).partition_fragment_A(sV_own);
    Tensor tPrDO = mma_dp.get_slice(thread).partition_fragment_B(sDO);
    Tensor tVrDO = mma_dv.get_slice(thread).partition_fragment_B(sDOt);
    Tensor tKrQ = mma_dk.get_slice(thread).partition_fragment_B(sQt);
    Tensor tQrDS = mma_dq.get_slice(thread).partition_fragment_A(sDSt_own);
    Tensor tQrK = mma_dq.get_slice(thread).partition_fragment_B(sKt_own);

    float scores[Base::kScores], gradients[Base::kScores], dq[Base::kDq], dk[Base::kOwn], dv[Base::kOwnV];
    uint32_t packed_p[Base::kScores / 2], packed_ds[Base::kScores / 2];
    auto const score_shape = partition_shape_C(mma_s, Shape<_64, Int<Traits::kTileM>>{});
    Tensor tSrS = make_tensor(make_rmem_ptr(scores), score_shape);
    Tensor tPrP = make_tensor(make_rmem_ptr(gradients), score_shape);
    Tensor tVrV = make_tensor(make_rmem_ptr(dv), partition_shape_C(mma_dv, Shape<_64, Int<Traits::kHeadDimV>>{}));
    Tensor tKrK = make_tensor(make_rmem_ptr(dk), partition_shape_C(mma_dk, Shape<_64, Int<Traits::kHeadDim>>{}));
    Tensor tQrQ = make_tensor(make_rmem_ptr(dq), partition_shape_C(mma_dq, Shape<_64, Int<Traits::kDqColumns>>{}));
    ProbabilityLayout<Traits::kTileM> const operand{};
    Tensor tVrP = make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(packed_p)), operand);
    Tensor tKrDS = make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(packed_ds)), operand);
    FLASHHOPPER_UNROLL
    for (int e = 0; e < Base::kOwn; ++e) dk[e] = 0.f;
    FLASHHOPPER_UNROLL
    for (int e = 0; e < Base::kOwnV; ++e) dv[e] = 0.f;

    // The dS ring takes this tile's dS once the last tile's dK has left it.
    storage.end.dk_empty.wait(phase ^ 1);
    storage.k_full.wait(phase);
    storage.v_full.wait(phase);
    if (count > 0) {
      storage.q_full[at.slot].wait(at.phase);
      issue_gemm<Accumulate::kFresh>(mma_s, tSrK, tSrQ(_, _, _, at.slot), tSrS);
      storage.dout_full[at.slot].wait(at.phase);
      issue_gemm<Accumulate::kFresh>(mma_dp, tPrV, tPrDO(_, _, _, at.slot), tPrP);
      // Of the step at hand: read before its scores have arrived, for then nothing else would hide the latency.
      bool is_masked = storage.step[at.slot].is_masked;
      typename Base::ColumnValues columns;
      if constexpr (kColumnsEarly) this->load_columns(columns, storage.lse_log2[at.slot]);
      warpgroup_wait<1>();
      warpgroup_fence_operand(tSrS);
      for (int left = count; left > 0; --left) {
        // Scores have arrived, their gradient is being computed.
        if constexpr (kCapped) args.softcap.apply(scores);  // before the mask, whose -inf must stay
        if (is_masked) {
          this->mask_scores(scores, storage.step[at.slot].mask, warpgroup * kWarpgroupRows);
        }
        if constexpr (!kColumnsEarly) this->load_columns(columns, storage.lse_log2[at.slot]);
        this->exponentiate(scores, columns);
        if constexpr (kColumnsEarly) this->load_columns(columns, storage.delta[at.slot]);
        // dS of the step before, by both warpgroups. That the other one has written its part also tells that it has
        // multiplied with the dS of three steps ago, whose place this step's takes. Waited for here, because the
        // compiler would move the exponentials behind the wait for dP, which they are to fill; not over this one.
        bool const has_last = left != count;
        auto const last = at_ds.before();
        warpgroup_fence_operand(tSrS);
        if (has_last) storage.ds_full[last.slot].wait(last.phase);
        warpgroup_wait<0>();
        warpgroup_fence_operand(tPrP);
        if constexpr (kCapped) {
          this->differentiate_capped(scores, gradients, storage.lse_log2[at.slot], storage.delta[at.slot], packed_p,
                                     packed_ds);
        } else {
          if constexpr (!kColumnsEarly) this->load_columns(columns, storage.delta[at.slot]);
          this->differentiate(scores, gradients, columns, packed_p, packed_ds);
        }
        this->stage(mma_s, packed_ds, sDS_own(_, _, at_ds.slot));
        // dQ goes one step late, so that nobody waits for the other warpgroup's dS of the same step: one multiplies
        // while the other one exponentiates. The dQ that the first step computes is of whatever lies there, and so are
        // the scores and their gradient that the last step computes; nobody looks at them: a wgmma under a condition
        // would cost every step more.
        issue_gemm<Accumulate::kFresh>(mma_dq, tQrDS(_, _, _, last.slot), recomputed(tQrK), tQrQ);
        issue_gemm<Accumulate::kAdd>(mma_dv, tVrP, tVrDO(_, _, _, at.slot), tVrV);
        issue_gemm<Accumulate::kAdd>(mma_dk, tKrDS, tKrQ(_, _, _, at.slot), tKrK);
        // dQ is written while dV and dK are computed, which leave shared memory half of its time, or while dK and the
        // next scores are.
        auto const send_dq = [&] {
          if (has_last) this->write_dq(dq, at.slot ^ 1);  // one part a step: the position is the parity
          publish(storage.ds_full[at_ds.slot], has_last);
        };
        if constexpr (!Traits::kConfig.scores_first) {
          warpgroup_wait<2>();
          warpgroup_fence_operand(tQrQ);
          send_dq();
        }
        auto next = at;
        next.advance();
        if (left > 1) storage.q_full[next.slot].wait(next.phase);
        is_masked = storage.step[next.slot].is_masked;
        warpgroup_wait<1>();
        if constexpr (Traits::kConfig.scores_first) warpgroup_fence_operand(tQrQ);
        warpgroup_fence_operand(tVrV);
        issue_gemm<Accumulate::kFresh>(mma_s, recomputed(tSrK), tSrQ(_, _, _, next.slot), tSrS);
        this->release(storage.dout_empty[at.slot]);
        if constexpr (Traits::kConfig.scores_first) send_dq();
        if (left > 1) storage.dout_full[next.slot].wait(next.phase);
        warpgroup_wait<1>();
        warpgroup_fence_operand(tKrK);
        issue_gemm<Accumulate::kFresh>(mma_dp, recomputed(tPrV), tPrDO(_, _, _, next.slot), tPrP);
        this->release(storage.q_empty[at.slot]);
        at = next;
        at_ds.advance();
        if constexpr (kColumnsEarly) this->load_columns(columns, storage.lse_log2[at.slot]);
        warpgroup_wait<1>();
        warpgroup_fence_operand(tSrS);
      }
      auto const last = at_ds.before();
      storage.ds_full[last.slot].wait(last.phase);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tPrP);
      issue_gemm<Accumulate::kFresh>(mma_dq, tQrDS(_, _, _, last.slot), recomputed(tQrK), tQrQ);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tQrQ);
      this->release(storage.end.k_empty);
      this->write_dq(dq, at.slot ^ 1);
      this->hand_over_dq();
    } else {
      this->release(storage.end.k_empty);
    }
    // dV goes to this warpgroup's rows of V, which nobody else reads; dK to a tile of the dS ring that is at rest, so
    // that the next K is already on its way.
    uint32_t packed_dv[Base::kOwnV / 2];
    pack_all<Element>(dv, packed_dv);
    this->stage(mma_dv, packed_dv, sV_own);
    this->announce(storage.end.dv_full);
    FLASHHOPPER_UNROLL
    for (int e = 0; e < Base::kOwn; ++e) dk[e] *= args.softmax_scale;
    uint32_t packed_dk[Base::kOwn / 2];
    pack_all<Element>(dk, packed_dk);
    int const last_ds = at_ds.before().slot;
    if (warpgroup == 0 && thread == 0) storage.end.last_ds = last_ds;
    Element* const own = storage.exchange[dk_tile(last_ds, warpgroup)];
    this->stage(mma_dk, packed_dk, make_tensor(make_smem_ptr(own), typename Traits::LayoutOwnDk{})(_, _, _0{}));
    this->announce(storage.end.dk_full);
    // Costs nothing, the next K waits for both warpgroups; without a barrier ptxas holds the ring positions of all
    // steps in registers of every thread.
    named_barrier_sync<kBackwardWarpgroups * kWarpgroupThreads>(kTurnOfWarpgroup);
  }
};

}  // namespace flashhopper
