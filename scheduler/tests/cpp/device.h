// A device whose cache holds token ids, with a host and a storage tier, kept by the plans alone. The next token is a hash of
// the whole sequence read back through the full-history tables, of the window read through the sliding ones and of the
// running state, so a wrong, stale, uncopied or too early reused block changes tokens.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "scheduler/scheduler.h"

namespace engine {

using namespace tokenspeed;

inline std::uint64_t mix(std::uint64_t hash, std::int32_t token) {
    return (hash ^ static_cast<std::uint64_t>(static_cast<std::uint32_t>(token))) * 1099511628211u;
}
inline constexpr std::uint64_t kSeed = 14695981039346656037u;

// What the groups of a configuration make of a sequence: the token that follows it.
inline std::int32_t next_token(const std::vector<std::int32_t>& sequence, const SchedulerConfig& config) {
    std::uint64_t all = 0;
    for (const CacheGroup& group : config.groups) {
        std::size_t first = 0;
        if (group.attention() == Attention::SlidingWindow) {
            const auto window = static_cast<std::size_t>(group.sliding_window_tokens);
            first = sequence.size() > window ? sequence.size() - window : 0;
        }
        std::uint64_t hash = kSeed;
        for (std::size_t i = first; i < sequence.size(); ++i) hash = mix(hash, sequence[i]);
        all = all * 31 + hash;
    }
    return static_cast<std::int32_t>(all % 1000);
}

// The content of one block: tokens of a history group, or how many tokens went into a state and their hash.
struct Content {
    std::vector<std::int32_t> tokens;
    std::int32_t length = -1;
    std::uint64_t hash = 0;
};

using StorageKey = std::tuple<std::int32_t, std::vector<std::uint8_t>, std::int32_t>;
using Storage = std::map<StorageKey, Content>;

class Device {
public:
    Device(const SchedulerConfig& config, std::shared_ptr<Storage> storage)
        : config_(config), storage_(std::move(storage)), rows_(static_cast<std::size_t>(config.max_num_seqs) + 1) {
        for (const CacheGroup& group : config.groups) {
            const auto blocks = [&](std::int32_t parents) {
                const Content empty{std::vector<std::int32_t>(static_cast<std::size_t>(group.block_granularity), -1), -1, 0};
                return std::vector<Content>(static_cast<std::size_t>((parents + 1) * group.children_per_parent), empty);
            };
            blocks_.push_back(blocks(config.num_parents));
            host_.push_back(blocks(config.host_parents));
        }
    }

    // Which copies fail, by operation; all succeed where it is not set.
    std::function<bool(const CacheOperation&)> fails;

    // Executes a plan in the order that the contract gives. Returns what ended: operations, then the forward if any.
    std::vector<Event> execute(const Plan& plan) {
        std::vector<Event> events;
        std::set<std::int32_t> spoilt;  // requests whose blocks were not loaded
        for (const bool saves : {true, false}) {
            for (const CacheOperation& operation : plan.operations) {
                const bool save = operation.kind == OperationKind::ImageSave || operation.kind == OperationKind::WriteBack;
                if (save == saves) events.emplace_back(run(operation, spoilt));
            }
        }
        if (plan.num_rows() == 0) return events;
        for (const std::int32_t index : plan.starts) row(plan.row[static_cast<std::size_t>(index)]) = Row(config_);
        for (std::size_t group = 0; group < plan.tables.size(); ++group) apply(group, plan.tables[group]);
        ForwardResult result{plan.forward_id, {}, {}};
        std::size_t at = 0;
        for (std::size_t i = 0; i < plan.handle.size(); ++i) {
            // A step may be queued behind the one whose blocks were not loaded.
            Row& own = row(plan.row[i]);
            own.spoilt = own.spoilt || spoilt.contains(plan.handle[i]);
            const bool lost = own.spoilt;
            if (lost) result.failed.resize(plan.handle.size(), 0);
            if (lost) result.failed[i] = 1;
            result.tokens.push_back(lost ? -1 : compute(plan, i, at));
            at += static_cast<std::size_t>(plan.input_len[i]);
        }
        events.emplace_back(std::move(result));
        return events;
    }

    // What a peer does: the blocks of a hand-off here go where the other device's scheduler wants them, slot for slot.
    void send(const CacheOperation& hand_off, Device& peer, const CacheOperation& remote) const {
        for (std::size_t to = 0; to < remote.size(); ++to) {
            std::size_t from = 0;
            while (hand_off.group[from] != remote.group[to] || hand_off.offsets[from] != remote.offsets[to]) {
                CHECK(++from < hand_off.size());
            }
            const auto group = static_cast<std::size_t>(remote.group[to]);
            peer.blocks_[group].at(static_cast<std::size_t>(remote.target[to])) =
                blocks_[group].at(static_cast<std::size_t>(hand_off.source[from]));
        }
    }

    std::int64_t computed_tokens = 0;
    std::int64_t copied_blocks = 0;

private:
    struct Row {
        Row() = default;
        explicit Row(const SchedulerConfig& config) : versions(config.groups.size(), 0), tables(config.groups.size()) {}
        std::int32_t last = -1;
        bool spoilt = false;
        std::vector<std::int32_t> versions;
        std::vector<std::vector<std::int32_t>> tables;
    };
    Row& row(std::int32_t number) { return rows_[static_cast<std::size_t>(number)]; }
    Content& block(std::size_t group, std::int32_t id) { return blocks_.at(group).at(static_cast<std::size_t>(id)); }

    OperationDone run(const CacheOperation& operation, std::set<std::int32_t>& spoilt) {
        OperationDone done{operation.op_id, {}};
        const bool failing = fails && fails(operation);
        if (failing) done.succeeded.assign(operation.size(), 0);
        if (operation.kind == OperationKind::StorageQuery && !failing) done.succeeded.assign(operation.size(), 1);
        for (std::size_t i = 0; i < operation.size(); ++i) {
            const auto group = static_cast<std::size_t>(operation.group[i]);
            const auto source = static_cast<std::size_t>(operation.source[i]);
            const auto target = static_cast<std::size_t>(operation.target[i]);
            if (failing) {
                if (operation.kind == OperationKind::LoadBack) spoilt.insert(operation.handle);
                continue;
            }
            ++copied_blocks;
            switch (operation.kind) {
                case OperationKind::WriteBack:
                case OperationKind::ImageSave:
                    CHECK(source > 0 && target > 0);
                    host_.at(group).at(target) = blocks_.at(group).at(source);
                    break;
                case OperationKind::LoadBack:
                case OperationKind::Restore:
                    CHECK(source > 0 && target > 0);
                    blocks_.at(group).at(target) = host_.at(group).at(source);
                    break;
                case OperationKind::StorageQuery:
                    done.succeeded[i] = storage_->contains(key(operation, i)) ? 1 : 0;
                    break;
                case OperationKind::StorageFetch:
                    host_.at(group).at(target) = storage_->at(key(operation, i));
                    break;
                case OperationKind::StoragePut:
                    (*storage_)[key(operation, i)] = host_.at(group).at(source);
                    break;
                case OperationKind::HandOff:
                case OperationKind::RemotePrefill:
                    break;
            }
        }
        return done;
    }

    static StorageKey key(const CacheOperation& operation, std::size_t i) {
        const auto first = operation.digests.begin() + static_cast<std::ptrdiff_t>(32 * i);
        return {operation.group[i], std::vector<std::uint8_t>(first, first + 32), operation.offsets[i]};
    }

    void apply(std::size_t group, const BlockTableDelta& delta) {
        auto ids = delta.ids.begin();
        for (std::size_t i = 0; i < delta.row.size(); ++i) {
            Row& own = row(delta.row[i]);
            std::vector<std::int32_t>& table = own.tables.at(group);
            CHECK_EQ(own.versions[group], delta.version_from[i]);
            CHECK_EQ(delta.version_to[i], delta.version_from[i] + 1);
            CHECK(delta.first_slot[i] <= static_cast<std::int32_t>(table.size()));
            own.versions[group] = delta.version_to[i];
            table.resize(static_cast<std::size_t>(delta.first_slot[i]));
            table.insert(table.end(), ids, ids + delta.count[i]);
            ids += delta.count[i];
        }
        CHECK(ids == delta.ids.end());
    }

    std::int32_t& slot(const Row& row, std::size_t group, std::int32_t position) {
        const std::int32_t granularity = config_.groups[group].block_granularity;
        const std::int32_t id = row.tables[group].at(static_cast<std::size_t>(position / granularity));
        CHECK(id > 0);
        return block(group, id).tokens.at(static_cast<std::size_t>(position % granularity));
    }

    std::int32_t compute(const Plan& plan, std::size_t i, std::size_t at) {
        Row& own = row(plan.row[i]);
        const std::int32_t begin = plan.prefix_len[i], end = begin + plan.input_len[i];
        std::vector<std::int32_t> input;
        for (std::int32_t position = begin; position < end; ++position) {
            const std::int32_t token = plan.input_ids.at(at++);
            input.push_back(token < 0 ? own.last : token);
        }
        computed_tokens += plan.input_len[i];
        std::uint64_t all = 0;
        for (std::size_t group = 0; group < config_.groups.size(); ++group) {
            const CacheGroup& its = config_.groups[group];
            std::uint64_t hash = kSeed;
            if (its.attention() == Attention::State) {
                const std::int32_t source = own.tables[group].at(0) != 0 ? own.tables[group].at(0) : own.tables[group].at(1);
                const std::int32_t target = own.tables[group].at(1);
                CHECK(target > 0);
                if (begin > 0) {
                    CHECK_EQ(block(group, source).length, begin);
                    hash = block(group, source).hash;
                }
                for (const std::int32_t token : input) hash = mix(hash, token);
                block(group, target).hash = hash;
                block(group, target).length = end;
            } else {
                for (std::int32_t position = begin; position < end; ++position) {
                    slot(own, group, position) = input[static_cast<std::size_t>(position - begin)];
                }
                const bool sliding = its.attention() == Attention::SlidingWindow;
                const std::int32_t first = sliding ? std::max(end - its.sliding_window_tokens, 0) : 0;
                for (std::int32_t position = first; position < end; ++position) {
                    const std::int32_t token = slot(own, group, position);
                    CHECK(token >= 0);
                    hash = mix(hash, token);
                }
                // Every token of the chunk looks back as far.
                if (sliding) (void)slot(own, group, std::max(begin - its.sliding_window_tokens + 1, 0));
            }
            all = all * 31 + hash;
        }
        if (plan.samples[i] == 0) return -1;
        own.last = static_cast<std::int32_t>(all % 1000);
        return own.last;
    }

    SchedulerConfig config_;
    std::shared_ptr<Storage> storage_;
    std::vector<std::vector<Content>> blocks_, host_;
    std::vector<Row> rows_;
};

}  // namespace engine
