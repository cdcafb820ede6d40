// The matmul of cpu.cc for the other ops of the library: plain pointers, the calling thread, no allocation. The caller
// sets the floating-point environment (FloatEnv) and shares the tasks among its threads.
#pragma once

#include <cstddef>
#include <cstdint>

// Build parameters (tuning.py) of both arithmetics; those of one stand beside it. None changes a bit.
#ifndef JETSPEC_ROW_INVARIANT_MATMUL_AHEAD
#define JETSPEC_ROW_INVARIANT_MATMUL_AHEAD 4096
#endif
#ifndef JETSPEC_ROW_INVARIANT_MATMUL_LOCALITY
#define JETSPEC_ROW_INVARIANT_MATMUL_LOCALITY 2
#endif
static_assert(JETSPEC_ROW_INVARIANT_MATMUL_AHEAD >= 64 && JETSPEC_ROW_INVARIANT_MATMUL_AHEAD % 64 == 0,
              "AHEAD is a multiple of 64");

namespace jetspec {

constexpr int kPanel = 32;       // outputs of a packed panel
constexpr int kMaxPanelRows = 128;  // rows that matmul_panel takes at once

struct MatmulJob {
  const float* x;         // [rows, depth]
  const uint8_t* w;       // packed, see cpu.cc
  float* y;               // [rows, outputs], rows `stride` apart; gated: [rows, outputs / 2]
  const float* bias;      // [outputs] or null
  const float* residual;  // as y, or null; may be y itself
  int rows, depth, outputs;
  int format;      // number in specs.LAYOUT_ID
  bool gated;      // y = silu(first half) * second half
  size_t stride;   // floats from a row of y (and residual) to the next
  uint8_t* split = nullptr;  // the rows as digits (matmul_split), where the format multiplies integers
};

// Bytes of a packed weight; 0 where the format does not exist or does not take this depth.
size_t matmul_weight_bytes(int64_t format, size_t depth, size_t outputs);

// Whether the format multiplies integers (integer.h). Then every row of x is split, once for all panels, before it is
// multiplied. Formats of the same kind (0: none) and jobs of the same rows can share what is split; a part of a job that
// begins at a multiple of kMaxPanelRows finds its rows at matmul_split_bytes of the rows before it.
int matmul_split_kind(int64_t format);
size_t matmul_split_bytes(size_t rows, size_t depth);
size_t matmul_split_floats(size_t rows, size_t depth);  // to allocate for them
void matmul_split(const MatmulJob& job, int begin, int end);

// Independent pieces of a job, and the work of pieces [begin, end). The bits do not depend on how they are shared.
int matmul_tasks(const MatmulJob& job);
void matmul_run(const MatmulJob& job, int begin, int end);

// What a thread keeps from one panel to the next: the configuration of its matrix tiles, given up at the end.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles();
  void use();

 private:
  bool used_ = false;
};

// acc[row][32] = the raw sums of outputs [32 index, 32 index + 32), for at most kMaxPanelRows rows; y is not touched.
void matmul_panel(const MatmulJob& job, int index, Tiles& tiles, float* acc);

}  // namespace jetspec
