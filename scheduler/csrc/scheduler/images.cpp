// Retracted requests: byte-exact images in the host tier, and the way back.
//
// What is published, and in the host tier already, is pinned there; all else is copied. The copies of an image are first in
// the step that follows, so the blocks can be granted in the same round. Nothing is computed twice: a restored request goes
// on where it was. Without room for an image the request computes again, from its place in the line.
#include <algorithm>

#include "scheduler/scheduler.h"
#include "scheduler/transition.h"

namespace tokenspeed {

using cache::BlockId;
using cache::kNullBlock;
using fsm::StateId;

namespace {

// Retracted requests that a round tries to restore before it gives up.
constexpr int kMaxRestoreAttempts = 4;

}  // namespace

void Scheduler::retract(Round& round, Request& request, const Request& beneficiary) {
    ++request.retractions;
    ++counters_.retractions;
    request.looked_up = true;
    capacity_.publish_last_state(request);
    const std::int64_t held = row_of(request).blocks, saved = counters_.image_blocks;
    const std::int32_t computed = request.life.bundle()->progress().committed;
    std::optional<fsm::HostImage> image = make_image(round, request);
    if (!image) counters_.recomputed_tokens += computed;
    request.retraction_epoch = ++next_epoch_;
    round.retracted.push_back(request.handle);
    transition(request, fsm::RetractEvent{.image = std::move(image), .epoch = request.retraction_epoch});
    note_retraction(request, beneficiary, held, computed, counters_.image_blocks - saved);
    request.reason = WaitReason::Retracted;
    request.figure = beneficiary.handle;
}

// The image of a quiet request, and the operation that copies what the host has not; nothing where it has no room.
std::optional<fsm::HostImage> Scheduler::make_image(Round& round, Request& request) {
    cache::Tier* host = capacity_.host();
    if (host == nullptr) return std::nullopt;
    const fsm::ForwardResources& bundle = *request.life.bundle();
    const cache::Tier& device = capacity_.device();
    cache::HostPins pins(*host);
    std::vector<fsm::GroupImage> groups(capacity_.num_groups());
    std::vector<std::int64_t> counts(capacity_.num_groups(), 0);
    std::vector<std::vector<std::size_t>> missing(capacity_.num_groups());  // places in the image that are copied
    for (std::size_t group = 0; group < groups.size(); ++group) {
        const cache::BlockTable& table = bundle.tables()[group];
        const int index = static_cast<int>(group);
        const bool history = capacity_.shape(group).history();
        fsm::GroupImage& image = groups[group];
        // A state's input is read by no forward that comes; the live block is the state.
        int slot = history ? 0 : 1;
        while (slot < table.size() && table.at(slot) == kNullBlock) ++slot;
        image.first_slot = slot;
        for (; slot < table.size(); ++slot) {
            const BlockId id = table.at(slot);
            BlockId there = kNullBlock;
            if (config_.writes_back() && device.is_indexed(index, id)) there = host->find(index, device.key_of(index, id));
            if (there != kNullBlock) {
                pins.add(index, there);
            } else {
                missing[group].push_back(image.blocks.size());
            }
            image.blocks.push_back(there);
        }
        counts[group] = static_cast<std::int64_t>(missing[group].size());
    }
    std::vector<std::vector<BlockId>> fresh;
    cache::HostPins copies(*host);
    if (!copies.add_fresh(counts, fresh)) return std::nullopt;

    CacheOperation operation = make_operation(OperationKind::ImageSave, request.handle);
    for (std::size_t group = 0; group < groups.size(); ++group) {
        const cache::BlockTable& table = bundle.tables()[group];
        for (std::size_t i = 0; i < missing[group].size(); ++i) {
            const std::size_t place = missing[group][i];
            groups[group].blocks[place] = fresh[group][i];
            pins.add(static_cast<int>(group), fresh[group][i]);
            operation.group.push_back(static_cast<std::int32_t>(group));
            operation.source.push_back(table.at(groups[group].first_slot + static_cast<int>(place)));
            operation.target.push_back(fresh[group][i]);
        }
    }
    counters_.image_blocks += static_cast<std::int64_t>(operation.size());
    if (operation.size() > 0) {
        request.operation = operation.op_id;
        Pending& pending = pend(operation, &request, std::move(copies));
        for (std::size_t i = 0; i < operation.size(); ++i) {
            const int group = operation.group[i];
            // A block that is known by content is worth a hit in the host tier, too; an empty key says it is not.
            const bool known = config_.writes_back() && device.is_indexed(group, operation.source[i]);
            pending.keys.push_back(known ? device.key_of(group, operation.source[i]) : cache::BlockKey{{}, -1});
        }
        round.operations.push_back(std::move(operation));
    }
    return fsm::HostImage(std::move(pins), std::move(groups), bundle.progress().committed);
}

// At most one request comes back a round. One for which there is no room makes nobody give way, but no new prompt passes
// it either.
void Scheduler::restore_one(Round& round) {
    int attempts = 0;
    for (Request* request : retracted_) {
        if (request->operation != 0) {
            request->reason = WaitReason::Operation;
            request->figure = request->operation;
            continue;
        }
        if (attempts == kMaxRestoreAttempts) return;
        ++attempts;
        if (capacity_.rows().free() == 0) {
            request->reason = WaitReason::NoRow;
        } else if ((resident_count_ == 0 || capacity_.worth_trying(*request)) && try_restore(round, *request)) {
            return;
        }
        if (round.sealed_by == nullptr) round.sealed_by = request;
    }
}

// Where the blocks of an image are: what the device still has can be claimed instead of copied.
Prefix Scheduler::prefix_of_image(Request& request, bool claim) const {
    const fsm::HostImage& image = *request.life.image();
    Prefix prefix;
    prefix.tokens = image.computed();
    prefix.pages = prefix.published_pages = image.computed() / config_.prefix_granularity;
    prefix.groups.resize(capacity_.num_groups());
    for (std::size_t group = 0; group < prefix.groups.size(); ++group) {
        const GroupShape& shape = capacity_.shape(group);
        if (!shape.history()) continue;
        GroupPrefix& its = prefix.groups[group];
        its.first_slot = image.groups()[group].first_slot;
        for (std::size_t i = 0; i < image.groups()[group].blocks.size(); ++i) {
            Source& source = its.blocks.emplace_back();
            source.host = image.groups()[group].blocks[i];
            const std::int32_t slot = its.first_slot + static_cast<std::int32_t>(i);
            const std::int32_t page = slot / shape.blocks_per_page;
            if (claim && config_.prefix_cache && page < prefix.pages) {
                const cache::Digest& digest = request.digest(page, config_.prefix_granularity);
                source.device = capacity_.device().find(static_cast<int>(group), {digest, slot % shape.blocks_per_page});
            }
            if (source.device == kNullBlock) prefix.published_pages = std::min(prefix.published_pages, page);
        }
    }
    return prefix;
}

bool Scheduler::try_restore(Round& round, Request& request) {
    const bool alone = resident_count_ == 0;
    Prefix prefix = prefix_of_image(request, true);
    Demand demand = capacity_.first_chunk(request, prefix, 0);
    std::optional<Shortfall> shortfall = capacity_.short_for(demand, alone);
    if (alone && capacity_.short_for(capacity_.first_chunk(request, prefix, 1), alone)) {
        // What the device still has lies strewn over too many parents for another step; copied back it fits.
        prefix = prefix_of_image(request, false);
        demand = capacity_.first_chunk(request, prefix, 0);
        shortfall = capacity_.short_for(demand, alone);
    }
    if (shortfall) {
        refuse(request, *shortfall);
        return false;
    }
    Admission admission = capacity_.admit(prefix, demand);
    for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
        if (capacity_.shape(group).history()) continue;
        admission.loads.push_back({static_cast<std::int32_t>(group), request.life.image()->groups()[group].blocks.at(0),
                                   admission.grant.blocks[group].at(1)});
    }
    transition(request, fsm::RestoreEvent{.grant = std::move(admission.grant), .published_pages = prefix.published_pages});
    capacity_.promise(request, demand);
    request.begins = true;
    round.restored.push_back(request.handle);
    ++counters_.restores;
    if (admission.loads.empty()) {
        transition(request, fsm::RestoreLandedEvent{});
        request.reason = WaitReason::Queued;
        return true;
    }
    send_loads(round, OperationKind::Restore, request, admission.loads);
    request.reason = WaitReason::Operation;
    request.figure = request.operation;
    return true;
}

// The copy of an image ended. Without it the request computes again.
void Scheduler::image_saved(Request& request, bool succeeded) {
    request.operation = 0;
    if (succeeded || !request.life.is<StateId::Retracted>()) return;
    counters_.recomputed_tokens += request.life.image()->computed();
    transition(request, fsm::RetractEvent{});
}

void Scheduler::restored(Request& request, bool succeeded) {
    request.operation = 0;
    if (!succeeded && request.life.is<StateId::Restoring>()) {
        aborts_.push_back({request.handle, "failed",
                           "the image of request " + std::to_string(request.handle) + " could not be copied back"});
        transition(request, fsm::AbortEvent{});
    }
    transition(request, fsm::RestoreLandedEvent{});
}

}  // namespace tokenspeed
