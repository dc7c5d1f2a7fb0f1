// The mask policy: which keys a query sees, which key blocks a tile visits and which of them need no element test.
// Producer, consumer, backward and the host tests all ask this one struct.
#pragma once

#include "core/platform.hpp"

namespace flashhopper {

// Key blocks [begin, end); empty when end <= begin.
struct BlockRange {
  int begin;
  int end;
  FLASHHOPPER_HOST_DEVICE int size() const { return end > begin ? end - begin : 0; }
};

// The two bounds of a mask; -1 where one hides nothing.
struct Window {
  int left;
  int right;
};

// The element test of one block of keys and queries, counted from its corner: query c sees key r of it where
// lo <= c - r < hi and r < keys. Queries past the end are not tested.
struct BlockMask {
  int lo, hi;
  int keys;
};

// Query i sees keys j with  i + shift - window_left <= j <= i + shift + window_right,  shift = seqlen_k - seqlen_q
// (bottom-right alignment); a negative window is unbounded, causal attention is window_right = 0.
struct Mask {
  int seqlen_q;
  int seqlen_k;
  int window_left;
  int window_right;

  FLASHHOPPER_HOST_DEVICE constexpr int shift() const { return seqlen_k - seqlen_q; }

  // Keys seen by a row are [key_begin, key_end), which is empty for rows before the first visible key.
  FLASHHOPPER_HOST_DEVICE constexpr int key_begin(int row) const {
    return window_left < 0 ? 0 : max_of(0, row + shift() - window_left);
  }
  FLASHHOPPER_HOST_DEVICE constexpr int key_end(int row) const {
    return window_right < 0 ? seqlen_k : max_of(0, min_of(seqlen_k, row + shift() + 1 + window_right));
  }
  FLASHHOPPER_HOST_DEVICE bool keeps(int row, int key) const { return key >= key_begin(row) && key < key_end(row); }

  // Blocks that hold a key seen by any row of [row_begin, row_end).
  FLASHHOPPER_HOST_DEVICE BlockRange visited(int row_begin, int row_end, int tile_n) const {
    int const last_row = min_of(row_end, seqlen_q) - 1;
    return {key_begin(row_begin) / tile_n, ceil_div(key_end(last_row), tile_n)};
  }

  // The visited blocks whose every key is seen by every row of [row_begin, row_end).
  FLASHHOPPER_HOST_DEVICE BlockRange unmasked(int row_begin, int row_end, int tile_n) const {
    int const last_row = min_of(row_end, seqlen_q) - 1;
    return {ceil_div(key_begin(last_row), tile_n), key_end(row_begin) / tile_n};
  }

  FLASHHOPPER_HOST_DEVICE BlockMask block(int first_key, int first_query) const {
    constexpr int kFar = 1 << 30;
    int const diagonal = first_key - shift() - first_query;
    return {window_right < 0 ? -kFar : diagonal - window_right, window_left < 0 ? kFar : diagonal + window_left + 1,
            seqlen_k - first_key};
  }

  // The same seen from the keys, for the backward: queries that see a key are [query_begin, query_end).
  FLASHHOPPER_HOST_DEVICE constexpr int query_begin(int key) const {
    return window_right < 0 ? 0 : max_of(0, min_of(seqlen_q, key - shift() - window_right));
  }
  FLASHHOPPER_HOST_DEVICE int query_end(int key) const {
    return window_left < 0 ? seqlen_q : max_of(0, min_of(seqlen_q, key - shift() + window_left + 1));
  }

  // Query blocks that hold a query which sees any key of [key_begin, key_end).
  FLASHHOPPER_HOST_DEVICE BlockRange visited_queries(int key_begin, int key_end, int tile_m) const {
    int const last_key = min_of(key_end, seqlen_k) - 1;
    int const begin = query_begin(key_begin), end = query_end(last_key);
    return key_begin < seqlen_k && begin < end ? BlockRange{begin / tile_m, ceil_div(end, tile_m)} : BlockRange{0, 0};
  }

  // The visited query blocks whose every query sees every key of [key_begin, key_end).
  FLASHHOPPER_HOST_DEVICE BlockRange unmasked_queries(int key_begin, int key_end, int tile_m) const {
    if (key_end > seqlen_k) return {0, 0};
    int const end = query_end(key_begin);  // a last block that ends with the queries needs no test either
    return {ceil_div(query_begin(key_end - 1), tile_m), end == seqlen_q ? ceil_div(end, tile_m) : end / tile_m};
  }
};

}  // namespace flashhopper
