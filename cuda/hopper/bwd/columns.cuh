// How two warpgroups share the columns of a tile, so that each part is one that a WGMMA can name: an operand that is
// contiguous along N begins at a panel of 64 columns, or lies within one.
#pragma once
#include "layout.cuh"

namespace cupyfa::hopper {

/// Half of `columns`, a multiple of 32: as many whole panels as there are pairs of them, then half of a panel that is left
/// over, then half of a panel of 32 columns. What a warpgroup has is numbered from 0 to `count`.
template <int columns>
struct HalfOf {
  static_assert(columns % 32 == 0);
  static constexpr int count = columns / 2;
  static constexpr int of_pairs = columns / (2 * panel_cols) * panel_cols;
  static constexpr int of_panel = columns / panel_cols % 2 * (panel_cols / 2);
  static constexpr int of_rest = columns % panel_cols / 2;

  /// Calls `piece.operator()<width, first>(column)`: `width` of its columns, from number `first` on, begin at `column`.
  template <typename Function>
  __device__ static void each_piece(int warpgroup, const Function& piece) {
    if constexpr (of_pairs > 0) piece.template operator()<of_pairs, 0>(of_pairs * warpgroup);
    if constexpr (of_panel > 0) piece.template operator()<of_panel, of_pairs>(2 * of_pairs + of_panel * warpgroup);
    if constexpr (of_rest > 0) {
      piece.template operator()<of_rest, of_pairs + of_panel>(2 * (of_pairs + of_panel) + of_rest * warpgroup);
    }
  }
};

/// All of them, for one warpgroup.
template <int columns>
struct AllOf {
  static constexpr int count = columns;

  template <typename Function>
  __device__ static void each_piece(int, const Function& piece) {
    piece.template operator()<columns, 0>(0);
  }
};

/// Some that follow each other: equal parts of all columns, of which each is a panel or lies within one.
template <int columns, int width>
struct PartOf {
  static_assert(columns % width == 0 && panel_cols % width == 0);
  static constexpr int count = width;

  template <typename Function>
  __device__ static void each_piece(int part, const Function& piece) {
    piece.template operator()<width, 0>(width * part);
  }
};

template <bool condition, typename A, typename B>
struct ChooseType {
  using Type = A;
};
template <typename A, typename B>
struct ChooseType<false, A, B> {
  using Type = B;
};
template <bool condition, typename A, typename B>
using Choose = typename ChooseType<condition, A, B>::Type;

/// The address of a column of a tile in panels: a multiple of 8.
__device__ inline SharedAddress column_address(SharedAddress tile, int column, int rows) {
  return tile + column / panel_cols * panel_bytes(rows) + column % panel_cols * 2;
}

/// Accumulators of some columns among a thread's: two for each eight columns and row.
template <int width, int first, int count>
__device__ inline float (&accumulators_of(float (&all)[count])) [width / 2] {
  static_assert((first + width) / 2 <= count);
  return reinterpret_cast<float (&)[width / 2]>(all[first / 2]);
}

}  // namespace cupyfa::hopper
