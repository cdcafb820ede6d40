// The packed formats. A weight is packed in panels of 32 outputs, zero padded; every format stands for exact fp32
// values. Per panel (specs.py has the same list; f16 and integers are little endian, [32] is over the outputs):
//   0 f32    [k][32] float
//   1 bf16   [k][32] bfloat16
//   2 q8_0   [k/32] { f16 d[32]; int8 q[32 inputs][32] }                                value = q d
//   3 q4_1   [k/32] { uint32 q[4][32]; f16 d[32], m[32] }                               value = q d + m
//            q[g][n]: inputs 8 g to 8 g + 7 of the block, 4 bits each, from the lowest bits up
//   4 q4_k   [k/256] { f16 d[32], m[32]; [8] { uint32 q[4][32]; uint8 s[32], t[32] } }  value = q (d s) - (m t)
//   5 q6_k   [k/256] { f16 d[32]; [8] { uint32 q[4][32]; uint16 h[4][32]; int8 s[2][32] } }
//            h: the upper 2 bits of each q; s: one for 16 inputs                        value = (q - 32) (d s)
//   6 q8_0   [k/32] { f16 d[32]; int8 q[8][32][4] }   inputs 4 g to 4 g + 3 of an output together   value = q d
//   7 q4_1   [k/32] { uint8 q[4][32][4]; f16 d[32], m[32] }                             value = q d + m
//            q[g][n][i]: input 4 g + i in the low nibble, 16 + 4 g + i in the high one
// (6 and 7 are multiplied in integers, integer.h.)
// d s, m t, q d and q (d s) have at most 24 significant bits and are exact in fp32: fusing changes no bit.
#pragma once

#include "cpu_common.h"
#include "row_invariant_matmul/kernel.h"

namespace jetspec {

constexpr int kBlock = 32;  // inputs that share a scale; the kernels go from block to block
constexpr int kGroup = 8;   // inputs decoded from one load

// ---- Vectors of 32-bit integers ------------------------------------------------------------------------------------
#if JETSPEC_FORM == 3
using Ints = __m512i;
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline Ints load_shorts(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
inline Ints shift_right(Ints v, int by) { return _mm512_srli_epi32(v, by); }
inline Ints shift_left(Ints v, int by) { return _mm512_slli_epi32(v, by); }
inline Vec to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Vec low_nibble(Ints v) {  // one permutation, which looks at the low four bits only
  return _mm512_permutexvar_ps(v, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
inline Ints low_bits(Ints v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi32(mask)); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints all(int v) { return _mm512_set1_epi32(v); }
inline Vec load_bytes(const void* p) { return _mm512_cvtepi32_ps(bytes_to_ints(p)); }
#elif JETSPEC_FORM == 2
using Ints = __m256i;
inline Ints load_ints(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Ints load_shorts(const void* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline Ints shift_right(Ints v, int by) { return _mm256_srli_epi32(v, by); }
inline Ints shift_left(Ints v, int by) { return _mm256_slli_epi32(v, by); }
inline Vec to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Ints low_bits(Ints v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi32(mask)); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints all(int v) { return _mm256_set1_epi32(v); }
inline Vec low_nibble(Ints v) { return to_float(low_bits(v, 15)); }
inline Vec load_bytes(const void* p) { return _mm256_cvtepi32_ps(bytes_to_ints(p)); }
#else
typedef uint32_t Ints __attribute__((vector_size(16)));
typedef int32_t SignedInts __attribute__((vector_size(16)));
inline Ints load_ints(const void* p) {
  Ints v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline Ints load_shorts(const void* p) { return Ints{short_at(p, 0), short_at(p, 1), short_at(p, 2), short_at(p, 3)}; }
inline Ints shift_right(Ints v, int by) { return v >> by; }
inline Ints shift_left(Ints v, int by) { return v << by; }
inline Vec to_float(Ints v) { return (Vec)__builtin_convertvector((SignedInts)v, decltype(0.0f * Vec{})); }
inline Ints low_bits(Ints v, int mask) { return v & static_cast<uint32_t>(mask); }
inline Ints add(Ints a, Ints b) { return a + b; }
inline Ints all(int v) { return Ints{} + static_cast<uint32_t>(v); }
inline Vec low_nibble(Ints v) { return to_float(low_bits(v, 15)); }
inline Vec load_bytes(const void* p) {
  return load_lanes([p](int i) { return static_cast<float>(static_cast<const uint8_t*>(p)[i]); });
}
#endif

// ---- Formats -------------------------------------------------------------------------------------------------------
// bytes(k): of k inputs of a panel. Scales(panel, k, n): what block k needs, for outputs n onwards (one vector).
// Group(panel, k, n): the inputs from k on; next() gives one input after the other. kFused: rows up to which decoding
// in registers, again for every register tile, is worth its code.
struct F32 {
  static constexpr int kDepth = 1, kFused = 32;  // the depth is a multiple of this
  static constexpr size_t bytes(size_t k) { return k * kPanel * 4; }
  struct Scales {
    Scales() = default;
    Scales(const uint8_t*, size_t, int) {}
  };
  struct Group {
    const uint8_t* p;
    Group() = default;
    Group(const uint8_t* panel, size_t k, int n) : p(panel + (k * kPanel + n) * 4) {}
    Vec next(const Scales&, int) {
      const Vec v = load(reinterpret_cast<const float*>(p));
      p += kPanel * 4;
      return v;
    }
  };
};

struct BF16 {
  static constexpr int kDepth = 1, kFused = 8;
  static constexpr size_t bytes(size_t k) { return k * kPanel * 2; }
  using Scales = F32::Scales;
  struct Group {
    const uint8_t* p;
    Group() = default;
    Group(const uint8_t* panel, size_t k, int n) : p(panel + (k * kPanel + n) * 2) {}
    Vec next(const Scales&, int) {
      const Vec v = load_bfloat(p);
      p += kPanel * 2;
      return v;
    }
  };
};

struct Q80 {
  static constexpr int kDepth = 32, kFused = 12;
  static constexpr size_t kHead = kPanel * 2, kBytes = kHead + kBlock * kPanel;
  static constexpr size_t bytes(size_t k) { return k / kBlock * kBytes; }
  struct Scales {
    Vec d;
    Scales() = default;
    Scales(const uint8_t* panel, size_t k, int n) : d(load_half(panel + bytes(k) + 2 * n)) {}
  };
  struct Group {
    const uint8_t* p;
    Group() = default;
    Group(const uint8_t* panel, size_t k, int n) : p(panel + bytes(k) + kHead + k % kBlock * kPanel + n) {}
    Vec next(const Scales& s, int) {
      const Vec v = load_int8(p) * s.d;
      p += kPanel;
      return v;
    }
  };
};

constexpr size_t kNibbles = kBlock * kPanel / 2;  // bytes of a block's 4-bit numbers

struct Q41 {
  static constexpr int kDepth = 32, kFused = 12;
  static constexpr size_t kBytes = kNibbles + kPanel * 4;
  static constexpr size_t bytes(size_t k) { return k / kBlock * kBytes; }
  static constexpr size_t nibbles(size_t k) { return bytes(k); }  // where those of block k begin
  struct Scales {
    Vec d, m;
    Scales() = default;
    Scales(const uint8_t* panel, size_t k, int n) {
      const uint8_t* head = panel + bytes(k) + kNibbles + 2 * n;
      d = load_half(head);
      m = load_half(head + kPanel * 2);
    }
  };
  struct Group {
    Ints q;
    Group() = default;
    Group(const uint8_t* panel, size_t k, int n) : q(load_ints(panel + bytes(k) + (k % kBlock / 2 * kPanel + 4 * n))) {}
    Vec next(const Scales& s, int) {
      const Vec v = fma(low_nibble(q), s.d, s.m);
      q = shift_right(q, 4);
      return v;
    }
  };
};

struct Q4K {
  static constexpr int kDepth = 256, kFused = 8;
  static constexpr size_t kHead = kPanel * 4, kSub = kNibbles + kPanel * 2, kBytes = kHead + 8 * kSub;
  static constexpr size_t bytes(size_t k) { return k / kDepth * kBytes; }
  static constexpr size_t nibbles(size_t k) { return bytes(k) + kHead + k % kDepth / kBlock * kSub; }
  static const uint8_t* block(const uint8_t* panel, size_t k) { return panel + nibbles(k); }
  struct Scales {
    Vec d, m;
    Scales() = default;
    Scales(const uint8_t* panel, size_t k, int n) {
      const uint8_t *head = panel + bytes(k) + 2 * n, *sub = block(panel, k) + kNibbles + n;
      d = load_half(head) * load_bytes(sub);
      m = load_half(head + kPanel * 2) * (splat(-1.0f) * load_bytes(sub + kPanel));
    }
  };
  struct Group {
    Ints q;
    Group() = default;
    Group(const uint8_t* panel, size_t k, int n)
        : q(load_ints(block(panel, k) + (k % kBlock / 2 * kPanel + 4 * n))) {}
    Vec next(const Scales& s, int) {
      const Vec v = fma(low_nibble(q), s.d, s.m);
      q = shift_right(q, 4);
      return v;
    }
  };
};

struct Q6K {
  static constexpr int kDepth = 256, kFused = 1;
  static constexpr size_t kHead = kPanel * 2, kSub = kNibbles + kNibbles / 2 + kPanel * 2, kBytes = kHead + 8 * kSub;
  static constexpr size_t bytes(size_t k) { return k / kDepth * kBytes; }
  static const uint8_t* block(const uint8_t* panel, size_t k) {
    return panel + bytes(k) + kHead + k % kDepth / kBlock * kSub;
  }
  struct Scales {
    Vec d[2];
    Scales() = default;
    Scales(const uint8_t* panel, size_t k, int n) {
      const Vec whole = load_half(panel + bytes(k) + 2 * n);
      const uint8_t* sub = block(panel, k) + kNibbles + kNibbles / 2 + n;
      for (int i = 0; i < 2; ++i) d[i] = whole * load_int8(sub + i * kPanel);
    }
  };
  struct Group {
    Ints q, h;
    Group() = default;
    Group(const uint8_t* panel, size_t k, int n) {
      const uint8_t* from = block(panel, k);
      q = load_ints(from + (k % kBlock / 2 * kPanel + 4 * n));
      h = shift_left(load_shorts(from + kNibbles + (k % kBlock / 4 * kPanel + 2 * n)), 4);
    }
    Vec next(const Scales& s, int half) {
      const Vec v = to_float(add(add(low_bits(q, 15), low_bits(h, 48)), all(-32))) * s.d[half];
      q = shift_right(q, 4);
      h = shift_right(h, 2);
      return v;
    }
  };
};

}  // namespace jetspec
