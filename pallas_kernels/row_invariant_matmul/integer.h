// Exact integer block sums: the second arithmetic of q8_0 and q4_1 (formats 6 and 7, formats.h has the layouts).
//
// Of a row x, every block of 32 inputs:
//   s        the smallest power of two, at least 2^-126, with max |x| / s < 127 * 2^16; NaN if an input is not finite
//   X        x / s rounded to the nearest integer (ties to even) = d0 + 2^8 d1 + 2^16 d2, digits from -128 to 127; 0 if s is NaN
//   S_i      sum of d_i q over the block: exact integers, so any order and any instruction gives them
//   t        fma(2^16, float(S_2), float(2^8 S_1 + S_0)); q4_1: the exact sum of X q, rounded once
//   acc      fma(d s, t, acc), then for q4_1 fma(m, s float(sum of X), acc); blocks from left to right, from zero
// All other steps round nowhere. A row's bits then depend on the row and the weight alone, and a row with an input that is
// not finite has NaN in every output. Against fp32 sums of K steps this rounds an input at 23 bits of its block's largest and
// a sum once or twice a block.
//
// Rows are split once for all panels, in groups of kRowGroup rows: the digits of all blocks of a group, [block][row], then
// their scales, [block][row]. There are two kinds of digits, for the same integers:
//   bytes   [3][32], as above: dot products (AVX-512 VNNI, for few rows), and tiles of q8_0
//   pairs   [2][2][32], two numbers of 12 bits, each as 4 low bits and 8 high ones. A tile multiplies the ones by q and the
//           others by 16 q in one product, so that q4_1 needs two tile rows for a row and fills tiles of 64 inputs
#pragma once

#include "row_invariant_matmul/formats.h"

#if JETSPEC_FORM == 3 && defined(__AMX_INT8__) && defined(__linux__)
#define JETSPEC_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Build parameters of integer sums (tuning.py): none changes a bit, as integers add up to the same in any order.
#ifndef JETSPEC_ROW_INVARIANT_MATMUL_TILES_FROM
#define JETSPEC_ROW_INVARIANT_MATMUL_TILES_FROM 3
#endif
#ifndef JETSPEC_ROW_INVARIANT_MATMUL_ROW_GROUP
#define JETSPEC_ROW_INVARIANT_MATMUL_ROW_GROUP 8
#endif
#ifndef JETSPEC_ROW_INVARIANT_MATMUL_DOT_ROWS
#define JETSPEC_ROW_INVARIANT_MATMUL_DOT_ROWS 4
#endif
#ifndef JETSPEC_ROW_INVARIANT_MATMUL_DOT_VECTORS
#define JETSPEC_ROW_INVARIANT_MATMUL_DOT_VECTORS (JETSPEC_FORM == 3 ? 2 : 1)
#endif

namespace jetspec {

constexpr int kRowGroup = JETSPEC_ROW_INVARIANT_MATMUL_ROW_GROUP;
constexpr int kDigits = 3, kRowDigits = kDigits * kBlock, kRowPairs = 4 * kBlock;
constexpr int kDotRows = JETSPEC_ROW_INVARIANT_MATMUL_DOT_ROWS;  // most rows that share decoded weights without tiles
static_assert(kRowGroup >= 1 && kRowGroup <= 8 && kMaxPanelRows % kRowGroup == 0, "ROW_GROUP is 1, 2, 4 or 8");
static_assert(kDotRows >= 1 && kDotRows <= 4, "DOT_ROWS is 1 to 4");

struct BlockScale {  // of one row and block
  float scale, sum;  // s, and s times the sum of X
};
using Bias = int32_t[kDigits];  // -128 times the sums of the bytes, of one row and block
static_assert(kRowDigits + sizeof(Bias) <= kRowPairs, "bytes and their bias fit where pairs do");
constexpr size_t kRowBlock = kRowPairs + sizeof(BlockScale);
constexpr size_t kTileBytes = 1024;  // tiles of a part of a group read behind it: less than this

// Bytes of split rows; with kTileBytes behind them for the last.
inline size_t split_bytes(size_t rows, size_t depth) { return rows * depth / kBlock * kRowBlock; }

#if defined(JETSPEC_AMX)
// Whether the system lets this process use tiles: asked once, and for all its threads.
inline bool tiles_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return allowed;
}
inline bool use_tiles(int rows) { return rows >= JETSPEC_ROW_INVARIANT_MATMUL_TILES_FROM && tiles_allowed(); }
#else
constexpr bool use_tiles(int) { return false; }
#endif

// ---- Rows to digits ------------------------------------------------------------------------------------------------
template <bool Pairs>
inline void split_block(const float* x, uint8_t* digits, BlockScale* to, Bias* bias) {
  constexpr uint32_t kInfinity = 0x7F800000, kCarry = 1u << 17, kMiddle = Pairs ? 0x800800 : 0x808080;
  constexpr int kBytes = Pairs ? 4 : 3;
  // Bytes of X + kMiddle: where they begin, which bits count, and what turns them into digits.
  constexpr int kFrom[] = {0, Pairs ? 4 : 8, Pairs ? 12 : 16, 16}, kMask[] = {Pairs ? 15 : 255, 255, Pairs ? 15 : 255, 255};
  constexpr int kFlip[] = {Pairs ? 0 : 128, 128, Pairs ? 0 : 128, 128};
  const auto power = [](int k) {
    const int32_t bits = (k + 127) << 23;
    float v;
    std::memcpy(&v, &bits, sizeof(v));
    return v;
  };
#if JETSPEC_FORM == 3
  const Vec low = load(x), high = load(x + kLanes);
  const Ints magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  const uint32_t top = _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_and_si512((Ints)low, magnitude), _mm512_and_si512((Ints)high, magnitude)));
#else
  uint32_t top = 0;
  for (int i = 0; i < kBlock; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    top = std::max(top, bits & 0x7FFFFFFF);
  }
#endif
  if (top >= kInfinity) {
    std::memset(digits, 0, kBytes * kBlock);
    if constexpr (!Pairs) std::memset(bias, 0, sizeof(*bias));
    *to = {__builtin_nanf(""), __builtin_nanf("")};
    return;
  }
  // A mantissa from 2 - 2^-6 on counts as the next power.
  const int k = std::max(static_cast<int>((top + kCarry) >> 23) - 149, -126);
  const float inverse = power(-k);
  int32_t sum;
#if JETSPEC_FORM == 3
  const Ints whole[2] = {_mm512_cvtps_epi32(low * splat(inverse)), _mm512_cvtps_epi32(high * splat(inverse))};
  const Ints moved[2] = {add(whole[0], all(kMiddle)), add(whole[1], all(kMiddle))};
  sum = _mm512_reduce_add_epi32(add(whole[0], whole[1]));
  for (int i = 0; i < kBytes; ++i) {
    __m128i half[2];
    for (int h = 0; h < 2; ++h) half[h] = _mm512_cvtepi32_epi8(low_bits(shift_right(moved[h], kFrom[i]), kMask[i]));
    const __m256i bytes = _mm256_set_m128i(half[1], half[0]);
    _mm256_storeu_si256((__m256i*)(digits + i * kBlock), _mm256_xor_si256(bytes, _mm256_set1_epi8(kFlip[i])));
    if constexpr (!Pairs) {
      const __m256i fours = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
      const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
      (*bias)[i] = -128 * (_mm_cvtsi128_si32(pair) + _mm_extract_epi32(pair, 2) - 128 * kBlock);
    }
  }
#else
  sum = 0;
  if constexpr (!Pairs) std::memset(bias, 0, sizeof(*bias));
  for (int j = 0; j < kBlock; ++j) {
    const int32_t whole = static_cast<int32_t>(__builtin_rintf(x[j] * inverse));
    const uint32_t moved = static_cast<uint32_t>(whole) + kMiddle;
    sum += whole;
    for (int i = 0; i < kBytes; ++i) {
      const uint32_t byte = moved >> kFrom[i] & kMask[i];
      digits[i * kBlock + j] = static_cast<uint8_t>(byte ^ kFlip[i]);
      if constexpr (!Pairs) (*bias)[i] -= 128 * (static_cast<int32_t>(byte) - 128);
    }
  }
#endif
  *to = {power(k), power(k) * static_cast<float>(sum)};
}

// A split group of `rows` rows, by block and row; what it points to is written by split_rows alone.
struct Group {
  uint8_t* digits;
  BlockScale* scales;
  Bias* bias;  // of bytes, in the room that pairs would take
  int rows;

  Group(const uint8_t* at, size_t depth, int rows) : digits(const_cast<uint8_t*>(at)), rows(rows) {
    const size_t cells = rows * depth / kBlock;
    scales = reinterpret_cast<BlockScale*>(digits + cells * kRowPairs);
    bias = reinterpret_cast<Bias*>(digits + cells * kRowDigits);
  }
};

// Rows [begin, end) of `rows` rows x [rows, depth]; `pairs`: that kind of digits where tiles will be used.
inline void split_rows(const float* x, int rows, size_t depth, bool pairs, int begin, int end, uint8_t* to) {
  for (int r = begin; r < end; ++r) {
    const int first = r / kRowGroup * kRowGroup;
    const float* from = x + r * depth;
    const Group group(to + split_bytes(first, depth), depth, std::min(kRowGroup, rows - first));
    const bool wide = pairs && use_tiles(group.rows);
    const auto split = wide ? split_block<true> : split_block<false>;
    const int size = wide ? kRowPairs : kRowDigits;
    for (size_t b = 0; b < depth / kBlock; ++b) {
      const size_t at = b * group.rows + (r - first);
      split(from + b * kBlock, group.digits + at * size, group.scales + at, group.bias + at);
    }
  }
}

// ---- Formats -------------------------------------------------------------------------------------------------------
// Words of a block: [8 groups of 4 inputs][32 outputs] for bytes; nibbles have groups g and g + 4 in one word.
struct Q80Sums {
  static constexpr bool kNibble = false;
  static constexpr size_t kHead = kPanel * 2, kBytes = kHead + kBlock * kPanel, kScales = 0, kWords = kHead;
  static constexpr size_t bytes(size_t k) { return k / kBlock * kBytes; }
  static float value(const uint8_t* block, int i, int n) {
    return static_cast<float>(static_cast<int8_t>(block[kHead + (i / 4 * kPanel + n) * 4 + i % 4])) *
           half_at(block + 2 * n);
  }
  static float half_at(const void* p) {
    uint16_t h;
    std::memcpy(&h, p, sizeof(h));
    return half_to_float(h);
  }
};

struct Q41Sums {
  static constexpr bool kNibble = true;
  static constexpr size_t kBytes = Q41::kBytes, kScales = kNibbles, kWords = 0;
  static constexpr size_t bytes(size_t k) { return k / kBlock * kBytes; }
  static float value(const uint8_t* block, int i, int n) {
    const int q = block[(i % 16 / 4 * kPanel + n) * 4 + i % 4] >> i / 16 * 4 & 15;
    const uint8_t* scales = block + kScales + 2 * n;
    return __builtin_fmaf(static_cast<float>(q), Q80Sums::half_at(scales), Q80Sums::half_at(scales + kPanel * 2));
  }
};

// Output n of a panel, all its inputs.
template <typename Format>
void take_sums(const uint8_t* panel, int depth, int n, float* to) {
  for (int k = 0; k < depth; ++k) to[k] = Format::value(panel + Format::bytes(k), k % kBlock, n);
}

template <typename Format>
struct SumScales {  // of a block, outputs n onwards
  Vec d, m;
  SumScales(const uint8_t* block, int n) {
    d = load_half(block + Format::kScales + 2 * n);
    if constexpr (Format::kNibble) m = load_half(block + Format::kScales + kPanel * 2 + 2 * n);
  }
  // t, from the sums of the three bytes, or of the two pairs (then exact in fp32 each, so the same).
  static Vec total(Ints s0, Ints s1, Ints s2) { return fma(splat(65536.0f), to_float(s2), to_float(add(shift_left(s1, 8), s0))); }
  static Vec total(Ints s0, Ints s1) { return fma(splat(4096.0f), to_float(s1), to_float(s0)); }
  Vec add_block(Vec acc, Vec t, const BlockScale& row) const {
    acc = fma(d * splat(row.scale), t, acc);
    if constexpr (Format::kNibble) acc = fma(m, splat(row.sum), acc);
    return acc;
  }
};

template <typename Format>
inline void prefetch_block(const uint8_t* block, size_t ahead) {
  for (size_t i = 0; i < Format::kBytes; i += 64) __builtin_prefetch(block + ahead + i, 0, JETSPEC_ROW_INVARIANT_MATMUL_LOCALITY);
}

// ---- Few rows: dot products of four bytes --------------------------------------------------------------------------
// Four signed bytes in every lane; dot: acc + their products with the unsigned bytes w.
struct Digits {
#if JETSPEC_FORM == 3 && defined(__AVX512VNNI__)
  Ints four;
  explicit Digits(const int8_t* at) {
    int32_t word;
    std::memcpy(&word, at, sizeof(word));
    four = _mm512_set1_epi32(word);
  }
  Ints dot(Ints acc, Ints w) const { return _mm512_dpbusd_epi32(acc, w, four); }
#elif JETSPEC_FORM == 2
  Ints even, odd;
  explicit Digits(const int8_t* at) {
    int32_t word;
    std::memcpy(&word, at, sizeof(word));
    const Ints four = _mm256_set1_epi32(word);
    even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8);
    odd = _mm256_srai_epi16(four, 8);
  }
  Ints dot(Ints acc, Ints w) const {
    const Ints low = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even);
    return add(acc, add(low, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd)));
  }
#else
  const int8_t* at;
  explicit Digits(const int8_t* at) : at(at) {}
  static Ints times(Ints v, int by) {
#if JETSPEC_FORM == 3
    return _mm512_mullo_epi32(v, all(by));
#else
    return v * all(by);
#endif
  }
  Ints dot(Ints acc, Ints w) const {
    for (int i = 0; i < 4; ++i) acc = add(acc, times(low_bits(shift_right(w, 8 * i), 255), at[i]));
    return acc;
  }
#endif
};

// Eight groups of unsigned weights, outputs n onwards; bytes are moved up by 128.
template <typename Format>
inline void load_groups(const uint8_t* block, int n, Ints* q) {
  const uint8_t* words = block + Format::kWords + 4 * n;
  if constexpr (Format::kNibble) {
    for (int g = 0; g < 4; ++g) {
      const Ints both = load_ints(words + g * kPanel * 4);
      q[g] = low_bits(both, 0x0F0F0F0F);
      q[4 + g] = low_bits(shift_right(both, 4), 0x0F0F0F0F);
    }
  } else {
    for (int g = 0; g < 8; ++g) q[g] = load_ints(words + g * kPanel * 4) ^ all(static_cast<int>(0x80808080));
  }
}

// Vectors of outputs that share a broadcast of digits: a load that fills 64 bytes costs Zen 4 as much as two products.
constexpr int kDotVectors = JETSPEC_ROW_INVARIANT_MATMUL_DOT_VECTORS;
static_assert(kDotVectors >= 1 && kPanel / kLanes % kDotVectors == 0, "DOT_VECTORS divides the vectors of a panel");

// acc[R][32]: rows `first` onwards of a split group, times a panel.
template <typename Format, int R>
void dot_rows(const uint8_t* panel, int blocks, const Group& group, int first, size_t ahead, float* acc) {
  constexpr int V = kPanel / kLanes, S = kDotVectors;
  Vec a[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) a[r][v] = zero();
  for (int b = 0; b < blocks; ++b, panel += Format::kBytes) {
    const size_t row = static_cast<size_t>(b) * group.rows + first;
    const int8_t* digits = reinterpret_cast<const int8_t*>(group.digits) + row * kRowDigits;
    const BlockScale* scales = group.scales + row;
    if (ahead > 0) prefetch_block<Format>(panel, ahead);
#pragma GCC unroll 8
    for (int v = 0; v < V; v += S) {
      Ints q[S][8];
      for (int side = 0; side < S; ++side) load_groups<Format>(panel, (v + side) * kLanes, q[side]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Ints sum[S][kDigits];
        for (int side = 0; side < S; ++side)
          for (int i = 0; i < kDigits; ++i) sum[side][i] = all(Format::kNibble ? 0 : group.bias[row + r][i]);
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g)
#pragma GCC unroll 3
          for (int i = 0; i < kDigits; ++i) {
            const Digits four(digits + r * kRowDigits + i * kBlock + g * 4);
#pragma GCC unroll 2
            for (int side = 0; side < S; ++side) sum[side][i] = four.dot(sum[side][i], q[side][g]);
          }
#pragma GCC unroll 2
        for (int side = 0; side < S; ++side) {
          const SumScales<Format> s(panel, (v + side) * kLanes);
          a[r][v + side] = s.add_block(a[r][v + side], s.total(sum[side][0], sum[side][1], sum[side][2]), scales[r]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(acc + r * kPanel + v * kLanes, a[r][v]);
}

// ---- Many rows: AMX tiles ------------------------------------------------------------------------------------------
#if defined(JETSPEC_AMX)
// Inline assembler: GCC 12's intrinsics lose stores before ldtilecfg. The compiler itself never uses a tile.
template <int T>
inline void tile_load(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

constexpr int kTile = 16;  // rows of a tile, and 32-bit columns
// What tiles hold; kSums beside them.
constexpr int kPairTile = 3, kPairWeights = 4, kByteTile = 5, kByteWeights = 6;
// Tiles for the sums of two pieces of 16 tile rows, of the halves of a panel.
constexpr int kSums[2][2] = {{0, 1}, {2, 7}};

inline void configure_tiles() {
  struct {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 32, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 8, 16};
  } c;
  asm volatile("ldtilecfg %0" ::"m"(c) : "memory");
}

// The sums of piece `Piece` and those after it, of T: digits times the weights in their tile.
template <bool Pairs, int Half, int T, int Piece = 0>
inline void multiply_pieces(const uint8_t* digits) {
  constexpr int kTo = kSums[Half][Piece];
  if constexpr (Pairs) {
    tile_load<kPairTile>(digits + Piece * kTile * 2 * kBlock, 2 * kBlock);
    asm volatile("tilezero %%tmm%c0\n\ttdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kPairTile), "i"(kPairWeights));
  } else {
    tile_load<kByteTile>(digits + Piece * kTile * kBlock, kBlock);
    asm volatile("tilezero %%tmm%c0\n\ttdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kByteTile), "i"(kByteWeights));
  }
  if constexpr (Piece + 1 < T) multiply_pieces<Pairs, Half, T, Piece + 1>(digits);
}

template <int Half, int T, int Piece = 0>
inline void store_pieces(int32_t* sums) {
  tile_store<kSums[Half][Piece]>(sums + Piece * kTile * kTile, kTile * 4);
  if constexpr (Piece + 1 < T) store_pieces<Half, T, Piece + 1>(sums);
}

// acc[R][32]: a split group of R rows times a panel, all sums in registers. It goes from block to block and in a block from
// one half of the panel to the other.
template <typename Format, int R>
void tile_rows(const uint8_t* panel, int blocks, const Group& group, size_t ahead, float* acc) {
  constexpr bool kPairs = Format::kNibble;
  constexpr int kHeight = kPairs ? 2 : kDigits;  // tile rows of a row
  constexpr int T = (R * kHeight + kTile - 1) / kTile;
  alignas(64) int32_t sums[2][T * kTile * kTile];
  alignas(64) uint8_t bytes[2][2][kTile * kTile * 4];
  const auto decode = [&](int b, auto half) {
    constexpr int H = decltype(half)::value;
    const uint8_t* block = panel + b * Format::kBytes;
    if (H == 0 && ahead > 0) prefetch_block<Format>(block, ahead);
    if constexpr (kPairs) {
      const auto put = [to = bytes[b % 2][H]](int row, Ints q) { _mm512_store_si512(to + row * kTile * 4, q); };
      for (int g = 0; g < 4; ++g) {
        const Ints both = load_ints(block + Format::kWords + (g * kPanel + H * kTile) * 4);
        put(g, low_bits(both, 0x0F0F0F0F));
        put(4 + g, low_bits(shift_right(both, 4), 0x0F0F0F0F));
        put(8 + g, low_bits(shift_left(both, 4), static_cast<int>(0xF0F0F0F0)));
        put(12 + g, low_bits(both, static_cast<int>(0xF0F0F0F0)));
      }
    }
  };
  const auto multiply = [&](int b, auto half) {
    constexpr int H = decltype(half)::value;
    if constexpr (kPairs) {
      tile_load<kPairWeights>(bytes[b % 2][H], kTile * 4);
    } else {
      tile_load<kByteWeights>(panel + b * Format::kBytes + Format::kWords + H * kTile * 4, kPanel * 4);
    }
    multiply_pieces<kPairs, H, T>(group.digits + b * R * (kPairs ? kRowPairs : kRowDigits));
  };
  Vec a[2][R];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) a[h][r] = zero();
  // A tile loaded soon after its bytes were stored waits for them to reach the cache, and one stored soon after its product
  // waits for that (together 120 cycles for half a block instead of 45): so the half that is added, the one that is stored,
  // the one that is multiplied and the one that is decoded are each one or two apart.
  using First = std::integral_constant<int, 0>;
  using Second = std::integral_constant<int, 1>;
  const auto step = [&](int b, auto half) {
    constexpr int H = decltype(half)::value;
    if (b + 1 < blocks) multiply(b + 1, half);
    if (H == 0 || b + 1 < blocks) store_pieces<1 - H, T>(sums[1 - H]);
    if (b + 2 < blocks) decode(b + 2, half);
    const SumScales<Format> scales(panel + b * Format::kBytes, H * kTile);
    const BlockScale* rows = group.scales + b * R;
    const int32_t* s = sums[H];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, s += kHeight * kTile) {
      Vec t;
      if constexpr (kPairs) {
        t = scales.total(load_ints(s), load_ints(s + kTile));
      } else {
        t = scales.total(load_ints(s), load_ints(s + kTile), load_ints(s + 2 * kTile));
      }
      a[H][r] = scales.add_block(a[H][r], t, rows[r]);
    }
  };
  for (int b = 0; b < std::min(2, blocks); ++b) decode(b, First{}), decode(b, Second{});
  multiply(0, First{});
  multiply(0, Second{});
  store_pieces<0, T>(sums[0]);
  for (int b = 0; b < blocks; ++b) step(b, First{}), step(b, Second{});
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(acc + r * kPanel + h * kTile, a[h][r]);
}

template <typename Format, int R>
void run_tiles(const uint8_t* panel, int blocks, const Group& group, size_t ahead, float* acc) {
  if constexpr (R > 1) {
    if (group.rows < R) return run_tiles<Format, R - 1>(panel, blocks, group, ahead, acc);
  }
  tile_rows<Format, R>(panel, blocks, group, ahead, acc);
}
#endif

// acc[rows][32]: split rows from `from` on (the first of a group) times a panel; weights ahead of the panel are fetched.
template <typename Format>
void multiply_sums(const uint8_t* panel, size_t depth, const uint8_t* from, int rows, size_t ahead,
                   [[maybe_unused]] Tiles& tiles, float* acc) {
  const int blocks = static_cast<int>(depth / kBlock);
  if (blocks == 0) std::memset(acc, 0, rows * kPanel * sizeof(float));
  for (int r0 = 0; r0 < rows && blocks > 0; r0 += kRowGroup, from += split_bytes(kRowGroup, depth)) {
    const Group group(from, depth, std::min(kRowGroup, rows - r0));
    float* to = acc + r0 * kPanel;
#if defined(JETSPEC_AMX)
    if (use_tiles(group.rows)) {
      tiles.use();
      run_tiles<Format, kRowGroup>(panel, blocks, group, ahead, to);
      ahead = 0;  // further passes find the panel in the cache
      continue;
    }
#endif
    for (int first = 0; first < group.rows; first += kDotRows, to += kDotRows * kPanel) {
      constexpr decltype(&dot_rows<Format, 1>) kRun[] = {dot_rows<Format, 1>, dot_rows<Format, 2>, dot_rows<Format, 3>,
                                                         dot_rows<Format, kDotRows>};
      kRun[std::min(kDotRows, group.rows - first) - 1](panel, blocks, group, first, ahead, to);
      ahead = 0;
    }
  }
}

}  // namespace jetspec
