// A device, a host pool and a storage whose cells hold what a cache really holds: something that depends on every token
// before it. A cell has its token and the hash of the sequence up to it; a state block has the hash after so many tokens.
// Each forward checks every cell that its attention would read, so a wrong, stale or too early reused block is noticed
// where it is read, whatever the kind of its group.
//
// Copies behave as badly as the contract allows: what goes to the host is read in the step and is there only when it is
// acknowledged; what a copy or a peer reads must be unchanged until then; storage is read and written at the end.
#pragma once

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "scheduler/scheduler.h"

namespace dealer {

using namespace tokenspeed;

inline constexpr std::uint64_t kSeed = 14695981039346656037u;

inline std::uint64_t chained(std::uint64_t chain, std::int32_t token) {
    return (chain ^ static_cast<std::uint64_t>(token)) * 1099511628211u;
}

inline std::int32_t token_after(std::uint64_t chain) { return static_cast<std::int32_t>(chain % 1000); }

inline std::int32_t next_token(std::span<const std::int32_t> sequence) {
    std::uint64_t chain = kSeed;
    for (const std::int32_t token : sequence) chain = chained(chain, token);
    return token_after(chain);
}

// `position` is the token's, or the tokens a state has seen; -1 for garbage.
struct Cell {
    std::uint64_t chain = 0;
    std::int32_t token = -1;
    std::int32_t position = -1;
    bool operator==(const Cell&) const = default;
};

// The cells of one tier, by group and block.
class Store {
public:
    Store(const SchedulerConfig& config, std::int32_t parents) {
        for (const CacheGroup& group : config.groups) {
            const std::int32_t cells = group.attention() == Attention::State ? 1 : group.block_granularity;
            const std::int64_t blocks = (parents + std::int64_t{1}) * group.children_per_parent;
            groups_.push_back({cells, std::vector<Cell>(static_cast<std::size_t>(blocks * cells))});
        }
    }
    std::span<Cell> block(std::int32_t group, std::int32_t id) {
        Group& own = groups_[static_cast<std::size_t>(group)];
        const auto at = static_cast<std::size_t>(id) * static_cast<std::size_t>(own.cells);
        CHECK(id > 0 && at + static_cast<std::size_t>(own.cells) <= own.all.size());
        return std::span(own.all).subspan(at, static_cast<std::size_t>(own.cells));
    }
    std::vector<Cell> copy(std::int32_t group, std::int32_t id) {
        const std::span<Cell> cells = block(group, id);
        return {cells.begin(), cells.end()};
    }
    void write(std::int32_t group, std::int32_t id, std::span<const Cell> cells) {
        std::ranges::copy(cells, block(group, id).begin());
    }
    void spoil(std::int32_t group, std::int32_t id) { std::ranges::fill(block(group, id), Cell{}); }

private:
    struct Group {
        std::int32_t cells;
        std::vector<Cell> all;
    };
    std::vector<Group> groups_;
};

class Device {
public:
    // The cells a row wrote, so that they can be spoilt afterwards.
    using Written = std::vector<Cell*>;
    struct Executed {
        ForwardResult result;
        std::vector<Written> written;  // by row
    };

    explicit Device(const SchedulerConfig& config)
        : config_(config),
          device_(config, config.num_parents),
          host_(config, config.host_parents),
          rows_(static_cast<std::size_t>(config.max_num_seqs) + 1, empty_row()) {}

    Executed execute(const Plan& plan) {
        for (const CacheOperation& operation : plan.operations) begin_save(operation);
        for (std::size_t group = 0; group < plan.tables.size(); ++group) prepare(plan, static_cast<std::int32_t>(group));
        for (const CacheOperation& operation : plan.operations) begin_load(operation);
        for (const std::int32_t index : plan.starts) row_of(plan, static_cast<std::size_t>(index)) = empty_row();
        for (std::size_t group = 0; group < plan.tables.size(); ++group) apply(plan.tables[group], group);
        Executed executed{{plan.forward_id, {}, {}}, {}};
        std::size_t at = 0;
        for (std::size_t i = 0; i < plan.handle.size(); ++i) {
            executed.result.tokens.push_back(compute(plan, i, at, executed.written.emplace_back()));
            at += static_cast<std::size_t>(plan.input_len[i]);
        }
        return executed;
    }

    // An operation ends; `failed` are blocks (bits). A key that the storage has not fails by itself.
    OperationDone complete(const CacheOperation& operation, std::uint64_t failed) {
        OperationDone done{operation.op_id, {}};
        const auto found = contents_.find(operation.op_id);
        for (std::size_t i = 0; i < operation.size(); ++i) {
            const bool fails = i < 64 && (failed >> i & 1) != 0;
            const std::vector<Cell>* content = found == contents_.end() ? nullptr : &found->second[i];
            done.succeeded.push_back(complete_block(operation, i, content, fails) ? 1 : 0);
        }
        if (found != contents_.end()) contents_.erase(found);
        return done;
    }

    // Decode role: the peer writes what `operation` asked for.
    void peer_fills(const CacheOperation& operation, std::span<const std::int32_t> prompt) {
        std::vector<std::uint64_t> chains{kSeed};
        for (const std::int32_t token : prompt) chains.push_back(chained(chains.back(), token));
        const auto length = static_cast<std::int32_t>(prompt.size());
        for (std::size_t i = 0; i < operation.size(); ++i) {
            const std::span<Cell> cells = device_.block(operation.group[i], operation.target[i]);
            if (kind(operation.group[i]) == Attention::State) {
                cells[0] = {chains.back(), -1, length};
                continue;
            }
            const auto size = static_cast<std::int32_t>(cells.size());
            for (std::int32_t place = 0; place < size; ++place) {
                const std::int32_t position = operation.offsets[i] * size + place;
                if (position >= length) break;
                const auto at = static_cast<std::size_t>(position);
                cells[static_cast<std::size_t>(place)] = {chains[at + 1], prompt[at], position};
            }
        }
    }

    static void spoil(const Written& written) {
        for (Cell* cell : written) *cell = Cell{};
    }

private:
    struct Row {
        std::int32_t last = -1;
        std::vector<std::int32_t> versions;             // by group
        std::vector<std::vector<std::int32_t>> tables;  // by group
    };
    using StorageKey = std::tuple<std::int32_t, std::vector<std::uint8_t>, std::int32_t>;

    Row empty_row() const {
        return {-1, std::vector<std::int32_t>(config_.groups.size(), 0),
                std::vector<std::vector<std::int32_t>>(config_.groups.size())};
    }
    Row& row_of(const Plan& plan, std::size_t i) { return rows_.at(static_cast<std::size_t>(plan.row[i])); }
    const CacheGroup& group_of(std::int32_t group) const { return config_.groups[static_cast<std::size_t>(group)]; }
    Attention kind(std::int32_t group) const { return group_of(group).attention(); }

    static StorageKey key_of(const CacheOperation& operation, std::size_t i) {
        const auto first = operation.digests.begin() + static_cast<std::ptrdiff_t>(32 * i);
        return {operation.group[i], {first, first + 32}, operation.offsets[i]};
    }

    void begin_save(const CacheOperation& operation) {
        if (operation.kind != OperationKind::WriteBack && operation.kind != OperationKind::ImageSave) return;
        for (std::size_t i = 0; i < operation.size(); ++i) {
            contents_[operation.op_id].push_back(device_.copy(operation.group[i], operation.source[i]));
            host_.spoil(operation.group[i], operation.target[i]);
        }
    }

    void prepare(const Plan& plan, std::int32_t group) {
        for (const std::int32_t id : plan.zero_blocks[static_cast<std::size_t>(group)]) device_.spoil(group, id);
        const IntArray& pairs = plan.copy_blocks[static_cast<std::size_t>(group)];
        for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
            device_.write(group, pairs[i + 1], device_.copy(group, pairs[i]));
        }
    }

    void begin_load(const CacheOperation& operation) {
        for (std::size_t i = 0; i < operation.size(); ++i) {
            const std::int32_t group = operation.group[i];
            switch (operation.kind) {
                case OperationKind::LoadBack:
                case OperationKind::Restore:
                    contents_[operation.op_id].push_back(host_.copy(group, operation.source[i]));
                    device_.write(group, operation.target[i], contents_[operation.op_id].back());
                    break;
                case OperationKind::HandOff:
                    contents_[operation.op_id].push_back(device_.copy(group, operation.source[i]));
                    break;
                case OperationKind::RemotePrefill:
                    device_.spoil(group, operation.target[i]);
                    break;
                case OperationKind::StorageFetch:
                    host_.spoil(group, operation.target[i]);
                    break;
                default:
                    break;
            }
        }
    }

    bool complete_block(const CacheOperation& operation, std::size_t i, const std::vector<Cell>* content, bool fails) {
        const std::int32_t group = operation.group[i];
        switch (operation.kind) {
            case OperationKind::WriteBack:
            case OperationKind::ImageSave:
                if (!fails) host_.write(group, operation.target[i], *content);
                return !fails;
            case OperationKind::LoadBack:
            case OperationKind::Restore:
                CHECK(host_.copy(group, operation.source[i]) == *content);
                if (fails) device_.spoil(group, operation.target[i]);
                return !fails;
            case OperationKind::HandOff:
                CHECK(device_.copy(group, operation.source[i]) == *content);
                return !fails;
            case OperationKind::StorageQuery:
                return !fails && storage_.contains(key_of(operation, i));
            case OperationKind::StorageFetch: {
                const auto stored = storage_.find(key_of(operation, i));
                if (fails || stored == storage_.end()) return false;
                host_.write(group, operation.target[i], stored->second);
                return true;
            }
            case OperationKind::StoragePut:
                if (!fails) storage_[key_of(operation, i)] = host_.copy(group, operation.source[i]);
                return !fails;
            case OperationKind::RemotePrefill:
                break;
        }
        return !fails;
    }

    void apply(const BlockTableDelta& delta, std::size_t group) {
        auto ids = delta.ids.begin();
        for (std::size_t i = 0; i < delta.row.size(); ++i) {
            Row& row = rows_.at(static_cast<std::size_t>(delta.row[i]));
            std::vector<std::int32_t>& table = row.tables[group];
            CHECK_EQ(row.versions[group], delta.version_from[i]);
            CHECK_EQ(delta.version_to[i], delta.version_from[i] + 1);
            CHECK(delta.first_slot[i] <= static_cast<std::int32_t>(table.size()));
            row.versions[group] = delta.version_to[i];
            table.resize(static_cast<std::size_t>(delta.first_slot[i]));
            table.insert(table.end(), ids, ids + delta.count[i]);
            ids += delta.count[i];
        }
        CHECK(ids == delta.ids.end());
    }

    Cell& cell(const Row& row, std::int32_t group, std::int32_t position) {
        const std::int32_t granularity = group_of(group).block_granularity;
        const std::vector<std::int32_t>& table = row.tables[static_cast<std::size_t>(group)];
        const std::int32_t id = table.at(static_cast<std::size_t>(position / granularity));
        return device_.block(group, id)[static_cast<std::size_t>(position % granularity)];
    }

    // The hash of the tokens before `prefix_len` as this group has it, every cell of its view checked.
    std::uint64_t read(const Row& row, std::int32_t group, std::int32_t prefix_len) {
        if (prefix_len == 0) return kSeed;
        const Attention attention = kind(group);
        if (attention == Attention::State) {
            const std::vector<std::int32_t>& table = row.tables[static_cast<std::size_t>(group)];
            const Cell& state = device_.block(group, table.at(0) != 0 ? table.at(0) : table.at(1))[0];
            CHECK_EQ(state.position, prefix_len);
            return state.chain;
        }
        const bool window = attention == Attention::SlidingWindow;
        const std::int32_t first = window ? std::max(prefix_len - group_of(group).sliding_window_tokens + 1, 0) : 0;
        std::uint64_t chain = kSeed;
        for (std::int32_t position = first; position < prefix_len; ++position) {
            const Cell& own = cell(row, group, position);
            CHECK_EQ(own.position, position);
            // What comes before the window is not there to be compared with.
            CHECK((position == first && first > 0) || own.chain == chained(chain, own.token));
            chain = own.chain;
        }
        return chain;
    }

    // The hash before the row's first token: what every group that sees anything before it agrees on. (A window of one
    // token sees nothing; a world of nothing else is not for this device.)
    std::uint64_t read_all(const Row& row, std::int32_t prefix_len) {
        std::uint64_t chain = kSeed;
        bool known = prefix_len == 0;
        for (std::int32_t group = 0; group < static_cast<std::int32_t>(config_.groups.size()) && prefix_len > 0; ++group) {
            if (group_of(group).sliding_window_tokens == 1) continue;
            const std::uint64_t own = read(row, group, prefix_len);
            CHECK(!known || own == chain);
            chain = own;
            known = true;
        }
        CHECK(known);
        return chain;
    }

    std::int32_t compute(const Plan& plan, std::size_t i, std::size_t at, Written& written) {
        Row& row = row_of(plan, i);
        const std::int32_t end = plan.prefix_len[i] + plan.input_len[i];
        std::uint64_t chain = read_all(row, plan.prefix_len[i]);
        for (std::int32_t position = plan.prefix_len[i]; position < end; ++position) {
            const std::int32_t input = plan.input_ids.at(at++);
            const std::int32_t token = input < 0 ? row.last : input;
            chain = chained(chain, token);
            write(row, {chain, token, position}, written);
        }
        for (std::size_t group = 0; group < config_.groups.size(); ++group) {
            const auto index = static_cast<std::int32_t>(group);
            if (kind(index) != Attention::State) continue;
            written.push_back(&device_.block(index, row.tables[group].at(1))[0]);
            *written.back() = {chain, -1, end};
        }
        row.last = token_after(chain);
        return plan.samples[i] != 0 ? row.last : -1;
    }

    // One token's entry in every group that has rows.
    void write(const Row& row, const Cell& entry, Written& written) {
        for (std::int32_t group = 0; group < static_cast<std::int32_t>(config_.groups.size()); ++group) {
            if (kind(group) == Attention::State) continue;
            written.push_back(&cell(row, group, entry.position));
            *written.back() = entry;
        }
    }

    SchedulerConfig config_;
    Store device_;
    Store host_;
    std::map<StorageKey, std::vector<Cell>> storage_;
    std::map<std::int64_t, std::vector<std::vector<Cell>>> contents_;  // of copies that are out, by operation and block
    std::vector<Row> rows_;
};

}  // namespace dealer
