// Spreads attention over threads. One work item is one tile of query tokens of one sequence against one KV head, so that the
// keys and values are read once for all query heads of the group. Where there are few items and long sequences, the splits
// of an item are computed apart and merged afterwards, with the same arithmetic in the same order.
#include <algorithm>
#include <cstring>
#include <vector>

#include "drivers.hpp"
#include "pool.hpp"
#include "threads.hpp"

namespace tokenspeed {

namespace {

constexpr int64_t kTileRows = 32;  // query rows of an item, unless one token has more heads to a group

struct Item {
    int64_t sequence;
    int64_t first_token;  // row of q
    int64_t tokens;
    int64_t first_limit;  // keys that the first of the tokens sees
    int64_t kv_head;
    int64_t first_split;  // the one that the first token's first key lies in
    int64_t end_split;
};

int64_t state_floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }

AttentionState state_in(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }

// The first key that a query sees, where `limit` is the key behind its last.
int64_t first_key(const Attention& call, int64_t limit) {
    return call.window > 0 ? std::max<int64_t>(0, limit - call.window) : 0;
}

// The queries of an item, packed and scaled, with the keys each row sees.
class PackedQueries {
public:
    void pack(const Attention& call, const Item& item) {
        const int64_t group = call.q_heads / call.kv_heads;
        const int64_t dim = call.cache.head_dim;
        rows_ = item.tokens * group;
        for (int64_t t = 0; t < item.tokens; ++t) {
            const float* source = call.q + (item.first_token + t) * call.q_stride + item.kv_head * group * dim;
            float* target = queries_ + t * group * dim;
            for (int64_t i = 0; i < group * dim; ++i) target[i] = source[i] * call.scale;
            std::fill_n(starts_ + t * group, group, first_key(call, item.first_limit + t));
            std::fill_n(limits_ + t * group, group, item.first_limit + t);
        }
        tile_ = {queries_, starts_, limits_, call.page_table + item.sequence * call.page_table_stride, rows_, item.kv_head};
    }
    const AttentionTile& tile() const { return tile_; }

private:
    alignas(64) float queries_[kMaxTileRows * kMaxHeadDim];
    int64_t starts_[kMaxTileRows];
    int64_t limits_[kMaxTileRows];
    int64_t rows_ = 0;
    AttentionTile tile_{};
};

PackedQueries& packed_queries() {
    thread_local PackedQueries packed;
    return packed;
}

void write_out(const KernelTable& table, const Attention& call, const Item& item, const AttentionState& state) {
    const int64_t group = call.q_heads / call.kv_heads;
    const int64_t dim = call.cache.head_dim;
    for (int64_t row = 0; row < item.tokens * group; ++row) {
        const int64_t token = item.first_token + row / group;
        float* out = call.out + (token * call.q_heads + item.kv_head * group + row % group) * dim;
        table.finish(state.accumulator + row * dim, state.sum[row], out, dim);
    }
}

// A whole item on one thread.
void run_item(const KernelTable& table, const Attention& call, const Item& item) {
    const int64_t dim = call.cache.head_dim;
    PackedQueries& packed = packed_queries();
    packed.pack(call, item);
    const int64_t rows = packed.tile().rows;
    float* memory = static_cast<float*>(scratch(2 * state_floats(rows, dim) * 4));
    const AttentionState total = state_in(memory, rows);
    const AttentionState part = state_in(memory + state_floats(rows, dim), rows);
    table.attend(call.cache, packed.tile(), item.first_split, total);
    for (int64_t split = item.first_split + 1; split < item.end_split; ++split) {
        table.attend(call.cache, packed.tile(), split, part);
        table.merge(total, part, rows, dim);
    }
    write_out(table, call, item, total);
}

// All items, split by split.
void run_splits(const KernelTable& table, const Attention& call, const std::vector<Item>& items, int threads) {
    struct Part {
        const Item* item;
        int64_t split;
        int64_t offset;
    };
    const int64_t group = call.q_heads / call.kv_heads;
    const int64_t dim = call.cache.head_dim;
    std::vector<Part> parts;
    int64_t floats = 0;
    for (const Item& item : items)
        for (int64_t split = item.first_split; split < item.end_split; ++split) {
            parts.push_back({&item, split, floats});
            floats += state_floats(item.tokens * group, dim);
        }
    std::vector<float> memory(static_cast<std::size_t>(floats));
    const int64_t count = static_cast<int64_t>(parts.size());
    parallel_for(count, threads, [&](int64_t i) {
        const Part& part = parts[static_cast<std::size_t>(i)];
        PackedQueries& packed = packed_queries();
        packed.pack(call, *part.item);
        table.attend(call.cache, packed.tile(), part.split, state_in(memory.data() + part.offset, packed.tile().rows));
    });
    const Part* part = parts.data();
    for (const Item& item : items) {
        const int64_t rows = item.tokens * group;
        const AttentionState total = state_in(memory.data() + part->offset, rows);
        ++part;
        for (int64_t split = item.first_split + 1; split < item.end_split; ++split, ++part)
            table.merge(total, state_in(memory.data() + part->offset, rows), rows, dim);
        write_out(table, call, item, total);
    }
}

}  // namespace

void run_attention(const Attention& call) {
    const int64_t group = call.q_heads / call.kv_heads;
    const int64_t dim = call.cache.head_dim;
    const int64_t tile_tokens = std::max<int64_t>(1, kTileRows / group);
    thread_local std::vector<Item> items;
    items.clear();
    double work = 0;
    int64_t most_splits = 0;
    for (int64_t b = 0; b < call.sequences; ++b) {
        const int64_t begin = call.query_start ? call.query_start[b] : b * call.queries_each;
        const int64_t end = call.query_start ? call.query_start[b + 1] : begin + call.queries_each;
        const int64_t length = call.lengths[b];
        if (length == 0) {
            std::fill_n(call.out + begin * call.q_heads * dim, (end - begin) * call.q_heads * dim, 0.0f);
            continue;
        }
        for (int64_t token = begin; token < end; token += tile_tokens) {
            const int64_t tokens = std::min(tile_tokens, end - token);
            const int64_t first_limit = length - (end - token) + 1;
            const int64_t start = first_key(call, first_limit);
            const int64_t limit = first_limit + tokens - 1;
            const int64_t first_split = start / kKeySplit;
            const int64_t end_split = std::max(first_split + 1, (limit + kKeySplit - 1) / kKeySplit);
            for (int64_t head = 0; head < call.kv_heads; ++head)
                items.push_back({b, token, tokens, first_limit, head, first_split, end_split});
            work += static_cast<double>((limit + 1 - start) * tokens * call.q_heads * dim) * 0.1;
            most_splits = std::max(most_splits, end_split - first_split);
        }
    }
    const KernelTable& table = kernels();
    const int64_t count = static_cast<int64_t>(items.size());
    const int threads = threads_for(work);
    if (threads > 1 && most_splits > 1 && count < 4 * threads) return run_splits(table, call, items, threads);
    const Item* list = items.data();  // `items` names another vector on the other threads
    parallel_for(count, threads, [&](int64_t i) { run_item(table, call, list[i]); });
}

}  // namespace tokenspeed
