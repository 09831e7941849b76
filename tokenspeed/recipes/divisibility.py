"""Whether a model can be divided among so many ranks: checked before anything is loaded."""

from collections.abc import Iterator

from tokenspeed.recipes.dimensions import Dimensions
from tokenspeed.recipes.schema import Parallel

_TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128, 256)


def indivisible(model: Dimensions, parallel: Parallel) -> list[str]:
    """One line for each thing that ``parallel`` cannot divide, with the sizes that work."""
    problems = []
    for what, count in _tensor_parts(model, parallel):
        if count % parallel.tp:
            problems.append(_line("tp", parallel.tp, what, count))
    # Fewer KV heads than ranks are repeated, so the ranks must be a multiple of the heads then.
    if model.latent is None and model.kv_heads % parallel.tp and parallel.tp % model.kv_heads:
        problems.append(_line("tp", parallel.tp, "key-value heads", model.kv_heads))
    if parallel.ep > 1:
        if model.experts is None:
            problems.append(f"parallel.ep is {parallel.ep}: the model has no experts; take it away")
        elif model.experts.count % parallel.ep:
            problems.append(_line("ep", parallel.ep, "experts", model.experts.count))
        if parallel.ep not in (parallel.tp, parallel.tp * parallel.dp):
            either = sorted({parallel.tp, parallel.tp * parallel.dp})
            problems.append(
                f"parallel.ep is {parallel.ep}: experts are divided among the ranks of one or of all replicas: "
                f"{' or '.join(map(str, either))}"
            )
    if parallel.pp > model.layers:
        problems.append(f"parallel.pp is {parallel.pp}: the model has {model.layers} layers")
    return problems


def _tensor_parts(model: Dimensions, parallel: Parallel) -> Iterator[tuple[str, int]]:
    block = model.quantisation_block
    unit = f" in blocks of {block}" if block > 1 else ""
    yield "attention heads", model.heads
    outputs = [("heads", model.heads * (model.head_dim if model.latent is None else model.latent.value))]
    if model.linear is not None:
        yield "key heads of layers with a state", model.linear.key_heads
        yield "value heads of layers with a state", model.linear.value_heads
        outputs.append(("value heads", model.linear.values))
    if model.compression is not None:
        yield "groups of the output projection", model.compression.output_groups
        outputs = [("output projection", model.compression.output_groups * model.compression.output_rank)]
    for what, columns in outputs:
        if block > 1 and columns % block == 0:  # what is no whole blocks is not held in blocks
            yield f"columns of the {what}{unit}", columns // block
    if model.intermediate:
        yield f"intermediate columns{unit}", _blocks(model.intermediate, block)
    if model.experts is not None and (parallel.ep == 1 or model.experts.shared):
        # Under expert parallelism an expert stays whole, and the shared ones alone are divided.
        columns = model.experts.intermediate * (1 if parallel.ep == 1 else model.experts.shared)
        yield f"expert columns{unit}", _blocks(columns, block)
    if model.vision is not None and model.vision.sharded:
        yield "vision heads", model.vision.heads


def _blocks(columns: int, block: int) -> int:
    """Whole blocks that columns are; 1, which nothing divides, where they are none."""
    return columns // block if columns % block == 0 else 1


def _line(key: str, ranks: int, what: str, count: int) -> str:
    works = ", ".join(str(size) for size in _TRIED if count % size == 0)
    return f"parallel.{key} is {ranks}: {count} {what} are not a multiple of {ranks}; {key} may be {works}"
