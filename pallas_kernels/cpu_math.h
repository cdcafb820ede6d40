// Elementwise and row functions that several CPU kernels share; the bits are the same for every vector form.
#pragma once

#include "cpu_common.h"

namespace jetspec {

typedef int32_t IVec __attribute__((vector_size(sizeof(Vec))));

#if JETSPEC_FORM == 3
inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
#elif JETSPEC_FORM == 2
inline Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
#else
inline Vec vmax(Vec a, Vec b) {
  const IVec greater = a > b;
  return (Vec)((greater & (IVec)a) | (~greater & (IVec)b));
}
#endif

// exp(x) for x <= 0: 2^n * e^r, n = round(x / ln 2), ln 2 in two pieces, e^r by a polynomial of degree 7 (Cephes expf);
// at most 1 ulp from the exact value (tested). Zero below -87.33 (the result would be subnormal). NaN stays NaN.
inline Vec exp_negative(Vec x) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vec t = fma(x, splat(1.44269504088896341f), magic);
  const Vec n = t - magic;
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440054690581e-4f), r);
  Vec y = splat(1.98756915e-4f);
  y = fma(y, r, splat(1.39819995e-3f));
  y = fma(y, r, splat(8.33345205e-3f));
  y = fma(y, r, splat(4.16657962e-2f));
  y = fma(y, r, splat(1.66666656e-1f));
  y = fma(y, r, splat(0.5f));
  y = fma(y, r * r, r) + splat(1.0f);
  const IVec bias = (IVec)(Vec)splat(1.0f);  // bits of 2^0: 127 << 23
  const Vec power = (Vec)(((IVec)t << 23) + bias);
  const IVec tiny = x < splat(-87.33f);
  return (Vec)((IVec)(y * power) & ~tiny);
}

// y = x * (1 / sqrt(mean + eps)) * weight; the mean of x * x from 16 partial sums (lane = index mod 16, FMA) folded by
// halves 8, 4, 2, 1. May be in place.
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
  float lane[16] = {};
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int l = 0; l < 16; ++l) lane[l] = __builtin_fmaf(x[i + l], x[i + l], lane[l]);
  for (int l = 0; i + l < n; ++l) lane[l] = __builtin_fmaf(x[i + l], x[i + l], lane[l]);
  for (int half = 8; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lane[l] = lane[l] + lane[l + half];
  const float r = 1.0f / __builtin_sqrtf(lane[0] / static_cast<float>(n) + eps);
  for (int j = 0; j < n; ++j) y[j] = x[j] * r * weight[j];
}

constexpr int kMaxHeadDim = 1024;

// RoPE of one position: angle = position * inv_freq in fp32, cos and sin in fp64, rounded, times rope_scale.
inline void rope_angles(int32_t position, const float* inv_freq, int half, float rope_scale, float* cosine, float* sine) {
  for (int i = 0; i < half; ++i) {
    const double angle = static_cast<float>(position) * inv_freq[i];
    cosine[i] = static_cast<float>(std::cos(angle)) * rope_scale;
    sine[i] = static_cast<float>(std::sin(angle)) * rope_scale;
  }
}

// Rotates the halves of one head of at most kMaxHeadDim elements, normed first where `norm` is given. Not in place.
inline void rotate(const float* from, const float* norm, const float* cosine, const float* sine, int dim, float eps,
                   float* to) {
  float normed[kMaxHeadDim];
  if (norm) {
    rms_norm(from, norm, dim, eps, normed);
    from = normed;
  }
  const int half = dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = from[i], b = from[half + i];
    to[i] = a * cosine[i] - b * sine[i];
    to[half + i] = b * cosine[i] + a * sine[i];
  }
}

// Work memory of the calling thread, 64-byte aligned; grows and never shrinks. One user at a time.
inline float* thread_scratch(size_t floats) {
  struct Memory {
    float* data = nullptr;
    size_t size = 0;
    ~Memory() { std::free(data); }
  };
  static thread_local Memory memory;
  if (floats > memory.size) {
    std::free(memory.data);
    memory.size = (floats + 4095) / 4096 * 4096;
    memory.data = static_cast<float*>(std::aligned_alloc(64, memory.size * sizeof(float)));
    if (memory.data == nullptr) std::abort();
  }
  return memory.data;
}

// Cuts `all` buffers out of one piece of thread_scratch, each on a cache line.
inline void carve(std::initializer_list<std::pair<float**, size_t>> buffers) {
  const auto aligned = [](size_t floats) { return (floats + 15) / 16 * 16; };
  size_t all = 0;
  for (const auto& [to, size] : buffers) all += aligned(size);
  float* memory = thread_scratch(all);
  for (const auto& [to, size] : buffers) {
    *to = memory;
    memory += aligned(size);
  }
}

// Operands of a call, taken one by one; `bad` names the first that is missing or of the wrong size (1-based, 0: none).
class Operands {
 public:
  explicit Operands(ffi::RemainingArgs args) : args_(args) {}

  const float* floats(size_t count) {
    const auto buffer = args_.get<ffi::Buffer<ffi::F32>>(next_++);
    if (buffer.has_value() && buffer->element_count() == count) return buffer->typed_data();
    fail();
    return nullptr;
  }
  const int32_t* ints(size_t count) {
    const auto buffer = args_.get<ffi::Buffer<ffi::S32>>(next_++);
    if (buffer.has_value() && buffer->element_count() == count) return buffer->typed_data();
    fail();
    return nullptr;
  }
  const uint8_t* bytes(size_t size) {
    const auto buffer = args_.get<ffi::AnyBuffer>(next_++);
    if (buffer.has_value() && size > 0 && buffer->size_bytes() == size)
      return static_cast<const uint8_t*>(buffer->untyped_data());
    fail();
    return nullptr;
  }
  size_t bad() const { return bad_ == 0 && next_ != args_.size() ? next_ + 1 : bad_; }

 private:
  void fail() {
    if (bad_ == 0) bad_ = next_;
  }
  ffi::RemainingArgs args_;
  size_t next_ = 0, bad_ = 0;
};

}  // namespace jetspec
