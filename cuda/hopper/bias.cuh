// The additive bias: how a consumer thread gets its elements of a block of scores.
//
// Bias::tile and Bias::row come through a ring of their own, in the order of the key blocks, from a thread of their own.
// Bias::gather takes no shared memory, any strides and any address, at the price of a load for each score. Rows and keys
// that the array does not have get 0 both ways: those of a tile that hangs over the end, and of a packed sequence that is
// longer than the bias.
#pragma once
#include "hopper/place.cuh"
#include "hopper/storage.cuh"
#include "params.h"
#include "ptx/ld_shared.cuh"
#include "score_mod.cuh"

namespace cupyfa::hopper {

/// Called behind what uses all that the warp has loaded from the slot. Right behind the loads, which may wait behind
/// products, outputs were wrong on the H200 (docs/notes/hopper_options.md).
__device__ inline void give_back(const Slot& slot, int lane) {
  __syncwarp();  // all lanes have read
  if (lane == 0) release(slot);
}

template <FwdSpec S>
class BiasReader;

/// No bias.
template <FwdSpec S>
  requires(S.bias == Bias::none)
class BiasReader<S> {
 public:
  __device__ BiasReader(const FwdParams&, Storage<S>&, const Place<S>&) {}
  __device__ void begin(const TileOf<S>&) {}
  __device__ BiasFragment<S> fetch(int) { return {}; }
  __device__ void done() const {}
};

/// A row that all queries share, from shared memory.
template <FwdSpec S>
  requires(S.bias == Bias::row)
class BiasReader<S> {
 public:
  __device__ BiasReader(const FwdParams&, Storage<S>& storage, const Place<S>& place)
      : ring_(storage.bias.data, storage.bias.barriers), offset_(place.column() * BiasBox<S>::element_bytes),
        lane_(place.lane()) {}

  __device__ void begin(const TileOf<S>&) {}

  __device__ BiasFragment<S> fetch(int /* block */) {
    slot_ = ring_.wait();
    BiasFragment<S> fragment;
    u32* w = fragment.words;
#pragma unroll
    for (int i = 0; i < S.tile_n / 2; i += 4) {  // 8 columns, the same in rows g and g + 8
      const SharedAddress here = slot_.data + offset_ + 2 * i * BiasBox<S>::element_bytes;
      if constexpr (S.bias_float32) {
        ptx::ld_shared_v2(here, w[i], w[i + 1]);
        w[i + 2] = w[i], w[i + 3] = w[i + 1];
      } else {
        w[i / 2] = w[i / 2 + 1] = ptx::ld_shared(here);
      }
    }
    return fragment;
  }

  __device__ void done() const { give_back(slot_, lane_); }

 private:
  typename Storage<S>::BiasConsumer ring_;
  Slot slot_;
  u32 offset_;
  int lane_;
};

/// From shared memory.
template <FwdSpec S>
  requires(S.bias == Bias::tile)
class BiasReader<S> {
 public:
  __device__ BiasReader(const FwdParams&, Storage<S>& storage, const Place<S>& place)
      : ring_(storage.bias.data, storage.bias.barriers), offset_(offset(place)), lane_(place.lane()) {}

  __device__ void begin(const TileOf<S>&) {}

  __device__ BiasFragment<S> fetch(int /* block */) {
    slot_ = ring_.wait();
    BiasFragment<S> fragment;
    u32* w = fragment.words;
    const SharedAddress first = slot_.data + offset_;
    if constexpr (S.bias_float32) {
#pragma unroll
      for (int g = 0; g < S.tile_n / 8; ++g) {
        if ((g & apart) != 0) continue;  // comes with the other of the pair
#pragma unroll
        for (int r = 0; r < 2; ++r) {  // rows g and g + 8
          u32 one[2], other[2];
          ptx::ld_shared_v2(group(first, g) + 8 * r * Box::swizzle, one[0], one[1]);
          ptx::ld_shared_v2(group(first, g + apart) + 8 * r * Box::swizzle, other[0], other[1]);
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            w[4 * g + 2 * r + c] = exchanged(lane_) ? other[c] : one[c];
            w[4 * (g + apart) + 2 * r + c] = exchanged(lane_) ? one[c] : other[c];
          }
        }
      }
    } else {
#pragma unroll
      for (int g = 0; g < S.tile_n / 16; ++g) {
        ptx::ldmatrix_x4(group(first, g), w[4 * g], w[4 * g + 1], w[4 * g + 2], w[4 * g + 3]);
      }
    }
    return fragment;
  }

  __device__ void done() const { give_back(slot_, lane_); }

 private:
  using Box = BiasBox<S>;

  // Half a warp's `ld.shared.v2` takes 32 bytes of each of four rows. The swizzle leaves two of them in the same banks, so
  // that half of the rows take the groups of a pair in the other order.
  static constexpr int apart = Box::swizzle == 128 ? 2 : 1;  // the groups of a pair
  __device__ static bool exchanged(int lane) { return lane / 4 & (Box::swizzle == 128 ? 1 : 2); }

  /// A group of columns, 32 bytes of a row: 8 columns of float32, 16 of 16 bits.
  __device__ static SharedAddress group(SharedAddress first, int number) {
    constexpr int of_panel = Box::swizzle / 32;
    return (first ^ (number % of_panel * 32)) + number / of_panel * Box::panel_bytes;
  }

  /// Where group 0 has the thread's first element, or the row that it gives to ldmatrix.
  __device__ static u32 offset(const Place<S>& place) {
    const int lane = place.lane();
    const int row = S.bias_float32 ? place.row() : place.row() - lane / 4 + lane % 16;
    int chunk = S.bias_float32 ? lane % 4 / 2 : lane / 16;
    if (S.bias_float32 && exchanged(lane)) chunk ^= 2 * apart;
    const int line = row * Box::swizzle / 128;  // of 128 bytes: the swizzle goes by these
    return row * Box::swizzle + (chunk ^ line % (Box::swizzle / 16)) * 16 + (S.bias_float32 ? lane % 2 * 8 : 0);
  }

  typename Storage<S>::BiasConsumer ring_;
  Slot slot_;
  u32 offset_;
  int lane_;
};

/// From global memory.
template <FwdSpec S>
  requires(S.bias == Bias::gather)
class BiasReader<S> {
 public:
  __device__ BiasReader(const FwdParams& p, Storage<S>&, const Place<S>& place) : p_(p), place_(place) {}

  __device__ void begin(const TileOf<S>& tile) {
    const Element* head =
        static_cast<const Element*>(p_.bias_data) + tile.batch * p_.bias_stride_batch + tile.head * p_.bias_stride_head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.m * S.tile_m + place_.row() + 8 * r;
      has_row_[r] = row < p_.bias_rows;
      rows_[r] = head + row * p_.bias_stride_row;
    }
  }

  __device__ BiasFragment<S> fetch(int block) const {
    const int first = block * S.tile_n + place_.column();
    BiasFragment<S> fragment;
#pragma unroll
    for (int i = 0; i < S.tile_n / 2; i += BiasFragment<S>::per_word) {
      u32 word = load(first, i);
      if constexpr (!S.bias_float32) word |= load(first, i + 1) << 16;
      fragment.words[i / BiasFragment<S>::per_word] = word;
    }
    return fragment;
  }

  __device__ void done() const {}

 private:
  using Element = decltype([] {
    if constexpr (S.bias_float32)
      return u32{};
    else
      return static_cast<unsigned short>(0);
  }());

  __device__ u32 load(int first, int i) const {
    const int key = first + 8 * (i / 4) + i % 2, row = i / 2 % 2;
    return has_row_[row] && key < p_.bias_keys ? __ldg(rows_[row] + key * p_.bias_stride_key) : 0;
  }

  const FwdParams& p_;
  Place<S> place_;
  const Element* rows_[2];
  bool has_row_[2];
};

}  // namespace cupyfa::hopper
