// The attention of cpu.cc for the other ops of the library: plain pointers, the calling thread. The caller sets the
// floating-point environment (FloatEnv) and shares the tasks among its threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jetspec {

struct AttentionShared;

// How a call is cut into tasks. One plan serves calls that differ in their arrays only, one after the other; it is
// valid until the thread that made it makes another.
struct AttentionPlan {
  int block, blocks;        // new rows per unit and units per (sequence, head)
  int split, parts;         // pairs whose keys (then columns) are shared between threads, and between how many
  size_t scores;            // floats of the scores of a split pair
  AttentionShared* shared;  // null without split pairs
};

template <typename E>
struct AttentionJob {
  const E *q, *cache_k, *cache_v, *new_k, *new_v;  // cache [B, K, S, h], new [B, K, rows, h]
  const int32_t* lengths;                          // [B] live cache slots
  const uint8_t* mask;                             // [B, rows, rows]
  E* out;                                          // strides as q
  int batch, heads, group, rows, dim, capacity;
  float scale;
  // Elements of q and out from a row, a query head and a sequence to the next.
  size_t row_stride, head_stride, sequence_stride;
  // Ragged batches: rows of each sequence (at most `rows`), and the row of q and out where it begins. Null: `rows`
  // each, sequence_stride apart.
  const int32_t *counts, *first;
  AttentionPlan plan;  // set by attention_plan
};

void attention_plan(AttentionJob<float>& job, int threads);
int attention_tasks(const AttentionJob<float>& job);
void attention_run(const AttentionJob<float>& job, int begin, int end);

}  // namespace jetspec
