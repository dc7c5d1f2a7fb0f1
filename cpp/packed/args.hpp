// What the host hands to the kernel that lists the blocks of a packed batch. Before it: the dispatch files. After it:
// list.hpp; its result is read by core/scheduler.hpp.
#pragma once

#include <cuda_runtime.h>

#include "core/seqlen.hpp"

namespace flashhopper {

struct ListArgs {
  PackedRows q, k;
  int batch;
  int tile;      // rows of a block
  bool by_keys;  // blocks of keys, else of queries
  int capacity;  // of `blocks`: most_packed_blocks()
  int* size;     // how many are listed
  PackedBlock* blocks;
};

// The two parts of the memory that a list takes; 16-byte aligned.
inline constexpr int kListHeaderBytes = 16;
constexpr int64_t list_bytes(int64_t capacity) {
  return kListHeaderBytes + capacity * static_cast<int64_t>(sizeof(PackedBlock));
}

cudaError_t launch_list_blocks(ListArgs const& args, int device, cudaStream_t stream);

}  // namespace flashhopper
