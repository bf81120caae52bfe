"""Draws by rank and log-probabilities in C, behind the common part of ``text``: places in the falling order of a row, without sorting.

A row has one block or several (``toolchain.row_blocks``), each with a share of its ids. What crosses shares are whole numbers, which add up
the same however a row is shared out: sums of pieces, whose total every block gets, and short lists of ids, which every block copies and
then works on alone. So all blocks of a row know the same at every turn and take the same way.
"""

PLACES = """
#define LOWEST_ORDER (-0x7FFFFFFF)
enum { COUNTS, WEIGHTS, LIKELY };  // what is added up: ids, their weights, the weights that min_p leaves
enum { WIDE = 16 / (int)sizeof(VALUE) };

struct List {  // of ids and their orders; `count` may be above LISTED: then it is no list
  int orders[LISTED], ids[LISTED], count;
};

struct Share {  // what a block has of its row in shared memory
  struct Sums cut, piece;  // sums over the row: of the first cut, of a piece of it
  struct List list;        // ids of the bucket looked at last, of the whole row
#if BLOCKS > 1
  struct Sums own_sums;  // what the other blocks read: sums over this block's ids, and those that it lists
  struct List own_list;
#endif
  u64 totals[2];
  int least, most;
};

struct Row {
  struct Share* share;
  const VALUE* whole;   // in global memory
  const VALUE* values;  // of this block's ids: `first` and those behind it
  int first, count, wide;  // wide: whether they can be read 16 bytes at a time in global memory
  float top, temperature, least, cut;  // cut: pieces of the first cut for a logit
  int listed;  // length of the list; -1 = its bucket has more ids, or there is no bucket
};

struct Place {  // of an id in the falling order: how many equal logits come before it, and what all larger ones add up to
  int order;
  u64 nth, before, weight;
};

#if BLOCKS > 1
INLINE struct Sums* own_sums(struct Share* share, struct Sums* all) { return &share->own_sums; }
INLINE struct List* own_list(struct Share* share) { return &share->own_list; }
#else
INLINE struct Sums* own_sums(struct Share* share, struct Sums* all) { return all; }
INLINE struct List* own_list(struct Share* share) { return &share->list; }
#endif

struct ALIGNED(16) Vector {
  u32 words[4];
};
INLINE void put_logit(struct Vector* v, int j, VALUE x) { memcpy((char*)v + j * sizeof(VALUE), &x, sizeof(VALUE)); }
INLINE VALUE next_logit(struct Vector* v) {
  VALUE x;
  memcpy(&x, v, sizeof(VALUE));
  const int bits = 8 * (int)sizeof(VALUE);
  for (int k = 0; k < 3; ++k) v->words[k] = bits == 32 ? v->words[k + 1] : v->words[k] >> bits % 32 | v->words[k + 1] << (32 - bits) % 32;
  v->words[3] >>= bits % 32;
  return x;
}

INLINE struct Vector vector_at(const struct Row* row, int at) {
  struct Vector v = {};
  if (at >= row->count) return v;
  if (KEPT || (row->wide && at + WIDE <= row->count)) return *(const struct Vector*)(row->values + at);  // there is room for whole ones
  UNROLLED_BY(WIDE)
  for (int j = 0; j < WIDE; ++j) put_logit(&v, j, row->values[at + j < row->count ? at + j : at]);
  return v;
}

// Calls f(id, logit) for all ids of this block, 16 bytes of them at a time, from global memory with the next ones on their way; a thread
// gets the same ones every time. One row runs this a few dozen times: the code is kept short, for most of it has to be brought in.
template <class F> INLINE void each_id(const struct Row* row, F f) {
  struct Vector v, ahead = {};
  if (!KEPT) ahead = vector_at(row, THREAD * WIDE);
  UNROLLED_BY(1)
  for (int at = THREAD * WIDE; at < row->count; at += THREADS * WIDE) {
    v = KEPT ? vector_at(row, at) : ahead;
    if (!KEPT) ahead = vector_at(row, at + THREADS * WIDE);
    const int some = row->count - at < WIDE ? row->count - at : WIDE;
    UNROLLED_BY(2)
    for (int j = 0; j < some; ++j) f(row->first + at + j, (float)next_logit(&v));
  }
}

// This block's share of a row; KEPT: it is copied to `room`, so that the row is read once.
INLINE void take_share(struct Row* row, const VALUE* whole, VALUE* room, int vocab) {
  row->whole = whole;
  row->first = BLOCK * SHARE;
  row->count = vocab - row->first < SHARE ? vocab - row->first : SHARE;
  row->values = whole + row->first;
  row->wide = (size_t)row->values % 16 == 0;
  row->listed = -1;
  SHARED_WITH_ROW(row->share);
#if KEPT
  VALUE* kept = OWN_PART(room, SHARE);
  if (row->wide) {  // each thread what it will read
    for (int at = THREAD * WIDE; at < row->count; at += THREADS * WIDE)
      if (at + WIDE <= row->count)
        copy16(kept + at, row->values + at);
      else
        for (int j = at; j < row->count; ++j) kept[j] = row->values[j];
    copied();
  } else {
    UNROLLED
    for (int i = THREAD; i < row->count; i += THREADS) kept[i] = row->values[i];
    SYNC();
  }
  row->values = kept;
#endif
}

// At most 0 whatever the data are, so that sums never overflow: then all blocks find the same places.
INLINE float exponent_of(const struct Row* row, float x) { return fminf((x - row->top) / row->temperature, 0.f); }

INLINE u64 measured(const struct Row* row, int what, float x, int power) {
  if (what == COUNTS) return 1;
  float w = weight_of(exponent_of(row, x), power);
  return what == WEIGHTS || w >= row->least ? (u64)w : 0;
}

// What a thread has for one piece: neighbours of a row that are equal do not meet in memory.
struct Pending {
  int piece;
  u64 sum;
};
INLINE void flush(struct Pending* p, struct Sums* sums) {
  if (!p->sum) return;
  u32* high = &sums->high[p->piece];
  u32 old = atomicAdd(&sums->low[p->piece], (u32)p->sum);
  u32 carried = (u32)(p->sum >> 32) + (old + (u32)p->sum < old);
  if (carried) atomicAdd(high, carried);
}
INLINE void collect(struct Pending* p, struct Sums* sums, int piece, u64 x) {
  if (piece != p->piece) {
    flush(p, sums);
    p->piece = piece;
    p->sum = 0;
  }
  p->sum += x;
}

INLINE void clear(struct Sums* sums) {
  SYNC();
  for (int i = THREAD; i < BUCKETS; i += THREADS) sums->low[i] = sums->high[i] = 0;
  SYNC();
}

// Sums over the row, in every block, from those of each block's own ids: a block adds up its part of the pieces and gives it to all.
// `first`, `second`: two more numbers of the block (thread 0's count), which become those of the row.
INLINE void add_up(struct Share* share, struct Sums* all, u64* first, u64* second) {
#if BLOCKS > 1
  if (THREAD == 0) {
    share->totals[0] = *first;
    share->totals[1] = *second;
  }
  ROW_SYNC();
  const int part = BUCKETS / BLOCKS;
  for (int i = BLOCK * part + THREAD; i < (BLOCK + 1) * part; i += THREADS) {
    u64 sum = 0;
    EVERY_BLOCK(b) sum += sum_of(of_block(&share->own_sums, b), i);
    EVERY_BLOCK(b) put(of_block(all, b), i, sum);
  }
  *first = *second = 0;
  EVERY_BLOCK(b) {
    *first += of_block(share, b)->totals[0];
    *second += of_block(share, b)->totals[1];
  }
#endif
  ROW_SYNC();
}

// First cut of the order: even pieces of the logits down to where weights are 0 for certain; BUCKETS - 1 = below.
INLINE float cut_of(float temperature, int power) { return (BUCKETS - 1) / ((power + 2) * 0.6931472f) / temperature; }
INLINE int bucket_of(const struct Row* row, float x) {
  float b = (row->top - x) * row->cut;
  return b < BUCKETS - 1 ? b > 0 ? (int)b : 0 : BUCKETS - 1;  // above the largest there is nothing, unless data are bad
}

// Whether there was room for it.
INLINE int note(struct List* list, int order, int id) {
  const int place = atomicAdd(&list->count, 1);
  if (place >= LISTED) return 0;
  list->orders[place] = order;
  list->ids[place] = id;
  return 1;
}

// The list of the row in every block, from the lists of all; how many ids, which may be above LISTED.
INLINE int gather(struct Share* share) {
  ROW_SYNC();
#if BLOCKS > 1
  int counts[BLOCKS], total = 0;
  EVERY_BLOCK(b) {
    counts[b] = of_block(&share->own_list, b)->count;
    total += counts[b];
  }
  if (total <= LISTED)
    for (int i = THREAD; i < total; i += THREADS) {
      int from = 0, at = i;
      EVERY_BLOCK(b)
        if (from == b && at >= counts[b]) {
          at -= counts[b];
          ++from;
        }
      const struct List* there = of_block(&share->own_list, from);
      share->list.orders[i] = there->orders[at];
      share->list.ids[i] = there->ids[at];
    }
  SYNC();
  return total;
#else
  return share->list.count;
#endif
}

// Least and largest order of the ids of a bucket of the first cut, which are listed if they are few; -1 = of all ids.
INLINE void look_at(struct Row* row, int bucket, u32* lowest, u32* highest) {
  struct Share* share = row->share;
  struct List* list = own_list(share);
  ROW_SYNC();  // all blocks have what was listed before
  if (THREAD == 0) {
    share->least = 0x7FFFFFFF;
    share->most = LOWEST_ORDER;
    list->count = 0;
  }
  SYNC();
  int least = 0x7FFFFFFF, most = LOWEST_ORDER, fits = bucket >= 0;
  each_id(row, [&](int i, float x) {
    if (bucket < 0 || bucket_of(row, x) == bucket) {
      const int order = order_of(x);
      least = order < least ? order : least;
      most = order > most ? order : most;
      if (fits) fits = note(list, order, i);
    }
  });
  least = warp_least(least);
  most = warp_most(most);
  if (FIRST_OF_WARP && least <= most) {
    atomicMin(&share->least, least);
    atomicMax(&share->most, most);
  }
  const int count = gather(share);
  row->listed = bucket >= 0 && count <= LISTED ? count : -1;
  EVERY_BLOCK(b) {
    const struct Share* there = of_block(share, b);
    least = there->least < least ? there->least : least;
    most = there->most > most ? there->most : most;
  }
  *lowest = (u32)least;
  *highest = (u32)most;
}

// Where the sum over the falling order passes `target`, among the ids whose orders are from `lowest` to `highest` and behind those that
// add up to `before`.
INLINE struct Place narrowed(const struct Row* row, int what, u64 target, u64 before, u32 lowest, u32 highest, int power) {
  struct Share* share = row->share;
  struct Sums *all = &share->piece, *own = row->listed < 0 ? own_sums(share, all) : all;
  u64 inside, none = 0;
  for (;;) {
    const u32 width = highest - lowest;  // of 32 bits even where signs differ
    int shift = 0;
    while (width >> shift >= BUCKETS) ++shift;
    clear(own);
    struct Pending pending = {0, 0};
    const auto add = [&](int order) {
      if (order >= (int)lowest && order <= (int)highest)
        collect(&pending, own, (int)((highest - (u32)order) >> shift), measured(row, what, of_order(order), power));
    };
    if (row->listed < 0)
      each_id(row, [&](int, float x) { add(order_of(x)); });
    else
      for (int i = THREAD; i < row->listed; i += THREADS) add(share->list.orders[i]);
    flush(&pending, own);
    if (row->listed < 0)
      add_up(share, all, &none, &none);
    else
      SYNC();
    u32 piece = (u32)locate(all, BUCKETS, target - before, &inside);
    before += inside;
    highest -= piece << shift;
    if (!shift) break;
    if (highest - lowest >= 1u << shift) lowest = highest - (1u << shift) + 1;
  }
  struct Place place;
  place.order = (int)highest;
  place.before = before;
  place.weight = measured(row, what, of_order(place.order), power);
  place.nth = place.weight ? (target - before) / place.weight : 0;
  return place;
}

// The id of a place, whose bucket was the last one looked at.
INLINE int id_at(const struct Row* row, const struct Place* place, int vocab) {
  SHARED int found;
  struct Share* share = row->share;
  if (THREAD == 0) found = 0;
  SYNC();
  if (row->listed >= 0) {
    const struct List* list = &share->list;
    for (int i = THREAD; i < row->listed; i += THREADS)
      if (list->orders[i] == place->order) {
        u64 lower = 0;
        for (int j = 0; j < row->listed; ++j) lower += list->orders[j] == place->order && list->ids[j] < list->ids[i];
        if (lower == place->nth) found = list->ids[i];
      }
    SYNC();
    return found;
  }
  const int each = (vocab + BUCKETS - 1) / BUCKETS;
  struct Sums *all = &share->piece, *own = own_sums(share, all);
  clear(own);
  each_id(row, [&](int i, float x) {
    if (order_of(x) == place->order) atomicAdd(&own->low[i / each], 1u);
  });
  u64 before, none = 0;
  add_up(share, all, &none, &none);
  const int first = locate(all, BUCKETS, place->nth, &before) * each;
  const int end = first + each < vocab ? first + each : vocab, some = (each + THREADS - 1) / THREADS;
  const int own_first = first + THREAD * some, own_end = own_first + some < end ? own_first + some : end;
  u64 equal = 0;
  for (int i = own_first; i < own_end; ++i) equal += order_of((float)row->whole[i]) == place->order;
  before += block_before(equal);
  if (before <= place->nth && place->nth < before + equal) {
    int i = own_first;
    for (; i < own_end - 1; ++i)
      if (order_of((float)row->whole[i]) == place->order && before++ == place->nth) break;
    found = i;
  }
  SYNC();
  return found;
}

"""

RANKED = """
// The first cut of the order down to a place (LOWEST_ORDER: of all): its sums, and what they are up to and with the place.
INLINE u64 first_cut(const struct Row* row, int what, const struct Place* border, int power) {
  struct Sums* sums = own_sums(row->share, &row->share->cut);
  clear(sums);
  u64 sum = 0, none = 0;
  struct Pending pending = {0, 0};
  each_id(row, [&](int, float x) {
    const int order = order_of(x), bucket = bucket_of(row, x);
    if (order >= border->order && bucket < BUCKETS - 1) {
      const u64 m = measured(row, what, x, power);
      collect(&pending, sums, bucket, m);
      sum += order > border->order ? m : 0;
    }
  });
  flush(&pending, sums);
  sum = block_total(sum);
  add_up(row->share, &row->share->cut, &sum, &none);
  return border->order == LOWEST_ORDER ? sum : sum + (border->nth + 1) * measured(row, what, of_order(border->order), power);
}

// Where the sum over the falling order passes `target`, by the sums of the first cut.
INLINE struct Place find(struct Row* row, int what, u64 target, int power) {
  u64 before;
  u32 lowest, highest;
  look_at(row, locate(&row->share->cut, BUCKETS - 1, target, &before), &lowest, &highest);
  return narrowed(row, what, target, before, lowest, highest, power);
}

// A row that draws under top_k, top_p and min_p. The falling order is that of sampler.ranked.
INLINE void draw_row(VALUE* x, int64_t* which, int64_t* slots, int* table, int64_t* positions, float* largest, int* tokens,
                     VALUE* room, int nth, int vocab, int power) {
  SHARED struct Share share;
  const i64 index = which[nth];
  if (index < 0) return;
  const int* packed = table + slots[index] * NUM_COLUMNS;
  const int top_k = packed[TOP_K];
  const float top_p = FLOAT_OF(packed[TOP_P]);
  struct Row row;
  row.top = largest[index];
  if (!is_finite(row.top) || top_k <= 1 || !(top_p > 0)) return;  // the token stays the most likely one
  row.temperature = FLOAT_OF(packed[TEMPERATURE]);
  row.least = FLOAT_OF(packed[MIN_P]) * FLOAT_OF((power + 127) << 23);
  row.cut = cut_of(row.temperature, power);
  row.share = &share;
  take_share(&row, x + index * vocab, room, vocab);
  struct Place place;  // of the last id that may be drawn, then of the one that is
  place.order = LOWEST_ORDER;
  u64 kept = 0;
  UNROLLED_BY(1)  // what top_k leaves, what top_p leaves of it, the draw
  for (int turn = 0; turn < 3; ++turn) {
    if ((turn == 0 && top_k >= vocab) || (turn == 1 && !(top_p < 1.f))) continue;
    const int what = turn == 0 ? COUNTS : turn == 1 || !(row.least > 0) ? WEIGHTS : LIKELY;
    if (turn < 2 || what == LIKELY || !(top_p < 1.f)) kept = first_cut(&row, what, &place, power);
    if (turn == 0 && (u64)top_k >= kept) continue;
    u64 target = turn == 0 ? (u64)top_k : (u64)ceil((double)top_p * (double)kept);  // an id stays if what is before it is less than that
    target = turn == 2 ? target_of(packed, positions[index], kept) : target - 1;
    place = find(&row, what, target, power);
    kept = place.before + (place.nth + 1) * place.weight;
  }
  int id = id_at(&row, &place, vocab);
  if (BLOCK == 0 && THREAD == 0) tokens[index] = id;
  ROW_SYNC();  // what others may still read of this block stays until here
}

DEVICE int draw_ranked(VALUE* x, int64_t* which, int64_t* slots, int* table, int64_t* positions, float* largest, int* tokens,
                       VALUE* room, int nth, int vocab, int power) {
  TOGETHER(draw_row(x, which, slots, table, positions, largest, tokens, room, nth, vocab, power));
  return 0;
}
"""

LOGPROBS = """
// What the log-probabilities of a row need: its largest logit, the sum of its weights at temperature 1 (-1: it has none), the rank of
// `token`, and the `most` most likely ids in falling order, at most LISTED.
INLINE void rank_row(float* x, int64_t* tokens, float* largest, int64_t* total, int* rank, int* ids, float* room, int nth, int most,
                     int vocab, int power) {
  SHARED struct Share share;
  u32 lowest, highest;
  struct Row row;
  row.share = &share;
  row.temperature = 1;
  row.least = row.top = row.cut = 0;
  take_share(&row, x + (i64)nth * vocab, room, vocab);
  look_at(&row, -1, &lowest, &highest);
  row.top = of_order((int)highest);
  row.cut = cut_of(1, power);
  const int finite = is_finite(row.top);
  const float chosen = row.whole[tokens[nth]];
  struct Sums* sums = own_sums(&share, &share.cut);
  clear(sums);
  u64 sum = 0;
  u32 above = 0, live = 0;  // live: ids that the first cut has
  struct Pending pending = {0, 0};
  each_id(&row, [&](int, float value) {
    if (finite) sum += (u64)weight_of(value - row.top, power);
    above += value > chosen;
    const int bucket = bucket_of(&row, value);
    if (bucket < BUCKETS - 1) {
      collect(&pending, sums, bucket, 1);
      ++live;
    }
  });
  flush(&pending, sums);
  sum = block_total(sum);
  u64 counted = block_total((u64)above << 32 | live);
  add_up(&share, &share.cut, &sum, &counted);
  if (BLOCK == 0 && THREAD == 0) {
    largest[nth] = row.top;
    total[nth] = finite ? (int64_t)sum : -1;
    rank[nth] = (int)(counted >> 32) + 1;
  }
  if (most > 0) {
    u64 before = 0;
    if ((u32)most <= (u32)counted) look_at(&row, locate(&share.cut, BUCKETS - 1, (u64)most - 1, &before), &lowest, &highest);
    const struct Place last = narrowed(&row, COUNTS, (u64)most - 1, before, lowest, highest, power);
    const int border = id_at(&row, &last, vocab);
    struct List *own = own_list(&share), *list = &share.list;
    ROW_SYNC();
    if (THREAD == 0) own->count = 0;
    SYNC();
    each_id(&row, [&](int i, float value) {
      const int order = order_of(value);
      if (order > last.order || (order == last.order && i <= border)) note(own, order, i);
    });
    gather(&share);
    for (int i = BLOCK * THREADS + THREAD; i < most; i += BLOCKS * THREADS) {
      int before = 0;
      for (int j = 0; j < most; ++j)
        before += list->orders[j] > list->orders[i] || (list->orders[j] == list->orders[i] && list->ids[j] < list->ids[i]);
      ids[nth * most + before] = list->ids[i];
    }
  }
  ROW_SYNC();
}

DEVICE int logprob_row(float* x, int64_t* tokens, float* largest, int64_t* total, int* rank, int* ids, float* room, int nth, int most,
                       int vocab, int power) {
  TOGETHER(rank_row(x, tokens, largest, total, rank, ids, room, nth, most, vocab, power));
  return 0;
}
"""
