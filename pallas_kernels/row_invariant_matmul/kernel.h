// The matmul of cpu.cc for the other ops of the library: plain pointers, the calling thread, no allocation. The caller
// sets the floating-point environment (FloatEnv) and shares the tasks among its threads.
#pragma once

#include <cstddef>
#include <cstdint>

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
  int format;      // number in specs.FORMAT_ID
  bool gated;      // y = silu(first half) * second half
  size_t stride;   // floats from a row of y (and residual) to the next
};

// Bytes of a packed weight; 0 where the format does not exist or does not take this depth.
size_t matmul_weight_bytes(int64_t format, size_t depth, size_t outputs);

// Independent pieces of a job, and the work of pieces [begin, end). The bits do not depend on how they are shared.
int matmul_tasks(const MatmulJob& job);
void matmul_run(const MatmulJob& job, int begin, int end);

// acc[row][32] = the raw sums of outputs [32 index, 32 index + 32), for at most kMaxPanelRows rows; y is not touched.
void matmul_panel(const MatmulJob& job, int index, float* acc);

}  // namespace jetspec
