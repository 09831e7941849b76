// moe.experts. Tokens are grouped by expert; an expert's weights are read once for all of its tokens. Two rounds over the
// threads, each of pieces of (expert, rows): gate, up and activation; then down, weighted and added up.
//
// A token's experts are added in the order of their ids, each by a product whose bits do not depend on the batch: what
// comes out for a token depends on nothing but that token.
#include "moe.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool.hpp"
#include "threads.hpp"

namespace tokenspeed {

namespace {

constexpr int64_t kGrain = 64;            // rows: a multiple of what the products, and the rounding, take together
constexpr int64_t kPiecesEach = 4;        // pieces of work for each thread in a round
constexpr int64_t kPieceFloats = 65536;   // results that a piece keeps at most, in the second-level cache
constexpr int64_t kWaveBytes = 32 << 20;  // of inputs and activations of the experts that are worked on together
constexpr int64_t kMostTokens = 512;      // of one group: more of an expert's tokens are another group

struct Pair {
    int64_t token;
    float weight;
};

// Tokens of one expert: its pairs [first, first + count), by token.
struct Group {
    int64_t expert;
    int64_t first;
    int64_t count;
    const void* inputs;  // [count], as Products has them
};

// Rows [begin, end) of a group's expert.
struct Piece {
    int64_t group;
    int64_t begin, end;
};

// Memory that begins at a cache line, kept for the next call.
class Bytes {
public:
    void grow(int64_t size) {
        const auto needed = static_cast<std::size_t>(size + kLine);
        if (memory_.size() < needed) memory_ = std::vector<char>(needed);
    }
    char* data() {
        return reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(memory_.data()) + kLine - 1) / kLine * kLine);
    }

private:
    static constexpr int64_t kLine = 64;
    std::vector<char> memory_;
};

struct Plan {
    std::vector<int64_t> starts;
    std::vector<Pair> pairs;
    std::vector<Group> groups;
    std::vector<Piece> pieces;
    Bytes inputs;
    Bytes activated;
};

// About a nanosecond a unit: a weight is unpacked once, and multiplied for each token.
double cost(int64_t rows, int64_t columns, int64_t tokens) {
    return static_cast<double>(rows) * static_cast<double>(columns) * (0.05 + 0.02 * static_cast<double>(tokens));
}

int64_t whole_grains(double rows) { return (static_cast<int64_t>(rows) / kGrain + 1) * kGrain; }

// Rows [first, first + count) of a weight as a weight.
Weight rows_of(const Weight& weight, int64_t first, int64_t count, const float* bias) {
    return {weight.format, count, weight.columns, weight.row_bytes, weight.data + first * weight.row_bytes,
            bias ? bias + first : nullptr};
}

// How experts multiply: inputs as they are, or rounded to bfloat16 beforehand. A row of inputs is row_bytes long.
class Products {
public:
    explicit Products(const Experts& experts) : table_(kernels()), rounded_(experts.rounded ? table_.rounded : nullptr) {
        const auto is_half = [](const Weight& weight) { return weight.format == WeightFormat::kBFloat16; };
        if (experts.rounded && (!rounded_ || !is_half(experts.gate_up) || !is_half(experts.down)))
            throw std::logic_error(std::string("instruction set ") + table_.name +
                                   " has no product of rounded activations with these weights");
    }

    bool takes_floats() const { return rounded_ == nullptr; }
    int64_t row_bytes(const Weight& weight) const { return rounded_ ? rounded_->stride(weight) * 2 : weight.columns * 4; }
    int64_t scratch_bytes(const Weight& weight) const { return rounded_ ? 0 : table_.linear_scratch(weight); }

    // Writes x [columns] to columns [begin, begin + columns) of a row of inputs; `begin` is a multiple of kGrain, and so is
    // `columns` where others follow.
    void prepare(const float* x, int64_t columns, char* row, int64_t begin) const {
        if (rounded_)
            rounded_->round_rows({WeightFormat::kBFloat16, 1, columns, 0, nullptr, nullptr}, x, 1,
                                 reinterpret_cast<uint16_t*>(row) + begin);
        else
            std::memcpy(row + begin * 4, x, static_cast<std::size_t>(columns) * 4);
    }

    // out [tokens, weight.rows] = inputs . weight^T. `memory` holds scratch_bytes.
    void multiply(const Weight& weight, const void* inputs, int64_t tokens, float* out, void* memory) const {
        if (rounded_)
            rounded_->linear(weight, static_cast<const uint16_t*>(inputs), tokens, out, 0, weight.rows);
        else
            table_.linear(weight, static_cast<const float*>(inputs), tokens, out, 0, weight.rows,
                          static_cast<float*>(memory));
    }

private:
    const KernelTable& table_;
    const RoundedProducts* rounded_;
};

// Fills plan.pairs, by expert and then by token, and plan.groups.
void group_tokens(int64_t experts, const int32_t* ids, const float* weights, int64_t tokens, int64_t top_k, Plan& plan) {
    plan.starts.assign(static_cast<std::size_t>(experts) + 1, 0);
    for (int64_t i = 0; i < tokens * top_k; ++i)
        if (ids[i] >= 0) ++plan.starts[static_cast<std::size_t>(ids[i]) + 1];
    plan.groups.clear();
    for (int64_t expert = 0; expert < experts; ++expert) {
        int64_t& end = plan.starts[static_cast<std::size_t>(expert) + 1];
        const int64_t count = end, first = plan.starts[static_cast<std::size_t>(expert)];
        end += first;
        for (int64_t done = 0; done < count; done += kMostTokens)
            plan.groups.push_back({expert, first + done, std::min(kMostTokens, count - done), nullptr});
    }
    plan.pairs.resize(static_cast<std::size_t>(plan.starts.back()));
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot)
            if (ids[slot] >= 0)
                plan.pairs[static_cast<std::size_t>(plan.starts[static_cast<std::size_t>(ids[slot])]++)] = {
                    token, weights[slot]};
}

class Wave {
public:
    // The groups [begin, end) of the plan.
    Wave(const Experts& experts, const Products& products, Plan& plan, std::size_t begin, std::size_t end, float* out)
        : experts_(experts), products_(products), plan_(plan), table_(kernels()), begin_(begin), end_(end), out_(out) {
        first_pair_ = plan.groups[begin].first;
        for (std::size_t g = begin; g < end; ++g) {
            most_ = std::max(most_, plan.groups[g].count);
            work_ += cost(3 * experts.intermediate(), experts.hidden(), plan.groups[g].count);
        }
        threads_ = threads_for(work_);
    }

    // Inputs of a group lie together: where they lie, if its tokens follow one another and nothing is rounded, else in a
    // copy.
    void gather(const float* x) {
        const int64_t hidden = experts_.hidden();
        const int64_t pairs = plan_.groups[end_ - 1].first + plan_.groups[end_ - 1].count - first_pair_;
        const int threads = threads_for(static_cast<double>(pairs * hidden) * 0.2);
        parallel_for(static_cast<int64_t>(end_ - begin_), threads, [&](int64_t index) {
            Group& group = plan_.groups[begin_ + static_cast<std::size_t>(index)];
            const Pair* pairs = plan_.pairs.data() + group.first;
            bool together = products_.takes_floats();
            for (int64_t i = 1; i < group.count; ++i) together = together && pairs[i].token == pairs[0].token + i;
            if (together) {
                group.inputs = x + pairs[0].token * hidden;
                return;
            }
            const int64_t row_bytes = products_.row_bytes(experts_.gate_up);
            char* inputs = plan_.inputs.data() + (group.first - first_pair_) * row_bytes;
            for (int64_t i = 0; i < group.count; ++i)
                products_.prepare(x + pairs[i].token * hidden, hidden, inputs + i * row_bytes, 0);
            group.inputs = inputs;
        });
    }

    // Gate, up and activation of each group, in pieces of about the same cost.
    void activate() {
        const int64_t inner = experts_.intermediate(), hidden = experts_.hidden();
        plan_.pieces.clear();
        const double target = work_ * 2.0 / 3.0 / static_cast<double>(threads_ * kPiecesEach);
        for (std::size_t g = begin_; g < end_; ++g) {
            const int64_t count = plan_.groups[g].count;
            const int64_t most = std::max(kGrain, kPieceFloats / 2 / count / kGrain * kGrain);
            const int64_t rows = std::min(most, whole_grains(target / cost(2, hidden, count)));
            for (int64_t row = 0; row < inner; row += rows)
                plan_.pieces.push_back({static_cast<int64_t>(g), row, std::min(inner, row + rows)});
        }
        const int64_t product_bytes = products_.scratch_bytes(experts_.gate_up);
        parallel_for(static_cast<int64_t>(plan_.pieces.size()), threads_, [&](int64_t index) {
            activate_piece(plan_.pieces[static_cast<std::size_t>(index)], product_bytes);
        });
    }

    // Down of all groups for a range of rows, added to the rows' elements of `out` in the order of the groups.
    void combine() {
        const int64_t hidden = experts_.hidden();
        const int64_t most = std::max(kGrain, kPieceFloats / most_ / kGrain * kGrain);
        const int64_t rows = std::min(most, whole_grains(static_cast<double>(hidden) / (threads_ * kPiecesEach)));
        const int64_t product_bytes = products_.scratch_bytes(experts_.down);
        parallel_for((hidden + rows - 1) / rows, threads_, [&](int64_t index) {
            combine_rows(index * rows, std::min(hidden, (index + 1) * rows), product_bytes);
        });
    }

private:
    void activate_piece(const Piece& piece, int64_t product_bytes) const {
        const Group& group = plan_.groups[static_cast<std::size_t>(piece.group)];
        const int64_t inner = experts_.intermediate(), rows = piece.end - piece.begin;
        const int64_t first = group.expert * 2 * inner + piece.begin;
        const Weight gate_rows = rows_of(experts_.gate_up, first, rows, experts_.gate_up_bias);
        const Weight up_rows = rows_of(experts_.gate_up, first + inner, rows, experts_.gate_up_bias);
        char* memory = static_cast<char*>(scratch(product_bytes + 2 * group.count * rows * 4));
        float* gate = reinterpret_cast<float*>(memory + product_bytes);
        float* up = gate + group.count * rows;
        products_.multiply(gate_rows, group.inputs, group.count, gate, memory);
        products_.multiply(up_rows, group.inputs, group.count, up, memory);
        // What is activated takes the place of the gate: each element is read before it is written.
        if (experts_.activation == GatedActivation::kSilu)
            table_.silu_and_mul(gate, rows, up, rows, gate, group.count, rows);
        else
            table_.clamped_swiglu(gate, rows, up, rows, experts_.alpha, experts_.limit, experts_.offset, gate,
                                  group.count, rows);
        const int64_t row_bytes = products_.row_bytes(experts_.down);
        char* activated = plan_.activated.data() + (group.first - first_pair_) * row_bytes;
        for (int64_t i = 0; i < group.count; ++i)
            products_.prepare(gate + i * rows, rows, activated + i * row_bytes, piece.begin);
    }

    void combine_rows(int64_t begin, int64_t end, int64_t product_bytes) const {
        const int64_t hidden = experts_.hidden(), rows = end - begin;
        const int64_t row_bytes = products_.row_bytes(experts_.down);
        char* memory = static_cast<char*>(scratch(product_bytes + most_ * rows * 4));
        float* results = reinterpret_cast<float*>(memory + product_bytes);
        for (std::size_t g = begin_; g < end_; ++g) {
            const Group& group = plan_.groups[g];
            const Weight down_rows = rows_of(experts_.down, group.expert * hidden + begin, rows, experts_.down_bias);
            const char* activated = plan_.activated.data() + (group.first - first_pair_) * row_bytes;
            products_.multiply(down_rows, activated, group.count, results, memory);
            for (int64_t i = 0; i < group.count; ++i) {
                const Pair& pair = plan_.pairs[static_cast<std::size_t>(group.first + i)];
                float* sums = out_ + pair.token * hidden + begin;
                for (int64_t row = 0; row < rows; ++row) sums[row] += pair.weight * results[i * rows + row];
            }
        }
    }

    const Experts& experts_;
    const Products& products_;
    Plan& plan_;
    const KernelTable& table_;
    std::size_t begin_, end_;
    float* out_;
    int64_t first_pair_ = 0;
    int64_t most_ = 1;
    double work_ = 0.0;
    int threads_ = 1;
};

// The end of the wave that begins with group `begin`: as many groups as its memory takes, at least one.
std::size_t wave_end(const Plan& plan, std::size_t begin, int64_t pairs) {
    int64_t taken = plan.groups[begin].count;
    std::size_t end = begin + 1;
    while (end < plan.groups.size() && taken + plan.groups[end].count <= pairs) taken += plan.groups[end++].count;
    return end;
}

}  // namespace

void run_experts(const Experts& experts, const float* x, const int32_t* ids, const float* weights, int64_t tokens,
                 int64_t top_k, float* out) {
    static thread_local Plan kept;
    Plan& plan = kept;  // pieces on other threads must see this thread's
    const Products products(experts);
    const int64_t row_bytes = products.row_bytes(experts.gate_up), inner_bytes = products.row_bytes(experts.down);
    std::memset(out, 0, static_cast<std::size_t>(tokens * experts.hidden()) * 4);
    group_tokens(experts.count(), ids, weights, tokens, top_k, plan);
    const int64_t most_pairs = std::max(kMostTokens, kWaveBytes / (row_bytes + inner_bytes));
    for (std::size_t begin = 0; begin < plan.groups.size();) {
        const std::size_t end = wave_end(plan, begin, most_pairs);
        const Group& last = plan.groups[end - 1];
        const int64_t pairs = last.first + last.count - plan.groups[begin].first;
        plan.inputs.grow(pairs * row_bytes);
        plan.activated.grow(pairs * inner_bytes);
        Wave wave(experts, products, plan, begin, end, out);
        wave.gather(x);
        wave.activate();
        wave.combine();
        begin = end;
    }
}

}  // namespace tokenspeed
