// Spreads attention over threads. One work item is one tile of query tokens of one sequence against one KV head, so that the
// keys and values are read once for the query heads of the group (of which an item has kMaxTileRows at most). Where there are
// few items and long sequences, the splits of an item are computed apart and merged afterwards, with the same arithmetic in
// the same order.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "drivers.hpp"
#include "pool.hpp"
#include "threads.hpp"

namespace tokenspeed {

namespace {

constexpr int64_t kLeastTileRows = 8;        // query rows of an item, where there are too few items for the threads
constexpr int64_t kWideRows = 8;             // from here on keys and values are widened once for all rows
constexpr int64_t kMergeRows = 8;            // rows that one thread merges at a time

struct Item {
    int64_t sequence;
    int64_t part;         // of the keys, see Attention::parts
    int64_t first_token;  // row of q
    int64_t tokens;
    int64_t first_limit;  // keys that the first of the tokens sees
    int64_t key_begin;    // the part's keys
    int64_t key_end;
    int64_t kv_head;
    int64_t first_head;  // query heads, of all
    int64_t heads;
    int64_t first_split;  // the one that the first token's first key lies in
    int64_t end_split;

    int64_t rows() const { return tokens * heads; }
};

int64_t state_floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }

AttentionState state_in(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }

AttentionState rows_from(const AttentionState& state, int64_t row, int64_t dim) {
    return {state.maximum + row, state.sum + row, state.accumulator + row * dim};
}

// At least `count` floats of this thread, uninitialised; one memory for each Tag.
template <class Tag>
float* floats(int64_t count) {
    thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < count) {
        memory.clear();
        memory.resize(static_cast<std::size_t>(count));
    }
    return memory.data();
}

// The first key that a query of the item sees, where `limit` is the key behind its last.
int64_t first_key(const Attention& call, const Item& item, int64_t limit) {
    return call.window > 0 ? std::max(item.key_begin, limit - call.window) : item.key_begin;
}

// The queries of an item, packed and scaled, with the keys each row sees.
class PackedQueries {
public:
    const AttentionTile& pack(const Attention& call, const Item& item) {
        const int64_t dim = call.key_dim();
        float* queries = floats<PackedQueries>(kMaxTileRows * dim);
        for (int64_t t = 0; t < item.tokens; ++t) {
            const int64_t limit = item.first_limit + t;
            for (int64_t head = 0; head < item.heads; ++head) {
                const int64_t row = t * item.heads + head;
                float* target = queries + row * dim;
                for (const QueryPart& part : call.q) {
                    const float* source = part.data + (item.first_token + t) * part.token_stride +
                                          (item.first_head + head) * part.head_stride;
                    for (int64_t i = 0; i < part.dim; ++i) *target++ = source[i] * call.scale;
                }
                starts_[row] = first_key(call, item, limit);
                limits_[row] = std::min(limit, item.key_end);
            }
        }
        struct Wide;
        float* wide = item.rows() < kWideRows && !call.rounded ? nullptr : floats<Wide>(wide_floats(dim, call.value_dim));
        const int32_t* selected = call.selected ? call.selected + item.first_token * call.selected_count : nullptr;
        tile_ = {queries, starts_, limits_, call.page_table + item.sequence * call.page_table_stride, item.rows(),
                 item.kv_head, dim, call.value_dim, wide, call.soft_cap, selected};
        return tile_;
    }

private:
    int64_t starts_[kMaxTileRows];
    int64_t limits_[kMaxTileRows];
    AttentionTile tile_{};
};

PackedQueries& packed_queries() {
    thread_local PackedQueries packed;
    return packed;
}

// The sum of a row's exponentials with that of its head's sink, relative to the maximum of the scores that have values.
float sum_with_sink(const AttentionState& state, int64_t row, float sink) {
    return state.sum[row] == 0.0f ? 0.0f : state.sum[row] + std::exp(sink - state.maximum[row]);
}

void write_row(const KernelTable& table, const Attention& call, const Item& item, const AttentionState& state,
               int64_t row) {
    const int64_t token = item.part * call.tokens + item.first_token + row / item.heads;
    const int64_t head = item.first_head + row % item.heads;
    const int64_t place = token * call.q_heads + head;
    const float sum = call.sinks ? sum_with_sink(state, row, call.sinks[head]) : state.sum[row];
    table.finish(state.accumulator + row * call.value_dim, sum, call.out + place * call.value_dim, call.value_dim);
    if (call.lse == nullptr) return;
    const bool unseen = state.sum[row] == 0.0f;
    call.lse[place] = unseen ? -std::numeric_limits<float>::infinity() : state.maximum[row] + std::log(state.sum[row]);
}

void attend(const KernelTable& table, const Attention& call, const AttentionTile& tile, int64_t split,
            const AttentionState& state) {
    (call.rounded ? table.attend_rounded : table.attend)(call.cache, tile, split, state);
}

// A whole item on one thread.
void run_item(const KernelTable& table, const Attention& call, const Item& item) {
    const int64_t dim = call.value_dim;
    const AttentionTile& tile = packed_queries().pack(call, item);
    float* memory = static_cast<float*>(scratch(2 * state_floats(tile.rows, dim) * 4));
    const AttentionState total = state_in(memory, tile.rows);
    const AttentionState part = state_in(memory + state_floats(tile.rows, dim), tile.rows);
    attend(table, call, tile, item.first_split, total);
    for (int64_t split = item.first_split + 1; split < item.end_split; ++split) {
        attend(table, call, tile, split, part);
        table.merge(total, part, tile.rows, dim);
    }
    for (int64_t row = 0; row < tile.rows; ++row) write_row(table, call, item, total, row);
}

// All items, split by split.
void run_splits(const KernelTable& table, const Attention& call, const std::vector<Item>& items, int threads) {
    struct Piece {  // one split, or, when these are done, some rows of all splits
        const Item* item;
        int64_t index;
        int64_t offset;
    };
    const int64_t dim = call.value_dim;
    std::vector<Piece> splits, merges;
    int64_t count = 0;
    for (const Item& item : items) {
        for (int64_t row = 0; row < item.rows(); row += kMergeRows) merges.push_back({&item, row, count});
        for (int64_t split = item.first_split; split < item.end_split; ++split) {
            splits.push_back({&item, split, count});
            count += state_floats(item.rows(), dim);
        }
    }
    struct Splits;
    float* memory = floats<Splits>(count);
    parallel_for(static_cast<int64_t>(splits.size()), threads, [&](int64_t i) {
        const Piece& piece = splits[static_cast<std::size_t>(i)];
        const AttentionTile& tile = packed_queries().pack(call, *piece.item);
        attend(table, call, tile, piece.index, state_in(memory + piece.offset, tile.rows));
    });
    parallel_for(static_cast<int64_t>(merges.size()), threads, [&](int64_t i) {
        const Piece& piece = merges[static_cast<std::size_t>(i)];
        const Item& item = *piece.item;
        const AttentionState total = state_in(memory + piece.offset, item.rows());
        const int64_t rows = std::min(kMergeRows, item.rows() - piece.index);
        for (int64_t split = item.first_split + 1; split < item.end_split; ++split) {
            float* later = memory + piece.offset + (split - item.first_split) * state_floats(item.rows(), dim);
            table.merge(rows_from(total, piece.index, dim), rows_from(state_in(later, item.rows()), piece.index, dim), rows,
                        dim);
        }
        for (int64_t row = piece.index; row < piece.index + rows; ++row) write_row(table, call, item, total, row);
    });
}

// Adds the item for every group of heads, of tile_rows query rows at most. `limit`: the key behind the last one it sees.
// Returns the work in nanoseconds, about.
double add_heads(const Attention& call, Item item, int64_t limit, int64_t tile_rows, std::vector<Item>& items) {
    const int64_t group = call.q_heads / call.kv_heads;
    const int64_t pieces = (group + tile_rows - 1) / tile_rows;
    const int64_t start = first_key(call, item, item.first_limit);
    item.first_split = start / kKeySplit;
    item.end_split = std::max(item.first_split + 1, (limit + kKeySplit - 1) / kKeySplit);
    for (int64_t head = 0; head < call.kv_heads; ++head)
        for (int64_t piece = 0; piece < pieces; ++piece) {
            item.kv_head = head;
            item.first_head = head * group + group * piece / pieces;
            item.heads = head * group + group * (piece + 1) / pieces - item.first_head;
            items.push_back(item);
        }
    const int64_t keys = std::max<int64_t>(1, limit + 1 - start);
    return static_cast<double>(keys * item.tokens * call.q_heads * (call.key_dim() + call.value_dim)) * 0.05;
}

// The items of the queries begin … end - 1 of a sequence, each of which has its own list of keys.
double add_selecting_items(const Attention& call, int64_t sequence, int64_t begin, int64_t end, int64_t tile_rows,
                           std::vector<Item>& items) {
    double work = 0;
    for (int64_t token = begin; token < end; ++token) {
        const int32_t* list = call.selected + token * call.selected_count;
        const int32_t* end_of_list =
            std::partition_point(list, list + call.selected_count, [](int32_t entry) { return entry >= 0; });
        const int64_t count = end_of_list - list;
        work += add_heads(call, {sequence, 0, token, 1, count, 0, count, 0, 0, 0, 0, 0}, count, tile_rows, items);
    }
    return work;
}

// The items of one part of a sequence's keys, and their work.
double add_items(const Attention& call, int64_t sequence, int64_t part, int64_t tile_rows, std::vector<Item>& items) {
    const int64_t begin = call.query_start ? call.query_start[sequence] : sequence * call.queries_each;
    const int64_t end = call.query_start ? call.query_start[sequence + 1] : begin + call.queries_each;
    if (call.selected) return add_selecting_items(call, sequence, begin, end, tile_rows, items);
    const int64_t length = call.lengths[sequence];
    const int64_t pages = (length + call.cache.page_size - 1) / call.cache.page_size;
    const int64_t share = (pages + call.parts - 1) / call.parts * call.cache.page_size;
    const int64_t key_begin = std::min(part * share, length);
    const int64_t key_end = std::min(key_begin + share, length);
    const int64_t tile_tokens = std::max<int64_t>(1, tile_rows / (call.q_heads / call.kv_heads));
    double work = 0;
    for (int64_t token = begin; token < end; token += tile_tokens) {
        const int64_t tokens = std::min(tile_tokens, end - token);
        const int64_t first_limit = length - (end - token) + 1;
        const int64_t limit = std::min(first_limit + tokens - 1, key_end);
        work += add_heads(call, {sequence, part, token, tokens, first_limit, key_begin, key_end, 0, 0, 0, 0, 0}, limit,
                          tile_rows, items);
    }
    return work;
}

}  // namespace

void run_attention(const Attention& call) {
    const bool coarse = call.cache.type == KvType::kBFloat16 || call.cache.type == KvType::kE4M3;
    if (call.rounded && (kernels().attend_rounded == nullptr || !coarse))
        throw std::logic_error(std::string("instruction set ") + kernels().name +
                               " has no attention with rounded activations over this cache");
    thread_local std::vector<Item> items;
    double work = 0;
    int64_t most_splits = 0;
    // Large tiles read the keys least often; smaller ones where the threads would otherwise have nothing to do.
    for (int64_t tile_rows = kMaxTileRows;; tile_rows /= 2) {
        items.clear();
        work = 0;
        for (int64_t part = 0; part < call.parts; ++part)
            for (int64_t b = 0; b < call.sequences; ++b) work += add_items(call, b, part, tile_rows, items);
        int64_t pieces = 0;
        most_splits = 0;
        for (const Item& item : items) {
            pieces += item.end_split - item.first_split;
            most_splits = std::max(most_splits, item.end_split - item.first_split);
        }
        if (tile_rows <= kLeastTileRows || pieces >= 2 * threads_for(work)) break;
    }
    const KernelTable& table = kernels();
    const int64_t count = static_cast<int64_t>(items.size());
    const int threads = threads_for(work);
    if (threads > 1 && most_splits > 1 && count < 4 * threads) return run_splits(table, call, items, threads);
    const Item* list = items.data();  // `items` names another vector on the other threads
    parallel_for(count, threads, [&](int64_t i) { run_item(table, call, list[i]); });
}

void run_latent_prologue(const LatentPrologue& call, int64_t tokens) {
    const KernelTable& table = kernels();
    const int64_t elements = call.q_heads * call.rotary_dim + call.latent_dim + call.rotary_dim;
    over_ranges(tokens, 1, threads_for(static_cast<double>(tokens * elements) * 0.5), 2,
                [&](int64_t begin, int64_t end) { table.latent_prologue(call, begin, end); });
}

void run_merge_partials(const PartialMerge& call) {
    const KernelTable& table = kernels();
    over_ranges(call.rows, 1, threads_for(static_cast<double>(call.rows * call.parts * call.dim) * 0.2), 2,
                [&](int64_t begin, int64_t end) { table.merge_partials(call, begin, end); });
}

}  // namespace tokenspeed
