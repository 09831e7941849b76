"""Plain facts about the device side, known once it is built. No torch here: the control plane reads this."""

from dataclasses import dataclass

from tokenspeed.recipes.capacity import GroupFacts


@dataclass(frozen=True, kw_only=True)
class DeviceSpecs:
    """What the builder decided.

    Attributes:
        groups: the cache groups, in plan order.
        prefix_granularity: tokens of one prefix page.
        num_parents: parents in the arena, the null parent not counted.
        kv_tokens: the longest request that they could hold, whatever the model allows.
        arena_bytes: size of the arena, the null parent included.
        host_parents: parents in the host pool, the null parent not counted; 0 where there is none.
        host_bytes: size of the host pool, the null parent included.
        storage: whether a storage tier is behind the host pool.
        weight_bytes: bytes of the weights that are mapped or held.
        workspace_bytes: peak of the forward's buffers.
        untouched_bytes: of arena and host pool, what nothing was written to yet: reserved, not in memory; None where
            the system does not tell.
        vocab_size: of the model.
        max_model_len: the longest sequence (prompt and output) one request may have.
        max_num_seqs: rows in the request pool.
        device: "cpu" ...
        kernels: op to the name of the kernel bound to it (the start report).
        kernel_doubts: op to why its kernel deserves doubt: it is the reference, or was not verified on this platform.
    """

    groups: tuple[GroupFacts, ...]
    prefix_granularity: int
    num_parents: int
    kv_tokens: int
    arena_bytes: int
    host_parents: int
    host_bytes: int
    storage: bool
    weight_bytes: int
    workspace_bytes: int
    untouched_bytes: int | None
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    device: str
    kernels: dict[str, str]
    kernel_doubts: dict[str, str]
