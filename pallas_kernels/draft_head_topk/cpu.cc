// Candidates of a drafted block in one call: LM head over the draft vocabulary, the W best tokens of each depth and the
// log-probability of each given every candidate of the depth above (Markov path head: logits(b | a) = U(b) + w2[b] . w1[a]).
//
// Depth by depth: the vocabulary is ranked under the expected correction of the depth above (one matrix-vector product
// with w2), every task keeps its W best, its maximum and its sum of exponentials, and one small task a sequence merges
// them and scores the candidates under each parent. log Z(a) is the sum over the candidates under `a` plus the mass
// outside them under the expected correction. The [D, Vd] logits stay in the cache of the call and never reach the caller.
#include <limits>
#include <string>

#include "cpu_math.h"
#include "row_invariant_matmul/kernel.h"

namespace jetspec {
namespace {

constexpr int kTaskPanels = 12;
constexpr int kMaxWidth = 64;

struct Entry {
  float value;
  int32_t id;
};

// The best `width` so far in falling order; of equals the one offered first stays ahead.
struct Shortlist {
  int width = 0, count = 0;
  Entry entry[kMaxWidth];
  float least() const { return count < width ? -std::numeric_limits<float>::infinity() : entry[count - 1].value; }
  void offer(float value, int32_t id) {
    if (count == width && !(value > entry[count - 1].value)) return;
    int at = count < width ? count++ : count - 1;
    for (; at > 0 && value > entry[at - 1].value; --at) entry[at] = entry[at - 1];
    entry[at] = {value, id};
  }
};

struct Part {  // what a task found in its piece of the vocabulary
  Shortlist best;
  float top;      // largest value
  double excess;  // sum of exp(value - top)
};

struct Call {
  int batch, depth, hidden, vocab, width, rank, tasks;
  bool markov, w1_half;
  MatmulJob head, path;  // of all rows; path without x: `features` or `expected`, split or not
  const float *scale, *noise;
  const float* gate;  // [B, D, r] or null
  const void* w1;
  const int32_t *anchor, *ids, *counts;
  int64_t targets;  // rows of w1
  int32_t* tokens;  // [B, D, W]
  float* table;     // [B, D, W, W]
  float *base;      // [B, D, vocab padded]
  float *features, *expected, *belief;  // [B, W, r], [B, r], [B, W]
  float *head_split, *path_split;       // rows as digits, where a weight is multiplied in integers
  size_t stride;                        // floats of a row of base
  std::vector<Part> parts;              // [B, tasks]
};

// The path product of a sequence: of its features, or of their expectation, whose digits come after those of the features.
MatmulJob path_job(const Call& c, int b, const float* x, int rows) {
  MatmulJob job = c.path;
  job.x = x;
  job.rows = rows;
  if (matmul_split_kind(job.format) != 0) {
    const size_t one = matmul_split_floats(c.width, c.rank), place = x == c.expected + static_cast<size_t>(b) * c.rank;
    job.split = reinterpret_cast<uint8_t*>(c.path_split + (2 * b + place) * one);
  }
  return job;
}

// Features of the parents whose children are ranked at `level`.
void gather_features(const Call& c, int b, int level, const int32_t* parents, int count, const float* belief) {
  const float* gate = c.gate ? c.gate + (static_cast<size_t>(b) * c.depth + level) * c.rank : nullptr;
  float* features = c.features + static_cast<size_t>(b) * c.width * c.rank;
  float* expected = c.expected + static_cast<size_t>(b) * c.rank;
  std::memset(expected, 0, c.rank * sizeof(float));
  for (int p = 0; p < count; ++p) {
    const size_t row = static_cast<size_t>(std::min<int64_t>(std::max<int64_t>(parents[p], 0), c.targets - 1)) * c.rank;
    float* to = features + static_cast<size_t>(p) * c.rank;
    for (int i = 0; i < c.rank; ++i) {
      float value;
      if (c.w1_half) {
        const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(c.w1)[row + i]) << 16;
        std::memcpy(&value, &bits, sizeof(value));
      } else {
        value = static_cast<const float*>(c.w1)[row + i];
      }
      to[i] = (gate ? value * gate[i] : value) * c.scale[b];
      expected[i] += belief[p] * to[i];
    }
  }
  if (matmul_split_kind(c.path.format) != 0) {
    matmul_split(path_job(c, b, features, count), 0, count);
    matmul_split(path_job(c, b, expected, 1), 0, 1);
  }
}

// Base logits of all depths, for panels [first, last).
void head_task(const Call& c, int task) {
  alignas(64) float acc[kMaxPanelRows * kPanel];
  Tiles tiles;
  const int panels = (c.vocab + kPanel - 1) / kPanel;
  for (int panel = task * kTaskPanels; panel < std::min(panels, (task + 1) * kTaskPanels); ++panel) {
    const int first = panel * kPanel, width = std::min(kPanel, c.vocab - first);
    for (int r0 = 0; r0 < c.head.rows; r0 += kMaxPanelRows) {
      MatmulJob part = c.head;
      part.x += static_cast<size_t>(r0) * c.hidden;
      if (part.split != nullptr) part.split += matmul_split_bytes(r0, c.hidden);
      part.rows = std::min(kMaxPanelRows, c.head.rows - r0);
      matmul_panel(part, panel, tiles, acc);
      for (int r = 0; r < part.rows; ++r) {
        const size_t row = r0 + r;
        const float scale = c.scale[row / c.depth];
        float* to = c.base + row * c.stride + first;
        for (int n = 0; n < width; ++n) to[n] = acc[r * kPanel + n] * scale;
        if (c.noise)
          for (int n = 0; n < width; ++n) to[n] += c.noise[row * c.vocab + first + n];
        for (int n = width; n < kPanel; ++n) to[n] = -std::numeric_limits<float>::infinity();
      }
    }
  }
}

// Ranks a piece of the vocabulary at one depth, for all sequences.
void rank_task(Call& c, int level, int task) {
  alignas(64) float value[kTaskPanels * kPanel];
  Tiles tiles;
  const int panels = (c.vocab + kPanel - 1) / kPanel;
  const int from = task * kTaskPanels, to = std::min(panels, from + kTaskPanels);
  for (int b = 0; b < c.batch; ++b) {
    if (c.counts[b] == 0) continue;
    const float* base = c.base + (static_cast<size_t>(b) * c.depth + level) * c.stride;
    Part& part = c.parts[static_cast<size_t>(b) * c.tasks + task];
    part.best.width = c.width;
    part.best.count = 0;
    Vec top = splat(-std::numeric_limits<float>::infinity());
    for (int panel = from; panel < to; ++panel) {
      float* mixed = value + (panel - from) * kPanel;
      if (c.markov) {
        matmul_panel(path_job(c, b, c.expected + static_cast<size_t>(b) * c.rank, 1), panel, tiles, mixed);
        for (int n = 0; n < kPanel; ++n) mixed[n] += base[panel * kPanel + n];
      } else {
        std::memcpy(mixed, base + panel * kPanel, kPanel * sizeof(float));
      }
      const float least = part.best.least();
      bool news = part.best.count < c.width;  // also -inf and NaN fill places: every entry that is read is set
      for (int n = 0; n < kPanel; n += kLanes) top = vmax(top, load(mixed + n));
      for (int n = 0; n < kPanel; ++n) news |= mixed[n] > least;
      if (news)
        for (int n = 0; n < kPanel && panel * kPanel + n < c.vocab; ++n) part.best.offer(mixed[n], panel * kPanel + n);
    }
    float lane[kLanes];
    store(lane, top);
    part.top = lane[0];
    for (int i = 1; i < kLanes; ++i) part.top = std::max(part.top, lane[i]);
    part.excess = 0;
    if (part.top == -std::numeric_limits<float>::infinity()) continue;  // -inf - -inf is NaN, but e^-inf is 0
    Vec sum = zero();
    for (int n = 0; n < (to - from) * kPanel; n += kLanes) sum = sum + exp_negative(load(value + n) - splat(part.top));
    store(lane, sum);
    for (int i = 0; i < kLanes; ++i) part.excess += lane[i];
  }
}

void merge_task(Call& c, int level, int b) {
  if (c.counts[b] == 0) return;
  const Part* parts = &c.parts[static_cast<size_t>(b) * c.tasks];
  Shortlist best;
  best.width = c.width;
  for (int task = 0; task < c.tasks; ++task)
    for (int i = 0; i < parts[task].best.count; ++i) best.offer(parts[task].best.entry[i].value, parts[task].best.entry[i].id);
  const double top = best.entry[0].value;
  double total = 0, listed = 0;
  for (int task = 0; task < c.tasks; ++task) total += parts[task].excess * std::exp(parts[task].top - top);
  for (int w = 0; w < best.count; ++w) listed += std::exp(best.entry[w].value - top);

  int32_t* tokens = c.tokens + (static_cast<size_t>(b) * c.depth + level) * c.width;
  float* table = c.table + (static_cast<size_t>(b) * c.depth + level) * c.width * c.width;
  for (int w = 0; w < c.width; ++w) tokens[w] = c.ids ? c.ids[best.entry[w].id] : best.entry[w].id;
  if (!c.markov) {
    const double log_z = top + std::log(total);
    for (int p = 0; p < c.width; ++p)
      for (int w = 0; w < c.width; ++w)
        table[p * c.width + w] = std::min(0.0f, static_cast<float>(best.entry[w].value - log_z));
    return;
  }
  const int parents = level == 0 ? 1 : c.width;
  const float* features = c.features + static_cast<size_t>(b) * c.width * c.rank;
  float* belief = c.belief + static_cast<size_t>(b) * c.width;
  const float* base = c.base + (static_cast<size_t>(b) * c.depth + level) * c.stride;
  const double tail = std::max(total - listed, 1e-6 * total);
  double row[kMaxWidth][kMaxWidth];
  alignas(64) float acc[kMaxWidth * kPanel];
  Tiles tiles;
  for (int w = 0; w < c.width; ++w) {  // w2[chosen] . features of every parent
    matmul_panel(path_job(c, b, features, parents), best.entry[w].id / kPanel, tiles, acc);
    for (int p = 0; p < parents; ++p)
      row[p][w] = base[best.entry[w].id] + acc[p * kPanel + best.entry[w].id % kPanel];
  }
  double next[kMaxWidth] = {}, sum = 0;
  for (int p = 0; p < parents; ++p) {
    double high = top + std::log(tail), z = 0;
    for (int w = 0; w < c.width; ++w) high = std::max(high, row[p][w]);
    for (int w = 0; w < c.width; ++w) z += std::exp(row[p][w] - high);
    const double log_z = high + std::log(z + std::exp(top + std::log(tail) - high));
    for (int w = 0; w < c.width; ++w) {
      const double logp = std::min(0.0, row[p][w] - log_z);
      table[p * c.width + w] = static_cast<float>(logp);
      next[w] += std::exp(logp) * belief[p];
    }
  }
  for (int p = parents; p < c.width; ++p) std::memcpy(table + p * c.width, table, c.width * sizeof(float));
  for (int w = 0; w < c.width; ++w) sum += next[w];
  for (int w = 0; w < c.width; ++w) belief[w] = sum > 0 ? static_cast<float>(next[w] / sum) : 1.0f / c.width;
  if (level + 1 < c.depth) gather_features(c, b, level + 1, tokens, c.width, belief);
}

ffi::Error draft_head_topk(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> hidden, ffi::AnyBuffer head,
                           ffi::Buffer<ffi::S32> counts, ffi::Buffer<ffi::S32> anchor, ffi::Buffer<ffi::F32> scale,
                           ffi::RemainingArgs more, ffi::ResultBuffer<ffi::S32> tokens, ffi::ResultBuffer<ffi::F32> table,
                           int64_t outputs, int64_t format, bool has_ids, bool has_noise, bool markov, bool has_gate, int64_t rank,
                           int64_t targets, bool w1_half, int64_t path_format, int64_t threads) {
  const auto bad = [](const std::string& what) { return ffi::Error::InvalidArgument("draft_head_topk: " + what); };
  const auto hd = hidden.dimensions(), td = tokens->dimensions();
  if (hd.size() != 3 || td.size() != 3 || td[0] != hd[0] || td[1] != hd[1]) return bad("hidden is not [B, D, H]");
  Call c{};
  c.batch = static_cast<int>(hd[0]);
  c.depth = static_cast<int>(hd[1]);
  c.hidden = static_cast<int>(hd[2]);
  c.width = static_cast<int>(td[2]);
  c.vocab = static_cast<int>(outputs);
  c.rank = static_cast<int>(rank);
  c.markov = markov;
  c.w1_half = w1_half;
  c.targets = targets;
  const size_t rows = static_cast<size_t>(c.batch) * c.depth;
  if (c.width < 1 || c.width > kMaxWidth || c.width > c.vocab || counts.element_count() != hd[0] ||
      anchor.element_count() != hd[0] || scale.element_count() != hd[0] ||
      table->element_count() != rows * c.width * c.width || (markov && (rank < 1 || targets < 1)))
    return bad("shapes that the kernel does not take");
  if (head.size_bytes() != matmul_weight_bytes(format, c.hidden, outputs)) return bad("packed head of the wrong size");
  c.scale = scale.typed_data();
  c.anchor = anchor.typed_data();
  c.counts = counts.typed_data();
  c.tokens = tokens->typed_data();
  c.table = table->typed_data();
  c.head.x = hidden.typed_data();
  c.head.w = static_cast<const uint8_t*>(head.untyped_data());
  c.head.rows = static_cast<int>(rows);
  c.head.depth = c.hidden;
  c.head.outputs = c.vocab;
  c.head.format = static_cast<int>(format);
  Operands operands(more);
  if (has_ids) c.ids = operands.ints(outputs);
  if (has_noise) c.noise = operands.floats(rows * outputs);
  if (markov) {
    c.w1 = operands.bytes(static_cast<size_t>(targets) * rank * (w1_half ? 2 : 4));
    c.path.w = operands.bytes(matmul_weight_bytes(path_format, rank, outputs));
    c.path.depth = c.rank;
    c.path.outputs = c.vocab;
    c.path.format = static_cast<int>(path_format);
    if (has_gate) c.gate = operands.floats(rows * rank);
  }
  if (operands.bad() != 0) return bad("operand " + std::to_string(operands.bad()) + " is missing, too many or does not fit");

  std::memset(tokens->untyped_data(), 0, tokens->size_bytes());
  std::memset(table->untyped_data(), 0, table->size_bytes());
  bool any = false;
  for (int b = 0; b < c.batch; ++b) any |= c.counts[b] != 0;
  if (!any || rows == 0) return ffi::Error::Success();
  const int panels = (c.vocab + kPanel - 1) / kPanel;
  c.tasks = (panels + kTaskPanels - 1) / kTaskPanels;
  c.stride = static_cast<size_t>(panels) * kPanel;
  c.parts.resize(static_cast<size_t>(c.batch) * c.tasks);
  const size_t batch = c.batch;
  const bool head_splits = matmul_split_kind(format) != 0, path_splits = markov && matmul_split_kind(path_format) != 0;
  carve({{&c.head_split, head_splits ? matmul_split_floats(rows, c.hidden) : 0},
         {&c.path_split, path_splits ? 2 * batch * matmul_split_floats(c.width, rank) : 0},
         {&c.base, rows * c.stride},
         {&c.features, batch * c.width * c.rank},
         {&c.expected, batch * c.rank},
         {&c.belief, batch * c.width}});
  if (head_splits) c.head.split = reinterpret_cast<uint8_t*>(c.head_split);
  FloatEnv env;  // digits are rounded here
  if (markov)
    for (int b = 0; b < c.batch; ++b) {
      c.belief[static_cast<size_t>(b) * c.width] = 1.0f;
      gather_features(c, b, 0, c.anchor + b, 1, c.belief + static_cast<size_t>(b) * c.width);
    }

  std::vector<int> totals{head_splits ? static_cast<int>(rows) : 0, c.tasks};
  for (int level = 0; level < c.depth; ++level) totals.insert(totals.end(), {c.tasks, c.batch});
  const double work = static_cast<double>(rows) * c.vocab * (c.hidden + c.rank);
  const int workers = threads == 0 && work < 4e5 ? 1 : worker_limit(pool, static_cast<int>(threads));
  run_phases(pool, std::move(totals), workers, [&c](int phase, int begin, int end) {
    for (int i = begin; i < end; ++i) {
      if (phase == 0) {
        matmul_split(c.head, i, i + 1);
      } else if (phase == 1) {
        head_task(c, i);
      } else if (phase % 2 == 0) {
        rank_task(c, (phase - 2) / 2, i);
      } else {
        merge_task(c, (phase - 2) / 2, i);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jetspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(DraftHeadTopk, jetspec::draft_head_topk,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("outputs")
                                  .Attr<int64_t>("format")
                                  .Attr<bool>("has_ids")
                                  .Attr<bool>("has_noise")
                                  .Attr<bool>("markov")
                                  .Attr<bool>("has_gate")
                                  .Attr<int64_t>("rank")
                                  .Attr<int64_t>("targets")
                                  .Attr<bool>("w1_half")
                                  .Attr<int64_t>("path_format")
                                  .Attr<int64_t>("threads"));
