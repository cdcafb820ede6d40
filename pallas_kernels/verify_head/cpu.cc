// LM head and greedy choice in one pass over the packed weight: per row the id of the largest logit (the lowest among
// equals; the first NaN, where there is one), that logit, and its margin over the second largest. The (rows, vocabulary)
// logits are never stored. The sums are row_invariant_matmul's, so a choice is that of the stored logits.
#include <limits>
#include <string>

#include "cpu_math.h"
#include "row_invariant_matmul/kernel.h"

// A build parameter (tuning.py); it changes no bit, as maxima of parts compare exactly and parts keep the order of ids.
#ifndef JETSPEC_VERIFY_HEAD_TASK_PANELS
#define JETSPEC_VERIFY_HEAD_TASK_PANELS 12
#endif
static_assert(JETSPEC_VERIFY_HEAD_TASK_PANELS >= 1, "TASK_PANELS is at least 1");

namespace jetspec {
namespace {

constexpr int kTaskPanels = JETSPEC_VERIFY_HEAD_TASK_PANELS;  // panels of 32 outputs of a task

struct Best {
  float first, second;
  int32_t id;  // -1: nothing seen
};

// In the order of ids. A NaN is larger than any number, as for jnp.argmax.
inline void offer(Best& best, float value, int32_t id) {
  const bool beats = best.id < 0 || (best.first == best.first && !(value <= best.first));
  if (beats) {
    if (best.id >= 0) best.second = best.first;
    best.first = value;
    best.id = id;
  } else if (!(value <= best.second)) {
    best.second = value;
  }
}

ffi::Error verify_head(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> hidden, ffi::AnyBuffer w,
                       ffi::Buffer<ffi::S32> counts, ffi::ResultBuffer<ffi::S32> ids, ffi::ResultBuffer<ffi::F32> best,
                       ffi::ResultBuffer<ffi::F32> margin, int64_t format, int64_t outputs, int64_t threads) {
  const auto bad = [](const std::string& what) { return ffi::Error::InvalidArgument("verify_head: " + what); };
  const auto hd = hidden.dimensions();
  if (hd.size() != 3 || counts.element_count() != hd[0] || outputs < 1) return bad("hidden is not [B, T, H]");
  const size_t cells = hd[0] * hd[1], depth = hd[2];
  if (ids->element_count() != cells || best->element_count() != cells || margin->element_count() != cells)
    return bad("results do not fit");
  if (w.size_bytes() != matmul_weight_bytes(format, depth, outputs)) return bad("packed weight of the wrong size");

  std::vector<size_t> cell;  // of a packed row
  for (int64_t b = 0; b < hd[0]; ++b) {
    const int32_t count = counts.typed_data()[b];
    if (count < 0 || count > hd[1])
      return bad("count " + std::to_string(count) + " of sequence " + std::to_string(b) + " is outside 0.." +
                 std::to_string(hd[1]));
    for (int32_t t = 0; t < count; ++t) cell.push_back(b * hd[1] + t);
  }
  std::memset(ids->untyped_data(), 0, ids->size_bytes());
  std::memset(best->untyped_data(), 0, best->size_bytes());
  std::memset(margin->untyped_data(), 0, margin->size_bytes());
  const size_t rows = cell.size();
  if (rows == 0) return ffi::Error::Success();

  const float* x = hidden.typed_data();
  std::vector<float> packed;
  if (rows != cells) {  // ragged: the matmul wants its rows beside each other
    packed.resize(rows * depth);
    for (size_t r = 0; r < rows; ++r) std::memcpy(&packed[r * depth], x + cell[r] * depth, depth * sizeof(float));
    x = packed.data();
  }
  const int panels = static_cast<int>((outputs + kPanel - 1) / kPanel);
  const int tasks = (panels + kTaskPanels - 1) / kTaskPanels;
  std::vector<Best> found(static_cast<size_t>(tasks) * rows);  // [task][row]
  MatmulJob job{};
  job.w = static_cast<const uint8_t*>(w.untyped_data());
  job.depth = static_cast<int>(depth);
  job.outputs = static_cast<int>(outputs);
  job.format = static_cast<int>(format);
  job.x = x;
  job.rows = static_cast<int>(rows);
  if (matmul_split_kind(format) != 0) job.split = reinterpret_cast<uint8_t*>(thread_scratch(matmul_split_floats(rows, depth)));

  const auto search = [&](int begin, int end) {
    alignas(64) float acc[kMaxPanelRows * kPanel];
    Tiles tiles;
    for (int task = begin; task < end; ++task) {
      Best* mine = &found[task * rows];
      for (size_t r = 0; r < rows; ++r) mine[r] = {0.0f, -std::numeric_limits<float>::infinity(), -1};
      for (int panel = task * kTaskPanels; panel < std::min(panels, (task + 1) * kTaskPanels); ++panel) {
        const int first = panel * kPanel, width = std::min(kPanel, static_cast<int>(outputs) - first);
        for (size_t r0 = 0; r0 < rows; r0 += kMaxPanelRows) {
          MatmulJob part = job;
          part.x += r0 * depth;
          if (part.split != nullptr) part.split += matmul_split_bytes(r0, depth);
          part.rows = static_cast<int>(std::min<size_t>(kMaxPanelRows, rows - r0));
          matmul_panel(part, panel, tiles, acc);
          for (int r = 0; r < part.rows; ++r) {
            Best& row = mine[r0 + r];
            const float* value = acc + r * kPanel;
            bool news = row.id < 0;
            for (int n = 0; n < width; ++n) news |= !(value[n] <= row.second);
            if (news)
              for (int n = 0; n < width; ++n) offer(row, value[n], first + n);
          }
        }
      }
    }
  };
  const auto merge = [&](int begin, int end) {
    for (int r = begin; r < end; ++r) {
      Best all{0.0f, -std::numeric_limits<float>::infinity(), -1};
      for (int task = 0; task < tasks; ++task) {
        const Best& part = found[task * rows + r];
        offer(all, part.first, part.id);
        if (!(part.second <= all.second)) all.second = part.second;
      }
      ids->typed_data()[cell[r]] = all.id;
      best->typed_data()[cell[r]] = all.first;
      margin->typed_data()[cell[r]] = all.first - all.second;
    }
  };
  const double work = static_cast<double>(rows) * depth * outputs;
  const int workers = threads == 0 && work < 4e5 ? 1 : worker_limit(pool, static_cast<int>(threads));
  const int all = static_cast<int>(rows);
  run_phases(pool, {job.split == nullptr ? 0 : all, tasks, all}, workers, [&](int phase, int begin, int end) {
    if (phase == 0) {
      matmul_split(job, begin, end);
    } else if (phase == 1) {
      search(begin, end);
    } else {
      merge(begin, end);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jetspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(VerifyHead, jetspec::verify_head,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("outputs")
                                  .Attr<int64_t>("threads"));
