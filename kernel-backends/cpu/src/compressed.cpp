// Entries that stand for several tokens, rows written as they are, and rotation in place. Contracts:
// tokenspeed_kernel/ops/compressed.py and rotary.py.
#include "compressed.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "addresses.hpp"
#include "drivers.hpp"
#include "pool.hpp"
#include "recording.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace tokenspeed {
namespace {

// A plane of entries of one head in pages.
struct Plane {
    uint8_t* data;
    KvType type;
    int64_t block_stride, token_stride;  // in elements
    int64_t page_size;

    uint8_t* entry(int64_t block, int64_t offset) const {
        return data + (block * block_stride + offset * token_stride) * element_bytes(type);
    }
};

struct Compression {
    Plane values, gates, entries;
    const int32_t* page_table;
    int64_t page_table_stride;
    const int32_t* query_start;
    const int32_t* lengths;
    int64_t rows;
    const float* bias;  // [stride, columns]
    int64_t stride, columns;
    const float* norm;  // [width]
    int64_t width;
    float epsilon;
    const float* cos_sin;
    int64_t rotary;
    const int64_t* slots;
    bool overlapping;
};

// An entry that a step completes: of the tokens from `first` on of a row.
struct Made {
    int64_t row;
    int64_t first;
    int64_t slot;
};

// Pairs of neighbours, in place.
void turn(float* x, const float* angles, int64_t rotary) {
    const int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float low = x[2 * i], high = x[2 * i + 1];
        x[2 * i] = low * angles[i] - high * angles[half + i];
        x[2 * i + 1] = high * angles[i] + low * angles[half + i];
    }
}

void make_entry(const Compression& call, const KernelTable& table, const Made& made) {
    const int64_t width = call.width, columns = call.columns, before = call.overlapping ? call.stride : 0;
    const int64_t begin = made.first < before ? made.first : made.first - before;
    const int64_t count = made.first + call.stride - begin;
    thread_local std::vector<float> memory;
    memory.resize(static_cast<std::size_t>(2 * columns + (2 * count + 2) * width));
    float* row = memory.data();
    float* values = row + 2 * columns;
    float* gates = values + count * width;
    float* best = gates + count * width;
    float* total = best + width;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t position = begin + i;
        const int64_t block = call.page_table[made.row * call.page_table_stride + position / call.values.page_size];
        const int64_t offset = position % call.values.page_size;
        // The tokens before an entry's own take part with their first elements, its own with their last.
        const int64_t from = position < made.first ? 0 : columns - width;
        table.load_entry(call.values.type, call.values.entry(block, offset), row, columns);
        table.load_entry(call.gates.type, call.gates.entry(block, offset), row + columns, columns);
        const float* bias = call.bias + position % call.stride * columns + from;
        for (int64_t d = 0; d < width; ++d) {
            values[i * width + d] = row[from + d];
            const float gate = row[columns + from + d] + bias[d];
            gates[i * width + d] = gate;
            best[d] = i == 0 || gate > best[d] ? gate : best[d];
        }
    }
    for (int64_t i = 0; i < count; ++i)
        for (int64_t d = 0; d < width; ++d) gates[i * width + d] -= best[d];
    table.shifted_exp(gates, 0.0f, gates, count * width);
    for (int64_t d = 0; d < width; ++d) best[d] = total[d] = 0.0f;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t d = 0; d < width; ++d) {
            best[d] += gates[i * width + d];
            total[d] += gates[i * width + d] * values[i * width + d];
        }
    for (int64_t d = 0; d < width; ++d) total[d] /= best[d];
    table.rms_norm(total, nullptr, call.norm, call.epsilon, total, 1, width);
    turn(total + width - call.rotary, call.cos_sin + made.first * call.rotary, call.rotary);
    const int64_t page = call.entries.page_size;
    table.store_entry(call.entries.type, total, call.entries.entry(made.slot / page, made.slot % page), width);
}

void run_compress(const Compression& call) {
    std::vector<Made> made;
    for (int64_t row = 0; row < call.rows; ++row) {
        const int64_t end = call.query_start[row + 1];
        for (int64_t query = call.query_start[row]; query < end; ++query) {
            const int64_t stop = call.lengths[row] - (end - 1 - query);
            if (stop < call.stride || stop % call.stride != 0) continue;
            const int64_t slot = std::max<int64_t>(0, call.slots[query]) / call.stride;
            if (slot >= call.entries.page_size) made.push_back({row, stop - call.stride, slot});  // else padding
        }
    }
    const KernelTable& table = kernels();
    const double work = static_cast<double>(static_cast<int64_t>(made.size()) * call.stride * call.columns) * 4.0;
    const Made* list = made.data();
    parallel_for(static_cast<int64_t>(made.size()), threads_for(work),
                 [&](int64_t i) { make_entry(call, table, list[i]); });
}

void compress(Address values, int64_t values_block, int64_t values_token, Address gates, int64_t gates_block,
              int64_t gates_token, int64_t page_size, KvType type, Address page_table, int64_t page_table_stride,
              Address query_start, Address lengths, int64_t rows, Address bias, int64_t stride, int64_t columns, Address norm,
              int64_t width, float epsilon, Address cos_sin, int64_t rotary, KvType entry_type, Address entries,
              int64_t entries_block, int64_t entries_token, int64_t entries_page, Address slots, bool overlapping) {
    const Compression call{{at<uint8_t>(values), type, values_block, values_token, page_size},
                           {at<uint8_t>(gates), type, gates_block, gates_token, page_size},
                           {at<uint8_t>(entries), entry_type, entries_block, entries_token, entries_page},
                           at<const int32_t>(page_table),
                           page_table_stride,
                           at<const int32_t>(query_start),
                           at<const int32_t>(lengths),
                           rows,
                           at<const float>(bias),
                           stride,
                           columns,
                           at<const float>(norm),
                           width,
                           epsilon,
                           at<const float>(cos_sin),
                           rotary,
                           at<const int64_t>(slots),
                           overlapping};
    nb::gil_scoped_release released;
    make_call([call] { run_compress(call); });
}

void write_entries(Address x, int64_t x_stride, int64_t tokens, int64_t width, KvType type, Address cache, int64_t block_stride,
                   int64_t token_stride, int64_t page_size, Address slots) {
    const Plane plane{at<uint8_t>(cache), type, block_stride, token_stride, page_size};
    nb::gil_scoped_release released;
    make_call([=] {
        const KernelTable& table = kernels();
        over_ranges(tokens, 1, threads_for(static_cast<double>(tokens * width) * 0.2), 2, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                const int64_t slot = at<const int64_t>(slots)[t];
                if (slot >= page_size)  // else padding: block 0 is never read
                    table.store_entry(type, at<const float>(x) + t * x_stride,
                                      plane.entry(slot / page_size, slot % page_size), width);
            }
        });
    });
}

struct Rotation {
    float* x;
    int64_t token_stride, head_stride, heads;
    const int32_t* positions;  // [axes, tokens], an axis every position_stride
    int64_t position_stride;
    const int32_t* axes;  // of each pair, or null: one axis
    const float* cos_sin;
    int64_t rotary;
    bool neighbours;
};

void rotate_token(const Rotation& call, int64_t token) {
    const int64_t half = call.rotary / 2;
    for (int64_t i = 0; i < half; ++i) {
        const int64_t axis = call.axes ? call.axes[i] : 0;
        const float* angles = call.cos_sin + call.positions[axis * call.position_stride + token] * call.rotary;
        const float cosine = angles[i], sine = angles[half + i];
        float* first = call.x + token * call.token_stride + (call.neighbours ? 2 * i : i);
        for (int64_t head = 0; head < call.heads; ++head, first += call.head_stride) {
            float* second = first + (call.neighbours ? 1 : half);
            const float low = *first, high = *second;
            *first = low * cosine - high * sine;
            *second = high * cosine + low * sine;
        }
    }
}

void rotary(Address x, int64_t token_stride, int64_t head_stride, int64_t heads, int64_t tokens, Address positions,
            int64_t position_stride, Address axes, Address cos_sin, int64_t rotary_dim, bool neighbours) {
    const Rotation call{at<float>(x),
                        token_stride,
                        head_stride,
                        heads,
                        at<const int32_t>(positions),
                        position_stride,
                        at<const int32_t>(axes),
                        at<const float>(cos_sin),
                        rotary_dim,
                        neighbours};
    nb::gil_scoped_release released;
    make_call([call, tokens] {
        over_ranges(tokens, 1, threads_for(static_cast<double>(tokens * call.heads * call.rotary)), 2,
                    [&](int64_t begin, int64_t end) {
                        for (int64_t t = begin; t < end; ++t) rotate_token(call, t);
                    });
    });
}

void apply_sinks(Address x, Address lse, Address sinks, int64_t tokens, int64_t heads, int64_t width) {
    nb::gil_scoped_release released;
    make_call([=] {
        const int64_t rows = tokens * heads;
        over_ranges(rows, 1, threads_for(static_cast<double>(rows * width) * 0.2), 2, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                const float gap = at<const float>(lse)[row] - at<const float>(sinks)[row % heads];
                const float factor = 1.0f / (1.0f + std::exp(-gap));
                for (float *p = at<float>(x) + row * width, *last = p + width; p < last; ++p) *p *= factor;
            }
        });
    });
}

}  // namespace

void bind_compressed(nb::module_& m) {
    m.def("compress", &compress);
    m.def("apply_sinks", &apply_sinks);
    m.def("write_entries", &write_entries);
    m.def("rotary", &rotary);
}

}  // namespace tokenspeed
