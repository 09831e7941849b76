#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "addresses.hpp"
#include "pool.hpp"
#include "threads.hpp"

namespace tokenspeed {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

uint64_t mix(uint64_t h) {
    h ^= h >> 30;
    h *= 0xBF58476D1CE4E5B9ULL;
    h ^= h >> 27;
    h *= 0x94D049BB133111EBULL;
    return h ^ (h >> 31);
}

// The order of candidates: larger first, and of equals the lower id.
struct Candidate {
    float z;
    int32_t id;
    bool operator<(const Candidate& other) const { return z != other.z ? z > other.z : id < other.id; }
};

// The candidates of one row in order, sorted only as far as they are asked for: ids are counted by their distance below
// the maximum, and whole runs of buckets are gathered and sorted when the walk reaches them.
class OrderedCandidates {
public:
    // z [size] must outlive this; NaN must be gone; `maximum` is its finite largest value.
    OrderedCandidates(const float* z, int64_t size, float maximum) : z_(z), size_(size), maximum_(maximum) {
        buckets_.resize(static_cast<std::size_t>(size));
        counts_.assign(kBuckets, 0);
        for (int64_t i = 0; i < size; ++i) {
            const float distance = std::min((maximum - z[i]) * kScale, static_cast<float>(kBuckets - 1));
            const auto bucket = static_cast<uint16_t>(distance);
            buckets_[static_cast<std::size_t>(i)] = bucket;
            ++counts_[bucket];
        }
        sorted_.clear();
        running_.clear();
    }

    int64_t size() const { return size_; }
    int32_t id(int64_t place) { return reach(place).id; }
    double weight(int64_t place) { return weight_of(reach(place).z); }

    // Sum of the weights of the first place + 1 candidates, added up in order.
    double running(int64_t place) {
        while (static_cast<int64_t>(running_.size()) <= place) {
            const double before = running_.empty() ? 0.0 : running_.back();
            running_.push_back(before + weight(static_cast<int64_t>(running_.size())));
        }
        return running_[static_cast<std::size_t>(place)];
    }

    // Sum of all weights. In another order of addition than running(), so the last bits may differ.
    double total() const {
        double sum = 0;
        for (int64_t i = 0; i < size_; ++i) sum += weight_of(z_[i]);
        return sum;
    }

private:
    static constexpr int kBuckets = 2048;
    static constexpr float kScale = 64.0f;  // buckets to a unit of z: the last one takes all below maximum - 32

    double weight_of(float z) const { return std::exp(static_cast<double>(z) - static_cast<double>(maximum_)); }

    const Candidate& reach(int64_t place) {
        while (static_cast<int64_t>(sorted_.size()) <= place) gather(place, 4 * place + 256);
        return sorted_[static_cast<std::size_t>(place)];
    }

    // Gathers and sorts further buckets until `wanted` candidates are there, or all. The last bucket, which has the whole
    // vocabulary where few tokens are not masked, is taken only where `place` lies in it.
    void gather(int64_t place, int64_t wanted) {
        const int first = next_bucket_;
        int64_t there = static_cast<int64_t>(sorted_.size());
        while (next_bucket_ < kBuckets && there < (next_bucket_ == kBuckets - 1 ? place + 1 : wanted))
            there += counts_[static_cast<std::size_t>(next_bucket_++)];
        const auto begin = static_cast<std::ptrdiff_t>(sorted_.size());
        for (int64_t i = 0; i < size_; ++i) {
            const int bucket = buckets_[static_cast<std::size_t>(i)];
            if (bucket >= first && bucket < next_bucket_) sorted_.push_back({z_[i], static_cast<int32_t>(i)});
        }
        std::sort(sorted_.begin() + begin, sorted_.end());
    }

    const float* z_;
    int64_t size_;
    float maximum_;
    int next_bucket_ = 0;
    // Kept between rows for their memory.
    static thread_local std::vector<uint16_t> buckets_;
    static thread_local std::vector<int32_t> counts_;
    static thread_local std::vector<Candidate> sorted_;
    static thread_local std::vector<double> running_;
};

thread_local std::vector<uint16_t> OrderedCandidates::buckets_;
thread_local std::vector<int32_t> OrderedCandidates::counts_;
thread_local std::vector<Candidate> OrderedCandidates::sorted_;
thread_local std::vector<double> OrderedCandidates::running_;

// Steps 3 to 6 of the contract.
int32_t draw_in_order(OrderedCandidates& candidates, const Draw& draw) {
    const int64_t size = candidates.size();
    int64_t kept = draw.top_k > 0 ? std::min<int64_t>(draw.top_k, size) : size;
    double total = kept < size ? candidates.running(kept - 1) : candidates.total();
    bool cut = false;
    if (draw.top_p < 1.0f) {
        const double mass = static_cast<double>(draw.top_p) * total;
        int64_t inside = 1;
        while (inside < kept && candidates.running(inside - 1) < mass) ++inside;
        cut = inside < kept;
        kept = inside;
    }
    if (draw.min_p > 0.0f) {
        int64_t inside = 1;
        while (inside < kept && candidates.weight(inside) >= static_cast<double>(draw.min_p)) ++inside;
        cut = cut || inside < kept;
        kept = inside;
    }
    if (cut) total = candidates.running(kept - 1);
    const double target = static_cast<double>(uniform(draw.seed, draw.choice, draw.position)) * total;
    int64_t place = 0;
    // The total may be a last bit above the sum in order: that bit must not draw a token without a weight.
    while (place + 1 < kept && candidates.running(place) < target && candidates.weight(place + 1) > 0.0) ++place;
    return candidates.id(place);
}

void sample(float* logits, int64_t rows, int64_t size, const float* temperature, const int32_t* top_k, const float* top_p,
            const float* min_p, const int64_t* seed, const int32_t* choice, const int32_t* position, int32_t* out) {
    const int threads = rows > 1 ? threads_for(static_cast<double>(rows * size)) : 1;
    parallel_for(rows, threads, [&](int64_t row) {
        const Draw draw{temperature[row], top_k[row], top_p[row], min_p[row], seed[row], choice[row], position[row]};
        out[row] = sample_row(logits + row * size, size, draw);
    });
}

void apply_penalties(float* logits, int64_t rows, int64_t size, const int32_t* counts, const uint8_t* prompt_mask,
                     const int32_t* pool_rows, const float* presence, const float* frequency, const float* repetition) {
    const int threads = rows > 1 ? threads_for(static_cast<double>(rows * size) * 0.3) : 1;
    parallel_for(rows, threads, [&](int64_t row) {
        if (presence[row] == 0.0f && frequency[row] == 0.0f && repetition[row] == 1.0f) return;
        float* values = logits + row * size;
        const int32_t* count = counts + pool_rows[row] * size;
        const uint8_t* prompted = prompt_mask + pool_rows[row] * size;
        for (int64_t i = 0; i < size; ++i) {
            const bool generated = count[i] > 0;
            float value = values[i];
            if (generated || prompted[i]) value = value > 0.0f ? value / repetition[row] : value * repetition[row];
            value -= frequency[row] * static_cast<float>(count[i]);
            values[i] = value - (generated ? presence[row] : 0.0f);
        }
    });
}

// Bit i of `mask` says whether values[i] stays. Most words of a mask are all ones or all zeros.
void mask_row(float* values, int64_t size, const uint32_t* mask) {
    for (int64_t begin = 0; begin < size; begin += 32) {
        const uint32_t word = mask[begin / 32];
        if (word == 0xFFFFFFFFu) continue;
        const int64_t count = std::min<int64_t>(32, size - begin);
        if (word == 0) {
            std::fill_n(values + begin, count, -kInfinity);
            continue;
        }
        for (int64_t bit = 0; bit < count; ++bit) {
            if ((word >> bit & 1u) == 0) values[begin + bit] = -kInfinity;
        }
    }
}

void apply_token_mask(float* logits, int64_t rows, int64_t size, const uint32_t* mask, const int32_t* mask_rows) {
    const int64_t words = (size + 31) / 32;
    const int threads = rows > 1 ? threads_for(static_cast<double>(rows * size) * 0.2) : 1;
    parallel_for(rows, threads, [&](int64_t row) {
        if (mask_rows[row] >= 0) mask_row(logits + row * size, size, mask + mask_rows[row] * words);
    });
}

// log(sum(exp(values))).
float log_sum_exp(const KernelTable& table, const float* values, int64_t size) {
    constexpr int64_t kChunk = 1024;
    alignas(64) float weights[kChunk];
    const float maximum = table.maximum(values, size);
    if (!std::isfinite(maximum)) return maximum;
    double sum = 0;
    for (int64_t begin = 0; begin < size; begin += kChunk) {
        const int64_t count = std::min(kChunk, size - begin);
        table.shifted_exp(values + begin, maximum, weights, count);
        float part = 0;
        for (int64_t i = 0; i < count; ++i) part += weights[i];
        sum += static_cast<double>(part);
    }
    return maximum + static_cast<float>(std::log(sum));
}

// The first k candidates of the values, in order.
std::vector<Candidate> first_candidates(const float* values, int64_t size, int64_t k) {
    std::vector<Candidate> best;
    const auto key = [&](int64_t i) {
        return Candidate{std::isnan(values[i]) ? -kInfinity : values[i], static_cast<int32_t>(i)};
    };
    for (int64_t i = 0; i < std::min(k, size); ++i) best.push_back(key(i));
    std::make_heap(best.begin(), best.end());  // the last candidate in order on top
    for (int64_t i = k; k > 0 && i < size; ++i) {
        if (!(values[i] > best.front().z)) continue;  // an equal one with a higher id comes later in order
        std::pop_heap(best.begin(), best.end());
        best.back() = key(i);
        std::push_heap(best.begin(), best.end());
    }
    std::sort_heap(best.begin(), best.end());
    return best;
}

void logprobs(const float* logits, int64_t rows, int64_t size, const int32_t* ids, int64_t k, float* out, int32_t* top_ids,
              float* top_logprobs) {
    const KernelTable& table = kernels();
    const int threads = rows > 1 ? threads_for(static_cast<double>(rows * size) * 0.5) : 1;
    parallel_for(rows, threads, [&](int64_t row) {
        const float* values = logits + row * size;
        const float normaliser = log_sum_exp(table, values, size);
        out[row] = values[ids[row]] - normaliser;
        const std::vector<Candidate> best = first_candidates(values, size, k);
        for (int64_t i = 0; i < k; ++i) {
            const Candidate& candidate = best[static_cast<std::size_t>(i)];
            top_ids[row * k + i] = candidate.id;
            top_logprobs[row * k + i] = values[candidate.id] - normaliser;
        }
    });
}

}  // namespace

float uniform(int64_t seed, int32_t choice, int32_t position) {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
    uint64_t h = mix(static_cast<uint64_t>(seed) + kGolden);
    h = mix((h ^ static_cast<uint64_t>(int64_t{choice})) + kGolden);
    h = mix((h ^ static_cast<uint64_t>(int64_t{position})) + kGolden);
    return (static_cast<float>(h >> 40) + 0.5f) * 0x1p-24f;
}

int32_t sample_row(float* logits, int64_t size, const Draw& draw) {
    const KernelTable& table = kernels();
    if (draw.top_k == 1) return static_cast<int32_t>(table.argmax(logits, size));
    for (int64_t i = 0; i < size; ++i) {
        const float z = logits[i] / draw.temperature;
        logits[i] = std::isnan(z) ? -kInfinity : z;
    }
    const float maximum = table.maximum(logits, size);
    if (!std::isfinite(maximum)) return static_cast<int32_t>(table.argmax(logits, size));
    OrderedCandidates candidates(logits, size, maximum);
    return draw_in_order(candidates, draw);
}

void bind_sampling(nanobind::module_& m) {
    namespace nb = nanobind;
    using namespace nb::literals;
    m.def("uniform", &uniform, "seed"_a, "choice"_a, "position"_a, "The uniform number of (seed, choice, position).");
    m.def("sample", [](Address logits, int64_t rows, int64_t size, Address temperature, Address top_k, Address top_p,
                       Address min_p, Address seed, Address choice, Address position, Address out) {
        nb::gil_scoped_release released;
        sample(at<float>(logits), rows, size, at<const float>(temperature), at<const int32_t>(top_k),
               at<const float>(top_p), at<const float>(min_p), at<const int64_t>(seed), at<const int32_t>(choice),
               at<const int32_t>(position), at<int32_t>(out));
    });
    m.def("apply_penalties", [](Address logits, int64_t rows, int64_t size, Address counts, Address prompt_mask,
                                Address pool_rows, Address presence, Address frequency, Address repetition) {
        nb::gil_scoped_release released;
        apply_penalties(at<float>(logits), rows, size, at<const int32_t>(counts), at<const uint8_t>(prompt_mask),
                        at<const int32_t>(pool_rows), at<const float>(presence), at<const float>(frequency),
                        at<const float>(repetition));
    });
    m.def("apply_token_mask", [](Address logits, int64_t rows, int64_t size, Address mask, Address mask_rows) {
        nb::gil_scoped_release released;
        apply_token_mask(at<float>(logits), rows, size, at<const uint32_t>(mask), at<const int32_t>(mask_rows));
    });
    m.def("logprobs", [](Address logits, int64_t rows, int64_t size, Address ids, int64_t k, Address out, Address top_ids,
                         Address top_logprobs) {
        nb::gil_scoped_release released;
        logprobs(at<const float>(logits), rows, size, at<const int32_t>(ids), k, at<float>(out), at<int32_t>(top_ids),
                 at<float>(top_logprobs));
    });
    m.def("has_nan", [](Address logits, int64_t rows, int64_t size, Address out) {
        nb::gil_scoped_release released;
        for (int64_t row = 0; row < rows; ++row)
            at<uint8_t>(out)[row] = kernels().has_nan(at<const float>(logits) + row * size, size) ? 1 : 0;
    });
}

}  // namespace tokenspeed
