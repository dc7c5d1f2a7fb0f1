// The order in which the quantised values hold their keys, so that the probabilities of a score accumulator are already
// the 8-bit A operand of P V. The quantiser writes through it, the 8-bit forward relies on it; host tests prove both.
#pragma once

#include "core/platform.hpp"

namespace flashhopper {

inline constexpr int kValueGroup = 16;   // keys that change places among themselves
inline constexpr int kScaleBlock = 128;  // rows that share a scale; keys are padded to a multiple of it

// The key at a position of an aligned group: positions 4c .. 4c+3 hold what thread c of a quad holds of two
// neighbouring 8-column accumulator tiles, keys 2c, 2c+1, 8+2c, 9+2c.
FLASHHOPPER_HOST_DEVICE constexpr int value_key(int position) {
  int const c = position / 4, e = position % 4;
  return e < 2 ? 2 * c + e : 8 + 2 * c + (e - 2);
}

// Its inverse: where a key of a group stands.
FLASHHOPPER_HOST_DEVICE constexpr int value_position(int key) { return key % 8 / 2 * 4 + key / 8 * 2 + key % 2; }

// The 4-byte words of a transposed tile (channels, 32 words of 4 keys) in shared memory: words of a channel change
// places in aligned groups of four, so that threads of different channels write to different banks and 16-byte reads
// stay whole.
FLASHHOPPER_HOST_DEVICE constexpr int value_tile_word(int channel, int word) {
  return channel * (kScaleBlock / 4) + (word ^ (channel / 8 * 4 % 32));
}

// The computed head dimension that holds a given one; 0 when none does.
FLASHHOPPER_HOST_DEVICE constexpr int computed_head_dim(int head_dim) {
  return head_dim <= 64    ? 64
         : head_dim <= 96  ? 96
         : head_dim <= 128 ? 128
         : head_dim <= 192 ? 192
         : head_dim <= 256 ? 256
                           : 0;
}

// Columns that one Hadamard matrix mixes.
FLASHHOPPER_HOST_DEVICE constexpr int hadamard_block(int computed_dim) {
  return computed_dim == 96 ? 32 : computed_dim == 192 ? 64 : computed_dim;
}

}  // namespace flashhopper
