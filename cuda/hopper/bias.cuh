// The additive bias: how a consumer thread gets its elements of a block of scores.
//
// Bias::tile and Bias::row come through a ring of their own, filled by the producer, in the order of the key blocks.
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
};

/// From shared memory.
template <FwdSpec S>
  requires(BiasBox<S>::copied)
class BiasReader<S> {
 public:
  __device__ BiasReader(const FwdParams&, Storage<S>& storage, const Place<S>& place)
      : ring_(storage.bias.data, storage.bias.barriers), offset_(offset(place)), lane_(place.lane()) {}

  __device__ void begin(const TileOf<S>&) {}

  /// Of the next block.
  __device__ BiasFragment<S> fetch(int /* block */) {
    const Slot slot = ring_.wait();
    BiasFragment<S> fragment;
    u32* w = fragment.words;
#pragma unroll
    for (int i = 0; i < S.tile_n / 2; i += 8) {  // two times 8 columns, rows g and g + 8
      const SharedAddress here = slot.data + offset_ + 2 * i * BiasBox<S>::element_bytes;
      if constexpr (S.bias_float32) {
        constexpr int below = 8 * BiasBox<S>::pitch, beside = 8 * BiasBox<S>::element_bytes;
        ptx::ld_shared_v2(here, w[i], w[i + 1]);
        ptx::ld_shared_v2(here + below, w[i + 2], w[i + 3]);
        ptx::ld_shared_v2(here + beside, w[i + 4], w[i + 5]);
        ptx::ld_shared_v2(here + beside + below, w[i + 6], w[i + 7]);
      } else {
        ptx::ldmatrix_x4(here, w[i / 2], w[i / 2 + 1], w[i / 2 + 2], w[i / 2 + 3]);
      }
    }
    __syncwarp();  // all lanes have read
    if (lane_ == 0) release(slot);
    return fragment;
  }

 private:
  /// Of the thread's first element, or of the row that it gives to ldmatrix.
  __device__ static u32 offset(const Place<S>& place) {
    const int row = S.bias_float32 ? place.row() : place.row() - place.lane() / 4 + place.lane() % 16;
    const int column = S.bias_float32 ? place.column() : 8 * (place.lane() / 16);
    return row * BiasBox<S>::pitch + column * BiasBox<S>::element_bytes;
  }

  typename Storage<S>::BiasConsumer ring_;
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
