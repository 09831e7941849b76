// What moves between the tiers: operations are numbered, their host blocks pinned until they are acknowledged.
#include <algorithm>
#include <utility>

#include "scheduler/scheduler.h"
#include "scheduler/transition.h"

namespace tokenspeed {

using cache::BlockId;
using cache::kNullBlock;
using fsm::StateId;

CacheOperation Scheduler::make_operation(OperationKind kind, std::int32_t handle) {
    CacheOperation operation;
    operation.op_id = ++last_op_id_;
    operation.kind = kind;
    operation.handle = handle;
    return operation;
}

Scheduler::Pending& Scheduler::pend(const CacheOperation& operation, const Request* request, cache::HostPins pins) {
    Pending& pending = pending_[operation.op_id];
    pending.kind = operation.kind;
    pending.handle = operation.handle;
    pending.age = request != nullptr ? request->age : -1;
    pending.group = operation.group;
    pending.host = operation.target;
    pending.pins = std::move(pins);
    return pending;
}

// The request an operation is for, or nullptr where it is gone.
Request* Scheduler::owner(const Pending& pending) const {
    const auto found = requests_.find(pending.handle);
    return found == requests_.end() || found->second->age != pending.age ? nullptr : found->second.get();
}

// Host blocks that fill a request's device blocks.
void Scheduler::send_loads(Round& round, OperationKind kind, Request& request, const std::vector<Load>& loads) {
    if (loads.empty()) return;
    CacheOperation operation = make_operation(kind, request.handle);
    cache::HostPins pins(*capacity_.host());
    for (const Load& load : loads) {
        operation.group.push_back(load.group);
        operation.source.push_back(load.host);
        operation.target.push_back(load.device);
        pins.add(load.group, load.host);
    }
    if (kind == OperationKind::Restore) request.operation = operation.op_id;
    pend(operation, &request, std::move(pins));
    round.operations.push_back(std::move(operation));
}

// Copies to the host what was published since the last round, as far as it is still there and the host has room.
void Scheduler::write_back(Round& round) {
    if (!capacity_.has_publications()) return;
    cache::Tier& host = *capacity_.host();
    const cache::Tier& device = capacity_.device();
    CacheOperation operation = make_operation(OperationKind::WriteBack, 0);
    cache::HostPins pins(host);
    std::vector<cache::BlockKey> keys;
    std::vector<std::int64_t> one(capacity_.num_groups(), 0);
    std::vector<std::vector<BlockId>> fresh;
    for (const Publication& published : capacity_.take_publications()) {
        const bool there = device.is_indexed(published.group, published.id) &&
                           device.key_of(published.group, published.id) == published.key;
        if (!there || host.find(published.group, published.key) != kNullBlock) continue;
        one[static_cast<std::size_t>(published.group)] = 1;
        const bool room = pins.add_fresh(one, fresh);
        one[static_cast<std::size_t>(published.group)] = 0;
        if (!room) continue;
        operation.group.push_back(published.group);
        operation.source.push_back(published.id);
        operation.target.push_back(fresh[static_cast<std::size_t>(published.group)][0]);
        keys.push_back(published.key);
    }
    if (operation.size() == 0) {
        --last_op_id_;
        return;
    }
    pend(operation, nullptr, std::move(pins)).keys = std::move(keys);
    round.operations.push_back(std::move(operation));
}

void Scheduler::done(const OperationDone& event) {
    const auto found = pending_.find(event.op_id);
    if (found == pending_.end()) {
        ++counters_.ignored_results;
        return;
    }
    Pending pending = std::move(found->second);
    pending_.erase(found);
    const bool succeeded = std::find(event.succeeded.begin(), event.succeeded.end(), 0) == event.succeeded.end();
    Request* request = owner(pending);
    switch (pending.kind) {
        case OperationKind::WriteBack:
            copied_to_host(pending, event);
            break;
        case OperationKind::ImageSave:
            copied_to_host(pending, event);
            if (request != nullptr && request->operation == event.op_id) image_saved(*request, succeeded);
            break;
        case OperationKind::LoadBack:
            // The chunk behind it read what was not there.
            if (!succeeded && request != nullptr && request->life.bundle() != nullptr) {
                fsm::CacheProgress& progress = request->life.bundle()->progress();
                progress.publish_limit = std::min(progress.publish_limit, progress.published_pages * config_.prefix_granularity);
                if (!std::exchange(request->broken, true)) broken_.push_back(request);
            }
            break;
        case OperationKind::Restore:
            if (request != nullptr) restored(*request, succeeded);
            break;
        case OperationKind::StorageQuery:
            --storage_operations_;
            if (request != nullptr && request->operation == event.op_id) fetch(*request, pending, event);
            break;
        case OperationKind::StorageFetch:
            --storage_operations_;
            fetched(request != nullptr && request->operation == event.op_id ? request : nullptr, pending, event);
            break;
        case OperationKind::StoragePut:
            --storage_operations_;
            break;
        case OperationKind::HandOff:
            if (request != nullptr) handed_off(*request);
            break;
        case OperationKind::RemotePrefill:
            break;
    }
}

// Only a copy that ended well is visible; equal content that was there first stays.
void Scheduler::copied_to_host(Pending& pending, const OperationDone& event) {
    cache::Tier& host = *capacity_.host();
    for (std::size_t i = 0; i < pending.keys.size(); ++i) {
        if (pending.keys[i].offset < 0 || (!event.succeeded.empty() && event.succeeded[i] == 0)) continue;
        const int group = pending.group[i];
        if (host.publish(group, pending.host[i], pending.keys[i]) != pending.host[i]) continue;
        if (config_.storage) puts_.push_back({pending.group[i], pending.host[i], pending.keys[i]});
    }
}

}  // namespace tokenspeed
