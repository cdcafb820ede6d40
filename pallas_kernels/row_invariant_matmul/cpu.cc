// y[m, n] = sum over k of x[m, k] * w[n, k], fp32, the sum taken from k = 0 upwards in one accumulator per output with
// one rounding per step (fused multiply-add). The bits of a row therefore depend on nothing but that row and w: not on
// the number of rows, the row's place, the threads, the tile sizes or the vector width.
//
// w is packed in panels of 32 outputs: w[panel][k][32], zero padded. A panel is read once from memory for all rows.
#include "cpu_common.h"

namespace jetspec {
namespace {

constexpr int kPanel = 32;
constexpr int kVectors = kPanel / kLanes;
constexpr int kMaxRows = 128;  // rows whose accumulators are kept at once (16 KB)

// Rows of a register tile and vectors beside each other, by the number of vector registers.
#if JETSPEC_FORM == 3
constexpr int kTileRows = 14, kTileVectors = 2;
#elif JETSPEC_FORM == 1
constexpr int kTileRows = 6, kTileVectors = 4;
#else
constexpr int kTileRows = 6, kTileVectors = 2;
#endif
#ifndef JETSPEC_CHUNK
#define JETSPEC_CHUNK 128
#endif
#ifndef JETSPEC_AHEAD
#define JETSPEC_AHEAD 32
#endif
constexpr int kChunk = JETSPEC_CHUNK;   // k steps per pass when several passes share the weights: 16 KB, stays in L1
constexpr int kAhead = JETSPEC_AHEAD;   // k steps of prefetch distance of a single pass

// acc[r][..] += x[r][0..count) * w, for R rows and V vectors. `fetch` walks over weights needed soon, `stride` bytes
// per step (with 128, the width of a panel row, both of its lines are fetched).
template <int R, int V>
void tile(const float* x, size_t ldx, int count, const float* w, float* acc, bool first, const char* fetch,
          size_t stride) {
  Vec a[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) a[r][v] = first ? zero() : load(acc + r * kPanel + v * kLanes);
  for (int k = 0; k < count; ++k) {
    Vec b[V];
    for (int v = 0; v < V; ++v) b[v] = load(w + static_cast<size_t>(k) * kPanel + v * kLanes);
    __builtin_prefetch(fetch);
    if (stride == 128) __builtin_prefetch(fetch + 64);
    fetch += stride;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec s = splat(x[r * ldx + k]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) a[r][v] = fma(s, b[v], a[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(acc + r * kPanel + v * kLanes, a[r][v]);
}

using Tile = void (*)(const float*, size_t, int, const float*, float*, bool, const char*, size_t);

template <int R>
Tile find_tile(int rows) {
  if constexpr (R == 0) {
    return nullptr;
  } else {
    return rows == R ? tile<R, kTileVectors> : find_tile<R - 1>(rows);
  }
}

struct Job {
  const float* x;
  const float* w;
  float* y;
  int rows, depth, outputs;
};

// All rows of one panel.
void panel(const Job& job, int index) {
  const size_t depth = job.depth;
  const float* w = job.w + index * depth * kPanel;
  const int first_output = index * kPanel;
  const int width = std::min(kPanel, job.outputs - first_output);
  alignas(64) float acc[kMaxRows * kPanel];
  for (int m0 = 0; m0 < job.rows; m0 += kMaxRows) {
    const int rows = std::min(kMaxRows, job.rows - m0);
    const int blocks = (rows + kTileRows - 1) / kTileRows;
    constexpr int splits = kVectors / kTileVectors;
    const int passes = blocks * splits;
    const int chunk = passes == 1 ? job.depth : kChunk;
    const size_t stride = passes == 1 ? 128 : 128 / passes;
    if (job.depth == 0) std::memset(acc, 0, sizeof(acc));
    for (int k0 = 0; k0 < job.depth; k0 += chunk) {
      const int count = std::min(chunk, job.depth - k0);
      const float* wk = w + static_cast<size_t>(k0) * kPanel;
      const char* fetch = reinterpret_cast<const char*>(wk + (passes == 1 ? kAhead : count) * kPanel);
      for (int block = 0, r0 = 0; block < blocks; ++block) {
        const int size = rows / blocks + (block < rows % blocks);
        const Tile run = find_tile<kTileRows>(size);
        for (int split = 0; split < splits; ++split) {
          const int column = split * kTileVectors * kLanes;
          run(job.x + (m0 + r0) * depth + k0, depth, count, wk + column, acc + r0 * kPanel + column, k0 == 0, fetch,
              stride);
          fetch += stride * count;
        }
        r0 += size;
      }
    }
    for (int r = 0; r < rows; ++r) {
      float* y = job.y + static_cast<size_t>(m0 + r) * job.outputs + first_output;
      std::memcpy(y, acc + r * kPanel, width * sizeof(float));
    }
  }
}

ffi::Error matmul_f32(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w,
                      ffi::ResultBuffer<ffi::F32> y, int64_t threads) {
  const auto xd = x.dimensions(), wd = w.dimensions(), yd = y->dimensions();
  if (xd.size() != 2 || wd.size() != 3 || yd.size() != 2 || wd[2] != kPanel || wd[1] != xd[1] || yd[0] != xd[0] ||
      wd[0] != (yd[1] + kPanel - 1) / kPanel)
    return ffi::Error::InvalidArgument("row_invariant_matmul: shapes do not fit");
  const Job job{x.typed_data(), w.typed_data(),           y->typed_data(),
                static_cast<int>(xd[0]), static_cast<int>(xd[1]), static_cast<int>(yd[1])};
  if (job.rows == 0 || job.outputs == 0) return ffi::Error::Success();
  parallel_for(pool, static_cast<int>(wd[0]), static_cast<int>(threads), [&job](int begin, int end) {
    for (int i = begin; i < end; ++i) panel(job, i);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jetspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulF32, jetspec::matmul_f32,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("threads"));
