// Spreads latent attention with expanded keys and values over threads. Contract: tokenspeed_kernel/ops/mla_expanded.py.
//
// A work item is one head and a range of a sequence's queries. It goes over the positions that they see, kExpandedKeys at a
// time: gathers the latents, multiplies them by the head's rows of the up-projection, and shows the keys and values to all
// queries of the range, which keep the state of their softmax meanwhile. So a key is expanded once for a range, and no more
// of them exist at a time than the second-level cache holds. Memory is the thread's: it grows neither with the context nor
// with the heads nor, beyond kMostQueries, with the chunk.
#include "expanded.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "addresses.hpp"
#include "drivers.hpp"
#include "pool.hpp"
#include "recording.hpp"
#include "threads.hpp"
#include "weight_formats.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tokenspeed {
namespace {

constexpr int64_t kMostQueries = 2048;   // of an item: bounds the queries and states that it keeps
constexpr int64_t kLeastQueries = 256;   // where items are cut smaller so that every thread has some
constexpr int64_t kItemsEach = 2;        // for each thread

struct Call {
    Weight up;  // [heads * (plain + value), latent]
    const float* q;
    int64_t q_stride;
    int64_t heads, plain, rotary, value;
    Cache cache;
    const int32_t* page_table;
    int64_t page_table_stride;
    const int32_t* query_start;
    const int32_t* lengths;
    int64_t sequences;
    float scale;
    bool rounded;
    float* out;  // [tokens, heads, value]

    int64_t latent() const { return up.columns; }
    int64_t key() const { return plain + rotary; }
    // Rows of the up-projection for a head's keys, or for its values; results lie `stride` apart.
    Weight rows_for(int64_t head, bool values, int64_t stride) const {
        const int64_t first = head * (plain + value) + (values ? plain : 0);
        return {up.format, stride, up.columns, up.row_bytes, up.data + first * up.row_bytes, nullptr};
    }
};

struct Item {
    int64_t sequence;
    int64_t head;
    int64_t first_token;  // row of q
    int64_t tokens;
    int64_t first_limit;  // keys that the first of the tokens sees; below 1: none

    int64_t last_limit() const { return first_limit + tokens - 1; }
};

// Pieces of one stretch of memory, each aligned to a line; without memory it counts.
class Pieces {
public:
    explicit Pieces(void* memory) : memory_(reinterpret_cast<Address>(memory)) {}
    template <class T>
    T* take(int64_t count) {
        T* piece = at<T>(memory_ + static_cast<Address>(taken_));
        taken_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return piece;
    }
    int64_t taken() const { return taken_; }

private:
    Address memory_;
    int64_t taken_ = 0;
};

// What a thread works in.
struct Room {
    float* latents;     // [kExpandedKeys, latent]; one of them where the products are rounded
    uint16_t* halves;   // all of them, rounded, where the products are
    float* keys;        // [kExpandedKeys, key]
    float* values;      // [kExpandedKeys, value]
    float* products;    // what KernelTable::linear needs
    uint16_t* rows;     // what RoundedExpansion::turn needs, and fills
    uint16_t* turned;
    float* queries;     // [tokens, key], scaled; of one token where they are rounded
    uint16_t* rounded;  // [tokens, …], the same rounded
    AttentionState state;

    Room(const Call& call, const KernelTable& table, int64_t tokens, Pieces& pieces) {
        const bool products_rounded = rounds_products(call);
        latents = pieces.take<float>((products_rounded ? 1 : kExpandedKeys) * call.latent());
        halves = pieces.take<uint16_t>(products_rounded ? kExpandedKeys * table.rounded->stride(call.up) : 0);
        keys = pieces.take<float>(kExpandedKeys * call.key());
        values = pieces.take<float>(kExpandedKeys * call.value);
        products = pieces.take<float>(products_rounded ? 0 : table.linear_scratch(call.up) / 4);
        const RoundedExpansion* expansion = call.rounded ? table.rounded_expansion : nullptr;
        rows = pieces.take<uint16_t>(expansion ? expansion->row_halves(call.key(), call.value) : 0);
        turned = pieces.take<uint16_t>(expansion ? expansion->turned_halves(call.key(), call.value) : 0);
        queries = pieces.take<float>((expansion ? 1 : tokens) * call.key());
        rounded = pieces.take<uint16_t>(expansion ? tokens * expansion->query_halves(call.key()) : 0);
        state.maximum = pieces.take<float>(tokens);
        state.sum = pieces.take<float>(tokens);
        state.accumulator = pieces.take<float>(tokens * call.value);
    }

    // A latent of bfloat16 or less is rounded already: with bfloat16 weights its products are those of the rounded kind.
    static bool rounds_products(const Call& call) { return call.rounded && call.up.format == WeightFormat::kBFloat16; }
};

// The latents of some positions, and the rotated parts to the ends of their keys.
void gather(const Call& call, const KernelTable& table, int64_t sequence, const ExpandedKeys& expanded, const Room& room) {
    const KvType type = call.cache.type;
    const int64_t bytes = element_bytes(type), latent = call.latent();
    const int32_t* pages = call.page_table + sequence * call.page_table_stride;
    const int64_t stride = Room::rounds_products(call) ? table.rounded->stride(call.up) : 0;
    for (int64_t j = 0; j < expanded.count; ++j) {
        const int64_t position = expanded.begin + j;
        const uint8_t* entry = call.cache.keys.data + (pages[position / call.cache.page_size] * call.cache.keys.block_stride +
                                                       position % call.cache.page_size * call.cache.keys.token_stride) * bytes;
        if (stride > 0 && type == KvType::kBFloat16) {
            std::memcpy(room.halves + j * stride, entry, static_cast<std::size_t>(latent) * 2);
            std::memset(room.halves + j * stride + latent, 0, static_cast<std::size_t>(stride - latent) * 2);
        } else {
            float* const wide = room.latents + (stride > 0 ? 0 : j * latent);
            table.load_entry(type, entry, wide, latent);
            if (stride > 0) table.rounded->round_rows(call.up, wide, 1, room.halves + j * stride);
        }
        table.load_entry(type, entry + latent * bytes, room.keys + j * call.key() + call.plain, call.rotary);
    }
}

// Keys and values of a head at the positions of `expanded`, to where it says.
void expand(const Call& call, const KernelTable& table, const Item& item, const ExpandedKeys& expanded, const Room& room) {
    gather(call, table, item.sequence, expanded, room);
    const auto multiply = [&](const Weight& weight, int64_t rows, float* out) {
        if (Room::rounds_products(call))
            table.rounded->linear(weight, room.halves, expanded.count, out, 0, rows);
        else
            table.linear(weight, room.latents, expanded.count, out, 0, rows, room.products);
    };
    multiply(call.rows_for(item.head, false, call.key()), call.plain, room.keys);
    multiply(call.rows_for(item.head, true, call.value), call.value, room.values);
    if (call.rounded) table.rounded_expansion->turn(expanded, room.rows, room.turned);
}

// Scales the item's queries, and rounds them where they are to be.
void take_queries(const Call& call, const KernelTable& table, const Item& item, const Room& room) {
    const int64_t width = call.key();
    for (int64_t t = 0; t < item.tokens; ++t) {
        const float* source = call.q + (item.first_token + t) * call.q_stride + item.head * width;
        float* target = room.queries + (call.rounded ? 0 : t * width);
        for (int64_t i = 0; i < width; ++i) target[i] = source[i] * call.scale;
        if (call.rounded) {
            const RoundedExpansion& expansion = *table.rounded_expansion;
            expansion.round_query(target, width, room.rounded + t * expansion.query_halves(width));
        }
    }
}

// Shows the expanded keys to the item's queries from `first` on, kMaxTileRows at most.
void attend(const Call& call, const KernelTable& table, const Item& item, const ExpandedKeys& expanded, const Room& room,
            int64_t first) {
    static constexpr int64_t kStarts[kMaxTileRows] = {};
    int64_t limits[kMaxTileRows];
    const int64_t rows = std::min(kMaxTileRows, item.tokens - first), width = call.key();
    for (int64_t r = 0; r < rows; ++r) limits[r] = item.first_limit + first + r;
    const float* queries = call.rounded ? nullptr : room.queries + first * width;
    const AttentionTile tile{queries, kStarts, limits, nullptr, rows, 0, width, call.value, nullptr, 0.0f};
    const AttentionState state{room.state.maximum + first, room.state.sum + first,
                               room.state.accumulator + first * call.value};
    if (!call.rounded) return table.attend_expanded(expanded, tile, state);
    const RoundedExpansion& expansion = *table.rounded_expansion;
    expansion.attend(expanded, room.turned, tile, room.rounded + first * expansion.query_halves(width), state);
}

void run_item(const Call& call, const KernelTable& table, const Item& item) {
    Pieces counted(nullptr);
    Room(call, table, item.tokens, counted);
    Pieces pieces(scratch(counted.taken()));
    const Room room(call, table, item.tokens, pieces);
    take_queries(call, table, item, room);
    std::fill_n(room.state.maximum, item.tokens, -std::numeric_limits<float>::infinity());
    std::fill_n(room.state.sum, item.tokens, 0.0f);
    std::fill_n(room.state.accumulator, item.tokens * call.value, 0.0f);
    for (int64_t begin = 0; begin < item.last_limit(); begin += kExpandedKeys) {
        const int64_t count = std::min(kExpandedKeys, item.last_limit() - begin);
        const ExpandedKeys expanded{room.keys, room.values, call.key(), call.value, begin, count};
        expand(call, table, item, expanded, room);
        const int64_t blind = std::max<int64_t>(0, begin + 1 - item.first_limit);  // queries that see none of these
        for (int64_t first = blind / kMaxTileRows * kMaxTileRows; first < item.tokens; first += kMaxTileRows)
            attend(call, table, item, expanded, room, first);
    }
    for (int64_t t = 0; t < item.tokens; ++t)
        table.finish(room.state.accumulator + t * call.value, room.state.sum[t],
                     call.out + ((item.first_token + t) * call.heads + item.head) * call.value, call.value);
}

// Work of an item in nanoseconds, about.
double work_of(const Call& call, const Item& item) {
    const double seen = static_cast<double>(std::max<int64_t>(0, item.last_limit()));
    return 0.02 * seen * static_cast<double>(call.latent() * (call.plain + call.value)) +
           0.02 * seen * static_cast<double>(item.tokens * (call.key() + call.value));
}

void run_expanded(const Call& call) {
    const KernelTable& table = kernels();
    const bool coarse = call.cache.type == KvType::kBFloat16 || call.cache.type == KvType::kE4M3;
    if (call.rounded && (table.rounded_expansion == nullptr || !coarse))
        throw std::logic_error(std::string("instruction set ") + table.name +
                               " has no attention with rounded activations over this cache");
    const int64_t wanted = (kItemsEach * thread_limit() + call.heads - 1) / call.heads;
    std::vector<Item> items;
    double work = 0;
    for (int64_t b = 0; b < call.sequences; ++b) {
        const int64_t begin = call.query_start[b], tokens = call.query_start[b + 1] - begin;
        const int64_t pieces = std::max((tokens + kMostQueries - 1) / kMostQueries,
                                        std::min(wanted, tokens / kLeastQueries));
        // The last pieces see the most keys and come first: a late one must not hold the others for long.
        for (int64_t piece = pieces - 1; piece >= 0; --piece) {
            const int64_t first = tokens * piece / pieces, end = tokens * (piece + 1) / pieces;
            for (int64_t head = 0; head < call.heads; ++head) {
                items.push_back({b, head, begin + first, end - first, call.lengths[b] - tokens + first + 1});
                work += work_of(call, items.back());
            }
        }
    }
    const Item* list = items.data();
    parallel_for(static_cast<int64_t>(items.size()), threads_for(work),
                 [&](int64_t i) { run_item(call, table, list[i]); });
}

// The up-projection of a layer, where it lies; who binds it keeps the memory alive.
class UpProjection {
public:
    UpProjection(const std::string& format, int64_t rows, int64_t columns, Address data, int64_t heads)
        : up_(weight_at(format, rows, columns, at<const uint8_t>(data), nullptr)), heads_(heads) {}

    void attend(Address q, int64_t q_stride, int64_t plain, int64_t rotary, KvType type, Address cache, int64_t block_stride,
                int64_t token_stride, int64_t page_size, Address page_table, int64_t page_table_stride, Address query_start,
                Address lengths, int64_t sequences, float scale, bool rounded, Address out) const {
        const CachePlane plane{at<uint8_t>(cache), block_stride, 0, token_stride};
        const Call call{up_,
                        at<const float>(q),
                        q_stride,
                        heads_,
                        plain,
                        rotary,
                        up_.rows / heads_ - plain,
                        {plane, plane, type, page_size, up_.columns + rotary},
                        at<const int32_t>(page_table),
                        page_table_stride,
                        at<const int32_t>(query_start),
                        at<const int32_t>(lengths),
                        sequences,
                        scale,
                        rounded,
                        at<float>(out)};
        nb::gil_scoped_release released;
        make_call([call] { run_expanded(call); });
    }

private:
    Weight up_;
    int64_t heads_;
};

}  // namespace

void bind_expanded(nb::module_& m) {
    nb::class_<UpProjection>(m, "UpProjection", "Latent attention that expands keys and values by a matrix, which is not owned.")
        .def(nb::init<const std::string&, int64_t, int64_t, Address, int64_t>(), "format"_a, "rows"_a, "columns"_a, "data"_a,
             "heads"_a)
        .def("attend", &UpProjection::attend);
}

}  // namespace tokenspeed
