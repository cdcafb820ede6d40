// y[m, n] = sum over k of x[m, k] * w[n, k], fp32, the sum taken from k = 0 upwards in one accumulator per output with
// one rounding per step (fused multiply-add). The bits of a row therefore depend on nothing but that row and w: not on
// the number of rows, the row's place, the threads, the tile sizes or the vector width.
//
// w is packed in panels of 32 outputs, zero padded, and a panel is read once from memory for all rows. Weights that are
// not fp32 are decoded to the exact fp32 values, in registers for few rows and into a piece of panel that stays in the
// first-level cache for many; the sums are the same, so a format changes the speed and never the bits. Layouts (specs.py has the same list):
//   0 fp32   [panel][k][32] float
//   1 bf16   [panel][k][32] bfloat16
//   2 q8_0   [panel][k/32][64 B: 32 scales f16][k%32][32] int8             value = q * scale
//   3 q4_1   [panel][k/32][64 B: 32 scales f16][64 B: 32 minima f16][(k%32)/2][32] byte, low nibble: even k
//                                                                         value = q * scale + minimum
#include "row_invariant_matmul/kernel.h"

#include "cpu_common.h"

namespace jetspec {
namespace {

constexpr int kBlock = 32;  // k steps that share a scale
constexpr int kVectors = kPanel / kLanes;
constexpr int kMaxRows = kMaxPanelRows;  // rows whose accumulators are kept at once (16 KB)
constexpr int kChunk = 128;    // k steps per pass when several passes share the weights: 16 KB, stays in L1
constexpr int kAhead = 48;     // k steps of prefetch distance of a single fp32 pass

// Rows of a register tile and vectors beside each other, by the number of vector registers.
#if JETSPEC_FORM == 3
constexpr int kTileRows = 14, kTileVectors = 2, kFusedRows = 8;
#elif JETSPEC_FORM == 1
constexpr int kTileRows = 6, kTileVectors = 4, kFusedRows = 0;
#else
constexpr int kTileRows = 6, kTileVectors = 2, kFusedRows = 0;
#endif

// ---- Tiles ---------------------------------------------------------------------------------------------------------
// acc[r][..] += x[r][0..count) * w, for R rows and V vectors. `fetch` walks over weights needed soon, `stride` bytes
// per step, two lines a step where one would not be enough.
template <int R, int V>
void tile(const float* x, size_t ldx, int count, const float* w, float* acc, bool first, const char* fetch,
          size_t stride) {
  Vec a[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) a[r][v] = first ? zero() : load(acc + r * kPanel + v * kLanes);
  for (int k = 0; k < count; ++k) {
    Vec b[V];
    for (int v = 0; v < V; ++v) b[v] = load(w + static_cast<size_t>(k) * kPanel + v * kLanes);
    __builtin_prefetch(fetch, 0, 2);
    if (stride > 64) __builtin_prefetch(fetch + 64, 0, 2);
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

// ---- Formats -------------------------------------------------------------------------------------------------------
struct F32 {
  static constexpr size_t bytes(size_t k) { return k * kPanel * 4; }
};

struct BF16 {
  static constexpr size_t bytes(size_t k) { return k * kPanel * 2; }
};

// Quantised: a block is a head of scales, then rows of 32 outputs. `pair` gives inputs i and i + 1 of outputs n onwards.
struct Q80 {
  static constexpr size_t kHead = kPanel * 2, kBytes = kHead + kBlock * kPanel;
  static constexpr size_t bytes(size_t k) { return k / kBlock * kBytes; }
  struct Scales {
    Vec scale;
    void load_from(const uint8_t* from) { scale = load_half(from); }
  };
  static void pair(const uint8_t* block, int i, int n, const Scales& s, Vec& even, Vec& odd) {
    const uint8_t* q = block + kHead + i * kPanel + n;
    even = load_int8(q) * s.scale;
    odd = load_int8(q + kPanel) * s.scale;
  }
};

struct Q41 {
  static constexpr size_t kHead = kPanel * 4, kBytes = kHead + kBlock * kPanel / 2;
  static constexpr size_t bytes(size_t k) { return k / kBlock * kBytes; }
  struct Scales {
    Vec scale, minimum;
    void load_from(const uint8_t* from) {
      scale = load_half(from);
      minimum = load_half(from + kPanel * 2);
    }
  };
  // q * scale has at most 15 significant bits and is exact: fusing changes no bit of q * scale + minimum.
  static void pair(const uint8_t* block, int i, int n, const Scales& s, Vec& even, Vec& odd) {
    Vec low, high;
    load_nibbles(block + kHead + i / 2 * kPanel + n, low, high);
    even = fma(low, s.scale, s.minimum);
    odd = fma(high, s.scale, s.minimum);
  }
};

// `count` steps of a panel as fp32.
template <typename Format>
void decode(const uint8_t* from, int count, float* to) {
  if constexpr (std::is_same_v<Format, BF16>) {
    for (int i = 0; i < count * kPanel; i += kLanes) store(to + i, load_bfloat(from + 2 * i));
  } else {
    for (int k = 0; k < count; k += kBlock, from += Format::kBytes, to += kBlock * kPanel)
      for (int n = 0; n < kPanel; n += kLanes) {
        typename Format::Scales scales;
        scales.load_from(from + 2 * n);
        for (int i = 0; i < kBlock; i += 2) {
          Vec even, odd;
          Format::pair(from, i, n, scales, even, odd);
          store(to + i * kPanel + n, even);
          store(to + (i + 1) * kPanel + n, odd);
        }
      }
  }
}

// acc[R][32] = x[R] times a whole panel, decoded in registers: up to kFusedRows rows, where writing the decoded weights
// to the cache would cost more than it saves. A panel is one tile wide here (kTileVectors covers it).
template <typename Format, int R>
void fused_tile(const float* x, size_t ldx, int depth, const uint8_t* w, float* acc) {
  constexpr size_t ahead = 4096;
  Vec a[R][kTileVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kTileVectors; ++v) a[r][v] = zero();
  const auto step = [&](int k, const Vec (&b)[kTileVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec s = splat(x[r * ldx + k]);
#pragma GCC unroll 8
      for (int v = 0; v < kTileVectors; ++v) a[r][v] = fma(s, b[v], a[r][v]);
    }
  };
  if constexpr (std::is_same_v<Format, BF16>) {
    for (int k = 0; k < depth; ++k, w += BF16::bytes(1)) {
      Vec b[kTileVectors];
      for (int v = 0; v < kTileVectors; ++v) b[v] = load_bfloat(w + 2 * v * kLanes);
      __builtin_prefetch(w + ahead, 0, 2);
      step(k, b);
    }
  } else {
    for (int k0 = 0; k0 < depth; k0 += kBlock, w += Format::kBytes) {
      typename Format::Scales scales[kTileVectors];
      for (int v = 0; v < kTileVectors; ++v) scales[v].load_from(w + 2 * v * kLanes);
      __builtin_prefetch(w + ahead, 0, 2);
      __builtin_prefetch(w + ahead + 64, 0, 2);
      for (int i = 0; i < kBlock; i += 2) {
        Vec even[kTileVectors], odd[kTileVectors];
        for (int v = 0; v < kTileVectors; ++v) Format::pair(w, i, v * kLanes, scales[v], even[v], odd[v]);
        __builtin_prefetch(w + ahead + Format::kHead + i * (Format::kBytes - Format::kHead) / kBlock, 0, 2);
        if (Format::kBytes > 1024)
          __builtin_prefetch(w + ahead + Format::kHead + (i + 2) * (Format::kBytes - Format::kHead) / kBlock, 0, 2);
        step(k0 + i, even);
        step(k0 + i + 1, odd);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kTileVectors; ++v) store(acc + r * kPanel + v * kLanes, a[r][v]);
}

using FusedTile = void (*)(const float*, size_t, int, const uint8_t*, float*);

template <typename Format, int R>
FusedTile find_fused_tile(int rows) {
  if constexpr (R == 0) {
    return nullptr;
  } else {
    return rows == R ? fused_tile<Format, R> : find_fused_tile<Format, R - 1>(rows);
  }
}

// ---- One panel -----------------------------------------------------------------------------------------------------
using Job = MatmulJob;

// acc[0..rows)[32] = x[0..rows) times panel `index`. `scratch` holds kChunk decoded steps.
template <typename Format>
__attribute__((noinline)) void accumulate(const Job& job, const float* x, int rows, size_t index, float* acc, float* scratch) {
  constexpr bool direct = std::is_same_v<Format, F32>;
  constexpr int splits = kVectors / kTileVectors;
  const size_t depth = job.depth;
  const uint8_t* w = job.w + index * Format::bytes(depth);
  if constexpr (!direct && kFusedRows > 0) {
    if (rows <= kFusedRows) {
      find_fused_tile<Format, kFusedRows>(rows)(x, depth, job.depth, w, acc);
      return;
    }
  }
  const int blocks = (rows + kTileRows - 1) / kTileRows, passes = blocks * splits;
  const bool single = direct && passes == 1;
  const int chunk = single ? job.depth : kChunk;
  if (depth == 0) std::memset(acc, 0, rows * kPanel * sizeof(float));
  for (int k0 = 0; k0 < job.depth; k0 += chunk) {
    const int count = std::min(chunk, job.depth - k0);
    const uint8_t* from = w + Format::bytes(k0);
    const float* panel = reinterpret_cast<const float*>(from);
    // The passes over this chunk fetch the next one between them: memory never waits for arithmetic.
    const char* fetch = reinterpret_cast<const char*>(from) + (single ? F32::bytes(kAhead) : Format::bytes(count));
    const size_t stride = single ? F32::bytes(1) : (Format::bytes(kBlock) / kBlock + passes - 1) / passes;
    if constexpr (!direct) {
      decode<Format>(from, count, scratch);
      panel = scratch;
    }
    for (int block = 0, r0 = 0; block < blocks; ++block) {
      const int size = rows / blocks + (block < rows % blocks);
      const Tile run = find_tile<kTileRows>(size);
      for (int split = 0; split < splits; ++split) {
        const int column = split * kTileVectors * kLanes;
        run(x + r0 * depth + k0, depth, count, panel + column, acc + r0 * kPanel + column, k0 == 0, fetch, stride);
        fetch += stride * count;
      }
      r0 += size;
    }
  }
}

template <typename Format>
void compute_panel(const Job& job, int index) {
  alignas(64) float acc[kMaxRows * kPanel];
  alignas(64) float scratch[std::is_same_v<Format, F32> ? 1 : kChunk * kPanel];
  const int first = index * kPanel, width = std::min(kPanel, job.outputs - first);
  for (int m0 = 0; m0 < job.rows; m0 += kMaxRows) {
    const int rows = std::min(kMaxRows, job.rows - m0);
    accumulate<Format>(job, job.x + static_cast<size_t>(m0) * job.depth, rows, index, acc, scratch);
    for (int r = 0; r < rows; ++r) {
      const size_t offset = static_cast<size_t>(m0 + r) * job.stride + first;
      float* a = acc + r * kPanel;
      if (job.bias)
        for (int n = 0; n < width; ++n) a[n] += job.bias[first + n];
      if (job.residual)
        for (int n = 0; n < width; ++n) a[n] += job.residual[offset + n];
      std::memcpy(job.y + offset, a, width * sizeof(float));
    }
  }
}

inline float power_of_two(int32_t n) {
  const int32_t bits = (n + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

// exp(x) for x <= 0, elementwise IEEE operations only, so every vector form gives the same bits; error below 2 ulp,
// subnormal results included (the scale is applied in two halves).
inline float exp_negative(float x) {
  x = x < -104.0f ? -104.0f : x;
  const float shifted = __builtin_fmaf(x, 1.44269504f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  float r = __builtin_fmaf(n, -0.693145752f, x);
  r = __builtin_fmaf(n, -1.42860677e-6f, r);
  float p = 1.98412698e-4f;
  p = __builtin_fmaf(p, r, 1.38888889e-3f);
  p = __builtin_fmaf(p, r, 8.33333333e-3f);
  p = __builtin_fmaf(p, r, 4.16666667e-2f);
  p = __builtin_fmaf(p, r, 1.66666667e-1f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  const int32_t whole = static_cast<int32_t>(n), half = whole / 2;
  return p * power_of_two(half) * power_of_two(whole - half);
}

// Outputs [0, half) are gates and [half, 2 half) the values they open: y = gate * sigmoid(gate) * value.
template <typename Format>
void compute_gated_panel(const Job& job, int index) {
  alignas(64) float gate[kMaxRows * kPanel], value[kMaxRows * kPanel];
  alignas(64) float scratch[std::is_same_v<Format, F32> ? 1 : kChunk * kPanel];
  const int half = job.outputs / 2;
  for (int m0 = 0; m0 < job.rows; m0 += kMaxRows) {
    const int rows = std::min(kMaxRows, job.rows - m0);
    const float* x = job.x + static_cast<size_t>(m0) * job.depth;
    accumulate<Format>(job, x, rows, index, gate, scratch);
    accumulate<Format>(job, x, rows, index + half / kPanel, value, scratch);
    for (int r = 0; r < rows; ++r) {
      float* y = job.y + static_cast<size_t>(m0 + r) * job.stride + index * kPanel;
      float *g = gate + r * kPanel, *v = value + r * kPanel;
      if (job.bias)
        for (int n = 0; n < kPanel; ++n) {
          g[n] += job.bias[index * kPanel + n];
          v[n] += job.bias[half + index * kPanel + n];
        }
      for (int n = 0; n < kPanel; ++n) {
        // sigmoid(g) from exp(-|g|), which cannot overflow.
        const float e = exp_negative(-__builtin_fabsf(g[n]));
        y[n] = g[n] * ((g[n] < 0.0f ? e : 1.0f) / (1.0f + e)) * v[n];
      }
    }
  }
}

using Panel = void (*)(const Job&, int);

Panel find_panel(int64_t format, bool gated) {
  switch (format) {
    case 0: return gated ? compute_gated_panel<F32> : compute_panel<F32>;
    case 1: return gated ? compute_gated_panel<BF16> : compute_panel<BF16>;
    case 2: return gated ? compute_gated_panel<Q80> : compute_panel<Q80>;
    case 3: return gated ? compute_gated_panel<Q41> : compute_panel<Q41>;
    default: return nullptr;
  }
}

using Accumulate = void (*)(const Job&, const float*, int, size_t, float*, float*);

Accumulate find_accumulate(int64_t format) {
  switch (format) {
    case 0: return accumulate<F32>;
    case 1: return accumulate<BF16>;
    case 2: return accumulate<Q80>;
    default: return accumulate<Q41>;
  }
}

}  // namespace

size_t matmul_weight_bytes(int64_t format, size_t depth, size_t outputs) {
  const size_t panels = (outputs + kPanel - 1) / kPanel;
  if (format >= 2 && depth % kBlock != 0) return 0;
  switch (format) {
    case 0: return panels * F32::bytes(depth);
    case 1: return panels * BF16::bytes(depth);
    case 2: return panels * Q80::bytes(depth);
    case 3: return panels * Q41::bytes(depth);
    default: return 0;
  }
}

int matmul_tasks(const MatmulJob& job) {
  return job.gated ? job.outputs / (2 * kPanel) : (job.outputs + kPanel - 1) / kPanel;
}

void matmul_run(const MatmulJob& job, int begin, int end) {
  const Panel run = find_panel(job.format, job.gated);
  for (int i = begin; i < end; ++i) run(job, i);
}

void matmul_panel(const MatmulJob& job, int index, float* acc) {
  alignas(64) float scratch[kChunk * kPanel];
  find_accumulate(job.format)(job, job.x, job.rows, index, acc, scratch);
}

namespace {

// Arguments: x [M, K] f32, w packed, then bias [N] f32 if has_bias, residual [M, N] f32 if has_residual.
ffi::Error matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::RemainingArgs more,
                  ffi::ResultBuffer<ffi::F32> y, int64_t format, int64_t outputs, bool has_bias, bool has_residual,
                  bool gated, int64_t threads) {
  const auto bad = [](const char* what) {
    return ffi::Error::InvalidArgument(std::string("row_invariant_matmul: ") + what);
  };
  const auto xd = x.dimensions(), yd = y->dimensions();
  if (xd.size() != 2 || yd.size() != 2 || yd[0] != xd[0] || yd[1] != (gated ? outputs / 2 : outputs))
    return bad("x, y and the number of outputs do not fit");
  if (find_panel(format, gated) == nullptr || (gated && outputs % (2 * kPanel) != 0))
    return bad("this format or epilogue does not take these sizes");
  if (w.size_bytes() != matmul_weight_bytes(format, xd[1], outputs)) return bad("packed weight of the wrong size");
  Job job{x.typed_data(), static_cast<const uint8_t*>(w.untyped_data()), y->typed_data(), nullptr, nullptr,
          static_cast<int>(xd[0]), static_cast<int>(xd[1]), static_cast<int>(outputs), static_cast<int>(format), gated,
          static_cast<size_t>(yd[1])};
  const size_t wanted = size_t{has_bias} + has_residual;
  if (more.size() != wanted || (gated && has_residual)) return bad("wrong number of epilogue arguments");
  for (size_t i = 0; i < wanted; ++i) {
    const auto extra = more.get<ffi::Buffer<ffi::F32>>(i);
    const bool is_bias = has_bias && i == 0;
    if (!extra.has_value() || extra->element_count() != static_cast<size_t>(is_bias ? outputs : outputs * xd[0]))
      return bad("bias or residual of the wrong type or size");
    (is_bias ? job.bias : job.residual) = extra->typed_data();
  }
  if (job.rows == 0 || outputs == 0) return ffi::Error::Success();
  parallel_for(pool, matmul_tasks(job), static_cast<int>(threads),
               [&job](int begin, int end) { matmul_run(job, begin, end); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jetspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(Matmul, jetspec::matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("outputs")
                                  .Attr<bool>("has_bias")
                                  .Attr<bool>("has_residual")
                                  .Attr<bool>("gated")
                                  .Attr<int64_t>("threads"));

// The same on plain pointers and the calling thread: for tests with buffers XLA never makes (misaligned, guarded).
extern "C" void matmul_plain(const float* x, const void* w, float* y, int rows, int depth, int outputs, int format) {
  using namespace jetspec;
  const Job job{x,    static_cast<const uint8_t*>(w), y, nullptr, nullptr, rows, depth, outputs, format,
                false, static_cast<size_t>(outputs)};
  FloatEnv env;
  matmul_run(job, 0, matmul_tasks(job));
}
