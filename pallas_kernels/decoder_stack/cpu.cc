// A whole stack of decoder layers in one call: RMSNorm, q/k/v projection, per-head norm, RoPE, tree attention, output
// projection and residual, RMSNorm, SwiGLU and residual, for the rows of a tree (or a prompt chunk, or one token) of
// each sequence. What it computes is the composition of row_invariant_matmul, tree_attention and the small steps below;
// the bits of a row depend on that row, its visible keys and the weights alone. What it saves is the time between them:
// threads are woken once a call and pass from step to step by a counter, and no intermediate leaves the caches.
//
// Ragged: sequence b has counts[b] rows, the others are not computed. All steps run on the packed rows of all sequences.
#include <string>

#include "cpu_math.h"
#include "row_invariant_matmul/kernel.h"
#include "tree_attention/kernel.h"

namespace jetspec {
namespace {

constexpr double kSerialWork = 1.5e6;  // multiply-adds of a call below which waking another thread costs more than it gives
constexpr int kMaxSegments = 3;

struct Layer {
  const float *attn_norm, *mlp_norm, *q_norm, *k_norm;
  MatmulJob qkv[kMaxSegments], o, gate_up, down;
  const float *cache_k, *cache_v;
};

struct Stack {
  int batch, rows, width, heads, kv_heads, dim, capacity, ffn, segments, total;  // total: rows of all sequences
  int q_width, qkv_width;
  float eps, scale, rope_scale;
  const float *x, *inv_freq, *final_norm;
  const int32_t *positions, *lengths, *counts;
  const uint8_t* mask;
  float *out, *new_k, *new_v, *tapped;
  int taps;
  std::vector<int64_t> tap_layer;  // by place in `tapped`; a layer may be there more than once
  std::vector<Layer> layers;
  std::vector<int32_t> first;               // packed row where a sequence begins
  std::vector<std::pair<int, int>> origin;  // of a packed row: sequence, row
  // Work buffers, rows packed.
  float *hidden, *normed, *qkv, *q, *attended, *act, *cosine, *sine;
  float* split[2];  // rows as digits for the projection under way, by kind; null where no weight is multiplied in integers
};

enum Step { kNormIn, kProject, kRotate, kAttend, kSplitAttended, kOutput, kNormMlp, kGate, kSplitAct, kDown, kSteps };

size_t kv_row(const Stack& s, size_t layer, int b, int head, int t) {
  return (((layer * s.batch + b) * s.kv_heads + head) * s.rows + t) * s.dim;
}

// Loads the packed rows, their rotations, and (tasks past the rows) clears what no row of a sequence will write.
void begin_task(const Stack& s, int task) {
  if (task < s.total) {
    const auto [b, t] = s.origin[task];
    const size_t row = static_cast<size_t>(b) * s.rows + t;
    std::memcpy(s.hidden + static_cast<size_t>(task) * s.width, s.x + row * s.width, s.width * sizeof(float));
    const size_t at = static_cast<size_t>(task) * (s.dim / 2);
    rope_angles(s.positions[row], s.inv_freq, s.dim / 2, s.rope_scale, s.cosine + at, s.sine + at);
    return;
  }
  const int b = task - s.total, used = s.counts[b];
  if (used == s.rows) return;
  const size_t row = static_cast<size_t>(b) * s.rows + used, rest = s.rows - used;
  std::memset(s.out + row * s.width, 0, rest * s.width * sizeof(float));
  std::memset(s.tapped + row * s.taps * s.width, 0, rest * s.taps * s.width * sizeof(float));
  for (size_t layer = 0; layer < s.layers.size(); ++layer)
    for (int head = 0; head < s.kv_heads; ++head) {
      std::memset(s.new_k + kv_row(s, layer, b, head, used), 0, rest * s.dim * sizeof(float));
      std::memset(s.new_v + kv_row(s, layer, b, head, used), 0, rest * s.dim * sizeof(float));
    }
}

void keep_tap(const Stack& s, int layer, int row) {
  const auto [b, t] = s.origin[row];
  float* to = s.tapped + (static_cast<size_t>(b) * s.rows + t) * s.taps * s.width;
  for (int place = 0; place < s.taps; ++place)
    if (s.tap_layer[place] == layer)
      std::memcpy(to + static_cast<size_t>(place) * s.width, s.hidden + static_cast<size_t>(row) * s.width,
                  s.width * sizeof(float));
}

void rotate_row(const Stack& s, int index, int row) {
  const Layer& layer = s.layers[index];
  const auto [b, t] = s.origin[row];
  const float* from = s.qkv + static_cast<size_t>(row) * s.qkv_width;
  const float *cosine = s.cosine + static_cast<size_t>(row) * (s.dim / 2), *sine = s.sine + static_cast<size_t>(row) * (s.dim / 2);
  for (int head = 0; head < s.heads; ++head, from += s.dim)
    rotate(from, layer.q_norm, cosine, sine, s.dim, s.eps, s.q + static_cast<size_t>(row) * s.q_width + head * s.dim);
  for (int head = 0; head < s.kv_heads; ++head, from += s.dim)
    rotate(from, layer.k_norm, cosine, sine, s.dim, s.eps, s.new_k + kv_row(s, index, b, head, t));
  for (int head = 0; head < s.kv_heads; ++head, from += s.dim)
    std::memcpy(s.new_v + kv_row(s, index, b, head, t), from, s.dim * sizeof(float));
}

// Row `row` of what these weights multiply, as digits, once for each kind that one of them wants.
void split_row(const MatmulJob* jobs, int count, int row) {
  for (int j = 0; j < count; ++j) {
    bool done = jobs[j].split == nullptr;
    for (int i = 0; i < j; ++i) done |= jobs[i].split == jobs[j].split;
    if (!done) matmul_split(jobs[j], row, row + 1);
  }
}

AttentionJob<float> attention_job(const Stack& s, int index) {
  AttentionJob<float> job{};
  job.q = s.q;
  job.cache_k = s.layers[index].cache_k;
  job.cache_v = s.layers[index].cache_v;
  job.new_k = s.new_k + kv_row(s, index, 0, 0, 0);
  job.new_v = s.new_v + kv_row(s, index, 0, 0, 0);
  job.lengths = s.lengths;
  job.mask = s.mask;
  job.out = s.attended;
  job.batch = s.batch;
  job.heads = s.kv_heads;
  job.group = s.heads / s.kv_heads;
  job.rows = s.rows;
  job.dim = s.dim;
  job.capacity = s.capacity;
  job.scale = s.scale;
  job.row_stride = s.q_width;
  job.head_stride = s.dim;
  job.counts = s.counts;
  job.first = s.first.data();
  return job;
}

#if defined(JETSPEC_PROFILE)
double step_seconds[kSteps + 2];  // the steps of all layers, begin, final norm; summed over calls
#endif

void run(ffi::ThreadPool& pool, Stack& s, int workers) {
  const int layers = static_cast<int>(s.layers.size());
  AttentionJob<float> plan = attention_job(s, 0);
  attention_plan(plan, workers);
  std::vector<int> totals{s.total + s.batch};
  for (int i = 0; i < layers; ++i) {
    const Layer& layer = s.layers[i];
    int projections = 0;
    for (int j = 0; j < s.segments; ++j) projections += matmul_tasks(layer.qkv[j]);
    const auto splits = [&s](const MatmulJob& job) { return job.split == nullptr ? 0 : s.total; };
    totals.insert(totals.end(), {s.total, projections, s.total, attention_tasks(plan), splits(layer.o), matmul_tasks(layer.o),
                                 s.total, matmul_tasks(layer.gate_up), splits(layer.down), matmul_tasks(layer.down)});
  }
  totals.push_back(s.total);  // the final norm

#if defined(JETSPEC_PROFILE)
  std::vector<double> seconds(totals.size());
  profile_into = seconds.data();
#endif
  run_phases(pool, std::move(totals), workers, [&s, &plan, layers](int phase, int begin, int end) {
    if (phase == 0) {
      for (int i = begin; i < end; ++i) begin_task(s, i);
      return;
    }
    const int index = (phase - 1) / kSteps, step = (phase - 1) % kSteps;
    const auto row = [&s](float* buffer, int r) { return buffer + static_cast<size_t>(r) * s.width; };
    if (index == layers) {
      for (int r = begin; r < end; ++r) {
        keep_tap(s, layers - 1, r);
        float* to = s.out + (static_cast<size_t>(s.origin[r].first) * s.rows + s.origin[r].second) * s.width;
        if (s.final_norm) {
          rms_norm(row(s.hidden, r), s.final_norm, s.width, s.eps, to);
        } else {
          std::memcpy(to, row(s.hidden, r), s.width * sizeof(float));
        }
      }
      return;
    }
    const Layer& layer = s.layers[index];
    switch (step) {
      case kNormIn:
        for (int r = begin; r < end; ++r) {
          keep_tap(s, index - 1, r);
          rms_norm(row(s.hidden, r), layer.attn_norm, s.width, s.eps, row(s.normed, r));
          split_row(layer.qkv, s.segments, r);
        }
        break;
      case kProject:
        for (int j = 0, at = 0; j < s.segments && at < end; ++j) {
          const int tasks = matmul_tasks(layer.qkv[j]);
          const int from = std::max(begin, at), to = std::min(end, at + tasks);
          if (from < to) matmul_run(layer.qkv[j], from - at, to - at);
          at += tasks;
        }
        break;
      case kRotate:
        for (int r = begin; r < end; ++r) rotate_row(s, index, r);
        break;
      case kAttend: {
        AttentionJob<float> job = attention_job(s, index);
        job.plan = plan.plan;
        attention_run(job, begin, end);
        break;
      }
      case kSplitAttended:
        for (int r = begin; r < end; ++r) split_row(&layer.o, 1, r);
        break;
      case kOutput:
        matmul_run(layer.o, begin, end);
        break;
      case kNormMlp:
        for (int r = begin; r < end; ++r) {
          rms_norm(row(s.hidden, r), layer.mlp_norm, s.width, s.eps, row(s.normed, r));
          split_row(&layer.gate_up, 1, r);
        }
        break;
      case kGate:
        matmul_run(layer.gate_up, begin, end);
        break;
      case kSplitAct:
        for (int r = begin; r < end; ++r) split_row(&layer.down, 1, r);
        break;
      case kDown:
        matmul_run(layer.down, begin, end);
        break;
    }
  });
#if defined(JETSPEC_PROFILE)
  profile_into = nullptr;
  for (size_t i = 0; i < seconds.size(); ++i)
    step_seconds[i == 0 ? kSteps : i + 1 == seconds.size() ? kSteps + 1 : (i - 1) % kSteps] += seconds[i];
#endif
}

ffi::Error decoder_stack(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> positions,
                         ffi::Buffer<ffi::F32> inv_freq, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> counts,
                         ffi::Buffer<ffi::PRED> mask, ffi::RemainingArgs more, ffi::ResultBuffer<ffi::F32> out,
                         ffi::ResultBuffer<ffi::F32> new_k, ffi::ResultBuffer<ffi::F32> new_v,
                         ffi::ResultBuffer<ffi::F32> tapped, int64_t layers, int64_t heads, int64_t kv_heads,
                         int64_t dim, int64_t ffn, int64_t capacity, float eps, float scale, float rope_scale,
                         bool final_norm, bool qk_norm, bool qkv_bias, bool o_bias, bool gate_up_bias, bool down_bias,
                         ffi::Span<const int64_t> segments, ffi::Span<const int64_t> formats,
                         ffi::Span<const int64_t> taps, int64_t threads) {
  const auto bad = [](const std::string& what) { return ffi::Error::InvalidArgument("decoder_stack: " + what); };
  const auto xd = x.dimensions();
  if (xd.size() != 3) return bad("x is not [B, T, H]");
  Stack s{};
  s.batch = static_cast<int>(xd[0]);
  s.rows = static_cast<int>(xd[1]);
  s.width = static_cast<int>(xd[2]);
  s.heads = static_cast<int>(heads);
  s.kv_heads = static_cast<int>(kv_heads);
  s.dim = static_cast<int>(dim);
  s.capacity = static_cast<int>(capacity);
  s.ffn = static_cast<int>(ffn);
  s.segments = static_cast<int>(segments.size());
  s.q_width = s.heads * s.dim;
  s.qkv_width = s.q_width + 2 * s.kv_heads * s.dim;
  s.eps = eps;
  s.scale = scale;
  s.rope_scale = rope_scale;
  s.taps = static_cast<int>(taps.size());
  const size_t cells = static_cast<size_t>(s.batch) * s.rows;
  const size_t kv = static_cast<size_t>(layers) * cells * kv_heads * dim;
  const size_t cache = static_cast<size_t>(s.batch) * kv_heads * capacity * dim;
  int64_t outputs = 0;
  for (int64_t n : segments) outputs += n;
  if (s.segments < 1 || s.segments > kMaxSegments || outputs != s.qkv_width || dim < 2 || dim > kMaxHeadDim || dim % 2 != 0 ||
      kv_heads < 1 || heads % kv_heads != 0 || ffn % kPanel != 0 || layers < 1 ||
      static_cast<int64_t>(formats.size()) != layers * (s.segments + 3))
    return bad("geometry that the kernel does not take");
  if (positions.element_count() != cells || inv_freq.element_count() != static_cast<size_t>(dim / 2) ||
      lengths.element_count() != xd[0] || counts.element_count() != xd[0] || mask.element_count() != cells * s.rows ||
      out->element_count() != x.element_count() || new_k->element_count() != kv || new_v->element_count() != kv ||
      tapped->element_count() != cells * s.taps * s.width)
    return bad("shapes do not fit");
  s.x = x.typed_data();
  s.positions = positions.typed_data();
  s.inv_freq = inv_freq.typed_data();
  s.lengths = lengths.typed_data();
  s.counts = counts.typed_data();
  s.mask = reinterpret_cast<const uint8_t*>(mask.untyped_data());
  s.out = out->typed_data();
  s.new_k = new_k->typed_data();
  s.new_v = new_v->typed_data();
  s.tapped = tapped->typed_data();
  s.tap_layer.assign(taps.begin(), taps.end());
  for (int64_t tap : taps)
    if (tap < 0 || tap >= layers) return bad("a tap is no layer");
  if (cells == 0) return ffi::Error::Success();

  double keys = 0;
  for (int b = 0; b < s.batch; ++b) {
    if (s.counts[b] < 0 || s.counts[b] > s.rows)
      return bad("count " + std::to_string(s.counts[b]) + " of sequence " + std::to_string(b) + " is outside 0.." +
                 std::to_string(s.rows));
    if (s.lengths[b] < 0 || s.lengths[b] > s.capacity)
      return bad("length " + std::to_string(s.lengths[b]) + " of sequence " + std::to_string(b) + " is outside 0.." +
                 std::to_string(s.capacity));
    s.first.push_back(s.total);
    for (int t = 0; t < s.counts[b]; ++t) s.origin.emplace_back(b, t);
    s.total += s.counts[b];
    keys += static_cast<double>(s.counts[b]) * (s.lengths[b] + s.counts[b]);
  }

  const size_t m = s.total;
  const size_t widest = std::max<size_t>({static_cast<size_t>(s.width), static_cast<size_t>(s.q_width), static_cast<size_t>(ffn)});
  size_t split[2] = {};
  for (int64_t form : formats)
    if (const int kind = matmul_split_kind(form); kind != 0) split[kind - 1] = matmul_split_floats(m, widest);
  carve({{&s.split[0], split[0]},
         {&s.split[1], split[1]},
         {&s.hidden, m * s.width},
         {&s.normed, m * s.width},
         {&s.qkv, m * s.qkv_width},
         {&s.q, m * s.q_width},
         {&s.attended, m * s.q_width},
         {&s.act, m * s.ffn},
         {&s.cosine, m * dim / 2},
         {&s.sine, m * dim / 2}});

  Operands operands(more);
  if (final_norm) s.final_norm = operands.floats(s.width);
  const int64_t* format = formats.begin();
  const auto matmul = [&](const float* from, size_t depth, size_t n, bool bias, float* to, size_t stride, bool gated,
                          const float* residual) {
    MatmulJob job{from, operands.bytes(matmul_weight_bytes(*format, depth, n)), to, nullptr, residual, s.total, static_cast<int>(depth),
                  static_cast<int>(n), static_cast<int>(*format), gated, stride};
    const int kind = matmul_split_kind(*format++);
    if (kind != 0) job.split = reinterpret_cast<uint8_t*>(s.split[kind - 1]);
    if (bias) job.bias = operands.floats(n);
    return job;
  };
  s.layers.resize(layers);
  for (Layer& layer : s.layers) {
    layer.attn_norm = operands.floats(s.width);
    layer.mlp_norm = operands.floats(s.width);
    layer.q_norm = qk_norm ? operands.floats(dim) : nullptr;
    layer.k_norm = qk_norm ? operands.floats(dim) : nullptr;
    size_t at = 0;
    for (int j = 0; j < s.segments; ++j) {
      layer.qkv[j] = matmul(s.normed, s.width, segments[j], qkv_bias, s.qkv + at, s.qkv_width, false, nullptr);
      at += segments[j];
    }
    layer.o = matmul(s.attended, s.q_width, s.width, o_bias, s.hidden, s.width, false, s.hidden);
    layer.gate_up = matmul(s.normed, s.width, 2 * s.ffn, gate_up_bias, s.act, s.ffn, true, nullptr);
    layer.down = matmul(s.act, s.ffn, s.width, down_bias, s.hidden, s.width, false, s.hidden);
    layer.cache_k = operands.floats(cache);
    layer.cache_v = operands.floats(cache);
  }
  if (operands.bad() != 0)
    return bad("operand " + std::to_string(operands.bad()) + " of " + std::to_string(more.size()) +
               " of the layers is missing, too many or does not fit");

  const double per_row = static_cast<double>(s.width) * (s.qkv_width + s.q_width + 3.0 * s.ffn);
  const double work = layers * (m * per_row + 2.0 * keys * s.q_width);
  const int workers = threads == 0 && work < kSerialWork ? 1 : worker_limit(pool, static_cast<int>(threads));
  run(pool, s, workers);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jetspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(DecoderStack, jetspec::decoder_stack,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("layers")
                                  .Attr<int64_t>("heads")
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<int64_t>("dim")
                                  .Attr<int64_t>("ffn")
                                  .Attr<int64_t>("capacity")
                                  .Attr<float>("eps")
                                  .Attr<float>("scale")
                                  .Attr<float>("rope_scale")
                                  .Attr<bool>("final_norm")
                                  .Attr<bool>("qk_norm")
                                  .Attr<bool>("qkv_bias")
                                  .Attr<bool>("o_bias")
                                  .Attr<bool>("gate_up_bias")
                                  .Attr<bool>("down_bias")
                                  .Attr<xla::ffi::Span<const int64_t>>("segments")
                                  .Attr<xla::ffi::Span<const int64_t>>("formats")
                                  .Attr<xla::ffi::Span<const int64_t>>("taps")
                                  .Attr<int64_t>("threads"));

#if defined(JETSPEC_PROFILE)
// Seconds by step since the last call (norm, qkv, rotate, attention, split, o, norm, gate_up, split, down, begin, final
// norm), then cleared.
extern "C" void DecoderStackProfile(double* to) {
  for (double& seconds : jetspec::step_seconds) {
    *to++ = seconds;
    seconds = 0;
  }
}

// Multiply-adds a second of the calling thread with all operands in registers: what the kernels could reach at most.
extern "C" double PeakMultiplyAdds() {
  using namespace jetspec;
  constexpr int kChains = 14, kSteps = 1 << 18;
  Vec sum[kChains];
  for (Vec& chain : sum) chain = splat(1.0f);
  const Vec x = splat(0.999f), y = splat(1e-3f);
  double best = 0;
  for (int repeat = 0; repeat < 8; ++repeat) {
    const double start = profile_now();
    for (int step = 0; step < kSteps; ++step)
#pragma GCC unroll 16
      for (int c = 0; c < kChains; ++c) sum[c] = fma(sum[c], x, y);
    best = std::max(best, static_cast<double>(kSteps) * kChains * kLanes / (profile_now() - start));
  }
  volatile float keep = 0;
  for (Vec& chain : sum) {
    float lane[kLanes];
    store(lane, chain);
    keep = keep + lane[0];
  }
  return best;
}
#endif
