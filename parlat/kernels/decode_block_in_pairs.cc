// decode_block on machines that multiply pairs of bf16 and add both products to fp32 (AVX-512 BF16): a row of the cache
// is an operand as it lies in memory, so nothing is widened, and a product takes half the instructions of fp32.
#include <algorithm>
#include <array>
#include <cstring>

#include "parlat/base/error.h"
#include "parlat/kernels/decode_block.h"

#if defined(__x86_64__) && !defined(__clang__)  // which ignores the pragmas below

#include <immintrin.h>

// Debian 12's Highway has no such target, so these are the instructions themselves.
#pragma GCC push_options
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of the intrinsics' own undefined operands
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace parlat {

namespace {

constexpr int64_t kPairsALine = 16;  // in 64 bytes
constexpr int64_t kValueVectors = kValueColumns / 16;

__m512 add_pairs(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Heads beyond the last have q 0.
void pack_q(const DecodeBlock& b, DecodeScratch& scratch) {
  const int64_t d = b.width + b.d_rope, pairs = (d + 1) / 2;
  uint32_t* const q = scratch.q_pairs.get();
  std::fill_n(q, pairs * kHeadBlock, 0u);
  for (int64_t h = 0; h < b.n_heads; ++h) {
    const float* const row = b.q + h * d;
    for (int64_t j = 0; j < d; j += 32) {
      const auto mask = [&](int64_t first) {
        const int64_t n = std::clamp<int64_t>(d - first, 0, 16);
        return static_cast<__mmask16>((1u << n) - 1);
      };
      const __m512 low = _mm512_maskz_loadu_ps(mask(j), row + j),
                   high = _mm512_maskz_loadu_ps(mask(j + 16), row + j + 16);
      alignas(64) uint32_t both[16];
      _mm512_store_si512(both, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
      for (int64_t i = 0; i < std::min<int64_t>(16, pairs - j / 2); ++i) q[(j / 2 + i) * kHeadBlock + h] = both[i];
    }
  }
}

// scores[t][h] = q[h] . rows[t] for kRows rows from row t0 on, a head in each lane.
template <int64_t kRows>
void score_rows(const PageSpan& page, int64_t t0, DecodeScratch& scratch) {
  const char* rows[kRows];
  __m512 sum[kRows];
  for (int64_t t = 0; t < kRows; ++t) {
    rows[t] = page.rows + (t0 + t) * page.row_bytes;
    sum[t] = _mm512_setzero_ps();
  }
  const uint32_t* const q = scratch.q_pairs.get();
  const int64_t columns = page.row_bytes / 2, whole = columns / 2;
  for (int64_t begin = 0; begin < whole; begin += kPairsALine) {
    if (page.next != nullptr) {
      for (int64_t t = 0; t < kRows; ++t) {
        __builtin_prefetch(page.next + (t0 + t) * page.row_bytes + begin * 4, 0, 2);
      }
    }
    const int64_t end = std::min(begin + kPairsALine, whole);
    for (int64_t pair = begin; pair < end; ++pair) {
      const __m512i of_heads = _mm512_load_si512(q + pair * kHeadBlock);
      for (int64_t t = 0; t < kRows; ++t) {
        int both;
        std::memcpy(&both, rows[t] + pair * 4, 4);
        sum[t] = add_pairs(sum[t], of_heads, _mm512_set1_epi32(both));
      }
    }
  }
  for (int64_t t = 0; t < kRows; ++t) {
    if (columns % 2 != 0) {
      uint16_t last;  // in a pair with 0: what comes after it is not read
      std::memcpy(&last, rows[t] + whole * 4, 2);
      sum[t] = add_pairs(sum[t], _mm512_load_si512(q + whole * kHeadBlock), _mm512_set1_epi32(last));
    }
    _mm512_store_ps(scratch.scores.get() + (t0 + t) * kHeadBlock, sum[t]);
  }
}

void score_page(const PageSpan& page, DecodeScratch& scratch) {
  constexpr int64_t kRows = 8;
  int64_t t = 0;
  for (; t + kRows <= page.count; t += kRows) score_rows<kRows>(page, t, scratch);
  for (; t < page.count; ++t) score_rows<1>(page, t, scratch);
}

// Weights, which bf16 holds, of two rows each; 0 of a row that is not there.
void pack_weights(int64_t count, DecodeScratch& scratch) {
  const float* const weights = scratch.scores.get();
  for (int64_t t = 0; t < count; t += 2) {
    const __m512i first = _mm512_castps_si512(_mm512_load_ps(weights + t * kHeadBlock));
    const __m512i second =
        t + 1 < count ? _mm512_castps_si512(_mm512_load_ps(weights + (t + 1) * kHeadBlock)) : _mm512_setzero_si512();
    const __m512i high = _mm512_and_si512(second, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    _mm512_store_si512(scratch.weight_pairs.get() + t / 2 * kHeadBlock,
                       _mm512_or_si512(_mm512_srli_epi32(first, 16), high));
  }
}

// Which of two rows' 32 columns each, 0 to 31 and 32 to 63, make the first and the last 16 pairs.
alignas(64) constexpr auto kOfBothRows = [] {
  std::array<std::array<uint16_t, 32>, 2> columns{};
  for (size_t i = 0; i < 32; ++i) {
    columns[0][i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    columns[1][i] = static_cast<uint16_t>(columns[0][i] + 16);
  }
  return columns;
}();

// n columns of a page's rows from `column` on, those of two rows side by side; 0 where there is no row or column.
void interleave_rows(const PageSpan& page, int64_t column, int64_t n, DecodeScratch& scratch) {
  const __m512i take_low = _mm512_load_si512(kOfBothRows[0].data()),
                take_high = _mm512_load_si512(kOfBothRows[1].data());
  for (int64_t t = 0; t < page.count; t += 2) {
    const char* const row = page.rows + t * page.row_bytes + column * 2;
    uint32_t* const to = scratch.value_pairs.get() + t / 2 * kValueColumns;
    for (int64_t j = 0; j < kValueColumns; j += 32) {
      const int64_t left = std::clamp<int64_t>(n - j, 0, 32);
      const auto mask = static_cast<__mmask32>((uint64_t{1} << left) - 1);
      const __m512i first = _mm512_maskz_loadu_epi16(mask, row + j * 2);
      const __m512i second =
          t + 1 < page.count ? _mm512_maskz_loadu_epi16(mask, row + page.row_bytes + j * 2) : _mm512_setzero_si512();
      _mm512_store_si512(to + j, _mm512_permutex2var_epi16(first, take_low, second));
      _mm512_store_si512(to + j + 16, _mm512_permutex2var_epi16(first, take_high, second));
    }
  }
}

// out[h][column..] = scale[h] out[h][column..] + sum over rows of their weights and values, for kHeads heads.
template <int64_t kHeads>
void add_tile(const DecodeBlock& b, int64_t n_pairs, int64_t head, int64_t column, const DecodeScratch& scratch) {
  __m512 sum[kHeads][kValueVectors];
  const auto mask = [&](int64_t v) {
    return static_cast<__mmask16>((1u << std::clamp<int64_t>(b.width - column - v * 16, 0, 16)) - 1);
  };
  for (int64_t h = 0; h < kHeads; ++h) {
    const __m512 scale = _mm512_set1_ps(scratch.scale[head + h]);
    const float* const out = b.out + (head + h) * b.width + column;
    for (int64_t v = 0; v < kValueVectors; ++v) {
      sum[h][v] = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(mask(v), out + v * 16));
    }
  }
  const uint32_t* values = scratch.value_pairs.get();
  const uint32_t* weights = scratch.weight_pairs.get() + head;
  for (int64_t pair = 0; pair < n_pairs; ++pair, values += kValueColumns, weights += kHeadBlock) {
    __m512i value[kValueVectors];
    for (int64_t v = 0; v < kValueVectors; ++v) value[v] = _mm512_load_si512(values + v * 16);
    for (int64_t h = 0; h < kHeads; ++h) {
      const __m512i weight = _mm512_set1_epi32(static_cast<int>(weights[h]));
      for (int64_t v = 0; v < kValueVectors; ++v) sum[h][v] = add_pairs(sum[h][v], value[v], weight);
    }
  }
  for (int64_t h = 0; h < kHeads; ++h) {
    float* const out = b.out + (head + h) * b.width + column;
    for (int64_t v = 0; v < kValueVectors; ++v) _mm512_mask_storeu_ps(out + v * 16, mask(v), sum[h][v]);
  }
}

void add_page(const DecodeBlock& b, const PageSpan& page, DecodeScratch& scratch) {
  const int64_t n_pairs = (page.count + 1) / 2;
  for (int64_t column = 0; column < b.width; column += kValueColumns) {
    interleave_rows(page, column, std::min(kValueColumns, b.width - column), scratch);
    int64_t head = 0;
    // Eight are two fours: six would leave two by themselves.
    for (; b.n_heads - head >= 6 && b.n_heads - head != 8; head += 6) add_tile<6>(b, n_pairs, head, column, scratch);
    for (; b.n_heads - head >= 4; head += 4) add_tile<4>(b, n_pairs, head, column, scratch);
    for (; head < b.n_heads; ++head) add_tile<1>(b, n_pairs, head, column, scratch);
  }
}

}  // namespace

void decode_block_in_pairs(const DecodeBlock& b, DecodeScratch& scratch) {
  pack_q(b, scratch);
  for (int64_t row = b.range.begin; row < b.range.end;) {
    const PageSpan page = page_span(b, row);
    score_page(page, scratch);
    softmax_page(b, page.count, /*round=*/true, scratch);
    pack_weights(page.count, scratch);
    add_page(b, page, scratch);
    row += page.count;
  }
}

}  // namespace parlat

#pragma GCC pop_options

#else

namespace parlat {

void decode_block_in_pairs(const DecodeBlock&, DecodeScratch&) { throw InternalError("no pairs of bf16 here"); }

}  // namespace parlat

#endif
