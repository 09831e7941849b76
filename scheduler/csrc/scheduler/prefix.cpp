// What the tiers have of a prompt, and making known what was computed.
//
// Closed groups (full history) bound a hit: any shorter prefix of one is one. The others need something behind its end, a
// window or a checkpoint, so below the bound each is matched again until none lowers it further; the bound only falls, so
// the result does not depend on the order of the groups.
#include <algorithm>

#include "scheduler/capacity.h"

namespace tokenspeed {

using cache::BlockKey;
using cache::kNullBlock;

std::int32_t Capacity::pages_to_match(const Request& request) const {
    if (!config_.prefix_cache) return 0;
    std::int32_t bound = request.prefill_len - 1;
    if (request.max_cached_prefix_tokens >= 0) bound = std::min(bound, request.max_cached_prefix_tokens);
    return bound / config_.prefix_granularity;
}

Source Capacity::find(std::size_t group, const BlockKey& key, std::size_t slot, const StoredBlocks* stored) const {
    Source source;
    source.device = device_.find(static_cast<int>(group), key);
    if (source.device != kNullBlock) return source;
    if (config_.writes_back()) source.host = host_->find(static_cast<int>(group), key);
    source.stored = stored != nullptr && slot < (*stored)[group].size() && (*stored)[group][slot] != 0;
    return source;
}

// History: the block of a slot. State: the checkpoint at the end of page `slot`.
Source Capacity::find_slot(Request& request, std::size_t group, std::int32_t slot, const StoredBlocks* stored) const {
    const std::int32_t blocks = shapes_[group].blocks_per_page;
    const cache::Digest& digest = request.digest(slot / blocks, config_.prefix_granularity);
    return find(group, {digest, slot % blocks}, static_cast<std::size_t>(slot), stored);
}

// Leading pages, at most `pages`, of which a closed group has every block.
std::int32_t Capacity::closed_pages(Request& request, std::size_t group, std::int32_t pages,
                                    const StoredBlocks* stored) const {
    const std::int32_t blocks = shapes_[group].blocks_per_page;
    for (std::int32_t slot = 0; slot < pages * blocks; ++slot) {
        if (!find_slot(request, group, slot, stored).found()) return slot / blocks;
    }
    return pages;
}

// The largest number of pages, at most `pages`, after which an open group can go on.
std::int32_t Capacity::open_pages(Request& request, std::size_t group, std::int32_t pages,
                                  const StoredBlocks* stored) const {
    const GroupShape& shape = shapes_[group];
    if (shape.attention == Attention::State) {
        while (pages > 0 && !find_slot(request, group, pages - 1, stored).found()) --pages;
        return pages;
    }
    while (pages > 0) {
        const std::int64_t boundary = static_cast<std::int64_t>(pages) * config_.prefix_granularity;
        std::int32_t slot = pages * shape.blocks_per_page - 1;
        const std::int32_t first = first_needed_slot(group, boundary);
        while (slot >= first && find_slot(request, group, slot, stored).found()) --slot;
        if (slot < first) return pages;
        // Whatever ends behind the missing block needs it, until the window has passed it.
        pages = slot / shape.blocks_per_page;
    }
    return 0;
}

Prefix Capacity::probe(Request& request, const StoredBlocks* stored) const {
    Prefix prefix = no_prefix();
    std::int32_t pages = pages_to_match(request);
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        if (shapes_[group].attention == Attention::FullHistory) pages = closed_pages(request, group, pages, stored);
    }
    const std::int32_t closed = pages;
    for (std::int32_t before = -1; open_groups_ && before != pages;) {
        before = pages;
        for (std::size_t group = 0; group < shapes_.size(); ++group) {
            if (shapes_[group].attention != Attention::FullHistory) pages = open_pages(request, group, pages, stored);
        }
    }
    prefix.pages = pages;
    prefix.tokens = pages * config_.prefix_granularity;
    if (closed > pages) prefix.junction = closed * config_.prefix_granularity;
    fill_sources(request, prefix, stored);
    return prefix;
}

void Capacity::fill_sources(Request& request, Prefix& prefix, const StoredBlocks* stored) const {
    prefix.published_pages = prefix.pages;
    bool state_elsewhere = false;
    for (std::size_t group = 0; group < shapes_.size() && prefix.pages > 0; ++group) {
        const GroupShape& shape = shapes_[group];
        GroupPrefix& its = prefix.groups[group];
        if (shape.attention == Attention::State) {
            its.blocks.push_back(find_slot(request, group, prefix.pages - 1, stored));
            if (its.blocks[0].device == kNullBlock) {
                // Without its state the hit is worth nothing, and until that has arrived it is not known here.
                prefix.published_pages = std::min(prefix.published_pages, prefix.pages - 1);
                state_elsewhere = true;
            }
            continue;
        }
        its.first_slot = first_needed_slot(group, prefix.tokens);
        const std::int32_t slots = prefix.pages * shape.blocks_per_page;
        its.blocks.reserve(static_cast<std::size_t>(slots - its.first_slot));
        for (std::int32_t slot = its.first_slot; slot < slots; ++slot) {
            its.blocks.push_back(find_slot(request, group, slot, stored));
            if (its.blocks.back().device == kNullBlock) {
                prefix.published_pages = std::min(prefix.published_pages, slot / shape.blocks_per_page);
            }
        }
    }
    prefix.device_tokens = state_elsewhere ? 0 : prefix.published_pages * config_.prefix_granularity;
}

Prefix Capacity::no_prefix() const {
    Prefix prefix;
    prefix.groups.resize(shapes_.size());
    return prefix;
}

Prefix Capacity::remote_prefix(Request& request, bool use_cache) const {
    Prefix prefix = no_prefix();
    std::int32_t pages = pages_to_match(request);
    bool closed = false;
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        if (shapes_[group].attention != Attention::FullHistory) continue;
        pages = closed_pages(request, group, pages, nullptr);
        closed = true;
    }
    prefix.pages = prefix.published_pages = closed && use_cache ? pages : 0;
    prefix.tokens = prefix.device_tokens = prefix.pages * config_.prefix_granularity;
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        if (shapes_[group].attention == Attention::FullHistory) {
            for (std::int32_t slot = 0; slot < prefix.pages * shapes_[group].blocks_per_page; ++slot) {
                prefix.groups[group].blocks.push_back(find_slot(request, group, slot, nullptr));
            }
        } else {
            prefix.groups[group].first_slot = first_needed_slot(group, request.prefill_len);
        }
    }
    return prefix;
}

void Capacity::publish_slot(Request& request, std::size_t group, int slot, const BlockKey& key) {
    fsm::ForwardResources& bundle = *request.life.bundle();
    cache::BlockTable& table = bundle.tables()[group];
    if (!table.publish(slot, key, bundle.progress().last_forward)) return;
    ++publications_;
    if (config_.writes_back()) published_.push_back({static_cast<std::int32_t>(group), table.at(slot), key});
}

void Capacity::publish_page(Request& request, std::int32_t page, std::int32_t boundary) {
    const cache::Digest& digest = request.digest(page, config_.prefix_granularity);
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        const GroupShape& shape = shapes_[group];
        if (!shape.history()) continue;
        const cache::BlockTable& table = request.life.bundle()->tables()[group];
        // What lies before the window behind the newest boundary can end no hit.
        const std::int32_t first = first_needed_slot(group, boundary);
        for (std::int32_t offset = 0; offset < shape.blocks_per_page; ++offset) {
            const std::int32_t slot = page * shape.blocks_per_page + offset;
            if (slot >= first && table.at(slot) != kNullBlock) publish_slot(request, group, slot, {digest, offset});
        }
    }
}

void Capacity::publish(Request& request) {
    fsm::ForwardResources& bundle = *request.life.bundle();
    fsm::CacheProgress& progress = bundle.progress();
    const std::int32_t page_tokens = config_.prefix_granularity;
    if (config_.prefix_cache) {
        const std::int32_t limit = std::min({progress.committed, progress.publish_limit, request.known_tokens()});
        const std::int32_t boundary = limit / page_tokens * page_tokens;
        for (; (progress.published_pages + 1) * page_tokens <= boundary; ++progress.published_pages) {
            publish_page(request, progress.published_pages, boundary);
        }
        for (std::size_t group = 0; open_groups_ && group < shapes_.size(); ++group) {
            cache::BlockTable& table = bundle.tables()[group];
            if (shapes_[group].history() || table.boundary() == 0 || table.boundary() > limit) continue;
            if (table.at(0) == kNullBlock) continue;
            if (device_.is_indexed(static_cast<int>(group), table.at(0))) continue;
            const std::int32_t page = table.boundary() / page_tokens - 1;
            publish_slot(request, group, 0, {request.digest(page, page_tokens), 0});
        }
    }
    for (std::size_t group = 0; open_groups_ && group < shapes_.size(); ++group) {
        cache::BlockTable& table = bundle.tables()[group];
        if (shapes_[group].attention == Attention::SlidingWindow) {
            table.expire(first_needed_slot(group, progress.committed));
        } else if (!shapes_[group].history() && table.boundary() < progress.committed) {
            table.retire_input(progress.last_forward);  // whoever read it has landed; one more may be out with it in its table
        }
    }
    if (open_groups_ && !request.reserves.empty()) settle(request);
}

void Capacity::publish_last_state(Request& request) {
    const fsm::ForwardResources& bundle = *request.life.bundle();
    const fsm::CacheProgress& progress = bundle.progress();
    const std::int32_t at = progress.committed;
    if (!config_.prefix_cache || !open_groups_ || !bundle.quiet() || at == 0) return;
    if (at != progress.scheduled || at > std::min(progress.publish_limit, request.known_tokens())) return;
    if (at % config_.prefix_granularity != 0) return;
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        const cache::BlockTable& table = bundle.tables()[group];
        if (shapes_[group].history() || table.boundary() == at || table.at(1) == kNullBlock) continue;
        if (device_.is_indexed(static_cast<int>(group), table.at(1))) continue;
        publish_slot(request, group, 1, {request.digest(at / config_.prefix_granularity - 1, config_.prefix_granularity), 0});
    }
}

}  // namespace tokenspeed
