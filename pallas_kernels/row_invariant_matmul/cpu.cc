// y[m, n] = sum over k of x[m, k] * w[n, k], fp32, the sum taken from k = 0 upwards in one accumulator per output with
// one rounding per step (fused multiply-add). The bits of a row therefore depend on nothing but that row and w: not on
// the number of rows, the row's place, the threads, the tile sizes or the vector width.
//
// w is packed in panels (formats.h) and a panel is read once from memory for up to kMaxPanelRows rows. Weights that are
// not fp32 are decoded to the exact fp32 values, in registers for few rows and into a piece of panel that stays in the
// first-level cache for many; the sums are the same, so a format changes the speed and never the bits. Formats 6 and 7 have
// another definition of the result: integer.h.
#include "row_invariant_matmul/kernel.h"

#include "cpu_math.h"
#include "row_invariant_matmul/formats.h"
#include "row_invariant_matmul/integer.h"
#include "row_invariant_matmul/pack.h"

// Build parameters of float sums (tuning.py; kernel.h has those of both arithmetics): none changes a bit, as a sum is kept
// in one accumulator from its first input to its last, in registers or in memory.
#ifndef JETSPEC_ROW_INVARIANT_MATMUL_CHUNK
#define JETSPEC_ROW_INVARIANT_MATMUL_CHUNK 128
#endif
#ifndef JETSPEC_ROW_INVARIANT_MATMUL_TILE_ROWS
#define JETSPEC_ROW_INVARIANT_MATMUL_TILE_ROWS (JETSPEC_FORM == 3 ? 14 : 6)
#endif
#ifndef JETSPEC_ROW_INVARIANT_MATMUL_FUSED_ROWS
#define JETSPEC_ROW_INVARIANT_MATMUL_FUSED_ROWS (JETSPEC_FORM == 3 ? 12 : 2)
#endif

namespace jetspec {
namespace {

using Job = MatmulJob;

constexpr int kVectors = kPanel / kLanes;
constexpr int kMaxRows = kMaxPanelRows;  // rows whose accumulators are kept at once (16 KB)
// Inputs per pass when several passes share the weights: 128 are 16 KB and stay in L1.
constexpr int kChunk = JETSPEC_ROW_INVARIANT_MATMUL_CHUNK;
// Bytes of prefetch distance of a single pass; fp32: half as much again.
constexpr size_t kAhead = JETSPEC_ROW_INVARIANT_MATMUL_AHEAD;

// Rows of a register tile and vectors beside each other, by the number of vector registers; rows up to which weights
// are decoded in registers.
constexpr int kTileRows = JETSPEC_ROW_INVARIANT_MATMUL_TILE_ROWS, kTileVectors = JETSPEC_FORM == 1 ? 4 : 2;
constexpr int kFusedRows = JETSPEC_ROW_INVARIANT_MATMUL_FUSED_ROWS;
static_assert(kChunk >= kBlock && kChunk % kBlock == 0, "CHUNK is a multiple of 32");
static_assert(kTileRows >= 4 && kTileRows <= 16 && kTileRows % 2 == 0, "TILE_ROWS is even, 4 to 16");
static_assert(kFusedRows >= 1 && kFusedRows <= 16, "FUSED_ROWS is 1 to 16");

// ---- Tiles ---------------------------------------------------------------------------------------------------------
// What a tile multiplies: `count` inputs from `k` on of a panel, for outputs `column` onwards.
struct Piece {
  const uint8_t* panel;
  int k, count, column;
  bool first;         // start from zero instead of from acc
  const char* fetch;  // weights needed soon, `stride` bytes for every group of 8 inputs
  size_t stride;
};

// acc[r][..] += x[r][..] * w for R rows, the last of which is at `last`: at the row before it if there are R - 1.
template <typename Format, int R>
void tile(const float* x, size_t ldx, const float* last, const Piece& p, float* acc) {
  constexpr int V = kTileVectors;
  // A line or more for every input: asking for eight inputs at once would fill the queue of outstanding lines.
  constexpr bool spread = Format::kDepth == 1;
  const size_t step = p.stride / kGroup;
  acc += p.column;
  Vec a[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) a[r][v] = p.first ? zero() : load(acc + r * kPanel + v * kLanes);
  const char* fetch = p.fetch;
  const int end = p.k + p.count;
  for (int k = p.k; k < end;) {
    typename Format::Scales s[V];
    for (int v = 0; v < V; ++v) s[v] = {p.panel, static_cast<size_t>(k), p.column + v * kLanes};
    for (const int block = std::min(end, k + kBlock); k < block;) {
      typename Format::Group g[V];
      for (int v = 0; v < V; ++v) g[v] = {p.panel, static_cast<size_t>(k), p.column + v * kLanes};
      if constexpr (!spread) {
        for (size_t i = 0; i < p.stride; i += 64) __builtin_prefetch(fetch + i, 0, JETSPEC_ROW_INVARIANT_MATMUL_LOCALITY);
        fetch += p.stride;
      }
      const int half = k % kBlock / 16;
#pragma GCC unroll 1
      for (const int stop = std::min(block, k + kGroup); k < stop; ++k) {
        Vec b[V];
        for (int v = 0; v < V; ++v) b[v] = g[v].next(s[v], half);
        if constexpr (spread) {
          __builtin_prefetch(fetch, 0, JETSPEC_ROW_INVARIANT_MATMUL_LOCALITY);
          if (step > 64) __builtin_prefetch(fetch + 64, 0, JETSPEC_ROW_INVARIANT_MATMUL_LOCALITY);
          fetch += step;
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const Vec factor = splat(r == R - 1 ? last[k] : x[r * ldx + k]);
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) a[r][v] = fma(factor, b[v], a[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(acc + r * kPanel + v * kLanes, a[r][v]);
}

using Tile = void (*)(const float*, size_t, const float*, const Piece&, float*);

// Heights that exist: even ones (the last row may repeat), and the odd ones where a wasted row would be a loss.
template <typename Format, int R, int Most>
Tile find_tile(int rows) {
  if constexpr (R >= Most) {
    return tile<Format, Most>;
  } else {
    return rows <= R ? tile<Format, R> : find_tile<Format, R < 4 ? R + 1 : R + 2, Most>(rows);
  }
}

// ---- One panel -----------------------------------------------------------------------------------------------------
// `count` inputs of a panel from `k` on, as fp32.
template <typename Format>
void decode(const uint8_t* panel, int k, int count, float* to) {
  for (int n = 0; n < kPanel; n += kLanes) {
    float* out = to + n;
    for (int i = 0; i < count;) {
      const typename Format::Scales s(panel, k + i, n);
      for (const int block = std::min(count, i + kBlock); i < block;) {
        typename Format::Group g(panel, k + i, n);
        const int half = i % kBlock / 16;
#pragma GCC unroll 1
        for (const int stop = std::min(block, i + kGroup); i < stop; ++i, out += kPanel) store(out, g.next(s, half));
      }
    }
  }
}

// acc[0..rows)[32] = rows m0 onwards times panel `index`.
template <typename Format>
void accumulate(const Job& job, int m0, int rows, size_t index, Tiles&, float* acc) {
  constexpr bool direct = std::is_same_v<Format, F32>;
  constexpr int splits = kVectors / kTileVectors, fused = direct ? kTileRows : std::min(kFusedRows, Format::kFused);
  const size_t depth = job.depth;
  const float* x = job.x + m0 * depth;
  const uint8_t* w = job.w + index * Format::bytes(depth);
  const char* fetch = reinterpret_cast<const char*>(w) + (direct ? kAhead * 3 / 2 : kAhead);
  Piece piece{w, 0, job.depth, 0, true, fetch, Format::bytes(256) / 32};
  if (rows <= fused) {
    const Tile run = find_tile<Format, 1, fused>(rows);
    for (int split = 0; split < splits; ++split, piece.column += kTileVectors * kLanes)
      run(x, depth, x + (rows - 1) * depth, piece, acc);
    return;
  }
  alignas(64) float scratch[direct ? 1 : kChunk * kPanel];
  const int blocks = (rows + kTileRows - 1) / kTileRows, passes = blocks * splits, pairs = (rows + 1) / 2;
  // The passes over a chunk fetch the next one between them: memory never waits for arithmetic.
  piece.stride = (piece.stride + passes - 1) / passes;
  if (depth == 0) std::memset(acc, 0, rows * kPanel * sizeof(float));
  for (int k0 = 0; k0 < job.depth; k0 += kChunk) {
    const int count = std::min(kChunk, job.depth - k0);
    piece.first = k0 == 0;
    piece.fetch = reinterpret_cast<const char*>(w) + Format::bytes(256) * (k0 + kChunk) / 256;
    piece.k = k0;
    piece.count = count;
    if constexpr (!direct) {
      decode<Format>(w, k0, count, scratch);
      piece.panel = reinterpret_cast<const uint8_t*>(scratch);
      piece.k = 0;
    }
    const float* from = direct ? x : x + k0;
    for (int block = 0, r0 = 0; block < blocks; ++block) {
      const int size = std::min(rows - r0, 2 * (pairs / blocks + (block < pairs % blocks)));
      const Tile run = find_tile<F32, 1, kTileRows>(size);
      for (int split = 0; split < splits; ++split) {
        piece.column = split * kTileVectors * kLanes;
        run(from + r0 * depth, depth, from + (r0 + size - 1) * depth, piece, acc + r0 * kPanel);
        piece.fetch += piece.stride * (count / kGroup);
      }
      r0 += size;
    }
  }
}

template <typename Format>
void accumulate_sums(const Job& job, int m0, int rows, size_t index, Tiles& tiles, float* acc) {
  const size_t depth = job.depth;
  multiply_sums<Format>(job.w + index * Format::bytes(depth), depth, job.split + split_bytes(m0, depth), rows, kAhead, tiles,
                        acc);
}

#if JETSPEC_FORM == 3
// One row and P panels of a 4-bit format, `apart` panels from one to the next: acc[p][32]. A weight costs one
// permutation, two fused multiply-adds and half a shift: even nibbles come to the lowest bits by reading from another
// byte (the bytes behind the last group are scales).
template <typename Format, int P>
void row_times(const Job& job, size_t index, size_t apart, float* acc) {
  constexpr int V = 2 * P;
  const size_t size = Format::bytes(job.depth);
  const uint8_t* panel[P];
  for (int p = 0; p < P; ++p) panel[p] = job.w + (index + p * apart) * size;
  const float* x = job.x;
  Vec a[V];
  for (int v = 0; v < V; ++v) a[v] = zero();
  for (int k = 0; k < job.depth; k += kBlock) {
    typename Format::Scales s[V];
    for (int v = 0; v < V; ++v) s[v] = {panel[v / 2], static_cast<size_t>(k), v % 2 * kLanes};
    const size_t block = Format::nibbles(k);
    // Behind the end of neighbouring panels lies the next one of the other stream: skip it.
    const size_t ahead = block + kAhead + (apart == 1 && block + kAhead >= size ? (P - 1) * size : 0);
    const auto fetch = [&](size_t at) {
      for (int p = 0; p < P; ++p) __builtin_prefetch(panel[p] + ahead + at, 0, JETSPEC_ROW_INVARIANT_MATMUL_LOCALITY);
    };
    fetch(kNibbles), fetch(kNibbles + 64);
    for (int i = 0; i < kBlock; i += kGroup) {
      const size_t at = block + i / 2 * kPanel;
      fetch(i / 2 * kPanel), fetch(i / 2 * kPanel + 64);
#pragma GCC unroll 8
      for (int j = 0; j < kGroup; ++j) {
        const Vec factor = splat(x[k + i + j]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const Ints q = load_ints(panel[v / 2] + at + v % 2 * 64 + j / 2);
          a[v] = fma(factor, fma(low_nibble(j % 2 ? shift_right(q, 4) : q), s[v].d, s[v].m), a[v]);
        }
      }
    }
  }
  for (int v = 0; v < V; ++v) store(acc + v * kLanes, a[v]);
}
#endif

// Output n of a panel, all its inputs.
template <typename Format>
void take(const uint8_t* panel, int depth, int n, float* to) {
  const int first = n / kLanes * kLanes;
  for (int k = 0; k < depth;) {
    const typename Format::Scales s(panel, k, first);
    for (const int block = std::min(depth, k + kBlock); k < block;) {
      typename Format::Group g(panel, k, first);
      const int half = k % kBlock / 16;
      for (const int stop = std::min(block, k + kGroup); k < stop; ++k) {
        float lanes[kLanes];
        store(lanes, g.next(s, half));
        to[k] = lanes[n - first];
      }
    }
  }
}

// What there is for a format.
struct Kernel {
  size_t (*bytes)(size_t);
  size_t depth;  // the depth of a weight is a multiple of this
  void (*accumulate)(const Job&, int, int, size_t, Tiles&, float*);
  void (*take)(const uint8_t*, int, int, float*);
  void (*row_times_one)(const Job&, size_t, size_t, float*);  // or null: one row, one panel
  void (*row_times_two)(const Job&, size_t, size_t, float*);  // or null: one row, two panels
};

template <typename Format>
constexpr Kernel kernel_of() {
  Kernel kernel{Format::bytes, Format::kDepth, accumulate<Format>, take<Format>, nullptr, nullptr};
#if JETSPEC_FORM == 3
  if constexpr (std::is_same_v<Format, Q41> || std::is_same_v<Format, Q4K>) {
    kernel.row_times_one = row_times<Format, 1>;
    kernel.row_times_two = row_times<Format, 2>;
  }
#endif
  return kernel;
}

template <typename Format>
constexpr Kernel sums_of() {
  return {Format::bytes, kBlock, accumulate_sums<Format>, take_sums<Format>, nullptr, nullptr};
}

constexpr Kernel kKernels[] = {kernel_of<F32>(), kernel_of<BF16>(), kernel_of<Q80>(),   kernel_of<Q41>(),
                               kernel_of<Q4K>(), kernel_of<Q6K>(),  sums_of<Q80Sums>(), sums_of<Q41Sums>()};
constexpr int64_t kFirstSums = 6;

const Kernel* find_kernel(int64_t format) {
  return format >= 0 && format < static_cast<int64_t>(std::size(kKernels)) ? kKernels + format : nullptr;
}

// ---- Epilogues -----------------------------------------------------------------------------------------------------
// Rows [m0, m0 + rows) of outputs 32 index onwards, from their sums.
void finish(const Job& job, int index, int m0, int rows, float* acc) {
  const int first = index * kPanel, width = std::min(kPanel, job.outputs - first);
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
void finish_gated(const Job& job, int index, int m0, int rows, float* gate, float* value) {
  const int half = job.outputs / 2;
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

void run_panel(const Job& job, const Kernel& kernel, int index, Tiles& tiles) {
  alignas(64) float acc[kMaxRows * kPanel], value[kMaxRows * kPanel];
  for (int m0 = 0; m0 < job.rows; m0 += kMaxRows) {
    const int rows = std::min(kMaxRows, job.rows - m0);
    kernel.accumulate(job, m0, rows, index, tiles, acc);
    if (job.gated) {
      kernel.accumulate(job, m0, rows, index + job.outputs / 2 / kPanel, tiles, value);
      finish_gated(job, index, m0, rows, acc, value);
    } else {
      finish(job, index, m0, rows, acc);
    }
  }
}

}  // namespace

size_t matmul_weight_bytes(int64_t format, size_t depth, size_t outputs) {
  const Kernel* kernel = find_kernel(format);
  if (kernel == nullptr || depth % kernel->depth != 0) return 0;
  return (outputs + kPanel - 1) / kPanel * kernel->bytes(depth);
}

void Tiles::use() {
#if defined(JETSPEC_AMX)
  if (!used_) configure_tiles();
  used_ = true;
#endif
}

Tiles::~Tiles() {
#if defined(JETSPEC_AMX)
  if (used_) asm volatile("tilerelease");
#endif
}

int matmul_split_kind(int64_t format) { return format < kFirstSums ? 0 : format == kFirstSums ? 1 : 2; }

size_t matmul_split_bytes(size_t rows, size_t depth) { return split_bytes(rows, depth); }
size_t matmul_split_floats(size_t rows, size_t depth) { return (split_bytes(rows, depth) + kTileBytes) / sizeof(float); }

void matmul_split(const MatmulJob& job, int begin, int end) {
  split_rows(job.x, job.rows, job.depth, matmul_split_kind(job.format) == 2, begin, end, job.split);
}

int matmul_tasks(const MatmulJob& job) {
  return job.gated ? job.outputs / (2 * kPanel) : (job.outputs + kPanel - 1) / kPanel;
}

void matmul_run(const MatmulJob& job, int begin, int end) {
  const Kernel& kernel = kKernels[job.format];
  const size_t half = job.gated ? job.outputs / 2 / kPanel : 0, size = kernel.bytes(job.depth);
  // Nothing has fetched the start of this range yet.
  for (size_t at = 0; at < std::min(kAhead, size); at += 64) {
    __builtin_prefetch(job.w + begin * size + at, 0, JETSPEC_ROW_INVARIANT_MATMUL_LOCALITY);
    if (half > 0 || begin + 1 < end) __builtin_prefetch(job.w + (begin + (half > 0 ? half : 1)) * size + at, 0, JETSPEC_ROW_INVARIANT_MATMUL_LOCALITY);
  }
  if (job.rows == 1 && kernel.row_times_two != nullptr) {
    alignas(64) float acc[2 * kPanel];
    while (begin < end) {
      if (job.gated) {
        kernel.row_times_two(job, begin, half, acc);
        finish_gated(job, begin, 0, 1, acc, acc + kPanel);
      } else if (begin + 1 < end) {
        kernel.row_times_two(job, begin, 1, acc);
        finish(job, begin, 0, 1, acc);
        finish(job, ++begin, 0, 1, acc + kPanel);
      } else {
        kernel.row_times_one(job, begin, 1, acc);
        finish(job, begin, 0, 1, acc);
      }
      ++begin;
    }
  }
  Tiles tiles;
  for (; begin < end; ++begin) run_panel(job, kernel, begin, tiles);
}

void matmul_panel(const MatmulJob& job, int index, Tiles& tiles, float* acc) {
  kKernels[job.format].accumulate(job, 0, job.rows, index, tiles, acc);
}

namespace {

// For the split rows of one job.
uint8_t* split_memory(size_t rows, size_t depth) {
  return reinterpret_cast<uint8_t*>(thread_scratch(matmul_split_floats(rows, depth)));
}

ffi::Error bad(const char* what) {
  return ffi::Error::InvalidArgument(std::string("row_invariant_matmul: ") + what);
}

// y [T, K] = rows of the weight; the numbers are kept within it.
ffi::Error take_rows(ffi::ThreadPool& pool, const ffi::AnyBuffer& ids, const ffi::AnyBuffer& w, ffi::AnyBuffer& y,
                     int64_t format, int64_t outputs) {
  const auto yd = y.dimensions();
  const int count = static_cast<int>(ids.element_count());
  if (yd.size() != 2 || yd[0] != count || outputs == 0) return bad("y and the row numbers do not fit");
  const Kernel* kernel = find_kernel(format);
  const size_t depth = yd[1];
  if (kernel == nullptr || w.size_bytes() != matmul_weight_bytes(format, depth, outputs))
    return bad("packed weight of the wrong size");
  if (count == 0) return ffi::Error::Success();
  const size_t size = kernel->bytes(depth);
  parallel_for(pool, count, count * depth < 32768 ? 1 : 0, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int id = std::clamp<int>(static_cast<const int32_t*>(ids.untyped_data())[i], 0, outputs - 1);
      const uint8_t* panel = static_cast<const uint8_t*>(w.untyped_data()) + id / kPanel * size;
      kernel->take(panel, static_cast<int>(depth), id % kPanel, static_cast<float*>(y.untyped_data()) + i * depth);
    }
  });
  return ffi::Error::Success();
}

// Arguments: x [M, K] f32, w packed, then bias [N] f32 if has_bias, residual [M, N] f32 if has_residual. Where x is
// [T] i32 the result is rows x of the weight instead (one handler: each costs a second to compile).
ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::RemainingArgs more,
                  ffi::Result<ffi::AnyBuffer> y, int64_t format, int64_t outputs, bool has_bias, bool has_residual,
                  bool gated, int64_t threads) {
  if (y->element_type() != ffi::F32) return bad("y is not fp32");
  if (x.element_type() == ffi::S32) return take_rows(pool, x, w, *y, format, outputs);
  const auto xd = x.dimensions(), yd = y->dimensions();
  if (x.element_type() != ffi::F32 || xd.size() != 2 || yd.size() != 2 || yd[0] != xd[0] ||
      yd[1] != (gated ? outputs / 2 : outputs))
    return bad("x, y and the number of outputs do not fit");
  if (find_kernel(format) == nullptr || (gated && outputs % (2 * kPanel) != 0))
    return bad("this format or epilogue does not take these sizes");
  if (w.size_bytes() != matmul_weight_bytes(format, xd[1], outputs)) return bad("packed weight of the wrong size");
  Job job{static_cast<const float*>(x.untyped_data()), static_cast<const uint8_t*>(w.untyped_data()),
          static_cast<float*>(y->untyped_data()), nullptr, nullptr, static_cast<int>(xd[0]), static_cast<int>(xd[1]),
          static_cast<int>(outputs), static_cast<int>(format), gated, static_cast<size_t>(yd[1])};
  const size_t wanted = size_t{has_bias} + has_residual;
  if (more.size() != wanted || (gated && has_residual)) return bad("wrong number of epilogue arguments");
  for (size_t i = 0; i < wanted; ++i) {
    const auto extra = more.get<ffi::AnyBuffer>(i);
    const bool is_bias = has_bias && i == 0;
    if (!extra.has_value() || extra->element_type() != ffi::F32 ||
        extra->element_count() != static_cast<size_t>(is_bias ? outputs : outputs * xd[0]))
      return bad("bias or residual of the wrong type or size");
    (is_bias ? job.bias : job.residual) = static_cast<const float*>(extra->untyped_data());
  }
  if (job.rows == 0 || outputs == 0) return ffi::Error::Success();
  const int tasks = matmul_tasks(job), workers = std::min(worker_limit(pool, static_cast<int>(threads)), tasks);
  if (matmul_split_kind(format) != 0) job.split = split_memory(job.rows, job.depth);
  run_phases(pool, {job.split == nullptr ? 0 : job.rows, tasks}, workers, [&job](int phase, int begin, int end) {
    if (phase == 0) {
      matmul_split(job, begin, end);
    } else {
      matmul_run(job, begin, end);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jetspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(Matmul, jetspec::matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("outputs")
                                  .Attr<bool>("has_bias")
                                  .Attr<bool>("has_residual")
                                  .Attr<bool>("gated")
                                  .Attr<int64_t>("threads"));

// The same on plain pointers and the calling thread: for tests with buffers XLA never makes (misaligned, guarded).
extern "C" void matmul_plain(const float* x, const void* w, float* y, int rows, int depth, int outputs, int format) {
  using namespace jetspec;
  Job job{x,    static_cast<const uint8_t*>(w), y, nullptr, nullptr, rows, depth, outputs, format,
          false, static_cast<size_t>(outputs)};
  FloatEnv env;
  if (matmul_split_kind(format) != 0) {
    job.split = split_memory(rows, depth);
    matmul_split(job, 0, rows);
  }
  matmul_run(job, 0, matmul_tasks(job));
}

// Rows to panels on the calling thread (pack.h); 0 if some value has no exact form.
extern "C" int matmul_pack(int kind, int integer, const void* from, size_t stride, size_t n, size_t k, void* to) {
  return jetspec::pack_rows(kind, integer != 0, static_cast<const uint8_t*>(from), stride, n, k, static_cast<uint8_t*>(to));
}

// What this build is and may use: the vector form, 256 for AVX-512 VNNI, 512 for AMX tiles.
extern "C" int native_features() {
  int found = JETSPEC_FORM;
#if JETSPEC_FORM == 3 && defined(__AVX512VNNI__)
  found |= 256;
#endif
#if defined(JETSPEC_AMX)
  if (jetspec::tiles_allowed()) found |= 512;
#endif
  return found;
}

// Whether integer sums are the faster arithmetic of this build.
extern "C" int matmul_integer_pays() {
#if JETSPEC_FORM == 3 && defined(__AVX512VNNI__)
  return 1;
#else
  return 0;
#endif
}
