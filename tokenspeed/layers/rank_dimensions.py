"""The dimensions of what one rank computes with, out of those of the whole model."""

from dataclasses import replace

from tokenspeed.recipes.model_config import ExpertsConfig, ModelConfig


def rank_dimensions(config: ModelConfig, *, rank: int, world: int) -> ModelConfig:
    """``config`` as layers and cache groups of one rank among ``world`` see it: its heads, its columns, its experts.

    The residual stream, the vocabulary, latents and indexers are whole on every rank. What cannot be divided was
    refused before (tokenspeed/recipes/divisibility.py); here nothing is rounded, ValueError says what slipped through.
    """
    if world == 1:
        return config

    def part(what: str, count: int) -> int:
        if count % world:
            raise ValueError(f"{count} {what} cannot be divided among {world} ranks; set parallel.tp to a divisor")
        return count // world

    changes: dict[str, object] = {
        "num_heads": part("attention heads", config.num_heads),
        "num_kv_heads": max(1, config.num_kv_heads // world),
        "intermediate_size": part("intermediate columns", config.intermediate_size),
    }
    if config.experts is not None:
        changes["experts"] = _experts(config.experts, rank, world)
    if config.linear is not None:
        changes["linear"] = replace(
            config.linear,
            key_heads=part("key heads of layers with a state", config.linear.key_heads),
            value_heads=part("value heads of layers with a state", config.linear.value_heads),
        )
    if config.compression is not None:
        groups = part("groups of the output projection", config.compression.output_groups)
        changes["compression"] = replace(config.compression, output_groups=groups)
    return replace(config, **changes)  # type: ignore[arg-type]


def _experts(experts: ExpertsConfig, rank: int, world: int) -> ExpertsConfig:
    """The router stays whole: it chooses among all experts, wherever they are."""
    divided = experts.count if experts.by_expert else experts.intermediate
    if divided % world or experts.shared_intermediate % world:
        what = f"{experts.count} experts" if experts.by_expert else f"{experts.intermediate} columns of an expert"
        raise ValueError(
            f"{what} and {experts.shared_intermediate} of the shared one cannot be divided among {world} ranks; set "
            "parallel.tp to a divisor"
        )
    changed = replace(experts, shared_intermediate=experts.shared_intermediate // world)
    if experts.by_expert:
        held = experts.count // world
        return replace(changed, held=held, first_held=rank * held)
    return replace(changed, intermediate=experts.intermediate // world)
