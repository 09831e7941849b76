from enum import Enum

MAX_HEAD_DIM: int
MAX_Q_PER_KV: int
MAX_LATENT_DIM: int
MAX_INDEX_DIM: int
MAX_ROTARY_DIM: int

class KvType(Enum):
    float32 = 0
    bfloat16 = 1
    float16 = 2
    e4m3 = 3

class Recording:
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def replay(self) -> None: ...
    def __len__(self) -> int: ...

class Matrix:
    def __init__(self, format: str, rows: int, columns: int, data: int, bias: int) -> None: ...
    def multiply(self, x: int, tokens: int, out: int) -> None: ...
    def multiply_rounded(self, x: int, tokens: int, out: int) -> None: ...
    def multiply_heads(
        self,
        heads: int,
        skipped: int,
        x: int,
        x_token: int,
        x_head: int,
        tokens: int,
        out: int,
        out_token: int,
        out_head: int,
    ) -> None: ...
    def multiply_tiled(self, x: int, tokens: int, out: int, emulated: bool) -> None: ...
    def lookup(self, ids: int, tokens: int, out: int) -> None: ...

class Scoring:
    softmax: Scoring
    sigmoid: Scoring
    sqrtsoftplus: Scoring

class Router:
    def __init__(
        self,
        experts: int,
        top_k: int,
        scoring: Scoring,
        groups: int,
        top_groups: int,
        renormalise: bool,
        scale: float,
        correction: int,
    ) -> None: ...
    def route(self, logits: int, rows: int, ids: int, weights: int) -> None: ...

class Mixture:
    def __init__(
        self,
        gate_up: Matrix,
        down: Matrix,
        gate_up_bias: int,
        down_bias: int,
        alpha: float,
        limit: float,
        offset: float,
        rounded: bool,
    ) -> None: ...
    def apply(self, x: int, ids: int, weights: int, tokens: int, top_k: int, out: int) -> None: ...

def table_route(
    logits: int,
    tokens: int,
    rows: int,
    table: int,
    experts: int,
    top_k: int,
    scale: float,
    ids: int,
    weights: int,
    /,
) -> None: ...
def clamped_swiglu(
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    alpha: float,
    limit: float,
    offset: float,
    out: int,
    rows: int,
    size: int,
    /,
) -> None: ...

Part = tuple[int, int]
Plane = tuple[int, int, int]
Rows = tuple[int, int, int, int]

def causal_conv(
    x: Part, channels: int, width: int, weight: int, bias: int, state: Plane, rows: Rows, out: int, /
) -> None: ...
def gated_delta(
    q: Part,
    k: Part,
    v: Part,
    decay: Part,
    beta: Part,
    rate: int,
    bias: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    channel_decay: bool,
    epsilon: float,
    state: Plane,
    rows: Rows,
    out: int,
    /,
) -> None: ...
def gated_norm(
    x: int,
    gate: Part,
    weight: int,
    epsilon: float,
    silu: bool,
    out: int,
    tokens: int,
    heads: int,
    dim: int,
    /,
) -> None: ...
def sigmoid_gate(x: int, gate: Part, out: int, rows: int, size: int, gates: int, /) -> None: ...
def add(x: int, out: int, size: int, /) -> None: ...

class PackedMatrix:
    def __init__(self, format: str, rows: int, columns: int, data: int) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def multiply(self, x: int, tokens: int, out: int, bias: int, wide: bool) -> None: ...

def read_all(data: int, bytes: int) -> int: ...
def release_mapped(data: int, bytes: int) -> int: ...
def instruction_set() -> str: ...
def has_instruction_set(name: str) -> bool: ...
def choose_instruction_set(name: str) -> None: ...
def set_thread_limit(count: int) -> None: ...
def set_thread_places(cpus: list[int]) -> None: ...
def thread_limit() -> int: ...
def enable_amx() -> None: ...
def uniform(seed: int, choice: int, position: int) -> float: ...
def rms_norm(x: int, residual: int, weight: int, epsilon: float, out: int, rows: int, size: int) -> None: ...
def silu_and_mul(gate: int, gate_stride: int, up: int, up_stride: int, out: int, rows: int, size: int) -> None: ...
def gelu_tanh_and_mul(
    gate: int, gate_stride: int, up: int, up_stride: int, out: int, rows: int, size: int, /
) -> None: ...
def scale_rows(x: int, factors: int, places: int, out: int, rows: int, size: int, /) -> None: ...
def gqa_prologue(
    q: int,
    q_stride: int,
    q_heads: int,
    k: int,
    k_stride: int,
    kv_heads: int,
    v: int,
    v_stride: int,
    tokens: int,
    head_dim: int,
    positions: int,
    cos_sin: int,
    rotary_dim: int,
    q_norm: int,
    k_norm: int,
    epsilon: float,
    type: KvType,
    keys: int,
    key_strides: tuple[int, ...],
    values: int,
    value_strides: tuple[int, ...],
    page_size: int,
    slots: int,
    /,
) -> None: ...
def attend(
    q: int,
    q_stride: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    type: KvType,
    keys: int,
    key_strides: tuple[int, ...],
    values: int,
    value_strides: tuple[int, ...],
    page_size: int,
    page_table: int,
    page_table_stride: int,
    query_start: int,
    queries_each: int,
    lengths: int,
    sequences: int,
    scale: float,
    window: int,
    rounded: bool,
    out: int,
    sinks: int,
    soft_cap: float,
    /,
) -> None: ...
def mla_prologue(
    q: int,
    q_stride: int,
    q_heads: int,
    plain_dim: int,
    compressed: int,
    compressed_stride: int,
    latent_dim: int,
    rotary_dim: int,
    tokens: int,
    positions: int,
    cos_sin: int,
    latent_norm: int,
    epsilon: float,
    type: KvType,
    cache: int,
    block_stride: int,
    token_stride: int,
    page_size: int,
    slots: int,
    /,
) -> None: ...
def mla_attend(
    q_latent: int,
    latent_token_stride: int,
    latent_head_stride: int,
    latent_dim: int,
    q_rope: int,
    rope_token_stride: int,
    rope_head_stride: int,
    rotary_dim: int,
    tokens: int,
    q_heads: int,
    type: KvType,
    cache: int,
    block_stride: int,
    token_stride: int,
    page_size: int,
    page_table: int,
    page_table_stride: int,
    query_start: int,
    queries_each: int,
    lengths: int,
    sequences: int,
    scale: float,
    parts: int,
    rounded: bool,
    out: int,
    lse: int,
    /,
) -> None: ...

class UpProjection:
    def __init__(self, format: str, rows: int, columns: int, data: int, heads: int) -> None: ...
    def attend(
        self,
        q: int,
        q_stride: int,
        plain_dim: int,
        rotary_dim: int,
        type: KvType,
        cache: int,
        block_stride: int,
        token_stride: int,
        page_size: int,
        page_table: int,
        page_table_stride: int,
        query_start: int,
        lengths: int,
        sequences: int,
        scale: float,
        rounded: bool,
        out: int,
        /,
    ) -> None: ...

def index_prologue(
    q: int,
    q_stride: int,
    q_heads: int,
    key: int,
    key_stride: int,
    dim: int,
    rotary_dim: int,
    tokens: int,
    positions: int,
    cos_sin: int,
    norm_weight: int,
    norm_bias: int,
    epsilon: float,
    type: KvType,
    cache: int,
    block_stride: int,
    token_stride: int,
    page_size: int,
    slots: int,
    /,
) -> None: ...
def index_select(
    q: int,
    q_stride: int,
    weights: int,
    heads: int,
    dim: int,
    type: KvType,
    cache: int,
    block_stride: int,
    token_stride: int,
    page_size: int,
    page_table: int,
    page_table_stride: int,
    query_start: int,
    lengths: int,
    sequences: int,
    stride: int,
    selected: int,
    count: int,
    /,
) -> None: ...
def mla_selected(
    q_latent: int,
    latent_token_stride: int,
    latent_head_stride: int,
    latent_dim: int,
    q_rope: int,
    rope_token_stride: int,
    rope_head_stride: int,
    rotary_dim: int,
    tokens: int,
    q_heads: int,
    type: KvType,
    cache: int,
    block_stride: int,
    token_stride: int,
    page_size: int,
    page_table: int,
    page_table_stride: int,
    query_start: int,
    sequences: int,
    selected: int,
    count: int,
    scale: float,
    rounded: bool,
    out: int,
    lse: int,
    /,
) -> None: ...
def compress(
    values: int,
    values_block: int,
    values_token: int,
    gates: int,
    gates_block: int,
    gates_token: int,
    page_size: int,
    type: KvType,
    page_table: int,
    page_table_stride: int,
    query_start: int,
    lengths: int,
    rows: int,
    bias: int,
    stride: int,
    columns: int,
    norm: int,
    width: int,
    epsilon: float,
    cos_sin: int,
    rotary: int,
    entry_type: KvType,
    entries: int,
    entries_block: int,
    entries_token: int,
    entries_page: int,
    slots: int,
    overlapping: bool,
    /,
) -> None: ...
def write_entries(
    x: int,
    x_stride: int,
    tokens: int,
    width: int,
    type: KvType,
    cache: int,
    block_stride: int,
    token_stride: int,
    page_size: int,
    slots: int,
    /,
) -> None: ...
def rotary(
    x: int,
    token_stride: int,
    head_stride: int,
    heads: int,
    tokens: int,
    positions: int,
    position_stride: int,
    axes: int,
    cos_sin: int,
    rotary_dim: int,
    neighbours: bool,
    /,
) -> None: ...
def apply_sinks(x: int, lse: int, sinks: int, tokens: int, heads: int, width: int, /) -> None: ...
def hyper_begin(x: int, streams: int, tokens: int, count: int, width: int, /) -> None: ...
def hyper_mix(
    streams: int,
    tokens: int,
    count: int,
    width: int,
    projection: int,
    base: int,
    scale: int,
    epsilon: float,
    floor: float,
    rounds: int,
    post: int,
    comb: int,
    out: int,
    /,
) -> None: ...
def hyper_collapse(
    streams: int,
    tokens: int,
    count: int,
    width: int,
    projection: int,
    base: int,
    scale: int,
    epsilon: float,
    floor: float,
    out: int,
    /,
) -> None: ...
def hyper_spread(x: int, post: int, comb: int, streams: int, tokens: int, count: int, width: int, /) -> None: ...
def merge_partials(partials: int, partial_lse: int, parts: int, rows: int, dim: int, out: int, lse: int, /) -> None: ...
def sample(
    logits: int,
    rows: int,
    size: int,
    temperature: int,
    top_k: int,
    top_p: int,
    min_p: int,
    seed: int,
    choice: int,
    position: int,
    out: int,
    /,
) -> None: ...
def apply_penalties(
    logits: int,
    rows: int,
    size: int,
    counts: int,
    prompt_mask: int,
    pool_rows: int,
    presence: int,
    frequency: int,
    repetition: int,
    /,
) -> None: ...
def apply_token_mask(logits: int, rows: int, size: int, mask: int, mask_rows: int, /) -> None: ...
def logprobs(
    logits: int, rows: int, size: int, ids: int, k: int, out: int, top_ids: int, top_logprobs: int, /
) -> None: ...
def has_nan(logits: int, rows: int, size: int, out: int, /) -> None: ...
