// Packing: rows of a file (fp32, bfloat16, GGUF blocks) to panels, by output and block. Layouts: formats.h.
#pragma once

#include "row_invariant_matmul/formats.h"
#include "row_invariant_matmul/integer.h"

namespace jetspec {

// What rows can hold, and the number of each kind in specs.py (those below 6 are numbers of formats as well).
enum Kind { kRowsF32, kRowsBF16, kRowsQ80, kRowsQ41, kRowsQ4K, kRowsQ6K, kRowsQ40 };

inline uint64_t load_eight(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// `Bits` bits of each of eight bytes, from `shift` up, next to each other.
template <int Bits>
inline uint32_t gather_bits(uint64_t bytes, int shift) {
  uint64_t v = (bytes >> shift) & (0x0101010101010101u * ((1u << Bits) - 1));
  v = (v | v >> (8 - Bits)) & 0x00FF00FF00FF00FFu;
  v = (v | v >> (16 - 2 * Bits)) & 0x0000FFFF0000FFFFu;
  return static_cast<uint32_t>(v | v >> (32 - 4 * Bits));
}

inline void put(uint8_t* to, size_t width, const void* value) { std::memcpy(to, value, width); }

// 32 four-bit numbers, input i in the nibble at `shift` of bytes[i], of output n.
inline void put_nibbles(uint8_t* to, int n, const uint8_t* bytes, int shift) {
  for (int g = 0; g < 4; ++g) {
    const uint32_t q = gather_bits<4>(load_eight(bytes + 8 * g), shift);
    put(to + (g * kPanel + n) * 4, 4, &q);
  }
}

// One block of output n from `b` into `to`, the block of its panel. False: the value has no exact form.
inline bool pack_block(int kind, bool integer, const uint8_t* b, uint8_t* to, int n) {
  switch (kind) {
    case kRowsQ80:
      put(to + 2 * n, 2, b);
      if (integer)
        for (int g = 0; g < 8; ++g) put(to + Q80Sums::kWords + (g * kPanel + n) * 4, 4, b + 2 + 4 * g);
      else
        for (int i = 0; i < kBlock; ++i) to[Q80::kHead + i * kPanel + n] = b[2 + i];
      return true;
    case kRowsQ41:
    case kRowsQ40: {
      // byte i of the file holds inputs i (low nibble) and i + 16 (high)
      const uint8_t* q = b + (kind == kRowsQ41 ? 4 : 2);
      for (int g = 0; g < 4; ++g) {
        uint32_t v;
        if (integer)
          std::memcpy(&v, q + 4 * g, sizeof(v));
        else
          v = gather_bits<4>(load_eight(q + g % 2 * 8), g / 2 * 4);
        put(to + (g * kPanel + n) * 4, 4, &v);
      }
      put(to + kNibbles + 2 * n, 2, b);
      uint16_t minimum;
      if (kind == kRowsQ41) {
        std::memcpy(&minimum, b + 2, 2);
      } else {  // -8 d: the sign changes, the exponent grows by 3
        uint16_t d;
        std::memcpy(&d, b, 2);
        const float wanted = -8.0f * half_to_float(d);
        const int exponent = d >> 10 & 31, mantissa = d & 1023;
        if (exponent >= 28) return false;
        if (exponent > 0) {
          minimum = static_cast<uint16_t>((d & 0x8000) | (exponent + 3) << 10 | mantissa);
        } else {  // subnormal: 8 mantissa, normal if it reaches 1024
          int e = 0, m = mantissa * 8;
          if (m >= 1024) {
            for (e = 1; m >= 2048; ++e) m /= 2;
            m -= 1024;
          }
          minimum = static_cast<uint16_t>((d & 0x8000) | e << 10 | m);
        }
        minimum ^= 0x8000;
        const float got = half_to_float(minimum);
        if (std::memcmp(&got, &wanted, sizeof(got)) != 0) return false;
      }
      put(to + kNibbles + kPanel * 2 + 2 * n, 2, &minimum);
      return true;
    }
    case kRowsQ4K: {
      put(to + 2 * n, 2, b);
      put(to + kPanel * 2 + 2 * n, 2, b + 2);
      const uint8_t *low = b + 4, *high = b + 8, *rest = b + 12;
      for (int i = 0; i < 8; ++i) {
        uint8_t* sub = to + Q4K::kHead + i * Q4K::kSub;
        put_nibbles(sub, n, b + 16 + i / 2 * 32, i % 2 * 4);
        const int j = i % 4;
        sub[kNibbles + n] = i < 4 ? low[j] & 63 : (rest[j] & 15) | low[j] >> 6 << 4;
        sub[kNibbles + kPanel + n] = i < 4 ? high[j] & 63 : rest[j] >> 4 | high[j] >> 6 << 4;
      }
      return true;
    }
    default: {
      const uint8_t *low = b, *high = b + 128, *scales = b + 192;
      put(to + 2 * n, 2, b + 208);
      for (int i = 0; i < 8; ++i) {
        uint8_t* sub = to + Q6K::kHead + i * Q6K::kSub;
        put_nibbles(sub, n, low + i / 4 * 64 + i % 2 * 32, i / 2 % 2 * 4);
        for (int g = 0; g < 4; ++g) {
          const uint16_t h = gather_bits<2>(load_eight(high + i / 4 * 32 + 8 * g), i % 4 * 2);
          put(sub + kNibbles + (g * kPanel + n) * 2, 2, &h);
        }
        for (int j = 0; j < 2; ++j) sub[kNibbles + kNibbles / 2 + j * kPanel + n] = scales[2 * i + j];
      }
      return true;
    }
  }
}

template <typename T>
inline void pack_floats(const uint8_t* from, size_t stride, size_t k, int count, T* to) {
  constexpr size_t kStep = 64;  // inputs: a line or more of every row, and the target stays in the cache
  for (size_t k0 = 0; k0 < k; k0 += kStep)
    for (int n = 0; n < count; ++n) {
      const T* row = reinterpret_cast<const T*>(from + n * stride);
      for (size_t i = k0; i < std::min(k, k0 + kStep); ++i) std::memcpy(to + i * kPanel + n, row + i, sizeof(T));
    }
}

// Rows [0, n) of k inputs, `stride` bytes apart, to ceil(n / 32) panels.
inline bool pack_rows(int kind, bool integer, const uint8_t* from, size_t stride, size_t n, size_t k, uint8_t* to) {
  static constexpr size_t kSize[] = {4, 2, 34, 20, 144, 210, 18};  // bytes of a block in a row
  const int format = kind == kRowsQ40 ? kRowsQ41 : kind;
  const size_t depth = format < 2 ? 1 : format < 4 ? 32 : 256, blocks = k / depth;
  // both arithmetics of a format take the same bytes
  const size_t panel_bytes = matmul_weight_bytes(format, k, kPanel);
  bool good = true;
  for (size_t n0 = 0; n0 < n; n0 += kPanel, to += panel_bytes, from += kPanel * stride) {
    const int count = static_cast<int>(std::min<size_t>(kPanel, n - n0));
    if (count < kPanel) std::memset(to, 0, panel_bytes);
    if (format == 0) {
      pack_floats(from, stride, k, count, reinterpret_cast<uint32_t*>(to));
    } else if (format == 1) {
      pack_floats(from, stride, k, count, reinterpret_cast<uint16_t*>(to));
    } else {
      for (size_t i = 0; i < blocks; ++i)
        for (int r = 0; r < count; ++r)
          good &= pack_block(kind, integer, from + r * stride + i * kSize[kind], to + panel_bytes / blocks * i, r);
    }
  }
  return good;
}

}  // namespace jetspec
