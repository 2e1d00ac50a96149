// Where a sequence's keys are in a cache: how many, and on which pages. Whatever lengths, tables and indices hold, nothing
// outside the caches is touched: lengths end at the capacity, and a page that the caches do not have is no page.
#pragma once
#include "decode_params.h"
#include "ptx/types.cuh"

namespace cupyfa {

__device__ inline int operator/(u32 number, const Divisor& d) { return u64(number) * d.multiplier >> d.shift; }

/// A row of the caches. There is no such row if `page` is -1.
struct CacheRow {
  int page, row;
};

class CachedSequence {
 public:
  __device__ CachedSequence(const CachePlaces& p, int sequence) : p_(p), sequence_(sequence) {
    const int length = p.cache_seqlens == nullptr ? p.cache_seqlen : p.cache_seqlens[sequence * p.seqlens_stride];
    before_ = min(max(length, 0), p.capacity);
    if (p.page_table == nullptr) own_page_ = valid(row_of_batch());
  }

  /// Keys before the call, and those that the queries see.
  __device__ int before() const { return before_; }
  __device__ int seqlen_k() const { return min(before_ + p_.appended, p_.capacity); }

  __device__ CacheRow at(int key) const {
    if (p_.page_table == nullptr) return {own_page_, key};
    const int number = u32(key) / p_.page_size;
    if (key >= p_.capacity) return {-1, 0};
    const int page = p_.page_table[sequence_ * p_.table_stride_batch + number * p_.table_stride_page];
    return {valid(page), key - number * int(p_.page_size.divisor)};
  }

 private:
  __device__ int row_of_batch() const {
    return p_.cache_batch_idx == nullptr ? sequence_ : p_.cache_batch_idx[sequence_ * p_.batch_idx_stride];
  }
  __device__ int valid(int page) const { return page >= 0 && page < p_.pages ? page : -1; }

  const CachePlaces& p_;
  int sequence_, before_, own_page_;
};

/// The query rows of a sequence, in q or in the packed q. Offsets that are no offsets make no rows.
struct QueryRows {
  int begin, count;

  __device__ static QueryRows of(const int* cu_seqlens, long long stride, int seqlen_q, int total_q, int sequence) {
    if (cu_seqlens == nullptr) return {0, seqlen_q};
    const int begin = cu_seqlens[sequence * stride], end = cu_seqlens[(sequence + 1) * stride];
    if (begin < 0 || end < begin || end > total_q) return {0, 0};
    return {begin, min(end - begin, seqlen_q)};
  }
};

}  // namespace cupyfa
