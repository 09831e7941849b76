// The storage tier: a prompt is looked up before it is admitted, and what was written back is put there.
//
// Storage is slow and may fail. A request that waits for it is Prefetching: it holds no line and keeps its place; after
// storage_timeout_ticks it is computed normally, whatever the operation does. What arrives late still serves others.
#include <algorithm>
#include <utility>

#include "scheduler/scheduler.h"
#include "scheduler/transition.h"

namespace tokenspeed {

using cache::BlockId;
using cache::BlockKey;
using cache::kNullBlock;
using fsm::StateId;

namespace {

constexpr std::size_t kMaxKeysPerOperation = 4096;
constexpr std::size_t kMaxBlocksPerPut = 64;
// Blocks that wait to be put; beyond it the oldest are dropped, for the storage is only a cache.
constexpr std::size_t kMaxWaitingPuts = 65536;

}  // namespace

void Scheduler::add_keys(CacheOperation& operation, const std::vector<BlockKey>& keys) const {
    for (const BlockKey& key : keys) {
        operation.digests.insert(operation.digests.end(), key.digest.begin(), key.digest.end());
        operation.offsets.push_back(key.offset);
    }
}

void Scheduler::put(Round& round) {
    while (puts_.size() > kMaxWaitingPuts) puts_.pop_front();
    cache::Tier* host = capacity_.host();
    while (!puts_.empty() && !storage_is_busy()) {
        CacheOperation operation = make_operation(OperationKind::StoragePut, 0);
        cache::HostPins pins(*host);
        std::vector<BlockKey> keys;
        for (; !puts_.empty() && operation.size() < kMaxBlocksPerPut; puts_.pop_front()) {
            const Publication& next = puts_.front();
            if (host->find(next.group, next.key) != next.id) continue;  // evicted meanwhile
            operation.group.push_back(next.group);
            operation.source.push_back(next.id);
            operation.target.push_back(kNullBlock);
            keys.push_back(next.key);
            pins.add(next.group, next.id);
        }
        if (operation.size() == 0) {
            --last_op_id_;
            return;
        }
        add_keys(operation, keys);
        pend(operation, nullptr, std::move(pins));
        ++storage_operations_;
        round.operations.push_back(std::move(operation));
    }
}

void Scheduler::look_up(Round& round) {
    if (!config_.storage) return;
    end_late_lookups();
    while (!to_look_up_.empty() && !storage_is_busy()) {
        Request& request = **to_look_up_.begin();
        to_look_up_.erase(to_look_up_.begin());
        request.looked_up = true;
        ask_storage(round, request);
    }
}

// Asks for every block beyond what device and host have that a longer hit could need.
void Scheduler::ask_storage(Round& round, Request& request) {
    const Prefix prefix = capacity_.probe(request);
    const std::int32_t pages = capacity_.pages_to_match(request);
    if (pages <= prefix.pages) return;
    if ((pages - prefix.pages) * config_.prefix_granularity < config_.storage_min_tokens) return;
    CacheOperation operation = make_operation(OperationKind::StorageQuery, request.handle);
    std::vector<BlockKey> keys;
    IntArray slots;
    for (std::int32_t page = 0; page < pages && keys.size() < kMaxKeysPerOperation; ++page) {
        const cache::Digest& digest = request.digest(page, config_.prefix_granularity);
        for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
            const std::int32_t blocks = capacity_.shape(group).blocks_per_page;
            for (std::int32_t offset = 0; offset < blocks; ++offset) {
                const BlockKey key{digest, offset};
                const int index = static_cast<int>(group);
                if (capacity_.device().find(index, key) != kNullBlock || capacity_.host()->find(index, key) != kNullBlock) {
                    continue;
                }
                operation.group.push_back(index);
                operation.source.push_back(kNullBlock);
                operation.target.push_back(kNullBlock);
                keys.push_back(key);
                slots.push_back(page * blocks + offset);
            }
        }
    }
    add_keys(operation, keys);
    Pending& pending = pend(operation, &request, cache::HostPins(*capacity_.host()));
    pending.slots = std::move(slots);
    ++storage_operations_;
    request.looked_up_at = now_;
    transition(request, fsm::PrefetchEvent{fsm::HostPins(cache::HostPins(*capacity_.host()))});
    request.operation = operation.op_id;
    request.reason = WaitReason::Operation;
    request.figure = operation.op_id;
    round.operations.push_back(std::move(operation));
}

void Scheduler::end_late_lookups() {
    const std::vector<Request*> waiting(prefetching_.begin(), prefetching_.end());
    for (Request* request : waiting) {
        if (now_ - request->looked_up_at < config_.storage_timeout_ticks) continue;
        ++counters_.storage_timeouts;
        note("storage_timeout", request->handle,
             "the storage did not answer operation " + std::to_string(request->operation) + " within " +
                 std::to_string(config_.storage_timeout_ticks) + " ms; the prompt is computed without it");
        land_lookup(*request);
    }
}

void Scheduler::land_lookup(Request& request) { transition(request, fsm::PrefetchLandedEvent{}); }

// The storage said what it has: fetches what makes the hit longest, if the host has room for it.
void Scheduler::fetch(Request& request, const Pending& query, const OperationDone& event) {
    Capacity::StoredBlocks stored(capacity_.num_groups());
    for (std::size_t i = 0; i < query.group.size(); ++i) {
        if (!event.succeeded.empty() && event.succeeded[i] == 0) continue;
        std::vector<std::uint8_t>& slots = stored[static_cast<std::size_t>(query.group[i])];
        const auto slot = static_cast<std::size_t>(query.slots[i]);
        if (slots.size() <= slot) slots.resize(slot + 1, 0);
        slots[slot] = 1;
    }
    const Prefix prefix = capacity_.probe(request, &stored);
    cache::Tier& host = *capacity_.host();
    cache::HostPins there(host);
    CacheOperation operation = make_operation(OperationKind::StorageFetch, request.handle);
    std::vector<BlockKey> keys;
    std::vector<std::int64_t> counts(capacity_.num_groups(), 0);
    for (std::size_t group = 0; group < prefix.groups.size(); ++group) {
        const GroupShape& shape = capacity_.shape(group);
        const GroupPrefix& its = prefix.groups[group];
        for (std::size_t i = 0; i < its.blocks.size(); ++i) {
            const Source& source = its.blocks[i];
            if (source.host != kNullBlock) there.add(static_cast<int>(group), source.host);
            if (source.device != kNullBlock || source.host != kNullBlock) continue;
            const std::int32_t slot =
                shape.history() ? its.first_slot + static_cast<std::int32_t>(i) : prefix.pages - 1;
            const cache::Digest& digest = request.digest(slot / shape.blocks_per_page, config_.prefix_granularity);
            operation.group.push_back(static_cast<std::int32_t>(group));
            operation.source.push_back(kNullBlock);
            keys.push_back({digest, slot % shape.blocks_per_page});
            ++counts[group];
        }
    }
    std::vector<std::vector<BlockId>> fresh;
    cache::HostPins filling(host);
    if (operation.size() == 0 || !filling.add_fresh(counts, fresh)) {
        --last_op_id_;
        land_lookup(request);
        return;
    }
    for (const std::vector<BlockId>& ids : fresh) operation.target.insert(operation.target.end(), ids.begin(), ids.end());
    for (const cache::HostPins::Pin& pin : filling.pins()) there.add(pin.group, pin.id);
    add_keys(operation, keys);
    const Prefix without = capacity_.probe(request);
    request.storage_tokens = prefix.tokens - without.tokens;
    request.operation = operation.op_id;
    request.figure = operation.op_id;
    *request.life.prefetch_pins() = std::move(there);
    pend(operation, &request, std::move(filling)).keys = std::move(keys);
    ++storage_operations_;
    outbox_.push_back(std::move(operation));
}

void Scheduler::fetched(Request* request, Pending& pending, const OperationDone& event) {
    cache::Tier& host = *capacity_.host();
    bool all = true;
    for (std::size_t i = 0; i < pending.keys.size(); ++i) {
        const bool failed = !event.succeeded.empty() && event.succeeded[i] == 0;
        all = all && !failed;
        if (!failed) (void)host.publish(pending.group[i], pending.host[i], pending.keys[i]);
    }
    if (request == nullptr) return;
    if (!all) request->storage_tokens = 0;
    land_lookup(*request);
}

}  // namespace tokenspeed
