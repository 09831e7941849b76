// One request in sentences: why it waits and what it would take, or what it holds.
#include <algorithm>
#include <string>

#include "scheduler/scheduler.h"
#include "scheduler/words.h"

namespace tokenspeed {

using fsm::StateId;

namespace {

// Requests that a sentence names before it only counts.
constexpr std::size_t kNamed = 8;

std::string named(const std::vector<std::int32_t>& handles) {
    std::string text = handles.size() == 1 ? "request " : "requests ";
    for (std::size_t i = 0; i < std::min(handles.size(), kNamed); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(handles[i]);
    }
    if (handles.size() > kNamed) text += " and " + std::to_string(handles.size() - kNamed) + " more";
    return text;
}

}  // namespace

Description Scheduler::describe(std::int32_t handle) const {
    const auto found = requests_.find(handle);
    if (found != requests_.end()) {
        Request& request = *found->second;
        Description alive{.alive = true,
                          .row = row_of(request),
                          .timeline = request.timeline,
                          .lines = sentences_about(request)};
        alive.row.reason = explain(request).text;
        return alive;
    }
    Description ended;
    ended.row.handle = handle;
    ended.row.state = StateId::Finished;
    const auto last = std::find_if(ended_.rbegin(), ended_.rend(), [&](const Ended& one) { return one.row.handle == handle; });
    if (last == ended_.rend()) return ended;
    ended.row = last->row;
    ended.timeline = last->timeline;
    return ended;
}

std::vector<std::string> Scheduler::sentences_about(Request& request) const {
    std::vector<std::string> lines;
    const std::string why = explain(request).text;
    lines.push_back(why.empty() ? "it runs" : why);
    switch (request.life.id()) {
        case StateId::Submitted:
            describe_waiting(request, lines);
            break;
        case StateId::Retracted:
            describe_way_back(request, lines);
            break;
        case StateId::Prefetching:
            lines.push_back("the storage is asked for the rest of its prompt; after " +
                            std::to_string(config_.storage_timeout_ticks) +
                            " ms it is computed without, whatever the storage does");
            break;
        case StateId::Restoring:
            lines.push_back("its image of " + counted(row_of(request).host_blocks, "block") +
                            " is on the way from the host pool to the device; it runs when the copy has ended");
            break;
        default:
            break;
    }
    if (request.life.bundle() != nullptr) describe_resident(request, lines);
    return lines;
}

std::string Scheduler::place_in_line(const Request& request) const {
    const auto place = std::distance(waiting_.begin(), waiting_.find(const_cast<Request*>(&request)));
    std::string text = "place " + std::to_string(place + 1) + " of " + std::to_string(waiting_.size()) +
                       " in the line, by priority (its own is " + std::to_string(request.priority) + "), then by age";
    if (request.overtaken > 0) {
        text += "; it was passed " + counted(request.overtaken, "time") + ", and after " +
                std::to_string(config_.max_overtakes) + " (max_overtakes) nobody passes it any more";
    }
    return text;
}

// The first chunk it would get in a round of its own, and whether there is room for it.
void Scheduler::describe_waiting(Request& request, std::vector<std::string>& lines) const {
    lines.push_back(place_in_line(request));
    const bool remote = config_.role == fsm::Role::Decode;
    const Prefix prefix = remote ? capacity_.remote_prefix(request) : capacity_.probe(request);
    const std::int32_t chunk =
        remote ? request.prefill_len - prefix.tokens
               : chunk_tokens(prefix.tokens, {.budget = config_.max_scheduled_tokens,
                                              .prefill_len = request.prefill_len,
                                              .junction = prefix.junction,
                                              .checkpoint_granularity = capacity_.checkpoint_granularity()});
    if (prefix.tokens > 0) {
        lines.push_back("the caches have " + std::to_string(prefix.tokens) + " of the " +
                        counted(request.prefill_len, "token") + " it begins with");
    }
    const Demand demand = capacity_.first_chunk(request, prefix, chunk);
    describe_needs(request, demand, "its first chunk of " + counted(chunk, "token"), lines);
}

void Scheduler::describe_way_back(Request& request, std::vector<std::string>& lines) const {
    const std::int64_t blocks = row_of(request).host_blocks;
    if (request.operation != 0) {
        lines.push_back("its image of " + counted(blocks, "block") + " is on the way to the host pool; it can come back " +
                        "when the copy has ended");
        return;
    }
    const auto place = std::distance(retracted_.begin(), retracted_.find(&request));
    lines.push_back("its image of " + counted(blocks, "block") + " lies in the host pool (" + kHostPoolKnob +
                    "): nothing is computed again; it is number " + std::to_string(place + 1) + " of " +
                    std::to_string(retracted_.size()) + " to come back");
    const Prefix prefix = prefix_of_image(request, true);
    describe_needs(request, capacity_.first_chunk(request, prefix, 0), "its image", lines);
}

// What of every group it would take and what there is, then whether that is enough, and else what would free it.
void Scheduler::describe_needs(const Request& request, const Demand& demand, const std::string& what,
                               std::vector<std::string>& lines) const {
    const bool alone = resident_count_ == 0;
    const cache::Tier& device = capacity_.device();
    bool reserves = false;
    for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
        const GroupDemand& its = demand.groups[group];
        reserves = reserves || (its.reserve > 0 && !alone);
        const int index = static_cast<int>(group);
        std::string text = "group " + config_.groups[group].group_id + ": " + what + " needs " + counted(its.fresh, "block");
        if (its.reserve > 0 && !alone) {
            text += ", and beside it " + counted(its.reserve, "block") + " must be left for its output (" + kHeadroomKnob +
                    " " + std::to_string(config_.headroom_tokens) + ")";
        }
        text += "; " + std::to_string(device.free(index)) + " are free and " + std::to_string(device.cached(index)) +
                " cached, which can be evicted";
        if (capacity_.num_groups() > 1) text += " (what is empty is every group's, until one takes it)";
        if (capacity_.reserved()[group] > 0 && !alone) {
            text += "; " + std::to_string(capacity_.reserved()[group]) + " of both are promised to those that run";
        }
        lines.push_back(text);
    }
    if (const std::optional<Shortfall> shortfall = capacity_.short_for(demand, alone)) {
        lines.push_back(what_frees(request, *shortfall, reserves));
    } else if (capacity_.rows().free() == 0) {
        lines.push_back("there are blocks enough, but no row: it begins when one of the " +
                        std::to_string(config_.max_num_seqs) + " (" + kSequencesKnob + ") is free");
    } else {
        lines.push_back("there is room for it: it begins when its turn comes");
    }
}

// The fewest of those that run whose end would make enough room, and the knobs; `reserves`: part of it is a reserve.
std::string Scheduler::what_frees(const Request& request, const Shortfall& shortfall, bool reserves) const {
    std::vector<std::pair<std::int64_t, const Request*>> holders;
    bool gives_way = false;
    for (const Request* resident : residents_) {
        if (resident == nullptr || resident == &request) continue;
        std::int64_t weight = capacity_.device().sole_weight(resident->life.bundle()->row());
        for (std::size_t group = 0; group < resident->reserves.size(); ++group) {
            weight += resident->reserves[group].outstanding * capacity_.device().weight(static_cast<int>(group));
        }
        holders.emplace_back(weight, resident);
        gives_way = gives_way || request.life.bundle() != nullptr || LineOrder{}(&request, resident);
    }
    std::sort(holders.begin(), holders.end(), [](const auto& a, const auto& b) {
        return a.first != b.first ? a.first > b.first : a.second->age < b.second->age;
    });
    std::vector<std::int32_t> ends;
    std::int64_t missing = shortfall.weight;
    for (const auto& [weight, resident] : holders) {
        if (missing <= 0) break;
        missing -= weight;
        ends.push_back(resident->handle);
    }
    std::string text = "it is short by " + counted(shortfall.blocks, "block") + " of group " +
                       config_.groups[shortfall.group].group_id;
    if (!ends.empty()) {
        text += missing <= 0 ? ": the end of " + named(ends) + " would make room"
                             : ": not even the end of " + named(ends) + ", all that run, is sure to make room";
    }
    if (request.life.is<StateId::Retracted>()) {
        text += "; nobody gives way to one that comes back";
    } else if (!ends.empty() && !gives_way) {
        text += "; none gives way to it, for all that run are before it in the line";
    }
    text += "; more blocks (" + kPoolKnob + ")";
    if (reserves) text += ", or a smaller reserve (" + kHeadroomKnob + " " + std::to_string(config_.headroom_tokens) + "),";
    return text + " would help";
}

void Scheduler::describe_resident(const Request& request, std::vector<std::string>& lines) const {
    const fsm::ForwardResources& bundle = *request.life.bundle();
    if (request.life.is<StateId::Prefilling>()) {
        lines.push_back("computed " + std::to_string(bundle.progress().scheduled) + " of the " +
                        counted(request.prefill_len, "token") + " it begins with");
    }
    for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
        const cache::BlockTable& table = bundle.tables()[group];
        const int index = static_cast<int>(group);
        const auto alone = std::count_if(table.ids().begin(), table.ids().end(), [&](cache::BlockId id) {
            return id != cache::kNullBlock && capacity_.device().held_by_alone(index, bundle.row(), id);
        });
        std::string text = "group " + config_.groups[group].group_id + ": holds " + counted(table.blocks(), "block") +
                           ", " + std::to_string(alone) + " of them alone";
        if (!request.reserves.empty() && request.reserves[group].outstanding > 0) {
            text += ", and is promised " + std::to_string(request.reserves[group].outstanding) + " more";
        }
        lines.push_back(text);
    }
    if (request.reason == WaitReason::Capacity) {
        const Shortfall shortfall{.group = request.short_group,
                                  .blocks = request.figure,
                                  .weight = request.figure * capacity_.device().weight(static_cast<int>(request.short_group))};
        lines.push_back(what_frees(request, shortfall, false));
    } else if (request.prepaid && is_resident(request.life.id())) {
        lines.push_back("its whole output is promised, so it gives way only where nothing else can run");
    }
}

// In the words of the log of events: who gave way to whom, what that freed, and what becomes of it.
void Scheduler::note_retraction(const Request& request, const Request& beneficiary, std::int64_t held,
                                std::int32_t computed, std::int64_t saved) {
    std::string text = "with " + counted(request.generated(), "token") + " of output it gave " + counted(held, "block");
    if (&request == &beneficiary) {
        text += " back, to take them anew close together";
    } else {
        text += " to request " + std::to_string(beneficiary.handle);
        if (beneficiary.reason == WaitReason::Capacity) {
            text += ", which was short by " + counted(beneficiary.figure, "block") + " of group " +
                    config_.groups[beneficiary.short_group].group_id;
        }
    }
    if (request.life.is<StateId::Retracted>()) {
        text += "; " + counted(saved, "block") + " of its image are copied to the host pool";
    } else {
        text += "; " + counted(computed, "token") + " will be computed again, for " +
                (capacity_.host() == nullptr ? "there is no host pool" : "its image has no room in the host pool") + " (" +
                kHostPoolKnob + ")";
    }
    note("retraction", request.handle, std::move(text));
}

}  // namespace tokenspeed
