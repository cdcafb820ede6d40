// Shared by the native CPU kernels: vectors, floating-point environment, work sharing on XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

// Build parameters (pallas_kernels/threads.py says what they are): choices of speed that change no bit. Every op has
// its own, beside its code.
#ifndef JETSPEC_THREADS_SHARE
#define JETSPEC_THREADS_SHARE 2
#endif
#ifndef JETSPEC_THREADS_SPINS
#define JETSPEC_THREADS_SPINS 4096
#endif
static_assert(JETSPEC_THREADS_SHARE >= 1 && JETSPEC_THREADS_SPINS >= 1, "THREADS_SHARE and THREADS_SPINS are at least 1");

namespace jetspec {

namespace ffi = xla::ffi;

// ---- Vectors -------------------------------------------------------------------------------------------------------
// One type per instruction set. Every lane holds another output and fma() rounds once, so the bits of an output are
// the same for all of them. JETSPEC_FORM forces a narrower form (tests): 3 AVX-512, 2 AVX2, 1 NEON, 0 portable.
#if !defined(JETSPEC_FORM)
#if defined(__AVX512F__)
#define JETSPEC_FORM 3
#elif defined(__AVX2__) && defined(__FMA__)
#define JETSPEC_FORM 2
#elif defined(__aarch64__)
#define JETSPEC_FORM 1
#else
#define JETSPEC_FORM 0
#endif
#endif

#if JETSPEC_FORM == 3
using Vec = __m512;
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec splat(float s) { return _mm512_set1_ps(s); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
#elif JETSPEC_FORM == 2
using Vec = __m256;
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec splat(float s) { return _mm256_set1_ps(s); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
#elif JETSPEC_FORM == 1
using Vec = float32x4_t;
inline Vec zero() { return vdupq_n_f32(0.0f); }
inline Vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vec v) { vst1q_f32(p, v); }
inline Vec splat(float s) { return vdupq_n_f32(s); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
#else
typedef float Vec __attribute__((vector_size(16)));
inline Vec zero() { return Vec{0.0f, 0.0f, 0.0f, 0.0f}; }
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
inline Vec splat(float s) { return Vec{s, s, s, s}; }
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#endif
constexpr int kLanes = sizeof(Vec) / sizeof(float);

// ---- Exact conversions to fp32, one vector at a time ----------------------------------------------------------------
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
  const uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | mantissa << 13;
  float v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}

#if JETSPEC_FORM == 3
inline __m512i bytes_to_ints(const void* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline Vec load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline Vec load_bfloat(const void* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vec load_int8(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
#elif JETSPEC_FORM == 2
inline __m256i bytes_to_ints(const void* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
inline Vec load_half(const void* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    uint16_t h;
    std::memcpy(&h, static_cast<const char*>(p) + 2 * i, sizeof(h));
    lanes[i] = half_to_float(h);
  }
  return load(lanes);
}
inline Vec load_bfloat(const void* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load_int8(const void* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
#else
template <typename Lane>
inline Vec load_lanes(Lane lane) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = lane(i);
  return load(lanes);
}
inline uint16_t short_at(const void* p, int i) {
  uint16_t h;
  std::memcpy(&h, static_cast<const char*>(p) + 2 * i, sizeof(h));
  return h;
}
inline Vec load_half(const void* p) {
  return load_lanes([p](int i) { return half_to_float(short_at(p, i)); });
}
inline Vec load_bfloat(const void* p) {
  return load_lanes([p](int i) {
    const uint32_t bits = static_cast<uint32_t>(short_at(p, i)) << 16;
    float v;
    std::memcpy(&v, &bits, sizeof(v));
    return v;
  });
}
inline Vec load_int8(const void* p) {
  return load_lanes([p](int i) { return static_cast<float>(static_cast<const int8_t*>(p)[i]); });
}
#endif

// ---- Floating-point environment ------------------------------------------------------------------------------------
// XLA's pool threads flush subnormals to zero and the thread that calls a handler may not. The kernels compute with
// IEEE subnormals and round-to-nearest on every thread, or the bits would depend on which thread took a tile.
class FloatEnv {
 public:
#if defined(__x86_64__)
  FloatEnv() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatEnv() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatEnv() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~FloatEnv() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FloatEnv() {}
#endif
};

// ---- Work sharing --------------------------------------------------------------------------------------------------
inline void cpu_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int affinity_count() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// Threads that may work for a call: the pool's and the CPU affinity's, at most `threads` unless that is 0.
inline int worker_limit(ffi::ThreadPool& pool, int threads) {
  static const int allowed = affinity_count();
  const int limit = std::min<int>(allowed, static_cast<int>(pool.num_threads()));
  return std::max(1, threads > 0 ? std::min(limit, threads) : limit);
}

// Built with -DJETSPEC_PROFILE (serve.roofline): the calling thread notes the seconds of each phase, waiting included, in
// profile_into[phase] where that is set.
#if defined(JETSPEC_PROFILE)
inline thread_local double* profile_into = nullptr;
inline double profile_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
#endif

// Runs body(phase, begin, end) over [0, totals[phase]) for one phase after the other, on the calling thread and up to
// `workers - 1` threads of XLA's pool. A phase begins when all work of the one before is done, so it sees its results.
// The caller takes work from the start, so a pool thread that wakes late (or never: all may be busy) costs nothing; it
// joins the phase that is under way, or finds no work left and touches nothing but the reference-counted counters.
// Ranges shrink as the work runs out: long runs of neighbouring tiles for the hardware prefetchers, small ones for the
// balance at the end.
template <typename Body>
void run_phases(ffi::ThreadPool& pool, std::vector<int> totals, int workers, const Body& body) {
  if (workers <= 1) {
    FloatEnv env;
    for (size_t phase = 0; phase < totals.size(); ++phase)
      if (totals[phase] > 0) body(static_cast<int>(phase), 0, totals[phase]);
    return;
  }
  struct alignas(64) Counter {
    std::atomic<int> next{0};
    std::atomic<int> done{0};
  };
  struct Shared {
    std::vector<int> totals;
    std::unique_ptr<Counter[]> counters;
    int workers;
    const Body* body;
    alignas(64) std::atomic<int> references;

    void work([[maybe_unused]] bool caller) {
      FloatEnv env;
#if defined(JETSPEC_PROFILE)
      double before = profile_now();
#endif
      for (size_t phase = 0; phase < totals.size(); ++phase) {
        Counter& counter = counters[phase];
        const int total = totals[phase];
        int begin = counter.next.load(std::memory_order_relaxed);
        while (begin < total) {
          const int take = std::max(1, (total - begin) / (JETSPEC_THREADS_SHARE * workers));
          if (!counter.next.compare_exchange_weak(begin, begin + take, std::memory_order_relaxed)) continue;
          (*body)(static_cast<int>(phase), begin, begin + take);
          counter.done.fetch_add(take, std::memory_order_release);
          begin = counter.next.load(std::memory_order_relaxed);
        }
        // Only tiles already being computed elsewhere are waited for: spin while that is short, then give the CPU away.
        for (int spins = 0; counter.done.load(std::memory_order_acquire) != total; ++spins) {
          if (spins < JETSPEC_THREADS_SPINS) {
            cpu_pause();
          } else {
            std::this_thread::yield();
          }
        }
#if defined(JETSPEC_PROFILE)
        if (caller && profile_into != nullptr) {
          const double now = profile_now();
          profile_into[phase] = now - before;
          before = now;
        }
#endif
      }
    }
    void release() {
      if (references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
    }
  };
  Shared* shared = new Shared;
  shared->counters = std::make_unique<Counter[]>(totals.size());
  shared->totals = std::move(totals);
  shared->workers = workers;
  shared->body = &body;
  shared->references.store(workers, std::memory_order_relaxed);
  for (int i = 1; i < workers; ++i) {
    pool.Schedule([shared] {
      shared->work(false);
      shared->release();
    });
  }
  shared->work(true);
  shared->release();
}

// One phase: body(begin, end) over [0, total); threads = 0 means all that the pool and the CPU affinity allow.
template <typename Body>
void parallel_for(ffi::ThreadPool& pool, int total, int threads, const Body& body) {
  run_phases(pool, {total}, std::min(worker_limit(pool, threads), total),
             [&body](int, int begin, int end) { body(begin, end); });
}

}  // namespace jetspec
