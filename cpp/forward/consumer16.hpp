// A consumer warpgroup of the 16-bit kernels: online-softmax attention of 64 query rows against the streamed key
// blocks. Before it: consumer.hpp, which it builds on. Its partner: producer.hpp. After it: epilogue.hpp.
#pragma once

#include "core/gemm.hpp"
#include "forward/consumer.hpp"

namespace flashhopper {

template <class Traits>
struct Consumer16 : ForwardConsumer<Traits> {
  using Base = ForwardConsumer<Traits>;
  using Element = typename Traits::Element;
  using Base::args, Base::storage, Base::warpgroup, Base::thread, Base::lane, Base::at_k, Base::at_v, Base::at_q;
  using Base::Base, Base::kScores, Base::kOutputs;

  FLASHHOPPER_DEVICE void run() {
    using namespace cute;
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

    TileReader<ForwardStorage<Traits>> reader{storage};
    int slot = this->next_tile(reader);

    auto issue_qk = [&] {
      issue_gemm<Accumulate::kFresh>(mma_qk, tSrQ(_, _, _, at_q.slot), tSrK(_, _, _, at_k.slot), tSrS);
    };
    // The first scores of a tile. Where no tile is ready they are of whatever lies there, and nobody looks at them: a
    // wgmma under a condition would make ptxas serialise them all.
    auto start_tile = [&] {
      if (slot >= 0) {
        storage.q_full[warpgroup][at_q.slot].wait(at_q.phase);
        this->pass_on(storage.k_full, storage.k_empty, at_k, foreign_blocks<Traits>(args, storage.tile[slot]));
        storage.k_full[at_k.slot].wait(at_k.phase);
      }
      this->wait_turn();
      issue_qk();
      this->pass_turn();
    };
    auto issue_pv = [&] {
      storage.v_full[at_v.slot].wait(at_v.phase);
      issue_gemm<Accumulate::kAdd>(mma_pv, tOrP, tOrV(_, _, _, at_v.slot), tOrO);
    };
    auto finish_pv = [&](auto in_flight) {
      warpgroup_wait<decltype(in_flight)::value>();
      warpgroup_fence_operand(tOrO);
      this->release(storage.v_empty, at_v);
    };

    if (warpgroup == Traits::kWarpgroups - 1) this->pass_turn();  // to warpgroup 0, which goes first
    while (slot >= 0) {
      start_tile();
      do {
        SequenceTile const& tile = storage.tile[slot];
        BlockRange const blocks = visited_blocks<Traits>(args, tile);
        this->pass_on(storage.v_full, storage.v_empty, at_v, foreign_blocks<Traits>(args, tile));
        // Blocks whose scores are used as they are.
        BlockRange const plain = args.softcap.factor != 0.f ? BlockRange{0, 0} : unmasked_blocks<Traits>(args, tile);
        OnlineSoftmax softmax(args.softmax_scale_log2);
        float rescale[kRowsPerThread];
        // From the scores of block n to its probabilities, while the previous block's product with V runs. That product
        // is waited for within the exponentials: the rest of them then share their time with the conversions and with
        // the rescaling of O. ptxas would move the wait to the top, where nothing is left to overlap; the release of K
        // in front of it, tied to the first exponential, holds it down (scripts/check_sass.py verifies).
        auto finish_scores = [&](int n, auto pv_in_flight) {
          warpgroup_fence_operand(tSrS);
          if (n < plain.begin || n >= plain.end) cap_and_mask(scores, tile, n);  // the same for all threads of the CTA
          rescale[0] = softmax.raise_max(scores, 0);
          rescale[1] = softmax.raise_max(scores, 1);
          bool const rescales = any_of_warp(rescale[0] != 1.f || rescale[1] != 1.f);
          softmax.exponentiate(scores, 0);
          this->release_after(storage.k_empty, at_k, scores[0]);
          softmax.exponentiate(scores, 1);
          if constexpr (decltype(pv_in_flight)::value) finish_pv(Int<0>{});
          pack_all<Element>(scores, probabilities);
          if constexpr (decltype(pv_in_flight)::value) {
            if (rescales) multiply_rows(outputs, rescale);
          }
        };

        FLASHHOPPER_UNROLL
        for (int e = 0; e < kOutputs; ++e) outputs[e] = 0.f;
        int n = blocks.end - 1;
        warpgroup_wait<0>();
        finish_scores(n, false_type{});
        for (--n; n >= blocks.begin; --n) {
          storage.k_full[at_k.slot].wait(at_k.phase);
          this->wait_turn();
          issue_qk();
          issue_pv();
          this->pass_turn();
          warpgroup_wait<1>();
          finish_scores(n, true_type{});
        }
        this->release_queries();
        issue_pv();
        float sink[kRowsPerThread];
        load_sinks(args, {this->head(tile, 0), this->head(tile, 1)}, sink);  // here: what follows hides its latency
        int const done = slot;
        slot = -1;
        // With a second slot the next queries are there, and their first scores keep the tensor cores busy while this
        // tile's output leaves.
        if constexpr (Traits::kQStages > 1) {
          slot = this->next_tile_early(reader);
          start_tile();
        }
        finish_pv(Int<(Traits::kQStages > 1)>{});

        float normalise[kRowsPerThread], lse[kRowsPerThread];
        softmax.finish(normalise, lse, sink, args.softcap.shift);
        multiply_rows(outputs, normalise);
        ThreadRows const rows = this->rows_of(tile);
        store_lse(args, tile, {0, tile.rows.q.seqlen}, lse, rows, lane);
        store_output<Element>(args, tile, outputs, rows, lane);
        store_unused<Traits::kHeadDimV>(args, tile, rows, lane);
        reader.hand_back(done, lane == 0);
      } while (slot >= 0);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tSrS);
      slot = this->next_tile(reader);
    }
    if (warpgroup == 0) this->wait_turn();  // the one arrival still pending, so that the barrier ends even
  }

 private:
  // The cap goes first, for the mask's -inf must stay.
  FLASHHOPPER_DEVICE void cap_and_mask(float (&scores)[kScores], SequenceTile const& tile, int n) const {
    if (args.softcap.factor != 0.f) {
      args.softcap.apply(scores);
      BlockRange const unmasked = unmasked_blocks<Traits>(args, tile);
      if (n >= unmasked.begin && n < unmasked.end) return;
    }
    this->apply_mask(scores, tile, n);
  }

  FLASHHOPPER_DEVICE static void multiply_rows(float (&outputs)[kOutputs], float const (&factor)[kRowsPerThread]) {
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kOutputs; ++e) outputs[e] *= factor[accumulator_row(e)];
  }
};

}  // namespace flashhopper
