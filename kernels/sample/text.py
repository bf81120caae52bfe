"""The sampler's kernels in C, for a GPU and for the CPU target (``toolchain.imported``): what tile operators do not reach is most of them.
Draws by rank are in ``ranked_text``.

A row is drawn by inverse distribution function over whole numbers of 64 bits. Wherever a row is cut into pieces, their sums are exact: the
token found does not depend on the pieces. An order of logits is one of 32-bit integers; equal logits have equal weights, so that among them
the id is found by division and counting.
"""

from __future__ import annotations

from .columns import (
    FREQUENCY,
    MIN_P,
    MIN_TOKENS,
    NUM_COLUMNS,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from .reference import LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, POLYNOMIAL

BUCKETS = 1024
"""Into so many pieces a range of values is cut when a place in the order is looked for."""

LISTED = 1024
"""So many ids of a bucket are kept at hand; of more the row is read again."""

_COLUMNS = {
    "TEMPERATURE": TEMPERATURE,
    "TOP_K": TOP_K,
    "TOP_P": TOP_P,
    "MIN_P": MIN_P,
    "PRESENCE": PRESENCE,
    "FREQUENCY": FREQUENCY,
    "REPETITION": REPETITION,
    "SEED_LOW": SEED_LOW,
    "SEED_HIGH": SEED_HIGH,
    "PROMPT_LEN": PROMPT_LEN,
    "MIN_TOKENS": MIN_TOKENS,
    "NUM_COLUMNS": NUM_COLUMNS,
}


_FLOATS = {"LOWEST": LOWEST, "LOG2_E": LOG2_E, "LN2_HIGH": LN2_HIGH, "LN2_LOW": LN2_LOW} | {f"P{i}": c for i, c in enumerate(POLYNOMIAL)}


def _names() -> str:
    whole = {**_COLUMNS, "BUCKETS": BUCKETS, "LISTED": LISTED}
    return "".join(f"#define {name} {value}\n" for name, value in whole.items()) + "".join(
        f"#define {name} ({value!r}f)\n" for name, value in _FLOATS.items()
    )


_COMMON = """
#define MINUS_INFINITY FLOAT_OF((int)0xFF800000u)

INLINE int is_finite(float x) { return (BITS_OF(x) & 0x7FFFFFFF) < 0x7F800000; }

// Integers in the order of floats that are not NaN; both zeros are 0.
INLINE int order_of(float x) {
  int bits = BITS_OF(x), size = bits & 0x7FFFFFFF;
  return bits < 0 ? -size : size;
}
INLINE float of_order(int order) { return FLOAT_OF(order < 0 ? -order | (int)0x80000000u : order); }

// floor(exp(y) * 2**power) for y <= 0, as sample/reference.py has it.
INLINE float weight_of(float y, int power) {
  y = y < LOWEST ? LOWEST : y;
  float n = rintf(y * LOG2_E);
  float r = y - n * LN2_HIGH - n * LN2_LOW;
  float p = (((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5) * (r * r) + r + 1.f;
  return floorf(p * FLOAT_OF(((int)n + power + 127) << 23));
}

// 64 random bits of draw id 0 (a token): worker/counter_rng.py.
INLINE u64 mixed(u64 x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
INLINE u64 random_bits(u64 seed, u64 position) {
  const u64 golden = 0x9E3779B97F4A7C15ull;
  return mixed(mixed(mixed(seed + golden) + position * golden));
}

// A whole number in [0, total).
INLINE u64 target_of(const int* packed, i64 position, u64 total) {
  u64 seed = (u64)(u32)packed[SEED_HIGH] << 32 | (u32)packed[SEED_LOW];
  double u = (double)(random_bits(seed, (u64)position) >> 11) * 0x1p-53;
  u64 target = (u64)(u * (double)total);
  return target < total ? target : total - 1;
}

// Sums of pieces of a row, each in two words: native atomic operations have 32 bits.
struct Sums {
  u32 low[BUCKETS], high[BUCKETS];
};
INLINE u64 sum_of(const struct Sums* sums, int piece) { return sums->low[piece] + ((u64)sums->high[piece] << 32); }
INLINE void put(struct Sums* sums, int piece, u64 x) {
  sums->low[piece] = (u32)x;
  sums->high[piece] = (u32)(x >> 32);
}

// The first of `count` sums at which what they add up to passes `target`, which is below that of all; `before`: what they are before it.
// All threads get the answer.
INLINE int locate(const struct Sums* sums, int count, u64 target, u64* before) {
  SHARED u64 found[2];
  const int each = (count + THREADS - 1) / THREADS, first = THREAD * each;
  u64 own = 0;
  for (int i = first; i < first + each && i < count; ++i) own += sum_of(sums, i);
  u64 sum = block_before(own);
  if (sum <= target && (target < sum + own || THREAD == THREADS - 1)) {
    int i = first < count ? first : count - 1;
    for (; i < count - 1 && sum + sum_of(sums, i) <= target; ++i) sum += sum_of(sums, i);
    found[0] = (u64)i;
    found[1] = sum;
  }
  SYNC();
  const int index = (int)found[0];
  *before = found[1];
  SYNC();
  return index;
}
"""

PLAIN = """
// Block `part` of the parts of a row that draws from the whole vocabulary: its weights, added up; the row's last block draws the token.
DEVICE int draw_plain(VALUE* x, int64_t* which, int64_t* slots, int* table, int64_t* positions,
                      float* largest, int64_t* sums, int* arrived, int* tokens, int part, int nth, int vocab, int chunk, int power) {
  SHARED struct Sums pieces;
  SHARED int last;
  const i64 row = which[nth];
  if (row < 0) return 0;
  const float top = largest[row];
  if (!is_finite(top)) return 0;  // nothing can be drawn: the token stays the most likely one
  const int* packed = table + slots[row] * NUM_COLUMNS;
  const float temperature = FLOAT_OF(packed[TEMPERATURE]), least = FLOAT_OF(packed[MIN_P]) * FLOAT_OF((power + 127) << 23);
  const int parts = (vocab + chunk - 1) / chunk;
  const VALUE* values = x + row * vocab;
  u64 sum = 0;
  for (int i = part * chunk + THREAD; i < vocab && i < (part + 1) * chunk; i += THREADS) {
    float w = weight_of(((float)values[i] - top) / temperature, power);
    sum += w >= least ? (u64)w : 0;
  }
  sum = block_total(sum);
  if (THREAD == 0) {
    sums[nth * parts + part] = (int64_t)sum;
    __threadfence();
    last = atomicAdd(arrived + nth, 1) == parts - 1;
    if (last) arrived[nth] = 0;
  }
  SYNC();
  if (!last) return 0;
  __threadfence();
  u64 total = 0, before, inside;
  for (int i = THREAD; i < parts; i += THREADS) {
    u64 s = (u64)((volatile int64_t*)sums)[nth * parts + i];
    put(&pieces, i, s);
    total += s;
  }
  total = block_total(total);
  const u64 target = target_of(packed, positions[row], total);
  const int first = locate(&pieces, parts, target, &before) * chunk;
  const int each = (chunk + BUCKETS - 1) / BUCKETS;
  for (int g = THREAD; g < BUCKETS; g += THREADS) {
    u64 s = 0;
    for (int i = first + g * each; i < vocab && i < first + (g + 1) * each && i < first + chunk; ++i) {
      float w = weight_of(((float)values[i] - top) / temperature, power);
      s += w >= least ? (u64)w : 0;
    }
    put(&pieces, g, s);
  }
  SYNC();
  int i = first + locate(&pieces, BUCKETS, target - before, &inside) * each;
  if (THREAD == 0) {
    u64 s = before + inside;
    for (; i < vocab - 1; ++i) {
      float w = weight_of(((float)values[i] - top) / temperature, power);
      s += w >= least ? (u64)w : 0;
      if (s > target) break;
    }
    tokens[row] = i;
  }
  return 0;
}
"""

MASK = """
// Minus infinity where a row's mask forbids a token: bit i % 32 of word i / 32 is 0.
DEVICE int mask_part(float* x, int64_t* which, int* masks, int part, int nth, int vocab, int chunk) {
  const i64 row = which[nth];
  if (row < 0) return 0;
  const int* words = masks + (i64)nth * ((vocab + 31) / 32);
  for (int i = part * chunk + THREAD; i < vocab && i < (part + 1) * chunk; i += THREADS)
    if (!((u32)words[i / 32] >> (i % 32) & 1)) x[row * vocab + i] = MINUS_INFINITY;
  return 0;
}
"""

EDIT = """
// Block `part` of a row's edits, in their order: bias, penalties, bad words, stop ids below the least length. A list's ids are looked at by
// every block, which takes those of its own part; an id occurs once in a row's bias.
DEVICE int edit_part(float* x, int64_t* which, int64_t* slots, int* table, int64_t* positions,
                     int64_t* before, int64_t* bias_ids, float* bias, int* counts, uint8_t* in_prompt,
                     int64_t* bad_last, int64_t* bad_prefix, int64_t* recent, int64_t* stop_ids, int drafts,
                     int biases, int counted, int bad_words, int prefix, int stops, int part, int nth, int vocab, int chunk) {
  const i64 index = which[nth];
  if (index < 0) return 0;
  const i64 slot = slots[index];
  const int* packed = table + slot * NUM_COLUMNS;
  const int first = part * chunk, end = first + chunk < vocab ? first + chunk : vocab;
  float* row = x + index * vocab;
  const int64_t* drawn = before + index * drafts;
  for (int i = THREAD; i < biases; i += THREADS) {
    const i64 id = bias_ids[slot * biases + i];
    const float by = bias[slot * biases + i];
    if (id >= first && id < end && by != 0) row[id] = row[id] + by;
  }
  SYNC();
  const float repetition = FLOAT_OF(packed[REPETITION]), frequency = FLOAT_OF(packed[FREQUENCY]), presence = FLOAT_OF(packed[PRESENCE]);
  if (counted && (repetition != 1 || frequency != 0 || presence != 0)) {
    for (int i = first + THREAD; i < end; i += THREADS) {
      int count = counts[slot * vocab + i];
      for (int d = 0; d < drafts; ++d) count += drawn[d] == i;
      const int made = count > 0;
      const float repeated = made || in_prompt[slot * vocab + i] ? repetition : 1.f;
      float value = row[i];
      value = value > 0 ? value / repeated : value * repeated;
      value = value - frequency * (float)count;
      row[i] = value - presence * (float)made;
    }
    SYNC();
  }
  int behind = 0;
  for (int d = 0; d < drafts; ++d) behind += drawn[d] >= 0;
  for (int i = THREAD; i < bad_words; i += THREADS) {
    const i64 id = bad_last[slot * bad_words + i];
    int hit = id >= first && id < end;
    for (int j = 0; hit && j < prefix; ++j) {
      const i64 wanted = bad_prefix[(slot * bad_words + i) * prefix + j];
      const int at = behind + j;
      hit = wanted == -1 || wanted == (at < prefix ? recent[slot * prefix + at] : drawn[at - prefix]);
    }
    if (hit) row[id] = row[id] + MINUS_INFINITY;
  }
  SYNC();
  if (positions[index] - packed[PROMPT_LEN] < packed[MIN_TOKENS])
    for (int i = THREAD; i < stops; i += THREADS) {
      const i64 id = stop_ids[slot * stops + i];
      if (id >= first && id < end) row[id] = row[id] + MINUS_INFINITY;
    }
  return 0;
}
"""


def functions(*parts: str, value: str = "float") -> str:
    """A text of some of the functions above, or of ``ranked_text``, for logits of the C type ``value``."""
    return f"#define VALUE {value}\n{_names()}{_COMMON}" + "".join(parts)
