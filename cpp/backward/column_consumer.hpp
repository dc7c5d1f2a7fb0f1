// A consumer warpgroup that owns half of the columns of dK and dV for all 64 keys of a tile. Warpgroup 0 computes the
// scores of a step and writes the probabilities to shared memory, warpgroup 1 computes their gradient; both then
// multiply with their halves. Before it: consumer.hpp. Its partner: producer.hpp.
#pragma once

#include "backward/consumer.hpp"

namespace flashhopper {

template <class Traits, bool kCapped>
struct ColumnConsumer : BackwardConsumer<Traits> {
  using Base = BackwardConsumer<Traits>;
  using Element = typename Traits::Element;
  using Base::args, Base::storage, Base::warpgroup, Base::thread, Base::lane;
  static constexpr int kScores = Base::kScores;

  RingPosition<Traits::kQStages> at_q;
  RingPosition<Traits::kDoutStages> at_dout;
  RingPosition<2> exchange;

  FLASHHOPPER_DEVICE void run() {
    TileReader<BackwardStorage<Traits>> reader{storage};
    while (true) {
      int const slot = reader.await();
      bool const is_last = storage.tile[slot].block < 0;
      int const steps = storage.tile[slot].steps;
      reader.hand_back(slot, this->lane == 0);
      if (is_last) break;
      differentiate_tile(steps, slot & 1);
    }
  }

 private:
  // Makes this warpgroup's tile visible to wgmma and to the other warpgroup, and the part of dQ written before it to
  // the warp that adds it.
  FLASHHOPPER_DEVICE void publish(Barrier& full, bool has_dq) {
    fence_async_shared();
    __syncwarp();
    if (lane == 0) full.arrive();
    if (lane == 0 && has_dq) storage.dq_full[warpgroup].arrive();
  }

  template <class TiledMma, class SharedTensor>
  FLASHHOPPER_DEVICE void load_probabilities(TiledMma const& mma, SharedTensor const& tile,
                                             uint32_t (&packed)[kScores / 2]) const {
    using namespace cute;
    using Atom = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
    auto const thread_copy = make_tiled_copy_C(Atom{}, mma).get_slice(thread);
    auto const shape = partition_shape_C(mma, Shape<_64, Int<Traits::kTileM>>{});
    Tensor target = make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(packed)), make_layout(shape));
    copy(Atom{}, thread_copy.partition_S(tile), thread_copy.retile_D(target));
  }

  // count: of steps. phase: of K and V, one each a tile, and the ring of tiles has an even length.
  FLASHHOPPER_DEVICE void differentiate_tile(int count, uint32_t phase) {
    using namespace cute;
    typename Traits::MmaScores mma_s;
    typename Traits::MmaDp mma_dp;
    typename Traits::MmaDvShared mma_dv;
    typename Traits::MmaDkShared mma_dk;
    typename Traits::MmaDq mma_dq;
    Tensor sQ = make_tensor(make_smem_ptr(storage.q[0]), typename Traits::LayoutQ{});             // (M, D, stages)
    Tensor sQt = make_tensor(make_smem_ptr(storage.q[0]), typename Traits::LayoutQt{});           // (D, M, stages)
    Tensor sDO = make_tensor(make_smem_ptr(storage.dout[0]), typename Traits::LayoutDO{});        // (M, Dv, stages)
    Tensor sDOt = make_tensor(make_smem_ptr(storage.dout[0]), typename Traits::LayoutDOt{});      // (Dv, M, stages)
    Tensor sK = make_tensor(make_smem_ptr(storage.k), typename Traits::LayoutK{})(_, _, _0{});    // (N, D)
    Tensor sKt = make_tensor(make_smem_ptr(storage.k), typename Traits::LayoutKt{})(_, _, _0{});  // (D, N)
    Tensor sV = make_tensor(make_smem_ptr(storage.v), typename Traits::LayoutV{})(_, _, _0{});    // (N, Dv)
    Tensor sX = make_tensor(make_smem_ptr(storage.exchange[0]), typename Traits::LayoutP{});      // (N, M, dS P)
    Tensor sXt = make_tensor(make_smem_ptr(storage.exchange[0]), typename Traits::LayoutPt{});    // (M, N, dS P)
    // The halves of the columns that this warpgroup multiplies with.
    Tensor sQt_own = local_tile(sQt, Shape<Int<Traits::kOwnColumns>, Int<Traits::kTileM>, Int<Traits::kQStages>>{},
                                make_coord(warpgroup, 0, 0));
    Tensor sDOt_own =
        local_tile(sDOt, Shape<Int<Traits::kOwnColumnsV>, Int<Traits::kTileM>, Int<Traits::kDoutStages>>{},
                   make_coord(warpgroup, 0, 0));
    // (columns of a part of dQ, N, parts)
    Tensor sKt_own = local_tile(sKt, Shape<Int<Traits::kDqColumns>, Int<Traits::kTileN>>{}, make_coord(_, 0));

    Tensor tSrK = mma_s.get_slice(thread).partition_fragment_A(sK);
    Tensor tSrQ = mma_s.get_slice(thread).partition_fragment_B(sQ);
    Tensor tPrV = mma_dp.get_slice(thread).partition_fragment_A(sV);
    Tensor tPrDO = mma_dp.get_slice(thread).partition_fragment_B(sDO);
    Tensor tVrP = mma_dv.get_slice(thread).partition_fragment_A(sX);
    Tensor tVrDO = mma_dv.get_slice(thread).partition_fragment_B(sDOt_own);
    Tensor tKrDS = mma_dk.get_slice(thread).partition_fragment_A(sX);
    Tensor tKrQ = mma_dk.get_slice(thread).partition_fragment_B(sQt_own);
    Tensor tQrDS = mma_dq.get_slice(thread).partition_fragment_A(sXt);
    Tensor tQrK = mma_dq.get_slice(thread).partition_fragment_B(sKt_own);

    float scores[kScores], dq[Base::kDq], dk[Base::kOwn], dv[Base::kOwnV];
    uint32_t packed[kScores / 2];
    Tensor tSrS = make_tensor(make_rmem_ptr(scores), partition_shape_C(mma_s, Shape<_64, Int<Traits::kTileM>>{}));
    Tensor tVrV = make_tensor(make_rmem_ptr(dv), partition_shape_C(mma_dv, Shape<_64, Int<Traits::kOwnColumnsV>>{}));
    Tensor tKrK = make_tensor(make_rmem_ptr(dk), partition_shape_C(mma_dk, Shape<_64, Int<Traits::kOwnColumns>>{}));
    Tensor tQrQ = make_tensor(make_rmem_ptr(dq), partition_shape_C(mma_dq, Shape<_64, Int<Traits::kDqColumns>>{}));
    FLASHHOPPER_UNROLL
    for (int e = 0; e < Base::kOwn; ++e) dk[e] = 0.f;
    FLASHHOPPER_UNROLL
    for (int e = 0; e < Base::kOwnV; ++e) dv[e] = 0.f;

    storage.k_full.wait(phase);
    storage.v_full.wait(phase);
    for (int left = count; left > 0; --left) {
      int const slot_ds = exchange.slot, slot_p = 2 + exchange.slot;
      // The second half of a step's dQ waits in registers for its slot until the next step; one fence serves both then.
      bool const has_pending = left != count;
      uint32_t const pending_parity = Traits::kDqParts == 2 ? 1 : exchange.slot ^ 1;
      typename Base::ColumnValues columns;
      // As early as P allows: dO is free for the next one when both warpgroups have multiplied with it, and where it
      // has one slot, the next step starts with waiting for it.
      auto const issue_dv = [&] {
        issue_gemm<Accumulate::kAdd>(mma_dv, tVrP(_, _, _, slot_p), tVrDO(_, _, _, at_dout.slot), tVrV);
      };
      if (warpgroup == 0) {
        storage.q_full[at_q.slot].wait(at_q.phase);
        issue_gemm<Accumulate::kFresh>(mma_s, tSrK, tSrQ(_, _, _, at_q.slot), tSrS);
        bool const is_masked = storage.step[at_q.slot].is_masked;
        warpgroup_wait<0>();
        warpgroup_fence_operand(tSrS);
        if (has_pending) this->write_dq(dq, pending_parity);
        if constexpr (kCapped) args.softcap.apply(scores);  // before the mask, whose -inf must stay
        if (is_masked) this->mask_scores(scores, storage.step[at_q.slot].mask, 0);
        this->load_columns(columns, storage.lse_log2[at_q.slot]);
        this->exponentiate(scores, columns);
        pack_all<Element>(scores, packed);
        this->stage(mma_s, packed, sX(_, _, slot_p));
        publish(storage.p_full[exchange.slot], has_pending);
        storage.p_full[exchange.slot].wait(exchange.phase);
        storage.dout_full[at_dout.slot].wait(at_dout.phase);
        issue_dv();
      } else {
        storage.dout_full[at_dout.slot].wait(at_dout.phase);
        issue_gemm<Accumulate::kFresh>(mma_dp, tPrV, tPrDO(_, _, _, at_dout.slot), tSrS);
        storage.p_full[exchange.slot].wait(exchange.phase);
        issue_dv();
        load_probabilities(mma_s, sX(_, _, slot_p), packed);
        warpgroup_wait<1>();
        warpgroup_fence_operand(tSrS);
        if (has_pending) this->write_dq(dq, pending_parity);
        this->load_columns(columns, storage.delta[at_dout.slot]);
        this->differentiate(scores, packed, columns);
        if constexpr (kCapped) {
          storage.q_full[at_q.slot].wait(at_q.phase);  // lse came with it
          this->chain_softcap(scores, packed, storage.lse_log2[at_q.slot]);
        }
        pack_all<Element>(scores, packed);
        this->stage(mma_s, packed, sX(_, _, slot_ds));
        publish(storage.ds_full[exchange.slot], has_pending);
        storage.q_full[at_q.slot].wait(at_q.phase);
      }
      storage.ds_full[exchange.slot].wait(exchange.phase);
      auto const issue_dq = [&](int part) {
        issue_gemm<Accumulate::kFresh>(mma_dq, tQrDS(_, _, _, slot_ds),
                                       tQrK(_, _, _, warpgroup * Traits::kDqParts + part), tQrQ);
      };
      if constexpr (Traits::kDqParts == 2) issue_dq(0);
      issue_gemm<Accumulate::kAdd>(mma_dk, tKrDS(_, _, _, slot_ds), tKrQ(_, _, _, at_q.slot), tKrK);
      warpgroup_wait<Traits::kDqParts>();
      warpgroup_fence_operand(tVrV);
      this->release(storage.dout_empty[at_dout.slot]);
      at_dout.advance();
      if constexpr (Traits::kDqParts == 2) {
        warpgroup_wait<1>();
        warpgroup_fence_operand(tQrQ);
        this->write_dq(dq, 0);
      }
      issue_dq(Traits::kDqParts - 1);
      if constexpr (Traits::kDqParts == 2) this->hand_over_dq();
      warpgroup_wait<0>();
      warpgroup_fence_operand(tKrK);
      warpgroup_fence_operand(tQrQ);
      this->release(storage.q_empty[at_q.slot]);
      at_q.advance();
      exchange.advance();
    }
    if (count > 0) {
      this->write_dq(dq, Traits::kDqParts == 2 ? 1 : exchange.slot ^ 1);
      this->hand_over_dq();
    }
    // K and V are read by both warpgroups.
    named_barrier_sync<kBackwardWarpgroups * kWarpgroupThreads>(kTurnOfWarpgroup);
    Tensor sDK = local_tile(sK, Shape<_64, Int<Traits::kOwnColumns>>{}, make_coord(0, warpgroup));
    Tensor sDV = local_tile(sV, Shape<_64, Int<Traits::kOwnColumnsV>>{}, make_coord(0, warpgroup));
    this->hand_over(mma_dk, dk, sDK, mma_dv, dv, sDV);
  }
};

}  // namespace flashhopper
