"""What a request may give where it can name several prompts."""

from collections.abc import Sequence

from tokenspeed.server.errors import ApiError


def prompts_of(given: str | Sequence[str | int | list[int]], field: str) -> list[str | list[int]]:
    """The prompts in ``field``, which is a string, a list of token ids, or a list of either; ApiError (400) else."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, f"{field} is an empty list", code="invalid_value", param=field)
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [ids]
    prompts = [item for item in given if not isinstance(item, int)]
    if ids or len({type(item) for item in prompts}) > 1:
        raise ApiError(
            400, f"{field} mixes strings, token ids and lists of token ids", code="invalid_value", param=field
        )
    return prompts
