"""The built-in tokenizer of random models with a small vocabulary: one token a byte, and a few special tokens."""

from tokenspeed.frontend.tokenizer import TokenizerError, without_doubled_begin

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
FIRST_SPECIAL = 256
SMALLEST_VOCABULARY = FIRST_SPECIAL + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ByteTokenizer:
    """Ids 0 to 255 are bytes, from 256 on the special tokens: the first begins a text, the second ends it.

    A model's vocabulary may be larger: the ids beyond are no text, and a model with random weights draws them all the
    time; they are shown as ``⟨id⟩`` so that a stream has something to see.
    """

    def __init__(self, vocab_size: int = SMALLEST_VOCABULARY, special_tokens: tuple[str, ...] = SPECIAL_TOKENS) -> None:
        """Raises TokenizerError where the vocabulary cannot hold the bytes and the special tokens."""
        least = FIRST_SPECIAL + len(special_tokens)
        if vocab_size < least:
            raise TokenizerError(
                f"a random model's vocab_size is {vocab_size}; the byte tokenizer needs at least {least}"
            )
        self._vocab_size = vocab_size
        self._special = special_tokens
        self._ids = {name: FIRST_SPECIAL + at for at, name in enumerate(special_tokens)}
        self.bos_token, self.eos_token = special_tokens[:2]
        self.bos_token_id: int | None = FIRST_SPECIAL
        self.special_ids = frozenset(self._ids.values())

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = [FIRST_SPECIAL] if add_special_tokens else []
        while text:
            found = [(text.index(name), name) for name in self._special if name in text]
            at, name = min(found, default=(len(text), ""))
            ids.extend(text[:at].encode())
            if name:
                ids.append(self._ids[name])
            text = text[at + len(name) :]
        return without_doubled_begin(ids, FIRST_SPECIAL)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if 0 <= token_id < FIRST_SPECIAL else self.token_name(token_id).encode()

    def token_name(self, token_id: int) -> str:
        if 0 <= token_id < FIRST_SPECIAL:
            return f"<0x{token_id:02X}>"
        if token_id < FIRST_SPECIAL + len(self._special):
            return self._special[token_id - FIRST_SPECIAL] if token_id >= 0 else ""
        return f"⟨{token_id}⟩" if token_id < self._vocab_size else ""
