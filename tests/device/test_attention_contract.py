"""Walks every attention backend: no defaults, no keyword catch-alls, no second way to prepare a decode."""

import ast
import inspect
from types import ModuleType

import pytest

from tokenspeed.device.attention import backends, paged_rows
from tokenspeed.device.attention.backend import AttentionBackend
from tokenspeed.layers.batch import Attention

NAMES = backends.backend_names()
DECODE = ["self", "bs", "actual_bs", "req_pool_indices", "seq_lens"]
DECODE_KEYWORDS = ["forward_mode", "block_tables", "for_graph_replay"]
EXTEND = ["self", "bs", "req_pool_indices"]
EXTEND_KEYWORDS = [
    "forward_mode",
    "block_tables",
    "extend_seq_lens",
    "extend_seq_lens_cpu",
    "extend_prefix_lens",
    "extend_prefix_lens_cpu",
    "extend_with_prefix",
    "query_shard",
]


def module(name: str) -> ModuleType:
    return inspect.getmodule(backends.backend_class(name))  # type: ignore[return-value]


def test_there_is_a_backend_and_unknown_ones_are_refused() -> None:
    assert "paged_gqa" in NAMES
    with pytest.raises(ValueError, match="'flash' does not exist; there are"):
        backends.backend_class("flash")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("method", "positional", "keywords"),
    [("refresh_decode_metadata", DECODE, DECODE_KEYWORDS), ("refresh_extend_metadata", EXTEND, EXTEND_KEYWORDS)],
)
def test_signatures_have_no_defaults_and_no_catch_alls(
    name: str, method: str, positional: list[str], keywords: list[str]
) -> None:
    for owner in (AttentionBackend, backends.backend_class(name)):
        parameters = inspect.signature(getattr(owner, method)).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
        assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == keywords
        assert len(parameters) == len(positional) + len(keywords)
        assert all(p.default is p.empty for p in parameters)


@pytest.mark.parametrize("name", NAMES)
def test_decode_is_prepared_in_one_place_and_without_a_second_arm(name: str) -> None:
    backend = backends.backend_class(name)
    public = {method for method, _ in inspect.getmembers(backend, inspect.isfunction) if not method.startswith("_")}
    assert {"refresh_decode_metadata", "refresh_extend_metadata"} <= public
    asked = {member for member in vars(Attention) if not member.startswith("_")}
    assert public - {"refresh_decode_metadata", "refresh_extend_metadata"} <= asked
    for source in (module(name), paged_rows):
        for node in ast.walk(ast.parse(inspect.getsource(source))):
            if isinstance(node, ast.If | ast.IfExp | ast.Match):
                test = node.subject if isinstance(node, ast.Match) else node.test
                words = {inner.id for inner in ast.walk(test) if isinstance(inner, ast.Name)}
                assert not words & {"for_graph_replay", "forward_mode"}, f"line {node.lineno} branches on {words}"


@pytest.mark.parametrize("name", NAMES)
def test_constructors_take_what_the_builder_gives(name: str) -> None:
    parameters = inspect.signature(backends.backend_class(name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == ["kernels"]
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        "group", "spec", "caches", "max_rows", "table_slots",
    }  # fmt: skip
    assert all(p.default is p.empty for p in parameters)
