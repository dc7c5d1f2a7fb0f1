// Which rows of the tensors belong to a sequence: constants of a dense batch, offsets in device memory of a packed one;
// and how one tensor map bounds each packed sequence by its own length. Before it: the dispatch files fill the structs.
// After it: packed/list.hpp resolves every sequence once, scheduler.hpp hands them to the kernels with their tiles.
#pragma once

#include <cstdint>

#include "core/platform.hpp"

namespace flashhopper {

// One side of one sequence. begin: its first row in a packed tensor, 0 in a dense one, where the batch index tells
// sequences apart. rows: what lies there; the leading seqlen of them exist, the others are never read into a result.
struct SequenceRows {
  int begin;
  int rows;
  int seqlen;
};

struct Sequence {
  SequenceRows q, k;
};

// One side of a packed batch, as the caller gives it.
struct PackedRows {
  int const* cu_seqlens;  // (batch + 1)
  int const* seqused;     // (batch), or null: all rows exist
  int total;              // rows of the tensor

  FLASHHOPPER_HOST_DEVICE int begin(int sequence) const { return inside(cu_seqlens[sequence], 0); }
  // Whatever the offsets hold, the result lies inside the tensor. Sequence `batch` is what lies behind the last one:
  // none of it exists.
  FLASHHOPPER_HOST_DEVICE SequenceRows at(int sequence, int batch) const {
    int const begin = this->begin(sequence);
    if (sequence == batch) return {begin, total - begin, 0};
    int const rows = inside(cu_seqlens[sequence + 1], begin) - begin;
    return {begin, rows, seqused == nullptr ? rows : max_of(0, min_of(seqused[sequence], rows))};
  }

 private:
  FLASHHOPPER_HOST_DEVICE int inside(int offset, int least) const { return max_of(least, min_of(offset, total)); }
};

// How a tensor map of five dimensions (head_dim, row, head, outer, wrap) finds the rows of a sequence: row r of it has
// the coordinates origin.row + r, head, origin.outer, wrap.
//
// Dense: outer is the batch index, wrap is 0. Packed: `row` ends at kRaggedRows, where rows past the sequence's length
// are outside the tensor, so that loads bring zeros and stores drop them; `outer`, of the same stride, brings the
// sequence in place, and `wrap` takes kRaggedRows rows off again: addresses are 64 bits wide and wrap around.
struct RowOrigin {
  int row;
  int outer;
};

inline constexpr int kRaggedRows = 1 << 30;  // no sequence is longer

FLASHHOPPER_HOST_DEVICE RowOrigin row_origin(bool is_packed, SequenceRows const& rows, int batch) {
  return is_packed ? RowOrigin{kRaggedRows - rows.seqlen, rows.begin + rows.seqlen} : RowOrigin{0, batch};
}
FLASHHOPPER_HOST_DEVICE int wrap_of(bool is_packed) { return is_packed ? kRaggedRows : 0; }

// The stride of `wrap` in bytes: kRaggedRows of it and kRaggedRows rows together are a multiple of 2^64.
constexpr uint64_t wrap_stride(uint64_t row_stride) {
  constexpr uint64_t kPeriod = UINT64_MAX / kRaggedRows + 1;  // 2^34
  return kPeriod - row_stride % kPeriod;
}

// One block of rows of one packed sequence, as packed/list.hpp lists them.
struct alignas(16) PackedBlock {
  int first;     // place in the list of its sequence's first block
  int sequence;  // the batch's number is what lies behind the last sequence
  Sequence rows;
};
static_assert(sizeof(PackedBlock) == 32);

// Steps of making the list. The place of an entry among `count` in descending order; equal ones keep theirs.
FLASHHOPPER_HOST_DEVICE int rank_of(int const* values, int count, int index) {
  int rank = 0;
  for (int i = 0; i < count; ++i) rank += values[i] > values[index] || (values[i] == values[index] && i < index);
  return rank;
}
// The first of `count` ascending ends that lies beyond a place, which is before the last of them.
FLASHHOPPER_HOST_DEVICE int first_end_beyond(int const* ends, int count, int place) {
  int low = 0, high = count - 1;
  while (low < high) {
    int const middle = (low + high) / 2;
    if (ends[middle] > place) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Blocks that a list may need: each sequence, and what lies behind the last, ends with a block of its own.
constexpr int64_t most_packed_blocks(int64_t batch, int64_t total_rows, int tile) {
  return total_rows / tile + batch + 1;
}

// Chunks of `rows` rows that no two sequences share, in memory for most_packed_blocks() of them: where a sequence's
// first one stands follows from its offset alone, and some chunks stay unused. sequence: its number in the batch.
FLASHHOPPER_HOST_DEVICE constexpr int first_packed_chunk(int begin, int sequence, int rows) {
  return begin / rows + sequence;
}

// Back again: the last sequence that begins at a chunk or before it; one of `batch`, whatever the offsets hold.
// count(is): for how many lanes 0 .. 31 is(lane) holds. Lanes share the search, each round leaves a 32nd.
template <class Count>
FLASHHOPPER_HOST_DEVICE int sequence_of_chunk(PackedRows const& all, int batch, int chunk, int rows,
                                              Count const& count) {
  int low = 0, high = batch;
  while (high - low > 1) {
    int const step = ceil_div(high - low, 32);
    int const begun = count([&](int lane) {
      int const sequence = low + lane * step;
      return sequence < high && first_packed_chunk(all.begin(sequence), sequence, rows) <= chunk;
    });
    low += max_of(0, begun - 1) * step;
    high = min_of(high, low + step);
  }
  return low;
}

}  // namespace flashhopper
