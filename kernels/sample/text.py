"""The sampler's kernels in C, for a GPU and for the CPU target (``toolchain.imported``): what tile operators do not reach is most of them.

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

// The first of `count` <= 1024 numbers at which their sum passes `target`, which is below the sum of all; `before`: the sum before it.
// Number i is low[i] + high[i] << 32. All threads get the answer.
INLINE int locate(const u32* low, const u32* high, int count, u64 target, u64* before) {
  SHARED u64 of_group[32];
  SHARED u64 found[2];
  for (int g = THREAD; g < 32; g += THREADS) {
    u64 sum = 0;
    for (int i = g * 32; i < g * 32 + 32 && i < count; ++i) sum += low[i] + ((u64)high[i] << 32);
    of_group[g] = sum;
  }
  SYNC();
  if (THREAD == 0) {
    u64 sum = 0;
    int g = 0;
    while (g < 31 && sum + of_group[g] <= target) sum += of_group[g++];
    int i = g * 32;
    while (i < count - 1 && sum + low[i] + ((u64)high[i] << 32) <= target) {
      sum += low[i] + ((u64)high[i] << 32);
      ++i;
    }
    found[0] = (u64)i;
    found[1] = sum;
  }
  SYNC();
  int index = (int)found[0];
  *before = found[1];
  SYNC();
  return index;
}
"""

PLAIN = """
// Block `part` of the parts of a row that draws from the whole vocabulary: its weights, added up; the row's last block draws the token.
DEVICE int draw_plain(VALUE* x, int64_t* which, int64_t* slots, int* table, int64_t* positions,
                      float* largest, int64_t* sums, int* arrived, int* tokens, int part, int nth, int vocab, int chunk, int power) {
  SHARED u32 low[BUCKETS], high[BUCKETS];
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
    low[i] = (u32)s;
    high[i] = (u32)(s >> 32);
    total += s;
  }
  total = block_total(total);
  const u64 target = target_of(packed, positions[row], total);
  const int first = locate(low, high, parts, target, &before) * chunk;
  const int each = (chunk + BUCKETS - 1) / BUCKETS;
  for (int g = THREAD; g < BUCKETS; g += THREADS) {
    u64 s = 0;
    for (int i = first + g * each; i < vocab && i < first + (g + 1) * each && i < first + chunk; ++i) {
      float w = weight_of(((float)values[i] - top) / temperature, power);
      s += w >= least ? (u64)w : 0;
    }
    low[g] = (u32)s;
    high[g] = (u32)(s >> 32);
  }
  SYNC();
  int i = first + locate(low, high, BUCKETS, target - before, &inside) * each;
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

PLACES = """
#define LOWEST_ORDER (-0x7FFFFFFF)
enum { COUNTS, WEIGHTS, LIKELY };  // what is added up: ids, their weights, the weights that min_p leaves

struct Row {
  const VALUE* values;
  float top, temperature, least, cut;  // cut: pieces of the first cut for a logit
  int *orders, *ids;  // a list of LISTED ids and their orders: those of the bucket looked at last
  int listed;         // how many; -1 = they are more, or no bucket's
};

struct Place {  // of an id in the falling order: how many equal logits come before it, and what all larger ones add up to
  int order, bucket;
  u64 nth, before, weight;
};

INLINE float exponent_of(const struct Row* row, float x) { return (x - row->top) / row->temperature; }

INLINE u64 measured(const struct Row* row, int what, float x, int power) {
  if (what == COUNTS) return 1;
  float w = weight_of(exponent_of(row, x), power);
  return what == WEIGHTS || w >= row->least ? (u64)w : 0;
}

// Adds to a number that is kept in two words: native atomic operations have 32 bits.
INLINE void add_to(u32* low, u32* high, u64 x) {
  if (!x) return;
  u32 old = atomicAdd(low, (u32)x);
  u32 carried = (u32)(x >> 32) + (old + (u32)x < old);
  if (carried) atomicAdd(high, carried);
}

// What a thread has for one piece: neighbours of a row that are equal do not meet in memory.
struct Pending {
  int piece;
  u64 sum;
};
INLINE void flush(struct Pending* p, u32* low, u32* high) { add_to(&low[p->piece], &high[p->piece], p->sum); }
INLINE void collect(struct Pending* p, u32* low, u32* high, int piece, u64 x) {
  if (piece != p->piece) {
    flush(p, low, high);
    p->piece = piece;
    p->sum = 0;
  }
  p->sum += x;
}

// First cut of the order: even pieces of the logits down to where weights are 0 for certain; BUCKETS - 1 = below.
INLINE float cut_of(float temperature, int power) { return (BUCKETS - 1) / ((power + 2) * 0.6931472f) / temperature; }
INLINE int bucket_of(const struct Row* row, float x) {
  float b = (row->top - x) * row->cut;
  return b < BUCKETS - 1 ? (int)b : BUCKETS - 1;
}

// Where the sum over the falling order passes `target`, among the ids whose orders are from `lowest` to `highest` and behind those that
// add up to `before`.
INLINE struct Place narrowed(const struct Row* row, int what, u64 target, u64 before, u32 lowest, u32 highest, u32* part_low, u32*
part_high,
                             int vocab, int power) {
  u64 inside;
  for (;;) {
    const u32 width = highest - lowest;  // of 32 bits even where signs differ
    int shift = 0;
    while (width >> shift >= BUCKETS) ++shift;
    SYNC();
    for (int i = THREAD; i < BUCKETS; i += THREADS) part_low[i] = part_high[i] = 0;
    SYNC();
    struct Pending pending = {0, 0};
    for (int i = THREAD; i < (row->listed < 0 ? vocab : row->listed); i += THREADS) {
      const int order = row->listed < 0 ? order_of((float)row->values[i]) : row->orders[i];
      if (order >= (int)lowest && order <= (int)highest)
        collect(&pending, part_low, part_high, (int)((highest - (u32)order) >> shift), measured(row, what, of_order(order), power));
    }
    flush(&pending, part_low, part_high);
    SYNC();
    u32 piece = (u32)locate(part_low, part_high, BUCKETS, target - before, &inside);
    before += inside;
    highest -= piece << shift;
    if (!shift) break;
    if (highest - lowest >= 1u << shift) lowest = highest - (1u << shift) + 1;
  }
  struct Place place;
  place.order = (int)highest;
  place.before = before;
  place.weight = measured(row, what, of_order(place.order), power);
  place.nth = (target - before) / place.weight;
  return place;
}

// Least and largest order of the ids of a bucket of the first cut, which are listed if they are few; -1 = of all ids.
INLINE void look_at(struct Row* row, int bucket, int vocab, u32* lowest, u32* highest) {
  SHARED int range[2], count;
  SYNC();
  if (THREAD == 0) {
    range[0] = 0x7FFFFFFF;
    range[1] = LOWEST_ORDER;
    count = 0;
  }
  SYNC();
  int least = 0x7FFFFFFF, most = LOWEST_ORDER, full = bucket < 0;
  UNROLLED
  for (int i = THREAD; i < vocab; i += THREADS) {
    float x = (float)row->values[i];
    if (bucket < 0 || bucket_of(row, x) == bucket) {
      const int order = order_of(x);
      least = order < least ? order : least;
      most = order > most ? order : most;
      if (!full) {
        const int place = atomicAdd(&count, 1);
        full = place >= LISTED;
        if (!full) {
          row->orders[place] = order;
          row->ids[place] = i;
        }
      }
    }
  }
  if (least <= most) {
    atomicMin(&range[0], least);
    atomicMax(&range[1], most);
  }
  SYNC();
  *lowest = (u32)range[0];
  *highest = (u32)range[1];
  row->listed = bucket >= 0 && count <= LISTED ? count : -1;
}

// Where the sum over the falling order passes `target`. `low`, `high`: the sums of the first cut.
INLINE struct Place find(struct Row* row, int what, u64 target, const u32* low, const u32* high, u32* part_low, u32* part_high,
                         int vocab, int power) {
  u64 before;
  u32 lowest, highest;
  const int bucket = locate(low, high, BUCKETS - 1, target, &before);
  look_at(row, bucket, vocab, &lowest, &highest);
  struct Place place = narrowed(row, what, target, before, lowest, highest, part_low, part_high, vocab, power);
  place.bucket = bucket;
  return place;
}

// The first cut of the order down to a place (LOWEST_ORDER: of all): its sums, and what they are up to and with the place.
INLINE u64 first_cut(const struct Row* row, int what, const struct Place* border, u32* low, u32* high, int vocab, int power) {
  SYNC();
  for (int i = THREAD; i < BUCKETS; i += THREADS) low[i] = high[i] = 0;
  SYNC();
  u64 sum = 0;
  struct Pending pending = {0, 0};
  for (int i = THREAD; i < vocab; i += THREADS) {
    const float x = (float)row->values[i];
    const int order = order_of(x), bucket = bucket_of(row, x);
    if (order >= border->order && bucket < BUCKETS - 1) {
      const u64 m = measured(row, what, x, power);
      collect(&pending, low, high, bucket, m);
      sum += order > border->order ? m : 0;
    }
  }
  flush(&pending, low, high);
  sum = block_total(sum);
  return border->order == LOWEST_ORDER ? sum : sum + (border->nth + 1) * measured(row, what, of_order(border->order), power);
}

// The id of a place, whose bucket was the last one looked at.
INLINE int id_at(const struct Row* row, const struct Place* place, u32* part_low, u32* part_high, int vocab) {
  if (row->listed >= 0) {
    SHARED int found;
    for (int i = THREAD; i < row->listed; i += THREADS)
      if (row->orders[i] == place->order) {
        u64 lower = 0;
        for (int j = 0; j < row->listed; ++j) lower += row->orders[j] == place->order && row->ids[j] < row->ids[i];
        if (lower == place->nth) found = row->ids[i];
      }
    SYNC();
    return found;
  }
  const int each = (vocab + BUCKETS - 1) / BUCKETS;
  SYNC();
  for (int i = THREAD; i < BUCKETS; i += THREADS) part_low[i] = part_high[i] = 0;
  SYNC();
  for (int i = THREAD; i < vocab; i += THREADS)
    if (order_of((float)row->values[i]) == place->order) atomicAdd(&part_low[i / each], 1u);
  SYNC();
  u64 before;
  int i = locate(part_low, part_high, BUCKETS, place->nth, &before) * each;
  for (; i < vocab - 1; ++i)
    if (order_of((float)row->values[i]) == place->order && before++ == place->nth) break;
  return i;
}

"""

RANKED = """
// A row that draws under top_k, top_p and min_p, by one block. The falling order is that of sampler.ranked; nothing is sorted.
DEVICE int draw_ranked(VALUE* x, int64_t* which, int64_t* slots, int* table, int64_t* positions,
                       float* largest, int* tokens, int nth, int vocab, int power) {
  SHARED u32 low[BUCKETS], high[BUCKETS], part_low[BUCKETS], part_high[BUCKETS];
  SHARED int listed_orders[LISTED], listed_ids[LISTED];
  const i64 index = which[nth];
  if (index < 0) return 0;
  const int* packed = table + slots[index] * NUM_COLUMNS;
  const int top_k = packed[TOP_K];
  const float top_p = FLOAT_OF(packed[TOP_P]);
  struct Row row;
  row.values = x + index * vocab;
  row.top = largest[index];
  row.temperature = FLOAT_OF(packed[TEMPERATURE]);
  row.least = FLOAT_OF(packed[MIN_P]) * FLOAT_OF((power + 127) << 23);
  row.cut = cut_of(row.temperature, power);
  row.orders = listed_orders;
  row.ids = listed_ids;
  row.listed = -1;
  if (!is_finite(row.top) || top_k <= 1 || !(top_p > 0)) return 0;  // the token stays the most likely one
  struct Place border;  // of the last id that may be drawn
  border.order = LOWEST_ORDER;
  if (top_k < vocab) {
    u64 live = first_cut(&row, COUNTS, &border, low, high, vocab, power);
    if ((u64)top_k < live) border = find(&row, COUNTS, (u64)top_k - 1, low, high, part_low, part_high, vocab, power);
  }
  int what = top_p < 1.f || !(row.least > 0) ? WEIGHTS : LIKELY;
  u64 kept = first_cut(&row, what, &border, low, high, vocab, power);
  if (top_p < 1.f) {  // an id stays if what comes before it adds up to less than this share
    u64 target = (u64)ceil((double)top_p * (double)kept) - 1;
    border = find(&row, WEIGHTS, target, low, high, part_low, part_high, vocab, power);
    kept = border.before + (border.nth + 1) * border.weight;
    if (row.least > 0) {
      what = LIKELY;
      kept = first_cut(&row, what, &border, low, high, vocab, power);
    }
  }
  struct Place drawn =
      find(&row, what, target_of(packed, positions[index], kept), low, high, part_low, part_high, vocab, power);
  int id = id_at(&row, &drawn, part_low, part_high, vocab);
  if (THREAD == 0) tokens[index] = id;
  return 0;
}
"""

LOGPROBS = """
// What the log-probabilities of a row need, by one block: its largest logit, the sum of its weights at temperature 1 (-1: it has none), the
// rank of `token`, and the `most` most likely ids in falling order, at most BUCKETS.
DEVICE int logprob_row(float* x, int64_t* tokens, float* largest, int64_t* total, int* rank, int* ids, int nth, int most, int vocab,
                       int power) {
  SHARED u32 part_low[BUCKETS], part_high[BUCKETS];
  SHARED int listed[BUCKETS], at[BUCKETS], count;
  u32 lowest, highest;
  struct Row row;
  row.values = x + (i64)nth * vocab;
  row.temperature = 1;
  row.least = row.top = row.cut = 0;
  row.orders = row.ids = listed;  // never: all ids are looked at
  look_at(&row, -1, vocab, &lowest, &highest);
  row.top = of_order((int)highest);
  const int finite = is_finite(row.top);
  const float chosen = row.values[tokens[nth]];
  u64 sum = 0, above = 0;
  for (int i = THREAD; i < vocab; i += THREADS) {
    float value = row.values[i];
    if (finite) sum += (u64)weight_of(value - row.top, power);
    above += value > chosen;
  }
  sum = block_total(sum);
  above = block_total(above);
  if (THREAD == 0) {
    largest[nth] = row.top;
    total[nth] = finite ? (int64_t)sum : -1;
    rank[nth] = (int)above + 1;
    count = 0;
  }
  if (most < 1) return 0;
  struct Place last = narrowed(&row, COUNTS, (u64)most - 1, 0, lowest, highest, part_low, part_high, vocab, power);
  const int border = id_at(&row, &last, part_low, part_high, vocab);
  for (int i = THREAD; i < vocab; i += THREADS) {
    int order = order_of(row.values[i]);
    if (order > last.order || (order == last.order && i <= border)) {
      int place = atomicAdd(&count, 1);
      listed[place] = order;
      at[place] = i;
    }
  }
  SYNC();
  for (int i = THREAD; i < most; i += THREADS) {
    int before = 0;
    for (int j = 0; j < most; ++j) before += listed[j] > listed[i] || (listed[j] == listed[i] && at[j] < at[i]);
    ids[nth * most + before] = at[i];
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
    """A text of some of the functions above for logits of the C type ``value``."""
    return f"#define VALUE {value}\n{_names()}{_COMMON}" + "".join(parts)
