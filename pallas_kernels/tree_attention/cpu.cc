// Attention of tree rows over a committed prefix (cache) and the rows themselves, order-true: the result of a row is a
// function of its query and of the ordered list of the keys it sees (cache slots, then its visible new rows), and of
// nothing else. Not of the split of that list between cache and new rows, the other rows, the batch, the capacity, the
// threads or the vector width:
//   score   16 partial sums over h (lane l takes h = l, l + 16, ... with FMA), folded by halves 8, 4, 2, 1; * scale
//   max     exact in any order
//   p       exp(score - max), one instruction sequence for every key
//   total   16 partial sums over the list (lane = index mod 16), folded by halves 8, 4, 2, 1
//   output  one accumulator per lane of h, FMA over the list from left to right; divided by total
// A key that a row does not see is not in its list: it is never multiplied by zero, so a NaN or an infinity reaches
// only the rows that see it. Slots at or after the length are not read.
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>

#include "tree_attention/kernel.h"

#include "cpu_math.h"

// Build parameters (tuning.py): none changes a bit, as a row's sums are in the order of its list whatever the blocks are.
#ifndef JETSPEC_TREE_ATTENTION_TILE_ROWS
#if JETSPEC_FORM == 3 || JETSPEC_FORM == 1
#define JETSPEC_TREE_ATTENTION_TILE_ROWS 6
#elif JETSPEC_FORM == 2
#define JETSPEC_TREE_ATTENTION_TILE_ROWS 3
#else
#define JETSPEC_TREE_ATTENTION_TILE_ROWS 2
#endif
#endif
#ifndef JETSPEC_TREE_ATTENTION_COLUMNS
#define JETSPEC_TREE_ATTENTION_COLUMNS 4
#endif
#ifndef JETSPEC_TREE_ATTENTION_VALUE_BLOCK
#define JETSPEC_TREE_ATTENTION_VALUE_BLOCK 64
#endif
#ifndef JETSPEC_TREE_ATTENTION_FEW_ROWS_BLOCK
#define JETSPEC_TREE_ATTENTION_FEW_ROWS_BLOCK 32
#endif
#ifndef JETSPEC_TREE_ATTENTION_LEAD
#define JETSPEC_TREE_ATTENTION_LEAD 64
#endif
#ifndef JETSPEC_TREE_ATTENTION_LOCALITY
#define JETSPEC_TREE_ATTENTION_LOCALITY 2
#endif
#ifndef JETSPEC_TREE_ATTENTION_SCORE_KB
#define JETSPEC_TREE_ATTENTION_SCORE_KB 384
#endif
#ifndef JETSPEC_TREE_ATTENTION_SPLIT_ROWS
#define JETSPEC_TREE_ATTENTION_SPLIT_ROWS 12
#endif
#ifndef JETSPEC_TREE_ATTENTION_SPLIT_KEYS
#define JETSPEC_TREE_ATTENTION_SPLIT_KEYS 64
#endif

namespace jetspec {
namespace {

constexpr int kWide = 16;  // lanes of the fixed, virtual vector; a multiple of kLanes
constexpr int kParts = kWide / kLanes;
constexpr int kMaxColumns = JETSPEC_TREE_ATTENTION_COLUMNS;  // vectors of h accumulated at once
constexpr int kTileRows = JETSPEC_TREE_ATTENTION_TILE_ROWS;
constexpr int kValueBlock = JETSPEC_TREE_ATTENTION_VALUE_BLOCK;  // keys whose values all row tiles share: 16 KB at h = 64
// The same for a single tile, which shares nothing: between two prefetches.
constexpr int kFewRowsBlock = JETSPEC_TREE_ATTENTION_FEW_ROWS_BLOCK;
constexpr int kLead = JETSPEC_TREE_ATTENTION_LEAD;  // keys that the prefetch runs ahead
constexpr size_t kScoreFloats = JETSPEC_TREE_ATTENTION_SCORE_KB * 256;  // scores kept per unit of work: a part of L2
constexpr int kSplitRows = JETSPEC_TREE_ATTENTION_SPLIT_ROWS;  // fewer a unit do not pay for reading K and V again
constexpr int kManyRows = 96;  // query rows from which units are parts of the rows, not of keys and columns
constexpr int kSplitKeys = JETSPEC_TREE_ATTENTION_SPLIT_KEYS;  // fewer keys than this are not shared between threads
constexpr double kSerialCost = 24e3;  // estimated cycles up to which the calling thread works alone
static_assert(kValueBlock >= kWide && kValueBlock % kWide == 0, "VALUE_BLOCK is a multiple of 16");
static_assert(kFewRowsBlock >= kWide && kFewRowsBlock % kWide == 0 && kFewRowsBlock <= kValueBlock,
              "FEW_ROWS_BLOCK is a multiple of 16 and at most VALUE_BLOCK");
static_assert(kTileRows >= 2 && kTileRows <= 8 && kMaxColumns >= 1 && kMaxColumns <= 4,
              "TILE_ROWS is 2 to 8 and COLUMNS 1 to 4");
static_assert(kLead >= 1 && kScoreFloats >= 1 && kSplitRows >= 1 && kSplitKeys >= 0, "a build parameter is too small");

// ---- Elements ------------------------------------------------------------------------------------------------------
struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}
inline Vec fetch(const float* p) { return load(p); }
inline Vec fetch(const Bf16* p) {
#if JETSPEC_FORM == 3
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#elif JETSPEC_FORM == 2
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#else
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = widen(p[i]);
  return load(wide);
#endif
}
inline void narrow(float x, float* y) { *y = x; }
inline void narrow(float x, Bf16* y) {  // to nearest, ties to even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  y->bits = x != x ? static_cast<uint16_t>((bits >> 16) | 0x40)
                   : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// ---- 16 lanes ------------------------------------------------------------------------------------------------------
struct Wide {
  Vec part[kParts];
};

inline float fold_halves(const float* lane) {
  float eight[8], four[4];
  for (int i = 0; i < 8; ++i) eight[i] = lane[i] + lane[i + 8];
  for (int i = 0; i < 4; ++i) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// out[i] = fold of a[i], for 16 vectors. Addition commutes, so each vector is folded by the same sums in every lane.
inline void fold16(const Wide (&a)[kWide], float* out, float scale) {
#if JETSPEC_FORM == 3
  const __m512i by8 = _mm512_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
  const __m512i by4 = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  const __m512i by1 = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
  Vec b[8], c[4], d[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const Vec x = a[i].part[0], y = a[i + 8].part[0];
    b[i] = _mm512_mask_blend_ps(0xFF00, x, y) + _mm512_permutex2var_ps(x, by8, y);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    c[i] = _mm512_mask_blend_ps(0xF0F0, b[i], b[i + 4]) + _mm512_permutex2var_ps(b[i], by4, b[i + 4]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    d[i] = _mm512_mask_blend_ps(0xCCCC, c[i], c[i + 2]) + _mm512_shuffle_ps(c[i], c[i + 2], 0x4E);
  const Vec e = _mm512_mask_blend_ps(0xAAAA, d[0], d[1]) + _mm512_permutex2var_ps(d[0], by1, d[1]);
  store(out, e * splat(scale));
#elif JETSPEC_FORM == 2
  for (int i = 0; i < kWide; i += 4) {
    __m128 four[4];
    for (int j = 0; j < 4; ++j) {
      const __m256 eight = a[i + j].part[0] + a[i + j].part[1];
      four[j] = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    }
    const __m128 x = _mm_movelh_ps(four[0], four[1]) + _mm_movehl_ps(four[1], four[0]);
    const __m128 y = _mm_movelh_ps(four[2], four[3]) + _mm_movehl_ps(four[3], four[2]);
    const __m128 sum = _mm_shuffle_ps(x, y, 0x88) + _mm_shuffle_ps(x, y, 0xDD);
    _mm_storeu_ps(out + i, sum * _mm_set1_ps(scale));
  }
#else
  for (int i = 0; i < kWide; ++i) {
    float lane[kWide];
    for (int part = 0; part < kParts; ++part) store(lane + part * kLanes, a[i].part[part]);
    out[i] = fold_halves(lane) * scale;
  }
#endif
}

// ---- Prefetch ------------------------------------------------------------------------------------------------------
// Keys or values that will be read: `keys` times `lines` cache lines, `pitch` bytes apart.
struct Run {
  const char* at;
  size_t pitch;
  int lines, keys;
};

// Each layer finds its keys and values in memory, in runs too short for the hardware's prefetchers. So the work asks
// for as many keys as it passes, kLead keys ahead, through the runs in the order of their use. Evenly in time, as a
// core has few misses under way at once: the softmax asks for a quarter of its keys, the values for three quarters.
class Ahead {
 public:
  void add(const Run& run) {
    if (run.keys > 0) runs_[count_++] = run;
  }
  void advance(int keys) {
    while (keys > 0 && run_ < count_) {
      const Run& run = runs_[run_];
      const int end = std::min(run.keys, key_ + keys), lines = run.lines;
      const size_t pitch = run.pitch;
      const char* at = run.at + key_ * pitch;
      for (int key = key_; key < end; ++key, at += pitch)
        for (int i = 0; i < lines; ++i) __builtin_prefetch(at + i * 64, 0, JETSPEC_TREE_ATTENTION_LOCALITY);
      keys -= end - key_;
      key_ = end;
      if (end == run.keys) {
        key_ = 0;
        ++run_;
      }
    }
  }

 private:
  Run runs_[3];
  int count_ = 0, run_ = 0, key_ = 0;
};

// ---- Scores --------------------------------------------------------------------------------------------------------
// C: steps of 16 when known to the compiler, else 0. The sums are the same either way.

// Scores of 16 keys, `padded` elements each, for one query.
template <int C, typename E>
inline void score16(const float* q, int padded, const E* keys, float scale, float* out) {
  Wide sums[kWide];
  const int width = C > 0 ? C * kWide : padded;
  for (int part = 0; part < kParts; ++part) {
    const int at = part * kLanes;
    const Vec first = load(q + at);
#pragma GCC unroll 16
    for (int i = 0; i < kWide; ++i) sums[i].part[part] = first * fetch(keys + i * width + at);
#pragma GCC unroll 8
    for (int c = kWide; c < width; c += kWide) {
      const Vec query = load(q + c + at);
#pragma GCC unroll 16
      for (int i = 0; i < kWide; ++i)
        sums[i].part[part] = fma(query, fetch(keys + i * width + c + at), sums[i].part[part]);
    }
  }
  fold16(sums, out, scale);
}

// Scores of 16 keys for all rows, while `keys` more are asked for.
template <typename E>
void score_tile(const float* q, int rows, int padded, const E* tile, float scale, float* out, size_t stride, int keys,
                Ahead& ahead) {
  for (int r = 0; r < rows; ++r, q += padded, out += stride) {
    ahead.advance(keys * (r + 1) / rows - keys * r / rows);
    if (padded == 4 * kWide) {
      score16<4>(q, padded, tile, scale, out);
    } else {
      score16<0>(q, padded, tile, scale, out);
    }
  }
}

// The tile of 16 keys that begins at k; a copy with zeros behind the last where there are fewer, not to read on.
template <typename E>
const E* whole_tile(const E* k, int count, int padded, E* spare) {
  if (count >= kWide) return k;
  const size_t used = static_cast<size_t>(count) * padded;
  std::memcpy(spare, k, used * sizeof(E));
  std::memset(spare + used, 0, (static_cast<size_t>(kWide) * padded - used) * sizeof(E));
  return spare;
}

// Appends the scores that a row sees; up to 16 floats behind them may be written.
inline int append_visible(const float* scores, uint32_t visible, float* to) {
#if JETSPEC_FORM == 3
  store(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(visible), load(scores)));
  return __builtin_popcount(visible);
#else
  int count = 0;
  for (int i = 0; i < kWide; ++i) {
    to[count] = scores[i];
    count += visible >> i & 1;
  }
  return count;
#endif
}

// ---- Weighted values -----------------------------------------------------------------------------------------------
// acc[r][..] += p[r][j] * v[j] for j = 0 .. count - 1 in this order. list: which value is the j-th, or null.
template <int R, int C, typename E>
void values(const float* p, size_t stride, const E* v, const int* list, int count, int padded, float* acc) {
  Vec a[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) a[r][c] = load(acc + static_cast<size_t>(r) * padded + c * kLanes);
  for (int j = 0; j < count; ++j) {
    const E* value = v + static_cast<size_t>(list ? list[j] : j) * padded;
    Vec b[C];
    for (int c = 0; c < C; ++c) b[c] = fetch(value + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec s = splat(p[r * stride + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) a[r][c] = fma(s, b[c], a[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(acc + static_cast<size_t>(r) * padded + c * kLanes, a[r][c]);
}

// The same for `columns` elements of the values.
template <int R, typename E>
void values_columns(const float* p, size_t stride, const E* v, const int* list, int count, int padded, int columns,
                    float* acc) {
  int c = 0;
  for (; c + kMaxColumns * kLanes <= columns; c += kMaxColumns * kLanes)
    values<R, kMaxColumns>(p, stride, v + c, list, count, padded, acc + c);
  for (; c + 2 * kLanes <= columns; c += 2 * kLanes)
    values<R, 2>(p, stride, v + c, list, count, padded, acc + c);
  for (; c < columns; c += kLanes)
    for (int r = 0; r < R; ++r)
      values<1, 1>(p + r * stride, stride, v + c, list, count, padded, acc + static_cast<size_t>(r) * padded + c);
}

// The same for any number of rows, in tiles of 6, 3, 2 and 1: each is a form to compile, and 2 rows still hide the
// latency of the FMA.
template <typename E>
void values_rows(int rows, const float* p, size_t stride, const E* v, const int* list, int count, int padded,
                 int columns, float* acc, Ahead& ahead) {
  const int asked = count * 3 / 4;
  for (int r = 0, size; r < rows; r += size) {
    const int left = rows - r;
    size = left >= kTileRows ? kTileRows : left >= 3 && left != 4 ? 3 : left >= 2 ? 2 : 1;
    ahead.advance(asked * (r + size) / rows - asked * r / rows);
    const auto run = [&](auto tile) {
      values_columns<decltype(tile)::value>(p + r * stride, stride, v, list, count, padded, columns,
                                            acc + static_cast<size_t>(r) * padded);
    };
    if (size == kTileRows) {
      run(std::integral_constant<int, kTileRows>());
    } else if (size == 3) {
      run(std::integral_constant<int, 3>());
    } else if (size == 2) {
      run(std::integral_constant<int, 2>());
    } else {
      run(std::integral_constant<int, 1>());
    }
  }
}

// ---- Softmax -------------------------------------------------------------------------------------------------------
// The largest of the scores of a row. Fills them up to a multiple of 16 with minus infinity: p = +0 changes nothing.
inline float largest(float* s, int count) {
  const int end = (count + kWide - 1) / kWide * kWide;
  const float low = -std::numeric_limits<float>::infinity();
  for (int j = count; j < end; ++j) s[j] = low;
  Vec top[kParts];
  for (int part = 0; part < kParts; ++part) top[part] = splat(low);
  for (int j = 0; j < end; j += kWide)
    for (int part = 0; part < kParts; ++part) top[part] = vmax(top[part], load(s + j + part * kLanes));
#if JETSPEC_FORM == 3
  return _mm512_reduce_max_ps(top[0]);
#else
  float lane[kWide], most = low;
  for (int part = 0; part < kParts; ++part) store(lane + part * kLanes, top[part]);
  for (int i = 0; i < kWide; ++i) most = lane[i] > most ? lane[i] : most;
  return most;
#endif
}

// p = exp(s - most), filled up to a multiple of 16; returns their total.
inline float exponentials(const float* s, int count, float most, float* p) {
  const Vec shift = splat(most);
  Vec total[kParts];
  for (int part = 0; part < kParts; ++part) total[part] = zero();
  for (int j = 0; j < count; j += kWide)
    for (int part = 0; part < kParts; ++part) {
      const int at = j + part * kLanes;
      const Vec x = exp_negative(load(s + at) - shift);
      store(p + at, x);
      total[part] = total[part] + x;
    }
  float lane[kWide];
  for (int part = 0; part < kParts; ++part) store(lane + part * kLanes, total[part]);
  return fold_halves(lane);
}

// ---- Units of work -------------------------------------------------------------------------------------------------
template <typename E>
using Job = AttentionJob<E>;

// Grows and never shrinks.
struct Scratch {
  float* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  float* get(size_t floats) {
    if (floats > size) {
      std::free(data);
      size = (floats + 4095) / 4096 * 4096;
      data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
      if (data == nullptr) std::abort();
    }
    return data;
  }
};

// Copies keys or values to rows of `padded` elements, zeros behind `dim` (only for dim not a multiple of 16).
template <typename E>
void pad_rows(const E* from, int count, int dim, int padded, E* to) {
  for (int j = 0; j < count; ++j) {
    std::memcpy(to + static_cast<size_t>(j) * padded, from + static_cast<size_t>(j) * dim, dim * sizeof(E));
    std::memset(to + static_cast<size_t>(j) * padded + dim, 0, (padded - dim) * sizeof(E));
  }
}

int pad(int n) { return (n + kWide - 1) / kWide * kWide; }

}  // namespace

// What the parts of a split pair hand to each other. Lives as long as the thread that made the plan.
struct AttentionShared {
  struct alignas(64) Progress {
    std::atomic<int> scored{0}, finished{0};
  };
  Scratch memory;
  std::vector<Progress> progress;
};

namespace {

// A (sequence, KV head) and a range of its new rows. The rows are packed with all heads of the group beside each other,
// as they see the same keys.
template <typename E>
class Unit {
 public:
  Unit(const Job<E>& job, int pair, int t0, int t1)
      : job_(job), b_(pair / job.heads), t0_(t0), t1_(t1), live_(job.lengths[b_]),
        count_(job.counts ? job.counts[b_] : job.rows), rows_((t1 - t0) * job.group), padded_(pad(job.dim)) {
    const size_t first = job.first ? job.first[b_] * job.row_stride : static_cast<size_t>(b_) * job.sequence_stride;
    head0_ = first + static_cast<size_t>(pair % job.heads) * job.group * job.head_stride;
    cache_k_ = job.cache_k + static_cast<size_t>(pair) * job.capacity * job.dim;
    cache_v_ = job.cache_v + static_cast<size_t>(pair) * job.capacity * job.dim;
    new_k_ = job.new_k + static_cast<size_t>(pair) * job.rows * job.dim;
    new_v_ = job.new_v + static_cast<size_t>(pair) * job.rows * job.dim;
    stride_ = pad(live_ + job.rows) + kWide;

    static thread_local Scratch scratch;
    const bool copy = padded_ != job.dim;
    const size_t wide_rows = static_cast<size_t>(rows_) * padded_;
    const size_t sizes[] = {wide_rows,  // queries
                            wide_rows,  // accumulators
                            rows_ * stride_,
                            static_cast<size_t>(pad(rows_)),                    // largest scores
                            static_cast<size_t>(pad(rows_)),                    // totals
                            static_cast<size_t>(pad(job.rows)),                 // the list of a row
                            static_cast<size_t>(kWide) * padded_,               // a tile of keys
                            static_cast<size_t>(job.group) * kWide,             // scores of new keys
                            copy ? static_cast<size_t>(kValueBlock) * padded_ : 0,
                            copy ? 2 * static_cast<size_t>(job.rows) * padded_ : 0};
    size_t all = 0;
    for (size_t size : sizes) all += size;
    float* at = scratch.get(all);
    const size_t* size = sizes;
    const auto take = [&] {
      float* taken = at;
      at += *size++;
      return taken;
    };
    q_ = take();
    acc_ = take();
    p_ = take();
    most_ = take();
    total_ = take();
    list_ = reinterpret_cast<int*>(take());
    tile_ = reinterpret_cast<E*>(take());
    fresh_ = take();
    block_ = reinterpret_cast<E*>(take());
    if (copy) {
      E* padded_new = reinterpret_cast<E*>(take());
      pad_rows(new_k_, count_, job.dim, padded_, padded_new);
      pad_rows(new_v_, count_, job.dim, padded_, padded_new + static_cast<size_t>(count_) * padded_);
      new_k_ = padded_new;
      new_v_ = padded_new + static_cast<size_t>(count_) * padded_;
    }
  }

  size_t stride() const { return stride_; }
  float* own_scores() const { return p_; }
  int live() const { return live_; }

  // Scores of the cached keys j0 .. j1 - 1 and, where asked, of the new keys, which follow the cached ones: only those
  // that a row sees, so its scores are its list.
  void score(int j0, int j1, bool fresh, float* scores, Ahead& ahead) {
    for (int t = t0_; t < t1_; ++t)
      for (int g = 0; g < job_.group; ++g) {
        const E* from = job_.q + head0_ + g * job_.head_stride + t * job_.row_stride;
        float* to = q_ + (static_cast<size_t>(t - t0_) * job_.group + g) * padded_;
        for (int i = 0; i < job_.dim; ++i) to[i] = widen(from[i]);
        for (int i = job_.dim; i < padded_; ++i) to[i] = 0.0f;
      }
    const int step = padded_ == job_.dim ? std::max(1, j1 - j0) : kValueBlock;
    for (int j = j0; j < j1; j += step) {
      const int count = std::min(step, j1 - j);
      const E* keys = cached(cache_k_, j, count);
      for (int i = 0; i < count; i += kWide) {
        const E* tile = whole_tile(keys + static_cast<size_t>(i) * padded_, count - i, padded_, tile_);
        score_tile(q_, rows_, padded_, tile, job_.scale, scores + j + i, stride_, kWide, ahead);
      }
    }
    if (fresh) score_new(scores + live_);
  }

  // Turns scores into weights (own_scores()) and the total of each row.
  void softmax(float* scores, Ahead& ahead) {
    for (int t = t0_, r = 0; t < t1_; ++t) {
      const int count = live_ + visible(t);
      for (int g = 0; g < job_.group; ++g, ++r) most_[r] = largest(scores + r * stride_, count);
    }
    for (int t = t0_, r = 0; t < t1_; ++t) {
      const int count = live_ + visible(t);
      for (int g = 0; g < job_.group; ++g, ++r) {
        ahead.advance(live_ * (r + 1) / rows_ / 4 - live_ * r / rows_ / 4);
        total_[r] = exponentials(scores + r * stride_, count, most_[r], p_ + r * stride_);
      }
    }
  }

  // Writes the columns c0 .. c1 - 1 of the output.
  void weigh(int c0, int c1, Ahead& ahead) {
    const int columns = c1 - c0, group = job_.group;
    std::memset(acc_, 0, static_cast<size_t>(rows_) * padded_ * sizeof(float));
    float* acc = acc_ + c0;
    const int step = rows_ <= kTileRows ? kFewRowsBlock : kValueBlock;
    for (int j = 0; j < live_; j += step) {
      const int count = std::min(step, live_ - j);
      values_rows(rows_, p_ + j, stride_, cached(cache_v_, j, count) + c0, nullptr, count, padded_, columns, acc,
                  ahead);
    }
    Ahead none;
    for (int t = t0_, r = 0; t < t1_; ++t, r += group) {
      const int count = visible(t);
      const bool prefix = count > 0 && list_[count - 1] == count - 1;
      values_rows(group, p_ + r * stride_ + live_, stride_, new_v_ + c0, prefix ? nullptr : list_, count, padded_,
                  columns, acc + static_cast<size_t>(r) * padded_, none);
      for (int g = 0; g < group; ++g) {
        const float* from = acc_ + static_cast<size_t>(r + g) * padded_;
        const float total = live_ + count == 0 ? 1.0f : total_[r + g];  // sees nothing: zeros
        E* to = job_.out + head0_ + g * job_.head_stride + t * job_.row_stride;
        const int end = std::min(c1, job_.dim);
        for (int i = c0; i < end; ++i) narrow(from[i] / total, to + i);
      }
    }
  }

 private:
  // Keys or values j .. of the cache, in rows of padded_ elements.
  const E* cached(const E* cache, int j, int count) {
    const E* from = cache + static_cast<size_t>(j) * job_.dim;
    if (padded_ == job_.dim) return from;
    pad_rows(from, count, job_.dim, padded_, block_);
    return block_;
  }

  const uint8_t* mask(int t) const { return job_.mask + (static_cast<size_t>(b_) * job_.rows + t) * job_.rows; }

  // Number of new keys that row t sees; list_ names them.
  int visible(int t) {
    const uint8_t* seen = mask(t);
    int count = 0;
    for (int j = 0; j < count_; ++j) {
      list_[count] = j;
      count += seen[j] != 0;
    }
    return count;
  }

  void score_new(float* scores) {
    const int group = job_.group;
    int* used = list_;  // new scores of each row t so far
    std::memset(used, 0, (t1_ - t0_) * sizeof(int));
    Ahead none;
    for (int j = 0; j < count_; j += kWide) {
      const int here = std::min(kWide, count_ - j);
      const E* tile = whole_tile(new_k_ + static_cast<size_t>(j) * padded_, here, padded_, tile_);
      for (int t = t0_, r = 0; t < t1_; ++t, r += group) {
        const uint8_t* seen = mask(t) + j;
        uint32_t bits = 0;
        for (int i = 0; i < here; ++i) bits |= static_cast<uint32_t>(seen[i] != 0) << i;
        if (bits == 0) continue;
        score_tile(q_ + static_cast<size_t>(r) * padded_, group, padded_, tile, job_.scale, fresh_, kWide, 0, none);
        int added = 0;
        for (int g = 0; g < group; ++g)
          added = append_visible(fresh_ + g * kWide, bits, scores + (r + g) * stride_ + used[t - t0_]);
        used[t - t0_] += added;
      }
    }
  }

  const Job<E>& job_;
  int b_, t0_, t1_, live_, count_, rows_, padded_;
  size_t head0_, stride_;
  const E *cache_k_, *cache_v_, *new_k_, *new_v_;
  float *q_, *acc_, *p_, *most_, *total_, *fresh_;
  int* list_;
  E *tile_, *block_;
};

// ---- Tasks ---------------------------------------------------------------------------------------------------------
// First the scores of parts of the keys of the last `split` pairs, then the other pairs whole (in blocks of rows), then
// the values of parts of the columns of the split pairs. By then their scores are there, or nearly.
template <typename E>
int tasks(const Job<E>& job) {
  const AttentionPlan& plan = job.plan;
  return 2 * plan.split * plan.parts + (job.batch * job.heads - plan.split) * plan.blocks;
}

struct Task {
  enum Kind { kScores, kWhole, kValues } kind;
  int pair, part;
};

template <typename E>
Task task(const Job<E>& job, int index) {
  const AttentionPlan& plan = job.plan;
  const int whole = job.batch * job.heads - plan.split, parts = plan.split * plan.parts;
  if (index < parts) return {Task::kScores, whole + index / plan.parts, index % plan.parts};
  index -= parts;
  if (index < whole * plan.blocks) return {Task::kWhole, index / plan.blocks, index % plan.blocks};
  index -= whole * plan.blocks;
  return {Task::kValues, whole + index / plan.parts, index % plan.parts};
}

// The range of part `part` of `parts`, in whole vectors of 16.
struct Range {
  int begin, end;
  Range(int count, int part, int parts) {
    const int vectors = (count + kWide - 1) / kWide;
    begin = vectors * part / parts * kWide;
    end = std::min(count, vectors * (part + 1) / parts * kWide);
  }
};

// What a task reads first (and second).
template <typename E>
void add_runs(const Job<E>& job, const Task& task, bool both, Ahead& ahead) {
  const int live = job.lengths[task.pair / job.heads];
  const size_t row = job.dim * sizeof(E), base = static_cast<size_t>(task.pair) * job.capacity * job.dim;
  const auto run = [&](const E* cache, Range keys, Range columns) {
    const size_t bytes = (columns.end - columns.begin) * sizeof(E);
    const E* at = cache + base + static_cast<size_t>(keys.begin) * job.dim + columns.begin;
    ahead.add({reinterpret_cast<const char*>(at), row, static_cast<int>((bytes + 63) / 64), keys.end - keys.begin});
  };
  const Range keys(live, 0, 1), columns(job.dim, 0, 1);
  if (task.kind == Task::kScores) run(job.cache_k, Range(live, task.part, job.plan.parts), columns);
  if (task.kind == Task::kValues) run(job.cache_v, keys, Range(job.dim, task.part, job.plan.parts));
  if (task.kind == Task::kWhole) run(job.cache_k, keys, columns);
  if (task.kind == Task::kWhole && both) run(job.cache_v, keys, columns);
}

template <typename E>
void attend(const Job<E>& job, int index, int next) {
  const AttentionPlan& plan = job.plan;
  const Task now = task(job, index);
  const int count = job.counts ? job.counts[now.pair / job.heads] : job.rows;
  const int t0 = now.kind == Task::kWhole ? now.part * plan.block : 0;
  const int t1 = now.kind == Task::kWhole ? std::min(count, t0 + plan.block) : count;
  Ahead ahead;
  if (t0 < t1) {
    add_runs(job, now, true, ahead);
    if (next >= 0) add_runs(job, task(job, next), false, ahead);
    ahead.advance(kLead);
  }
  if (now.kind == Task::kWhole) {
    if (t0 >= t1) return;
    Unit<E> unit(job, now.pair, t0, t1);
    unit.score(0, unit.live(), true, unit.own_scores(), ahead);
    unit.softmax(unit.own_scores(), ahead);
    unit.weigh(0, pad(job.dim), ahead);
    return;
  }
  const int split = now.pair - (job.batch * job.heads - plan.split);
  float* scores = plan.shared->memory.data + split * plan.scores;
  AttentionShared::Progress& progress = plan.shared->progress[split];
  if (now.kind == Task::kScores) {
    if (t0 < t1) {
      Unit<E> unit(job, now.pair, t0, t1);
      const Range keys(unit.live(), now.part, plan.parts);
      unit.score(keys.begin, keys.end, now.part + 1 == plan.parts, scores, ahead);
    }
    progress.scored.fetch_add(1, std::memory_order_release);
    return;
  }
  for (int spins = 0; progress.scored.load(std::memory_order_acquire) < plan.parts; ++spins) {
    if (spins < JETSPEC_THREADS_SPINS) {
      cpu_pause();
    } else {
      std::this_thread::yield();
    }
  }
  if (t0 < t1) {
    Unit<E> unit(job, now.pair, t0, t1);
    const Range columns(job.dim, now.part, plan.parts);
    unit.softmax(scores, ahead);
    unit.weigh(columns.begin, columns.end, ahead);
  }
  if (progress.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == plan.parts) {  // ready for the next layer
    progress.finished.store(0, std::memory_order_relaxed);
    progress.scored.store(0, std::memory_order_relaxed);
  }
}

template <typename E>
void run(const Job<E>& job, int begin, int end) {
  const int all = tasks(job);
  for (int i = begin; i < end; ++i) {
    const int next = i + 1 < end ? i + 1 : i + std::max(1, job.plan.parts);
    attend(job, i, next < all ? next : -1);
  }
}

// Rows per unit: scores within their share of the cache, and enough units to keep the threads evenly busy. Where few
// pairs are left over for the threads, these are split.
template <typename E>
void plan(Job<E>& job, int threads) {
  int longest = 0, rows = job.counts ? 1 : job.rows;
  for (int b = 0; b < job.batch; ++b) {
    longest = std::max(longest, job.lengths[b]);
    if (job.counts) rows = std::max(rows, job.counts[b]);
  }
  const size_t per_row = static_cast<size_t>(longest) + job.rows + 2 * kWide;
  const size_t fit = std::max<size_t>(1, kScoreFloats / (per_row * job.group));
  const int pairs = job.batch * job.heads, vectors = job.dim / kWide;
  const int wanted = 4 * std::max(1, threads);
  AttentionPlan& plan = job.plan;
  plan = {};
  if (threads > 1 && pairs < wanted && rows * job.group < kManyRows && fit >= static_cast<size_t>(rows) &&
      longest >= kSplitKeys && job.dim % kWide == 0) {
    plan.split = pairs % threads;
    if (plan.split > 0) plan.parts = std::min(vectors, threads / std::gcd(threads, plan.split));
    if (plan.parts < 2) plan.split = plan.parts = 0;
    plan.block = rows;
    plan.blocks = 1;
  } else {
    const int least = (kSplitRows + job.group - 1) / job.group;
    const int split = std::max(1, wanted / std::min(pairs, wanted));
    plan.block = std::max(std::min(rows, least), (rows + split - 1) / split);
    plan.block = static_cast<int>(std::min<size_t>(plan.block, fit));
    plan.blocks = (rows + plan.block - 1) / plan.block;
  }
  if (plan.split > 0) {
    static thread_local AttentionShared shared;
    plan.scores = per_row * rows * job.group;
    plan.scores = (plan.scores + kWide - 1) / kWide * kWide;
    shared.memory.get(plan.split * plan.scores);
    if (shared.progress.size() < static_cast<size_t>(plan.split))
      shared.progress = std::vector<AttentionShared::Progress>(plan.split);
    plan.shared = &shared;
  }
}

}  // namespace

void attention_plan(AttentionJob<float>& job, int threads) { plan(job, threads); }

int attention_tasks(const AttentionJob<float>& job) { return tasks(job); }

void attention_run(const AttentionJob<float>& job, int begin, int end) { run(job, begin, end); }

namespace {

template <typename E, ffi::DataType D>
ffi::Error tree_attention(ffi::ThreadPool pool, ffi::Buffer<D> q, ffi::Buffer<D> cache_k, ffi::Buffer<D> cache_v,
                          ffi::Buffer<ffi::S32> lengths, ffi::Buffer<D> new_k, ffi::Buffer<D> new_v,
                          ffi::Buffer<ffi::PRED> mask, ffi::ResultBuffer<D> out, float scale, int64_t threads) {
  // Leading dimensions beyond the batch (vmap) are more batch.
  const auto qd = q.dimensions(), kd = cache_k.dimensions(), nd = new_k.dimensions();
  const size_t rank = qd.size();
  if (rank < 5 || kd.size() != rank - 1 || nd.size() != rank - 1 || mask.dimensions().size() != rank - 2)
    return ffi::Error::InvalidArgument("tree_attention: ranks do not fit");
  Job<E> job{reinterpret_cast<const E*>(q.untyped_data()),     reinterpret_cast<const E*>(cache_k.untyped_data()),
             reinterpret_cast<const E*>(cache_v.untyped_data()), reinterpret_cast<const E*>(new_k.untyped_data()),
             reinterpret_cast<const E*>(new_v.untyped_data()), lengths.typed_data(),
             reinterpret_cast<const uint8_t*>(mask.untyped_data()), reinterpret_cast<E*>(out->untyped_data())};
  job.batch = static_cast<int>(lengths.element_count());
  job.heads = static_cast<int>(qd[rank - 4]);
  job.group = static_cast<int>(qd[rank - 3]);
  job.rows = static_cast<int>(qd[rank - 2]);
  job.dim = static_cast<int>(qd[rank - 1]);
  job.capacity = static_cast<int>(kd[rank - 3]);
  job.scale = scale;
  job.row_stride = job.dim;
  job.head_stride = static_cast<size_t>(job.rows) * job.dim;
  job.sequence_stride = job.head_stride * job.heads * job.group;
  const size_t pairs = static_cast<size_t>(job.batch) * job.heads;
  if (q.element_count() != pairs * job.group * job.rows * job.dim || out->element_count() != q.element_count() ||
      cache_k.element_count() != pairs * job.capacity * job.dim || cache_v.element_count() != cache_k.element_count() ||
      new_k.element_count() != pairs * job.rows * job.dim || new_v.element_count() != new_k.element_count() ||
      mask.element_count() != static_cast<size_t>(job.batch) * job.rows * job.rows)
    return ffi::Error::InvalidArgument("tree_attention: shapes do not fit");
  if (q.element_count() == 0) return ffi::Error::Success();
  double keys = 0;
  for (int b = 0; b < job.batch; ++b) {
    if (job.lengths[b] < 0 || job.lengths[b] > job.capacity)
      return ffi::Error::InvalidArgument("tree_attention: length " + std::to_string(job.lengths[b]) + " of sequence " +
                                         std::to_string(b) + " is outside 0.." + std::to_string(job.capacity));
    keys += job.lengths[b] + job.rows;
  }

  plan(job, static_cast<int>(pool.num_threads()));
  // Per key, head and vector of h: about one cycle for the memory and one per row.
  const double cost = keys * job.heads * (job.dim + kWide - 1) / kWide * (job.group * job.rows + 1.0);
  const int limit = threads == 0 && cost < kSerialCost ? 1 : static_cast<int>(threads);
  parallel_for(pool, tasks(job), limit, [&job](int begin, int end) { run(job, begin, end); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jetspec

#define JETSPEC_TREE_ATTENTION(NAME, ELEMENT, DTYPE)                                                          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(NAME, (jetspec::tree_attention<jetspec::ELEMENT, xla::ffi::DTYPE>),           \
                                xla::ffi::Ffi::Bind()                                                         \
                                    .Ctx<xla::ffi::ThreadPool>()                                              \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Arg<xla::ffi::Buffer<xla::ffi::S32>>()                                   \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()                                  \
                                    .Ret<xla::ffi::Buffer<xla::ffi::DTYPE>>()                                 \
                                    .Attr<float>("scale")                                                     \
                                    .Attr<int64_t>("threads"))

namespace jetspec {
using Float = float;
}
JETSPEC_TREE_ATTENTION(TreeAttentionF32, Float, F32);
JETSPEC_TREE_ATTENTION(TreeAttentionBf16, Bf16, BF16);

// exp_negative for tests; count is a multiple of 16.
extern "C" void TreeAttentionExp(const float* x, float* y, int64_t count) {
  jetspec::FloatEnv env;
  for (int64_t i = 0; i < count; i += jetspec::kLanes)
    jetspec::store(y + i, jetspec::exp_negative(jetspec::load(x + i)));
}
