// Standard Gumbel noise of token ids under position keys: the serving form of jetspec_jax.sampling.token_noise, which is
// the reference. The integer mixing is the same to the bit; the logarithms are this file's own, within 2 ulp.
#include "cpu_math.h"

namespace jetspec {
namespace {

constexpr int kTask = 2048;  // ids of a task

typedef uint32_t UVec __attribute__((vector_size(sizeof(Vec))));

inline UVec mix(UVec h) {
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return h ^ (h >> 16);
}

inline Vec pick(IVec mask, Vec yes, Vec no) { return (Vec)((mask & (IVec)yes) | (~mask & (IVec)no)); }

inline Vec int_to_float(IVec v) {
#if JETSPEC_FORM == 3
  return _mm512_cvtepi32_ps((__m512i)v);
#elif JETSPEC_FORM == 2
  return _mm256_cvtepi32_ps((__m256i)v);
#else
  Vec out;
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<float>(v[i]);
  return out;
#endif
}

// log(x) of normal positive x (Cephes logf).
inline Vec log_normal(Vec x) {
  const IVec bits = (IVec)x;
  IVec exponent = (bits >> 23) - 126;
  Vec m = (Vec)((bits & 0x007FFFFF) | 0x3F000000);  // in [0.5, 1)
  const IVec low = m < splat(0.707106781186547524f);
  exponent += low;  // low is -1 where true
  m = pick(low, m + m, m) - splat(1.0f);
  const Vec e = int_to_float(exponent), z = m * m;
  Vec y = splat(7.0376836292e-2f);
  y = fma(y, m, splat(-1.1514610310e-1f));
  y = fma(y, m, splat(1.1676998740e-1f));
  y = fma(y, m, splat(-1.2420140846e-1f));
  y = fma(y, m, splat(1.4249322787e-1f));
  y = fma(y, m, splat(-1.6668057665e-1f));
  y = fma(y, m, splat(2.0000714765e-1f));
  y = fma(y, m, splat(-2.4999993993e-1f));
  y = fma(y, m, splat(3.3333331174e-1f));
  y = y * m * z;
  y = fma(e, splat(-2.12194440e-4f), y);
  y = fma(z, splat(-0.5f), y);
  return fma(e, splat(0.693359375f), m + y);
}

inline Vec noise(UVec ids, uint32_t key0, uint32_t key1) {
  const UVec bits = mix(mix(ids + key0) ^ key1);
  // uint32 to fp32 in two exact halves and one rounding: not every vector form has the instruction.
  const Vec wide = fma(int_to_float((IVec)(bits >> 16)), splat(65536.0f), int_to_float((IVec)(bits & 0xFFFFu)));
  Vec u = wide * splat(0x1p-32f) + splat(0x1p-33f);
  const Vec most = splat(1.0f - 0x1p-24f);
  u = pick(u > most, most, u);
  // -log1p(-u) = -log(t) * u / (1 - t) with t the rounded 1 - u; u itself where that is 1.
  const Vec t = splat(1.0f) - u, lost = splat(1.0f) - t;
  const IVec tiny = lost == zero();
  const Vec exponential = pick(tiny, u, (zero() - log_normal(t)) * (u / pick(tiny, splat(1.0f), lost)));
  return zero() - log_normal(exponential);
}

ffi::Error gumbel_noise(ffi::ThreadPool pool, ffi::Buffer<ffi::U32> keys, ffi::Buffer<ffi::S32> ids,
                        ffi::ResultBuffer<ffi::F32> out, int64_t threads) {
  const size_t count = ids.element_count(), rows = keys.element_count() / 2;
  if (keys.element_count() % 2 != 0 || out->element_count() != rows * count)
    return ffi::Error::InvalidArgument("gumbel_noise: keys, ids and result do not fit");
  if (rows == 0 || count == 0) return ffi::Error::Success();
  const uint32_t* key = keys.typed_data();
  const int32_t* id = ids.typed_data();
  float* to = out->typed_data();
  const int pieces = static_cast<int>((count + kTask - 1) / kTask);
  const int limit = threads == 0 && rows * count < 4096 ? 1 : static_cast<int>(threads);
  parallel_for(pool, static_cast<int>(rows) * pieces, limit, [=](int begin, int end) {
    for (int task = begin; task < end; ++task) {
      const size_t row = task / pieces, first = static_cast<size_t>(task % pieces) * kTask;
      const size_t last = std::min(count, first + kTask);
      for (size_t n = first; n < last; n += kLanes) {
        const size_t width = std::min<size_t>(kLanes, last - n);
        UVec v{};
        std::memcpy(&v, id + n, width * sizeof(int32_t));
        const Vec g = noise(v, key[2 * row], key[2 * row + 1]);
        std::memcpy(to + row * count + n, &g, width * sizeof(float));
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jetspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(GumbelNoise, jetspec::gumbel_noise,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("threads"));
