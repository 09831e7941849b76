// Turns a finished round into the arrays that cross to the engine.
#include "scheduler/scheduler.h"

namespace tokenspeed {

std::shared_ptr<const Plan> Scheduler::emit(Round&& round) {
    auto plan = std::make_shared<Plan>();
    plan->tables.resize(capacity_.num_groups());
    plan->zero_blocks.resize(capacity_.num_groups());
    plan->copy_blocks.resize(capacity_.num_groups());
    record(round);
    plan->aborts = std::move(round.aborts);
    plan->operations = std::move(round.operations);
    const std::size_t rows = round.prefills.size() + round.decodes.size();
    if (rows == 0) return plan;

    plan->forward_id = ++last_forward_id_;
    for (IntArray* array : {&plan->handle, &plan->row, &plan->kind, &plan->input_len, &plan->prefix_len,
                            &plan->prompt_len, &plan->samples}) {
        array->reserve(rows);
    }
    Outstanding outstanding;
    outstanding.requests.reserve(rows);
    for (const auto& [planned, kind] : {std::pair{&round.prefills, RowKind::Prefill},
                                        std::pair{&round.decodes, RowKind::Decode}}) {
        for (const PlannedRow& row : *planned) {
            emit_row(*plan, row, kind);
            emit_deltas(*plan, *row.request);
            row.request->life.bundle()->progress().last_forward = plan->forward_id;
            outstanding.requests.push_back(row.request);
            (kind == RowKind::Prefill ? counters_.prefill_tokens : counters_.decode_tokens) += row.input_len;
        }
    }
    outstanding.plan = plan;
    outstanding_.push_back(std::move(outstanding));
    return plan;
}

void Scheduler::emit_row(Plan& plan, const PlannedRow& row, RowKind kind) const {
    const Request& request = *row.request;
    if (row.starts) plan.starts.push_back(plan.num_rows());
    plan.handle.push_back(request.handle);
    plan.row.push_back(request.life.bundle()->row());
    plan.kind.push_back(static_cast<std::int32_t>(kind));
    plan.input_len.push_back(row.input_len);
    plan.prefix_len.push_back(row.prefix_len);
    plan.prompt_len.push_back(request.prefill_len);
    plan.samples.push_back(row.samples ? 1 : 0);
    if (kind == RowKind::Prefill) {
        const auto first = request.tokens.begin() + row.prefix_len;
        plan.input_ids.insert(plan.input_ids.end(), first, first + row.input_len);
    } else {
        // The token sampled last: known, or still on the device.
        const bool known = row.prefix_len < request.known_tokens();
        plan.input_ids.push_back(known ? request.tokens[static_cast<std::size_t>(row.prefix_len)] : -1);
    }
}

void Scheduler::emit_deltas(Plan& plan, Request& request) const {
    fsm::ForwardResources& bundle = *request.life.bundle();
    for (std::size_t group = 0; group < bundle.tables().size(); ++group) {
        cache::BlockTable& table = bundle.tables()[group];
        if (!table.changed()) continue;
        BlockTableDelta& delta = plan.tables[group];
        const auto changed = table.ids().subspan(static_cast<std::size_t>(table.changed_from()));
        delta.row.push_back(bundle.row());
        delta.first_slot.push_back(table.changed_from());
        delta.count.push_back(static_cast<std::int32_t>(changed.size()));
        delta.version_from.push_back(table.version());
        delta.version_to.push_back(table.version() + 1);
        delta.ids.insert(delta.ids.end(), changed.begin(), changed.end());
        table.mark_sent();
    }
}

}  // namespace tokenspeed
