// What both kinds of backward consumers share: where a thread's scores lie, the probabilities of a step, adding to dQ
// and handing over dK and dV. Before it: kernel.hpp. Used by key_consumer.hpp and column_consumer.hpp.
#pragma once

#include "backward/args.hpp"
#include "backward/storage.hpp"
#include "core/gemm.hpp"
#include "core/tile_queue.hpp"

namespace flashhopper {

// Scores of the backward are transposed, (keys, queries): accumulator rows are keys, columns are queries.
template <class Traits>
struct BackwardConsumer {
  using Element = typename Traits::Element;
  static constexpr int kScores = Traits::kTileM / 2;      // floats of S^T or dP^T in one thread
  static constexpr int kOwn = Traits::kOwnColumns / 2;    // of dK
  static constexpr int kOwnV = Traits::kOwnColumnsV / 2;  // of dV
  static constexpr int kDq = Traits::kDqColumns / 2;      // of a part of dQ

  BackwardArgs const& args;
  BackwardStorage<Traits>& storage;
  int const warpgroup;
  int const thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
  int const lane = thread % 32;

  // `thread`, read anew where the scores leave no register to hold what follows from it through the loop.
  FLASHHOPPER_DEVICE int thread_again() const {
    if constexpr (kScores <= 32) return thread;
    int thread_index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread_index));
    return thread_index % kWarpgroupThreads;
  }

  // One arrival a warp: its reads of the slot are over, also those of lse and delta by the other lanes.
  FLASHHOPPER_DEVICE void release(Barrier& empty) const {
    __syncwarp();
    if (lane == 0) empty.arrive();
  }

  // Scores outside the mask become -inf. first_row: of this warpgroup's rows within the tile.
  FLASHHOPPER_DEVICE void mask_scores(float (&scores)[kScores], BlockMask const mask, int first_row) const {
    int const again = thread_again(), column = again % 4 * 2;
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      int const row = first_row + again / 32 * 16 + again % 32 / 4 + 8 * r;
      int const begin = row + mask.lo - column;
      int const end = row < mask.keys ? row + mask.hi - column : INT32_MIN;
      FLASHHOPPER_UNROLL
      for (int e = 0; e < kScores; ++e) {
        bool const seen = accumulator_column(e) >= begin && accumulator_column(e) < end;
        if (accumulator_row(e) == r && !seen) scores[e] = -INFINITY;
      }
    }
  }

  // Values of a step's queries, from shared memory: where this thread's stand, those of its scores e and e + 1, all.
  FLASHHOPPER_DEVICE float const* own_columns(float const* smem) const { return smem + thread_again() % 4 * 2; }
  FLASHHOPPER_DEVICE static float2 column_pair(float const* own, int e) {
    return *reinterpret_cast<float2 const*>(own + accumulator_column(e));
  }
  using ColumnValues = float2[kScores / 4];
  FLASHHOPPER_DEVICE void load_columns(ColumnValues& values, float const* smem) const {
    float const* const own = own_columns(smem);
    FLASHHOPPER_UNROLL
    for (int j = 0; j < kScores / 4; ++j) values[j] = column_pair(own, 4 * j);
  }

  // P^T = 2^(scale_log2 * S^T - lse_log2), S^T capped where there is a softcap.
  FLASHHOPPER_DEVICE void exponentiate(float (&scores)[kScores], ColumnValues const& lse_log2) const {
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kScores; ++e) {
      float2 const lse = lse_log2[e / 4];
      scores[e] = fast_exp2(scores[e] * args.softmax_scale_log2 - (e % 2 == 0 ? lse.x : lse.y));
    }
  }

  // dS^T = P^T (dP^T - delta) and P^T as operands of dK and dV. P enters dS as it was computed, in float: rounded
  // first, it would add as much error to dq and dk as the rounding of dS itself.
  FLASHHOPPER_DEVICE void differentiate(float const (&probabilities)[kScores], float const (&gradients)[kScores],
                                        ColumnValues const& delta, uint32_t (&packed_p)[kScores / 2],
                                        uint32_t (&packed_ds)[kScores / 2]) const {
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kScores; e += 2) {
      float2 const d = delta[e / 4];
      packed_ds[e / 2] =
          pack<Element>(probabilities[e] * (gradients[e] - d.x), probabilities[e + 1] * (gradients[e + 1] - d.y));
      packed_p[e / 2] = pack<Element>(probabilities[e], probabilities[e + 1]);
    }
  }

  // The same with a softcap, whose derivative is one more factor of dS. lse_log2 and delta of the step are read from
  // shared memory where they are used: registers for all of them at once would spill.
  FLASHHOPPER_DEVICE void differentiate_capped(float const (&probabilities)[kScores], float const (&gradients)[kScores],
                                               float const* lse_log2, float const* delta,
                                               uint32_t (&packed_p)[kScores / 2],
                                               uint32_t (&packed_ds)[kScores / 2]) const {
    lse_log2 = own_columns(lse_log2);
    delta = own_columns(delta);
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kScores; e += 2) {
      float2 const d = column_pair(delta, e), lse = column_pair(lse_log2, e);
      float const p[2] = {probabilities[e], probabilities[e + 1]};
      packed_ds[e / 2] = pack<Element>(p[0] * (gradients[e] - d.x) * args.softcap.slope(p[0], lse.x),
                                       p[1] * (gradients[e + 1] - d.y) * args.softcap.slope(p[1], lse.y));
      packed_p[e / 2] = pack<Element>(p[0], p[1]);
    }
  }

  // The same where P was handed over by the other warpgroup, rounded; replaces dP^T.
  FLASHHOPPER_DEVICE void differentiate(float (&gradients)[kScores], uint32_t const (&probabilities)[kScores / 2],
                                        ColumnValues const& delta) const {
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kScores; e += 2) {
      float2 const p = unpack<Element>(probabilities[e / 2]);
      gradients[e] = p.x * (gradients[e] - delta[e / 4].x);
      gradients[e + 1] = p.y * (gradients[e + 1] - delta[e / 4].y);
    }
  }

  // With a softcap, on top of the former.
  FLASHHOPPER_DEVICE void chain_softcap(float (&ds)[kScores], uint32_t const (&probabilities)[kScores / 2],
                                        float const* lse_log2) const {
    lse_log2 = own_columns(lse_log2);
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kScores; e += 2) {
      float2 const p = unpack<Element>(probabilities[e / 2]), lse = column_pair(lse_log2, e);
      ds[e] *= args.softcap.slope(p.x, lse.x);
      ds[e + 1] *= args.softcap.slope(p.y, lse.y);
    }
  }

  // Writes packed accumulators (64, columns) of one warpgroup to a shared-memory tile of that shape.
  template <class TiledMma, class Packed, class SharedTensor>
  FLASHHOPPER_DEVICE void stage(TiledMma const& mma, Packed& packed, SharedTensor&& tile) const {
    using namespace cute;
    using Atom = Copy_Atom<SM90_U32x4_STSM_N, Element>;
    auto const thread_copy = make_tiled_copy_C(Atom{}, mma).get_slice(thread_again());
    auto const shape = partition_shape_C(mma, make_shape(_64{}, size<1>(tile)));
    Tensor source = make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(packed)), make_layout(shape));
    Tensor target = thread_copy.partition_D(tile);
    copy(Atom{}, thread_copy.retile_S(source), target);
  }

  // A part of this warpgroup's dQ goes to its slot, and from there to the sum when it is handed over. The fence in
  // between takes hundreds of clocks: callers give the tensor cores work first. parity: of the number of parts written
  // before.
  FLASHHOPPER_DEVICE void write_dq(float const (&dq)[kDq], uint32_t parity) const {
    storage.dq_empty[warpgroup].wait(parity ^ 1);
    float4* const slot = reinterpret_cast<float4*>(storage.dq[warpgroup]) + thread_again();
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kDq; e += 4) {
      slot[e / 4 * kWarpgroupThreads] = float4{dq[e], dq[e + 1], dq[e + 2], dq[e + 3]};
    }
  }
  FLASHHOPPER_DEVICE void hand_over_dq() const {
    fence_async_shared();
    __syncwarp();
    if (lane == 0) storage.dq_full[warpgroup].arrive();
  }

  // One arrival a warp: what it wrote to shared memory is visible to TMA and wgmma.
  FLASHHOPPER_DEVICE void announce(Barrier& full) const {
    fence_async_shared();
    __syncwarp();
    if (lane == 0) full.arrive();
  }

  // dK (scaled) and dV of this warpgroup to the slots of K and V, in 16 bits. Nobody reads those any more.
  template <class MmaDk, class MmaDv, class SharedDk, class SharedDv>
  FLASHHOPPER_DEVICE void hand_over(MmaDk const& mma_dk, float (&dk)[kOwn], SharedDk&& sdk, MmaDv const& mma_dv,
                                    float (&dv)[kOwnV], SharedDv&& sdv) const {
    uint32_t packed_v[kOwnV / 2];
    pack_all<Element>(dv, packed_v);
    stage(mma_dv, packed_v, sdv);
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kOwn; ++e) dk[e] *= args.softmax_scale;
    uint32_t packed[kOwn / 2];
    pack_all<Element>(dk, packed);
    stage(mma_dk, packed, sdk);
    fence_async_shared();
    __syncwarp();
    if (lane == 0) storage.gradients_full.arrive();
  }
};

}  // namespace flashhopper
