"""What can keep a request from its answer. The server maps these to HTTP; offline users see them as they are."""


class FrontendError(Exception):
    """Base of all; ``code`` is a stable word for programs, ``param`` the request field at fault or ""."""

    def __init__(self, message: str, code: str, param: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class RequestRefused(FrontendError):
    """The request itself is at fault; sending it again will not help."""


def prompt_name(field: str) -> str:
    """What a prompt is called in the text of an error; ``field`` is the caller's name for it."""
    return "the prompt" if field == "prompt" else field


class ContextLengthExceeded(RequestRefused):
    """Prompt and requested tokens do not fit into the context.

    Clients that shorten a conversation by themselves know this error by the message's first six words (litellm, and
    with it aider): it says them as other servers do.
    """

    def __init__(
        self, max_model_len: int, prompt_tokens: int, wanted_tokens: int | None, param: str, *, at_least: bool = False
    ) -> None:
        """``at_least``: the prompt has more than ``prompt_tokens``; they were not counted to the end."""
        asked = (
            f"that leaves no room for an answer to a prompt of {'more than ' if at_least else ''}{prompt_tokens} tokens"
            if wanted_tokens is None
            else f"{prompt_tokens + wanted_tokens} tokens were asked for "
            f"({prompt_tokens} in the prompt, {wanted_tokens} for the answer)"
        )
        super().__init__(
            f"this model's maximum context length is {max_model_len} tokens: {asked}; shorten the prompt or the answer",
            "context_length_exceeded",
            param,
        )
        self.max_model_len = max_model_len
        self.prompt_tokens = prompt_tokens


class ReaderTooSlow(FrontendError):
    """More of an answer waits for its reader than is kept; the engine stopped working on it."""


class EngineUnavailable(FrontendError):
    """The engine takes no requests now: it is starting, draining, or gone. Trying again later may help."""


class LineFull(FrontendError):
    """Too many choices wait already; ``retry_after_s`` estimates when there is room."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, "queue_full")
        self.retry_after_s = retry_after_s


class DeadlineExceeded(FrontendError):
    """The request took longer than it was given; the engine stopped working on it."""


class EngineFailed(FrontendError):
    """The engine gave up on a request that it had accepted."""
