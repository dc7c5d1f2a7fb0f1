// Packed batches: sequences resolved from offsets, the coordinates that bound a sequence inside one tensor map, the
// list of blocks and its order.
#include <algorithm>
#include <random>
#include <vector>

#include "check.hpp"
#include "core/scheduler.hpp"

using namespace flashhopper;

namespace {

void resolves() {
  std::vector<int> const cu = {0, 0, 5, 5, 12}, used = {0, 3, 0, 99};
  PackedRows const all{cu.data(), nullptr, 20}, some{cu.data(), used.data(), 20};
  for (int b = 0; b < 4; ++b) {
    SequenceRows const rows = all.at(b, 4);
    CHECK(rows.begin == cu[b] && rows.rows == cu[b + 1] - cu[b] && rows.seqlen == rows.rows);
  }
  CHECK(some.at(1, 4).rows == 5 && some.at(1, 4).seqlen == 3);
  CHECK(some.at(3, 4).seqlen == 7);  // never beyond the sequence
  SequenceRows const behind = all.at(4, 4);
  CHECK(behind.begin == 12 && behind.rows == 8 && behind.seqlen == 0);
  // Whatever the offsets are, rows stay inside the tensor.
  std::mt19937 random(1);
  std::uniform_int_distribution<int> any(-30, 60);
  for (int round = 0; round < 2000; ++round) {
    std::vector<int> offsets(6), lengths(5);
    for (int& x : offsets) x = any(random);
    for (int& x : lengths) x = any(random);
    PackedRows const wild{offsets.data(), lengths.data(), 20};
    for (int b = 0; b <= 5; ++b) {
      SequenceRows const rows = wild.at(b, 5);
      CHECK(rows.begin >= 0 && rows.rows >= 0 && rows.begin + rows.rows <= 20);
      CHECK(rows.seqlen >= 0 && rows.seqlen <= rows.rows);
      CHECK(first_packed_chunk(rows.begin, b, 7) + ceil_div(rows.rows, 7) <= most_packed_blocks(5, 20, 7));
    }
  }
}

// The address and the bound that a tensor map of five dimensions gives a row, in the 64 bits that TMA has.
void coordinates() {
  for (uint64_t stride : {uint64_t{16}, uint64_t{128}, uint64_t{4096}, uint64_t{1} << 34, (uint64_t{1} << 34) + 48,
                          (uint64_t{1} << 39) + 32}) {
    uint64_t const wrap_bytes = wrap_stride(stride);
    CHECK(wrap_bytes % 16 == 0 && wrap_bytes > 0 && wrap_bytes < uint64_t{1} << 40);
    for (int begin : {0, 1, 77, 4 << 20, kRaggedRows - 300}) {
      for (int seqlen : {1, 2, 63, 64, 65, 127, 128, 129, 300}) {
        RowOrigin const origin = row_origin(true, {begin, seqlen, seqlen}, 3);
        CHECK(origin.outer >= 0 && origin.outer <= kRaggedRows);
        for (int row = 0; row < 400; ++row) {
          int const coordinate = origin.row + row;
          CHECK((coordinate >= 0 && coordinate < kRaggedRows) == (row < seqlen));
          uint64_t const address =
              uint64_t(coordinate) * stride + uint64_t(origin.outer) * stride + uint64_t(wrap_of(true)) * wrap_bytes;
          CHECK(address == (uint64_t(begin) + row) * stride);
        }
      }
    }
  }
  RowOrigin const dense = row_origin(false, {0, 50, 50}, 3);
  CHECK(dense.row == 0 && dense.outer == 3 && wrap_of(false) == 0);
}

// Every chunk of a sequence's rows leads back to it; chunks between lead to a sequence that has no rows there.
void finds_sequences() {
  auto const count = [](auto const& is) {
    int sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += is(lane);
    return sum;
  };
  std::mt19937 random(2);
  for (int batch : {1, 2, 31, 32, 33, 64, 65, 1000, 1024, 1025, 2000}) {
    for (int most : {1, 3, 40, 700}) {
      std::vector<int> cu = {0};
      std::uniform_int_distribution<int> length(-most / 2, most);
      for (int b = 0; b < batch; ++b) cu.push_back(cu.back() + std::max(0, length(random)));
      PackedRows const all{cu.data(), nullptr, cu.back() + 5};
      int next = 0;
      for (int b = 0; b < batch; ++b) {
        SequenceRows const rows = all.at(b, batch);
        int const first = first_packed_chunk(rows.begin, b, 128);
        for (; next < first; ++next) {
          int const found = sequence_of_chunk(all, batch, next, 128, count);
          CHECK(found < b &&
                next >= first_packed_chunk(cu[found], found, 128) + ceil_div(cu[found + 1] - cu[found], 128));
        }
        for (; next < first + ceil_div(rows.rows, 128); ++next) {
          CHECK(sequence_of_chunk(all, batch, next, 128, count) == b);
        }
      }
      for (int& x : cu) x = std::uniform_int_distribution<int>(-100, all.total + 100)(random);
      for (int chunk = 0; chunk < std::min(next, 300); ++chunk) {
        int const found = sequence_of_chunk(all, batch, chunk, 128, count);
        CHECK(found >= 0 && found < batch);
      }
    }
  }
}

// packed/list.hpp on the host, kListThreads apart.
std::vector<PackedBlock> list_of(PackedRows const& q, PackedRows const& k, int batch, int tile) {
  std::vector<int> work, ends(batch + 1);
  std::vector<PackedBlock> sequences(batch + 1), list;
  for (int b = 0; b <= batch; ++b) work.push_back(q.at(b, batch).seqlen > 0 ? k.at(b, batch).seqlen : 0);
  for (int b = 0; b <= batch; ++b) {
    int const rank = rank_of(work.data(), batch + 1, b);
    sequences[rank] = {0, b, {q.at(b, batch), k.at(b, batch)}};
    ends[rank] = ceil_div(q.at(b, batch).rows, tile);
  }
  for (int r = 0; r < batch; ++r) {
    int const a = sequences[r].sequence, b = sequences[r + 1].sequence;
    CHECK(work[a] > work[b] || (work[a] == work[b] && a < b));
  }
  for (int r = 1; r <= batch; ++r) ends[r] += ends[r - 1];
  for (int r = 0; r <= batch; ++r) sequences[r].first = r == 0 ? 0 : ends[r - 1];
  for (int place = 0; place < ends[batch]; ++place) {
    int const r = first_end_beyond(ends.data(), batch + 1, place);
    CHECK(place >= sequences[r].first && place < ends[r]);
    list.push_back(sequences[r]);
  }
  CHECK(static_cast<int64_t>(list.size()) <= most_packed_blocks(batch, q.total, tile));
  return list;
}

// Every block of every sequence and head has one place, and so has every row.
void is_permutation(std::vector<int> const& lengths_q, std::vector<int> const& lengths_k, int behind, int heads,
                    int group, int tile, int section_rows, bool descending) {
  int const batch = static_cast<int>(lengths_q.size());
  std::vector<int> cu_q = {0}, cu_k = {0};
  for (int b = 0; b < batch; ++b) {
    cu_q.push_back(cu_q.back() + lengths_q[b]);
    cu_k.push_back(cu_k.back() + lengths_k[b]);
  }
  PackedRows const q{cu_q.data(), nullptr, cu_q.back() + behind}, k{cu_k.data(), nullptr, cu_k.back()};
  std::vector<PackedBlock> const list = list_of(q, k, batch, tile);
  int const size = static_cast<int>(list.size());
  BatchSchedule schedule{};
  schedule.dense.heads = heads;
  schedule.dense.descending = descending;
  schedule.list = list.data();
  schedule.list_size = &size;
  schedule.tile = tile;
  schedule.section_rows = section_rows;
  schedule.group = group;
  std::vector<int> owners(static_cast<size_t>(q.total) * heads, 0);
  int tiles = 0;
  for (int b = 0; b <= batch; ++b) tiles += ceil_div(q.at(b, batch).rows, tile) * heads;
  CHECK(schedule.total() == tiles);
  int last_sequence = -1, last_section = 0, last_block = 0;
  for (int place = 0; place < schedule.total(); ++place) {
    SequenceTile const found = schedule.at(place);
    SequenceRows const rows = q.at(found.batch, batch);
    CHECK(found.rows.q.begin == rows.begin && found.rows.q.rows == rows.rows && found.rows.q.seqlen == rows.seqlen);
    CHECK(found.rows.k.begin == k.at(found.batch, batch).begin);
    if (!CHECK(found.head >= 0 && found.head < heads && found.block >= 0 && found.block * tile < rows.rows)) continue;
    for (int row = found.block * tile; row < std::min(rows.rows, (found.block + 1) * tile); ++row) {
      ++owners[static_cast<size_t>(rows.begin + row) * heads + found.head];
    }
    // Of a sequence all sections of heads one after the other, and in each the blocks one way.
    int const keys = std::max(1, k.at(found.batch, batch).seqlen);
    int const section = found.head / std::min(heads, std::max(1, section_rows / keys) * group);
    if (found.batch == last_sequence) {
      CHECK(section >= last_section);
      if (section == last_section) CHECK(descending ? found.block <= last_block : found.block >= last_block);
    }
    last_sequence = found.batch, last_section = section, last_block = found.block;
  }
  for (int count : owners) CHECK(count == 1);
}

void permutations() {
  std::vector<std::vector<int>> const batches = {
      {}, {0}, {1}, {0, 0, 0}, {5, 0, 64, 65, 0}, {130, 1, 300, 7}, {64, 64, 64, 64}, {0, 1, 0, 200, 0, 0, 31}};
  for (auto const& lengths : batches) {
    for (int shift : {0, 3}) {
      std::vector<int> keys = lengths;
      std::rotate(keys.begin(), keys.begin() + (keys.empty() ? 0 : shift % keys.size()), keys.end());
      for (int behind : {0, 1, 70}) {
        for (int section_rows : {0, 100, 1 << 20}) {
          for (bool descending : {false, true}) {
            is_permutation(lengths, keys, behind, 6, 2, 64, section_rows, descending);
            is_permutation(lengths, keys, behind, 4, 4, 16, section_rows, descending);
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  resolves();
  coordinates();
  finds_sequences();
  permutations();
  return check::report("seqlen");
}
