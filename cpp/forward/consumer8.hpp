// A consumer warpgroup of the 8-bit kernels. What differs from consumer16.hpp: scores carry the scales of their row and
// key block, P is rounded to e4m3, and every key block's P V starts a fresh accumulator that is added to O in float,
// because the tensor cores keep about 14 bits of an 8-bit accumulator and a long sum would lose its small addends.
// Before it: consumer.hpp, which it builds on. Its partner: producer.hpp. After it: epilogue.hpp.
#pragma once

#include "core/gemm.hpp"
#include "forward/consumer.hpp"

namespace flashhopper {

template <class Traits>
struct Consumer8 : ForwardConsumer<Traits> {
  using Base = ForwardConsumer<Traits>;
  using Base::args, Base::storage, Base::warpgroup, Base::thread, Base::lane, Base::at_k, Base::at_v, Base::at_q;
  using Base::Base, Base::kScores, Base::kOutputs;
  static constexpr int kPart = Traits::kPartColumns / 2;       // floats of a part of P V in one thread
  static constexpr int kBuffers = Traits::kParts > 1 ? 2 : 1;  // a part is multiplied while the one before is added
  static constexpr bool kOverlaps = Traits::kConfig.overlap;
  // What an integer score starts from, and the same bits as a float.
  static constexpr uint32_t kZeroBits = 0x4B400000u;
  static constexpr float kZero = Traits::kIntegerScores ? 12582912.f : 0.f;

  FLASHHOPPER_DEVICE void run() {
    using namespace cute;
    typename Traits::MmaQK mma_qk;
    Tensor sQ = make_tensor(make_smem_ptr(storage.q[warpgroup][0]), typename Traits::LayoutQ{});  // (64, D, q_stages)
    Tensor sK = make_tensor(make_smem_ptr(storage.k[0]), typename Traits::LayoutK{});             // (N, D, stages)
    Tensor tSrQ = mma_qk.get_slice(thread).partition_fragment_A(sQ);  // (MMA, 1, D/32, q_stages)
    Tensor tSrK = mma_qk.get_slice(thread).partition_fragment_B(sK);  // (MMA, 1, D/32, stages)

    float scores[kScores];
    float parts[kBuffers][kPart + Traits::kSumColumns / 2];
    float outputs[kOutputs];
    uint32_t probabilities[kScores / 4];
    Tensor tSrS = make_tensor(make_rmem_ptr(reinterpret_cast<typename Traits::Score*>(scores)),
                              partition_shape_C(mma_qk, Shape<_64, Int<Traits::kTileN>>{}));
    Tensor tOrP = make_tensor(make_rmem_ptr(reinterpret_cast<element::e4m3*>(probabilities)),
                              ProbabilityLayout8<Traits::kTileN>{});

    TileReader<ForwardStorage<Traits>> reader{storage};
    int slot = this->next_tile(reader);

    auto issue_qk = [&] {
      clear_scores(scores);
      constexpr Accumulate kMode = Traits::kIntegerScores ? Accumulate::kAdd : Accumulate::kFresh;
      issue_gemm<kMode>(mma_qk, tSrQ(_, _, _, at_q.slot), tSrK(_, _, _, at_k.slot), tSrS);
    };
    // The first scores of a tile. Where no tile is ready they are of whatever lies there, and nobody looks at them: a
    // wgmma under a condition would make ptxas serialise them all.
    auto start_tile = [&] {
      if (slot >= 0) {
        storage.q_full[warpgroup][at_q.slot].wait(at_q.phase);
        storage.k_full[at_k.slot].wait(at_k.phase);
      }
      this->wait_turn();
      issue_qk();
      this->pass_turn();
    };
    // Part p of P V, p a constant.
    auto issue_pv = [&](int slot, auto p) {
      constexpr int kColumns = Traits::columns_of_part(p);
      typename Traits::template MmaPV<kColumns> mma_pv;
      Tensor sVt = make_tensor(make_smem_ptr(storage.v[slot] + p * Traits::kPartColumns * Traits::kTileN),
                               typename Traits::template LayoutVtPart<kColumns>{});
      Tensor tOrV = mma_pv.get_slice(thread).partition_fragment_B(sVt(_, _, 0));  // (MMA, 1, N/32)
      Tensor tOrO =
          make_tensor(make_rmem_ptr(parts[p % kBuffers]), partition_shape_C(mma_pv, Shape<_64, Int<kColumns>>{}));
      issue_gemm<Accumulate::kFresh>(mma_pv, tOrP, tOrV, tOrO);
    };
    // O of part p = rescale * O + the product just finished.
    auto add_part = [&](auto p, float const(&rescale)[kRowsPerThread], float change) {
      float const factor[kRowsPerThread] = {rescale[0] * change, rescale[1] * change};
      auto& part = parts[p % kBuffers];
      FLASHHOPPER_UNROLL
      for (int e = 0; e < Traits::columns_of_part(p) / 2; ++e) warpgroup_fence_operand(part[e]);
      FLASHHOPPER_UNROLL
      for (int e = 0; e < kPart; ++e) {
        float& output = outputs[p * kPart + e];
        output = output * factor[accumulator_row(e)] + part[e];
        // Now, or the compiler would keep the product and put the addition off to where registers have run out.
        asm volatile("" : "+f"(output));
      }
    };

    if (warpgroup == Traits::kWarpgroups - 1) this->pass_turn();  // to warpgroup 0, which goes first
    while (slot >= 0) {
      start_tile();
      do {
        SequenceTile const& tile = storage.tile[slot];
        BlockRange const blocks = visited_blocks<Traits>(args, tile);
        ScaledSoftmax softmax;
        float q_factor[kRowsPerThread];
        // Of the product in flight or due: the factors of what its rows have summed so far, the change of the output's
        // unit and the unit.
        float rescale[kRowsPerThread], change = 1.f, unit = 1.f;
        FLASHHOPPER_UNROLL
        for (int r = 0; r < kRowsPerThread; ++r) {
          q_factor[r] = storage.rows[warpgroup][at_q.slot].query[this->thread_row + 8 * r];
        }
        FLASHHOPPER_UNROLL
        for (int e = 0; e < kOutputs; ++e) outputs[e] = 0.f;

        int n = blocks.end - 1;
        // From the scores of block n, pending their wait, to its probabilities. pending: products that may stay in
        // flight. midst, end: what is done in the midst of the exponentials and at their end.
        // The release of K, tied to one of them, keeps ptxas from moving the wait in front of it.
        auto finish_scores = [&](auto pending, auto&& midst, auto&& end) {
          // What does not depend on the scores comes before their wait, which hides its latency.
          bool const has_mask = needs_mask(slot, n);
          StepScales const scales = storage.scales[at_k.slot];
          warpgroup_wait<decltype(pending)::value>();
          warpgroup_fence_operand(tSrS);
          if (has_mask) this->apply_mask(scores, storage.tile[slot], n);
          float const factor[kRowsPerThread] = {nonzero(q_factor[0] * scales.k), nonzero(q_factor[1] * scales.k)};
          float moved[kRowsPerThread];
          moved[0] = softmax.move_reference(scores, 0, kZero, factor[0]);
          softmax.exponentiate(scores, 0, kZero, factor[0]);
          this->release_after(storage.k_empty, at_k, scores[0]);
          midst();
          moved[1] = softmax.move_reference(scores, 1, kZero, factor[1]);
          softmax.exponentiate(scores, 1, kZero, factor[1]);
          end();
          rescale[0] = moved[0];
          rescale[1] = moved[1];
          change = scales.change;
          unit = scales.v;
          pack_probabilities(scores, probabilities);
        };
        auto add_sums = [&] {
          FLASHHOPPER_UNROLL
          for (int r = 0; r < kRowsPerThread; ++r) {
            softmax.add_sum(parts[(Traits::kParts - 1) % kBuffers][kPart + 2 * r], r, rescale[r]);
          }
        };
        auto finish_pv = [&] {
          add_part(Int<0>{}, rescale, change);
          add_sums();
          this->release(storage.v_empty, at_v);
        };
        // In the midst of the exponentials, not behind them, so that ptxas mixes them with the conversions of P.
        auto await_values = [&] {
          auto const at = at_k.before();
          storage.v_full[at.slot].wait(at.phase);
        };
        // The product with V in parts, each added while the next is multiplied. K was released a block ahead, which
        // tells where V stands.
        auto multiply_values = [&] {
          auto at = at_k.before();
          issue_pv(at.slot, Int<0>{});
          for_each(make_seq<Traits::kParts>{}, [&](auto p) {
            constexpr int kNext = p + 1;
            if constexpr (kNext < Traits::kParts) issue_pv(at.slot, Int<kNext>{});
            warpgroup_wait<(kNext < Traits::kParts)>();
            add_part(p, rescale, change);
          });
          add_sums();
          this->release(storage.v_empty, at);
        };
        auto nothing = [] {};

        int const done = slot, done_q = at_q.slot;
        if constexpr (kOverlaps) {
          finish_scores(Int<0>{}, nothing, nothing);
          for (--n; n >= blocks.begin; --n) {
            storage.k_full[at_k.slot].wait(at_k.phase);
            this->wait_turn();
            issue_qk();
            storage.v_full[at_v.slot].wait(at_v.phase);
            issue_pv(at_v.slot, Int<0>{});
            this->pass_turn();
            finish_scores(Int<1>{}, [] { warpgroup_wait<0>(); }, finish_pv);
          }
          storage.v_full[at_v.slot].wait(at_v.phase);
          issue_pv(at_v.slot, Int<0>{});
        } else {
          while (true) {
            finish_scores(Int<0>{}, await_values, nothing);
            this->wait_turn();
            multiply_values();
            if (--n < blocks.begin) break;
            storage.k_full[at_k.slot].wait(at_k.phase);
            issue_qk();
            this->pass_turn();
          }
          this->pass_turn();
        }
        // The next queries are there, and their first scores keep the tensor cores busy while this tile's output
        // leaves.
        at_q.advance();
        slot = this->next_tile_early(reader);
        start_tile();
        if constexpr (kOverlaps) {
          warpgroup_wait<1>();
          finish_pv();
        }

        float normalise[kRowsPerThread], lse[kRowsPerThread];
        softmax.finish(normalise, lse);
        FLASHHOPPER_UNROLL
        for (int r = 0; r < kRowsPerThread; ++r) normalise[r] *= unit;
        finish_rows(tile, storage.rows[warpgroup][done_q], outputs, normalise, lse);
        reader.hand_back(done, lane == 0);
        if (lane == 0) storage.q_empty[warpgroup][done_q].arrive();
      } while (slot >= 0);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tSrS);
      slot = this->next_tile(reader);
    }
    if (warpgroup == 0) this->wait_turn();  // the one arrival still pending, so that the barrier ends even
  }

 private:
  // A factor of 0 would turn scores that the mask made -inf into NaN; NaN stays as it is.
  FLASHHOPPER_DEVICE static float nonzero(float factor) { return factor == 0.f ? 0x1p-126f : factor; }

  // What the accumulators of integer scores start from.
  FLASHHOPPER_DEVICE static void clear_scores(float (&scores)[kScores]) {
    if constexpr (Traits::kIntegerScores) {
      FLASHHOPPER_UNROLL
      for (int e = 0; e < kScores; ++e) asm volatile("mov.b32 %0, %1;" : "=f"(scores[e]) : "n"(kZeroBits));
    }
  }

  // Whether a step needs the element mask: the same for all threads of the CTA. The bounds are computed anew in every
  // step, for held through the loop they would cost registers that it does not have; the volatile keeps the compiler
  // from doing so.
  FLASHHOPPER_DEVICE bool needs_mask(int slot, int n) const {
    asm volatile("" : "+r"(slot));
    BlockRange const unmasked = unmasked_blocks<Traits>(args, storage.tile[slot]);
    return n < unmasked.begin || n >= unmasked.end;
  }

  // Registers in the order of ProbabilityLayout8: the keys of two accumulator groups of one row in each.
  FLASHHOPPER_DEVICE static void pack_probabilities(float const (&values)[kScores], uint32_t (&packed)[kScores / 4]) {
    FLASHHOPPER_UNROLL
    for (int i = 0; i < kScores / 4; ++i) {
      int const e = i / 2 * 8 + i % 2 * 2;
      packed[i] = pack_e4m3(values[e], values[e + 1], values[e + 4], values[e + 5]);
    }
  }

  // Normalises, adds the means that were taken from K and V, and stores.
  FLASHHOPPER_DEVICE void finish_rows(SequenceTile const& tile, RowFactors<Traits::kHeadDimV> const& factors,
                                      float (&outputs)[kOutputs], float const (&normalise)[kRowsPerThread],
                                      float (&lse)[kRowsPerThread]) const {
    ThreadRows const rows = this->rows_of(tile);
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) lse[r] += args.softmax_scale * factors.lse_shift[this->thread_row + 8 * r];
    store_lse(args, tile, {0, tile.rows.q.seqlen}, lse, rows, lane);
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kOutputs; e += 4) {
      float2 const mean =
          *reinterpret_cast<float2 const*>(factors.v_mean + this->thread_column + accumulator_column(e));
      FLASHHOPPER_UNROLL
      for (int r = 0; r < kRowsPerThread; ++r) {
        outputs[e + 2 * r] = outputs[e + 2 * r] * normalise[r] + mean.x;
        outputs[e + 2 * r + 1] = outputs[e + 2 * r + 1] * normalise[r] + mean.y;
      }
    }
    if (normalise[0] == 0.f || normalise[1] == 0.f) {  // a row that sees no key gets no mean
      FLASHHOPPER_UNROLL
      for (int e = 0; e < kOutputs; ++e) outputs[e] = normalise[accumulator_row(e)] == 0.f ? 0.f : outputs[e];
    }
    if (args.out_is_bf16) {
      store_output<element::bf16>(args, tile, outputs, rows, lane);
    } else {
      store_output<element::fp16>(args, tile, outputs, rows, lane);
    }
    store_unused<Traits::kHeadDimV>(args, tile, rows, lane);
  }
};

}  // namespace flashhopper
