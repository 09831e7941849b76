// moe.route. Rows are worked on alone, in one order, so a row's bits depend on nothing else.
#include <algorithm>
#include <cmath>
#include <vector>

#include "moe.hpp"
#include "pool.hpp"
#include "threads.hpp"

namespace tokenspeed {

namespace {

constexpr float kSumFloor = 1e-20f;
constexpr int64_t kRowsEach = 8;  // rows of one piece

// The ids of the best values, by value descending, then id ascending. At least as many as are wanted must be offered, each
// once; a NaN among them makes the choice arbitrary.
class Best {
public:
    explicit Best(int64_t wanted) : ids_(static_cast<std::size_t>(wanted)), values_(ids_.size()) {}

    void clear() { found_ = 0; }

    // Ids must come in ascending order: an equal value stays behind those that are there.
    void offer(int32_t id, float value) {
        if (found_ == ids_.size() && !(value > values_[found_ - 1])) return;
        std::size_t place = found_ < ids_.size() ? found_++ : found_ - 1;
        for (; place > 0 && value > values_[place - 1]; --place) {
            ids_[place] = ids_[place - 1];
            values_[place] = values_[place - 1];
        }
        ids_[place] = id;
        values_[place] = value;
    }

    const std::vector<int32_t>& ids() const { return ids_; }

private:
    std::vector<int32_t> ids_;
    std::vector<float> values_;
    std::size_t found_ = 0;
};

// What one piece of rows needs.
struct Work {
    explicit Work(const Routing& routing)
        : scores(static_cast<std::size_t>(routing.experts)),
          choice(scores.size()),
          groups(routing.top_groups),
          experts(routing.top_k) {}
    std::vector<float> scores;
    std::vector<float> choice;
    Best groups;
    Best experts;
};

// A logit of 20 is its own softplus to the last bit.
float square_root_of_softplus(float logit) { return std::sqrt(logit > 20.0f ? logit : std::log1p(std::exp(logit))); }

void compute_scores(const Routing& routing, const KernelTable& table, const float* logits, std::vector<float>& scores) {
    if (routing.scoring == Scoring::kSqrtSoftplus) {
        for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = square_root_of_softplus(logits[i]);
        return;
    }
    if (routing.scoring == Scoring::kSigmoid) {
        for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = -logits[i];
        table.shifted_exp(scores.data(), 0.0f, scores.data(), routing.experts);
        for (float& score : scores) score = 1.0f / (1.0f + score);
        return;
    }
    table.shifted_exp(logits, table.maximum(logits, routing.experts), scores.data(), routing.experts);
    double sum = 0.0;
    for (const float score : scores) sum += score;
    const float total = static_cast<float>(sum);
    for (float& score : scores) score /= total;
}

// The best value of a group, or the sum of its two best where the choice is corrected.
float group_value(const Routing& routing, const float* choice, int64_t size) {
    float first = choice[0], second = choice[0];
    if (size > 1) {
        first = std::max(choice[0], choice[1]);
        second = std::min(choice[0], choice[1]);
    }
    for (int64_t i = 2; i < size; ++i) {
        second = std::max(second, std::min(first, choice[i]));
        first = std::max(first, choice[i]);
    }
    return routing.correction ? first + second : first;
}

void choose(const Routing& routing, const float* choice, Work& work) {
    work.experts.clear();
    if (routing.groups == 1) {
        for (int64_t i = 0; i < routing.experts; ++i) work.experts.offer(static_cast<int32_t>(i), choice[i]);
    } else {
        const int64_t size = routing.experts / routing.groups;
        work.groups.clear();
        for (int64_t group = 0; group < routing.groups; ++group)
            work.groups.offer(static_cast<int32_t>(group), group_value(routing, choice + group * size, size));
        std::vector<int32_t> chosen = work.groups.ids();
        std::sort(chosen.begin(), chosen.end());
        for (const int32_t group : chosen)
            for (int64_t i = group * size; i < (group + 1) * size; ++i)
                work.experts.offer(static_cast<int32_t>(i), choice[i]);
    }
}

void route_row(const Routing& routing, const KernelTable& table, const float* logits, int32_t* ids, float* weights,
               Work& work) {
    compute_scores(routing, table, logits, work.scores);
    const float* choice = logits;
    if (routing.correction) {
        for (std::size_t i = 0; i < work.choice.size(); ++i) work.choice[i] = work.scores[i] + routing.correction[i];
        choice = work.choice.data();
    }
    choose(routing, choice, work);
    float sum = 0.0f;
    for (int64_t i = 0; i < routing.top_k; ++i) {
        ids[i] = work.experts.ids()[static_cast<std::size_t>(i)];
        weights[i] = work.scores[static_cast<std::size_t>(ids[i])];
        sum += weights[i];
    }
    for (int64_t i = 0; i < routing.top_k; ++i) {
        if (routing.renormalise) weights[i] /= sum + kSumFloor;
        weights[i] *= routing.scale;
    }
}

}  // namespace

void run_route(const Routing& routing, const float* logits, int64_t rows, int32_t* ids, float* weights) {
    const KernelTable& table = kernels();
    const int threads = threads_for(static_cast<double>(rows * routing.experts) * 2.0);
    const int64_t each = threads > 1 ? kRowsEach : std::max<int64_t>(1, rows);
    parallel_for((rows + each - 1) / each, threads, [&](int64_t piece) {
        Work work(routing);
        for (int64_t row = piece * each; row < std::min(rows, (piece + 1) * each); ++row)
            route_row(routing, table, logits + row * routing.experts, ids + row * routing.top_k,
                      weights + row * routing.top_k, work);
    });
}

void run_table_route(const TableRouting& call, int64_t rows) {
    over_ranges(rows, 1, threads_for(static_cast<double>(rows * call.top_k) * 40.0), 2, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const int32_t* chosen = call.table + int64_t{call.tokens[row]} * call.top_k;
            float* weights = call.weights + row * call.top_k;
            float sum = 0.0f;
            for (int64_t i = 0; i < call.top_k; ++i) {
                call.ids[row * call.top_k + i] = chosen[i];
                weights[i] = square_root_of_softplus(call.logits[row * call.experts + chosen[i]]);
                sum += weights[i];
            }
            for (int64_t i = 0; i < call.top_k; ++i) weights[i] = weights[i] / (sum + kSumFloor) * call.scale;
        }
    });
}

}  // namespace tokenspeed
